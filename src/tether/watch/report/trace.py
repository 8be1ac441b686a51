"""A trace of a run's phases, in the format that ui.perfetto.dev and chrome://tracing read."""

from __future__ import annotations

from pathlib import Path

from tether.core.rundir import write_json
from tether.watch.report.figures import PHASES, number_pairs
from tether.watch.report.reading import Journey, Row, SubRun, finite, mapping


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
