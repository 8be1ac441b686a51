"""A run that another version began: its stages continue with the defaults with which they began."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from tether.core.rundir import FORMER_DEFAULTS, RunDirectory, read_json
from tether.core.stopping import run_of
from tether.core.types import Json
from tether.runner.jobs import Job, expand
from tether.settings.config import Config
from tether.settings.former import FormerDefaults, former_defaults
from tether.settings.recipe import BaseRecipe
from tether.settings.section import overlaid
from tether.settings.stages import STAGES

_LOG = logging.getLogger(__name__)


def with_former_defaults(recipe: BaseRecipe) -> BaseRecipe:
    """The recipe with the defaults with which its stages began; of a sweep, as it is."""
    root = run_of(Path(recipe.run))
    if recipe.sweep is not None or root is None:
        return recipe
    note = read_json(root / "command.json").get("config") or {}
    former = dict(_former(recipe, note))
    return recipe.continued(former) if former else recipe


def jobs_with_former_defaults(jobs: Iterable[Job]) -> list[Job]:
    """The jobs with the defaults with which their stages began."""
    recipes: dict[int, BaseRecipe] = {}
    continued = []
    for job in jobs:
        if id(job.recipe) not in recipes:
            recipes[id(job.recipe)] = with_former_defaults(job.recipe)
        recipe = recipes[id(job.recipe)]
        continued.append(replace(job, recipe=recipe, settings=recipe.section(job.name)))
    return continued


def _former(recipe: BaseRecipe, note: Json) -> Iterator[tuple[str, FormerDefaults]]:
    """Former defaults by stage or arm, and by "model" those of the model.

    Args:
        note: the keys that the recipe named when the run began.
    """
    model_is_read = False
    for job in expand(recipe):
        named, config = _named(note, recipe, job.name), job.folder / "config.json"
        if named is None or not (RunDirectory(job.folder).begun and config.is_file()):
            continue
        began = read_json(config)
        sections: list[tuple[str, str, Config, Json]] = [
            (job.name, job.kind.name, job.settings, named),
        ]
        if job.start is None and not model_is_read:
            model_is_read = True
            sections.append(("model", "model", recipe.model, note.get("model") or {}))
        for name, table, settings, then in sections:
            own = overlaid(then, settings.model_dump(mode="json", exclude_unset=True))
            if former := former_defaults(settings, began.get(table) or {}, own, table):
                yield name, former


def _named(note: Json, recipe: BaseRecipe, name: str) -> Json | None:
    """The keys that a recipe named in a stage or for an arm; None where it had no such stage."""
    if name in STAGES:
        return note.get(name)
    stage, arm = recipe.arm_of(name)
    own = note.get("arms", {}).get(arm, {}).get(stage)
    return None if own is None else overlaid(note.get(stage) or {}, own)


def note_former(job: Job) -> None:
    """Name in the log and in the manifest the former defaults with which a stage continues."""
    run = RunDirectory(job.folder)
    former = {
        f"{name if name == 'model' else job.kind.name}.{key}": values
        for name in ("model", job.name)
        for key, values in job.recipe.former.get(name, {}).items()
    }
    if not former or run.complete or not run.begun:
        return
    words = (
        f"{key} = {json.dumps(before)} (now {json.dumps(now)})"
        for key, (before, now) in former.items()
    )
    _LOG.warning(
        "%s continues with the defaults with which it began: %s",
        job.title,
        "; ".join(words),
    )
    run.update_manifest(**{FORMER_DEFAULTS: {key: before for key, (before, _) in former.items()}})
