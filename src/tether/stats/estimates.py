"""A number with its interval, or with the reason why it has none; p-values, and their correction
where several tests share one error.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple, NotRequired, TypedDict

import numpy as np

from tether.stats.groups import student

TOO_FEW = "too few"
"""The words that replace an interval; a reason begins with them."""


class EstimateFields(TypedDict):
    """An estimate as JSON holds it; a bound that nothing is known of is None, and `reason` says
    why.
    """

    value: float | None
    low: float | None
    high: float | None
    count: int
    reason: NotRequired[str]


class Estimate(NamedTuple):
    """A number, its confidence interval, and how many observations it rests on.

    `reason` is empty, or begins with "too few" and says why the bounds are infinite.
    """

    value: float
    low: float
    high: float
    count: int
    reason: str = ""

    def as_dict(self) -> EstimateFields:
        """Give the fields by name, with None for what JSON cannot hold, and a reason where there is
        one.
        """
        value, low, high = (number if math.isfinite(number) else None for number in self[:3])
        fields = EstimateFields(value=value, low=low, high=high, count=self.count)
        return {**fields, "reason": self.reason} if self.reason else fields


def without_interval(value: float, count: int, why: str) -> Estimate:
    """An estimate of which only the value is known: `why` names after "too few" what there is too
    little of.
    """
    return Estimate(value, -math.inf, math.inf, count, f"{TOO_FEW} {why}")


def side(value: Estimate | None, point: float) -> int:
    """+1 where the interval lies above `point`, -1 below it, 0 where it holds the point or is
    unknown.
    """
    return 0 if value is None else (value.low > point) - (value.high < point)


def shown_difference(
    wins: Estimate | None,
    gain: Estimate | None,
    even: float = 0.5,
) -> Literal["better", "worse", "higher", "lower", "undecided"]:
    """The difference that is shown. The win rate decides, in which `even` is no difference. Where
    it shows none, the mean score may still be `higher` or `lower`.
    """
    if won := side(wins, even):
        return "better" if won > 0 else "worse"
    if moved := side(gain, 0):
        return "higher" if moved > 0 else "lower"
    return "undecided"


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
