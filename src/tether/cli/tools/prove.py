"""The same bits twice: a stage in one go, and the same stage interrupted, end with the same weights
and records.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import load_file

from tether.core.errors import ConfigError
from tether.core.rundir import RECORDS, made_folder, read_json, read_jsonl
from tether.core.types import Facts, Json
from tether.models.cpu.memory import free_memory
from tether.models.loading import pick_device
from tether.runner.assembly.data.sources import check_sources
from tether.runner.assembly.job import AnyJob
from tether.runner.by_device import by_device
from tether.runner.earlier import with_earlier_results
from tether.runner.jobs import before, expand
from tether.runner.methods.stage import run_stage
from tether.runner.run import run_job
from tether.settings.recipe import BaseRecipe
from tether.settings.stages import STAGES
from tether.stages.learner.determinism import deterministic

CUTS = (2, 1, 3)
"""Steps of each start of the interrupted run."""
TENSORS = "weights and optimizer"
"""Name of the comparison of a stage's files of tensors."""
CLOCKS = ("time", "memory/", "seconds", "peak_rss", "tokens_per_second")
"""Beginnings of the names of what no two runs have in common."""


@dataclass(frozen=True)
class Compared:
    """Result of comparing a stage: number of values, and place of the first difference (empty:
    none).
    """

    stage: str
    what: str
    count: int
    difference: str = ""


class CutError(Exception):
    """The interruption."""


def prove(
    recipe: BaseRecipe,
    folder: Path,
    stages: Sequence[str] = (),
    cuts: Sequence[int] = CUTS,
) -> list[Compared]:
    """Run each stage twice in `folder`, once through and once cut, and compare bit for bit.

    On a CPU the kernels are those of a run; an accelerator is restricted to deterministic ones.

    Args:
        stages: default: all that the recipe has. Earlier stages come from the recipe's run
            directory if they are finished there, else they are made in `folder`.
        cuts: steps after which the second run is cut, and goes on; the first one stops after their
            sum.

    Raises:
        ConfigError: the recipe has no such stage, or it is one that is made of others (rounds), or
            that trains nothing.
        TrainingError: a kernel has no deterministic variant on this device.
    """
    known = [
        name for name in recipe.stages if recipe.kind(name).trains and not recipe.kind(name).alone
    ]
    if not known:
        can = ", ".join(name for name, kind in STAGES.items() if kind.trains and not kind.alone)
        raise ConfigError(f"the recipe has no stage that can be proved; these can: {can}")
    if unknown := [name for name in stages if name not in known]:
        raise ConfigError(
            f"the recipe has no stage {unknown[0]!r} that can be proved; it has: {', '.join(known)}",
        )
    check_sources(recipe)
    ground = by_device(_ground(recipe, folder / "ground"), stages or known)
    rows = []
    for name in stages or known:
        with (
            deterministic()
            if recipe.deterministic or pick_device(recipe.model.device).type != "cpu"
            else contextlib.nullcontext()
        ):
            (job,) = expand(ground, [name])
            for needed in before(job, expand(ground)):
                run_job(needed, None)
            job = with_earlier_results(job)
            each = job.settings.model_copy(update={"checkpoint_every": 1})
            whole = folder / f"{name}-whole"
            cut = folder / f"{name}-cut"
            if whole.exists() or cut.exists():
                raise ConfigError(f"{folder} holds a proof of {name}: choose another folder")
            _start(replace(job, settings=each, folder=whole), sum(cuts))
            for done in range(1, len(cuts) + 1):
                _start(replace(job, settings=each, folder=cut), sum(cuts[:done]))
            rows += compare(name, whole, cut)
    return rows


def _ground(recipe: BaseRecipe, folder: Path) -> BaseRecipe:
    """The same recipe with its run in a folder where what is finished is linked, and the rest can
    be made.
    """
    made_folder(folder)
    for name in recipe.stages:
        if (Path(recipe.run) / name / "summary.json").is_file() and not (folder / name).exists():
            (folder / name).symlink_to(
                (Path(recipe.run) / name).resolve(),
                target_is_directory=True,
            )
    return recipe.model_copy(
        update={"run": str(folder), "repeat": None, "sweep": None, "on": "local"},
    )


def _start(job: AnyJob, last: int) -> None:
    """Start, or go on, and stop after step `last`; a stage that has fewer steps ends."""

    def progress(done: int, total: int, metrics: object) -> None:
        if done >= last and done < total:
            raise CutError

    with contextlib.suppress(CutError):
        run_stage(replace(job, progress=progress))
    free_memory()


def compare(stage: str, one: Path, other: Path) -> list[Compared]:
    """Weights, optimizer state, metrics and samples of two runs of a stage."""
    return [_tensors(stage, one, other), *_records(stage, one, other)]


def _tensors(stage: str, one: Path, other: Path) -> Compared:
    files = [
        sorted(p.relative_to(folder) for p in folder.rglob("*.safetensors"))
        for folder in (one, other)
    ]
    if files[0] != files[1] or not files[0]:
        return Compared(
            stage,
            TENSORS,
            0,
            f"not the same files: {[str(f) for f in files[0] + files[1]][:4]}",
        )
    count = 0
    for file in files[0]:
        left = load_file(one / file)
        right = load_file(other / file)
        if left.keys() != right.keys():
            return Compared(stage, TENSORS, count, f"{file}: not the same tensors")
        for name, tensor in left.items():
            count += tensor.numel()
            if not torch.equal(
                *(each.contiguous().view(-1).view(torch.uint8) for each in (tensor, right[name])),
            ):
                return Compared(stage, TENSORS, count, f"{file}: {name}")
    return Compared(stage, TENSORS, count)


def _records(stage: str, one: Path, other: Path) -> Iterator[Compared]:
    for name in RECORDS:
        left, right = (
            [_lasting_row(row) for row in read_jsonl(folder / name)] for folder in (one, other)
        )
        if left or right:
            yield Compared(stage, name, sum(map(len, left)), _first_difference(left, right))
    if (one / "summary.json").is_file() and (other / "summary.json").is_file():
        left, right = (
            [_lasting_row(read_json(folder / "summary.json"))] for folder in (one, other)
        )
        yield Compared(stage, "summary.json", len(left[0]), _first_difference(left, right))


def _lasting_row(row: Facts) -> Json:
    return {key: _lasting(value) for key, value in row.items() if not key.startswith(CLOCKS)}


def _lasting(value: object) -> object:
    if isinstance(value, dict):
        return _lasting_row(value)
    return [_lasting(item) for item in value] if isinstance(value, list) else value


def _first_difference(left: list[Json], right: list[Json]) -> str:
    if len(left) != len(right):
        return f"{len(left)} rows and {len(right)}"
    for number, (a, b) in enumerate(zip(left, right, strict=True), 1):
        for key in sorted({*a, *b}):
            if repr(a.get(key)) != repr(b.get(key)):
                return f"row {number}, {key}: {str(a.get(key))[:40]} and {str(b.get(key))[:40]}"
    return ""
