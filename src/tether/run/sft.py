"""Supervised fine-tuning in a recipe."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from pydantic import Field

from tether.core.rundir import RunDirectory
from tether.core.types import Demonstration
from tether.learner.ranks import here
from tether.models.config import LoraConfig
from tether.models.loading import save_model, weights_digest
from tether.models.quantized import dequantized
from tether.run.roles import encoder_of, new_role, whole
from tether.run.rows import Lora, Section
from tether.run.stage import Context
from tether.stages.sft import SFT, SFTConfig


class SFTSection(Section, SFTConfig):
    record: ClassVar[type] = Demonstration
    lora: Lora = Field(default=LoraConfig(), description="the adapter that learns; false trains the whole model")


def train(section: SFTSection, context: Context, rows: Sequence[Demonstration], run: RunDirectory) -> dict[str, Any]:
    """Fine-tune into the plain transformers folder `model`, adapters merged: the reference of all that follows."""
    loaded = context.load(run)
    encoder, role = encoder_of(loaded), new_role(loaded, "sft", section.lora, seed=context.seed)
    summary = SFT(section, role, encoder).train(rows, run, context.progress)
    role = whole(dequantized(role), loaded, context.seed)
    if here().first:
        merged = role.model.merge_and_unload() if role.adapter is not None else role.model
        save_model(merged, loaded.tokenizer, encoder.template, run.path / "model")
        run.update_manifest(result={"digest": weights_digest(merged)})
    return summary
