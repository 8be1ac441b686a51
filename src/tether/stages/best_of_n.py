"""Rejection sampling: sample several answers to a prompt, keep the best, imitate them, and begin again from the new policy.

One round a step, as RAFT (Dong et al. 2023, https://arxiv.org/abs/2304.06767) and, with a threshold, ReST (Gulcehre et al. 2023,
https://arxiv.org/abs/2308.08998). Each round moves the policy towards its own best-of-n, and only the order of scores matters.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import ClassVar, Literal

import torch
from pydantic import Field, model_validator

from tether.algorithms.overoptimization import kl_best_of_n
from tether.algorithms.preference_losses import negative_log_likelihood
from tether.core.protocols import Engine, RewardSource
from tether.core.types import Prompt, Rollout, Score
from tether.data.batches import batches_for
from tether.data.chat import ChatEncoder, Encoded
from tether.learner.config import RATES, OptimizerConfig, Rates
from tether.learner.local import LocalLearner
from tether.learner.loop import epoch_order, split_evenly
from tether.models.trunk import Role
from tether.stages.experience import Clock
from tether.stages.policy import PolicyStage, Step, WeightAverage
from tether.stages.sampled import SampledConfig, described, sampled


class BestOfNConfig(SampledConfig):
    """Settings of the stage; lengths are in tokens."""

    rates: ClassVar[Rates] = RATES["best_of_n"]

    steps: int = Field(default=20, ge=1, description="rounds: sample, keep, imitate")
    samples_per_prompt: int = Field(default=8, ge=1, description="the n of best-of-n")
    keep: int = Field(default=1, ge=1, description="responses of each prompt that are imitated, best first")
    threshold: float | None = Field(default=None, description="a response that scores below it is not kept, best or not")
    epochs: int = Field(default=1, ge=1, description="passes over a round's kept responses")
    minibatches: int = Field(default=1, ge=1, description="optimizer steps an epoch")
    normalize: Literal["token", "sequence"] = Field(
        "token", description="weight of a token: the same for all, or its response's share"
    )
    report_kl: bool = Field(default=True, description="run the reference, to know how far the policy has moved")
    optimizer: OptimizerConfig = OptimizerConfig(schedule="linear", final_fraction=0.0)

    @model_validator(mode="after")
    def _check_selection(self) -> BestOfNConfig:
        if self.keep > self.samples_per_prompt:
            raise ValueError(f"keep = {self.keep} of samples_per_prompt = {self.samples_per_prompt}: sample more, or keep fewer")
        if self.keep == self.samples_per_prompt and self.threshold is None:
            raise ValueError(
                "keep = samples_per_prompt keeps everything, so the reward has no effect. "
                "Sample more, keep fewer, or set a threshold"
            )
        return self

    @property
    def total_updates(self) -> int:
        return self.steps * self.epochs * self.minibatches


class BestOfN(PolicyStage):
    """One policy and a reward source; with a reference also the distance from it, which is measured and never trained on.

    Args:
        policy, reference: roles on one trunk or on two models; the reference is not run with `report_kl` off.
        engine: samples from the policy; its weights are told apart by `policy_version`.

    Raises:
        ValueError: `report_kl` without a reference.
    """

    def __init__(
        self,
        config: BestOfNConfig,
        policy: Role,
        reference: Role | None,
        reward: RewardSource,
        engine: Engine,
        encoder: ChatEncoder,
    ) -> None:
        if config.report_kl and reference is None:
            raise ValueError("report_kl needs a reference role")
        self.config, self.policy, self.reference = config, policy, reference if config.report_kl else None
        self.reward, self.engine, self.encoder = reward, engine, encoder
        self.learner = LocalLearner(policy.parameters(), config.optimizer_for(policy.adapter), config.total_updates)
        self.average = WeightAverage(self.learner, config.ema_decay, [policy])
        for role in (policy, self.reference):
            if role is not None:
                role.train_mode(False)

    def step(self, prompts: Sequence[Prompt], number: int) -> Step:
        """One round; returns its metrics, all rollouts and their proxy scores."""
        clock, config = Clock(), self.config
        rollouts = [r for group in sampled(self.engine, config, prompts, self.ordinals(number)) for r in group.rollouts]
        clock.lap("rollout")
        scores = self.reward.score(rollouts)
        clock.lap("reward")
        kept = self.select(rollouts, scores)
        metrics = self.measure(rollouts, scores, kept)
        clock.lap("evaluate")
        metrics.update(self.update([rollouts[i] for i in kept], number))
        self.engine.update_weights(number + 1)
        clock.lap("update")
        return {**metrics, **clock.times(sum(len(r.response_ids) for r in rollouts))}, rollouts, scores

    def select(self, rollouts: Sequence[Rollout], scores: Sequence[Score]) -> list[int]:
        """Places of the kept rollouts: the best of each prompt's samples, of equals the first; never one whose score failed."""
        config, kept = self.config, []
        floor = -math.inf if config.threshold is None else config.threshold
        for start in range(0, len(rollouts), config.samples_per_prompt):
            values = {
                i: s.value - config.missing_stop_penalty * (not rollouts[i].finished)
                for i, s in enumerate(scores[start : start + config.samples_per_prompt], start)
                if s.value is not None
            }
            ranked = sorted((i for i in values if values[i] >= floor), key=lambda i: -values[i])
            kept += ranked[: config.keep]
        return kept

    def measure(self, rollouts: Sequence[Rollout], scores: Sequence[Score], kept: Sequence[int]) -> dict[str, float]:
        """Metrics of all samples and of those kept. KL is the sum over a response, averaged over all responses, in nats."""
        config = self.config
        sequences = [self.encoder.rollout(r.prompt_ids, r.response_ids) for r in rollouts]
        engine_says = all(r.logprobs for r in rollouts)
        policy = [sum(r.logprobs) for r in rollouts] if engine_says else self._totals(self.policy, sequences)
        metrics = {
            **described(rollouts, scores),
            "policy/entropy": -sum(policy) / sum(s.num_trained for s in sequences),
            "kept/responses": float(len(kept)),
            "kept/prompts_without": float(
                len(rollouts) // config.samples_per_prompt - len({i // config.samples_per_prompt for i in kept})
            ),
        }
        if kept:
            metrics["reward/kept"] = statistics.fmean(value for i in kept if (value := scores[i].value) is not None)
            metrics["kept/length"] = statistics.fmean(len(rollouts[i].response_ids) for i in kept)
        if config.keep == 1 and config.threshold is None:
            metrics["kl/best_of_n"] = kl_best_of_n(config.samples_per_prompt)
        if self.reference is not None:
            reference = self._totals(self.reference, sequences)
            metrics["kl/policy_reference_k1"] = statistics.fmean(p - q for p, q in zip(policy, reference, strict=True))
        return metrics

    def update(self, kept: Sequence[Rollout], number: int) -> dict[str, float]:
        """Several epochs of imitation; where nothing was kept, nothing moves."""
        if not kept:
            return {}
        sequences, losses, metrics = [self.encoder.rollout(r.prompt_ids, r.response_ids) for r in kept], [], {}
        for epoch in range(self.config.epochs):
            order = epoch_order(len(sequences), self.config.seed + number, epoch)
            for cut in split_evenly(order, self.config.minibatches):
                losses.append(self._accumulate([sequences[i] for i in cut]))
                metrics = self.learner.step()
                self.average.update()
        updates = {"policy/updates": len(losses), "policy/updates_planned": self.config.epochs * self.config.minibatches}
        return {"policy/loss": statistics.fmean(losses), **metrics, **updates}

    def _accumulate(self, sequences: list[Encoded]) -> float:
        """Add the gradient of L = -(1/N) sum w log pi of one update, N its tokens (w = 1) or responses (w = 1/length).

        pi is the policy at the temperature it was sampled at, so that imitating all of its own samples would change nothing on
        average. At another temperature (RAFT fine-tunes at 1) that alone sharpens or flattens it.
        """
        by_token, total = self.config.normalize == "token", 0.0
        denominator = sum(s.num_trained for s in sequences) if by_token else len(sequences)
        for _, batch in batches_for(self.policy, sequences, self.encoder.pad_id, self.config.micro_batch_tokens):
            logprobs = batch.scatter(self.policy.logprobs(batch, self.config.temperature)[0])
            weighted = logprobs if by_token else logprobs / batch.mask.sum(-1, keepdim=True)
            loss = negative_log_likelihood(weighted, batch.mask, denominator=denominator)
            self.learner.backward(loss)
            total += float(loss.detach())
        return total

    @torch.no_grad()
    def _totals(self, role: Role, sequences: Sequence[Encoded]) -> list[float]:
        """Log-probability of each whole response."""
        totals = [0.0] * len(sequences)
        for cut, batch in batches_for(role, sequences, self.encoder.pad_id, self.config.micro_batch_tokens):
            sums = batch.scatter(role.logprobs(batch, self.config.temperature)[0]).sum(-1)
            for index, value in zip(cut, sums.tolist(), strict=True):
                totals[index] = value
        return totals
