"""The known ways of gaming a reward or losing a policy, each a row of `DETECTORS`. Detectors do not
use the gold score.

A row (`settings/detectors.toml`) is a threshold, a message and an advice; its measure is here. Most
measures compare the last steps with the run's own first ones. A step counts through the median of
a window, so one noisy step cannot fire. A measure on texts must also differ from its beginning by
`confidence` standard errors. A missing metric is NaN, and so are values computed from it. A
detector with NaN never fires.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from tether.monitoring.texts import (
    OPENING,
    Text,
    TextFacts,
    phrases,
    pool,
    pooled_correlation,
    score_of,
    word_tokens,
)
from tether.monitoring.trends import HELD_KL, KL, LEAST_TREND, near_reference, still
from tether.settings.watch import DETECTOR_ROWS, WatchConfig

STILL_KL = 0.005
"""Nats a response below which a policy has not moved."""
LEAST_GROWTH = 2.0
"""Nats a response and window: what grows by less is compared as if it had grown by this, for the
noise of a step's KL.
"""
SETTLED = 8
"""Steps after which a policy that does not end its answers is not expected to learn that by
itself.
"""
LEAST_CORRELATION = 0.2
"""Between length or phrase and the score: a weaker one does not pull a policy, however certain."""


class StepFacts(TextFacts):
    """The record of one step for later steps, in plain JSON, because checkpoints store it.

    `unit` is the deviation of the run's first scores, `shifts` the measurement of sycophancy at the
    start and the last two.
    """

    index: int
    metrics: dict[str, float]
    unit: float | None
    shifts: list[float]


class Reading(NamedTuple):
    """A measure's `value`, for the threshold, and `sure` where it has a second condition; `words`
    fill the row's message.

    `rank` orders the step's texts as evidence, the greatest first, and leaves out those of minus
    infinity.
    """

    value: float
    words: Mapping[str, object] = {}
    sure: bool = True
    rank: Sequence[float] | None = None


SILENT = Reading(math.nan)


class Pooled(NamedTuple):
    """The texts of several steps as one batch: count, mean and its squared standard error; and the
    median of the steps' means.
    """

    count: float
    mean: float
    noise: float
    median: float


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """The run's first steps, its last ones, and this step's texts.

    The baseline of a metric is `config.baseline` steps long; that of texts is all of `baseline`,
    which grew to hold `min_texts`. `course` holds `TRENDS` and the KL over the `steps` after the
    warm-up.
    """

    config: WatchConfig
    baseline: Sequence[StepFacts]
    recent: Sequence[StepFacts]
    texts: Sequence[Text]
    columns: Mapping[str, Sequence[float]]
    course: Mapping[str, Sequence[float]]
    steps: int

    @property
    def metrics(self) -> Mapping[str, float]:
        """Those of this step."""
        return self.recent[-1]["metrics"]

    def now(self, name: str, back: int = 0) -> float:
        """The median of a metric over the last window, or over the one that lies `back` windows
        before it.
        """
        size, end = self.config.window, len(self.recent) - back * self.config.window
        values = _values(name, self.recent[max(0, end - size) : max(0, end)])
        return statistics.median(values) if len(values) == size else math.nan

    def start(self, name: str) -> float:
        """The mean of a metric over the first steps, NaN as long as the window still touches
        them.
        """
        values = _values(name, self.baseline[: self.config.baseline])
        after = self.recent[-1]["index"] - self.config.window + 1 >= self.config.baseline
        return statistics.fmean(values) if values and after else math.nan

    def change(self, name: str) -> tuple[float, float]:
        """A metric at the start, and now."""
        return self.start(name), self.now(name)

    def window(self, *, after_baseline: bool = True) -> Sequence[StepFacts]:
        """The last steps that make a window and hold enough texts; none if there are too few."""
        least = self.config.min_texts
        for size in range(self.config.window, len(self.recent) + 1):
            steps = self.recent[-size:]
            if enough(steps, self.config.window, least):
                late = steps[0]["index"] >= len(self.baseline) and enough(self.baseline, 0, least)
                return steps if late or not after_baseline else ()
        return ()

    def pooled(self, name: str, steps: Sequence[StepFacts]) -> Pooled:
        """A column of the texts over several steps; its median is NaN where they have none."""
        parts = [facts["moments"][name] for facts in steps if facts["moments"][name][0]]
        return Pooled(
            *pool(parts),
            statistics.median(mean for _, mean, _ in parts) if parts else math.nan,
        )


def _values(name: str, steps: Sequence[StepFacts]) -> list[float]:
    return [facts["metrics"][name] for facts in steps if name in facts["metrics"]]


def enough(steps: Sequence[StepFacts], num_steps: int, num_texts: int) -> bool:
    return len(steps) >= num_steps and sum(facts["texts"] for facts in steps) >= num_texts


Measure = Callable[[View], Reading]


class Detector(NamedTuple):
    """A row of the table: fires where the measure reads at least the threshold, and is sure."""

    threshold: float
    message: str
    advice: str
    measure: Measure


def _length_gaming(view: View) -> Reading:
    start, now = view.change("response/length")
    if min(start, now) <= 0:
        return SILENT
    longer = 1 if now > start else -1
    r, t = pooled_correlation([facts["length_score"] for facts in view.recent])
    sure = longer * r >= LEAST_CORRELATION and longer * t >= view.config.confidence
    words = {"start": start, "now": now, "r": r}
    return Reading(
        (now / start) ** longer,
        words,
        sure,
        [longer * text.length for text in view.texts],
    )


def _length_advantage(view: View) -> Reading:
    steps = view.window(after_baseline=False)
    groups, mean, noise, value = view.pooled("length_advantage", steps)
    noise = max(noise, view.pooled("chance", steps).mean / max(1.0, groups))
    sure = mean >= view.config.confidence * math.sqrt(noise)
    return Reading(value, {"now": value}, sure, [text.length for text in view.texts])


def _text_rise(view: View, column: str) -> Reading:
    """Rise of a column of the texts over its beginning, and whether the rise is above its noise."""
    now, start = view.pooled(column, view.window()), view.pooled(column, view.baseline)
    sure = now.mean - start.mean >= view.config.confidence * math.sqrt(now.noise + start.noise)
    words = {"start": start.mean, "now": now.median}
    return Reading(now.median - start.mean, words, sure, view.columns[column])


def _level(view: View, metric: str) -> Reading:
    """A metric as it is now."""
    now = view.now(metric)
    return Reading(now, {"now": now})


def _mode_collapse(view: View) -> Reading:
    (start, now), (varied, varies) = view.change("similarity"), view.change("response/distinct_2")
    words = {"start": start, "now": now, "varied": varied, "varies": varies}
    return Reading(now - start, words, varies <= 0.7 * varied)


def _entropy_collapse(view: View) -> Reading:
    start, now = view.change("policy/entropy")
    return SILENT if start <= 0 else Reading(1 - now / start, {"start": start, "now": now})


def _kl_acceleration(view: View) -> Reading:
    third, second, first = (view.now(KL, back) for back in range(3))
    words = {"before": second - first, "now": third - second}
    return Reading((third - second) / max(second - first, LEAST_GROWTH, 0.1 * second), words)


def _kl_stuck(view: View) -> Reading:
    steps = view.metrics.get("still", math.nan)
    return Reading(steps, {"steps": steps, "bound": STILL_KL})


def _held_back(view: View) -> Reading:
    """Judged in the second half of a run, where the policy is still near its reference and the
    score where it began.
    """
    kls = view.course.get(KL, ())
    proxies = view.course.get("reward/proxy", ())
    unit = view.recent[-1]["unit"] or math.nan
    price, beta = view.now("kl/price"), view.metrics.get("kl/coefficient", math.nan)
    if view.metrics.get("run/share", 0.0) < 0.5 or min(len(kls), len(proxies)) < LEAST_TREND:
        return SILENT
    kl, third = statistics.fmean(kls[len(kls) // 2 :]), len(proxies) // 3
    rise = (statistics.fmean(proxies[-third:]) - statistics.fmean(proxies[:third])) / unit
    words = {"price": price, "beta": beta, "kl": kl, "rise": rise}
    return Reading(price, words, kl < HELD_KL and rise < 0.5)


def _unmoved(view: View) -> Reading:
    held = _held_back(view)  # which has the reason
    if held.sure and held.value >= DETECTORS["held_back"].threshold:
        return SILENT
    if (
        view.metrics.get("run/share", 0.0) < 0.5
        or view.metrics.get("still", 0.0) >= DETECTORS["kl_stuck"].threshold
    ):
        return SILENT
    kls, steps = view.course.get(KL, ()), view.steps
    if any(kls) and len(kls) >= LEAST_TREND:
        resting, evidence = near_reference(kls)
    else:
        resting, evidence = still(
            {k: v for k, v in view.course.items() if k != KL},
            view.recent[-1]["unit"] or 0.0,
        )
    return Reading(steps * bool(resting), {"evidence": evidence, "steps": steps})


def _truncation(view: View) -> Reading:
    start, now = view.change("response/stop_rate")
    unfinished = [-math.inf if text.finished else text.length for text in view.texts]
    return Reading(start - now, {"start": start, "now": now}, rank=unfinished)


def _cut_off(view: View) -> Reading:
    """Judged after the first steps, in which a policy may learn to end; lengths that are meant to
    be fixed look the same.
    """
    now, step = 1.0 - view.now("response/stop_rate"), view.recent[-1]["index"] + 1
    unfinished = [-math.inf if text.finished else text.length for text in view.texts]
    return Reading(now, {"now": now, "step": step}, step >= SETTLED, unfinished)


def _exploit_tokens(view: View) -> Reading:
    steps = view.window()
    best = (0.0, 0, "", 0.0, 0.0)
    for phrase in steps[-1]["phrases"] if steps else ():
        share = statistics.median(facts["phrases"].get(phrase, (0.0,))[0] for facts in steps)
        start = statistics.fmean(facts["phrases"].get(phrase, (0.0,))[0] for facts in view.baseline)
        r, t = pooled_correlation(
            [f["phrases"][phrase][1:] for f in view.recent if phrase in f["phrases"]],
        )
        if r >= LEAST_CORRELATION and t >= view.config.confidence:
            best = max(best, (round(share - start, 2), len(phrase), phrase, start, share))
    rise, _, phrase, start, share = best
    if not phrase:
        return Reading(0.0) if steps else SILENT
    verb = "begin with" if phrase.startswith(OPENING) else "contain"
    words = {"start": start, "now": share, "verb": verb, "phrase": phrase.strip()}
    holding = [
        score_of(t) if phrase in phrases(word_tokens(t.response)) else -math.inf for t in view.texts
    ]
    return Reading(rise, words, rank=holding)


def _reward_disagreement(view: View) -> Reading:
    (start, now), (before, after) = view.change("reward/spread"), view.change("reward/proxy")
    if start <= 0:
        return SILENT
    spreads = [-math.inf if text.spread is None else text.spread for text in view.texts]
    sure = after - before >= 0.5 * view.start("reward/proxy_std")
    return Reading(now / start, {"start": start, "now": now}, sure, spreads)


def _reward_failures(view: View) -> Reading:
    share = view.pooled("failed", view.window(after_baseline=False)).median
    return Reading(
        share,
        {"now": share},
        rank=[0.0 if text.score is None else -math.inf for text in view.texts],
    )


def _score_jump(view: View) -> Reading:
    before = view.now("reward/proxy", 1)
    now = view.now("reward/proxy")
    unit = view.recent[-1]["unit"] or math.nan
    return Reading(
        (now - before) / unit,
        {"before": before, "now": now, "steps": 2 * view.config.window, "unit": unit},
    )


def _sharpening(view: View) -> Reading:
    """Judged in the second half of a run: what begins as sharpening often becomes more."""
    words = {
        name: view.metrics.get(f"sharpening/{name}", math.nan)
        for name in ("gain", "share", "temperature", "sure")
    }
    return Reading(
        words["share"],
        words,
        view.metrics.get("run/share", 0.0) >= 0.5 and words["sure"] > 0,
    )


def _sycophancy(view: View) -> Reading:
    start, *later = view.recent[-1]["shifts"] or [0.0]
    return (
        SILENT
        if len(later) < 2
        else Reading(min(later) - start, {"start": start, "now": later[-1]})
    )


_MEASURES: dict[str, Measure] = {
    measure.__name__.removeprefix("_"): measure
    for measure in (
        _length_gaming,
        _length_advantage,
        _mode_collapse,
        _entropy_collapse,
        _kl_acceleration,
        _kl_stuck,
        _held_back,
        _unmoved,
        _truncation,
        _cut_off,
        _exploit_tokens,
        _reward_disagreement,
        _reward_failures,
        _score_jump,
        _sharpening,
        _sycophancy,
    )
}


def _detector(
    name: str,
    threshold: float,
    message: str,
    advice: str,
    rise_of: str = "",
    level_of: str = "",
) -> Detector:
    common = (
        partial(_text_rise, column=rise_of)
        if rise_of
        else partial(_level, metric=level_of)
        if level_of
        else None
    )
    return Detector(threshold, message, advice, common or _MEASURES[name])


DETECTORS = {name: _detector(name, **row) for name, row in DETECTOR_ROWS.items()}
