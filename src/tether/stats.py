"""Numbers with intervals that say how far to believe them, for observations that hang together in groups.

One interval serves all: a statistic's standard error comes from leaving out one group at a time (the jackknife), so nothing is
drawn at random. Means take Student's quantiles with it, shares Wilson's interval for as many trials as have that error.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


EstimateFields = dict[str, float | None]
"""An estimate as JSON holds it: value, low, high and count, an infinite bound being None."""


class Estimate(NamedTuple):
    """A number, its confidence interval, and how many observations it rests on."""

    value: float
    low: float
    high: float
    count: int

    def as_dict(self) -> EstimateFields:
        """Give the four fields by name, with None for what JSON cannot hold."""
        return {name: number if math.isfinite(number) else None for name, number in self._asdict().items()}


def group_indices(groups: Sequence[Hashable]) -> NDArray[np.intp]:
    """The number of each observation's group, counted in the order in which groups first appear."""
    numbers = {group: number for number, group in enumerate(dict.fromkeys(groups))}
    return np.array([numbers[group] for group in groups], dtype=np.intp)


class Spread(NamedTuple):
    """How far a statistic would move with other groups: its standard error, how many they are, how many equal ones they equal."""

    error: float
    groups: int
    equal: float

    def quantile(self, confidence: float) -> float:
        """Student's, with one degree of freedom less than equal groups."""
        return _student(max(self.equal - 1.0, 1.0), confidence)


def _student(freedom: float, confidence: float) -> float:
    from scipy.special import stdtrit  # loading it takes longer than everything else in this module

    return float(stdtrit(freedom, 0.5 + confidence / 2))


def jackknife(without: Array, sizes: Array | None = None, repeats: Array | None = None) -> Spread:
    """Estimate a statistic's standard error from its values without one group each.

    Equation: ``se² = (G − 1)/G Σ (θ_(i) − θ̄)²``; G groups of sizes n amount to ``(Σ n)² / Σ n²`` equal ones (Kish).
    Paper: Efron and Stein 1981, https://doi.org/10.1214/aos/1176345462; few groups: Cameron and Miller 2015,
    https://doi.org/10.3368/jhr.50.2.317.
    Shapes: ``without`` has a value a group; ``sizes`` how many observations stand in each (unset: equally many), ``repeats`` how
    many groups are exactly like it (unset: one).
    Trap: a statistic that jumps, as a median or the place of a maximum does, has no such error.
    """
    repeats, sizes = (np.ones(len(without)) if given is None else given for given in (repeats, sizes))
    groups = float(repeats.sum())
    centred = without - repeats @ without / groups
    error = math.sqrt((groups - 1) / groups * float(repeats @ centred**2))
    return Spread(error, round(groups), float((repeats @ sizes) ** 2 / (repeats @ sizes**2)))


def mean_interval(value: float, spread: Spread, confidence: float = 0.95) -> tuple[float, float]:
    """Compute Student's interval around a mean.

    Trap: on some twenty groups of a heavily skewed quantity it still misses one time in seven: the tail was not seen.
    """
    half = spread.quantile(confidence) * spread.error
    return value - half, value + half


def share_interval(value: float, spread: Spread, confidence: float = 0.95) -> tuple[float, float]:
    """Compute Wilson's interval of a share, or of what behaves like one near 0 and 1, as F1 and agreement do.

    Equation: Wilson's for ``n = 1 / (se² / p(1−p) + 1 / (G G_e))`` trials, G_e the equal groups, and Student's quantile. The
    second term is one imaginary group that speaks with one voice: near 0 and 1 few groups show too little of their spread.
    Paper: Korn and Graubard 1998, https://www150.statcan.gc.ca/n1/en/catalogue/12-001-X19980024356.
    Trap: at 0 and 1 exactly no group shows any spread; there each group counts as one trial.
    """
    if not 0 < value < 1:
        return wilson_interval(min(max(value, 0.0), 1.0) * spread.groups, spread.groups, confidence)
    trials = 1 / (spread.error**2 / (value * (1 - value)) + 1 / (spread.groups * spread.equal))
    return _wilson(value, trials, spread.quantile(confidence))


def wilson_interval(successes: float, total: int, confidence: float = 0.95) -> tuple[float, float]:
    """Compute Wilson's score interval of a proportion, which holds its level near 0 and 1 and on few trials.

    Equation: ``(p̂ + z²/2n ± z √(p̂(1−p̂)/n + z²/4n²)) / (1 + z²/n)`` with ``p̂ = successes / n``.
    Paper: Wilson 1927, https://doi.org/10.1080/01621459.1927.10502953; Brown et al. 2001, https://doi.org/10.1214/ss/1009213286.
    Units: ``successes`` may be fractional (ties count half); the interval is in [0, 1], and is [0, 1] without trials.
    Raises: ``ValueError`` when ``successes`` is not between 0 and ``total``, or ``confidence`` not inside (0, 1).
    Trap: it takes trials to be independent; several comparisons of one prompt are not (use groups).
    """
    if not 0 <= successes <= total:
        raise ValueError(f"successes must lie between 0 and total, got {successes} of {total}")
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must lie between 0 and 1, got {confidence}")
    if not total:
        return 0.0, 1.0
    from scipy.special import ndtri

    return _wilson(successes / total, total, float(ndtri(0.5 + confidence / 2)))


def _wilson(share: float, trials: float, z: float) -> tuple[float, float]:
    centre = share + z * z / (2 * trials)
    spread = z * math.sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials))
    scale = 1 + z * z / trials
    # At 0 and 1 the formula gives the bound exactly, but rounding can push it past the edge.
    low = 0.0 if share == 0 else max(0.0, (centre - spread) / scale)
    high = 1.0 if share == 1 else min(1.0, (centre + spread) / scale)
    return low, high


FEWEST = 6
"""Steps from which on noise can be told from movement at all."""


class Trend(NamedTuple):
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
    def gain(self) -> float | EstimateFields:
        """The rise; with the interval where there is one."""
        value, half = self.last - self.first, math.sqrt(2) * (self.noise or 0.0)
        return value if self.noise is None else Estimate(value, value - half, value + half, self.count).as_dict()


def trend(values: Sequence[float]) -> Trend | None:
    """Of the first and the last tenth of the steps; of up to five, but no more than a quarter, where a tenth is fewer."""
    count = len(values)
    if not count:
        return None
    span, noise = max(1, count // 10, min(5, count // 4)), None
    if count >= FEWEST:
        variance = sum((b - a) ** 2 for a, b in itertools.pairwise(values)) / (2 * (count - 1))
        noise = _student(2 * (count - 1) ** 2 / (3 * count - 4), 0.95) * math.sqrt(variance / span)
    return Trend(sum(values[:span]) / span, sum(values[-span:]) / span, span, count, noise)


K1 = "the estimate (k1, the mean log ratio of what was sampled) is unbiased and may be negative, the KL itself never"


def vague(kl: float, noise: float | None) -> str:
    """A remark on a KL that is indistinguishable from 0, or negative; empty for any other."""
    if kl > (noise or 0.0):
        return ""
    return f"indistinguishable from 0{f': {K1}' if kl < 0 else ''}"
