"""A run's folder, followed: the curves, rollouts and alarms of its stages, and how far it is."""

from __future__ import annotations

import threading
import time
from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Collection, Iterator
from os.path import isfile
from pathlib import Path
from typing import NamedTuple

from tether.core.lines import Lines
from tether.core.pace import Pace
from tether.core.types import Json, Row
from tether.core.visible import visible
from tether.watch.live.condition import Condition, condition, folders_in, json_inside
from tether.watch.report.reading import KINDS, finite, mapping, printable, turn_texts

MOST = 4000
"""Points of a curve. Beyond them every second one of the older half goes."""
MOST_KEYS = 200
MOST_STAGES = 100
"""Metrics of a stage and stages of a run that are followed."""
MOST_ROLLOUTS = 500
MOST_ALARMS = 300
"""Rows that are held of a run: the newest."""
LONGEST_PAUSE = 3600.0
"""Seconds between two rows from which on they are of two starts, and say nothing of the pace."""


class Seen(NamedTuple):
    """A row with the tick at which it was read and the stage that wrote it."""

    tick: int
    stage: str
    row: Json


class Curve:
    """Points of one metric, each with the tick at which it was read; at most `MOST` of them."""

    def __init__(self) -> None:
        self.steps, self.values, self.ticks = array("d"), array("d"), array("Q")

    def add(self, step: float, value: float, tick: int) -> None:
        """Add a point, rounded to six digits."""
        if len(self.steps) == MOST:
            half = MOST // 2
            self.steps[:half] = self.steps[:half:2]
            self.values[:half] = self.values[:half:2]
            self.ticks[:half] = self.ticks[:half:2]
        self.steps.append(step)
        self.values.append(float(f"{value:.6g}"))
        self.ticks.append(tick)

    def after(self, since: int, until: int) -> tuple[list[float], list[float]]:
        """Steps and values that were read after one tick, up to another."""
        part = slice(bisect_right(self.ticks, since), bisect_right(self.ticks, until))
        return self.steps[part].tolist(), self.values[part].tolist()


class Stage:
    """A stage's folder: its records, and the curves of its metrics (all, or those of `keys`)."""

    def __init__(self, name: str, folder: Path, keys: Collection[str] | None, texts: bool) -> None:
        self.name = name
        self.folder = folder
        self.keys = keys
        self.metrics = Lines(folder / "metrics.jsonl")
        self.alarms = Lines(folder / "alarms.jsonl")
        self.samples = Lines(folder / "samples.jsonl") if texts else None
        self.curves: dict[str, Curve] = {}
        self.begun = 0
        self.num_alarms = 0
        self.newest = 0.0
        self.last: Json = {}
        self.pace = Pace()

    def look(self, tick: int) -> list[Json]:
        """Read what is new; the rows of metrics."""
        new: list[Json] = []
        for anew, rows in self.metrics.news():
            if anew:
                self.curves, self.begun, self.pace, new = {}, tick, Pace(), []
            for row in rows:
                self._add(row, tick)
            new += rows
        return new

    def _add(self, row: Json, tick: int) -> None:
        step = finite(row, "step")
        at = finite(row, "time")
        if step is None:
            return
        pause = (at or 0.0) - self.newest
        if self.newest and 0 < pause < LONGEST_PAUSE:
            self.pace.add(pause)
        self.newest = at or self.newest
        self.last = row
        for key in row if self.keys is None else self.keys:
            value = finite(row, key) if key not in ("step", "time") else None
            if value is not None and (key in self.curves or len(self.curves) < MOST_KEYS):
                self.curves.setdefault(key, Curve()).add(step, value, tick)

    @property
    def step(self) -> int:
        """The last step that was written."""
        return int(finite(self.last, "step") or 0)

    def steps(self) -> int | None:
        """The steps that the training has; None where the run did not note it."""
        noted = finite(json_inside(self.folder / "manifest.json"), "steps")
        if noted is None:
            config = json_inside(self.folder / "config.json")
            sections = [mapping(config[key]) for key in config if key in KINDS]
            noted = next((n for s in sections if (n := finite(s, "steps")) is not None), None)
        return None if noted is None else int(noted)


