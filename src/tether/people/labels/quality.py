"""The quality of each annotator; those who click without reading, with reason, evidence and a bound
on false alarms.
"""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Literal

import numpy as np

from tether.core.types import Texts
from tether.people.labels.aggregation import dawid_skene, gold_verdicts
from tether.people.labels.votes import Vote, latest_votes
from tether.stats import holm

NUM_SWEEPS = 30
LEVEL = 0.05
"""The probability with which a crowd of honest people may have anybody accused."""
HONEST = 0.5
"""The part of the usual agreement beyond chance that an honest person reaches."""


@dataclass(frozen=True)
class Share:
    """A count out of a total; `value` is None of nothing. `by_chance` is what the annotator's
    habits alone would give.
    """

    count: int
    total: int
    by_chance: float | None = None

    def __str__(self) -> str:
        return f"{self.value:.0%} of {self.total}" if self.total else "–"

    @classmethod
    def of(cls, flags: Iterable[bool | None]) -> Share:
        """The share of true flags among those that are not None."""
        given = [flag for flag in flags if flag is not None]
        return cls(sum(given), len(given))

    @property
    def value(self) -> float | None:
        return self.count / self.total if self.total else None

    @property
    def beyond_chance(self) -> float | None:
        """Cohen's kappa of what is compared: 1 always equal, 0 as by chance; None where chance is
        certain.
        """
        if self.value is None or self.by_chance is None or self.by_chance > 1 - 1e-12:
            return None
        return (self.value - self.by_chance) / (1 - self.by_chance)


@dataclass(frozen=True, kw_only=True)
class Quality:
    """The figures of one annotator.

    - accuracy: Dawid–Skene's, the probability of the true answer
    - others: the agreement with the others on the same items. Each of them has the weight that his
      own agreement earns, if that is clear.
    - gold: the agreement with known answers
    - left: the share of the left side among decided votes, with the p-value of an exact binomial
      test against one half
    - seconds: the median time
    """

    annotator: str
    num_votes: int
    accuracy: float | None
    others: Share
    gold: Share
    left: Share
    left_p_value: float | None
    seconds: float | None


@dataclass(frozen=True)
class Suspicion:
    """A test that an annotator fails, in words and numbers; `p_value` is adjusted for the number of
    tests.
    """

    annotator: str
    kind: Literal["one_side", "low_agreement", "contrary", "gold"]
    reason: str
    p_value: float
    _: KW_ONLY
    evidence: Quality


def annotator_quality(
    votes: Iterable[Vote],
    *,
    gold: Texts | None = None,
    smoothing: int = 1,
) -> list[Quality]:
    """Every annotator's figures, the best by Dawid–Skene's accuracy first.

    Trap: with few votes accuracy is mostly the prior of `smoothing`; look at `num_votes` before
    thinking ill of anyone.

    Raises:
        DataError, ConfigError: as `dawid_skene`.
    """
    votes = list(votes)
    accuracy = dawid_skene(votes, gold=gold, smoothing=smoothing).accuracy
    quality = [
        replace(one, accuracy=accuracy[one.annotator]) for one in _observed(votes, gold or {})
    ]
    return sorted(quality, key=lambda quality: (-accuracy[quality.annotator], quality.annotator))


def suspicious(
    votes: Iterable[Vote],
    *,
    gold: Texts | None = None,
    min_votes: int = 20,
    side_share: float = 0.7,
) -> list[Suspicion]:
    """Annotators who do not seem to read, the surest first; one who fails several tests has several
    entries.

    - `one_side`: left or right chosen in at least `side_share` of decided votes, and more often
      than random sides explain (exact binomial, two-sided).
    - `low_agreement`: the agreement beyond chance is below half of the usual one, the median of the
      other annotators (exact binomial, one-sided). Below chance, the name is `contrary`.
    - `gold`: the same of questions whose answers are known.

    All p-values are adjusted (`stats.holm`). If every honest annotator
    reaches half of the usual agreement, the probability of any accusation in an honest crowd is
    about 5% at most. People with fewer than `min_votes` are not tested; agreement needs two others.
    Trap: an annotator with only the hardest items agrees less than others. If items are not
    distributed at random, call this for one slice at a time. If most people click at random, the
    test names none of them.
    """
    observed = _observed(list(votes), gold or {})
    agreement = [
        _agreement(one, observed, of, min_votes) for one in observed for of in ("others", "gold")
    ]
    tests = [_one_side(one) for one in observed if one.left.total >= min_votes] + [
        test for test in agreement if test
    ]
    tests = [
        replace(test, p_value=p)
        for test, p in zip(tests, holm([test.p_value for test in tests]), strict=True)
    ]
    habit = {one.annotator for one in observed if _leaning(one)[1] >= side_share * one.left.total}
    suspects = [
        s for s in tests if s.p_value <= LEVEL and (s.kind != "one_side" or s.annotator in habit)
    ]
    return sorted(suspects, key=lambda s: (s.p_value, s.annotator, s.kind))


def _leaning(one: Quality) -> tuple[str, int]:
    """The side that is chosen more often among decided votes, and how often."""
    return max(
        ("left", one.left.count),
        ("right", one.left.total - one.left.count),
        key=lambda side: side[1],
    )


