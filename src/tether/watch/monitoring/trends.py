"""Trends of a run's numbers, and whether what is trained is at rest: judged by the noise that the
numbers themselves show.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from tether.watch.monitoring.texts import co_moments

KL, TRENDS = "kl/policy_reference_k1", ("reward/proxy", "policy/entropy", "response/length")
"""Metrics that change where a policy does."""
LEAST_TREND = 15
"""Steps that it takes to see that nothing has a trend."""
FALSE_ALARMS = 0.02
"""Scale of the chance that a look sounds by noise. The chances of steps 6 to 400 add up to 1.2 times
it. Neighbouring looks share most of their values, so fewer runs have an alarm.
"""
RESTING_KL, SMALL_KL, HELD_KL = 0.01, 0.1, 0.25
"""Nats a response. At such a KL scores can have risen by at most √(2 KL) of their deviation: a
seventh, less than half, or seven tenths.
"""
HELD_PRICE = 0.5
"""Deviations of the score that a nat costs. The best policy under a penalty β is π_ref exp(r/β),
normalised (eq. 4 of https://arxiv.org/abs/2305.18290). For normal scores and a price p, it is 1/p
deviations above the start, for 1/(2p²) nats. Here it is 2 deviations for 2 nats.
"""


class Drift(NamedTuple):
    """By how much a line through a series rises from its first value to its last, and the standard
    error of that.
    """

    change: float
    error: float
    sure: bool
    """Three standard errors from 0, against time or its logarithm, in which what moves at first and
    then rests shows.
    """

    def __str__(self) -> str:
        return f"{self.change:+.2g} ± {self.error:.2g}"


def drift(values: Sequence[float]) -> Drift:
    """The trend of a series of three values or more, whose noise is that about the line of least
    squares.
    """
    times = np.arange(1.0, len(values) + 1)
    lines = []
    for time in (times, np.log(times)):
        freedom, sxx, syy, sxy = co_moments(time.tolist(), values)
        span = float(time[-1] - time[0])
        if not sxx:  # the values' squares are beyond float64
            return Drift(math.nan, math.inf, sure=False)
        lines.append(
            (
                span * sxy / sxx,
                span * math.sqrt(max(0.0, syy - sxy**2 / sxx) / (freedom - 1) / sxx),
            ),
        )
    return Drift(*lines[0], sure=any(abs(change) > 3 * error for change, error in lines))


def still(course: Mapping[str, Sequence[float]], spread: float) -> tuple[bool | None, str]:
    """Tell whether no series has a trend (None: too few values, or too noisy to say), and the
    trends in words.

    Args:
        spread: a score's deviation; half of one is the rise that must be ruled out.
    """
    drifts = {name: drift(values) for name, values in course.items() if len(values) >= LEAST_TREND}
    evidence = ", ".join(f"{name} {trend}" for name, trend in drifts.items())
    if any(trend.sure for trend in drifts.values()):
        return False, evidence
    proxy = drifts.get("reward/proxy")
    noisy = proxy is not None and proxy.change + 2 * proxy.error > 0.5 * spread
    return (None if noisy or not drifts else True), evidence


class Noise(NamedTuple):
    """The deviation of one step's value, as far as neighbours do not share it, and its degrees of
    freedom.
    """

    deviation: float
    freedom: float


def noise(values: Sequence[float], last: int = 0) -> Noise:
    """The noise of a series about a parabola in time and a jump at its `last` values.

    Equation: ``s √((1 + φ) / (1 − φ))`` with the residual deviation s, and the correlation φ of
    neighbouring residuals, at least 0. Residuals of k columns have a correlation of about −k/n.
    """
    series = np.asarray(values, dtype=np.float64)
    count = len(series)
    time = np.linspace(-1, 1, count)
    columns = [time**power for power in range(1 + min(2, count // 6))]
    columns += [np.arange(count) >= count - last] if 0 < last < count else []
    basis = np.linalg.qr(np.column_stack(columns))[0]
    with np.errstate(over="ignore", invalid="ignore"):
        rest = series - basis @ (basis.T @ series)
        squares = float(rest @ rest)
    freedom = count - len(columns)
    if not math.isfinite(squares):
        return Noise(math.inf, 1.0)
    if freedom < 1 or squares <= 1e-18 * float(series @ series):
        return Noise(0.0, max(float(freedom), 1.0))
    phi = float(rest[1:] @ rest[:-1]) / squares + len(columns) / count
    phi = min(max(phi, 0.0), 0.9)
    slow = (1 + phi) / (1 - phi)
    return Noise(math.sqrt(squares / freedom * slow), max(freedom / slow, 1.0))


def skewness(values: Sequence[float]) -> float:
    """The third standardized moment; 0 of equal values."""
    away = np.asarray(values, dtype=np.float64)
    away = away - away.mean() if len(away) else away
    variance = float(away @ away) / max(len(away), 1)
    return float(np.mean(away**3)) / variance**1.5 if variance > 1e-24 else 0.0


def look_chance(step: int) -> float:
    """The chance that the look at a step sounds by noise.

    Equation: 0.02 / (n ln n), whose sum over the steps grows slowly.
    """
    return FALSE_ALARMS / (max(step, 3) * math.log(max(step, 3)))


def near_reference(kls: Sequence[float]) -> tuple[bool | None, str]:
    """Return whether the KL of the later half is within its error of 0, and small for sure (None:
    too noisy), with a text.

    The noise is that of the steps. In bfloat16 the smallest change of the weights rounds other
    tokens differently. So the KL of an unmoved policy is 0 only on average.
    """
    later = kls[len(kls) // 2 :]
    mean = statistics.fmean(later)
    error = statistics.stdev(later) / math.sqrt(len(later))
    evidence = f"a KL of {mean:.2g} ± {error:.1g} nats a response"
    if mean >= max(RESTING_KL, 2 * error):
        return False, evidence
    return (
        True if mean < max(RESTING_KL, error) and abs(mean) + 2 * error < SMALL_KL else None
    ), evidence
