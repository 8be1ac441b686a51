"""Agreement beyond chance among those who cast votes; each figure has an interval, or the reason
why it has no value.

Intervals are over items (`stats.share_interval`; for the raw share of one pair of votes each
`stats.trials_interval`): annotators stay who they are. Items with the same counts of votes are
interchangeable, so one of each distinct kind is left out in turn, however many items there are. Of
several votes of a person on one item the latest counts here; `self_agreement` is about the others.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import KW_ONLY, asdict, dataclass
from functools import partial
from typing import Any, Literal

import numpy as np

from tether.core.types import Json
from tether.people.labels.votes import Coding, Vote, coded, latest_votes
from tether.stats import (
    TOO_FEW,
    Array,
    Influence,
    jackknife,
    share_interval,
    trials_interval,
)
from tether.stats.means import FEWEST_GROUPS

Level = Literal["nominal", "ordinal", "interval"]
LARGEST_DOMAIN = 128
ALIKE = f"{TOO_FEW} items differ: leaving one out shows no spread"


@dataclass(frozen=True)
class Coefficient:
    """A figure with its interval, what it rests on, and why a part of it is None."""

    value: float | None
    low: float | None
    high: float | None
    _: KW_ONLY
    num_items: int
    num_votes: int
    reason: str = ""


@dataclass(frozen=True)
class PairOfAnnotators:
    """The agreement of two people on the items that both judged."""

    first: str
    second: str
    raw: Coefficient
    kappa: Coefficient


@dataclass(frozen=True)
class Table:
    """Distinct kinds of items with two votes or more: pairs of their votes are those of `first`
    with those of `second`.

    - first, second: (kinds, values), the number of votes for each value. If both are one table, no
      vote is paired with itself.
    - multiplicity: (kinds,), the number of items of the kind
    - votes: (kinds,), the number of votes of each item
    """

    first: Array
    second: Array
    multiplicity: Array
    votes: Array
    _: KW_ONLY
    domain: Sequence[object]
    empty: str = ""
    """The reason why there are no kinds."""

    def coincidences(self, kind: int) -> Array:
        """Number of times that each value occurs beside each other one on an item of this kind:
        (values, values).
        """
        met = np.outer(self.first[kind], self.second[kind])
        return met - np.diag(self.first[kind]) if self.first is self.second else met


Votes = Sequence[Vote] | Table
"""Votes, or what `tabulated` made of them for several figures."""


def raw_agreement(votes: Votes, *, coding: Coding = "choice") -> Coefficient:
    """The share of all pairs of votes on one item that are equal.

    Equation: `Σ_i Σ_c n_ic (n_ic − 1) / Σ_i n_i (n_i − 1)` with n_ic votes for c on item i.
    Trap: it does not know chance. Two people who always say "first" agree in all; an item with many
        votes counts for more.
    """
    return _figure(tabulated(votes, coding), chance=False)


def fleiss_kappa(votes: Votes, *, coding: Coding = "choice") -> Coefficient:
    """Agreement beyond what the shares of the choices would give, by Fleiss.

    Equation: `(P̄ − Σ_c p_c²) / (1 − Σ_c p_c²)`; P̄ is the mean over items of the share of equal
        pairs, p_c that of n_ic / n_i.
    Paper: Fleiss 1971, https://doi.org/10.1037/h0031619, for a constant number of votes an item.
    If numbers differ, each item still weighs the same in both terms (Gwet 2014). Items with one
    vote are in neither.
    Trap: with a rare choice kappa is low though nearly all agree; read it beside the raw share.
    """
    table = tabulated(votes, coding)
    return _figure(table, scale=1 / (table.votes * (table.votes - 1)))


def krippendorff_alpha(
    votes: Votes,
    level: Level = "nominal",
    *,
    coding: Coding | None = None,
) -> Coefficient:
    """One less the disagreement seen over the disagreement expected, with any number of votes an
    item.

    Equation: `1 − (n − 1) Σ o_ck δ_ck / Σ n_c n_k δ_ck` over the coincidence matrix o; δ is unequal
    (nominal), the squared number of votes between (ordinal) or the squared difference (interval).
    Paper: Krippendorff 2011, https://repository.upenn.edu/handle/20.500.14332/2089.
    Shapes: nominal compares choices by default, the other levels strengths: -1, 0, 1 where only
        choices were made.
    Trap: ordinal and interval forgive neighbours, so they are not comparable with nominal.
    """
    table = tabulated(votes, coding or ("choice" if level == "nominal" else "strength"))
    return _figure(table, scale=1 / (table.votes - 1), level=level, own=1)


def cohen_kappas(votes: Sequence[Vote], *, coding: Coding = "choice") -> list[PairOfAnnotators]:
    """Cohen's kappa of every two annotators with items in common, sorted by their names.

    Equation: `(p_o − p_e) / (1 − p_e)`; p_e is the sum over choices of the product of the two
        persons' own shares.
    Paper: Cohen 1960, https://doi.org/10.1177/001316446002000104.
    Trap: among many pairs some are low by chance alone; look at the interval, and at
        `quality.suspicious` for tests.
    """
    latest, values, _ = coded(votes, coding)
    cells: dict[tuple[str, str], Counter[tuple[Any, Any]]] = defaultdict(Counter)
    for _, group in itertools.groupby(
        zip(latest, values, strict=True),
        key=lambda pair: pair[0].item,
    ):
        for (first, x), (second, y) in itertools.combinations(group, 2):
            cells[first.annotator, second.annotator][x, y] += 1
    pairs = []
    for names, counts in sorted(cells.items()):
        domain = sorted({value for cell in counts for value in cell})
        kinds = sorted(counts)
        first, second = (
            np.array([[value == kind[side] for value in domain] for kind in kinds], float)
            for side in (0, 1)
        )
        multiplicity = np.array([counts[kind] for kind in kinds], float)
        table = Table(first, second, multiplicity, np.full(len(kinds), 2.0), domain=domain)
        pairs.append(PairOfAnnotators(*names, _figure(table, chance=False), _figure(table)))
    return pairs


def self_agreement(votes: Sequence[Vote]) -> Coefficient:
    """The share of repeated votes of a person on an item that are the same; its interval is over
    items.

    Trap: a second vote may be a correction, so this is a lower bound of how steady people are.
    """
    _, repeats = latest_votes(votes)
    by_item: dict[str, list[bool]] = defaultdict(list)
    for before, after in repeats:
        by_item[before.item].append(before.choice == after.choice)
    counts = np.array(
        [(sum(same), len(same) - sum(same)) for same in by_item.values()],
        float,
    ).reshape(-1, 2)
    kinds, multiplicity = np.unique(counts, axis=0, return_counts=True)
    same = np.tile([1.0, 0.0], (len(kinds), 1))
    empty = "" if repeats else "nobody voted twice on an item"
    table = Table(
        kinds,
        same,
        multiplicity.astype(float),
        kinds.sum(1),
        domain=[True, False],
        empty=empty,
    )
    return _figure(table, chance=False)


def agreement_report(votes: Sequence[Vote], *, windows: int = 0) -> Json:
    """All figures as plain JSON values: overall, of every two annotators, of every slice, and over
    time.

    `windows` parts have equal numbers of the items with two votes, in the order of their last
    votes. If all votes have one time, there are none. A missing number is None and has a `reason`.

    Raises:
        DataError: as `latest_votes`.
    """
    latest, repeats = latest_votes(votes)
    per_item = Counter(vote.item for vote in latest)
    slices: dict[str, dict[str, list[Vote]]] = defaultdict(lambda: defaultdict(list))
    for vote in latest:
        for name, value in vote.slices.items():
            slices[name][value].append(vote)
    return {
        "num_votes": len(latest),
        "num_items": len(per_item),
        "num_annotators": len({vote.annotator for vote in latest}),
        "items_by_votes": {
            str(number): items for number, items in sorted(Counter(per_item.values()).items())
        },
        "num_repeats": len(repeats),
        "overall": _summary(latest),
        "self": asdict(self_agreement(votes)),
        "pairs": [asdict(pair) for pair in cohen_kappas(latest)],
        "slices": {
            name: {value: _summary(part) for value, part in sorted(parts.items())}
            for name, parts in sorted(slices.items())
        },
        "windows": [
            {"from": low, "to": high, **_summary(part)}
            for low, high, part in _windows(latest, windows)
        ],
    }


def _summary(votes: Sequence[Vote]) -> Json:
    choices, verdicts, strengths = (
        tabulated(votes, coding) for coding in ("choice", "verdict", "strength")
    )
    figures = {
        "raw": raw_agreement(choices),
        "raw_verdict": raw_agreement(verdicts),
        "raw_strength": raw_agreement(strengths),
        "fleiss_kappa": fleiss_kappa(choices),
        "alpha_nominal": krippendorff_alpha(choices),
        "alpha_ordinal": krippendorff_alpha(strengths, "ordinal"),
        "alpha_interval": krippendorff_alpha(strengths, "interval"),
    }
    return {name: asdict(figure) for name, figure in figures.items()}


def _windows(votes: Sequence[Vote], number: int) -> list[tuple[float, float, list[Vote]]]:
    """First and last time, and votes, of each part; an item's time is that of its last vote. None
    where no times are known.
    """
    by_item = {
        item: list(group) for item, group in itertools.groupby(votes, key=lambda vote: vote.item)
    }
    shared = sorted(
        (max(v.at for v in group), item) for item, group in by_item.items() if len(group) > 1
    )
    if not number or len({at for at, _ in shared}) < 2:
        return []
    cuts = [round(k * len(shared) / number) for k in range(number + 1)]
    parts = [shared[low:high] for low, high in itertools.pairwise(cuts) if low < high]
    return [
        (part[0][0], part[-1][0], [vote for _, item in part for vote in by_item[item]])
        for part in parts
    ]


def tabulated(votes: Votes, coding: Coding = "choice") -> Table:
    """The table of how often each value was given to each item; votes that are tabulated already
    stay as they are.
    """
    if isinstance(votes, Table):
        return votes
    latest, values, what = coded(votes, coding)
    empty = f"no item has {what} from two annotators" if latest else f"there are no {what}"
    if len(set(values)) > LARGEST_DOMAIN:
        latest = []
        values = []
        empty = f"more than {LARGEST_DOMAIN} different values: round them"
    domain, places = np.unique(np.array(values), return_inverse=True)
    items, rows = np.unique([vote.item for vote in latest], return_inverse=True)
    counts = np.zeros((len(items), len(domain)))
    np.add.at(counts, (rows, places), 1)
    kinds, multiplicity = np.unique(counts[counts.sum(1) > 1], axis=0, return_counts=True)
    return Table(
        kinds,
        kinds,
        multiplicity.astype(float),
        kinds.sum(1),
        domain=domain.tolist(),
        empty=empty,
    )


def _statistic(met: Array, table: Table, level: Level, own: int, chance: bool) -> float:
    """The figure of pairs of votes, counted by their two values."""
    rows = met.sum(1)
    total = met.sum()
    if not chance:
        return np.trace(met) / total
    distance = _distance(rows, table.domain, level)
    expected = rows @ distance @ met.sum(0) / (total * (total - own))
    return 1 - (met * distance).sum() / total / expected if expected > 1e-12 else math.nan


def _figure(
    table: Table,
    *,
    scale: Array | float = 1.0,
    level: Level = "nominal",
    own: int = 0,
    chance: bool = True,
) -> Coefficient:
    """One less the disagreement seen over that expected by chance; without `chance` the share of
    equal pairs.

    Args:
        scale: the weight of a pair of votes on an item of each kind.
        own: votes that a vote cannot meet by chance: itself, in Krippendorff's alpha.
    """
    number = round(float(table.multiplicity.sum()))
    votes = round(float(table.multiplicity @ table.votes))
    bare = partial(Coefficient, low=None, high=None, num_items=number, num_votes=votes)
    if not number:
        return bare(None, reason=table.empty)
    statistic = partial(_statistic, table=table, level=level, own=own, chance=chance)
    weights = np.broadcast_to(scale, len(table.multiplicity))
    each = (
        count * weights[kind] * table.coincidences(kind)
        for kind, count in enumerate(table.multiplicity)
    )
    whole = sum(each, np.array(0.0))
    value = float(statistic(whole))
    reason = ""
    if math.isnan(value):
        return bare(None, reason="only one value was ever given, so agreement by chance is certain")
    if abs(value - 1) < 1e-12:
        value = 1.0
        reason = "all agree on every item; the lower bound follows from their number"
        influence = Influence(np.zeros(1), np.array([float(number)]), float(number))
    elif number == 1:
        return bare(value, reason=ALIKE)
    else:
        without = np.array(
            [
                statistic(whole - weight * table.coincidences(kind))
                for kind, weight in enumerate(weights)
            ],
        )
        if np.isnan(without).any():
            few = f"{TOO_FEW} items: without one of them only one value is left"
            return bare(value, reason=few)
        influence = jackknife(without, repeats=table.multiplicity)
        if influence.error < 1e-12:
            return bare(value, reason=ALIKE)
    if chance and not reason and number < FEWEST_GROUPS:
        return bare(value, reason=f"{TOO_FEW} items: {number}, and {FEWEST_GROUPS} are needed")
    if not chance and _one_pair_each(table):
        low, high = trials_interval(round(value * number), number)
    else:
        low, high = _interval(table, value, influence, chance)
    return Coefficient(value, low, high, num_items=number, num_votes=votes, reason=reason)


def _interval(
    table: Table,
    value: float,
    influence: Influence,
    chance: bool,
) -> tuple[float, float]:
    """The interval of a figure.

    The room is the share of pairs that would disagree by chance. 1 less the coefficient, times the
    room, is the share that do disagree; the interval is made of that. Of n votes on an item n − 1
    are compared with another.
    """
    first = table.multiplicity @ table.first
    second = table.multiplicity @ table.second
    room = 1.0 - float(first @ second / (first.sum() * second.sum())) if chance else 1.0
    share = max(1 - room * (1 - value), 0.0)
    number = table.multiplicity.sum()
    compared = round(float(table.multiplicity @ (table.votes - 1)))
    low, high = share_interval(share, influence.scaled(room), max(compared, round(float(number))))
    return max(-1.0, 1 - (1 - low) / room), 1 - (1 - high) / room


def _one_pair_each(table: Table) -> bool:
    """True if every item has one pair of votes, and so is one trial that agrees or not."""
    both = 2 if table.first is table.second else 1
    return all(table.coincidences(kind).sum() == both for kind in range(len(table.votes)))


def _distance(margins: Array, domain: Sequence[object], level: Level) -> Array:
    """The squared distance of any two values, (values, values)."""
    if level == "nominal":
        return 1 - np.eye(len(domain))
    # Between two values of an ordinal scale lie all votes from the middle of the one to the middle
    # of the other.
    places = margins.cumsum() - margins / 2 if level == "ordinal" else np.array(domain, float)
    return np.subtract.outer(places, places) ** 2
