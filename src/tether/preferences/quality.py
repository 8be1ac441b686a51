"""How good each annotator is, and who clicks without reading: named with the reason, the evidence and a bound on false alarms."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from tether.preferences.aggregation import dawid_skene, verdict_of
from tether.preferences.votes import Vote, latest_votes

NUM_SWEEPS = 30


@dataclass(frozen=True)
class Share:
    """So many of so many; `value` is None of nothing. `by_chance` is what the annotator's habits alone would give."""

    count: int
    total: int
    by_chance: float | None = None

    @property
    def value(self) -> float | None:
        return self.count / self.total if self.total else None

    @property
    def beyond_chance(self) -> float | None:
        """Cohen's kappa of what is compared: 1 always equal, 0 as by chance; None where chance is certain."""
        if self.value is None or self.by_chance is None or self.by_chance > 1 - 1e-12:
            return None
        return (self.value - self.by_chance) / (1 - self.by_chance)


@dataclass(frozen=True)
class Quality:
    """What is known of one annotator.

    `accuracy` is Dawid–Skene's, the probability of saying what is true; `others` the agreement with what the others say of the
    same items, each with the weight that his own agreement earns, where that is clear; `gold` that with known answers; `left` how
    often the left side was chosen among decided votes, with the p-value of an exact binomial test against one half; `favourite`
    the choice made most often; `seconds` the median time, and `pace` the median ratio to the others' median on the same item
    (below 1: faster).
    """

    annotator: str
    num_votes: int
    accuracy: float | None
    others: Share
    gold: Share
    left: Share
    left_p_value: float | None
    favourite: str
    favourite_share: float
    seconds: float | None
    pace: float | None


@dataclass(frozen=True)
class Suspicion:
    """A test that an annotator fails, in words and numbers; `p_value` is adjusted for the number of tests."""

    annotator: str
    kind: Literal["one_side", "low_agreement", "contrary", "gold"]
    reason: str
    p_value: float
    evidence: Quality


def annotator_quality(votes: Iterable[Vote], *, gold: Mapping[str, str] | None = None, smoothing: int = 1) -> list[Quality]:
    """Every annotator's figures, the best by Dawid–Skene's accuracy first.

    Trap: with few votes accuracy is mostly the prior of `smoothing`; look at `num_votes` before thinking ill of anyone.

    Raises:
        DataError, ConfigError: as `dawid_skene`.
    """
    votes = list(votes)
    accuracy = dawid_skene(votes, gold=gold, smoothing=smoothing).accuracy
    found = [replace(quality, accuracy=accuracy[quality.annotator]) for quality in _observed(votes, gold or {})]
    return sorted(found, key=lambda quality: (-accuracy[quality.annotator], quality.annotator))


def suspicious(
    votes: Iterable[Vote],
    *,
    gold: Mapping[str, str] | None = None,
    level: float = 0.05,
    min_votes: int = 20,
    fraction: float = 0.5,
    side_share: float = 0.7,
) -> list[Suspicion]:
    """Annotators who do not seem to read, the surest first; one who fails several tests has several entries.

    - `one_side`: left or right chosen in at least `side_share` of decided votes, and more often than random sides explain (exact
      binomial, two-sided).
    - `low_agreement`: agrees with the others less than `fraction` of what is usual beyond chance (the median of the other
      annotators) would give (exact binomial, one-sided); `contrary` when it is even below chance.
    - `gold`: the same of questions whose answers are known.

    All p-values are Holm's (1979, https://www.jstor.org/stable/4615733): as long as every honest annotator reaches `fraction` of
    the usual agreement, a crowd of honest people has anybody accused with a probability of about `level` at most. Nobody is
    tested on fewer than `min_votes`, and agreement only where two others are.
    Trap: an annotator who gets only the hardest items agrees less than others do; call this on a slice at a time if items are not
    given out at random. Where most click at random nobody stands out, and nobody is named.
    """
    observed = _observed(list(votes), gold or {})
    tests: list[tuple[float, Suspicion | None]] = []
    for one in observed:
        if one.left.total >= min_votes:
            tests.append(_one_side(one, side_share))
        for kind in ("low_agreement", "gold"):
            if (test := _agreement(one, observed, kind, min_votes, fraction)) is not None:
                tests.append(test)
    adjusted = holm([p_value for p_value, _ in tests])
    found = [replace(s, p_value=p) for p, (_, s) in zip(adjusted, tests, strict=True) if s is not None and p <= level]
    return sorted(found, key=lambda s: (s.p_value, s.annotator, s.kind))


def holm(p_values: Sequence[float]) -> list[float]:
    """The p-values, adjusted so that rejecting those below a level errs at all with at most that probability (Holm 1979)."""
    adjusted, highest = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=lambda k: p_values[k])):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = highest
    return adjusted


def _one_side(one: Quality, side_share: float) -> tuple[float, Suspicion | None]:
    total = one.left.total
    side, count = max(("left", one.left.count), ("right", total - one.left.count), key=lambda pair: pair[1])
    reason = f"chose the {side} side in {count} of {total} decided votes; sides come in random order, so half is expected"
    p_value = 1.0 if one.left_p_value is None else one.left_p_value
    return p_value, Suspicion(one.annotator, "one_side", reason, p_value, one) if count >= side_share * total else None


