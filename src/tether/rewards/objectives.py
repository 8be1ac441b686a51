"""Several objectives, each with a reward model of its own on one trunk: weighted, or held above a threshold."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from pydantic import Field, model_validator
from torch import Tensor

from tether.algorithms.objectives import dual_update, lagrangian, weighted
from tether.core.config import Config
from tether.core.types import Json, Rollout, Score
from tether.data.chat import ChatEncoder
from tether.models.trunk import Role
from tether.rewards.ensemble import Scorers


class ObjectiveConfig(Config):
    """An objective's weight or threshold; its scores have mean 0 and deviation 1 on held-out responses of its comparisons."""

    weight: float | None = Field(default=None, ge=0, description="in the sum that is raised; 0: only looked at")
    at_least: float | None = Field(default=None, description="instead of a weight: where its mean is held, in deviations")
    rate: float = Field(default=0.1, gt=0, description="how fast the constraint's multiplier follows its violation, a step")

    @model_validator(mode="after")
    def _check(self) -> ObjectiveConfig:
        if (self.weight is None) == (self.at_least is None):
            raise ValueError("an objective has a weight or is held with at_least: give one of both")
        if self.at_least is None and "rate" in self.model_fields_set:
            raise ValueError("rate has no effect without at_least: it moves a constraint's multiplier")
        return self


@dataclass(frozen=True)
class TrainedObjective:
    """A trained reward model, and the mean and deviation of its scores on held-out responses."""

    role: Role
    mean: float
    deviation: float


class ObjectivesReward:
    """Scores the sampled token ids by every objective's model as an ensemble's members do; layers below their adapters run once.

    Each score is standardized; `Score.parts` holds them by name. The value is `algorithms.objectives.lagrangian` of them. Scoring
    moves nothing: a constraint's multiplier moves once a step of training, by `learn`. What is to be compared over time is scored
    by `judge`, where constraints weigh nothing.

    Args:
        settings, objectives: by name, the same names; the models stand on one trunk.
        encoder: the encoder that all of them were trained with.
    """

    name = "objectives"

    def __init__(
        self, settings: Mapping[str, ObjectiveConfig], objectives: Mapping[str, TrainedObjective], encoder: ChatEncoder
    ) -> None:
        assert settings.keys() == objectives.keys()
        self.settings = settings
        chosen = [objectives[name] for name in settings]
        self.scorers = Scorers([objective.role for objective in chosen], encoder)
        self.mean, self.deviation = torch.tensor([[[o.mean], [o.deviation]] for o in chosen], dtype=torch.float64).unbind(1)
        self.weights = torch.tensor([objective.weight or 0.0 for objective in settings.values()], dtype=torch.float64)
        self.multipliers = {name: 0.0 for name, objective in settings.items() if objective.at_least is not None}

    def score(self, rollouts: Sequence[Rollout]) -> list[Score]:
        """One score a rollout; where any objective's number is not finite it is a failed score."""
        table = self._table(rollouts)
        held = [number for number, name in enumerate(self.settings) if name in self.multipliers]
        multipliers = torch.tensor(list(self.multipliers.values()), dtype=table.dtype)
        return self._scores(table, lagrangian(weighted(table, self.weights), table[held], multipliers))

    def judge(self, rollouts: Sequence[Rollout]) -> list[Score]:
        """The weighted sum alone, the same at every step; whether the constraints hold is in the parts."""
        table = self._table(rollouts)
        return self._scores(table, weighted(table, self.weights))

    def _table(self, rollouts: Sequence[Rollout]) -> Tensor:
        """(objectives, responses) standardized scores, in the order of the settings."""
        return (self.scorers.table(rollouts) - self.mean) / self.deviation

    def _scores(self, table: Tensor, values: Tensor) -> list[Score]:
        rows = zip(table.T.tolist(), values.tolist(), strict=True)
        scores = (Score(value, parts=dict(zip(self.settings, row, strict=True))) for row, value in rows)
        return [score.finite("the objectives' reward models", score.parts) for score in scores]

    def learn(self, scores: Sequence[Score]) -> dict[str, float]:
        """Move the multipliers by what a step of training scored; the objectives' means, and the multipliers that they met."""
        measured = [score.parts for score in scores if score.value is not None]
        if not measured:
            return {}
        means = {name: statistics.fmean(parts[name] for parts in measured) for name in self.settings}
        metrics = {f"objective/{name}": mean for name, mean in means.items()}
        metrics |= {f"objective/{name}_multiplier": value for name, value in self.multipliers.items()}
        for name, value in self.multipliers.items():
            objective = self.settings[name]
            assert objective.at_least is not None
            self.multipliers[name] = dual_update(value, objective.at_least - means[name], objective.rate)
        return metrics

    def state(self) -> Json:
        return {"multipliers": dict(self.multipliers)}

    def load_state(self, values: Mapping[str, Any]) -> None:
        self.multipliers = {name: float(values["multipliers"][name]) for name in self.multipliers}
