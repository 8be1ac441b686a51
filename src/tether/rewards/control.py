"""Rewards that carry no information: every claim of a gain needs the run that was rewarded at
random.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from statistics import NormalDist

from tether.core.protocols import RewardSource
from tether.core.types import Rollout, Score
from tether.data.formats.fields import short_hash
from tether.rewards.parts import RewardParts
from tether.rewards.verifiable import VerifiableReward


@dataclass
class RandomReward:
    """A standard normal number that depends on the seed and the tokens of prompt and response alone.

    So the same answer to a prompt has the same score.
    """

    name = "random"
    seed: int = 0

    def score(self, rollouts: Sequence[Rollout]) -> list[Score]:
        return [Score(self._draw(rollout)) for rollout in rollouts]

    def _draw(self, rollout: Rollout) -> float:
        number = short_hash(repr((self.seed, rollout.prompt_ids, rollout.response_ids)))
        return NormalDist().inv_cdf((number + 0.5) / 2**64)


def random_reward(parts: RewardParts) -> RewardSource:
    """The random reward; where a recipe checks answers, these checks judge."""
    control = RandomReward(parts.seed)
    config = parts.section.verifiable
    return CheckedControl(control, VerifiableReward(config)) if config else control


class CheckedControl(AbstractContextManager["CheckedControl"]):
    """A control in the place of checked answers: the control trains, the check judges."""

    def __init__(self, control: RewardSource, check: VerifiableReward) -> None:
        self.control = control
        self.check = check
        self.name = control.name

    def __exit__(self, *_: object) -> None:
        self.check.__exit__()

    def score(self, rollouts: Sequence[Rollout]) -> list[Score]:
        return self.control.score(rollouts)

    def judge(self, rollouts: Sequence[Rollout]) -> list[Score]:
        """Scores by the known answers."""
        return self.check.score(rollouts)