def _one_side(one: Quality) -> Suspicion:
    side, count = _leaning(one)
    reason = (
        f"chose the {side} side in {count} of {one.left.total} decided votes; sides come in "
        "random order, so half is expected"
    )
    return Suspicion(
        one.annotator,
        "one_side",
        reason,
        1.0 if one.left_p_value is None else one.left_p_value,
        evidence=one,
    )


def _agreement(
    one: Quality,
    everyone: Sequence[Quality],
    of: str,
    min_votes: int,
) -> Suspicion | None:
    from scipy.stats import binom

    mine = getattr(one, of)
    rest = [getattr(other, of) for other in everyone if other.annotator != one.annotator]
    usual = [
        share.beyond_chance
        for share in rest
        if share.total >= min_votes and share.beyond_chance is not None
    ]
    if (
        mine.total < min_votes
        or mine.by_chance is None
        or len(usual) < 2
        or (typical := statistics.median(usual)) <= 0
    ):
        return None
    floor = mine.by_chance + HONEST * typical * (1 - mine.by_chance)
    p_value, below = (
        float(binom.cdf(mine.count, mine.total, share)) for share in (floor, mine.by_chance)
    )
    whom = "the known answers" if of == "gold" else "the others where these are clear"
    reason = (
        f"agrees with {whom} in {mine.count} of {mine.total} votes; chance alone gives "
        f"{mine.by_chance * mine.total:.0f}, "
        f"{HONEST:.0%} of what is usual beyond chance {floor * mine.total:.0f}"
    )
    kind = "gold" if of == "gold" else "contrary" if below < 0.01 else "low_agreement"
    return Suspicion(one.annotator, kind, reason, p_value, evidence=one)


def _observed(votes: list[Vote], gold: Texts) -> list[Quality]:
    """Everything but Dawid–Skene's accuracy, by name."""
    truth = gold_verdicts(gold)
    by_item = defaultdict(list)
    by_annotator = defaultdict(list)
    for vote in latest_votes(votes)[0]:
        by_item[vote.item].append(vote)
        by_annotator[vote.annotator].append(vote)
    others = _with_others([vote for votes in by_item.values() for vote in votes if len(votes) > 1])
    return [
        _quality(name, by_annotator[name], others[name], truth) for name in sorted(by_annotator)
    ]


def _with_others(votes: list[Vote]) -> dict[str, Share]:
    """The share of each annotator's votes that are what the others on the same items say, where
    that is clear.

    The label of the others is the posterior of a one-coin model (Dawid and Skene with one accuracy
    a person) from their votes alone. An annotator's items are taken from the clearest down, until
    one more would add more noise than information.
    """
    columns = ([v.annotator for v in votes], [v.item for v in votes], [v.verdict for v in votes])
    (names, person), (items, item), (verdicts, chosen) = (
        np.unique(column, return_inverse=True) for column in columns
    )
    size = max(2, len(verdicts))
    every = np.arange(len(votes))
    accuracy = np.full(len(names), 0.75)
    posterior = np.zeros((0, size))
    for _ in range(NUM_SWEEPS):
        weight = np.log(accuracy * (size - 1) / (1 - accuracy))
        scores = np.zeros((len(items), size))
        np.add.at(scores, (item, chosen), weight[person])
        scores = scores[item]
        scores[every, chosen] -= weight[person]
        posterior = np.exp(scores - scores.max(1, keepdims=True))
        posterior /= posterior.sum(1, keepdims=True)
        right = accuracy[person] * posterior[every, chosen]
        right /= right + (1 - accuracy[person]) / (size - 1) * (1 - posterior[every, chosen])
        # Three imaginary votes of four are right, so that nobody becomes infallible.
        accuracy = (np.bincount(person, right) + 3) / (np.bincount(person) + 4)
    clear = (size * posterior.max(1) - 1) / (size - 1)
    shares: dict[str, Share] = defaultdict(lambda: Share(0, 0))
    for number, name in enumerate(names):
        mine = np.flatnonzero((person == number) & (clear > 1e-9))
        mine = mine[np.argsort(-clear[mine], kind="stable")]
        if len(mine):
            mine = mine[
                : 1 + np.argmax(clear[mine].cumsum() / np.sqrt(np.arange(1, len(mine) + 1)))
            ]
        shares[str(name)] = _share(
            [(str(verdicts[chosen[k]]), str(verdicts[posterior[k].argmax()])) for k in mine],
        )
    return shares


def _quality(
    name: str,
    mine: list[Vote],
    others: Share,
    truth: Texts,
) -> Quality:
    from scipy.stats import binomtest

    left = replace(Share.of(vote.chose_left for vote in mine), by_chance=0.5)
    seconds = [vote.seconds for vote in mine if vote.seconds is not None]
    return Quality(
        annotator=name,
        num_votes=len(mine),
        accuracy=None,
        others=others,
        gold=_share([(vote.verdict, truth[vote.item]) for vote in mine if vote.item in truth]),
        left=left,
        left_p_value=float(binomtest(left.count, left.total).pvalue) if left.total else None,
        seconds=statistics.median(seconds) if seconds else None,
    )


def _share(compared: Sequence[tuple[str, str]]) -> Share:
    mine = Counter(a for a, _ in compared)
    right = Counter(b for _, b in compared)
    total = len(compared)
    by_chance = (
        sum(mine[verdict] * right[verdict] for verdict in mine) / total**2 if total else None
    )
    return Share(sum(a == b for a, b in compared), total, by_chance)
