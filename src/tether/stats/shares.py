"""Shares, and differences of two shares of the same observations."""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

from tether.stats.counts import FEW, few_interval
from tether.stats.estimates import Estimate, without_interval
from tether.stats.groups import (
    FEWEST_EVENTS,
    FEWEST_UNLIKE,
    Array,
    Bounds,
    Groups,
    Influence,
    by_group,
    influence_on_mean,
    unlike,
)


def wilson_interval(
    successes: float,
    total: float,
    confidence: float = 0.95,
) -> Bounds:
    """Compute Wilson's score interval of a proportion.

    Equation: ``(p̂ + z²/2n ± z √(p̂(1−p̂)/n + z²/4n²)) / (1 + z²/n)`` with ``p̂ = successes / n``.
    Paper: Wilson 1927, https://doi.org/10.1080/01621459.1927.10502953; Brown et al. 2001,
        https://doi.org/10.1214/ss/1009213286.
    Units: both numbers may be fractional; the interval is in [0, 1], and is [0, 1] without trials.
    Raises: ``ValueError`` when ``successes`` is not between 0 and ``total``, or ``confidence`` not
        inside (0, 1).
    Trap: it takes trials to be independent, and with fewer than ten successes or failures holds the
        truth in as few as 92%.
    """
    _check(successes, total, confidence)
    if not total:
        return 0.0, 1.0
    from scipy.special import ndtri

    z = float(ndtri(0.5 + confidence / 2))
    share = successes / total
    centre = share + z * z / (2 * total)
    spread = z * math.sqrt(share * (1 - share) / total + z * z / (4 * total * total))
    scale = 1 + z * z / total
    # At 0 and 1 the formula gives the bound exactly, but rounding can push it past the edge.
    low = 0.0 if share == 0 else max(0.0, (centre - spread) / scale)
    high = 1.0 if share == 1 else min(1.0, (centre + spread) / scale)
    return low, high


@lru_cache(maxsize=4096)
def mid_interval(successes: float, total: float, confidence: float = 0.95) -> Bounds:
    """Compute the mid-P interval of a proportion, which misses a rare event less often than Wilson's.

    Equation: at each bound p, ``P(X > x) + P(X = x) / 2`` or ``P(X < x) + P(X = x) / 2`` of X from
    Binomial(n, p) is (1 − confidence) / 2. Without any success, or without any failure, the other
    bound is Clopper and Pearson's, where ``P(X = x)`` counts whole.
    Paper: Lancaster 1961, https://doi.org/10.1080/01621459.1961.10482105; Clopper and Pearson 1934,
    https://doi.org/10.1093/biomet/26.4.404.
    Raises: as `wilson_interval`.
    """
    _check(successes, total, confidence)
    if not total:
        return 0.0, 1.0
    from scipy.optimize import brentq
    from scipy.special import betainc, betaincinv

    failures = total - successes
    tail = (1 - confidence) / 2
    if successes == 0:
        return 0.0, float(betaincinv(1.0, failures, 1 - tail))
    if failures == 0:
        return float(betaincinv(successes, 1.0, tail)), 1.0

    def above(p: float) -> float:
        more = betainc(successes + 1, failures, p)
        as_many = betainc(successes, failures + 1, p)
        return float(more + as_many) / 2

    return (
        float(brentq(lambda p: above(p) - tail, 0.0, 1.0)),  # type: ignore[arg-type]
        float(brentq(lambda p: above(p) - 1 + tail, 0.0, 1.0)),  # type: ignore[arg-type]
    )


def _check(successes: float, total: float, confidence: float) -> None:
    if not 0 <= successes <= total:
        raise ValueError(f"successes must lie between 0 and total, got {successes} of {total}")
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must lie between 0 and 1, got {confidence}")


def share_interval(
    value: float,
    influence: Influence,
    trials: float,
    *,
    spread: float = 1.0,
    confidence: float = 0.95,
) -> Bounds:
    """Compute the interval of a share over groups, or of a statistic that is similar near 0 and 1:
    F1 and agreement.

    Equation: Wilson's for n trials, where ``1/n = max(se² / p(1−p) + u, v/N)`` with ``u = v (1/G −
    1/N) / (2k + 1)``. This is the jackknife's error, no smaller than that of N independent
    observations. The term u adds half an imaginary carrier with equal observations to the k real
    ones, because few carriers show too little of the correlation. The term v is the variance of an
    observation over p(1−p), less than one for observations between 0 and 1.
    Paper: Korn and Graubard 1998, https://www150.statcan.gc.ca/n1/en/catalogue/12-001-X19980024356.
    The imaginary carrier is ours, in place of their quantile of Student's t. Wilson's interval is
    nearer to ½. Both together hold the truth in 97 to 99% of draws of 10 to 20 groups.

    Args:
        trials: N, the observations.
        spread: v, the variance of an observation over p(1−p).
        influence: its `equal` is G.
    Assumes: groups are drawn independently.
    """
    inside = min(max(value, 0.0), 1.0)
    variance = inside * (1 - inside)
    groups = influence.equal
    carriers = influence.carriers
    observed = influence.error**2 / variance if variance > 0 else 0.0
    # observations that are all alike tell nothing of how they differ
    spread = spread if spread > 0 else 1.0
    unseen = spread * max(1 / groups - 1 / trials, 0.0) / (2 * carriers + 1)
    effective = 1 / max(observed + unseen, spread / trials + (0 if carriers else unseen))
    return wilson_interval(inside * effective, effective, confidence)


