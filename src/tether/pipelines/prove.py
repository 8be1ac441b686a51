"""The same bits twice: a stage in one go, and the same stage interrupted, end with the same weights and records."""

from __future__ import annotations

import contextlib
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tether.assemble import STAGES, Recipe
from tether.core.config import build
from tether.core.errors import ConfigError
from tether.core.rundir import RECORDS, read_json, read_jsonl
from tether.core.types import Demonstration, assistant, user
from tether.learner.determinism import deterministic
from tether.models.config import ModelConfig
from tether.models.memory import release
from tether.pipelines.foundation import DATA, Foundation
from tether.pipelines.journey import run_stage, stage_model
from tether.pipelines.online import run_online
from tether.pipelines.quickstart import QuickstartConfig

CUTS = (2, 1, 3)
"""Steps of each start of the interrupted run."""
CLOCKS = ("time", "memory/", "seconds", "peak_rss", "tokens_per_second")
"""Beginnings of the names of what no two runs have in common."""


@dataclass(frozen=True)
class Compared:
    """What was compared of a stage: how many values there were, and where the first difference is (empty: nowhere)."""

    stage: str
    what: str
    count: int
    difference: str = ""


class CutError(Exception):
    """The interruption."""


def prove(
    recipe: Recipe | QuickstartConfig, folder: Path, stages: Sequence[str] = (), cuts: Sequence[int] = CUTS
) -> list[Compared]:
    """Run each stage twice in `folder`, once through and once cut, and compare bit for bit.

    Args:
        stages: default: all that the recipe has. What they stand on is taken from the recipe's run directory where it is
            finished there, and made in `folder` where it is not.
        cuts: steps after which the second run is cut, and goes on; the first one stops after their sum.

    Raises:
        ConfigError: the recipe has no such stage, or it is one that is made of others (rounds).
        TrainingError: a kernel has no deterministic variant on this device.
    """
    known = [name for name in STAGES if getattr(recipe, name, None) is not None and name != "rounds"]
    if unknown := [name for name in stages if name not in known]:
        raise ConfigError(f"the recipe has no stage {unknown[0]!r} that can be proved; it has: {', '.join(known)}")
    ground = Ground(recipe, folder / "ground")
    rows = []
    for name in stages or known:
        with deterministic():
            whole, cut = folder / f"{name}-whole", folder / f"{name}-cut"
            _start(ground.runner(name), whole, sum(cuts))
            for done in range(1, len(cuts) + 1):
                _start(ground.runner(name), cut, sum(cuts[:done]))
            rows += compare(name, whole, cut)
    return rows


class Ground:
    """What a stage of a recipe stands on: its model, its rows, its reward."""

    def __init__(self, recipe: Recipe | QuickstartConfig, folder: Path) -> None:
        self.recipe, self.folder, self.before = recipe, folder, Path(recipe.run)
        self.foundation: Foundation | None = None
        folder.mkdir(parents=True, exist_ok=True)
        if isinstance(recipe, QuickstartConfig):
            silent: Callable[[str], Any] = lambda phase: lambda done, total, metrics: None  # noqa: E731
            self.before = folder  # its stages stand on each other, so all of them are made here
            self.foundation = Foundation(recipe, folder, recipe.ppo.sampling, recipe.ppo.engine_rows, silent)

    def runner(self, name: str) -> Callable[..., Any]:
        """(folder, progress=) -> the stage's run."""
        section = getattr(self.recipe, name)
        section = section.model_copy(update={"checkpoint_every": 1})
        source = getattr(section, "reward_source", None)
        reward = {"learned": "reward", "process": "process"}.get(source or "")
        reward_folder = self._made(reward) / "model" if reward else None
        rows, common = self._rows(name), {"seed": self.recipe.seed, "reward_folder": reward_folder}
        if self.foundation is None or name != "ppo":
            return partial(run_stage, name, section, self._model(name), rows=rows, **common)
        asked = section.evaluate
        gold = (self.foundation.heldout[: asked.prompts], self.foundation.gold) if asked else None
        return partial(run_online, section, self._model(name), name=name, prompts=rows, gold=gold, **common)

    def _model(self, name: str) -> ModelConfig:
        if name == "sft" or self.recipe.sft is None:
            return self.recipe.model
        root = self._made("sft").parent
        return stage_model(self.recipe, root)  # type: ignore[arg-type]  (it asks for `sft` and `model` alone)

    def _made(self, name: str) -> Path:
        """The folder of a finished stage: that of the recipe's own run, or one made now."""
        for place in (self.before, self.folder):
            if (place / name / "summary.json").is_file():
                return place / name
        run_stage(
            name,
            getattr(self.recipe, name),
            self._model(name),
            self.folder / name,
            self.recipe.seed,
            reward_folder=None,
            rows=self._rows(name),
        )
        release()
        return self.folder / name

    def _rows(self, name: str) -> Sequence[Any] | None:
        if self.foundation is None:
            return None
        if name == "sft":
            rows = list(read_jsonl(DATA / "demonstrations.jsonl"))[: self.foundation.config.max_prompts]
            return [Demonstration((user(row["prompt"]), assistant(row["response"])), row["id"]) for row in rows]
        if name == "reward":
            self._made("sft")
            self.foundation.collect_pairs()
            return self.foundation.comparisons()
        return self.foundation.train_prompts


