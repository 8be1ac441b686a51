"""Direct methods on the policy's own fresh samples: in every step the best and the worst answer to a prompt are a pair.

Guo et al. 2024 (https://arxiv.org/abs/2402.04792): pairs that were collected once tell the policy about answers that it no longer
gives; answers sampled from the policy of the moment, ordered by a reward, do not age.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Unpack

from pydantic import Field

from tether.core.protocols import Engine, RewardSource
from tether.core.rundir import RunDirectory
from tether.core.types import Prompt, Rollout, RolloutGroup, Score
from tether.data.chat import ChatEncoder
from tether.data.comparisons import Ranking, pairs_of
from tether.learner.config import RATES, Rates
from tether.learner.local import LocalLearner
from tether.models.trunk import Role
from tether.stages.direct import REFERENCE_FREE, PairLoss, PairLossConfig, margins_of, preferred
from tether.stages.experience import Clock
from tether.stages.policy import PolicyStage, Step, WeightAverage, train
from tether.stages.reference import Likelihoods
from tether.stages.sampled import Hooks, SampledConfig, described, sampled


class OnlineDirectConfig(PairLossConfig, SampledConfig):
    """Settings of the stage; lengths are in tokens."""

    section: ClassVar[str] = "online_direct"
    rates: ClassVar[Rates] = RATES["online_direct"]

    prompts_per_step: int = Field(default=64, ge=1, description="each gives one pair, or none")
    samples_per_prompt: int = Field(default=2, ge=2, description="the best and the worst of them are the pair")


@dataclass(frozen=True)
class SampledPair:
    """The best and the worst of a prompt's samples, as they were sampled, and their scores."""

    best: Rollout
    worst: Rollout
    best_score: float
    worst_score: float

    def ranking(self, encoder: ChatEncoder, group: str) -> Ranking:
        """The pair as token ids."""
        sides = tuple(encoder.rollout(r.prompt_ids, r.response_ids) for r in (self.best, self.worst))
        return Ranking(group, sides, (0,), (1,), (1.0,), (self.best_score - self.worst_score,))


def best_and_worst(
    groups: Sequence[RolloutGroup], scores: Sequence[Score], *, missing_stop_penalty: float = 0.0
) -> tuple[list[SampledPair], dict[str, int]]:
    """One pair a prompt, and how many prompts gave none: "failed", fewer than two scores, or "tied", no sample was the better.

    Args:
        scores: one a rollout, group after group; one that failed is left out.
        missing_stop_penalty: taken off the score of a response that did not end in time.
    """
    pairs, skipped, position = [], {"tied": 0, "failed": 0}, 0
    for group in groups:
        known = [
            (score.value - missing_stop_penalty * (not rollout.finished), rollout)
            for rollout, score in zip(group.rollouts, scores[position : position + len(group.rollouts)], strict=True)
            if score.value is not None
        ]
        position += len(group.rollouts)
        if len(known) < 2:
            skipped["failed"] += 1
            continue
        (low, worst), (high, best) = min(known, key=lambda k: k[0]), max(known, key=lambda k: k[0])
        if low == high or best.response_ids == worst.response_ids:
            skipped["tied"] += 1
        else:
            pairs.append(SampledPair(best, worst, high, low))
    return pairs, skipped


class OnlineDirect(PolicyStage):
    """A policy, a fixed reference (none for orpo and simpo), a reward source and an engine that samples from the policy."""

    def __init__(
        self,
        config: OnlineDirectConfig,
        policy: Role,
        reference: Role | None,
        reward: RewardSource,
        engine: Engine,
        encoder: ChatEncoder,
    ) -> None:
        self.config, self.policy = config, policy
        self.reward, self.engine, self.encoder = reward, engine, encoder
        likelihoods = Likelihoods(policy, reference, encoder, config.micro_batch_tokens, config.temperature)
        likelihoods.without_dropout()
        self.pairs = PairLoss(config, likelihoods)
        self.learner = LocalLearner(policy.parameters(), config.optimizer_for(policy.adapter), config.steps)
        self.average = WeightAverage(self.learner, config.ema_decay, [policy])

    def step(self, prompts: Sequence[Prompt], number: int) -> Step:
        """Sample, score, take the best and the worst of each prompt, and one update on these pairs."""
        clock, config = Clock(), self.config
        groups = sampled(self.engine, config, prompts, self.ordinals(number))
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        clock.lap("rollout")
        scores = self.reward.score(rollouts)
        clock.lap("reward")
        pairs, skipped = best_and_worst(groups, scores, missing_stop_penalty=config.missing_stop_penalty)
        metrics = self.update([pair.ranking(self.encoder, str(place)) for place, pair in enumerate(pairs)])
        metrics |= {"pairs/used": len(pairs), **{f"pairs/{reason}": count for reason, count in skipped.items()}}
        metrics |= described(rollouts, scores)
        self.engine.update_weights(number + 1)
        clock.lap("update")
        return {**metrics, **clock.times(sum(len(r.response_ids) for r in rollouts))}, rollouts, scores

    def update(self, rankings: list[Ranking]) -> dict[str, float]:
        """One update over the pairs of a step; without any the weights stay, and the schedule goes on.

        The KL is the mean log ratio of the pairs' responses: all samples where there are two a prompt, else the extremes alone.
        """
        total, margins, labels, rewards = 0.0, [], [], []
        for micro in self.pairs.micro_batches(rankings):
            loss, found = self.pairs(micro, len(rankings))
            self.learner.backward(loss)
            total += float(loss.detach())
            margins += margins_of(micro, found)
            labels += pairs_of(micro).probability
            rewards += found.tolist()
        shares = preferred(margins, labels) if rankings else {}
        metrics = {"loss": total if rankings else math.nan, **shares, **self.learner.step()}
        if rewards and self.config.loss not in REFERENCE_FREE and not self.config.average:
            metrics["kl/policy_reference_k1"] = statistics.fmean(rewards) / self.config.strength
        self.average.update()
        return metrics

    def train(self, prompts: Sequence[Prompt], run: RunDirectory, **hooks: Unpack[Hooks]) -> dict[str, Any]:
        """See policy.train."""
        summary = train(self, prompts, run, **hooks)
        totals = {key: sum(row[f"pairs/{key}"] for row in run.metrics()) for key in ("used", "tied", "failed")}
        return {**summary, "pairs": totals}
