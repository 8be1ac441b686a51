"""Settings of the stage of distillation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from tether.settings.config import FromOne
from tether.settings.sampling import PolicySection


class DistillSection(PolicySection):
    """On-policy distillation, as a stage of a recipe."""

    algorithm: Literal["distill"] = Field(default="distill", description="the preset")
    samples_per_prompt: FromOne = Field(default=1, description="answers to each of them")

    def faults(self) -> Iterator[str]:
        if not self.teacher:
            yield "distillation needs a teacher: set distill.teacher to a model, a run or { addresses = [...] }"
