"""The steps of a run as detectors see them, and one judgement of changes and levels against noise.

Shares are judged by exact tests of their counts, means by Student's t. The noise of a step has two
sources: the deviation of the earlier steps, and the differences between the prompts of a step. A
short series does not show the first one well, so both count.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from tether.core.types import Readings
from tether.settings.watch import WatchConfig
from tether.stats.groups import student
from tether.watch.monitoring.texts import Text
from tether.watch.monitoring.trends import Noise, look_chance, noise, skewness

Series = Mapping[str, Sequence[float]]
"""Series of numbers by name."""
NOISE = "/noise"
"""After the name of a mean of texts: its squared standard error, with prompts as the units."""
LOG = "log "
"""Before the name of a mean of texts: the mean of log(1 + x), which is less skewed."""
SAMPLED_STEPS = 12.0
"""Steps for which the differences between prompts count in the noise of a series."""
BASELINE_PROMPTS, LONGEST_BASELINE = 24, 12
"""Prompts that the first steps need, as long as these are no more than so many steps."""


class Shift(NamedTuple):
    """The judgement on a shift: `sure` if it exceeds the noise; `least` is the smallest that does."""

    sure: bool
    least: float


NOTHING = Shift(sure=False, least=math.inf)


@dataclass(frozen=True, kw_only=True)
class View:
    """The run's first steps, its last ones, and this step's texts.

    `series` holds the `first` values and the last ones of each metric of this step, `phrases` the
    tables of as many first steps and of the last. `course` holds `TRENDS` and the KL over the
    `steps` after the warm-up. `counts` has the observations of each share in a step. `looks` and
    `tests` are the judgements so far, and those at each of them.
    """

    config: WatchConfig
    metrics: Readings
    series: Series
    phrases: Sequence[Series]
    texts: Sequence[Text]
    columns: Series
    course: Series
    counts: Mapping[str, int]
    steps: int
    looks: int
    first: int
    size: int
    limit: float = math.nan
    tests: int = 1

    @property
    def chance(self) -> float:
        """Of a false alarm by one test of this step."""
        return look_chance(self.looks) / self.tests

    @property
    def unit(self) -> float:
        """The deviation of the scores of a step, over the first steps."""
        values = self.series.get("reward/proxy_std", ())[: self.first]
        return statistics.fmean(values) or math.nan if values else math.nan

    def window(self, name: str, back: int = 0) -> Sequence[float]:
        """The last values of a metric, or those `back` windows before; none where they are too
        few.
        """
        values = self.series.get(name, ())
        end = len(values) - back * self.size
        return values[end - self.size : end] if end >= self.size else ()

    def now(self, name: str, back: int = 0) -> float:
        """The median of a window."""
        values = self.window(name, back)
        return statistics.median(values) if values else math.nan

    def start(self, name: str) -> float:
        """The mean of a metric's first values, NaN as long as the window still touches them."""
        values = self.series.get(name, ())
        enough = len(values) >= self.first + self.size
        return statistics.fmean(values[: self.first]) if enough else math.nan

    def change(self, name: str) -> tuple[float, float]:
        """A metric at the start, and now."""
        return self.start(name), self.now(name)

    def moved(self, name: str, sign: int = 1) -> Shift:
        """Judge whether the last window is above all steps before it (`sign` −1: a mean below)."""
        earlier = self.series.get(name, ())[: -self.size]
        if math.isnan(self.start(name)):
            return NOTHING
        mean = statistics.fmean(earlier)
        if name not in self.counts:
            return self.contrast(name, (float(sign),), sign * mean, len(earlier))
        from scipy.stats import hypergeom  # loading it takes a second

        before = len(earlier) * self.counts[name]
        now = self.size * self.counts[name]
        held = round(before * mean)
        evidence = self._counted(
            name,
            lambda k: float(hypergeom.sf(k - 1, before + now, held + k, now)),
        )
        return evidence._replace(least=evidence.least - mean)

    def above(self, name: str) -> Shift:
        """Judge whether a metric is above the limit by more than noise, or came there by a change
        that is more than noise.
        """
        half = replace(self, tests=2 * self.tests)
        change = half.moved(name)
        if name in self.counts:
            from scipy.stats import binom

            now = self.size * self.counts[name]
            level = half._counted(name, lambda k: float(binom.sf(k - 1, now, self.limit)))
        else:
            level = half.contrast(name, (1.0,), self.limit)
            level = level._replace(least=self.limit + level.least)
        earlier = self.series.get(name, ())[: -self.size]
        changed = statistics.fmean(earlier) + change.least if earlier else math.inf
        return Shift(change.sure or level.sure, min(changed, level.least))

    def _counted(self, name: str, tail: Callable[[int], float]) -> Shift:
        """Judge the count of a window by its exact upper tail. Where steps differ by more than a
        binomial's do, the quantile grows by the ratio of the deviations.
        """
        from scipy.special import ndtr

        if not (window := self.window(name)):
            return NOTHING
        counts = range(self.size * self.counts[name] + 1)
        chance = self.chance
        excess, freedom = self._excess(name)
        if excess > 1 + 1e-9:
            chance = float(ndtr(-student(freedom, 1 - 2 * chance) * math.sqrt(excess)))
        place = bisect_left(counts, True, key=lambda count: tail(count) <= chance)
        held = round(statistics.fmean(window) * counts[-1])
        return Shift(held >= place, place / counts[-1] if place in counts else math.inf)

    def _excess(self, name: str) -> tuple[float, float]:
        """The variance of a share from step to step, in those of a binomial, and its degrees of
        freedom.
        """
        values = self.series[name]
        count = self.counts[name]
        deviation, freedom = self._scatter(name)
        share = statistics.fmean(values[: -self.size] or values)
        sampled = self.series.get(name + NOISE, ())
        single = sum(v * (1 - v) for v in values[len(values) - len(sampled) :]) / (count - 1)
        prompts = sum(sampled) / single if single > 1e-12 else 1.0
        binomial = share * (1 - share) / count
        steps = deviation**2 / binomial if binomial > 1e-12 else 1.0
        total = freedom + SAMPLED_STEPS
        return (freedom * steps + SAMPLED_STEPS * prompts) / total, total

    def contrast(
        self,
        name: str,
        weights: Sequence[float],
        start: float = 0.0,
        steps: float = math.inf,
    ) -> Shift:
        """Judge whether windows of a metric, the last first, differ from a start by more than
        noise.

        Args:
            weights: of the windows; their sum is compared with `start`.
            steps: whose mean `start` is.
        """
        windows = [self.window(name, back) for back in range(len(weights))]
        if not all(windows):
            return NOTHING
        shift = sum(w * statistics.fmean(m) for w, m in zip(weights, windows, strict=True)) - start
        alone = math.isinf(steps) and len(weights) == 1
        deviation, freedom = noise(windows[0]) if alone else self._scatter(name, len(weights))
        sampled = self.series.get(name + NOISE, ())
        variance = deviation**2
        if sampled:
            prompts = max(statistics.fmean(sampled), statistics.fmean(sampled[-self.size :]))
            variance = (freedom * variance + SAMPLED_STEPS * prompts) / (freedom + SAMPLED_STEPS)
            freedom += SAMPLED_STEPS
        share = sum(weight**2 for weight in weights) / self.size + 1 / steps
        quantile = student(freedom, 1 - 2 * self.chance)
        skew = skewness(self.series[name][: -self.size * len(weights)]) / math.sqrt(self.size)
        skew *= sum(weight**3 for weight in weights) / sum(weight**2 for weight in weights) ** 1.5
        quantile += max(0.0, skew) * (quantile**2 - 1) / 6  # Cornish and Fisher 1938
        least = quantile * math.sqrt(variance * share)
        return Shift(shift > least, least)

    def _scatter(self, name: str, windows: int = 1) -> Noise:
        """The noise of a step's value, as the steps before the windows show it."""
        values = self.series[name]
        earlier = values[: -self.size * windows]
        return noise(earlier) if len(earlier) >= 6 else noise(values, self.size)
