"""The figures of a sweep: curves on axes that stay, gain against KL, and seeds by setting."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import fmean

from tether.core.types import Row
from tether.stats import Estimate
from tether.watch.report.about import Judge
from tether.watch.report.figures import Rod, charts
from tether.watch.report.measures import BY_KEY
from tether.watch.report.narrative import control_of
from tether.watch.report.numbers import SENTENCES, bracketed, has_interval, signed
from tether.watch.report.picture import Rods
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
from tether.watch.report.reading import KL_KEYS, SubRun, estimate, finite, mapping
from tether.watch.report.sweeps import Measured, Sweep, control_arms

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
        *charts("policy", runs, own_reward),
        *charts("overlay", runs, judge=judge),
        *charts("losses", runs),
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
            values = [value for row in bucket if (value := finite(row, key)) is not None]
            mean |= {key: fmean(values)} if values else {}
        means.append(mean)
    return [*first, *means]


def frontier(sweep: Sweep, gain: Measured, kl: Measured) -> list[Plot]:
    """Gain against KL: seeds, means with their intervals, and the start at its best temperature.

    What belongs to a setting has its number as a class, which the sliders light.
    """
    strokes = []
    seeds = []
    means = []
    for number, setting in enumerate(sweep.settings):
        colour = f"{BLUE} s{number}"
        ups = {member.label: value for member, value in gain.values[number]}
        both = [(at, ups[m.label], m) for m, at in kl.values[number] if m.label in ups]
        at = kl.mean(number)
        up = gain.mean(number)
        if not both or at is None or up is None:
            continue
        strokes += [Trace(*ends, "", colour, size=1.6, silent=True) for ends in _cross(at, up)]
        if len(both) > 1:
            xs, ys, notes = zip(
                *((a.value, u.value, f"{gain.show(u.value)}, {m.label}") for a, u, m in both),
                strict=True,
            )
            name = "" if seeds else "a seed"
            seeds.append(Trace(xs, ys, name, f"{GREEN} s{number}", "marks", notes=notes))
        note = f"{bracketed(up, gain.show)}, {sweep.title(setting)}"
        name = "" if means else "mean of the seeds"
        means.append(
            Trace([at.value], [up.value], name, colour, "marks", size=13.0, notes=[note]),
        )
    if not means:
        return []
    xs, ys = zip(*((one.xs[0], one.ys[0]) for one in means), strict=True)
    way = Trace(xs, ys, "", MUTED, dash="dot", silent=True)
    traces = [way, *strokes, *seeds, *means, *_control_arms(sweep, gain)]
    if gain.key == "gold":
        traces += _control(sweep, max(x for one in traces for x in one.xs if x is not None))
    return framed({**FRAMES["frontier"], "y": gain.name}, traces)


def _cross(at: Estimate, up: Estimate) -> Iterator[tuple[list[float], list[float]]]:
    """The intervals of both means."""
    if has_interval(up):
        yield [at.value, at.value], [up.low, up.high]
    if has_interval(at):
        yield [max(0.0, at.low), at.high], [up.value, up.value]


def _control_arms(sweep: Sweep, gain: Measured) -> Iterator[Trace]:
    """Open marks of the runs' control arms, each once: an arm may be the same for all settings."""
    arms = {arm.path: (arm, member.label) for member, arm in control_arms(sweep.members)}
    for source, colour in CONTROLS.items():
        points = [
            (at.value, up.value, label)
            for arm, label in arms.values()
            if arm.settings["reward_source"] == source
            and (up := BY_KEY[gain.key].read(arm)) is not None
            and (at := BY_KEY["kl"].read(arm)) is not None
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
    rows = mapping(control, "by_temperature")
    best = finite(control, "over_best_decoding", "temperature")
    starts = {
        float(temperature): before.value
        for temperature, row in rows.items()
        if (before := estimate(row, "before"))
    }
    headline = control.get("correct") or control.get("score")
    measured = estimate(headline, "before")
    own = finite(policy.summary, "gold_before")
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


def by_setting(sweep: Sweep, one: Measured) -> Rods:
    """A row a setting: its seeds, and their mean with its interval."""
    rows = [
        Rod(
            ", ".join(setting.values) or "all",
            mean,
            f"{BLUE} s{place}",
            seeds=[(own.value, f"{one.show(own.value)}, {m.name}") for m, own in runs]
            if len(runs) > 1
            else (),
        )
        for place, (setting, runs) in enumerate(zip(sweep.settings, one.values, strict=True))
        if (mean := one.mean(place))
    ]
    return Rods(one.name, one.show, rows, f"by-{one.key}", ", ".join(sweep.keys))
