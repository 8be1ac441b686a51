"""The folder of a whole run: the stages started in it, and the inputs of its stages."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tether.core.budget import BUDGET
from tether.core.errors import MissingFileError, RunError
from tether.core.locks import hold
from tether.core.rundir import ROUNDS, RunDirectory, made_folder, read_json, write_json
from tether.core.stopping import run_of
from tether.core.types import Json
from tether.settings.config import Config


def remember(root: Path, recipe: Config, stages: Sequence[str]) -> None:
    """Note in `root` what was started there, for `tether resume`.

    From here on no other process works in `root`, until `release`. A start that contradicts a run
    in the folder is not noted: the run reports the difference, and the note stays right.
    """
    hold(made_folder(root))
    path = root / "command.json"
    settings = recipe.model_dump(mode="json", exclude_unset=True)
    before = read_json(path) if path.is_file() else {"stages": (), "config": settings}
    # rounds and combinations of a sweep have folders of their own
    homes = (root, *root.glob("sweep/*"))
    places = [place for home in homes for place in (home, *home.glob(ROUNDS))]
    begun = [
        name
        for name in before["stages"]
        if any((place / name / "config.json").is_file() for place in places)
    ]
    fixed = ("model", "seed", *begun) if begun else ()
    if all(_lasting(before["config"].get(name)) == _lasting(settings.get(name)) for name in fixed):
        write_json(
            path,
            {
                "command": "stages",
                "stages": [*dict.fromkeys((*begun, *stages))],
                "config": settings,
            },
        )


def _lasting(settings: object) -> Any:
    """The settings of a section that stay from start to start."""
    return (
        {key: value for key, value in settings.items() if key != BUDGET}
        if isinstance(settings, dict)
        else settings
    )


def remembered(place: Path) -> tuple[Path, Json]:
    """The run directory that `place` is or is within, and the command that was started there.

    Raises:
        RunError: nothing was, by tether's command line.
    """
    if not place.exists():
        raise MissingFileError(f"{place} does not exist. Give the folder of a run.")
    if (root := run_of(place)) is not None:
        return root, read_json(root / "command.json")
    raise RunError(
        f"{place} is not in a run directory that a command of tether made. Give such a folder; a "
        "run that your own code opened goes on when that code runs again.",
    )


def round_folder(root: Path, number: int | None) -> Path:
    """Folder of a round's stages; without rounds, the run's own folder."""
    return root if number is None else root / f"round-{number:02d}"


def check_base(root: Path, folder: Path) -> None:
    """A stage that has begun, or sampled answers, belongs to the present SFT model.

    Raises:
        RunError: it was trained on one that is gone.
    """
    start, own = (place / "manifest.json" for place in (root / "sft", folder))
    run = RunDirectory(folder)
    if (run.begun or run.answered) and start.is_file() and own.is_file():
        made = read_json(start).get("result", {}).get("digest")
        stood_on = read_json(own).get("model", {}).get("digest")
        if made and stood_on and made != stood_on:
            raise RunError(
                f"{folder} was trained on another SFT model than the one that is in "
                f"{root / 'sft'} now. Delete "
                f"{folder} to train it again, and every stage that stands on it.",
            )
