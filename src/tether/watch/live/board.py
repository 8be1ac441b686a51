"""All runs in a folder, followed in one thread; what a page lacks since a tick, and
what there is to say of a run beside its curves.
"""

from __future__ import annotations

import os
import secrets
import tempfile
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

from tether.core.errors import RunError, error_words
from tether.core.keeping import entries
from tether.core.rundir import SWEEP, write_json
from tether.core.types import Json
from tether.core.visible import visible
from tether.watch.live.condition import MEANS, Condition, json_inside, runs_below
from tether.watch.live.followed import FollowedRun, Seen, Stage
from tether.watch.report.narrative import HEADLINES, conclusion, loop_conclusion, rate_at_best
from tether.watch.report.numbers import bracketed, percent
from tether.watch.report.page import write_report
from tether.watch.report.reading import SubRun, printable, read_journey, read_loop
from tether.watch.report.sweep import sweep_brief
from tether.watch.report.sweeps import read_sweep

LOOK_EVERY = 1.0
FIND_EVERY = 5
"""Seconds between two looks, and looks between two searches for new runs."""
SHARE = 0.05
LONGEST_WAIT = 5.0
"""Share of a processor that looks may take, and the longest wait for it in seconds."""
JUDGING = 0.05
"""Seconds of a processor after which a look makes no further verdict."""
MOST_RUNS = 500
MOST_OPEN = 6
"""Runs of a board, and runs of which every metric is held: those that were opened last."""
SHOWN = (
    "reward/proxy",
    "gold/score",
    "heldout/score",
    "heldout/correct",
    "kl/policy_reference_k1",
    "response/length",
    "response/stop_rate",
    "loss",
    "eval_loss",
    "accuracy",
    "eval_accuracy",
    "time/step",
)
"""Metrics of the overview."""


class Board:
    """The runs below a folder.

    `tick` counts the looks; a page that has everything up to a tick is sent what came after it.
    `mark` names this start of the program: a tick of another one means nothing here.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.tick, self.mark = folder.resolve(), 0, secrets.token_hex(4)
        self.runs: dict[str, FollowedRun] = {}
        self.opened: OrderedDict[str, FollowedRun] = OrderedDict()
        self.lock = threading.Lock()
        self.over = threading.Event()
        self.left_out = 0

    def watch(self) -> None:
        """Look until `over` is set."""
        while True:
            began = time.thread_time()
            self.look()
            wait = (time.thread_time() - began) / SHARE
            if self.over.wait(min(LONGEST_WAIT, max(LOOK_EVERY, wait))):
                return

    def look(self) -> None:
        """Read what is new in every run."""
        with self.lock:
            if self.tick % FIND_EVERY == 0:
                self._find()
            now = self.tick + 1
            for run in (*self.runs.values(), *self.opened.values()):
                _look(run, now)
            runs = [*self.runs.values()]
        until = time.thread_time() + (JUDGING if self.tick else 0.0)
        for run in runs:
            _learn(run, now, until)
        with self.lock:
            self.tick = now

    def _find(self) -> None:
        """Take in new runs; those whose folders have gone go."""
        folders = list(runs_below(self.folder))
        self.left_out = max(0, len(folders) - MOST_RUNS)
        places = {
            sha256(self._name(path).encode("utf-8", "surrogateescape")).hexdigest()[:12]: path
            for path in folders[:MOST_RUNS]
        }
        for gone in self.runs.keys() - places.keys():
            del self.runs[gone]
            self.opened.pop(gone, None)
        for key, path in places.items():
            if key not in self.runs:
                self.runs[key] = FollowedRun(path, self._name(path), SHOWN, texts=False)

    def _name(self, path: Path) -> str:
        name = path.relative_to(self.folder).as_posix()
        return self.folder.name if name == "." else name

    def open(self, key: str) -> FollowedRun | None:
        """The run with this id, all of its metrics and texts held; None: there is none (now)."""
        with self.lock:
            brief = self.runs.get(key)
            if brief is None:
                return None
            if key not in self.opened:
                self.opened[key] = FollowedRun(brief.folder, brief.name)
                _look(self.opened[key], self.tick)
            self.opened.move_to_end(key)
            while len(self.opened) > MOST_OPEN:
                self.opened.popitem(last=False)
            return self.opened[key]

    def overview(self, metric: str, since: int) -> tuple[int, Json | None]:
        """The tick, and what has changed since another in the state and in one metric of each run;
        None: nothing.
        """
        with self.lock:
            now = self.tick
            runs = dict(self.runs)
            changed = {
                key: {
                    **run.status(),
                    "about": run.about if run.told > since else None,
                    "curves": _curves(run, (since, now), metric),
                }
                for key, run in runs.items()
                if run.changed > since
            }
        note = f"{self.left_out} more runs are not shown." if self.left_out else ""
        present = {"ids": list(runs), "note": note}
        return now, {"runs": changed, **present} if changed or since == 0 else present

    def run(self, key: str, since: int) -> tuple[int, Json | None]:
        """The same of one run and all of its metrics, rollouts and alarms.

        Raises:
            RunError: the run has gone.
        """
        run = self.open(key)
        if run is None:
            raise RunError("This run has gone: its folder was deleted or moved.")
        now = self.tick
        brief = self.runs.get(key, run)
        if since and max(run.changed, brief.told) <= since:
            return now, None
        with run.lock:
            status = run.status()
            return now, {
                **status,
                "about": brief.about,
                "means": MEANS[status["condition"]],
                "reset": [stage.name for stage in run.stages.values() if stage.begun > since],
                "curves": _curves(run, (since, now)),
                "rollouts": [_row(one) for one in run.rollouts if since < one.tick <= now],
                "alarm_rows": [_row(one) for one in run.alarms if since < one.tick <= now],
            }


def _look(run: FollowedRun, tick: int) -> None:
    """Read what is new in a run. A folder that cannot be read is named, and hides no other run."""
    try:
        run.look(tick)
    except Exception as error:  # noqa: BLE001 - a folder of somebody else may hold anything
        run.fault = visible(f"This run cannot be read: {error_words(error)}", 300)
        run.changed = tick


def _learn(run: FollowedRun, now: int, until: float) -> None:
    """Note what else there is to say of a run. A verdict that is late waits for the next look."""
    seen = run_marks(run)
    if seen == run.marks:
        return
    news = _tried(about_run, run)
    if seen[1] != run.marks[1] and time.thread_time() < until:
        news["verdict"] = _tried(run_verdict, run)
    else:
        seen = seen[0], run.marks[1]
    run.about = {**run.about, **news}
    run.marks = seen
    run.told = run.changed = now


def _tried(read: Callable[[FollowedRun], Json], run: FollowedRun) -> Json:
    """Facts that `read` gives about a run, or the reason of its failure as a verdict."""
    try:
        return read(run)
    except Exception as error:  # noqa: BLE001 - as above
        return {"tone": "open", "word": "not read", "headline": visible(error_words(error), 300)}


def _curves(run: FollowedRun, between: tuple[int, int], metric: str | None = None) -> list[Json]:
    """New points of every curve, or of those of one metric."""
    with run.lock:
        return [
            curve
            for stage in run.stages.values()
            for key in (stage.curves if metric is None else [metric])
            if (curve := _points(stage, key, *between)) is not None
        ]


def _points(stage: Stage, key: str, since: int, now: int) -> Json | None:
    if key not in stage.curves:
        return None
    anew = stage.begun > since
    steps, values = stage.curves[key].after(0 if anew else since, now)
    return (
        {"stage": stage.name, "key": key, "anew": anew, "x": steps, "y": values} if steps else None
    )


def _row(one: Seen) -> Json:
    return {**one.row, "stage": one.stage}


Look = Callable[[int], tuple[int, "Json | None"]]
"""From a tick to the tick of now, and what has come between."""


NOTES = ".dashboard.json"
"""The file with a run's tags and note: the only one in its folder that is the dashboard's."""
LONGEST = {"tags": 400, "note": 2000}
RECORDS = ("*", "*/*.json*", "round-*/*/*.json*", "sweep/*", "sweep/*/*", "sweep/*/*/*.json*")
MOST_READ = 256 << 20
"""Bytes of a run's records: a verdict and a page read them at once."""


