"""Threads that send the files of a run to trackers, one for each tracker. The stages are
independent of them.

The run's files are the queue. A tracker that is slow, hangs or is down delays nothing and loses
nothing. The missing records are sent when it answers again, or when the run is resumed.
"""

from __future__ import annotations

import contextlib
import logging
import os
import statistics
import threading
import time
import uuid
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tether.core.keeping import entries
from tether.core.lines import Lines
from tether.core.protocols import Tracker
from tether.core.rundir import RECORDS, is_control, read_json, write_json
from tether.core.types import Facts, Json, Metrics
from tether.evaluation.peaks import without_none
from tether.settings.tracking import TrackerName
from tether.watch.tracking.trackers import EVENTS, TrackedRun, check_trackers, start_tracker

LOOK_EVERY, RETRY_AFTER, LAST_WAIT = 2.0, 30.0, 30.0
"""Seconds from one look into the folders to the next, after a tracker has failed, and for the rest
when the run has ended.
"""


@contextlib.contextmanager
def tracking(names: Sequence[TrackerName], root: Path) -> Iterator[None]:
    """Within this block the trackers are sent what the run directories below `root` write down.

    Raises:
        ConfigError: the package of a tracker is not installed.
    """
    check_trackers(names)
    threads = [TrackerThread(name, root) for name in names]
    try:
        yield
    finally:
        deadline = time.monotonic() + LAST_WAIT
        for thread in threads:
            thread.end.set()
        for thread in threads:
            thread.finish(deadline - time.monotonic())


class TrackerThread(threading.Thread):
    """Sends the records below `root` to one tracker. If it fails, it is tried again; the first
    failure is logged.
    """

    def __init__(self, tracker: TrackerName, root: Path) -> None:
        super().__init__(name=f"tracker {tracker}", daemon=True)
        self.tracker: TrackerName = tracker
        self.root = root.resolve()
        self.end = threading.Event()
        self.warned = False
        self.folders: dict[Path, TrackedFolder] = {}
        self.open: TrackedFolder | None = None
        self.start()

    def finish(self, seconds: float = LAST_WAIT) -> None:
        """Send the rest, and wait for that no longer than this."""
        self.end.set()
        self.join(max(0.0, seconds))
        if self.is_alive():
            self._warn("it does not answer")

    def run(self) -> None:
        pause = 0.0
        last = False
        while not last:
            last = self.end.wait(pause)
            try:
                self._look(last)
                pause = LOOK_EVERY
            except Exception as error:  # noqa: BLE001  (whatever a tracker does, the run goes on)
                self._warn(f"{type(error).__name__}: {error}")
                self.folders = {}
                self.open = None
                pause = RETRY_AFTER

    def _look(self, last: bool) -> None:
        """Send what is new, folder by folder. A folder's run stays open in the tracker until
        another folder has news.
        """
        manifests = entries(self.root, "**/manifest.json")
        for manifest in sorted(manifests, key=os.path.getmtime):
            if (place := manifest.parent) not in self.folders:
                group = group_label(self.tracker, self.root)
                self.folders[place] = TrackedFolder(self.tracker, place, self.root, group)
            if (folder := self.folders[place]).has_news(last):
                if self.open is not None and self.open is not folder:
                    self.open.close()
                self.open = folder
                folder.send()
        if last and self.open is not None:
            self.open.close()

    def _warn(self, reason: str) -> None:
        if not self.warned:
            self.warned = True
            message = (
                "%s takes nothing (%.300s). The run goes on, and what it misses is in the "
                "files of %s, as all is"
            )
            logging.getLogger(__name__).warning(
                message,
                self.tracker,
                reason,
                self.root,
            )


