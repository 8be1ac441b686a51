"""The figures of a run: the reward against its price and against the truth, the reward model's
worth, losses, time; and a trace of its phases, in the format that ui.perfetto.dev and
chrome://tracing read.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from operator import itemgetter
from pathlib import Path
from string import Template
from typing import NamedTuple

from tether.core.amounts import duration
from tether.core.rundir import write_json
from tether.core.types import Facts, Row
from tether.stats import Estimate
from tether.watch.report.about import GOLD_JUDGE, Judge
from tether.watch.report.gains import Part
from tether.watch.report.numbers import (
    SENTENCES,
    Show,
    bracketed,
    centre,
    has_interval,
    percent,
    signed,
    thousands,
)
from tether.watch.report.plotting import (
    BLUE,
    CHARTS,
    FRAMES,
    GREEN,
    MUTED,
    ORANGE,
    PALETTE,
    PURPLE,
    Axis,
    Plot,
    Trace,
    framed,
)
from tether.watch.report.reading import (
    KL_KEYS,
    Journey,
    LoopRun,
    SubRun,
    estimate,
    finite,
    listed,
    mapping,
    series,
)

DASHES = ("", "dash", "dot")
"""Of several arms: of the quantities in one chart, or of so many arms that colours come again."""
SPARSE = 30
"""Points below which a line has marks."""
PHASES = {
    "rollout": ("waits for samples", MUTED),
    "reward": ("scores", ORANGE),
    "evaluate": ("measures", PURPLE),
    "update": ("learns", GREEN),
}
"""Of a step, in their order, and how its timeline shows them."""
COIN = "Starts near ln 2 ≈ 0.69, the loss of a coin; near zero in training is memorising."
ACCURACIES = {"heldout_accuracy": "model, held-out labels", "gold_accuracy": "model, {judge}"}
AGREEMENTS = {
    "annotator_agreement": "annotator, annotator",
    "annotator_gold_agreement": "annotator, {judge}",
    "majority_gold_agreement": "majority, {judge}",
}


def charts(
    section: str,
    arms: Sequence[SubRun],
    own_reward: bool = False,
    judge: Judge = GOLD_JUDGE,
) -> list[Plot]:
    """The charts of a section for which there are metrics; a user's own reward is no proxy of
    anything.
    """
    words = {
        "judge": f"{judge.label}",
        "score": f"{judge.label:score}",
        "proxy": "reward" if own_reward else "proxy",
        "reward": "reward" if own_reward else "proxy reward",
    }
    words |= {name.capitalize(): text.capitalize() for name, text in words.items()}
    rows = json.loads(Template(json.dumps(CHARTS[section])).substitute(words))
    return [figure for chart in rows for figure in _drawn(chart, arms)]


def _drawn(chart: Row, arms: Sequence[SubRun]) -> list[Plot]:
    """With one arm, colour marks the quantity. With several, colour marks the arm, and the line's
    style the quantity.
    """
    traces = []
    distance = chart.get("distance", False)
    for index, arm in enumerate(arms):
        for place, row in enumerate(chart["lines"]):
            style = dict(row)
            key = _first_key(arm, style.pop("keys"))
            scale = style.pop("scale", 1.0)
            name = style.pop("name", "")
            points = _over_distance(arm, key) if distance else series(arm.metrics, key)
            xs = [x for x, _ in points]
            ys = [None if y is None else scale * y for _, y in points]
            name = arm.title if not name else name if len(arms) == 1 else f"{arm.title}: {name}"
            colour = style.pop("colour", PALETTE[place % len(PALETTE)])
            colour = colour if len(arms) == 1 else PALETTE[index % len(PALETTE)]
            mode = style.pop("mode", "both" if len(xs) < SPARSE else "line")
            turn = place if len(chart["lines"]) > 1 else index // len(PALETTE)
            style = {"dash": DASHES[turn % len(DASHES)] if len(arms) > 1 else "", **style}
            traces += [Trace(xs, ys, name, colour, mode, **style)] if xs else []
    if len(traces) == 1 and len(arms) == 1 and not chart.get("named"):
        traces = [traces[0]._replace(name="")]
        chart = {**chart, "caption": chart.get("alone", chart["caption"])}
    return framed(chart, traces)


def _first_key(arm: SubRun, keys: Sequence[str]) -> str:
    """The first of these metrics that the run has; empty without one."""
    return next((key for key in keys if series(arm.metrics, key)), "")


def _over_distance(arm: SubRun, key: str) -> Sequence[tuple[float, float]]:
    """A metric over √KL of the same row, and of the same answers where they have a KL of their
    own.
    """
    distance = _first_key(arm, (f"{key.partition('/')[0]}/kl", *KL_KEYS))
    points = [(finite(row, distance), finite(row, key)) for row in arm.metrics]
    # An estimate of the KL below zero is noise around zero.
    return [
        (math.sqrt(max(0.0, kl)), value)
        for kl, value in points
        if kl is not None and value is not None
    ]


def loss_figures(stage: SubRun) -> list[Plot]:
    """The losses of a supervised stage; of one that compares, accuracy and margin too."""
    figures = []
    section = stage.section or stage.kind
    for chart in CHARTS["losses"]:
        own = {"id": f"{chart['id']}-{stage.name}"}
        if chart["id"] == "loss":
            own["y"] = f"loss ({SENTENCES['units'].get(section, 'as the stage defines it')})"
            own |= {"caption": COIN, "alone": COIN} if section == "reward" else {}
        figures += _drawn(chart | own, [stage])
    return figures


def parts_figures(
    parts: Sequence[Part],
    arms: Sequence[tuple[str, Sequence[Part]]],
    judge: Judge,
) -> list[Plot]:
    """The change of each part of the judge's score; small marks are other arms."""
    rods = [
        Rod(
            part.name,
            part.moved,
            seeds=[
                (other.change, f"{signed(other.change)}, {arm}")
                for arm, of in arms
                for other in of
                if other.name == part.name
            ],
        )
        for part in parts
    ]
    title = f"Parts of the {judge.label:score}, before → after"
    return rod_figures({**FRAMES["gold-parts"], "title": title}, rods, 0.0, signed)


