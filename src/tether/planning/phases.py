"""A stage's memory and seconds by phase, and the models and the judge that a section needs."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tether.settings.judges import JudgeConfig
from tether.settings.sampling import OnlineSection
from tether.settings.section import PromptedSection, Section
from tether.settings.supervised import DirectSection, KTOSection

if TYPE_CHECKING:
    from transformers import PreTrainedModel

UNITS = {"m": 1e6, "b": 1e9}
SIZE = re.compile(
    r"(?<![A-Za-z0-9.])(?:(\d+)x)?(\d+(?:\.\d+)?)([mb])(?![A-Za-z0-9])",
    re.IGNORECASE,
)
"""Parameters in the name of a model: 135M, 1.5b, and 8x7B, which is at most so many."""


@dataclass
class Phase:
    """Bytes by what holds them, and seconds an update or step."""

    name: str
    bytes: dict[str, int]
    seconds: float = 0.0

    @property
    def total(self) -> int:
        return sum(self.bytes.values())


@dataclass(kw_only=True)
class StagePlan:
    """Phases of one step, and seconds beside them: before the first step, with each step on
    average, after the last.

    whole: all of its memory is measured.
    """

    name: str
    phases: list[Phase]
    learning_rate: float | None = None
    before: float = 0.0
    each: float = 0.0
    after: float = 0.0
    whole: bool = True

    @property
    def peak(self) -> int:
        return max(phase.total for phase in self.phases)


def own_models(section: Section) -> bool:
    """True if the frozen roles of a stage have models of their own."""
    if isinstance(section, DirectSection | KTOSection):
        return section.lora is False and section.needs_reference and not section.precomputed
    return isinstance(section, OnlineSection) and section.roles == "separate"


def section_judge(section: Section) -> object:
    """The judge of a stage's answers, or of those held out."""
    if isinstance(section, PromptedSection):
        return dict(section).get("judge")
    evaluate = section.evaluate if isinstance(section, OnlineSection) else None
    return evaluate and evaluate.judge


def judge_bytes(section: Section, policy: PreTrainedModel) -> dict[str, int]:
    """The weights of a language model that judges a stage's answers in this process.

    The name says its parameters ("Qwen2.5-7B-Instruct"); without them it is as large as the policy.
    """
    judge = section_judge(section)
    if not isinstance(judge, JudgeConfig) or judge.model is None:
        return {}
    parameters = policy.num_parameters()
    if size := SIZE.search(judge.model.rstrip("/").rpartition("/")[2]):
        experts, number, unit = size.groups()
        parameters = int(int(experts or 1) * float(number) * UNITS[unit.lower()])
    return {"judge model": parameters * policy.dtype.itemsize}
