"""Needs of a recipe before its run: memory by role and phase, time, and settings that make the
recipe fit.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from tether.build.checks import check_inputs
from tether.core.errors import ModelError
from tether.core.types import Json
from tether.models.pretrained import resolve
from tether.planning.devices import Device
from tether.planning.memory import Learning, Planner
from tether.planning.phases import StagePlan, own_models
from tether.planning.speeds import RowSizes
from tether.settings.model import TINY, LoraConfig, ModelConfig
from tether.settings.recipe import BaseRecipe
from tether.settings.rounds import RoundsSection
from tether.settings.sampling import OnlineSection
from tether.settings.stages import STAGES
from tether.settings.supervised import SFTSection

if TYPE_CHECKING:
    from transformers import PretrainedConfig

SHAPES: dict[str, Json] = tomllib.loads(
    (Path(__file__).parent / "shapes.toml").read_text(encoding="utf-8"),
)
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
    if model.source == TINY:
        from tether.models.tiny import tiny_model

        return tiny_model(0).config
    return AutoConfig.from_pretrained(resolve(model)[0], trust_remote_code=model.trust_remote_code)


def plan(
    recipe: BaseRecipe,
    device: Device,
    *,
    shape: str | None = None,
    prompt_tokens: int = 128,
    sizes: Mapping[str, RowSizes] | None = None,
    stages: Sequence[str] | None = None,
    advise: bool | None = None,
    until: float = math.inf,
) -> Plan:
    """Predict every stage of a recipe. If it does not fit, try changes that make it fit.

    Args:
        shape: see `shape_config`.
        prompt_tokens: length of the prompts of stages whose rows were not measured.
        sizes: the measurements of the rows, by stage (`planning.sizes.row_sizes`).
        stages: only these.
        advise: True: also try changes if it fits; False: try none.
        until: see `Planner`.
    """
    check_inputs(recipe)
    config = shape_config(recipe.model, shape)
    usual = RowSizes(prompt=prompt_tokens)
    base = Planner(recipe, device, config, usual, sizes, until=until)
    made = Plan(device, base.model.parameters, base.stages(stages))
    if advise or (advise is None and not made.fits):
        for what, changed in _changes(recipe, device.gpu):
            made.advice.append(
                (
                    what,
                    max(
                        s.peak
                        for s in Planner(changed, device, config, usual, sizes).stages(stages)
                    ),
                ),
            )
        made.advice.sort(key=lambda row: row[1])
    return made


def _changes(recipe: BaseRecipe, gpu: bool) -> Iterator[tuple[str, BaseRecipe]]:
    """One change of a recipe at a time that trades something for memory."""
    learning = {
        n: recipe.section(n)
        for n in recipe.stages
        if n in STAGES and isinstance(recipe.section(n), Learning)
    }
    changes: list[tuple[str, BaseModel, Json]] = (
        [] if recipe.model.recompute else [("model", recipe.model, {"recompute": True})]
    )
    if (
        gpu
        and not recipe.model.quantize
        and not any(s.lora is False or s.model_dump().get("offload") for s in learning.values())
    ):
        changes.append(("model", recipe.model, {"quantize": "nf4"}))
    changes += [
        (name, section, values)
        for name, section in learning.items()
        for values in _cheaper(section)
    ]
    for name, section, values in changes:
        text = " ".join(
            f"{name}.{k}={'{}' if isinstance(v, LoraConfig) else v}" for k, v in values.items()
        )
        yield text.lower(), recipe.model_copy(update={name: section.model_copy(update=values)})


def _cheaper(section: Any) -> Iterator[Json]:
    """Other settings of a stage that learns, each of which needs less memory."""
    own = own_models(section)
    online = isinstance(section, OnlineSection)
    # it would be refused with what comes next
    offloaded = {"offload": False} if own and section.offload else {}
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
