"""The figures of a sweep: curves on axes that stay, gain against KL, and seeds by setting."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import fmean
from typing import NamedTuple

from tether.stats import Estimate
from tether.watch.report import figures
from tether.watch.report.about import Judge
from tether.watch.report.narrative import control_of
from tether.watch.report.numbers import SENTENCES, bracketed, has_interval, signed
from tether.watch.report.plotting import (
    BLUE,
    FRAMES,
    GREEN,
    MUTED,
    ORANGE,
    PURPLE,
    SKY,
    Plot,
    Trace,
    framed,
)
from tether.watch.report.reading import KL_KEYS, Row, SubRun, estimate, finite, mapping
from tether.watch.report.sweeps import READ, Measured, Sweep, control_arms

Place = tuple[float, float, str]
Stroke = tuple[Sequence[float], Sequence[float]]
SAYS = SENTENCES["sweep"]
MOST_POINTS = 100
"""Of a line: neighbouring steps are averaged."""
CURVES = (
    "reward-kl",
    "overlay-gold",
    "overlay-heldout",
    "overlay-correct",
    "overlay-test",
    "overlay-length",
    "loss",
)
AVERAGED = (
    "reward/proxy",
    "gold/score",
    "heldout/score",
    "heldout/correct",
    "test/score",
    "response/length",
    "loss",
    "eval_loss",
    *KL_KEYS,
)
CONTROLS = {"random": ORANGE, "majority": SKY}
"""By the reward of a control arm: its colour. Its gain counts where a judge beside it measures it."""


def curves(sweep: Sweep, judge: Judge) -> list[list[Plot]]:
    """For each setting the curves of its seeds, on axes that are the same for all settings."""
    own = all(member.journey.own_reward for member in sweep.members)
    runs = [
        [
            replace(one.policy, name=one.name or "run", metrics=_averaged(one.policy.metrics))
            for one in setting.members
        ]
        for setting in sweep.settings
    ]
    whole = {plot.id: plot for plot in _charts([run for some in runs for run in some], own, judge)}
    return [
        [
            replace(
                plot,
                id=f"{plot.id}-{number}",
                x=(shared := whole[plot.id]).x,
                y=shared.y,
                right=shared.right,
            )
            for plot in _charts(some, own, judge)
        ]
        for number, some in enumerate(runs)
    ]


def _charts(runs: Sequence[SubRun], own_reward: bool, judge: Judge) -> list[Plot]:
    """The charts of CURVES for which there are metrics."""
    if not runs:
        return []
    drawn = [
        *figures.charts("policy", runs, own_reward),
        *figures.charts("overlay", runs, judge=judge),
        *figures.charts("losses", runs),
    ]
    return [plot for plot in drawn if plot.id in CURVES]


def _averaged(rows: Sequence[Row]) -> list[Row]:
    """Means of neighbouring steps, so that no line has more than MOST_POINTS; the start stays."""
    first = [row for row in rows if row.get("step") == 0]
    rest = [row for row in rows if row.get("step") != 0]
    size = -(-len(rest) // MOST_POINTS) or 1
    means = []
    for begin in range(0, len(rest), size):
        bucket = rest[begin : begin + size]
        mean: Row = {"step": bucket[-1].get("step")}
        for key in AVERAGED:
            values = [value for row in bucket if (value := finite(row.get(key))) is not None]
            mean |= {key: fmean(values)} if values else {}
        means.append(mean)
    return [*first, *means]


class Spot(NamedTuple):
    """A setting in a figure: places of its seeds with their notes, its mean, and the strokes of
    intervals through it.
    """

    number: int
    seeds: Sequence[Place]
    mean: Place
    strokes: Sequence[Stroke]


def frontier(sweep: Sweep, gain: Measured, kl: Measured) -> list[Plot]:
    """Gain against KL: seeds, means with their intervals, and the start at its best temperature."""
    spots = []
    for number, setting in enumerate(sweep.settings):
        ups = {member.label: value for member, value in gain.values[number]}
        seeds = [
            (at.value, up.value, f"{gain.show(up.value)}, {member.label}")
            for member, at in kl.values[number]
            if (up := ups.get(member.label))
        ]
        at, up = kl.mean(number), gain.mean(number)
        if not seeds or at is None or up is None:
            continue
        note = f"{bracketed(up, gain.show)}, {sweep.title(setting)}"
        strokes = [*_cross(at, up)]
        spots.append(Spot(number, seeds, (at.value, up.value, note), strokes))
    if not spots:
        return []
    xs, ys, _ = zip(*(spot.mean for spot in spots), strict=True)
    way = Trace(xs, ys, "", MUTED, dash="dot", silent=True)
    traces = [way, *_spotted(spots, 13.0), *_control_arms(sweep, gain)]
    if gain.key == "gold":
        traces += _control(sweep, max(x for one in traces for x in one.xs if x is not None))
    return framed({**FRAMES["frontier"], "y": gain.name}, traces)


def _cross(at: Estimate, up: Estimate) -> Iterator[Stroke]:
    """The intervals of both means."""
    if has_interval(up):
        yield [at.value, at.value], [up.low, up.high]
    if has_interval(at):
        yield [max(0.0, at.low), at.high], [up.value, up.value]


def _spotted(spots: Sequence[Spot], size: float) -> Iterator[Trace]:
    """Strokes, seeds, means: each has the number of its setting as a class, which the sliders
    light. The legend shows the first of each for all.
    """
    for spot in spots:
        for xs, ys in spot.strokes:
            yield Trace(xs, ys, "", f"{BLUE} s{spot.number}", size=1.6, silent=True)
    several = [(spot.number, spot.seeds) for spot in spots if len(spot.seeds) > 1]
    means = [(spot.number, [spot.mean]) for spot in spots]
    for name, colour, width, groups in (
        ("a seed", GREEN, 6.0, several),
        ("mean of the seeds", BLUE, size, means),
    ):
        for place, (number, places) in enumerate(groups):
            xs, ys, notes = zip(*places, strict=True)
            yield Trace(
                xs,
                ys,
                "" if place else name,
                f"{colour} s{number}",
                "marks",
                size=width,
                notes=notes,
            )


def _control_arms(sweep: Sweep, gain: Measured) -> Iterator[Trace]:
    """Open marks of the runs' control arms, each once: an arm may be the same for all settings."""
    arms = {arm.path: (arm, member.label) for member, arm in control_arms(sweep.members)}
    for source, colour in CONTROLS.items():
        points = [
            (at.value, up.value, label)
            for arm, label in arms.values()
            if arm.settings["reward_source"] == source
            and (up := READ[gain.key](arm)) is not None
            and (at := READ["kl"](arm)) is not None
        ]
        if points and gain.key in ("gold", "heldout"):
            xs, ys, _ = zip(*points, strict=True)
            name = SAYS["control-arm"].format(source=source)
            notes = [f"{gain.show(y)}, {name}, {label}" for _, y, label in points]
            yield Trace(xs, ys, name, colour, "open", size=11.0, notes=notes)


