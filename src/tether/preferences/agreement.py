"""How far those who cast votes agree beyond chance; each figure has an interval, or the reason why it has no value.

Intervals are over items (`stats.share_interval`): annotators stay who they are. Items with the same counts of votes are
interchangeable, so one of each distinct kind is left out in turn, however many items there are.
Of several votes of a person on one item the latest counts here; `self_agreement` is about the others.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from tether.preferences.votes import Coding, Vote, coded, latest_votes
from tether.stats import Spread, jackknife, share_interval

Level = Literal["nominal", "ordinal", "interval"]
LARGEST_DOMAIN = 128
MOST_PARTS = 1000
"""Leave out so many parts of the items in turn at most."""
Array = NDArray[np.float64]


@dataclass(frozen=True)
class Figure:
    """A figure with its interval, what it rests on, and why a part of it is None."""

    value: float | None
    low: float | None
    high: float | None
    num_items: int
    num_votes: int
    reason: str = ""


@dataclass(frozen=True)
class PairOfAnnotators:
    """How two people agree on the items that both judged."""

    first: str
    second: str
    raw: Figure
    kappa: Figure


@dataclass(frozen=True)
class Counts:
    """Distinct rows of an items x values table of votes, and how many items have each; only items with two votes or more."""

    rows: Array
    multiplicity: NDArray[np.int64]
    domain: list[Any]
    empty: str = ""
    """Why there are no rows."""

    @property
    def size(self) -> tuple[int, int]:
        return int(self.multiplicity.sum()), round(float(self.rows.sum(1) @ self.multiplicity)) if len(self.rows) else 0

    @property
    def room(self) -> float:
        """The share of pairs of votes that would disagree by chance."""
        shares = self.multiplicity @ self.rows
        return float(1 - ((shares / shares.sum()) ** 2).sum()) if len(self.rows) else 0.0


Votes = Sequence[Vote] | Counts
"""Votes, or what `tabulated` made of them for several figures."""


def raw_agreement(votes: Votes, *, coding: Coding = "choice", confidence: float = 0.95) -> Figure:
    """The share of all pairs of votes on one item that are equal.

    Equation: `Σ_i Σ_c n_ic (n_ic − 1) / Σ_i n_i (n_i − 1)` with n_ic votes for c on item i.
    Trap: it does not know chance. Two people who always say "first" agree in all; an item with many votes counts for more.
    """
    counts = tabulated(votes, coding)
    equal, pairs = (counts.rows * (counts.rows - 1)).sum(1), counts.rows.sum(1) * (counts.rows.sum(1) - 1)
    return _figure(counts, lambda weights: (weights @ equal) / (weights @ pairs), 1.0, confidence)


def fleiss_kappa(votes: Votes, *, coding: Coding = "choice", confidence: float = 0.95) -> Figure:
    """Agreement beyond what the shares of the choices would give, by Fleiss.

    Equation: `(P̄ − Σ_c p_c²) / (1 − Σ_c p_c²)`; P̄ is the mean over items of the share of equal pairs, p_c that of n_ic / n_i.
    Paper: Fleiss 1971, https://doi.org/10.1037/h0031619, for a constant number of votes an item. Where numbers differ, each item
    still weighs the same in both terms (Gwet 2014), and items with one vote, which say nothing of agreement, are in neither.
    Trap: with a rare choice kappa is low though nearly all agree; read it beside the raw share.
    """
    counts = tabulated(votes, coding)
    totals = counts.rows.sum(1, keepdims=True)
    agreed, shares = (counts.rows * (counts.rows - 1)).sum(1) / (totals * (totals - 1))[:, 0], counts.rows / totals

    def statistic(weights: Array) -> Array:
        by_chance = ((weights @ shares / weights.sum(1, keepdims=True)) ** 2).sum(1)
        return _beyond(weights @ agreed / weights.sum(1), by_chance)

    return _figure(counts, statistic, counts.room, confidence)


def krippendorff_alpha(
    votes: Votes, level: Level = "nominal", *, coding: Coding | None = None, confidence: float = 0.95
) -> Figure:
    """One less the disagreement seen over the disagreement expected, with any number of votes an item.

    Equation: `1 − (n − 1) Σ o_ck δ_ck / Σ n_c n_k δ_ck` over the coincidence matrix o; δ is unequal (nominal), the squared number
    of votes between (ordinal) or the squared difference (interval).
    Paper: Krippendorff 2011, https://repository.upenn.edu/handle/20.500.14332/2089.
    Shapes: nominal compares choices by default, the other levels strengths: -1, 0, 1 where only choices were made.
    Trap: ordinal and interval forgive neighbours, so they are not comparable with nominal.
    """
    counts = tabulated(votes, coding or ("choice" if level == "nominal" else "strength"))
    size, values = len(counts.domain), np.array([0.0 if level == "nominal" else v for v in counts.domain])
    scaled = counts.rows / (counts.rows.sum(1, keepdims=True) - 1)

    def statistic(weights: Array) -> Array:
        observed = (weights[:, None, :] * scaled.T) @ counts.rows - (weights @ scaled)[:, :, None] * np.eye(size)
        margins = observed.sum(2)
        # Between two values of an ordinal scale lie all votes from the middle of the one to the middle of the other.
        places = margins.cumsum(1) - margins / 2 if level == "ordinal" else np.broadcast_to(values, margins.shape)
        delta = 1 - np.eye(size) if level == "nominal" else (places[:, :, None] - places[:, None, :]) ** 2
        expected = (margins[:, :, None] * margins[:, None, :] * delta).sum((1, 2)) / (margins.sum(1) - 1)
        return _beyond(expected - (observed * delta).sum((1, 2)), np.zeros(1), expected)

    return _figure(counts, statistic, counts.room, confidence)


def cohen_kappas(
    votes: Sequence[Vote], *, coding: Coding = "choice", min_items: int = 1, confidence: float = 0.95
) -> list[PairOfAnnotators]:
    """Cohen's kappa of every two annotators with `min_items` items in common, sorted by their names.

    Equation: `(p_o − p_e) / (1 − p_e)`; p_e is the sum over choices of the product of the two persons' own shares.
    Paper: Cohen 1960, https://doi.org/10.1177/001316446002000104.
    Trap: among many pairs some are low by chance alone; look at the interval, and at `quality.suspicious` for tests.
    """
    kept, values, _ = coded(votes, coding)
    by_item: dict[str, list[tuple[str, Any]]] = defaultdict(list)
    for vote, value in zip(kept, values, strict=True):
        by_item[vote.item].append((vote.annotator, value))
    cells: dict[tuple[str, str], Counter[tuple[Any, Any]]] = defaultdict(Counter)
    for group in by_item.values():
        for (first, x), (second, y) in itertools.combinations(group, 2):
            cells[first, second][x, y] += 1
    enough = sorted((pair, table) for pair, table in cells.items() if table.total() >= min_items)
    return [PairOfAnnotators(*pair, *_cohen(table, confidence)) for pair, table in enough]


def self_agreement(votes: Sequence[Vote], *, confidence: float = 0.95) -> Figure:
    """How often people who voted on an item again chose the same; its interval is over items.

    Trap: a second vote may be a correction, so this is a lower bound of how steady people are.
    """
    _, repeats = latest_votes(votes)
    by_item: dict[str, list[bool]] = defaultdict(list)
    for before, after in repeats:
        by_item[before.item].append(before.choice == after.choice)
    table = np.array([(sum(same), len(same) - sum(same)) for same in by_item.values()], dtype=np.float64).reshape(-1, 2)
    rows, multiplicity = np.unique(table, axis=0, return_counts=True)
    counts = Counts(rows, multiplicity, [], "" if repeats else "nobody voted twice on an item")
    return _figure(counts, lambda weights: (weights @ rows[:, 0]) / (weights @ rows.sum(1)), 1.0, confidence)


def agreement_report(votes: Sequence[Vote], *, windows: int = 0, min_items: int = 1, confidence: float = 0.95) -> dict[str, Any]:
    """All figures as plain JSON values: overall, of every two annotators, of every slice, and over time.

    `windows` parts have equal numbers of the items with two votes, in the order in which they were last voted on; there are none
    where all votes have one time. A missing number is None and has a `reason`.

    Raises:
        DataError: as `latest_votes`.
    """
    kept, repeats = latest_votes(votes)
    per_item = Counter(vote.item for vote in kept)
    slices: dict[str, dict[str, list[Vote]]] = defaultdict(lambda: defaultdict(list))
    for vote in kept:
        for name, value in vote.slices.items():
            slices[name][value].append(vote)
    return {
        "num_votes": len(kept),
        "num_items": len(per_item),
        "num_annotators": len({vote.annotator for vote in kept}),
        "items_by_votes": {str(number): items for number, items in sorted(Counter(per_item.values()).items())},
        "num_repeats": len(repeats),
        "overall": _summary(kept, confidence),
        "self": asdict(self_agreement(votes, confidence=confidence)),
        "pairs": [asdict(pair) for pair in cohen_kappas(kept, min_items=min_items, confidence=confidence)],
        "slices": {
            name: {value: _summary(part, confidence) for value, part in sorted(parts.items())}
            for name, parts in sorted(slices.items())
        },
        "windows": [{"from": low, "to": high, **_summary(part, confidence)} for low, high, part in _windows(kept, windows)],
    }


def _summary(votes: Sequence[Vote], confidence: float) -> dict[str, Any]:
    choices, verdicts, strengths = (tabulated(votes, coding) for coding in ("choice", "verdict", "strength"))
    figures = {
        "raw": raw_agreement(choices, confidence=confidence),
        "raw_verdict": raw_agreement(verdicts, confidence=confidence),
        "raw_strength": raw_agreement(strengths, confidence=confidence),
        "fleiss_kappa": fleiss_kappa(choices, confidence=confidence),
        "alpha_nominal": krippendorff_alpha(choices, confidence=confidence),
        "alpha_ordinal": krippendorff_alpha(strengths, "ordinal", confidence=confidence),
        "alpha_interval": krippendorff_alpha(strengths, "interval", confidence=confidence),
    }
    return {name: asdict(figure) for name, figure in figures.items()}


def _windows(votes: Sequence[Vote], number: int) -> list[tuple[float, float, list[Vote]]]:
    """First and last time, and votes, of each part; an item's time is that of its last vote. None where no times are known."""
    by_item: dict[str, list[Vote]] = defaultdict(list)
    for vote in votes:
        by_item[vote.item].append(vote)
    shared = sorted((max(v.at for v in group), item) for item, group in by_item.items() if len(group) > 1)
    if not number or len({at for at, _ in shared}) < 2:
        return []
    cuts = [round(k * len(shared) / number) for k in range(number + 1)]
    parts = [shared[low:high] for low, high in itertools.pairwise(cuts) if low < high]
    return [(part[0][0], part[-1][0], [vote for _, item in part for vote in by_item[item]]) for part in parts]


