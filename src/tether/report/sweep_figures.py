"""The figures of a sweep: curves on axes that stay, gain against KL, and seeds by setting."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import fmean

from tether.report import figures
from tether.report.numbers import SENTENCES, bracketed, has_interval, signed
from tether.report.plotting import (
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
from tether.report.reading import KL_KEYS, Row, SubRun, finite
from tether.report.sweeps import MEASURES, Measured, Sweep, control_gain
from tether.stats import Estimate

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


def curves(sweep: Sweep) -> list[list[Plot]]:
    """For each setting the curves of its seeds, on axes that are the same for all settings."""
    own = all(member.journey.own_reward for member in sweep.members)
    runs = [
        [
            replace(one.policy, name=one.name or "run", metrics=_averaged(one.policy.metrics))
            for one in setting.members
        ]
        for setting in sweep.settings
    ]
    whole = {plot.id: plot for plot in _charts([run for some in runs for run in some], own)}
    return [
        [
            replace(
                plot,
                id=f"{plot.id}-{number}",
                x=(shared := whole[plot.id]).x,
                y=shared.y,
                right=shared.right,
            )
            for plot in _charts(some, own)
        ]
        for number, some in enumerate(runs)
    ]


def _charts(runs: Sequence[SubRun], own_reward: bool) -> list[Plot]:
    """The charts of CURVES for which there are metrics."""
    if not runs:
        return []
    drawn = [
        *figures.charts("policy", runs, own_reward),
        *figures.charts("overlay", runs),
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


def frontier(sweep: Sweep, gain: Measured, kl: Measured) -> list[Plot]:
    """Gain against KL: seeds, means with their intervals, and the start at its best temperature."""
    rods, seeds, means = [], [], []
    for number, setting in enumerate(sweep.settings):
        ups = {member.label: value for member, value in gain.values[number]}
        points = [
            (member.label, at.value, ups[member.label].value)
            for member, at in kl.values[number]
            if member.label in ups
        ]
        at, up = kl.mean(number), gain.mean(number)
        if not points or at is None or up is None:
            continue
        rods += [_rod(*ends, number) for ends in _cross(at, up)]
        note = f"{bracketed(up, gain.show)}, {sweep.title(setting)}"
        means.append(_mark([(at.value, up.value)], number, [note], BLUE, 13.0))
        if len(points) > 1:
            notes = [f"{gain.show(y)}, {label}" for label, _, y in points]
            seeds.append(_mark([(x, y) for _, x, y in points], number, notes, GREEN, 6.0))
    if not means:
        return []
    way = Trace(
        [t.xs[0] for t in means],
        [t.ys[0] for t in means],
        "",
        MUTED,
        dash="dot",
        silent=True,
    )
    traces = [way, *rods, *_named(seeds, means), *_control_arms(sweep, gain)]
    if gain.key == "gold":
        traces += _control(sweep, max(x for one in traces for x in one.xs if x is not None))
    return framed({**FRAMES["frontier"], "y": gain.name}, traces)


def _cross(at: Estimate, up: Estimate) -> Iterator[tuple[list[float], list[float]]]:
    """The intervals of both means."""
    if has_interval(up):
        yield [at.value, at.value], [up.low, up.high]
    if has_interval(at):
        yield [max(0.0, at.low), at.high], [up.value, up.value]


def _rod(xs: Sequence[float], ys: Sequence[float], number: int) -> Trace:
    return Trace(xs, ys, "", f"{BLUE} s{number}", size=1.6, silent=True)


def _mark(
    points: Sequence[tuple[float, float]],
    number: int,
    notes: Sequence[str],
    colour: str,
    size: float,
) -> Trace:
    """Marks of a setting, which has its number as a class: the sliders light it."""
    xs, ys = zip(*points, strict=True)
    return Trace(xs, ys, "", f"{colour} s{number}", "marks", size=size, notes=notes)


def _named(seeds: Sequence[Trace], means: Sequence[Trace]) -> Iterator[Trace]:
    """The marks of seeds and means; the legend shows the first of each for all."""
    for name, traces in (("a seed", seeds), ("mean of the seeds", means)):
        for place, trace in enumerate(traces):
            yield trace._replace(name="" if place else name)


def _control_arms(sweep: Sweep, gain: Measured) -> Iterator[Trace]:
    """Open marks of the runs' control arms, each once: an arm may be the same for all settings."""
    read = {one.key: one.read for one in MEASURES}
    arms = {
        (arm.path, str(arm.settings.get("reward_source"))): (arm, member.label)
        for member in sweep.members
        for arm in member.journey.policies
        if arm.path != member.policy.path
    }
    for source, colour in CONTROLS.items():
        points = [
            (at.value, up.value, label)
            for (_, own), (arm, label) in arms.items()
            if own == source
            and (up := read[gain.key](arm)) is not None
            and (at := read["kl"](arm)) is not None
        ]
        if points and gain.key in ("gold", "heldout"):
            xs, ys, _ = zip(*points, strict=True)
            name = SAYS["control-arm"].format(source=source)
            notes = [f"{gain.show(y)}, {name}, {label}" for _, y, label in points]
            yield Trace(xs, ys, name, colour, "open", size=11.0, notes=notes)


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
    rods, seeds, means = [], [], []
    for place, values in enumerate(one.values):
        mean = one.mean(place)
        if mean is None:
            continue
        if has_interval(mean):
            rods.append(_rod([mean.low, mean.high], [place, place], place))
        if len(values) > 1:
            notes = [f"{one.show(value.value)}, {member.name}" for member, value in values]
            points = [(value.value, place) for _, value in values]
            seeds.append(_mark(points, place, notes, GREEN, 6.0))
        means.append(_mark([(mean.value, place)], place, [bracketed(mean, one.show)], BLUE, 11.0))
    rows = [", ".join(setting.values) or "all" for setting in sweep.settings]
    names = {"title": one.name, "x": one.name, "y": ", ".join(sweep.keys)}
    frame = {**FRAMES["by-setting"], "id": f"by-{one.key}", **names}
    return framed(frame, [*rods, *_named(seeds, means)], height=70 + 34 * len(rows), rows=rows)