def control_gain(policy: SubRun) -> tuple[float, float] | None:
    """The gain of the start at its best temperature over the start at the training's temperature,
    and the best temperature. None if the start was measured at one temperature, or if the summary
    does not have its score at that of training.
    """
    control = control_of(policy.summary)
    rows = mapping(control.get("by_temperature"))
    best = finite(mapping(control.get("over_best_decoding")).get("temperature"))
    starts = {
        float(temperature): before.value
        for temperature, row in rows.items()
        if (before := estimate(mapping(row).get("before")))
    }
    headline = control.get("correct") or control.get("score")
    measured = estimate(mapping(headline).get("before"))
    own = finite(policy.summary.get("gold_before"))
    own = measured.value if own is None and measured else own
    if own is None or best is None or best not in starts or len(starts) < 2:
        return None
    return starts[best] - own, best


def _control(sweep: Sweep, far: float) -> list[Trace]:
    """The start at its best temperature, which costs no KL, as a line across."""
    values = [one for member in sweep.members if (one := control_gain(member.policy))]
    if not values:
        return []
    height = fmean(value for value, _ in values)
    name = SAYS["control"].format(gain=signed(height))
    return [Trace([0.0, far], [height, height], name, PURPLE, dash="dash", silent=True)]


def by_setting(sweep: Sweep, one: Measured) -> list[Plot]:
    """A row a setting: its seeds, and their mean with its interval."""
    spots = []
    for place, values in enumerate(one.values):
        if (mean := one.mean(place)) is None:
            continue
        seeds = [
            (value.value, place, f"{one.show(value.value)}, {member.name}")
            for member, value in values
        ]
        strokes = [([mean.low, mean.high], [place, place])] if has_interval(mean) else []
        spots.append(Spot(place, seeds, (mean.value, place, bracketed(mean, one.show)), strokes))
    rows = [", ".join(setting.values) or "all" for setting in sweep.settings]
    names = {"title": one.name, "x": one.name, "y": ", ".join(sweep.keys)}
    frame = {**FRAMES["by-setting"], "id": f"by-{one.key}", **names}
    return framed(frame, [*_spotted(spots, 11.0)], height=70 + 34 * len(rows), rows=rows)