def tabulated(votes: Votes, coding: Coding = "choice") -> Counts:
    """How often each value was given to each item; of votes that are tabulated already, themselves."""
    if isinstance(votes, Counts):
        return votes
    kept, values, empty = coded(votes, coding)
    domain = sorted(set(values))
    if len(domain) > LARGEST_DOMAIN:
        return Counts(np.zeros((0, 0)), np.zeros(0, np.int64), [], f"more than {LARGEST_DOMAIN} different values: round them")
    place, items = {value: number for number, value in enumerate(domain)}, {}
    rows = [items.setdefault(vote.item, len(items)) for vote in kept]
    table = np.zeros((len(items), len(domain)))
    np.add.at(table, (rows, [place[value] for value in values]), 1)
    distinct, multiplicity = np.unique(table[table.sum(1) > 1], axis=0, return_counts=True)
    return Counts(distinct, multiplicity, domain, "no item has the votes of two annotators" if items else empty)


def _cohen(table: Counter[tuple[Any, Any]], confidence: float) -> tuple[Figure, Figure]:
    """Raw agreement and kappa of two people from how often they said what."""
    domain = sorted({value for pair in table for value in pair})
    cells = sorted(table)
    said = np.array([[[value == side for value in domain] for side in cell] for cell in cells], dtype=np.float64)
    counts = Counts(said.sum(1), np.array([table[cell] for cell in cells]), domain)
    equal = np.array([x == y for x, y in cells], dtype=np.float64)

    def chance(weights: Array) -> Array:
        return ((weights @ said[:, 0]) * (weights @ said[:, 1])).sum(1) / weights.sum(1) ** 2

    left = 1.0 - float(chance(counts.multiplicity[None].astype(np.float64))[0])
    kappa = _figure(counts, lambda w: _beyond(w @ equal / w.sum(1), chance(w)), left, confidence)
    return _figure(counts, lambda w: w @ equal / w.sum(1), 1.0, confidence), kappa


