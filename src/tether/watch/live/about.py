"""Facts about a run beside its curves: verdict, settings, place in a sweep, tags and note."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from tether.core.errors import RunError
from tether.core.keeping import entries
from tether.core.rundir import SWEEP, write_json
from tether.core.types import Json
from tether.watch.live.condition import Condition, json_inside
from tether.watch.live.followed import FollowedRun
from tether.watch.report.narrative import HEADLINES, conclusion, loop_conclusion, rate_at_best
from tether.watch.report.numbers import bracketed, percent
from tether.watch.report.page import write_report
from tether.watch.report.reading import SubRun, printable, read_journey, read_loop

NOTES = ".dashboard.json"
"""The file with a run's tags and note: the only one in its folder that is the dashboard's."""
LONGEST = {"tags": 400, "note": 2000}
RECORDS = ("*", "*/*.json*", "round-*/*/*.json*")
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
    if run.condition is Condition.RUNNING or not run.stages:
        return {}
    check_records(run.folder)
    if (loop := read_loop(run.folder)) is not None:
        whole = loop_conclusion(loop)
        policy = SubRun("", summary=loop.rounds[-1])
    else:
        journey = read_journey(run.folder)
        whole = conclusion(journey)
        policy = journey.judged
    rate = rate_at_best(policy) or policy.summary.get("gold_win_rate")
    end = whole.headline.rpartition(": ")[2].lower()
    begun = {text.partition("{")[0].lower(): key for key, (_, text) in HEADLINES.items()}
    word = next((key for text, key in begun.items() if end.startswith(text)), end)
    return {
        "tone": whole.tone,
        "headline": whole.headline,
        "word": word,
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
