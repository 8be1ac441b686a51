"""Proximal policy optimisation against a reward source, tethered to a frozen reference.

Schulman et al. 2017 (https://arxiv.org/abs/1707.06347) as Ziegler et al. 2019 (https://arxiv.org/abs/1909.08593) brought
it to language models: the reward of token t is -beta (log pi - log pi_ref), and the score once at the last real token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from tether.algorithms.advantages import gae, leave_one_out
from tether.algorithms.kl import adapt_kl_coefficient, kl_k1
from tether.algorithms.masked import whiten
from tether.algorithms.policy_losses import entropy_bonus, ppo_clip_loss, value_loss
from tether.core.config import Config
from tether.core.protocols import Engine, RewardSource
from tether.core.rundir import RunDirectory
from tether.core.types import Prompt, Rollout, Score
from tether.data.batches import TokenBatch
from tether.data.chat import ChatEncoder
from tether.learner.local import LocalLearner
from tether.models.trunk import Role
from tether.stages.experience import Clock, Experience, describe, gather
from tether.stages.policy import PolicyConfig, WeightAverage, clipped_epochs, train


class KLConfig(Config):
    """The tether: the weight of -KL in the reward, fixed or adapted towards a target (Ziegler 2019, section 2.2)."""

    mode: Literal["fixed", "adaptive"] = "fixed"
    coefficient: float = Field(default=0.05, ge=0)
    target: float = Field(default=6.0, gt=0, description="nats a response")
    horizon: float = Field(default=10_000, gt=0, description="responses over which the coefficient can change by a factor of e")

    @model_validator(mode="after")
    def _check(self) -> KLConfig:
        useless = {"target", "horizon"} & self.model_fields_set
        if self.mode == "fixed" and useless:
            raise ValueError(f"kl.{sorted(useless)[0]} has no effect with kl.mode='fixed'; remove it or set kl.mode='adaptive'")
        if self.mode == "adaptive" and self.coefficient == 0:
            raise ValueError("kl.coefficient = 0 cannot adapt: it is multiplied; start above 0")
        return self


class PPOConfig(PolicyConfig):
    """Settings of the stage beside the common ones."""

    group_baseline: bool = Field(
        default=False, description="take the mean score of the prompt's other samples off each score; the critic learns the rest"
    )
    gamma: float = Field(default=1.0, gt=0, le=1)
    lam: float = Field(default=0.95, ge=0, le=1)
    value_clip_range: float | None = Field(default=0.2, gt=0)
    value_coefficient: float = Field(default=0.5, ge=0)
    value_trains_trunk: bool = Field(
        default=False, description="let the value loss change the policy's own weights where both share one pass"
    )
    entropy_coefficient: float = Field(default=0.0, ge=0)
    whiten_advantages: bool = True
    normalize_scores: bool = Field(
        True, description="shift and scale scores to mean 0, deviation 1 on the reference's own samples"
    )
    score_clip: float | None = Field(
        default=None, gt=0, description="scores are clipped to plus or minus this, after normalisation"
    )
    kl: KLConfig = KLConfig()

    @model_validator(mode="after")
    def _check(self) -> PPOConfig:
        if self.group_baseline and self.samples_per_prompt < 2:
            raise ValueError("ppo.group_baseline needs other samples of the same prompt: set ppo.samples_per_prompt to 2 or more")
        return self


class PPO:
    """One policy, its frozen reference, a value function and a reward source.

    Args:
        policy, reference, value: roles on one trunk or on several. A value role with the policy's own adapter and model
            reads the policy's hidden states, at no extra pass.
        engine: samples from the policy; its weights are told apart by `policy_version`.
    """

    def __init__(
        self,
        config: PPOConfig,
        policy: Role,
        reference: Role,
        value: Role,
        reward: RewardSource,
        engine: Engine,
        encoder: ChatEncoder,
    ) -> None:
        self.config, self.policy, self.reference, self.value = config, policy, reference, value
        self.reward, self.engine, self.encoder = reward, engine, encoder
        self.kl_coefficient = config.kl.coefficient
        self.normalizer: tuple[float, float] | None = None
        self.shares_pass = value.model is policy.model and value.adapter == policy.adapter
        trained = policy.parameters() + (list(value.head.parameters()) if self.shares_pass and value.head else value.parameters())
        self.learner = LocalLearner(trained, config.optimizer, config.total_updates)
        self.average = WeightAverage(self.learner, config.ema_decay)
        for role in (policy, reference, value):
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
            document_tokens=min(r.document_tokens(config.micro_batch_tokens) for r in (self.policy, self.reference, self.value)),
        )
        self.evaluate(experience)
        experience.rewards = self.shape(experience)
        advantages, experience.returns = gae(experience.rewards, experience.values, experience.mask, config.gamma, config.lam)
        experience.advantages = whiten(advantages, experience.mask) if config.whiten_advantages else advantages
        clock.lap("evaluate")
        metrics = describe(experience, [s.value for s in scores], coefficient=self.kl_coefficient, critic=True)
        metrics.update(self.update(experience, number))
        if config.kl.mode == "adaptive":
            observed = metrics["kl/policy_reference_k1"]
            self.kl_coefficient = adapt_kl_coefficient(
                self.kl_coefficient, observed, config.kl.target, config.kl.horizon, len(rollouts)
            )
        self.engine.update_weights(number + 1)
        clock.lap("update")
        return {**metrics, **clock.times(sum(len(r.response_ids) for r in rollouts))}, rollouts, scores

    @torch.no_grad()
    def evaluate(self, experience: Experience) -> None:
        """Log-probabilities of policy and reference, entropies and values of every response token, before the update."""
        one_trunk = self.policy.model is self.reference.model
        experience.common = [self.policy.common(batch) if one_trunk else None for batch in experience.batches]
        for number, batch in enumerate(experience.batches):
            logprobs, entropy, values = self.forward(batch, experience.common[number])
            reference, _ = self.reference.logprobs(batch, self.config.temperature, experience.common[number])
            for name, flat in (
                ("logprobs", logprobs),
                ("entropy", entropy),
                ("values", values),
                ("reference_logprobs", reference),
            ):
                experience.put(name, number, batch.scatter(flat))

    def forward(self, batch: TokenBatch, common: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Policy log-probabilities, entropies and values of the counted tokens, each (N,)."""
        hidden = self.policy.hidden(batch, common)
        logprobs, entropy = self.policy.logprobs_of(hidden, batch, self.config.temperature)
        if self.shares_pass:
            states = hidden if self.config.value_trains_trunk else hidden.detach()
        else:
            states = self.value.hidden(batch, common if self.value.model is self.policy.model else None)
        values = self.value.values_of(states, batch)
        return logprobs, entropy, values

    def shape(self, experience: Experience) -> Tensor:
        """r_t = -beta (log pi - log pi_ref), plus the normalised, clipped score (over its group) at the last real token."""
        scores = self.normalized([s.value for s in experience.scores])
        config = self.config
        penalties = [config.missing_stop_penalty * (not r.finished) for r in experience.rollouts]
        rewards = -self.kl_coefficient * kl_k1(experience.logprobs, experience.reference_logprobs)
        last = torch.tensor([len(r.response_ids) - 1 for r in experience.rollouts], device=rewards.device)
        final = torch.tensor([s - p for s, p in zip(scores, penalties, strict=True)], device=rewards.device)
        if config.group_baseline:
            groups = torch.arange(len(final), device=final.device) // config.samples_per_prompt
            final = final - leave_one_out(final, groups, experience.mask.any(-1))
        rewards[torch.arange(len(last), device=last.device), last] += final
        return torch.where(experience.mask, rewards, 0.0)

    def normalized(self, scores: Sequence[float | None]) -> list[float]:
        """Scores on the reference's scale. Step 0 samples from the reference itself, so its scores set that scale."""
        known = torch.tensor([s for s in scores if s is not None], dtype=torch.float64)
        if self.normalizer is None and len(known):
            spread = float(known.std(correction=0)) if len(known) > 1 else 0.0
            fits = self.config.normalize_scores and spread > 1e-6
            self.normalizer = (float(known.mean()), spread) if fits else (0.0, 1.0)
        mean, deviation = self.normalizer or (0.0, 1.0)
        limit = self.config.score_clip or float("inf")
        return [0.0 if s is None else max(-limit, min(limit, (s - mean) / deviation)) for s in scores]

    def update(self, experience: Experience, number: int) -> dict[str, float]:
        """Several epochs of clipped updates over the same rollouts."""

        def finish() -> Mapping[str, float]:
            metrics = self.learner.step()
            self.average.update()
            return metrics

        return clipped_epochs(experience, self.config, number, lambda *at: self._accumulate(experience, *at), finish)

    def _accumulate(self, experience: Experience, index: int, denominator: int) -> dict[str, float]:
        """Add one micro-batch's gradient: clipped surrogate + c_v value loss - c_e entropy."""
        batch, mask, config = experience.batches[index], experience.part("mask", index), self.config
        logprobs, entropy, values = (batch.scatter(flat) for flat in self.forward(batch, experience.common[index]))
        policy, diagnostics = ppo_clip_loss(
            logprobs,
            experience.part("logprobs", index),
            experience.part("advantages", index),
            mask,
            clip_range=config.clip_range,
            denominator=denominator,
        )
        critic, critic_clipped = value_loss(
            values,
            experience.part("values", index),
            experience.part("returns", index),
            mask,
            clip_range=config.value_clip_range,
            denominator=denominator,
        )
        bonus = entropy_bonus(entropy, mask, denominator=denominator)
        self.learner.backward(policy + config.value_coefficient * critic - config.entropy_coefficient * bonus)
        return {
            "policy/loss": float(policy.detach()),
            "value/loss": float(critic.detach()),
            "policy/clip_fraction": float(diagnostics.clip_fraction),
            "value/clip_fraction": float(critic_clipped),
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
        summary = train(self, prompts, run, on_step=on_step, progress=progress)
        return {**summary, "kl_coefficient": self.kl_coefficient}

    def state(self) -> dict[str, Any]:
        return {"kl_coefficient": self.kl_coefficient, "normalizer": self.normalizer}

    def load_state(self, values: Mapping[str, Any]) -> None:
        self.kl_coefficient = values["kl_coefficient"]
        self.normalizer = tuple(values["normalizer"]) if values["normalizer"] else None
