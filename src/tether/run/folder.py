"""The folder of a run: settings as it was begun with, what was started there, and checkpoints that are no longer needed."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from tether.core.config import Config, parts
from tether.core.errors import MissingFileError, RunError
from tether.core.rundir import RunDirectory, hold, read_json, write_json
from tether.core.stopping import run_of
from tether.learner.checkpoint import complete_checkpoints
from tether.learner.config import OptimizerConfig

ConfigT = TypeVar("ConfigT", bound=Config)


def as_begun(config: ConfigT, folder: Path, name: str = "") -> ConfigT:
    """The same settings, with the learning rates that a run in `folder` began with where nobody names any.

    Those are defaults, which may be others in the tether that began it.
    """
    path = folder / "config.json"
    if not (path.is_file() and RunDirectory(folder).begun):
        return config
    before = read_json(path)
    return _with_rates(config, before.get(name) if name else before)


def _with_rates(config: ConfigT, before: Any) -> ConfigT:
    if not isinstance(before, dict):
        return config
    inner = {name: value for name, value in parts(config).items() if isinstance(value, Config)}
    changes: dict[str, Any] = {name: _with_rates(value, before.get(name)) for name, value in inner.items()}
    changes = {name: value for name, value in changes.items() if value is not inner[name]}
    if isinstance(config, OptimizerConfig) and "learning_rate" not in config.model_fields_set and before.get("learning_rate"):
        changes["learning_rate"] = before["learning_rate"]
    return config.model_copy(update=changes) if changes else config


def remember(root: Path, config: Config, stages: Sequence[str]) -> None:
    """Note in `root` what was started there, for `tether resume`.

    From here on no other process works in `root`. What contradicts a run that has begun there is not noted: the run will say what
    differs, and the note stays right.
    """
    root.mkdir(parents=True, exist_ok=True)
    hold(root)
    path, settings = root / "command.json", config.model_dump(mode="json", exclude_unset=True)
    before = read_json(path) if path.is_file() else {"config": settings}
    begun = [name for name in before.get("stages", ()) if (root / name / "config.json").is_file()]
    fixed = ("model", "seed", *begun) if begun else ()
    if all(before["config"].get(name) == settings.get(name) for name in fixed):
        write_json(path, {"stages": [*dict.fromkeys((*begun, *stages))], "config": settings})


def remembered(place: Path) -> tuple[Path, dict[str, Any]]:
    """The run directory that `place` is or lies in, and what was started there.

    Raises:
        RunError: nothing was, by tether's command line.
    """
    if not place.exists():
        raise MissingFileError(f"{place} does not exist. Give the folder of a run")
    if (root := run_of(place)) is not None:
        return root, read_json(root / "command.json")
    raise RunError(
        f"{place} is not in a run directory that a command of tether made. Give such a folder; a run that your own code opened "
        "goes on when that code runs again."
    )


def round_folder(root: Path, number: int | None) -> Path:
    """Where the stages of a round lie; without rounds, the run's own folder."""
    return root if number is None else root / f"round-{number:02d}"


def check_base(root: Path, folder: Path) -> None:
    """A finished stage stands on the SFT model that is there now.

    Raises:
        RunError: it was trained on one that is gone.
    """
    start, own = (place / "manifest.json" for place in (root / "sft", folder))
    if (folder / "summary.json").is_file() and start.is_file() and own.is_file():
        made = read_json(start).get("result", {}).get("digest")
        stood_on = read_json(own).get("model", {}).get("digest")
        if made and stood_on and made != stood_on:
            raise RunError(
                f"{folder} was trained on another SFT model than the one that is in {root / 'sft'} now. Delete "
                f"{folder} to train it again, and every stage that stands on it."
            )


def drop_checkpoint(run: RunDirectory) -> None:
    """The one of a finished run has had its day; several were asked for."""
    if len(complete_checkpoints(run.path / "checkpoints")) < 2:
        shutil.rmtree(run.path / "checkpoints", ignore_errors=True)
