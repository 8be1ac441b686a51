"""How long a run takes: the planner's seconds an update, times the updates that the recipe and its data make."""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil, comb
from typing import Any

from tether.core.types import Prompt
from tether.data.sources import Quarantine, read
from tether.run.online_sections import OnlineSection
from tether.run.plan import Plan
from tether.run.recipe import BaseRecipe
from tether.run.rows import Section


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
