"""The movement of a noisy series whose steps may hang together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from tether.stats.estimates import Estimate, EstimateFields, without_interval
from tether.stats.groups import Array

FEWEST = 30
"""Smallest number of steps that separates correlated noise from movement."""
FEWEST_FREE = 12.0
"""Independent steps that all steps must be worth, as far as they show: with fewer, noise that is
slow passes for movement too often.
"""
SLOW = 2
"""The degree of the polynomial of time that counts as movement; the rest is noise."""
LONGEST = 2000
"""Steps beyond which neighbours are averaged first: the noise of a mean needs no finer ones."""


class Trend(NamedTuple):
    """Means of the first and the last `span` of `count` steps, and how far off each may be.

    `noise` is half the 95% interval of the last mean, `gain_noise` that of the rise. Where both are
    None `lacking` says why.
    """

    first: float
    last: float
    span: int
    count: int
    noise: float | None
    gain_noise: float | None
    lacking: str = ""

    @property
    def gain(self) -> EstimateFields:
        """The rise, with its interval or the reason why there is none."""
        value = self.last - self.first
        if self.gain_noise is None:
            return without_interval(value, self.count, self.lacking).as_dict()
        return Estimate(
            value,
            value - self.gain_noise,
            value + self.gain_noise,
            self.count,
        ).as_dict()


def trend(values: Sequence[float]) -> Trend | None:
    """Means of the first and the last tenth of the steps. If a tenth is fewer than five: of up to
    five, but at most a quarter.

    Equation: a value is a quadratic of time plus noise ``u_t = φ u_{t−1} + e_t``. The error of a
    mean of steps is a Student's t whose scale follows from φ. φ is averaged over, with the
    restricted likelihood times a flat prior on (−0.4, 0.99) as its weight.
    Paper: Harville 1974, https://doi.org/10.1093/biomet/61.2.383 (restricted likelihood).
    Assumes: noise of one kind throughout, each step of which forgets the one before at one rate.
    Trap: if φ is near 1, noise and movement look alike; steps that are worth fewer than
        `FEWEST_FREE` independent ones give no interval.
    """
    count = len(values)
    if not count:
        return None
    span = max(1, count // 10, min(5, count // 4))
    first = sum(values[:span]) / span
    last = sum(values[-span:]) / span
    lacking = ""
    noise = None
    both = None
    if count < FEWEST:
        lacking = f"steps: {count}, and {FEWEST} are needed"
    elif max(values) == min(values):
        lacking = f"steps differ: all {count} are alike"
    else:
        noise, both, free = _noise(np.asarray(values, dtype=np.float64), span)
        if free < FEWEST_FREE:
            lacking = f"steps: {count} are worth {max(free, 1.0):.0f} independent ones"
            noise = None
            both = None
    return Trend(first, last, span, count, noise, both, lacking)


def _noise(values: Array, span: int) -> tuple[float, float, float]:
    """Half the intervals of the last mean and of the rise, and how many independent steps the steps
    are worth.
    """
    block = -(-len(values) // LONGEST)
    if block > 1:
        whole = len(values) // block * block
        values = values[-whole:].reshape(-1, block).mean(1)
        span = max(1, span // block)
    course = _course(len(values), span)
    grid = course.grid
    freedom = len(values) - SLOW - 1
    white = np.stack([_whitened(values, phi) for phi in grid])
    fitted = np.einsum("gtk,gt->gk", course.bases, white)
    rest = np.maximum((white**2).sum(1) - (fitted**2).sum(1), 1e-300)
    weights = course.determinants - freedom / 2 * np.log(rest)
    weights = np.exp(weights - weights.max()) * np.gradient(grid)
    weights /= weights.sum()
    last, rise = np.sqrt(rest / freedom * course.variances)
    free = len(values) * float(weights @ ((1 - grid) / (1 + grid)))
    return _half(weights, last, freedom), _half(weights, rise, freedom), free


class _Course(NamedTuple):
    """For each φ of the grid what depends on the number of steps alone.

    `bases` (grid, time, degree + 1) spans the whitened quadratic, `determinants` are logarithms.
    `variances` (2, grid) are those of the last mean and of the rise, in units of the variance of e.
    """

    grid: Array
    bases: Array
    determinants: Array
    variances: Array


@lru_cache(maxsize=8)
def _course(count: int, span: int) -> _Course:
    # denser where noise changes fastest
    grid = np.concatenate([np.arange(-0.4, 0.9, 0.05), np.arange(0.9, 0.99, 0.02)])
    grid_of_time = np.linspace(-1, 1, count)
    design = np.asarray(np.polynomial.legendre.legvander(grid_of_time, SLOW), np.float64)
    bases = []
    determinants = []
    for phi in grid:
        q, r = np.linalg.qr(_whitened(design, phi))
        bases.append(q)
        determinants.append(math.log1p(-phi * phi) / 2 - float(np.log(np.abs(np.diag(r))).sum()))
    variances = np.array([_variances(phi, count, span) for phi in grid]).T
    return _Course(grid, np.stack(bases), np.array(determinants), variances)


def _whitened(rows: Array, phi: float) -> Array:
    """The noise that is new in each step, without what the step before passed on."""
    return np.concatenate([rows[:1] * math.sqrt(1 - phi * phi), rows[1:] - phi * rows[:-1]])


def _variances(phi: float, count: int, span: int) -> tuple[float, float]:
    """Of the last mean, and of the last less the first, in units of the variance of e."""
    lags = np.arange(1, span)
    alone = (span + 2 * float((span - lags) @ phi**lags)) / span**2
    distance = np.arange(count - 2 * span + 1, count)
    pairs = span - np.abs(distance - (count - span))
    across = float(pairs @ phi**distance) / span**2
    return alone / (1 - phi * phi), (2 * alone - 2 * across) / (1 - phi * phi)


def _half(weights: Array, scales: Array, freedom: int) -> float:
    """The size that a mixture of Student's t exceeds in 5% of cases."""
    from scipy.optimize import brentq
    from scipy.special import stdtr, stdtrit

    quantile = float(stdtrit(freedom, 0.975))
    low = quantile * float(scales.min())
    high = quantile * float(scales.max())
    if high - low <= 1e-12 * high:
        return high
    # where one scale has all the weight, it is an end, and the surplus there is 0 but for rounding
    low = low * (1 - 1e-6)
    high = high * (1 + 1e-6)

    def surplus(size: float) -> float:
        return float(weights @ stdtr(freedom, -size / scales)) - 0.025

    return float(brentq(surplus, low, high))  # type: ignore[arg-type]


K1 = "The estimate is unbiased and may be negative; the KL itself never is"


def vague(kl: float, noise: float | None) -> str:
    """A remark on a KL that is indistinguishable from 0, or negative; empty for any other."""
    if kl > (noise or 0.0):
        return ""
    return f"indistinguishable from 0{f'. {K1}' if kl < 0 else ''}"
