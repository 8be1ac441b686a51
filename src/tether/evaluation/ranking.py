"""Several policies in one order, from comparisons of any two of them (Bradley and Terry)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tether.core.errors import DataError
from tether.stats import Array, Estimate, Influence, group_indices, without_interval
from tether.stats.groups import Groups, Indices, sigmoid
from tether.stats.means import FEWEST_GROUPS, mean_interval


class PolicyStanding(NamedTuple):
    """A policy, its strength in nats of log-odds against the mean of all, and its place.

    `best` and `worst` bound the place. A policy whose difference from this one may be 0 can be on
    either side.
    """

    name: str
    strength: Estimate
    best: int
    worst: int


class PolicyRanking(NamedTuple):
    """Policies, strongest first, with the influence of each prompt on each strength.

    `influences` is (prompts, policies) in the order of `names`; `sizes` counts the comparisons of
    each prompt.
    """

    names: tuple[str, ...]
    strengths: Array
    influences: Array
    sizes: Array

    def difference(self, first: str, second: str) -> Estimate:
        """The log-odds that the first wins against the second."""
        contrast = np.zeros(len(self.names))
        contrast[self.names.index(first)] += 1.0
        contrast[self.names.index(second)] -= 1.0
        return self._estimate(contrast)

    def standings(self) -> list[PolicyStanding]:
        """All policies, strongest first."""
        number = len(self.names)
        rows = []
        for place, name in enumerate(self.names):
            others = [other for other in self.names if other != name]
            above = sum(self.difference(other, name).low > 0 for other in others)
            below = sum(self.difference(name, other).low > 0 for other in others)
            strength = self._estimate(np.eye(number)[place] - 1 / number)
            rows.append(PolicyStanding(name, strength, 1 + above, number - below))
        return rows

    def _estimate(self, contrast: Array) -> Estimate:
        value = float(contrast @ self.strengths)
        count = int(self.sizes.sum())
        if (groups := len(self.sizes)) < FEWEST_GROUPS:
            return without_interval(
                value,
                count,
                f"prompts: {groups}, and {FEWEST_GROUPS} are needed",
            )
        equal = float(self.sizes.sum() ** 2 / (self.sizes @ self.sizes))
        influence = Influence(self.influences @ contrast, np.ones(groups), equal)
        bounds = mean_interval(value, influence, skewed=False)
        return Estimate(value, *bounds, count)


def rank_policies(
    first: Sequence[str],
    second: Sequence[str],
    wins: Sequence[float],
    prompts: Groups | None = None,
) -> PolicyRanking:
    """Rank policies by comparisons of two of them at a time.

    Equation: ``logit P(a beats b) = θ_a − θ_b`` with ``Σ θ = 0``, by maximum likelihood; a draw is
        half a win of either. A prompt g moves θ by ``(H − H_g)⁻¹ s_g``, with its score s and the
        information H. The covariance is the sandwich of the jackknife over prompts (CR3).
    Paper: Bradley and Terry 1952, https://doi.org/10.2307/2334029; the sandwich: Cameron
        and Miller 2015, https://doi.org/10.3368/jhr.50.2.317.
    Shapes: one entry a comparison; ``wins`` is 1 where the first won, 0 where it lost, ½ a draw, or
        a probability.
    Raises: ``DataError`` when some policies never won against any of the others: the strengths then
        have no finite difference.
    Trap: an order does not give the distance between neighbours; read `difference`.
    """
    names = sorted({*first, *second})
    places = {name: place for place, name in enumerate(names)}
    left, right = (np.array([places[name] for name in side]) for side in (first, second))
    won = np.asarray(wins, dtype=np.float64)
    _check_connected(names, left, right, won)
    design = np.eye(len(names))[left] - np.eye(len(names))[right]
    strengths = _fit(design, won)
    owner = np.arange(len(won)) if prompts is None else group_indices(prompts)
    influences = _influences(strengths, design, won, owner)
    order = np.argsort(-strengths, kind="stable")
    return PolicyRanking(
        tuple(names[place] for place in order.tolist()),
        strengths[order],
        influences[:, order],
        np.bincount(owner).astype(np.float64),
    )


def _check_connected(
    names: Sequence[str],
    left: Indices,
    right: Indices,
    won: Array,
) -> None:
    """Ford's condition: from every policy a chain of wins leads to every other."""
    from scipy.sparse.csgraph import connected_components

    beats = np.zeros((len(names), len(names)))
    np.add.at(beats, (left, right), won)
    np.add.at(beats, (right, left), 1 - won)
    count, part = connected_components(beats > 0, directed=True, connection="strong")
    if count == 1:
        return
    never = next(
        number for number in range(count) if not beats[np.ix_(part == number, part != number)].any()
    )
    losers = [name for name, own in zip(names, part, strict=True) if own == never]
    others = [name for name, own in zip(names, part, strict=True) if own != never]
    raise DataError(
        f"{', '.join(losers)} never won against {', '.join(others)}, so the difference in strength "
        "has no bound. Add comparisons, or rank them apart",
    )


def _fit(design: Array, won: Array) -> Array:
    """Strengths of mean 0, by Newton's method with halved steps."""
    count = design.shape[1]
    strengths = np.zeros(count)

    def loss(values: Array) -> float:
        odds = design @ values
        return float((np.logaddexp(0.0, odds) - won * odds).sum())

    for _ in range(200):
        rest, weight = _rest_and_weight(strengths, design, won)
        step = np.linalg.solve((design.T * weight) @ design + 1 / count, rest @ design)
        size = 1.0
        while loss(strengths + size * step) > loss(strengths) + 1e-12 and size > 1e-6:
            size /= 2
        strengths = strengths + size * step
        if np.abs(step).max() < 1e-10:
            break
    return strengths - strengths.mean()


def _rest_and_weight(strengths: Array, design: Array, won: Array) -> tuple[Array, Array]:
    """Residual and weight of each comparison."""
    chance = sigmoid(design @ strengths)
    return won - chance, chance * (1 - chance)


def _influences(strengths: Array, design: Array, won: Array, owner: Indices) -> Array:
    """By how much each group moves each strength, (groups, policies), with mean 0."""
    groups = int(owner.max()) + 1
    count = design.shape[1]
    rest, weight = _rest_and_weight(strengths, design, won)
    score = np.zeros((groups, count))
    information = np.zeros((groups, count, count))
    np.add.at(score, owner, rest[:, None] * design)
    np.add.at(information, owner, weight[:, None, None] * design[:, :, None] * design[:, None])
    # 1/K makes the shift of all strengths, which nothing measures, solvable
    without = information.sum(0) - information + 1 / count + 1e-9 * np.eye(count)
    moved = np.linalg.solve(without, score[:, :, None])[:, :, 0]
    moved = moved - moved.mean(1, keepdims=True)
    return (groups - 1) / groups * (moved - moved.mean(0))
