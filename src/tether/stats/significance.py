"""P-values of estimates, and their correction where several tests share one error."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from tether.stats.estimates import Estimate
from tether.stats.groups import student


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjust p-values, so that rejecting those below a level errs at all with at most that
    probability.

    Equation: of m tests in the order of their p-values, ``p̃_k = max over j ≤ k of min(1, (m − j +
        1) p_j)``.
    Paper: Holm 1979, https://www.jstor.org/stable/4615733.
    """
    order = np.argsort(p_values, kind="stable")
    adjusted = np.empty(len(p_values))
    steps = np.arange(len(p_values), 0, -1) * np.asarray(p_values, float)[order]
    adjusted[order] = np.maximum.accumulate(np.minimum(steps, 1.0))
    return adjusted.tolist()


def p_above_zero(estimate: Estimate, freedom: float = math.inf) -> float:
    """Compute the p-value at which a number lies above 0, from its 95% interval. Both tails count,
    so p is below 5% where the interval lies above 0.

    Equation: ``2 P(T > q v / (v − low))`` with the value v and the quantile q of the interval; 1
        for a number that is not above 0.
    Assumes: the interval is Student's with these degrees of freedom; unset, the normal one.
    """
    from scipy.special import stdtr

    if estimate.value <= 0:
        return 1.0
    reach = estimate.value - estimate.low
    distance = estimate.value / reach if reach else math.inf
    return 2 * float(stdtr(freedom, -student(freedom, 0.95) * distance))