def accuracy_figures(reward: Facts, pairs: Facts, judge: Judge) -> list[Plot]:
    """The reward model's accuracy with its interval, beside the agreement of the people it learnt
    from.
    """
    groups = ((reward, "reward model", BLUE, ACCURACIES), (pairs, "annotators", GREEN, AGREEMENTS))
    rods = [
        Rod(keys[key].format(judge=judge.label), share, colour, group)
        for of, group, colour, keys in groups
        for key in keys
        if (share := estimate(of, key))
    ]
    if not rods or rods[0].group != "reward model":
        return []
    return rod_figures(FRAMES["reward-accuracy"], rods, 0.5, percent, "chance")


class Rod(NamedTuple):
    """A number with its interval, as a row of a chart; `seeds` are the values that it is the mean
    of, each with its note.
    """

    name: str
    value: Estimate
    colour: str = BLUE
    group: str = ""
    size: float = 11.0
    seeds: Sequence[tuple[float, str]] = ()


def rod_figures(
    frame: Row,
    rods: Sequence[Rod],
    even: float | None,
    show: Show,
    chance: str = "no difference",
) -> list[Plot]:
    """A row a number: a stroke for its interval, a mark for its value, which stands beside it,
    small marks for its seeds, and a line across all at `even`. Where no number has an interval,
    the axis says so, and shares are drawn from 0 on, so that no difference looks large.
    """
    ends = [-0.5, len(rods) - 0.5]
    names = [rod.name for rod in rods]
    traces = []
    if even is not None:
        name = f"{show(even)}: {chance}"
        traces = [Trace([even, even], ends, name, MUTED, dash="dot", size=1.6, silent=True)]
    for place, (_, value, colour, group, size, seeds) in enumerate(rods):
        if has_interval(value):
            stroke = [value.low, value.high], [place, place]
            traces.append(Trace(*stroke, "", colour, size=size / 4, silent=True))
        more = {"notes": [bracketed(value, show)], "size": size}
        listed = all(rod.group != group for rod in rods[:place])
        mark = Trace([value.value], [place], group, colour, "marks", listed=listed, **more)
        if seeds:
            xs, notes = zip(*seeds, strict=True)
            some = colour.replace(BLUE, GREEN)
            traces.append(Trace(xs, [place] * len(xs), "", some, "marks", notes=notes))
        traces.append(mark)
    if even is not None and not any(has_interval(rod.value) for rod in rods):
        frame = {**frame, "x": frame["x"].replace("strokes:", "no"), "zero": ["x"]}
    texts = list(enumerate(centre(rod.value, show) for rod in rods))
    tall = 46 if len(rods) < 7 else 30
    return [
        replace(plot, right=Axis("", plot.y.low, plot.y.high, texts))
        for plot in framed(frame, traces if rods else [], height=64 + tall * len(rods), rows=names)
    ]


def reliability_figures(reward: Facts) -> list[Plot]:
    """Predicted probability against observed frequency, the diagonal, and the number of pairs of
    each point.
    """
    stored = [
        list(map(finite, bin))
        for bin in listed(reward, "reliability")
        if isinstance(bin, list) and len(bin) == 5
    ]
    bins = [
        (mean, share, count)
        for _, _, mean, share, count in stored
        if mean is not None and share is not None and count
    ]
    if not bins:
        return []
    predicted, observed, counts = zip(*bins, strict=True)
    notes = [f"right in {percent(share)} of {thousands(count)} pairs" for _, share, count in bins]
    return framed(
        "reliability",
        [
            Trace(predicted, counts, "pairs", MUTED, "both", right=True, silent=True),
            Trace([0, 1], [0, 1], "honest", MUTED, dash="dot", size=1.2, silent=True),
            Trace(predicted, observed, "reward model", BLUE, "both", notes=notes),
        ],
    )