def _beyond(agreed: Array, by_chance: Array, most: Array | float = 1.0) -> Array:
    """(agreed − chance) / (most − chance), NaN where chance alone explains all."""
    room = np.broadcast_to(most - by_chance, agreed.shape)
    return np.divide(agreed - by_chance, room, out=np.full(agreed.shape, np.nan), where=room > 1e-12)


def _figure(counts: Counts, statistic: Callable[[Array], Array], room: float, confidence: float) -> Figure:
    """A statistic of item weights with its interval; `room` is the share of pairs that would disagree by chance."""
    number, votes = counts.size
    if not len(counts.rows):
        return Figure(None, None, None, 0, 0, counts.empty)
    value = float(statistic(counts.multiplicity[None].astype(np.float64))[0])
    if math.isnan(value):
        return Figure(None, None, None, number, votes, "only one value was ever given, so agreement by chance is certain")
    if abs(value - 1) < 1e-12:
        spread, reason = Spread(0.0, number, number), "all agree on every item; the lower bound is Wilson's of the raw share"
    else:
        spread, reason = _spread(counts, statistic) if number > 1 else Spread(0.0, 1, 1.0), ""
        if math.isnan(spread.error):
            return Figure(value, None, None, number, votes, "too few items: without one of them only one value is left")
        if spread.error < 1e-12:
            return Figure(value, None, None, number, votes, "all items are alike, so that leaving one out shows no spread")
    # 1 less the coefficient, times the room, is a share of pairs that disagree; the interval is made of that.
    share = max(1 - room * (1 - value), 0.0)
    low, high = share_interval(share, spread._replace(error=room * spread.error), confidence)
    return Figure(value, max(-1.0, 1 - (1 - low) / room), 1 - (1 - high) / room, number, votes, reason)


def _spread(counts: Counts, statistic: Callable[[Array], Array]) -> Spread:
    """One item of each distinct kind is left out in turn; of more than a thousand kinds, a thousandth of them at a time."""
    kinds, weights = len(counts.rows), counts.multiplicity.astype(np.float64)
    parts = min(kinds, MOST_PARTS)
    part = np.arange(kinds) if parts == kinds else np.random.default_rng(0).permutation(kinds) % parts
    left_out = np.ones(kinds) if parts == kinds else weights
    # Bounded memory: alpha holds a matrix of rows x values for each part.
    at_once = max(1, 4_000_000 // counts.rows.size)
    pieces = [np.arange(start, min(start + at_once, parts)) for start in range(0, parts, at_once)]
    without = np.concatenate([statistic(weights - left_out * (part == piece[:, None])) for piece in pieces])
    if parts == kinds:
        return jackknife(without, repeats=weights)
    return jackknife(without)._replace(groups=counts.size[0], equal=float(parts))