def trials_interval(successes: int, total: int, confidence: float = 0.95) -> Bounds:
    """Compute the interval of a proportion of independent trials: `mid_interval`, and with fewer
    than ten successes or failures `few_interval`.
    """
    if min(successes, total - successes) < FEW:
        return few_interval(successes, total, confidence)
    return mid_interval(successes, total, confidence)


def grouped_share(
    values: Array,
    groups: Groups | None,
    confidence: float = 0.95,
) -> Estimate:
    """Estimate the mean of values between 0 and 1, most of them 0 or 1.

    Where each is a whole success or failure in a group of its own, the interval is
    `trials_interval`. So it is where equally large groups agree within: then each group is one
    observation. `share_interval` is for the rest: where one to four groups differ from the
    commonest there is none.
    """
    value = float(values.mean())
    count = len(values)
    sums, counts = by_group(values, groups)
    whole = bool(np.isin(values, (0.0, 1.0)).all())
    agreeing = np.ptp(counts) == 0 and np.ptp(sums) > 0 and np.isin(sums / counts, (0, 1)).all()
    if whole and (len(sums) == count or agreeing):
        return Estimate(
            value,
            *trials_interval(round(float((sums / counts).sum())), len(sums), confidence),
            count,
        )
    if len(sums) < 2:
        return without_interval(value, count, "groups: all observations are of one")
    variance = value * (1 - value)
    if 0 < unlike(sums / counts) < (FEWEST_EVENTS if whole else FEWEST_UNLIKE):
        return without_interval(
            value,
            count,
            f"groups differ: {unlike(sums / counts)} of {len(sums)}",
        )
    # beyond what rounding leaves of equal values
    spread = float(values.var()) / variance if np.ptp(values) > 1e-9 else 1.0
    influence = influence_on_mean(sums, counts)
    return Estimate(
        value,
        *share_interval(value, influence, count, spread=spread, confidence=confidence),
        count,
    )


def grouped_balance(
    values: Array,
    groups: Groups | None,
    confidence: float = 0.95,
) -> Estimate:
    """Estimate the mean of losses, ties and wins, given as 0, ½ and 1.

    Equation: w is the share of wins and l that of losses. Each has its own interval, and ρ is their
    correlation. The balance ``d = w − l`` lies above ``d − √(a² + b² − 2ρab)``. Here a is w less
    its low bound, and b is the high bound of l less l. The high bound is the same with the sides
    exchanged. The mean is ``(1 + d) / 2``. Without ties it is the interval of w. If fewer than five
    groups have an observation that is not a tie, there is no interval.
    Paper: Zou and Donner 2008, https://doi.org/10.1002/sim.3095; Newcombe 1998,
    https://doi.org/10.1002/(SICI)1097-0258(19981130)17:22<2635::AID-SIM954>3.0.CO;2-C.
    """
    if not (values == 0.5).any():
        return grouped_share(values, groups, confidence)
    wins = (values == 1).astype(np.float64)
    losses = (values == 0).astype(np.float64)
    deciding = by_group(wins + losses, groups)[0]
    if (decided := np.count_nonzero(deciding)) < FEWEST_EVENTS:
        why = f"groups differ: {decided} of {len(deciding)} hold more than ties"
        return without_interval(float(values.mean()), len(values), why)
    (won, won_moves), (lost, lost_moves) = (
        _wilson_share(side, groups, confidence) for side in (wins, losses)
    )
    if won.reason:
        return won._replace(value=float(values.mean()))
    together = math.sqrt(won_moves.moment(2) * lost_moves.moment(2))
    rho = float(won_moves.parts @ lost_moves.parts) / together if together > 0 else 0.0
    difference = won.value - lost.value

    def reach(a: float, b: float) -> float:
        return math.sqrt(max(a * a + b * b - 2 * rho * a * b, 0.0))

    low = difference - reach(won.value - won.low, lost.high - lost.value)
    high = difference + reach(won.high - won.value, lost.value - lost.low)
    return Estimate(
        (1 + difference) / 2,
        (1 + max(low, -1.0)) / 2,
        (1 + min(high, 1.0)) / 2,
        len(values),
    )


def _wilson_share(
    side: Array,
    groups: Groups | None,
    confidence: float,
) -> tuple[Estimate, Influence]:
    """One side's share, by Wilson's interval however few its events are, and its influence."""
    sums, counts = by_group(side, groups)
    value = float(side.mean())
    count = len(side)
    influence = influence_on_mean(sums, counts)
    if len(sums) == count:
        return Estimate(
            value,
            *wilson_interval(float(side.sum()), count, confidence),
            count,
        ), influence
    if len(sums) < 2:
        return without_interval(value, count, "groups: all observations are of one"), influence
    return Estimate(
        value,
        *share_interval(value, influence, count, confidence=confidence),
        count,
    ), influence