class TrackedFolder:
    """A run directory, and how much of it one tracker has: noted in `tracker-NAME.json`, so that no
    step is sent twice.

    The note also holds the run's identity, `own`. A moved folder keeps it. A copy beside the
    original gets another one: the tracker gets the copy as a run of its own, from its beginning.
    """

    def __init__(self, name: TrackerName, folder: Path, root: Path, group: str) -> None:
        self.name: TrackerName = name
        self.folder = folder
        self.root = root
        self.group = group
        self.note = note_of(name, folder)
        self.state: Json = read_note(name, folder)
        self.steps: dict[str, int] = self.state["steps"]
        self.lines = {record: Lines(folder / record) for record in RECORDS}
        self.above = {record: self.steps.get(record, -1) for record in RECORDS}
        self.waiting: dict[int, dict[str, list[Json]]] = defaultdict(
            lambda: {record: [] for record in RECORDS},
        )
        self.due: list[int] = []
        self.tracker: Tracker | None = None
        self.written = 0

    def has_news(self, last: bool) -> bool:
        """Read what is new. A measurement on held-out prompts waits for the metrics of its step,
        which repeat it.
        """
        summary = self.folder / "summary.json"
        # before the rows, of which none comes after it
        self.written = summary.stat().st_mtime_ns if summary.is_file() else 0
        finished = self.written != self.state["summary"]
        for record in RECORDS:
            for row in self._new_rows(record):
                self.waiting[row.get("step", 0)][record].append(row)
        logged = max(
            (step for step, rows in self.waiting.items() if rows["metrics.jsonl"]),
            default=self.last_step,
        )
        self.due = sorted(step for step in self.waiting if last or finished or step <= logged)
        return bool(self.due) or finished

    def _new_rows(self, record: str) -> Iterator[Json]:
        """The rows that a file has gained; of one written anew, those above the tracker's steps."""
        for anew, rows in self.lines[record].news():
            if anew:
                self.above[record] = self.steps.get(record, -1)
            yield from (row for row in rows if row.get("step", 0) > self.above[record])

    def send(self) -> None:
        """Send what is due, a step at a time, and the summary if the stage is finished."""
        if self.tracker is None:
            whole, _, stage = self.folder.relative_to(self.root.parent).as_posix().partition("/")
            config = read_json(self.folder / "config.json")
            self._write_note()
            state = self.state
            run = TrackedRun(
                self.folder,
                stage or whole,
                whole,
                self.group,
                config,
                state["own"],
                state["id"],
                self.last_step,
            )
            self.tracker = start_tracker(self.name, run)
            self._write_note(id=self.tracker.id)
        for step in self.due:
            self._send_step(self.tracker, step, self.waiting.pop(step))
        if self.written != self.state["summary"]:
            self.tracker.log(
                numbers_in(read_json(self.folder / "summary.json"), "summary"),
                self.last_step + 1,
                time.time(),
            )
            self.close(complete=True)
            self._write_note(summary=self.written)

    def close(self, complete: bool = False) -> None:
        """End the tracker's run: the stage is finished, or goes on some time."""
        if self.tracker is not None:
            self.tracker.close(complete)
            self.tracker = None

    def _send_step(self, tracker: Tracker, step: int, rows: Mapping[str, Sequence[Json]]) -> None:
        metrics = {}
        ended = time.time()
        for row in rows["heldout.jsonl"]:
            metrics |= {} if is_control(row) else measured_means(row)
        for row in rows["metrics.jsonl"]:
            metrics |= numbers_in(
                {key: value for key, value in row.items() if key not in ("step", "time")},
            )
            ended = row["time"]
        if metrics:
            tracker.log(metrics, step, ended)
        for alarm in rows["alarms.jsonl"]:
            tracker.alarm(alarm)
        if samples := rows["samples.jsonl"]:
            for row in samples:
                row.pop("turns", None)
            tracker.samples(samples, step)
        self.steps.update(
            (record, max(step, self.steps.get(record, -1))) for record in RECORDS if rows[record]
        )
        self._write_note()

    @property
    def last_step(self) -> int:
        return max(self.steps.values(), default=-1)

    def _write_note(self, **changes: object) -> None:
        self.state |= changes
        write_json(self.note, self.state)


def read_note(name: TrackerName, folder: Path) -> Json:
    """A folder's note, or that of one that the tracker has yet to see.

    TensorBoard's files in the folder itself are moved and copied with the folder.
    """
    events = os.environ.get(EVENTS, "") if name == "tensorboard" else None
    place = {"folder": str(folder), "events": events}
    begun = {"id": None, "own": uuid.uuid4().hex[:8], "steps": {}, "summary": 0}
    note = note_of(name, folder)
    state = read_json(note) if note.is_file() else {"place": place}
    goes_on = state["place"]["events"] == events and (events == "" or not _is_copy(state, note))
    return {**begun, **(state if goes_on else {}), "place": place}


def note_of(name: TrackerName, folder: Path) -> Path:
    """The file in which a folder notes how much of it a tracker has."""
    return folder / f"tracker-{name}.json"


def _is_copy(state: Json, note: Path) -> bool:
    """True if the folder in which a note was written still exists, with the same run."""
    original = Path(state["place"]["folder"]) / note.name
    if not original.is_file() or original.samefile(note):
        return False
    return read_json(original).get("own") == state["own"]


def group_label(name: TrackerName, root: Path) -> str:
    """The common label of the stages of a run: its name and its identity, which `root` holds before
    any stage is sent.
    """
    state = read_note(name, root)
    write_json(note_of(name, root), state)
    return f"{root.name}-{state['own']}"


def numbers_in(values: Facts, above: str = "") -> Metrics:
    """The numbers in JSON, by their keys and those of the tables that they lie in: `a/b`."""
    from transformers.utils import flatten_dict

    flat = flatten_dict({**values}, above, "/")
    return {
        key: float(value)
        for key, value in flat.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }


def measured_means(row: Json) -> Metrics:
    """A measurement on held-out prompts: the mean of each column of scores, under the names that
    metrics have.
    """
    columns = {key: without_none(column) for key, column in row["scores"].items()}
    means = {key: statistics.fmean(column) for key, column in columns.items() if column}
    return numbers_in(
        {**means, **({"length": row["length"]} if "length" in row else {})},
        row["name"],
    )