def _start(run: Callable[..., Any], folder: Path, last: int) -> None:
    """Start, or go on, and stop after step `last`; a stage that has fewer steps ends."""

    def progress(done: int, total: int, metrics: Any) -> None:
        if done >= last and done < total:
            raise CutError

    with contextlib.suppress(CutError):
        run(folder=folder, progress=progress)
    release()


def compare(stage: str, one: Path, other: Path) -> list[Compared]:
    """Weights, optimizer state, metrics and samples of two runs of a stage."""
    return [_tensors(stage, one, other), *_records(stage, one, other)]


def _tensors(stage: str, one: Path, other: Path) -> Compared:
    files = [sorted(p.relative_to(folder) for p in folder.rglob("*.safetensors")) for folder in (one, other)]
    if files[0] != files[1] or not files[0]:
        return Compared(stage, "weights and optimizer", 0, f"not the same files: {[str(f) for f in files[0] + files[1]][:4]}")
    count = 0
    for file in files[0]:
        left, right = load_file(one / file), load_file(other / file)
        if left.keys() != right.keys():
            return Compared(stage, "weights and optimizer", count, f"{file}: not the same tensors")
        for name, tensor in left.items():
            count += tensor.numel()
            if not torch.equal(
                tensor.contiguous().view(-1).view(torch.uint8), right[name].contiguous().view(-1).view(torch.uint8)
            ):
                return Compared(stage, "weights and optimizer", count, f"{file}: {name}")
    return Compared(stage, "weights and optimizer", count)


def _records(stage: str, one: Path, other: Path) -> Iterator[Compared]:
    for name in RECORDS:
        left, right = ([_lasting(row) for row in read_jsonl(folder / name)] for folder in (one, other))
        if left or right:
            yield Compared(stage, name, sum(map(len, left)), _first_difference(left, right))
    if (one / "summary.json").is_file() and (other / "summary.json").is_file():
        left, right = ([_lasting(read_json(folder / "summary.json"))] for folder in (one, other))
        yield Compared(stage, "summary.json", len(left[0]), _first_difference(left, right))


def _lasting(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _lasting(item) for key, item in value.items() if not key.startswith(CLOCKS)}
    return [_lasting(item) for item in value] if isinstance(value, list) else value


def _first_difference(left: list[Any], right: list[Any]) -> str:
    if len(left) != len(right):
        return f"{len(left)} rows and {len(right)}"
    for number, (a, b) in enumerate(zip(left, right, strict=True), 1):
        for key in sorted({*a, *b}):
            if repr(a.get(key)) != repr(b.get(key)):
                return f"row {number}, {key}: {str(a.get(key))[:40]} and {str(b.get(key))[:40]}"
    return ""


def read_recipe(path: Path, overrides: Sequence[str] = ()) -> Recipe | QuickstartConfig:
    """A recipe of stages, or one of the quickstart's (which has [pairs])."""
    values = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    return build(QuickstartConfig if "pairs" in values else Recipe, values, overrides, where=str(path))
