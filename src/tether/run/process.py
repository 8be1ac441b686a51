"""A process (or outcome) reward model in a recipe."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from pydantic import Field

from tether.core.rundir import RunDirectory, write_json
from tether.core.types import StepLabels
from tether.models.config import LoraConfig
from tether.run.roles import encoder_of, reward_role, save_trained
from tether.run.rows import Lora, Section
from tether.run.stage import Context
from tether.stages.process_reward import ProcessRewardConfig, ProcessRewardModeling


class ProcessSection(Section, ProcessRewardConfig):
    record: ClassVar[type] = StepLabels
    lora: Lora = Field(default=LoraConfig(), description="the adapter that learns; false trains the whole model")


def train(section: ProcessSection, context: Context, rows: Sequence[StepLabels], run: RunDirectory) -> dict[str, Any]:
    """Train on top of the model; the result is the role in `model`, with the delimiters of its steps."""
    loaded = context.load(run)
    role = reward_role(loaded, section, context.seed)
    summary = ProcessRewardModeling(section, role, encoder_of(loaded)).train(rows, run, context.progress)
    save_trained(role, loaded, run.path / "model", kind="process")
    write_json(run.path / "model" / "steps.json", {"delimiters": section.delimiters})
    return summary
