"""The movement of a noisy series of steps, as the command line and the report tell it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

FEWEST = 6
"""Steps from which on noise can be told from movement at all."""


@dataclass(frozen=True, slots=True)
class Trend:
    """Means of the first and the last `span` of `count` steps, and how far off each may be.

    `noise` is half the 95% interval of either mean: t σ / sqrt(span), where σ² is half the mean squared difference of neighbours
    (von Neumann 1941, https://doi.org/10.1214/aoms/1177731677), which slow movement does not inflate. None below six steps.
    """

    first: float
    last: float
    span: int
    count: int
    noise: float | None

    @property
    def gain(self) -> float | dict[str, float]:
        """The rise; with the interval where there is one."""
        if self.noise is None:
            return self.last - self.first
        value, half = self.last - self.first, math.sqrt(2) * self.noise
        return {"value": value, "low": value - half, "high": value + half, "count": self.count}


def trend(values: Sequence[float]) -> Trend | None:
    """Of the first and the last tenth of the steps; of up to five, but no more than a quarter, where a tenth is fewer."""
    count = len(values)
    if not count:
        return None
    span, noise = max(1, count // 10, min(5, count // 4)), None
    if count >= FEWEST:
        variance = sum((b - a) ** 2 for a, b in itertools.pairwise(values)) / (2 * (count - 1))
        noise = _student(2 * (count - 1) ** 2 / (3 * count - 4)) * math.sqrt(variance / span)
    return Trend(sum(values[:span]) / span, sum(values[-span:]) / span, span, count, noise)


def _student(freedom: float) -> float:
    """The 97.5% quantile of Student's t (Abramowitz and Stegun 26.7.5; to 0.4% from three degrees of freedom on)."""
    z = 1.959964
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / freedom**power for power, term in enumerate(terms, 1))


K1 = "the estimate (k1, the mean log ratio of what was sampled) is unbiased and may be negative, the KL itself never"


def vague(kl: float, noise: float | None) -> str:
    """A remark on a KL that is indistinguishable from 0, or negative; empty for any other."""
    if kl > (noise or 0.0):
        return ""
    return f"indistinguishable from 0{f': {K1}' if kl < 0 else ''}"
