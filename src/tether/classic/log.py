"""Where statistics go: a new run directory, and from there to the tracker if its package is installed."""

from __future__ import annotations

import atexit
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tether.core.errors import ConfigError
from tether.core.rundir import RunDirectory
from tether.run.trackers import TrackerName, check_trackers
from tether.run.tracking import TrackerThread


class Log:
    """Metrics of a training: to a run directory, which a tracker follows.

    Args:
        output_dir: run directories are `runs/001` and so on in it; None keeps none, but for a tracker a temporary one.
        tracker: one whose package is missing is left out with a warning.
        options: for the tracker's own start; of tensorboard's, `logging_dir` is used.
    """

    def __init__(
        self, output_dir: str | None, config: Mapping[str, Any], tracker: TrackerName | None, options: Mapping[str, Any]
    ) -> None:
        self.run, self.thread = None, None
        try:
            check_trackers([tracker] if tracker else [])
        except ConfigError:
            rest = f"{output_dir}/runs alone" if output_dir else "nowhere, since output_dir is not set either"
            warnings.warn(f"{tracker} is not installed, so that statistics go to {rest}", stacklevel=4)
            tracker = None
        if output_dir is not None or tracker:
            runs = Path(output_dir or tempfile.mkdtemp(prefix="tether-")) / "runs"
            self.run = RunDirectory.open(runs / f"{1 + len(list(runs.glob('*'))):03d}", config)
            if tracker:
                self.thread = TrackerThread(tracker, self.run.path, options)
                atexit.register(self.thread.finish)

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        """The numbers among the metrics."""
        if self.run:
            self.run.log({k: float(v) for k, v in metrics.items() if isinstance(v, (int, float))}, step)
