"""Group-relative policy optimisation: several answers to a prompt are each other's baseline, and there is no critic.

Shao et al. 2024 (https://arxiv.org/abs/2402.03300). Its switches also give DAPO (https://arxiv.org/abs/2503.14476: token
normalisation, a higher upper clip) and Dr. GRPO (https://arxiv.org/abs/2503.20783: no scaling, constant normalisation).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from tether.algorithms.advantages import group_relative
from tether.algorithms.kl import kl_k2, kl_k3
from tether.algorithms.masked import masked_sum
from tether.algorithms.policy_losses import ppo_clip_loss
from tether.core.protocols import Engine, RewardSource
from tether.core.rundir import RunDirectory
from tether.core.types import Prompt, Rollout, Score
from tether.data.chat import ChatEncoder
from tether.learner.local import LocalLearner
from tether.models.trunk import Role
from tether.stages.experience import Clock, Experience, describe, gather
from tether.stages.policy import PolicyConfig, WeightAverage, clipped_epochs, train

ESTIMATORS = {"k2": kl_k2, "k3": kl_k3}


class GRPOConfig(PolicyConfig):
    """Settings of the stage beside the common ones."""

    samples_per_prompt: int = Field(default=8, ge=2)
    epochs: int = Field(default=1, ge=1)
    clip_range_high: float | None = Field(default=None, gt=0, description="upper clip range; unset: clip_range")
    scale_advantages: bool = Field(default=True, description="divide by the standard deviation of the group's scores")
    normalize: Literal["token", "sequence", "constant"] = Field(
        "token", description="weight of a token: the same for all, its response's share, or one over max_new_tokens"
    )
    kl_coefficient: float = Field(default=0.0, ge=0, description="weight of KL(policy || reference) in the loss")
    kl_estimator: Literal["k2", "k3"] = Field("k2", description="k2 has the gradient of that KL; k3 is the paper's")

    @model_validator(mode="after")
    def _check(self) -> GRPOConfig:
        if "kl_estimator" in self.model_fields_set and not self.kl_coefficient:
            raise ValueError("kl_estimator has no effect with kl_coefficient = 0; remove it or set the coefficient")
        return self


class GRPO:
    """One policy and a reward source; with a KL term also the frozen reference.

    Args:
        policy, reference: roles on one trunk or on two models; the reference is not run when `kl_coefficient` is 0.
        engine: samples from the policy; its weights are told apart by `policy_version`.
    """

    def __init__(
        self, config: GRPOConfig, policy: Role, reference: Role, reward: RewardSource, engine: Engine, encoder: ChatEncoder
    ) -> None:
        self.config, self.policy, self.reference = config, policy, reference
        self.reward, self.engine, self.encoder = reward, engine, encoder
        self.learner = LocalLearner(policy.parameters(), config.optimizer, config.total_updates)
        self.average = WeightAverage(self.learner, config.ema_decay)
        self.on_policy = config.epochs * config.minibatches == 1
        for role in (policy, reference):
            role.train_mode(False)

    def step(self, prompts: Sequence[Prompt], number: int) -> tuple[dict[str, float], list[Rollout], list[Score]]:
        """One step of the algorithm; returns its metrics, rollouts and proxy scores."""
        clock, config = Clock(), self.config
        groups = self.engine.generate(
            prompts,
            config.sampling,
            num_samples=config.samples_per_prompt,
            seed=config.seed,
            ordinals=config.ordinals(number)[: len(prompts)],
        )
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        clock.lap("rollout")
        scores = self.reward.score(rollouts)
        clock.lap("reward")
        experience = gather(
            rollouts,
            scores,
            self.encoder,
            config.micro_batch_tokens,
            self.policy.device,
            document_tokens=min(r.document_tokens(config.micro_batch_tokens) for r in (self.policy, self.reference)),
        )
        self.evaluate(experience)
        experience.advantages = self.advantages(experience)
        clock.lap("evaluate")
        metrics = self.update(experience, number)
        metrics.update(describe(experience, [s.value for s in scores], coefficient=config.kl_coefficient or None))
        self.engine.update_weights(number + 1)
        clock.lap("update")
        return {**metrics, **clock.times(sum(len(r.response_ids) for r in rollouts))}, rollouts, scores

    @torch.no_grad()
    def evaluate(self, experience: Experience) -> None:
        """Log-probabilities of the reference, and of the policy where the update would otherwise not know the old ones.

        With one optimizer step a batch the old policy is the policy: its log-probabilities come from the update's own pass.
        """
        needed = [] if self.on_policy else [("logprobs", self.policy)]
        needed += [("reference_logprobs", self.reference)] if self.config.kl_coefficient else []
        shared = self.policy.model is self.reference.model or len(needed) < 2
        reused = len(needed) + self.config.epochs > 1 and shared
        experience.common = [self.policy.common(batch) if reused else None for batch in experience.batches]
        for number, batch in enumerate(experience.batches):
            for name, role in needed:
                common = experience.common[number] if role.model is self.policy.model else None
                logprobs, entropy = role.logprobs(batch, self.config.temperature, common)
                experience.put(name, number, batch.scatter(logprobs))
                if role is self.policy:
                    experience.put("entropy", number, batch.scatter(entropy))

    def advantages(self, experience: Experience) -> Tensor:
        """Every token's share of its response's advantage; (sequences, time)."""
        config, mask = self.config, experience.mask
        scores = [
            0.0 if s.value is None else s.value - config.missing_stop_penalty * (not r.finished)
            for s, r in zip(experience.scores, experience.rollouts, strict=True)
        ]
        groups = torch.arange(len(scores), device=mask.device) // config.samples_per_prompt
        relative = group_relative(torch.tensor(scores, device=mask.device), groups, mask.any(-1), scale=config.scale_advantages)
        return relative[:, None] * self.weights(experience)

    def weights(self, experience: Experience) -> Tensor:
        """Positive weights of the tokens that count, relative to one over their number; (sequences, time)."""
        mask = experience.mask.float()
        lengths, tokens, sequences = mask.sum(-1, keepdim=True), mask.sum(), mask.any(-1).sum()
        share = {
            "token": torch.ones_like(lengths),
            "sequence": tokens / (sequences * lengths.clamp(min=1)),
            "constant": (tokens / (sequences * self.config.max_new_tokens)).expand_as(lengths),
        }[self.config.normalize]
        return share * mask

    def update(self, experience: Experience, number: int) -> dict[str, float]:
        """Several epochs of clipped updates over the same rollouts; one is on policy."""
        experience.weights = self.weights(experience)

        def finish() -> Mapping[str, float]:
            metrics = self.learner.step()
            self.average.update()
            return metrics

        return clipped_epochs(experience, self.config, number, lambda *at: self._accumulate(experience, *at), finish)

    def _accumulate(self, experience: Experience, index: int, denominator: int) -> dict[str, float]:
        """Add one micro-batch's gradient: clipped surrogate + beta KL."""
        batch, mask, config = experience.batches[index], experience.part("mask", index), self.config
        flat = self.policy.logprobs(batch, config.temperature, experience.common[index])
        logprobs, entropy = (batch.scatter(values) for values in flat)
        if self.on_policy:
            experience.put("logprobs", index, logprobs.detach())
            experience.put("entropy", index, entropy.detach())
        loss, diagnostics = ppo_clip_loss(
            logprobs,
            experience.part("logprobs", index),
            experience.part("advantages", index),
            mask,
            clip_range=config.clip_range,
            clip_range_high=config.clip_range_high,
            denominator=denominator,
        )
        policy = float(loss.detach())
        if config.kl_coefficient:
            kl = ESTIMATORS[config.kl_estimator](logprobs, experience.part("reference_logprobs", index))
            loss = loss + config.kl_coefficient * masked_sum(kl * experience.part("weights", index), mask) / denominator
        self.learner.backward(loss)
        return {
            "loss": float(loss.detach()),
            "policy/loss": policy,
            "policy/clip_fraction": float(diagnostics.clip_fraction),
            "policy/approximate_kl": float(diagnostics.approximate_kl),
            "ratio_max": float(diagnostics.ratio_max),
            "ratio_min": float(diagnostics.ratio_min),
        }

    def train(
        self,
        prompts: Sequence[Prompt],
        run: RunDirectory,
        *,
        on_step: Callable[[int, dict[str, float]], dict[str, float]] | None = None,
        progress: Callable[[int, int, Any], None] | None = None,
    ) -> dict[str, Any]:
        """See policy.train."""
        return train(self, prompts, run, on_step=on_step, progress=progress)

    def state(self) -> dict[str, Any]:
        return {}

    def load_state(self, values: Mapping[str, Any]) -> None:
        pass
