"""A number with its interval, or with the reason why it has none."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple, NotRequired, TypedDict

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
