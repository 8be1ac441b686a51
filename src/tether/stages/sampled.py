"""What stages that learn from the policy's own samples have in common: settings, how they are drawn, what is said of them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any, TypedDict

from pydantic import Field

from tether.core.protocols import Engine, Monitor
from tether.core.types import Prompt, Rollout, RolloutGroup, Sampling, Score
from tether.learner.config import TrainedConfig


class SampledConfig(TrainedConfig):
    """Settings of such a stage; lengths are in tokens."""

    steps: int = Field(default=100, ge=1)
    prompts_per_step: int = Field(default=64, ge=1)
    samples_per_prompt: int = Field(default=1, ge=1)
    max_new_tokens: int = Field(default=64, ge=1)
    temperature: float = Field(default=1.0, gt=0, description="of sampling, and of the distributions in the loss")
    missing_stop_penalty: float = Field(
        default=0.0, ge=0, description="taken off the score of a response that did not end in time"
    )
    micro_batch_tokens: int = Field(default=2048, ge=8, description="padded size of a micro-batch")
    ema_decay: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        description="end with a moving average of the policy: of an adapter, of what it adds to the weights",
    )
    checkpoint_every: int = Field(default=5, ge=1)
    sample_rows: int = Field(default=4, ge=0, description="texts kept from every step")
    seed: int = 0

    @property
    def sampling(self) -> Sampling:
        return Sampling(max_new_tokens=self.max_new_tokens, temperature=self.temperature)

    def ordinals(self, number: int) -> range:
        """The places of a step's prompts among all prompts of the run."""
        return range(number * self.prompts_per_step, (number + 1) * self.prompts_per_step)


class Hooks(TypedDict, total=False):
    """Who else takes part in a training."""

    on_step: Callable[[int, dict[str, float]], dict[str, float]] | None
    """May add metrics (gold scores, memory) before they are logged."""
    monitor: Monitor | None
    """Looks at every step; its alarms are written down."""
    ended: Callable[[], bool] | None
    """Asked after every step whether it was the last."""
    progress: Callable[[int, int, Any], None] | None


def sampled(engine: Engine, config: SampledConfig, prompts: Sequence[Prompt], places: Sequence[int]) -> list[RolloutGroup]:
    """Samples of prompts that stand at these places of the run: a function of seed and places."""
    places = places[: len(prompts)]
    return engine.generate(prompts, config.sampling, num_samples=config.samples_per_prompt, seed=config.seed, ordinals=places)


def described(rollouts: Sequence[Rollout], proxy: Sequence[Score]) -> dict[str, float]:
    """The metrics that need no pass through a model."""
    known = [score.value for score in proxy if score.value is not None]
    return {
        "reward/proxy": statistics.fmean(known) if known else math.nan,
        "reward/proxy_std": statistics.pstdev(known) if known else math.nan,
        "reward/failed": float(len(proxy) - len(known)),
        "response/length": statistics.fmean(len(r.response_ids) for r in rollouts),
        "response/stop_rate": statistics.fmean(float(r.finished) for r in rollouts),
        "response/distinct_2": distinct(rollouts),
    }


def distinct(rollouts: Sequence[Rollout], n: int = 2) -> float:
    """Distinct n-grams of all responses over all their n-grams (https://arxiv.org/abs/1510.03055), on tokens."""
    grams = [r.response_ids[i : i + n] for r in rollouts for i in range(len(r.response_ids) - n + 1)]
    return len(set(grams)) / max(1, len(grams))
