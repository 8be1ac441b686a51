"""The best of several means against the best of others, and the place of the highest one, all
measured on the same groups.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from tether.stats.estimates import Estimate, without_interval
from tether.stats.groups import Array, Indices
from tether.stats.means import FEWEST_GROUPS

NEAR = 1.4
APART = 0.7
"""Standard errors of a gap by which rivals are taken to be nearer to their best, and farther from
it, than they look.
"""
SHARE = 3
"""Each bound may fail in this part of 1 − confidence. A half is too much if one side has one best
and the other two.
"""
DRAWS = 4000


class Contest(NamedTuple):
    """The columns of the two best, and how far the first lies above the second."""

    ours: int
    theirs: int
    gain: Estimate


def best_against_best(
    ours: Array,
    theirs: Array,
    groups: Indices,
) -> Contest:
    """Estimate ``max_p μ_p − max_b ν_b``, the best of one side less the best of the other.

    Equation: the observed difference less a quantile of its error. The error is drawn: ``max_p (g_p
    + e_p) − max_b (h_b + f_b)``. The errors e and f are normal with the covariance of the means
    over groups, divided by a root of χ²/df, as in Student's t. The gaps g and h are the distances
    of each mean from the best of its side. The best of several similar ones is too high on average.
    So for the high bound rivals of theirs are put 1.4 standard errors nearer to their best, and
    rivals of ours 0.7 farther. For the low bound it is the reverse. Each bound has a third of 1 −
    confidence, because the gaps are not known better.
    Paper: after Fang and Santos 2019, https://doi.org/10.1093/restud/rdy049; the margins and the
    level are ours, found by simulation (`python -m benchmarks.coverage`).
    Shapes: (observations, columns) of each side, row by row the same prompts; ``groups`` is the
        number of each row's group.
    Assumes: groups are drawn independently, and enough of them for means to be normal.
    """
    columns = np.concatenate([ours, theirs], axis=1)
    means = columns.mean(0)
    width = ours.shape[1]
    count = len(columns)
    best = int(means[:width].argmax())
    rival = int(means[width:].argmax())
    value = float(means[best] - means[width + rival])
    moved = np.zeros((int(groups.max()) + 1, columns.shape[1]))
    np.add.at(moved, groups, (columns - means) / count)
    number = len(moved)
    if number < FEWEST_GROUPS:
        return Contest(
            best,
            rival,
            without_interval(value, count, f"groups: {number}, and {FEWEST_GROUPS} are needed"),
        )
    covariance = number / (number - 1) * moved.T @ moved
    if np.ptp(columns, axis=1).max() == 0:
        return Contest(
            best,
            rival,
            without_interval(value, count, f"groups differ: all {number} are alike"),
        )
    errors = joint_errors(covariance, number - 1)
    level = 0.05 / SHARE
    sides = [(means[:width], covariance[:width, :width], errors[:, :width])]
    sides.append((means[width:], covariance[width:, width:], errors[:, width:]))
    high = value - float(np.quantile(_excess(*sides[0], APART) - _excess(*sides[1], -NEAR), level))
    low = value - float(
        np.quantile(_excess(*sides[0], -NEAR) - _excess(*sides[1], APART), 1 - level),
    )
    return Contest(best, rival, Estimate(value, low, high, count))


def joint_errors(covariance: Array, freedom: int) -> Array:
    """Errors of all means, (draws, columns), each draw divided by one root of χ²/df; the same for
    the same covariance.
    """
    generator = np.random.default_rng(0)
    sizes, directions = np.linalg.eigh(covariance)
    normal = generator.standard_normal((DRAWS // 2, len(sizes))) * np.sqrt(np.maximum(sizes, 0.0))
    scale = np.sqrt(freedom / generator.chisquare(freedom, DRAWS))
    return np.concatenate([normal, -normal]) @ directions.T * scale[:, None]


def _excess(means: Array, covariance: Array, errors: Array, farther: float) -> Array:
    """By how much the best of erring means exceeds the best mean, with all others put farther from
    it, or nearer.
    """
    best = int(means.argmax())
    variances = np.diag(covariance)
    error = np.sqrt(np.maximum(variances + variances[best] - 2 * covariance[best], 0.0))
    gaps = np.minimum(means - means[best] - farther * error, 0.0)
    gaps[best] = 0.0
    return (gaps + errors).max(1)


PEAK_SHARE = 0.8
"""The part of 1 − confidence of the quantile. Each difference has its own error, and all draws
share one root of χ² (found by simulation).
"""


def peak(sums: Array, counts: Array) -> tuple[int, int] | None:
    """Return the range of columns that may have the highest mean; None for fewer than 16 groups.

    Equation: column s may be the highest unless ``max_t (x̄_t − x̄_s) / se_st`` exceeds its own
    quantile where all columns are equal. The errors of all means are drawn together, with the
    covariance over groups. They are divided by one root of χ²/(G − 1), as in Student's t. The
    interval goes from the first column that may be the highest to the last.
    Paper: multiple comparisons with the best, Hsu 1981, https://doi.org/10.1214/aos/1176345580.
    Shapes: (groups, columns): the sum and the number of each group's observations.
    Assumes: groups are drawn independently.
    Trap: each of several equally high columns is held with the given confidence, not all at once.
    """
    number = len(sums)
    total = counts.sum(0)
    if number < FEWEST_GROUPS:
        return None
    means = sums.sum(0) / total
    parts = (sums - counts * means) / total
    covariance = number / (number - 1) * parts.T @ parts
    draws = joint_errors(covariance, number - 1)
    places = []
    for place, mean in enumerate(means):
        variances = np.diag(covariance) + covariance[place, place] - 2 * covariance[place]
        errors = np.sqrt(np.maximum(variances, 0.0)) + 1e-9 * (1 + abs(mean))
        highest = ((draws - draws[:, [place]]) / errors).max(1)
        if ((means - mean) / errors).max() <= np.quantile(
            highest,
            1 - 0.05 * PEAK_SHARE,
        ):
            places.append(place)
    return places[0], places[-1]
