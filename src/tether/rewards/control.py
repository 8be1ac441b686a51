"""Rewards that carry no information: every claim of a gain needs the run that was rewarded at
random.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

from tether.core.types import Rollout, Score
from tether.data.formats.fields import short_hash


@dataclass
class RandomReward:
    """A standard normal number that depends on the response's tokens and the seed alone: the same
    text, the same score.
    """

    name = "random"
    seed: int = 0

    def score(self, rollouts: Sequence[Rollout]) -> list[Score]:
        return [Score(self._draw(rollout)) for rollout in rollouts]

    def _draw(self, rollout: Rollout) -> float:
        number = short_hash(repr((self.seed, rollout.prompt_ids, rollout.response_ids)))
        return NormalDist().inv_cdf((number + 0.5) / 2**64)
