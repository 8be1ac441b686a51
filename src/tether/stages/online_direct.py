"""Direct methods on the policy's own fresh samples: in every step the best and the worst answer to
a prompt are a pair.

Guo et al. 2024 (https://arxiv.org/abs/2402.04792): pairs that were collected once show answers that
the policy no longer gives. Answers sampled from the present policy, ordered by a reward, do not
age.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from tether.core.protocols import Engine, RewardSource
from tether.core.types import Json, Metrics, Prompt, Readings, Rollout, Score
from tether.data.chat import ChatEncoder
from tether.data.prepare import Ranking
from tether.models.trunk import Role
from tether.settings.sampling import OnlineDirectConfig
from tether.stages.direct import PairLoss
from tether.stages.learner.local import LocalLearner
from tether.stages.learner.ranks import ALONE, Ranks
from tether.stages.reference import Likelihoods
from tether.stages.rollouts import Clock, Step, penalised_scores, sample_and_score, sample_metrics
from tether.stages.supervised import accumulate


@dataclass(frozen=True)
class SampledPair:
    """The best and the worst of a prompt's samples, as they were sampled, and their scores."""

    best: Rollout
    worst: Rollout
    best_score: float
    worst_score: float

    def ranking(self, encoder: ChatEncoder, group: str) -> Ranking:
        """The pair as token ids."""
        sides = tuple(encoder.sampled(r) for r in (self.best, self.worst))
        return Ranking(group, sides, (0,), (1,), (1.0,), (self.best_score - self.worst_score,))


def best_and_worst(
    rollouts: Sequence[Rollout],
    scores: Sequence[Score],
    samples_per_prompt: int,
    *,
    missing_stop_penalty: float = 0.0,
) -> tuple[list[SampledPair], dict[str, int]]:
    """One pair a prompt, and how many prompts gave none: "failed", fewer than two scores, or
    "tied", no sample was the better.

    Args:
        rollouts, scores: prompt after prompt; a failed score is left out.
        missing_stop_penalty: taken off the score of a response that did not end in time.
    """
    pairs = []
    skipped = {"tied": 0, "failed": 0}
    values = penalised_scores(rollouts, scores, missing_stop_penalty)
    for start in range(0, len(rollouts), samples_per_prompt):
        samples = [
            (value, i)
            for i, value in enumerate(values[start : start + samples_per_prompt], start)
            if value is not None
        ]
        if len(samples) < 2:
            skipped["failed"] += 1
            continue
        low, last = min(samples, key=lambda sample: sample[0])
        high, first = max(samples, key=lambda sample: sample[0])
        best = rollouts[first]
        worst = rollouts[last]
        if low == high or best.response_ids == worst.response_ids:
            skipped["tied"] += 1
        else:
            pairs.append(SampledPair(best, worst, high, low))
    return pairs, skipped


@dataclass(eq=False, kw_only=True)
class OnlineDirect:
    """A policy, a fixed reference (none for orpo and simpo), a reward source and an engine that
    samples from the policy.
    """

    config: OnlineDirectConfig
    policy: Role
    reference: Role | None
    reward: RewardSource
    engine: Engine
    encoder: ChatEncoder
    ranks: Ranks = ALONE
    stopped = False

    def __post_init__(self) -> None:
        config = self.config
        policy = self.policy
        likelihoods = Likelihoods(
            policy=policy,
            reference=self.reference,
            encoder=self.encoder,
            micro_batch_tokens=config.micro_batch_tokens,
            temperature=config.temperature,
        )
        likelihoods.without_dropout()
        self.pairs = PairLoss(config, likelihoods)
        self.learner = LocalLearner(
            policy.parameters(),
            config.optimizer_for(policy.adapter),
            config.steps,
            config.ema_decay,
            ranks=self.ranks,
        )

    def step(self, prompts: Sequence[Prompt], number: int) -> Step:
        """Sample, score, take the best and the worst of each prompt, and one update on these
        pairs.
        """
        clock = Clock()
        config = self.config
        rollouts, scores = sample_and_score(
            self.engine,
            self.reward,
            config,
            prompts,
            self.ordinals(number),
            clock,
        )
        penalty = config.missing_stop_penalty
        pairs, skipped = best_and_worst(
            rollouts,
            scores,
            config.samples_per_prompt,
            missing_stop_penalty=penalty,
        )
        metrics = self.update(
            [pair.ranking(self.encoder, str(place)) for place, pair in enumerate(pairs)],
        )
        metrics |= {
            "pairs/used": len(pairs),
            **{f"pairs/{reason}": count for reason, count in skipped.items()},
        }
        return Step(metrics | sample_metrics(rollouts, scores), rollouts, scores).hand_over(
            self.engine,
            number,
            clock,
        )

    def ordinals(self, number: int) -> range:
        return self.config.ordinals(number)

    def summary(self, history: Sequence[Readings]) -> Json:
        return {
            "pairs": {
                key: sum(row[f"pairs/{key}"] for row in history)
                for key in ("used", "tied", "failed")
            },
        }

    def update(self, rankings: list[Ranking]) -> Metrics:
        """One update over the pairs of a step; without any the weights stay, and the schedule goes
        on.

        The KL is the mean log ratio of the pairs' responses: all samples where there are two a
        prompt, else the extremes alone.
        """
        if not rankings:
            return {"loss": math.nan, **self.learner.step()}
        config = self.config
        update = self.pairs.update(rankings)
        loss, rewards = accumulate(update, self.ranks, self.learner)
        metrics = {"loss": loss, **update.metrics(rewards), **self.learner.step()}
        if config.needs_reference and not config.average:
            metrics["kl/policy_reference_k1"] = statistics.fmean(chain(*rewards)) / config.strength
        return metrics
