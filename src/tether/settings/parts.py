"""Parts of a stage: the same training again with something different, each in a folder of its own.

Members, objectives, the test model, a student and rounds are listed here and nowhere else. The list
is made from the settings alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from tether.core.types import Json
from tether.settings.reward import RewardSection
from tether.settings.rounds import RoundsSection
from tether.settings.section import Section

PartKind = Literal["objective", "test model", "member", "student", "round"]


@dataclass(frozen=True, kw_only=True)
class StagePart:
    """One training within a stage.

    Args:
        name: of its folder in the stage's own.
        settings: of the training; those of the stage where its number is the only difference.
        number: of a member, from 0; of a round, from 1.
        needs: names of the parts from whose results it starts.
    """

    name: str
    kind: PartKind
    settings: Section
    number: int | None = None
    needs: tuple[str, ...] = ()

    @property
    def noted(self) -> Json:
        """Entries of its config.json beside those of the stage."""
        return {} if self.number is None else {self.kind: self.number}


def parts_of(section: Section) -> tuple[StagePart, ...]:
    """The parts of a stage, in the order in which they run; empty where it is one training."""
    if isinstance(section, RewardSection):
        return tuple(_objectives(section) if section.objectives else _reward_models(section))
    return tuple(_rounds(section)) if isinstance(section, RoundsSection) else ()


def _objectives(section: RewardSection) -> Iterator[StagePart]:
    for name, data in (section.objectives or {}).items():
        settings = section.model_copy(update={"data": data, "objectives": None})
        yield StagePart(name=name, kind="objective", settings=settings)


def _reward_models(section: RewardSection) -> Iterator[StagePart]:
    if section.test_share:
        plain = {"members": 1, "average": False, "distill": None, "teacher": None}
        rows = {"data": None, "test": {}, "test_share": 0.0}
        settings = section.model_copy(update={**rows, **plain})
        yield StagePart(name="test", kind="test model", settings=settings)
    if section.members == 1:
        return
    names = tuple(f"member-{number}" for number in range(section.members))
    for number, name in enumerate(names):
        yield StagePart(name=name, kind="member", settings=section, number=number)
    if section.distill is not None:
        yield StagePart(name="student", kind="student", settings=section, needs=names)


def _rounds(section: RoundsSection) -> Iterator[StagePart]:
    needs: tuple[str, ...] = ()
    for number in range(1, section.rounds + 1):
        name = f"round-{number:02d}"
        yield StagePart(name=name, kind="round", settings=section, number=number, needs=needs)
        needs = (name,)
