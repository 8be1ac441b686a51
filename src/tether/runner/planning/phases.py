"""A stage's memory and seconds by phase, and the memory of its judge."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tether.settings.judges import JudgeConfig
from tether.settings.section import StageWork

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
    """Phases of one step, and seconds beside them: with each step on average, and before the first
    and after the last together. The stage runs in so many rounds.
    """

    name: str
    phases: list[Phase]
    work: StageWork
    learning_rate: float | None = None
    each: float = 0.0
    beside: float = 0.0
    rounds: int = 1

    @property
    def peak(self) -> int:
        return max(phase.total for phase in self.phases)

    @property
    def seconds(self) -> float | None:
        """All of its time; None where its rows are not counted."""
        if self.work.steps is None:
            return None
        times = self.work.times
        step = sum(phase.seconds * times.get(phase.name, 1.0) for phase in self.phases)
        return self.rounds * (self.beside + self.work.steps * (step + self.each))


def judge_bytes(judge: object, policy: PreTrainedModel) -> dict[str, int]:
    """The weights of a language model that judges answers in this process."""
    if not isinstance(judge, JudgeConfig) or judge.model is None:
        return {}
    return {"judge model": named_bytes(judge.model, policy)}


def named_bytes(name: str, policy: PreTrainedModel) -> int:
    """The weights of another model, in the policy's type.

    The name says its parameters ("Qwen2.5-7B-Instruct"); without them it is as large as the policy.
    """
    parameters = policy.num_parameters()
    if size := SIZE.search(name.rstrip("/").rpartition("/")[2]):
        experts, number, unit = size.groups()
        parameters = int(int(experts or 1) * float(number) * UNITS[unit.lower()])
    return parameters * policy.dtype.itemsize
