"""Means of observations that hang together in groups."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from tether.stats.estimates import Estimate, without_interval
from tether.stats.groups import (
    FEWEST_UNLIKE,
    Array,
    Bounds,
    Groups,
    Influence,
    by_group,
    influence_on_mean,
    student,
    unlike,
)
from tether.stats.shares import grouped_balance, grouped_share

FEWEST_GROUPS = 16
"""Groups from which on the interval of a mean holds its level, skewed quantities among them
(lognormal, σ = 1: 93%).
"""


def grouped_mean(
    values: Array,
    groups: Groups | None,
    *,
    bounds: Bounds | None = None,
    confidence: float = 0.95,
) -> Estimate:
    """Estimate a mean: `mean_interval`. If values have only two or three equidistant levels, the
    interval of a share.

    Args:
        values: observations; a group that has more of them weighs more.
        groups: the group of each; unset, each is its own.
        bounds: least and greatest possible value, where they are known.

    Trap: the observed levels are taken for all levels in two cases. In the first, the values are 0
    and 1, or −1, 0 and 1. In the second, 16 groups or more have two or three other levels. If all
    values are alike, without known bounds, the frequency of other values is unknown.
    """
    value = float(values.mean())
    count = len(values)
    if not np.isfinite(values).all():
        return without_interval(value, count, "finite values: an infinite one has no mean")
    sums, counts = by_group(values, groups)
    if (levels := _levels(values, len(sums), bounds)) is not None:
        low, high, steps = levels
        estimate = (grouped_share if steps == 1 else grouped_balance)(
            (values - low) / (high - low),
            groups,
            confidence,
        )
        return Estimate(
            value,
            low + (high - low) * estimate.low,
            low + (high - low) * estimate.high,
            count,
            estimate.reason,
        )
    if why := _lacking(sums / counts):
        return without_interval(value, count, why)
    influence = influence_on_mean(sums, counts)
    if influence.error == 0:
        return without_interval(value, count, "groups differ: by no more than rounding")
    return Estimate(value, *mean_interval(value, influence, confidence), count)


FEWEST_SEEDS = 3
"""Runs from which on the interval of `mean_of_runs` is no wider than it can be of use."""


def mean_of_runs(
    runs: Sequence[Estimate],
    over_prompts: Estimate | None = None,
) -> tuple[Estimate, float]:
    """Estimate the mean of several seeds whose runs have prompts, and perhaps a start, in common.

    Equation: ``mean ± t √(e² + s²/S)`` with the deviation s of S runs and the error e that all
    share, which is that of `over_prompts`. Without one, e is the largest error of a run's own
    interval, and at least s. A shared start errs about as much as an end. With the part v of s, t
    has ``(S − 1) (e² + s²/S) / v`` degrees of freedom, the second result.
    Args: ``over_prompts`` is the mean of all runs with its interval over prompts.
    Paper: crossed groups: Cameron, Gelbach and Miller 2011, https://doi.org/10.1198/jbes.2010.07136.
    Trap: without `over_prompts` the interval is too wide where runs share little.
    """
    values = np.array([run.value for run in runs])
    value = float(values.mean())
    count = len(runs)
    if count < FEWEST_SEEDS:
        why = f"values: {count}, and {FEWEST_SEEDS} are needed"
        return without_interval(value, count, why), 1.0
    variance = float(values.var(ddof=1)) if np.ptp(values) > 1e-12 * abs(value) else 0.0
    shared = [over_prompts] if over_prompts else runs
    reach = max((max(one.high - one.value, one.value - one.low) for one in shared), key=_known)
    if math.isinf(reach):
        return without_interval(value, count, "prompts in a run"), 1.0
    own = (_known(reach) / student(math.inf, 0.95)) ** 2
    seen = variance / count + (0.0 if over_prompts else max(variance - own, 0.0))
    if not own + seen:
        return without_interval(value, count, f"values differ: all {count} are alike"), 1.0
    freedom = (count - 1) * (own + seen) / seen if seen else math.inf
    reach = student(freedom, 0.95) * math.sqrt(own + seen)
    return Estimate(value, value - reach, value + reach, count), freedom


def _known(reach: float) -> float:
    """0 for a bound that was not recorded."""
    return 0.0 if math.isnan(reach) else reach


def _levels(
    values: Array,
    groups: int,
    bounds: Bounds | None,
) -> tuple[float, float, int] | None:
    """The least and the greatest of two or three levels, and the number of steps between them; None
    of anything else.
    """
    if np.isin(values, (0.0, 1.0)).all() and bounds is None and np.ptp(values):
        return 0.0, 1.0, 1
    if np.isin(values, (-1.0, 0.0, 1.0)).all() and bounds is None and np.ptp(values):
        return -1.0, 1.0, 2
    seen = np.unique(values)
    low, high = bounds or (float(seen[0]), float(seen[-1]))
    if high <= low or (bounds is None and groups < FEWEST_GROUPS):
        return None
    places = (seen - low) / (high - low)
    steps = next(
        (
            steps
            for steps in (1, 2)
            if np.allclose(places * steps, np.round(places * steps), atol=1e-9)
        ),
        None,
    )
    return None if steps is None else (low, high, steps)


def _lacking(means: Array) -> str:
    """The reason why groups with these means give no interval; empty where they do."""
    if len(means) < FEWEST_GROUPS:
        return f"groups: {len(means)}, and {FEWEST_GROUPS} are needed"
    if np.ptp(means) == 0:
        return f"groups differ: all {len(means)} are alike"
    others = unlike(means)
    return f"groups differ: {others} of {len(means)}" if others < FEWEST_UNLIKE else ""


def mean_interval(
    value: float,
    influence: Influence,
    confidence: float = 0.95,
    *,
    skewed: bool = True,
) -> Bounds:
    """Compute the interval of a mean, or of a similar statistic, over groups.

    Equation: the hull of two intervals with the standard error se of the jackknife. Student's is
    ``value ± t se``. Hall's undoes the skew γ of the groups: ``value − se g(±t)`` with ``g(y) = 3/a
    ((1 + a (y − a/6))^{1/3} − 1)`` and ``a = γ / √G``. The degrees of freedom of t are ``2 k / (1 −
    k/G)`` with k carriers of the error (Satterthwaite): those of an error whose square has the
    groups' kurtosis. They are at most one fewer than equal groups. If observations are bounded on
    both sides, and so not `skewed`, only Student's is used: there the hull holds the truth in 97 to
    99%.
    Paper: Hall 1992, https://doi.org/10.1111/j.2517-6161.1992.tb01872.x; Satterthwaite 1946,
        https://doi.org/10.2307/3002019.
    Assumes: groups are drawn independently; a tail that no group shows is unknown.
    """
    groups = influence.groups
    carriers = influence.carriers
    freedom = 2 * carriers / max(1 - carriers / groups, 1e-9)
    quantile = student(min(max(freedom, 1.0), max(influence.equal - 1, 1.0)), confidence)
    error = influence.error
    second = influence.moment(2) / groups
    if error == 0 or not skewed:
        return value - quantile * error, value + quantile * error
    skew = (
        influence.moment(3)
        / groups
        / second**1.5
        * math.sqrt(groups * (groups - 1))
        / max(groups - 2, 1)
    )
    a = skew / math.sqrt(groups)

    def unskewed(y: float) -> float:
        return y if abs(a) < 1e-6 else 3 / a * (float(np.cbrt(1 + a * (y - a / 6))) - 1)

    return value - error * max(quantile, unskewed(quantile)), value - error * min(
        -quantile,
        unskewed(-quantile),
    )
