"""The condition of a run: whether a process is at work in its folder, and how it ended."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from enum import StrEnum
from os.path import isfile
from pathlib import Path

import psutil
from pydantic_core import from_json

from tether.core.lines import open_inside
from tether.core.rundir import SWEEP, stage_folder
from tether.core.types import Json
from tether.watch.report.reading import mapping

LONGEST = 8 << 20
"""Bytes of a file of JSON that is read."""
FRESH = 600.0
"""Seconds without news after which a run is silent, where its process cannot be examined."""
INNER = frozenset({"checkpoints", "policy", "model", "best", "engine", "skipped"})
"""Folders in a run that hold neither runs nor stages."""
DEEPEST = 6
MOST_FOLDERS = 20_000


class Condition(StrEnum):
    """Condition of a run."""

    RUNNING = "running"
    ENDED = "ended"
    CRASHED = "crashed"
    STOPPED = "stopped"
    SILENT = "silent"


MEANS = {
    Condition.RUNNING: "A process is at work on it.",
    Condition.ENDED: "All of its stages are finished.",
    Condition.CRASHED: "Its process has gone without a word: killed, or out of memory. "
    "Start the same command again to go on from the last checkpoint.",
    Condition.STOPPED: "It was stopped, or ended with an error, before its last stage was "
    "finished. Start the same command again to go on from the last checkpoint.",
    Condition.SILENT: "It is not finished and writes nothing. Its process cannot be examined "
    "from this machine.",
}


def json_inside(path: Path) -> Json:
    """The object in a file; empty where there is none, or one that cannot be read."""
    handle = open_inside(path)
    if handle is None:
        return {}
    with os.fdopen(handle, "rb") as file:
        try:
            value = from_json(file.read(LONGEST))
        except ValueError:
            return {}
    return value if isinstance(value, dict) else {}


def is_run(folder: Path) -> bool:
    """True if a folder is a run directory: of a command, or of a single stage."""
    own = (folder / "config.json", folder / "manifest.json")
    return isfile(folder / "command.json") or all(map(isfile, own))


def folders_in(folder: Path) -> list[Path]:
    """Folders in a folder by name, without links and hidden ones; empty where it has gone."""
    try:
        with os.scandir(folder) as entries:
            inside = [e.name for e in entries if e.is_dir(follow_symlinks=False)]
    except OSError:
        return []
    return [folder / name for name in sorted(inside) if name[0] != "." and name not in INNER]


def runs_below(folder: Path) -> Iterator[Path]:
    """Run directories in a folder, itself included; those inside another are its stages, or the
    combinations of its sweep.
    """
    level = [folder]
    for _ in range(DEEPEST):
        below: list[Path] = []
        for place in level[:MOST_FOLDERS]:
            if is_run(place):
                yield place
                yield from folders_in(place / "sweep") if isfile(place / SWEEP) else ()
            else:
                below += folders_in(place)
        level = below


def condition(folder: Path, newest: float) -> Condition:
    """The condition of the run in a folder; `newest`: when its last row was written.

    A combination of a sweep whose stages are not all finished is in the condition of the sweep.
    """
    root = folder.parent.parent
    if folder.parent.name == "sweep" and isfile(root / SWEEP):
        return Condition.ENDED if _swept(root, folder) else condition(root, newest)
    lock = folder / ".lock"
    handle = open_inside(lock)
    if handle is not None:
        with os.fdopen(handle, "rb") as file:
            words = file.read(200).decode("utf-8", "replace").split()
            written = os.fstat(handle)
        if words and words[0].isdecimal() and words[1:] in ([], [socket.gethostname()]):
            if _is_alive(int(words[0]), written.st_mtime):
                return Condition.RUNNING
            return Condition.ENDED if _is_finished(folder) else Condition.CRASHED
        return _by_age(newest)
    if _is_finished(folder):
        return Condition.ENDED
    if isfile(folder / "command.json"):
        return Condition.STOPPED
    return _by_age(newest)


def _is_alive(number: int, since: float) -> bool:
    """True if a process exists, is no zombie, and began before a moment: a number is given anew."""
    try:
        process = psutil.Process(number)
        return process.status() != psutil.STATUS_ZOMBIE and process.create_time() <= since + 1
    except (psutil.Error, ValueError, OverflowError):
        return False


def _is_finished(folder: Path) -> bool:
    """True if the run, or each stage that its command named, has its summary."""
    if isfile(folder / "summary.json"):
        return True
    if isfile(folder / SWEEP):
        return _swept(folder, folder)
    stages = json_inside(folder / "command.json").get("stages")
    names = {name for name in stages if isinstance(name, str)} if isinstance(stages, list) else ()
    return bool(names) and all(
        isfile(stage_folder(folder, name) / "summary.json") for name in names
    )


def _swept(root: Path, inside: Path) -> bool:
    """True if every stage of a sweep in a folder has its summary."""
    rows = json_inside(root / SWEEP).get("combinations")
    paths = [
        root / str(path)
        for row in (rows if isinstance(rows, list) else [])
        for path in mapping(row, "stages").values()
    ]
    own = [path for path in paths if path.is_relative_to(inside)]
    return bool(own) and all(isfile(path / "summary.json") for path in own)


def _by_age(newest: float) -> Condition:
    """Running or silent, by the time on the wall clock at which a file was last written."""
    age = time.time() - newest
    return Condition.RUNNING if age < FRESH else Condition.SILENT
