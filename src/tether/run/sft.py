"""Supervised fine-tuning in a recipe."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from pydantic import Field

from tether.core.rundir import RunDirectory
from tether.core.types import Demonstration
from tether.learner.ranks import here
from tether.models.config import LoraConfig
from tether.models.loading import add_adapter, save_model, weights_digest
from tether.models.quantized import dequantized
from tether.models.trunk import Role
from tether.run.roles import encoder_of, whole
from tether.run.rows import Lora, Section
from tether.run.stage import Context, settled
from tether.stages.sft import SFT, SFTConfig


class SFTSection(Section, SFTConfig):
    record: ClassVar[type] = Demonstration
    lora: Lora = Field(default=LoraConfig(), description="the adapter that learns; false trains the whole model")


def train(section: SFTSection, context: Context, rows: Sequence[Demonstration], run: RunDirectory) -> dict[str, Any]:
    """Fine-tune into the plain transformers folder `model`, adapters merged: the reference of all that follows."""
    loaded = context.load(run)
    encoder, lora = encoder_of(loaded), section.lora
    role = Role(add_adapter(loaded.model, "sft", lora, seed=context.seed), "sft") if lora else Role(loaded.model)
    summary = SFT(settled(section, SFTConfig), role, encoder).train(rows, run, context.progress)
    role = whole(dequantized(role), loaded, context.seed)
    if here().first:
        merged = role.model.merge_and_unload() if role.adapter is not None else role.model
        save_model(merged, loaded.tokenizer, encoder.template, run.path / "model")
        run.update_manifest(result={"digest": weights_digest(merged)})
    return summary