def write_notes(folder: Path, notes: Json) -> None:
    """Keep the tags of a run, with commas between them, and its note.

    Raises:
        OSError: the folder cannot be written to.
    """
    write_json(folder / NOTES, {name: notes[name][:most] for name, most in LONGEST.items()})


def run_marks(run: FollowedRun) -> tuple[object, object]:
    """Marks that change with the facts about a run: times of its notes and results, and its
    progress.
    """
    names = (NOTES, "summary.json", "evaluate/summary.json")
    notes, *results = (_written(run.folder / name) for name in names)
    return notes, (run.condition, *run.stages, *results)


def _written(path: Path) -> int:
    try:
        return os.lstat(path).st_mtime_ns
    except OSError:
        return 0


def about_run(run: FollowedRun) -> Json:
    """Facts that are read quickly; the page compares the configs of the stages."""
    notes = json_inside(run.folder / NOTES)
    return {
        **{name: printable(notes.get(name), most) for name, most in LONGEST.items()},
        "sweep": json_inside(run.folder / SWEEP),
        "configs": [json_inside(stage.folder / "config.json") for stage in run.stages.values()],
    }


def run_verdict(run: FollowedRun) -> Json:
    """Tone, headline and short word of a run's report, and the win rate that decides; empty while it
    goes on.
    """
    begun = run.stages or (run.folder / SWEEP).is_file()
    if run.condition is Condition.RUNNING or not begun:
        return {}
    check_records(run.folder)
    policy = SubRun("")
    if (sweep := read_sweep(run.folder)) is not None:
        whole = sweep_brief(sweep).verdict
    elif (loop := read_loop(run.folder)) is not None:
        whole = loop_conclusion(loop)
        policy = SubRun("", summary=loop.rounds[-1])
    else:
        journey = read_journey(run.folder)
        whole = conclusion(journey)
        policy = journey.judged
    rate = rate_at_best(policy) or policy.summary.get("gold_win_rate")
    end = whole.headline.rpartition(": ")[2].lower()
    words = {text: key for key, text in HEADLINES.items()}
    return {
        "tone": whole.tone,
        "headline": whole.headline,
        "word": words.get(end, end),
        "rate": bracketed(rate, percent),
    }


def check_records(folder: Path) -> None:
    """Check that the records of a run may be read as a whole.

    Raises:
        RunError: links are among them, or they are too large.
    """
    records = [path for pattern in RECORDS for path in entries(folder, pattern)]
    if any(map(Path.is_symlink, records)) or sum(p.stat().st_size for p in records) > MOST_READ:
        raise RunError("This run has links, or more than 256 MB of records. Use tether report.")


def report_page(folder: Path) -> bytes:
    """The report of a run as it is now; nothing is written into its folder.

    Raises:
        RunError: there is nothing to report yet. See `check_records`.
    """
    check_records(folder)
    with tempfile.TemporaryDirectory() as place:
        return write_report(folder, Path(place) / "report.html").read_bytes()
