"""A win rate from few judgments by people and many by a machine, whose error the few correct."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tether.stats.estimates import Estimate
from tether.stats.groups import (
    FEWEST_UNLIKE,
    Array,
    Groups,
    Indices,
    group_indices,
    jackknife,
    unlike,
)
from tether.stats.means import FEWEST_GROUPS, grouped_mean
from tether.stats.shares import share_interval


class _Sums(NamedTuple):
    """Of judged items the number and sums of y, f, y f and f²; of the others those of f alone."""

    judged: Array
    y: Array
    f: Array
    yf: Array
    ff: Array
    others: Array
    g: Array
    gg: Array


class PredictionPowered(NamedTuple):
    """The corrected win rate, that of people's judgments alone, and λ, the weight of the machine.

    The estimates count people's judgments. With a weight of 0 both are the same.
    """

    estimate: Estimate
    human_only: Estimate
    weight: float


def prediction_powered_win_rate(
    human: Sequence[float | None],
    machine: Sequence[float],
    groups: Groups | None = None,
) -> PredictionPowered:
    """Estimate the share of all comparisons that one side wins in people's eyes, from people's
    judgments of some.

    Equation: ``θ = mean(y_i − λ f_i) + λ mean(f_j)`` over the n items with a judgment y and the N
        without; ``λ = cov(y, f) / ((1 + n/N) var f)``, held in [0, 1], has the least variance.
    Paper: Angelopoulos et al. 2023, https://arxiv.org/abs/2301.09633; λ: Angelopoulos, Duchi and
        Zrnic 2023, https://arxiv.org/abs/2311.01453.
    Shapes: one entry an item, 1 a win, ½ a draw, 0 a loss, or a probability; ``human`` is None for
        an item without a person's judgment, ``machine`` judges every item. ``groups`` names the
        prompt of each item.
    Interval: `stats.share_interval` with a jackknife over groups that chooses λ anew each time.
    Raises: ``ValueError`` when people judged nothing.
    Trap: items that people judge must be drawn at random from all. Where people and machine differ
        in fewer than four groups λ is 0: nothing shows how rare differences are.
    """
    labels, judged = _columns(human, machine)
    predictions = np.asarray(machine, dtype=np.float64)
    owner = np.arange(len(predictions)) if groups is None else group_indices(groups)
    own = None if groups is None else [groups[i] for i in np.flatnonzero(judged).tolist()]
    alone = grouped_mean(labels[judged], own)
    sums = _group_sums(labels, predictions, judged, owner)
    value, weight = _corrected(sums.sum(0)[None])
    gaps = labels[judged] - predictions[judged]
    numbers = np.unique(owner[judged], return_inverse=True)[1]
    means = np.bincount(numbers, weights=gaps) / np.bincount(numbers)
    if len(means) < FEWEST_GROUPS or unlike(means.round(12)) < FEWEST_UNLIKE or not weight[0]:
        return PredictionPowered(alone, alone, 0.0)
    without, _ = _corrected(sums.sum(0) - sums)
    influence = jackknife(without, sums[:, 0] + sums[:, 5])
    mean = float(value[0])
    low, high = share_interval(mean, influence, math.inf)
    estimate = Estimate(mean, low, high, len(labels[judged]))
    return PredictionPowered(estimate, alone, float(weight[0]))


def _columns(
    human: Sequence[float | None],
    machine: Sequence[float],
) -> tuple[Array, NDArray[np.bool_]]:
    """People's judgments, 0 where there is none, and the places that have one."""
    judged = np.array([label is not None for label in human], dtype=np.bool_)
    if not judged.any():
        raise ValueError("people judged no item; without their judgments nothing is corrected")
    labels = np.array([0.0 if label is None else label for label in human], dtype=np.float64)
    return labels, judged


def _group_sums(
    labels: Array,
    predictions: Array,
    judged: NDArray[np.bool_],
    owner: Indices,
) -> Array:
    """The columns of `_Sums`, a row a group."""
    ones = judged.astype(np.float64)
    rest = (~judged).astype(np.float64)
    columns = [ones, labels, predictions * ones, labels * predictions, predictions**2 * ones]
    columns += [rest, predictions * rest, predictions**2 * rest]
    counted = [np.bincount(owner, weights=column) for column in columns]
    return np.stack(counted, axis=1).astype(np.float64)


def _corrected(sums: Array) -> tuple[Array, Array]:
    """The corrected mean and λ from rows of sums as `_group_sums` has them."""
    of = _Sums(*sums.T)
    total = of.judged + of.others
    together = (of.yf - of.y * of.f / of.judged) / of.judged
    spread = of.ff + of.gg - (of.f + of.g) ** 2 / total
    spread = spread / np.maximum(total - 1, 1)
    usable = (of.others > 0) & (spread > 1e-15)
    others = np.where(usable, of.others, 1)
    least = np.where(usable, (1 + of.judged / others) * spread, 1)
    weight = np.where(usable, together / least, 0.0).clip(0, 1)
    return (of.y - weight * of.f) / of.judged + weight * of.g / others, weight
