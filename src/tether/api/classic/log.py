"""Record of a training's numbers: a run directory of its own, which trackers follow."""

from __future__ import annotations

import atexit
import warnings
from importlib.util import find_spec
from pathlib import Path

from tether.api.classic.config import ClassicConfig
from tether.api.classic.models import AutoModelForCausalLMWithValueHead, CausalModel
from tether.core.rundir import RunDirectory
from tether.settings.config import Config
from tether.settings.tracking import TrackerName
from tether.watch.tracking.follow import TrackerThread


def numbered_run(
    output_dir: str,
    settings: ClassicConfig,
    trackers: tuple[TrackerName, ...],
    stage: dict[str, Config],
    model: CausalModel | AutoModelForCausalLMWithValueHead,
) -> RunDirectory:
    """The next of `runs/001` and so on in `output_dir`; a tracker whose package is missing is left
    out with a warning.

    Args:
        stage: by the name of a recipe's section the settings that tether's own stage runs by, for
            `tether report` and `doctor`.
    """
    runs = Path(output_dir) / "runs"
    number = 1 + len(list(runs.glob("*")))
    own = {name: config.model_dump(mode="json") for name, config in stage.items()}
    source = {"source": str(model.config.name_or_path or type(model).__name__)}
    values = {"trainer": type(settings).__name__, **settings.model_dump(), **own, "model": source}
    run = RunDirectory.open(runs / f"{number:03d}", values, model=source)
    for tracker in trackers:
        if find_spec(tracker):
            atexit.register(TrackerThread(tracker, run.path).finish)
        else:
            warnings.warn(
                f"{tracker} is not installed, so that statistics go to {run.path} alone",
                stacklevel=3,
            )
    return run
