"""The place of the highest of several means, all measured on the same groups."""

from __future__ import annotations

import numpy as np

from tether.stats.contests import joint_errors
from tether.stats.groups import Array
from tether.stats.means import FEWEST_GROUPS

SHARE = 0.8
"""The part of 1 − confidence of the quantile. Each difference has its own error, and all draws
share one root of χ² (found by simulation).
"""


def peak(sums: Array, counts: Array, *, confidence: float = 0.95) -> tuple[int, int] | None:
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
        if ((means - mean) / errors).max() <= np.quantile(highest, 1 - SHARE * (1 - confidence)):
            places.append(place)
    return places[0], places[-1]
