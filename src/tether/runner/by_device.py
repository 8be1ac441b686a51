"""Sizes of passes that a recipe leaves open, by the device that will run it.

They change the amount that is computed at once, and results only by rounding. A GPU needs thousands
of tokens to be busy. On an H100 an update of 8,192 tokens at once was 2.3 times as fast a token as
one of 2,048. 256 rows drew 2.7 times as many tokens as 64. On a CPU the settings' own defaults
hold. The run's config has the chosen sizes; a resumed run keeps them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tether.core.errors import one_line
from tether.core.rundir import read_json
from tether.core.types import Facts, Json
from tether.models.loading import pick_device
from tether.runner.folder import round_folder
from tether.runner.planning.devices import Device, gpu
from tether.runner.planning.memory import Planner
from tether.runner.planning.plan import shape_config
from tether.runner.planning.sizes import row_sizes
from tether.runner.planning.speeds import RowSizes
from tether.settings.recipe import BaseRecipe

SIZES = {
    "engine_rows": (256, 128),
    "micro_batch_tokens": (8192, 4096),
    "rows_per_micro_batch": (16, 8),
}
"""Sizes that are tried on a GPU, the largest first, before the default."""
PACKED = 512
"""Tokens of a packed row for which rows_per_micro_batch is meant; longer rows are fewer."""
PLAN_SHARE = 0.85
"""Share of a card's free memory that a plan may take: tensors leave gaps between them."""
UNPLANNED = (
    "engine_rows and sizes of micro-batches stay at their defaults: no plan can be made (%s)"
)
_LOG = logging.getLogger(__name__)


def by_device(recipe: BaseRecipe, names: Sequence[str]) -> BaseRecipe:
    """The recipe with the sizes that it leaves open. On a GPU they are as large as the planner
    finds room for. A resumed run keeps its first ones.
    """
    cuda = torch.cuda
    if not cuda.is_available():
        return recipe
    place = pick_device(recipe.model.device)
    if place.type != "cuda":
        return recipe
    recorded = {name: _recorded(recipe, name) for name in names}
    recipe = _given(recipe, {name: values for name, values in recorded.items() if values})
    left = [name for name in names if not recorded[name] and any(_open(recipe, name))]
    if not left:
        return recipe
    free, total = cuda.mem_get_info(place)
    idle = cuda.memory_reserved(place) - cuda.memory_allocated(place)
    # its rates, which would have to be measured, decide nothing
    card = replace(gpu(min(total, free + idle) / 1e9), name=cuda.get_device_name(place))
    try:
        return sized(recipe, left, card, row_sizes(recipe, left))
    except Exception as error:  # noqa: BLE001  (of whatever kind: the run itself may be able to do it)
        _LOG.warning(UNPLANNED, one_line(error))
        return recipe


def sized(
    recipe: BaseRecipe,
    names: Sequence[str],
    card: Device,
    rows: Mapping[str, RowSizes],
    *,
    shape: str | None = None,
    prompt_tokens: int = 128,
) -> BaseRecipe:
    """The recipe with the largest of `SIZES` with which a card holds each of these stages.

    Args:
        rows, shape, prompt_tokens: as in `plan`, which calls the first `sizes`.
    """
    config = shape_config(recipe.model, shape)
    usual = RowSizes(prompt=prompt_tokens)
    for name in names:
        keys = list(_open(recipe, name))
        for turn in range(2 if keys else 0):
            tried = _given(recipe, {name: _larger(recipe.section(name), keys, turn)})
            (stage,) = Planner(tried, card, config, usual, rows).stages([name]) or (None,)
            if stage is None or stage.peak <= PLAN_SHARE * card.memory:
                recipe = tried
                break
        for key in keys:
            _LOG.info("%s.%s is %s on %s", name, key, dict(recipe.section(name))[key], card.name)
    return recipe


def _open(recipe: BaseRecipe, name: str) -> Iterator[str]:
    """The sizes of a stage that the recipe leaves open. An arm has those of the stage that it
    varies. Servers have machines of their own. Ranks share the micro-batches of an update, which
    should therefore be many.
    """
    if name in _arms(recipe):
        return
    section = recipe.section(name)
    engine = dict(section).get("engine")
    served = engine is not None and engine.kind != "local"
    for key in SIZES:
        named = key in section.model_fields_set or key not in type(section).model_fields
        elsewhere = served if key == "engine_rows" else recipe.learner.ranks > 1
        if not (named or elsewhere):
            yield key


def _arms(recipe: BaseRecipe) -> set[str]:
    return {f"{stage}-{arm}" for arm, sections in recipe.arms.items() for stage in sections}


def _larger(section: Any, keys: Sequence[str], turn: int) -> dict[str, int]:
    fields = type(section).model_fields
    sizes = {}
    for key in keys:
        size = SIZES[key][turn]
        if key == "rows_per_micro_batch":
            size = size * PACKED // section.row_tokens
        sizes[key] = max(size, fields[key].default)
    return sizes


def _recorded(recipe: BaseRecipe, name: str) -> Json:
    """The sizes with which a run began this stage; empty where there is none."""
    root = Path(recipe.run)
    number = 1 if recipe.repeat and name != "sft" else None
    homes = (root, *sorted(root.glob("sweep/*")))  # all combinations have the same sizes
    configs = (round_folder(home, number) / name / "config.json" for home in homes)
    config = next(filter(Path.is_file, configs), None)
    if name in _arms(recipe) or config is None:
        return {}
    began = read_json(config).get(recipe.kind(name).name, {})
    return {key: began[key] for key in _open(recipe, name) if key in began}


def _given(recipe: BaseRecipe, sizes: Mapping[str, Facts]) -> BaseRecipe:
    sections = {
        name: recipe.section(name).model_copy(update=dict(values)) for name, values in sizes.items()
    }
    return recipe.model_copy(update=sections)