def stage_figures(stages: Sequence[SubRun]) -> list[Plot]:
    """Seconds by stage."""
    spent = [(stage.title, stage.estimate("seconds")) for stage in stages]
    rods = [Rod(title, seconds) for title, seconds in spent if seconds]
    return rod_figures(FRAMES["stages"], rods, None, duration) if len(rods) > 1 else []


def timeline_figures(arm: SubRun) -> list[Plot]:
    """Timelines of the learner and of each engine server, in the step that took the median time."""
    work = {row.get("step"): mapping(row, "servers") for row in arm.work}
    steps = [
        (seconds, row)
        for row in arm.metrics
        if work.get(row.get("step")) and (seconds := finite(row, "time/step"))
    ]
    if not steps:
        return []
    seconds, row = sorted(steps, key=itemgetter(0))[len(steps) // 2]
    servers = work[row["step"]]
    traces = []
    start = 0.0
    for name, (words, colour) in PHASES.items():
        if spent := finite(row, f"time/{name}"):
            traces.append(_bars([(start, start + spent)], 0, words, colour))
            start += spent
    for place, spans in enumerate(servers.values(), 1):
        worked = [
            (max(0.0, seconds + begin), seconds + end)
            for begin, end in number_pairs(spans)
            if seconds + end > 0
        ]
        traces.append(_bars(worked, place, "samples", BLUE, listed=place == 1))
    frame = {**FRAMES["timeline"], "title": FRAMES["timeline"]["title"].format(step=row["step"])}
    return framed(frame, traces, height=60 + 34 * (1 + len(servers)), rows=["learner", *servers])


def number_pairs(value: object) -> Iterator[tuple[float, float]]:
    """The pairs of finite numbers in a list."""
    for pair in listed(value):
        first, second, *_ = (*map(finite, listed(pair)), None, None)
        if first is not None and second is not None:
            yield first, second


def _bars(
    spans: Sequence[tuple[float, float]],
    place: int,
    name: str,
    colour: str,
    listed: bool = True,
) -> Trace:
    """Strokes in a row of a chart, each from one time to another."""
    notes = [f"{end - start:.2f} s" for start, end in spans for _ in range(3)]
    xs = [x for span in spans for x in (*span, None)]
    return Trace(xs, [place] * len(xs), name, colour, size=14.0, listed=listed, notes=notes)


def loop_figures(loop: LoopRun) -> list[Plot]:
    """Gold, and the reward model's accuracy, over the labels that had been paid for."""
    rows: list[Row] = [{"step": 0, "gold": loop.rounds[0].get("gold_before")}]
    for one in loop.rounds:
        shares = {key: share.value for key in ACCURACIES if (share := estimate(one, "reward", key))}
        rows.append({"step": one["labels_so_far"], **shares, "gold": one.get("gold_after")})
    return charts("rounds", [SubRun("", rows)], judge=Judge(loop.judge))


def write_trace(journey: Journey, path: Path) -> bool:
    """Write the steps and phases of all stages, and the work of engine servers; False: no stage
    has measured times.
    """
    events = [
        event for number, stage in enumerate(journey.stages) for event in _events(stage, number)
    ]
    if events:
        write_json(path, {"traceEvents": events, "displayTimeUnit": "ms"})
    return bool(events)


def _events(stage: SubRun, number: int) -> list[Row]:
    """The steps of a stage. A row was written when its step had ended: phases are laid before."""
    events: list[Row] = []
    ends: dict[float, float] = {}
    for row in stage.metrics:
        ended, took, step = (finite(row, key) for key in ("time", "time/step", "step"))
        if ended is None or took is None or step is None:
            continue
        ends[step], start = ended, ended - took
        events.append(_event(f"step {step:.0f}", number, 0, start, took))
        for phase in PHASES:
            if (seconds := finite(row, f"time/{phase}")) is not None:
                events.append(_event(phase, number, 1, start, seconds))
                start += seconds
    servers: dict[str, int] = {}
    for row in stage.work:
        ended = ends.get(finite(row, "step") or 0.0)
        if ended is None:
            continue
        for name, spans in mapping(row, "servers").items():
            lane = servers.setdefault(name, len(servers) + 2)
            for begin, end in number_pairs(spans):
                events.append(_event("samples", number, lane, ended + begin, end - begin))
    if events:
        names = {0: "steps", 1: "phases", **{lane: name for name, lane in servers.items()}}
        events.append(_name("process_name", number, 0, stage.name))
        events += [_name("thread_name", number, lane, name) for lane, name in names.items()]
    return events


def _event(name: str, process: int, lane: int, start: float, seconds: float) -> Row:
    """A complete event; the format counts microseconds."""
    return {
        "name": name,
        "ph": "X",
        "ts": start * 1e6,
        "dur": max(0.0, seconds) * 1e6,
        "pid": process,
        "tid": lane,
    }


def _name(kind: str, process: int, lane: int, name: str) -> Row:
    return {
        "name": kind,
        "ph": "M",
        "pid": process,
        "tid": lane,
        "args": {"name": name},
    }
