"""What a recipe will need before it is run: memory by role and phase, time, and what to switch on where it does not fit."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import ceil, comb
from pathlib import Path
from typing import Any

from tether.core.errors import ModelError
from tether.core.stages import STAGES
from tether.core.types import Prompt
from tether.data.sources import Quarantine, read
from tether.models.config import TINY, LoraConfig, ModelConfig
from tether.models.pretrained import resolve
from tether.run.devices import Device
from tether.run.online_sections import OnlineSection
from tether.run.phases import Learning, Planner, StagePlan, own_models
from tether.run.recipe import BaseRecipe
from tether.run.rounds import RoundsSection
from tether.run.rows import Section
from tether.run.supervised import SFTSection

SHAPES: dict[str, dict[str, Any]] = tomllib.loads((Path(__file__).parent / "shapes.toml").read_text(encoding="utf-8"))
"""Shapes of well-known models, in the terms of a Llama configuration."""


@dataclass
class Plan:
    device: Device
    parameters: int
    stages: list[StagePlan]
    advice: list[tuple[str, int]] = field(default_factory=list)

    @property
    def peak(self) -> int:
        return max((stage.peak for stage in self.stages), default=0)

    @property
    def fits(self) -> bool:
        return self.peak <= self.device.memory


def shape_config(model: ModelConfig, shape: str | None = None) -> Any:
    """A transformers configuration: a name of `SHAPES`, a config.json or a folder with one, or the recipe's own model.

    Raises:
        ModelError: nothing of that kind.
    """
    from transformers import AutoConfig, LlamaConfig

    if shape in SHAPES:
        return LlamaConfig(**SHAPES[shape])
    if shape is not None:
        path = Path(shape).expanduser()
        if not path.exists():
            raise ModelError(f"no shape is called {shape!r}, and no such file exists. There are: {', '.join(SHAPES)}")
        return AutoConfig.from_pretrained(path)
    if model.source == TINY:
        from tether.models.tiny import tiny_model

        return tiny_model(0).config
    return AutoConfig.from_pretrained(resolve(model)[0], trust_remote_code=model.trust_remote_code)


def plan(recipe: BaseRecipe, device: Device, *, shape: str | None = None, prompt_tokens: int = 128, advise: bool = False) -> Plan:
    """Predict every stage of a recipe; where it does not fit, try what would make it fit.

    Args:
        shape: see `shape_config`.
        prompt_tokens: length of the prompts; how long they really are is in the data.
        advise: try it where it fits, too.
    """
    config = shape_config(recipe.model, shape)
    base = Planner(recipe, device, config, prompt_tokens)
    made = Plan(device, base.parameters, base.stages())
    if advise or not made.fits:
        for what, changed in _changes(recipe, device.gpu):
            made.advice.append((what, max(s.peak for s in Planner(changed, device, config, prompt_tokens).stages())))
        made.advice.sort(key=lambda row: row[1])
    return made


def _changes(recipe: BaseRecipe, gpu: bool) -> Iterator[tuple[str, BaseRecipe]]:
    """One change of a recipe at a time that trades something for memory."""
    learning = {n: recipe.section(n) for n in recipe.stages if n in STAGES and isinstance(recipe.section(n), Learning)}
    changes: list[tuple[str, Any, Any]] = [] if recipe.model.recompute else [("model", recipe.model, {"recompute": True})]
    if gpu and not recipe.model.quantize and not any(s.lora is False or s.model_dump().get("offload") for s in learning.values()):
        changes.append(("model", recipe.model, {"quantize": "nf4"}))
    changes += [(name, section, values) for name, section in learning.items() for values in _cheaper(section)]
    for name, section, values in changes:
        text = " ".join(f"{name}.{k}={'{}' if isinstance(v, LoraConfig) else v}" for k, v in values.items())
        yield text.lower(), recipe.model_copy(update={name: section.model_copy(update=values)})


def _cheaper(section: Any) -> Iterator[dict[str, Any]]:
    """Other settings of a stage that learns, each of which needs less memory."""
    own, online = own_models(section), isinstance(section, OnlineSection)
    offloaded = {"offload": False} if own and section.offload else {}  # it would be refused with what comes next
    if not isinstance(section, SFTSection | RoundsSection):
        yield {"micro_batch_tokens": max(8, section.micro_batch_tokens // 4)}
    if isinstance(section, SFTSection) and section.rows_per_micro_batch > 1:
        yield {"rows_per_micro_batch": 1}
    if own and not offloaded:
        yield {"offload": True}
    if section.lora is False:
        yield {"lora": LoraConfig(), **({} if online else offloaded)}
    if online and own and section.lora is not False:
        yield {"roles": "shared", **offloaded}
    if isinstance(section, OnlineSection | RoundsSection):
        yield {"engine_rows": max(1, section.engine_rows // 4)}


def run_seconds(recipe: BaseRecipe, made: Plan) -> dict[str, float | None]:
    """Seconds by stage; None where the number of rows is not known, as of a data set of the hub."""
    totals: dict[str, float | None] = {}
    for stage in made.stages:
        counts = [(phase.seconds, _times(recipe, stage.name, phase.name)) for phase in stage.phases]
        known = [seconds * count for seconds, count in counts if count is not None]
        rounds = 1 if stage.name == "sft" else recipe.repeat or 1
        totals[stage.name] = rounds * sum(known) if len(known) == len(counts) else None
    return totals


def _times(recipe: BaseRecipe, name: str, phase: str) -> float | None:
    """How often a phase of a stage is gone through."""
    section = recipe.section(name)
    if isinstance(section, OnlineSection):
        return section.steps  # type: ignore[attr-defined]
    rows = _rows(recipe, section)
    if rows is None:
        return None
    settings: Mapping[str, Any] = section.model_dump()
    if phase == "rollout":
        policies = len(recipe.policies) + 1 if name == "evaluate" else 1
        answers = settings.get("samples_per_prompt") or settings["samples"] * policies * (1 + len(settings["temperatures"]))
        prompts = min(rows, settings.get("prompts") or settings.get("prompts_per_round") or rows)
        return settings.get("rounds", 1) * ceil(prompts * answers / settings["engine_rows"])
    inner = settings.get("direct") or settings
    size = inner.get("batch_size") or inner.get("solutions_per_update") or inner["prompts_per_update"]
    share = 1.0 - settings.get("heldout_fraction", 0.0)
    return settings.get("rounds", 1) * inner.get("epochs", 1) * ceil(rows * share / size)


def _rows(recipe: BaseRecipe, section: Section) -> int | None:
    """How many rows a stage learns from; None: nobody has counted them."""
    pairs, data = recipe.section("pairs"), section.data
    if data is None and pairs is not None:
        if section.kind is Prompt:
            data = pairs.data
        else:
            each = comb(pairs.samples_per_prompt, 2)
            return pairs.labels or (pairs.prompts and pairs.prompts * each)
    if data is None or section.kind is None or any(path.startswith("hub:") for path in data.paths):
        return None
    return sum(1 for _ in read(data.paths, section.kind, format=data.format, quarantine=Quarantine(keep=0), limit=data.limit))
