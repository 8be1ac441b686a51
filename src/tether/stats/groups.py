"""Groups of observations, and by how much each of them moves a statistic."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]
Indices = NDArray[np.intp]
Groups = Sequence[Hashable]
"""The group of each observation, such as its prompt."""
Bounds = tuple[float, float]


FEWEST_UNLIKE = 4
"""Groups that differ from the commonest mean: fewer show too little of what is rare."""


def group_indices(groups: Groups) -> Indices:
    """The number of each observation's group, counted in the order in which groups first appear."""
    numbers = {group: number for number, group in enumerate(dict.fromkeys(groups))}
    return np.array([numbers[group] for group in groups], dtype=np.intp)


def sigmoid(values: Array) -> Array:
    """``1 / (1 + exp(−x))``."""
    return 0.5 * (1.0 + np.tanh(values / 2.0))


def by_group(values: Array, groups: Groups | None) -> tuple[Array, Array]:
    """Sum and count the values of each group, in the order in which groups first appear; unset,
    each is its own group.
    """
    if groups is None:
        return values, np.ones(len(values))
    indices = group_indices(groups)
    return np.bincount(indices, weights=values).astype(np.float64), np.bincount(indices).astype(
        np.float64,
    )


def unlike(means: Array) -> int:
    """Number of groups that differ from the commonest mean."""
    return len(means) - int(np.unique(means, return_counts=True)[1].max())


FEWEST_EVENTS = 5
"""Groups that have an event of a share: of fewer it does not show what their observations have in
common.
"""


class Influence(NamedTuple):
    """The effect of each group on a statistic.

    `parts` has a number a group, with mean 0. `repeats` is the number of groups that are exactly
    like it. `equal` is the equivalent number of groups of one size.
    """

    parts: Array
    repeats: Array
    equal: float

    @property
    def groups(self) -> int:
        """The number of groups."""
        return round(float(self.repeats.sum()))

    @property
    def error(self) -> float:
        """The standard error, ``sqrt(G / (G − 1) Σ d²)``."""
        return math.sqrt(self.groups / max(self.groups - 1, 1) * self.moment(2))

    @property
    def carriers(self) -> float:
        """The number of groups that carry the error, ``(Σ d²)² / Σ d⁴``: few where one event in a
        hundred decides.
        """
        return self.moment(2) ** 2 / fourth if (fourth := self.moment(4)) > 1e-300 else 0.0

    def moment(self, power: int) -> float:
        """``Σ d^power`` over all groups."""
        return float(self.repeats @ self.parts**power)

    def scaled(self, factor: float) -> Influence:
        """The influence on a statistic that is `factor` times this one."""
        return self._replace(parts=factor * self.parts)


def jackknife(
    without: Array,
    sizes: Array | None = None,
    repeats: Array | None = None,
) -> Influence:
    """Measure each group's influence from the values of a statistic without one group each.

    Equation: ``d_i = (G − 1)/G (θ̄ − θ_(i))``, so that ``se² = (G − 1)/G Σ (θ_(i) − θ̄)²``; G
    groups of sizes n amount to ``(Σ n)² / Σ n²`` equal ones (Kish).
    Paper: Efron and Stein 1981, https://doi.org/10.1214/aos/1176345462; few groups: Cameron and
    Miller 2015, https://doi.org/10.3368/jhr.50.2.317.
    Shapes: ``without`` has a value for each group. ``sizes`` has the numbers of observations
    (unset: equally many). ``repeats`` has the numbers of groups that are exactly like it (unset:
    one).
    Trap: a statistic that jumps, as a median or the place of a maximum does, has no such error.
    """
    repeats, sizes = (
        np.ones(len(without)) if given is None else given for given in (repeats, sizes)
    )
    groups = float(repeats.sum())
    centred = repeats @ without / groups - without
    centred = np.where(
        np.abs(centred) <= 1e-12 * np.abs(without).max(initial=0.0),
        0.0,
        centred,
    )  # what rounding leaves of equals
    return Influence(
        (groups - 1) / groups * centred,
        repeats,
        float((repeats @ sizes) ** 2 / (repeats @ sizes**2)),
    )


def influence_on_mean(sums: Array, counts: Array) -> Influence:
    """The jackknife of the mean of all observations, from each group's sum and count.

    Trap: the only group leaves nothing to compare it with, and has no influence.
    """
    if len(sums) < 2:
        return Influence(np.zeros(len(sums)), np.ones(len(sums)), float(len(sums)))
    return jackknife((sums.sum() - sums) / (counts.sum() - counts), counts)


def student(freedom: float, confidence: float) -> float:
    """The two-sided quantile of Student's t."""
    # loading it takes longer than everything else in this package
    from scipy.special import stdtrit

    return float(stdtrit(freedom, 0.5 + confidence / 2))


def in_accord(changes: ArrayLike, questions: Groups) -> NDArray[np.float64]:
    """Give each change the sign of its accord with the other half of its question's changes.

    Equation: ``c_i = d_i · sign(Σ d_j)`` over the j at the odd places of the question's rows for i
    at an even one, and the other way round.
    Shapes: changes and questions of one length; the result likewise, in the unit of the changes.
    Trap: the mean of ``c`` is at most ``|E d|`` a question. It is lower if few changes leave the
    direction in doubt. So means are comparable only over the same pairs. A direction from all other
    changes would bend the distribution. Without an effect, most questions would lie a little above
    0 and few far below. An interval over some twenty questions misses those few.
    """
    values = np.asarray(changes, dtype=np.float64)
    numbers = group_indices(questions)
    seen: Counter[int] = Counter()
    halves = np.empty(len(values), dtype=np.intp)
    for place, number in enumerate(numbers.tolist()):
        halves[place] = seen[number] % 2
        seen[number] += 1
    sums = np.zeros((len(seen), 2))
    np.add.at(sums, (numbers, halves), values)
    return values * np.sign(sums[numbers, 1 - halves])
