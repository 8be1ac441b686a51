"""A stage's memory and seconds by phase, and the models and the judge that a section needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tether.settings.sampling import OnlineSection
from tether.settings.section import PromptedSection, Section
from tether.settings.supervised import DirectSection, KTOSection


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
