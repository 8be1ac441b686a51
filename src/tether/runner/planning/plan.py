"""Needs of a recipe before its run: memory by role and phase, time, and settings that make the
recipe fit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tether.core.errors import ModelError
from tether.core.tables import table_beside
from tether.core.types import Json
from tether.models.pretrained import config_at_hand, resolve
from tether.runner.assembly.checks import check_inputs
from tether.runner.planning.devices import Device
from tether.runner.planning.memory import Planner, learning_rate
from tether.runner.planning.phases import StagePlan
from tether.runner.planning.speeds import RowSizes
from tether.settings.model import LoraConfig, ModelConfig
from tether.settings.recipe import BaseRecipe
from tether.settings.stages import STAGES

if TYPE_CHECKING:
    from transformers import PretrainedConfig

SHAPES: dict[str, Json] = table_beside(__file__, "shapes.toml")
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
    def seconds(self) -> float | None:
        """Of all stages whose time is known; None where none is."""
        times = [stage.seconds for stage in self.stages if stage.seconds is not None]
        return sum(times) if times else None

    @property
    def fits(self) -> bool:
        return self.peak <= self.device.memory


def shape_config(model: ModelConfig, shape: str | None = None) -> PretrainedConfig:
    """A transformers configuration: a name of `SHAPES`, a config.json or a folder with one, or the
    recipe's own model.

    Raises:
        ModelError: nothing of that kind.
    """
    from transformers import AutoConfig, LlamaConfig

    if shape in SHAPES:
        return LlamaConfig(**SHAPES[shape])
    if shape is not None:
        path = Path(shape).expanduser()
        if not path.exists():
            raise ModelError(
                f"no shape is called {shape!r}, and no such file exists. There are: "
                f"{', '.join(SHAPES)}",
            )
        return AutoConfig.from_pretrained(path)
    trust = {"trust_remote_code": model.trust_remote_code}
    return config_at_hand(model) or AutoConfig.from_pretrained(resolve(model)[0], **trust)


def plan(
    recipe: BaseRecipe,
    device: Device,
    *,
    shape: str | None = None,
    prompt_tokens: int = 128,
    sizes: Mapping[str, RowSizes] | None = None,
    stages: Sequence[str] | None = None,
    advise: bool | None = None,
    measured: bool = True,
) -> Plan:
    """Predict every stage of a recipe. If it does not fit, try changes that make it fit.

    Args:
        shape: see `shape_config`.
        prompt_tokens: length of the prompts of stages whose rows were not measured.
        sizes: the measurements of the rows, by stage (`planning.sizes.row_sizes`).
        stages: only these.
        advise: True: also try changes if it fits; False: try none.
        measured: see `Planner`.
    """
    check_inputs(recipe)
    config = shape_config(recipe.model, shape)
    usual = RowSizes(prompt=prompt_tokens)
    base = Planner(recipe, device, config, usual, sizes, measured=measured)
    made = Plan(device, base.model.parameters, base.stages(stages))
    if advise or (advise is None and not made.fits):
        for what, changed in _changes(recipe, device.gpu):
            stages_then = Planner(changed, device, config, usual, sizes).stages(stages)
            made.advice.append((what, max(stage.peak for stage in stages_then)))
        made.advice.sort(key=lambda row: row[1])
    return made


def _changes(recipe: BaseRecipe, gpu: bool) -> Iterator[tuple[str, BaseRecipe]]:
    """One change of a recipe at a time that trades something for memory."""
    learning = {
        n: recipe.section(n)
        for n in recipe.stages
        if n in STAGES and learning_rate(recipe.section(n))
    }

    def changed(name: str, values: Json) -> tuple[str, BaseRecipe]:
        text = " ".join(
            f"{name}.{k}={'{}' if isinstance(v, LoraConfig) else v}" for k, v in values.items()
        )
        section = vars(recipe)[name].model_copy(update=values)
        return text.lower(), recipe.model_copy(update={name: section})

    if not recipe.model.recompute:
        yield changed("model", {"recompute": True})
    is_whole = any(s.lora is False or s.model_dump().get("offload") for s in learning.values())
    if gpu and not recipe.model.quantize and not is_whole:
        yield changed("model", {"quantize": "nf4"})
    for name, section in learning.items():
        for values in _cheaper(section):
            yield changed(name, values)


def _cheaper(section: Any) -> Iterator[Json]:
    """Other settings of a stage that learns, each of which needs less memory."""
    own = section.own_models
    keys = type(section).model_fields
    # it would be refused with what comes next
    offloaded = {"offload": False} if own and section.offload else {}
    if "micro_batch_tokens" in keys:
        yield {"micro_batch_tokens": max(8, section.micro_batch_tokens // 4)}
    if "rows_per_micro_batch" in keys and section.rows_per_micro_batch > 1:
        yield {"rows_per_micro_batch": 1}
    if own and not offloaded:
        yield {"offload": True}
    if section.lora is False:
        yield {"lora": LoraConfig(), **({} if "roles" in keys else offloaded)}
    if "roles" in keys and own and section.lora is not False:
        yield {"roles": "shared", **offloaded}
    if "engine_rows" in keys:
        yield {"engine_rows": max(1, section.engine_rows // 4)}