class FollowedRun:
    """A run directory whose new rows are read by `look`; other threads read under `lock`.

    Args:
        keys: the metrics of which curves are held; None: all.
        texts: rollouts and alarms are held too.
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        keys: Collection[str] | None = None,
        texts: bool = True,
    ) -> None:
        self.folder = folder
        self.name = name
        self.keys = keys
        self.texts = texts
        self.lock = threading.RLock()
        self.stages = dict[str, Stage]()
        self.rollouts: deque[Seen] = deque(maxlen=MOST_ROLLOUTS)
        self.alarms: deque[Seen] = deque(maxlen=MOST_ALARMS)
        self.condition = Condition.STOPPED
        self.changed = 0
        self.about: Json = {}
        self.told = 0
        """Further facts about the run, and the tick at which they changed."""
        self.marks: tuple[object, object] = (0, 0)
        self.fault = ""
        """The sentence on a folder that cannot be read."""
        self.fresh: list[tuple[Stage, Json]] = []
        """The rows of metrics that the last look has read."""

    def look(self, tick: int) -> bool:
        """Read what is new; True if anything has changed."""
        with self.lock:
            self.fault = ""
            self._find_stages(tick)
            self.fresh = []
            before = (self.condition, len(self.stages), *self._sizes())
            for stage in self.stages.values():
                self.fresh += [(stage, row) for row in stage.look(tick)]
                count = self._held(stage, stage.alarms, self.alarms, tick, stage.num_alarms)
                stage.num_alarms = count
                if stage.samples is not None:
                    self._held(stage, stage.samples, self.rollouts, tick)
            newest = max((stage.newest for stage in self.stages.values()), default=0.0)
            self.condition = condition(self.folder, newest)
            is_changed = before != (self.condition, len(self.stages), *self._sizes())
            if is_changed or not self.changed:
                self.changed = tick
            return is_changed

    def _sizes(self) -> Iterator[int]:
        for stage in self.stages.values():
            yield from (stage.metrics.place, stage.alarms.place, stage.metrics.file)

    def _find_stages(self, tick: int) -> None:
        inside = folders_in(self.folder)
        deeper = [below for place in inside for below in folders_in(place)]
        for folder in (self.folder, *inside, *deeper)[: 20 * MOST_STAGES]:
            name = "" if folder == self.folder else folder.relative_to(self.folder).as_posix()
            is_new = name not in self.stages and len(self.stages) < MOST_STAGES
            if is_new and isfile(folder / "metrics.jsonl"):
                self.stages[name] = Stage(visible(name), folder, self.keys, self.texts)
                self.stages[name].begun = tick

    def _held(
        self,
        stage: Stage,
        lines: Lines,
        held: deque[Seen],
        tick: int,
        count: int = 0,
    ) -> int:
        """Hold the new rows of a file, and count them on. Of one that a resumed run writes anew, the
        rows from before go.
        """
        for anew, rows in lines.news():
            if anew:
                count = 0
                stage.begun = tick
                left = [one for one in held if one.stage != stage.name]
                held.clear()
                held.extend(left)
            count += len(rows)
            held.extend(Seen(tick, stage.name, cell_text(row)) for row in rows[-MOST_ROLLOUTS:])
        return count

    @property
    def active(self) -> Stage | None:
        """The stage that wrote last; None before the first step."""
        return max(self.stages.values(), key=lambda stage: stage.newest, default=None)

    def status(self) -> Row:
        """Progress of the run: plain values for people."""
        stage = self.active
        steps = None if stage is None else stage.steps()
        pace = None if stage is None else stage.pace.step
        left = None
        if stage and steps and pace and self.condition is Condition.RUNNING:
            since = time.time() - stage.newest
            left = finite((float(steps) - stage.step) * pace - min(since, pace))
        lines = [
            (s.name, f) for s in self.stages.values() for f in (s.metrics, s.alarms, s.samples)
        ]
        return {
            "name": visible(self.name, 200),
            "condition": self.condition,
            "stage": visible(stage.name or self.folder.name, 80) if stage else "",
            "step": stage.step if stage else 0,
            "steps": steps,
            "left": left and max(0.0, left),
            "newest": stage.newest if stage else 0.0,
            "alarms": sum(one.num_alarms for one in self.stages.values()),
            "notes": [
                *filter(None, [self.fault]),
                *(
                    f"{visible(name, 80)}/{file.path.name}: {file.left_out} line(s) cannot be read, "
                    "or are too long, and are left out."
                    for name, file in lines
                    if file is not None and file.left_out
                ),
            ],
        }


def cell_text(row: Json) -> Json:
    """A row for people: texts made visible and cut, numbers as they are, 40 entries at most."""
    return {
        visible(str(key), 60): value
        if isinstance(value, bool) or finite(value) is not None
        else [printable(one, 1000) for one in value[:5]]
        if isinstance(value, list) and key == "evidence"
        else turn_texts(value)
        if key == "turns"
        else printable(value)
        for key, value in list(row.items())[:40]
    }
