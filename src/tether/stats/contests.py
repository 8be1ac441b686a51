"""The best of several means against the best of others, all measured on the same groups."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tether.stats.estimates import Estimate, without_interval
from tether.stats.groups import Array
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
    groups: NDArray[np.intp],
    *,
    confidence: float = 0.95,
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
    level = (1 - confidence) / SHARE
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
