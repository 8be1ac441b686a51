"""Checks on the steps of a run: the known ways of gaming a reward or losing a policy, and faults of
the set-up that a log shows. None uses the gold score.

A row (`settings/detectors.toml`) is a threshold, a message and an advice; its measure is here. A
watch asks the `DETECTORS` at every step, and the doctor all `CHECKS` of the steps of a log. Most
measures compare the last steps with the run's own first ones. A step counts through the median of
a window, so one noisy step cannot fire. A change must also exceed the noise of its metric
(`view`). A missing metric is NaN, and so are values computed from it. A detector with NaN never
fires.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from tether.settings.watch import CHECK_ROWS, DETECTOR_ROWS
from tether.watch.monitoring.texts import (
    MOMENTS,
    OPENING,
    phrases,
    pooled_correlation,
    score_of,
    word_tokens,
)
from tether.watch.monitoring.trends import HELD_KL, KL, LEAST_TREND, near_reference, still
from tether.watch.monitoring.view import LOG, NOISE, Shift, View

STILL_KL = 0.005
"""Nats a response below which a policy has not moved."""
LEAST_GROWTH = 2.0
"""Nats a response and window: what grows by less is compared as if it had grown by this."""
SETTLED = 8
"""Steps after which a policy that does not end its answers is not expected to learn that by
itself.
"""
LEAST_CORRELATION, BY_CHANCE = 0.2, 0.01
"""Between length or phrase and the score: a weaker one does not pull a policy, and one that is as
likely by chance is none. The change beside it is judged more strictly.
"""


class Reading(NamedTuple):
    """A measure's `value`, for the threshold, and whether its second condition is `met`; `words`
    fill the row's message.

    `judge` compares with noise; unset, the measure does it. `reach` turns a shift of the metric
    into a value of the measure. `rank` orders the step's texts as evidence, the greatest first, and
    leaves out those of minus infinity.
    """

    value: float
    words: Mapping[str, object] = {}
    judge: Callable[[], Shift] | None = None
    met: bool = True
    rank: Sequence[float] | None = None
    reach: Callable[[float], float] = float

    @property
    def sure(self) -> bool:
        """The second condition is met, and the value is more than noise."""
        return self.met and (self.judge is None or self.judge().sure)


SILENT = Reading(math.nan)


Measure = Callable[[View], Reading]


class Check(NamedTuple):
    """A row of the table: fires where the measure reads at least the threshold, and is sure."""

    threshold: float
    message: str
    advice: str
    measure: Measure
    severity: str


def _length_gaming(view: View) -> Reading:
    start, now = view.change("response/length")
    if not min(start, now) > 0:
        return SILENT
    longer = 1 if now > start else -1
    moments = zip(*(view.series.get(name, ())[-3 * view.first :] for name in MOMENTS), strict=True)
    r, chance = pooled_correlation([*moments])
    against = chance if longer > 0 else 1 - chance
    return Reading(
        (now / start) ** longer,
        {"start": start, "now": now, "r": r},
        partial(view.moved, LOG + "response/length", longer),
        longer * r >= LEAST_CORRELATION and against <= BY_CHANCE,
        [longer * text.length for text in view.texts],
        lambda shift: math.exp(min(shift, 700.0)),
    )


def _rise(view: View, column: str) -> Reading:
    """Rise of the mean of a column of the texts."""
    start, now = view.change(column)
    judged = LOG + column if LOG + column in view.metrics else column
    return Reading(
        now - start,
        {"start": start, "now": now},
        partial(view.moved, judged),
        rank=view.columns.get(column),
        reach=lambda shift: (
            (1 + start) * math.expm1(min(shift, 700.0)) if judged != column else shift
        ),
    )


def _level(view: View, metric: str) -> Reading:
    """A metric as it is now."""
    now = view.now(metric)
    rank = view.columns.get(metric)
    return Reading(now, {"now": now}, partial(view.above, metric), rank=rank)


def _length_advantage(view: View) -> Reading:
    reading = _level(view, "length_advantage")
    return reading._replace(rank=[text.length for text in view.texts])


def _mode_collapse(view: View) -> Reading:
    varied, varies = view.change("response/distinct_2")
    reading = _rise(view, "similarity")
    words = {**reading.words, "varied": varied, "varies": varies}
    return reading._replace(words=words, met=varies <= 0.7 * varied)


def _entropy_collapse(view: View) -> Reading:
    start, now = view.change("policy/entropy")
    if not start > 0:
        return SILENT
    return Reading(
        1 - now / start,
        {"start": start, "now": now},
        partial(view.moved, "policy/entropy", -1),
        reach=lambda fall: fall / start,
    )


def _kl_acceleration(view: View) -> Reading:
    third, second, first = (view.now(KL, back) for back in range(3))
    growth = max(second - first, LEAST_GROWTH, 0.1 * second)
    return Reading(
        (third - second) / growth,
        {"before": second - first, "now": third - second},
        partial(view.contrast, KL, (1.0, -2.0, 1.0)),
        reach=lambda shift: (second - first + shift) / growth,
    )


def _kl_stuck(view: View) -> Reading:
    steps = view.metrics.get("still", math.nan)
    return Reading(steps, {"steps": steps, "bound": STILL_KL})


def _held_back(view: View) -> Reading:
    """Judged in the second half of a run, where the policy is still near its reference and the
    score where it began.
    """
    kls = view.course.get(KL, ())
    proxies = view.course.get("reward/proxy", ())
    unit = view.unit
    price = view.now("kl/price")
    beta = view.metrics.get("kl/coefficient", math.nan)
    if view.metrics.get("run/share", 0.0) < 0.5 or min(len(kls), len(proxies)) < LEAST_TREND:
        return SILENT
    kl = statistics.fmean(kls[len(kls) // 2 :])
    third = len(proxies) // 3
    rise = (statistics.fmean(proxies[-third:]) - statistics.fmean(proxies[:third])) / unit
    words = {"price": price, "beta": beta, "kl": kl, "rise": rise}
    return Reading(price, words, met=kl < HELD_KL and rise < 0.5)


def _unmoved(view: View) -> Reading:
    held = _held_back(view)  # which has the reason
    if held.sure and held.value >= DETECTORS["held_back"].threshold:
        return SILENT
    if (
        view.metrics.get("run/share", 0.0) < 0.5
        or view.metrics.get("still", 0.0) >= DETECTORS["kl_stuck"].threshold
    ):
        return SILENT
    kls = view.course.get(KL, ())
    steps = view.steps
    if any(kls) and len(kls) >= LEAST_TREND:
        resting, evidence = near_reference(kls)
    else:
        resting, evidence = still(
            {k: v for k, v in view.course.items() if k != KL},
            view.unit if view.unit > 0 else 0.0,
        )
    return Reading(steps * bool(resting), {"evidence": evidence, "steps": steps})


def _truncation(view: View) -> Reading:
    reading = _rise(view, "unfinished")
    start, now = view.change("unfinished")
    return reading._replace(words={"start": 1 - start, "now": 1 - now}, rank=_unfinished(view))


def _unfinished(view: View) -> list[float]:
    """The lengths of texts at the token limit."""
    return [-math.inf if text.finished else text.length for text in view.texts]


def _cut_off(view: View) -> Reading:
    """Judged after the first steps, in which a policy may learn to end; lengths that are meant to
    be fixed look the same.
    """
    reading = _level(view, "unfinished")
    words = {**reading.words, "step": view.looks}
    met = view.looks >= SETTLED
    return reading._replace(words=words, met=met, rank=_unfinished(view))


def _exploit_tokens(view: View) -> Reading:
    now_held = view.phrases[-1] if view.phrases else {}
    series = {p: [table.get(p, (0.0,))[0] for table in view.phrases] for p in now_held}
    view = replace(view, series=series, tests=max(1, len(series)))
    best = (0.0, 0, "")
    for phrase in series:
        r, chance = pooled_correlation([t[phrase][1:5] for t in view.phrases if phrase in t])
        if r >= LEAST_CORRELATION and chance <= BY_CHANCE:
            start, now = view.change(phrase)
            best = max(best, (round(now - start, 2), len(phrase), phrase))
    rise, _, phrase = best
    if not phrase:
        return Reading(0.0)
    start, now = view.change(phrase)
    verb = "begin with" if phrase.startswith(OPENING) else "contain"
    words = {"start": start, "now": now, "verb": verb, "phrase": phrase.strip()}
    noises = [table[phrase][5] if phrase in table else 0.0 for table in view.phrases]
    judged = replace(
        view,
        series={**series, phrase + NOISE: noises},
        counts={phrase: view.counts["failed"]} if "failed" in view.counts else {},
    )
    holding = [
        score_of(t) if phrase in phrases(word_tokens(t.response)) else -math.inf for t in view.texts
    ]
    return Reading(rise, words, partial(judged.moved, phrase), rank=holding)


def _reward_disagreement(view: View) -> Reading:
    (start, now), (before, after) = view.change("reward/spread"), view.change("reward/proxy")
    if not start > 0:
        return SILENT
    return Reading(
        now / start,
        {"start": start, "now": now},
        partial(view.moved, "reward/spread"),
        after - before >= 0.5 * view.unit,
        [-math.inf if text.spread is None else text.spread for text in view.texts],
        lambda shift: 1 + shift / start,
    )


def _score_jump(view: View) -> Reading:
    before = view.now("reward/proxy", 1)
    now = view.now("reward/proxy")
    return Reading(
        (now - before) / view.unit,
        {"before": before, "now": now, "steps": 2 * view.size, "unit": view.unit},
        partial(view.contrast, "reward/proxy", (1.0, -1.0)),
        reach=lambda shift: shift / view.unit,
    )


def _sharpening(view: View) -> Reading:
    """Judged in the second half of a run: what begins as sharpening often becomes more."""
    words = {
        name: view.metrics.get(f"sharpening/{name}", math.nan)
        for name in ("gain", "share", "temperature", "sure")
    }
    met = view.metrics.get("run/share", 0.0) >= 0.5 and words["sure"] > 0
    return Reading(words["share"], words, met=met)


def _sycophancy(view: View) -> Reading:
    """Measured in few steps: its windows are of two measurements, and its start is one."""
    name = "sycophancy/shift"
    values = view.series.get(name, ())
    if len(values) < 3:
        return SILENT
    start = values[0]
    now = min(values[-2:])
    view = replace(view, first=1, size=2, looks=len(values))
    return Reading(now - start, {"start": start, "now": values[-1]}, partial(view.moved, name))


def _wrong_reference(view: View) -> Reading:
    """The first step's samples are the reference's own."""
    kl = view.series.get(KL, (math.nan,))[0]
    return Reading(abs(kl), {"now": kl})


def _moving_reference(view: View) -> Reading:
    """Later samples are not."""
    kls = view.course.get(KL)
    if kls is None or any(kls) or not view.metrics.get("grad_norm", 0.0) > 0:
        return SILENT if kls is None else Reading(0.0)
    return Reading(view.steps, {"steps": view.steps})


def _shrunk_answers(view: View) -> Reading:
    start, now = view.change("response/length")
    return Reading(start / max(now, 1.0), {"start": start, "now": now}, met=now <= 2)


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
        _score_jump,
        _sharpening,
        _sycophancy,
        _wrong_reference,
        _moving_reference,
        _shrunk_answers,
    )
}


def _check(
    name: str,
    threshold: float,
    message: str,
    advice: str,
    rise_of: str = "",
    level_of: str = "",
    severity: str = "warning",
) -> Check:
    common = (
        partial(_rise, column=rise_of)
        if rise_of
        else partial(_level, metric=level_of)
        if level_of
        else None
    )
    return Check(threshold, message, advice, common or _MEASURES[name], severity)


CHECKS = {name: _check(name, **row) for name, row in CHECK_ROWS.items()}
DETECTORS = {name: CHECKS[name] for name in DETECTOR_ROWS}
