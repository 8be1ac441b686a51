"""Where a training's numbers go: a run directory of its own, which trackers follow."""

from __future__ import annotations

import atexit
import warnings
from importlib.util import find_spec
from pathlib import Path

from tether.classic.config import ClassicConfig
from tether.core.rundir import RunDirectory
from tether.run.trackers import TrackerName
from tether.run.tracking import TrackerThread


def numbered_run(output_dir: str, settings: ClassicConfig, trackers: tuple[TrackerName, ...]) -> RunDirectory:
    """The next of `runs/001` and so on in `output_dir`; a tracker whose package is missing is left out with a warning."""
    runs = Path(output_dir) / "runs"
    number = 1 + len(list(runs.glob("*")))
    run = RunDirectory.open(runs / f"{number:03d}", {"trainer": type(settings).__name__, **settings.model_dump()})
    for tracker in trackers:
        if find_spec(tracker):
            atexit.register(TrackerThread(tracker, run.path).finish)
        else:
            warnings.warn(f"{tracker} is not installed, so that statistics go to {run.path} alone", stacklevel=3)
    return run
