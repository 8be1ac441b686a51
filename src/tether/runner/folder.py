"""The folder of a whole run: the stages started in it, and the inputs of its stages."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tether.core.errors import MissingFileError, RunError
from tether.core.locks import hold
from tether.core.rundir import (
    ROUNDS,
    SWEEP,
    RunDirectory,
    made_folder,
    missing_run,
    read_json,
    write_json,
)
from tether.core.stopping import run_of
from tether.core.types import Json
from tether.runner.assembly.job import AnyJob
from tether.settings.config import Config

WRITTEN = ("command.json", "summary.json", "report.html", "trace.json", "stages.html", SWEEP)
"""Files that a command writes into the folder of a run itself."""


def remember(root: Path, recipe: Config, stages: Sequence[str]) -> None:
    """Note in `root` what was started there, for `tether resume`.

    From here on no other process works in `root`, until `release`. The jobs of the start have been
    checked: they do not contradict a run in the folder.
    """
    settings = recipe.model_dump(mode="json", exclude_unset=True)
    before = _before(made_folder(root)) or {"stages": (), "config": settings}
    hold(root)
    # rounds and combinations of a sweep have folders of their own
    homes = (root, *root.glob("sweep/*"))
    places = [place for home in homes for place in (home, *home.glob(ROUNDS))]
    begun = [
        name
        for name in before["stages"]
        if any((place / name / "config.json").is_file() for place in places)
    ]
    stages = [*dict.fromkeys((*begun, *stages))]
    write_json(
        root / "command.json",
        {"command": "stages", "stages": stages, "config": settings},
    )


def _before(root: Path) -> Json | None:
    """The command that was started in `root` before, if there was one.

    Raises:
        RunError: files with the names of those that a run writes are there already.
    """
    path = root / "command.json"
    if path.is_file() and "stages" in (command := read_json(path)):
        return command
    if theirs := [name for name in WRITTEN if (root / name).exists()]:
        raise RunError(
            f"{root} has {', '.join(theirs)}, which no run has written there, and a run writes "
            "files of that name. Move them away, or choose another folder with run=PATH.",
        )
    return None


def remembered(place: Path) -> tuple[Path, Json]:
    """The run directory that `place` is or is within, and the command that was started there.

    Raises:
        RunError: nothing was, by tether's command line.
    """
    if not place.exists():
        raise missing_run(place)
    if (root := run_of(place)) is not None:
        return root, read_json(root / "command.json")
    raise RunError(
        f"{place} is not in a run directory that a command of tether made. Give such a folder; a "
        "run that your own code opened goes on when that code runs again.",
    )


def round_folder(root: Path, number: int | None) -> Path:
    """Folder of a round's stages; without rounds, the run's own folder."""
    return root if number is None else root / f"round-{number:02d}"


def check_base(job: AnyJob) -> None:
    """A job starts from a stage that is finished; one that has begun, or sampled answers, from the
    same result of it.

    Raises:
        MissingFileError: the stage is not finished, or its model is gone.
        RunError: the job was trained on a result that is gone.
    """
    if job.start is None:
        return
    check_start(job.start)
    start, own = (place / "manifest.json" for place in (job.start, job.folder))
    run = RunDirectory(job.folder)
    if (run.begun or run.answered) and start.is_file() and own.is_file():
        made = read_json(start).get("result", {}).get("digest")
        stood_on = read_json(own).get("model", {}).get("digest")
        if made and stood_on and made != stood_on:
            raise RunError(
                f"{job.folder} was trained on another SFT model than the one that is in "
                f"{job.start} now. Delete "
                f"{job.folder} to train it again, and every stage that stands on it.",
            )


def check_start(stage: Path) -> None:
    """Look for the model that a stage has left for those after it.

    Raises:
        MissingFileError: the stage is not finished, or its model is gone.
    """
    if not (stage / "summary.json").is_file():
        raise MissingFileError(
            f"{stage} has no finished SFT stage; run it first (`tether sft RECIPE`).",
        )
    if not (stage / "model" / "config.json").is_file():
        raise MissingFileError(
            f"{stage / 'model'}, from which everything in {stage.parent} starts, is gone or "
            "incomplete. Put it back, or begin in another run folder",
        )
