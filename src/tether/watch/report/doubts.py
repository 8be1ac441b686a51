"""Warnings of a page: what a careful reader should doubt of a run's training, rows and judges."""

from __future__ import annotations

from collections.abc import Iterator

from tether.core.amounts import plural
from tether.core.left_out import left_out_words
from tether.core.types import Facts
from tether.stats import Estimate, side
from tether.watch.report.about import Judge, judge_of, judge_of_labels
from tether.watch.report.gains import proxy_gain
from tether.watch.report.numbers import SENTENCES, decimal, has_interval, percent, share_in_words
from tether.watch.report.reading import (
    Journey,
    SubRun,
    estimate,
    finite,
    listed,
    mapping,
    present,
    printable,
    trend_of,
)

WARNS = SENTENCES["warns"]
ENOUGH_UPDATES = 10
"""Of a method that learns from rows: fewer teach it next to nothing."""
HELD_OUT = ("num_heldout", "num_heldout_pairs")
"""Keys of the summaries of stages on rows: how many rows or pairs are held out."""
LOPSIDED = 0.6
"""Share of pairs whose longer side is preferred, above which the page mentions length; and the same
for the shorter side.
"""


def distrust(policy: SubRun, gain: Estimate | None, judge: Judge) -> Iterator[str]:
    """Gold and proxy that part ways: no detector sees gold, so no alarm can say it."""
    proxy = proxy_gain(policy)
    points = present(policy.metrics, "gold/score")
    if proxy and gain and side(proxy, 0) > 0 > side(gain, 0):
        ends = {"rise": decimal(proxy.value), "fall": decimal(-gain.value)}
        yield WARNS["proxy"].format(judge=judge, **ends)
    elif len(points) >= 4:
        peak_step, peak = max(points, key=lambda point: point[1])
        first = points[0][1]
        last = points[-1][1]
        course = trend_of(
            [row for row in policy.metrics if (finite(row, "step") or 0) >= peak_step],
            "reward/proxy",
        )
        if peak - last > 0.25 * (peak - first) and course and course.last > course.first:
            proxies = {"first_proxy": decimal(course.first), "last_proxy": decimal(course.last)}
            yield WARNS["last-steps"].format(
                judge=judge,
                step=peak_step,
                peak=decimal(peak),
                last=decimal(last),
                **proxies,
            )


def alarms(policy: SubRun) -> Iterator[str]:
    """The first alarm of each detector. Further down, the page lists all of them, with their
    advice.
    """
    first = {
        printable(alarm.get("detector"), 60): alarm
        for alarm in reversed(policy.alarms)
        if alarm.get("message")
    }
    for detector, alarm in reversed(first.items()):
        message, advice = (printable(alarm.get(key), 400) for key in ("message", "advice"))
        step = finite(alarm, "step") or 0.0
        name = detector.replace("_", " ")
        yield (
            WARNS["alarm"].format(detector=name, step=step, message=message, advice=advice).strip()
        )


def doubts(journey: Journey) -> Iterator[str]:
    """Prompts that were trained on, a judge that is the reward, a reward model that is no better than
    a coin, a stage that hardly learned, and rows and updates that it left out.
    """
    if shared := journey.trained_on:
        stages = " and ".join(f"[{printable(name, 60)}]" for name in listed(shared, "stages"))
        yield WARNS["trained-on"].format(**{**shared, "stages": stages})
    judge = judge_of(journey)
    if judge.is_reward:
        yield WARNS["judge-is-reward"].format(name=judge.name)
    accuracy = journey.stage("reward").estimate("gold_accuracy")
    if accuracy and has_interval(accuracy) and not side(accuracy, 0.5):
        share = share_in_words(accuracy)
        yield WARNS["reward"].format(judge=judge_of_labels(journey), accuracy=share)
    for stage in journey.stages:
        made = finite(stage.summary, "updates")
        if made and made < ENOUGH_UPDATES and "budget" not in stage.summary:
            updates = plural(made, "update")
            yield WARNS["few-updates"].format(stage=stage.title, updates=updates)
        if warning := length_warning(stage.section, stage.title, stage.summary):
            yield warning
        if ended := mapping(stage.summary, "budget"):
            answered = "-prompts" * (stage.section in ("pairs", "evaluate"))
            yield WARNS[f"budget{answered}"].format(
                stage=stage.title,
                step=ended["ended_at"],
                total=ended["total"],
                minutes=ended["minutes"],
            )
        counts = {
            "updates": finite(stage.summary, "steps_left_out"),
            "held-out-none": any(finite(stage.summary, key) == 0 for key in HELD_OUT),
            "rows": finite(stage.summary, "quarantine", "count"),
        }
        for name, count in counts.items():
            if count:
                yield WARNS[name].format(stage=stage.title, count=count)
        if words := not_trained(stage):
            yield f"{stage.title}: {words}"


def not_trained(stage: SubRun) -> str:
    """The rows that a stage read, or a teacher wrote for it, and that it did not train on, or cut;
    empty where they are few.
    """
    rows = finite(stage.manifest, "written") or finite(stage.manifest, "rows")
    return left_out_words(stage.summary, rows)


def length_warning(key: str, title: str, figures: Facts) -> str:
    """The warning that most preferred answers are the longer ones, or the shorter ones; empty: they
    are not, or nothing learned from them.

    Args:
        key: the section of a stage, or `bench`.
        figures: a summary with `longer_chosen`.
    """
    longer = estimate(figures, "longer_chosen")
    words = WARNS.get(f"length-{key}", "")
    if not longer or not (side(longer, LOPSIDED) > 0 or side(longer, 1 - LOPSIDED) < 0):
        return ""
    share, which = max((longer.value, "longer"), (1 - longer.value, "shorter"))
    return words.format(stage=title, which=which, share=percent(share))
