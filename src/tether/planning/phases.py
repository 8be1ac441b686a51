"""A stage's memory and seconds by phase, and the models and the judge that a section needs."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from tether.settings.judges import JudgeConfig
from tether.settings.sampling import OnlineSection
from tether.settings.section import PromptedSection, Section
from tether.settings.supervised import DirectSection, KTOSection

UNITS = {"m": 1e6, "b": 1e9}
SIZE = re.compile(
    r"(?<![A-Za-z0-9.])(?:(\d+)x)?(\d+(?:\.\d+)?)([mb])(?![A-Za-z0-9])", re.IGNORECASE
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


def own_models(section: Any) -> bool:
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


def judge_parameters(judge: object, usual: int) -> int:
    """Parameters of a language model that judges in this process, 0 of any other judge.

    The name says them ("Qwen2.5-7B-Instruct"); a model without such a name has the usual number.
    """
    if not isinstance(judge, JudgeConfig) or judge.model is None:
        return 0
    if size := SIZE.search(judge.model.rstrip("/").rpartition("/")[2]):
        experts, number, unit = size.groups()
        return int(int(experts or 1) * float(number) * UNITS[unit.lower()])
    return usual