def _agreement(
    one: Quality, everyone: Sequence[Quality], kind: str, min_votes: int, fraction: float
) -> tuple[float, Suspicion | None] | None:
    from scipy.stats import binom

    share_of = (lambda q: q.gold) if kind == "gold" else (lambda q: q.others)
    mine, rest = share_of(one), [share_of(q) for q in everyone if q.annotator != one.annotator]
    usual = [s.beyond_chance for s in rest if s.total >= min_votes and s.beyond_chance is not None]
    if mine.total < min_votes or mine.by_chance is None or len(usual) < 2 or (typical := statistics.median(usual)) <= 0:
        return None
    floor = mine.by_chance + fraction * typical * (1 - mine.by_chance)
    p_value = float(binom.cdf(mine.count, mine.total, floor))
    below = float(binom.cdf(mine.count, mine.total, mine.by_chance)) < 0.01
    whom = "the known answers" if kind == "gold" else "the others where these are clear"
    reason = (
        f"agrees with {whom} in {mine.count} of {mine.total} votes; chance alone gives {mine.by_chance * mine.total:.0f}, "
        f"{fraction:.0%} of what is usual beyond chance {floor * mine.total:.0f}"
    )
    named: Literal["gold", "contrary", "low_agreement"] = "gold" if kind == "gold" else "contrary" if below else "low_agreement"
    return p_value, Suspicion(one.annotator, named, reason, p_value, one)


def _observed(votes: list[Vote], gold: Mapping[str, str]) -> list[Quality]:
    """Everything but Dawid–Skene's accuracy, by name."""
    known = {item: verdict_of(item, answer) for item, answer in gold.items()}
    by_item, by_annotator = defaultdict(list), defaultdict(list)
    for vote in latest_votes(votes)[0]:
        by_item[vote.item].append(vote)
        by_annotator[vote.annotator].append(vote)
    others = _with_others([vote for votes in by_item.values() for vote in votes if len(votes) > 1])
    return [_quality(name, by_annotator[name], others[name], by_item, known) for name in sorted(by_annotator)]


def _with_others(votes: list[Vote]) -> dict[str, Share]:
    """How often each annotator says what the others on the same items say, where that is clear.

    What the others say is the posterior of a one-coin model (Dawid and Skene with one accuracy a person) from their votes alone.
    An annotator's items are taken from the clearest down to where another one would add more noise than it tells.
    """
    people, items, verdicts = (
        np.unique(names, return_inverse=True)
        for names in ([v.annotator for v in votes], [v.item for v in votes], [v.verdict for v in votes])
    )
    names, person, item, said = people[0], people[1], items[1], verdicts[1]
    size, every = max(2, len(verdicts[0])), np.arange(len(votes))
    accuracy, posterior = np.full(len(names), 0.75), np.zeros((0, size))
    for _ in range(NUM_SWEEPS):
        weight = np.log(accuracy * (size - 1) / (1 - accuracy))
        scores = np.zeros((len(items[0]), size))
        np.add.at(scores, (item, said), weight[person])
        scores = scores[item]
        scores[every, said] -= weight[person]
        posterior = np.exp(scores - scores.max(1, keepdims=True))
        posterior /= posterior.sum(1, keepdims=True)
        right = accuracy[person] * posterior[every, said]
        right /= right + (1 - accuracy[person]) / (size - 1) * (1 - posterior[every, said])
        # Three imaginary votes of four are right, so that nobody becomes infallible.
        accuracy = (np.bincount(person, right) + 3) / (np.bincount(person) + 4)
    clear = (size * posterior.max(1) - 1) / (size - 1)
    shares: dict[str, Share] = defaultdict(lambda: Share(0, 0))
    for number, name in enumerate(names):
        mine = np.flatnonzero((person == number) & (clear > 1e-9))
        mine = mine[np.argsort(-clear[mine], kind="stable")]
        if len(mine):
            mine = mine[: 1 + np.argmax(clear[mine].cumsum() / np.sqrt(np.arange(1, len(mine) + 1)))]
        kept = [(str(verdicts[0][said[k]]), str(verdicts[0][posterior[k].argmax()])) for k in mine]
        shares[str(name)] = _share(kept)
    return shares


def _quality(name: str, mine: list[Vote], others: Share, by_item: Mapping[str, list[Vote]], known: Mapping[str, str]) -> Quality:
    from scipy.stats import binomtest

    paces = []
    for vote in mine:
        times = [other.seconds for other in by_item[vote.item] if other.annotator != name and other.seconds]
        if vote.seconds is not None and times:
            paces.append(vote.seconds / statistics.median(times))
    sides = [vote.chose_left for vote in mine if vote.chose_left is not None]
    left, seconds = Share(sum(sides), len(sides), 0.5), [vote.seconds for vote in mine if vote.seconds is not None]
    favourite, count = min(Counter(vote.choice for vote in mine).items(), key=lambda pair: (-pair[1], pair[0]))
    return Quality(
        annotator=name,
        num_votes=len(mine),
        accuracy=None,
        others=others,
        gold=_share([(vote.verdict, known[vote.item]) for vote in mine if vote.item in known]),
        left=left,
        left_p_value=float(binomtest(left.count, left.total).pvalue) if left.total else None,
        favourite=favourite,
        favourite_share=count / len(mine),
        seconds=statistics.median(seconds) if seconds else None,
        pace=statistics.median(paces) if paces else None,
    )


def _share(compared: Sequence[tuple[str, str]]) -> Share:
    said, right, total = Counter(a for a, _ in compared), Counter(b for _, b in compared), len(compared)
    by_chance = sum(said[verdict] * right[verdict] for verdict in said) / total**2 if total else None
    return Share(sum(a == b for a, b in compared), total, by_chance)
