"""Proximal policy optimisation against a reward source, tethered to a frozen reference.

Schulman et al. 2017 (https://arxiv.org/abs/1707.06347) as Ziegler et al. 2019 (https://arxiv.org/abs/1909.08593) brought
it to language models: the reward of token t is -beta (log pi - log pi_ref), and the score once at the last real token.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from tether.algorithms.advantages import gae, leave_one_out
from tether.algorithms.kl import adapt_kl_coefficient, kl_k1
from tether.algorithms.masked import whiten
from tether.algorithms.policy_losses import entropy_bonus, ppo_clip_loss, value_loss
from tether.core.config import Config
from tether.core.errors import DataError, TrainingError
from tether.core.protocols import Engine, RewardSource
from tether.core.rundir import RunDirectory
from tether.core.types import Prompt, Rollout, Sampling, Score
from tether.data.batches import TokenBatch
from tether.data.chat import ChatEncoder
from tether.learner.checkpoint import load_latest, prefixed, save_checkpoint, unprefixed
from tether.learner.config import OptimizerConfig
from tether.learner.local import LocalLearner
from tether.learner.loop import epoch_order
from tether.models.trunk import Role
from tether.stages.experience import Clock, Experience, describe, gather


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


class PPOConfig(Config):
    """Settings of the stage; lengths are in tokens."""

    steps: int = Field(default=100, ge=1)
    prompts_per_step: int = Field(default=64, ge=1)
    samples_per_prompt: int = Field(default=1, ge=1)
    group_baseline: bool = Field(
        default=False, description="take the mean score of the prompt's other samples off each score; the critic learns the rest"
    )
    max_new_tokens: int = Field(default=64, ge=1)
    temperature: float = Field(default=1.0, gt=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    epochs: int = Field(default=4, ge=1)
    minibatches: int = Field(default=1, ge=1, description="optimizer steps an epoch")
    micro_batch_tokens: int = Field(default=2048, ge=8, description="padded size of a micro-batch")
    gamma: float = Field(default=1.0, gt=0, le=1)
    lam: float = Field(default=0.95, ge=0, le=1)
    clip_range: float = Field(default=0.2, gt=0)
    value_clip_range: float | None = Field(default=0.2, gt=0)
    value_coefficient: float = Field(default=0.5, ge=0)
    value_trains_trunk: bool = Field(
        default=False, description="let the value loss change the policy's own weights where both share one pass"
    )
    entropy_coefficient: float = Field(default=0.0, ge=0)
    target_kl: float | None = Field(None, gt=0, description="KL(old || new) a token that ends the epochs")
    whiten_advantages: bool = True
    normalize_scores: bool = Field(
        True, description="shift and scale scores to mean 0, deviation 1 on the reference's own samples"
    )
    score_clip: float | None = Field(
        default=None, gt=0, description="scores are clipped to plus or minus this, after normalisation"
    )
    missing_stop_penalty: float = Field(
        default=0.0, ge=0, description="taken off the score of a response that did not end in time"
    )
    ema_decay: float | None = Field(default=None, gt=0, lt=1, description="keep an average of the policy and end with it")
    kl: KLConfig = KLConfig()
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=1e-5, schedule="linear", final_fraction=0.0)
    evaluate_every: int = Field(default=0, ge=0)
    checkpoint_every: int = Field(default=5, ge=1)
    sample_rows: int = Field(default=4, ge=0, description="texts kept from every step")
    seed: int = 0

    @model_validator(mode="after")
    def _check(self) -> PPOConfig:
        if self.top_p < 1.0:
            raise ValueError(
                "ppo.top_p < 1 samples from a distribution whose log-probabilities the update does not have "
                "(its ratios would be of another policy). Train with top_p = 1; use ppo.temperature to sharpen, "
                "and top_p when generating afterwards"
            )
        if self.group_baseline and self.samples_per_prompt < 2:
            raise ValueError("ppo.group_baseline needs other samples of the same prompt: set ppo.samples_per_prompt to 2 or more")
        return self

    @property
    def sampling(self) -> Sampling:
        return Sampling(max_new_tokens=self.max_new_tokens, temperature=self.temperature)


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
        self.ema: list[Tensor] | None = None
        trained = policy.parameters() + (list(value.head.parameters()) if self.shares_pass and value.head else value.parameters())
        self.learner = LocalLearner(trained, config.optimizer, config.steps * config.epochs * config.minibatches)
        for role in (policy, reference, value):
            role.train_mode(False)

    def step(self, prompts: Sequence[Prompt], number: int) -> tuple[dict[str, float], list[Rollout], list[Score]]:
        """One step of the algorithm; returns its metrics, rollouts and proxy scores."""
        clock, config = Clock(), self.config
        ordinals = range(number * config.prompts_per_step, number * config.prompts_per_step + len(prompts))
        groups = self.engine.generate(
            prompts, config.sampling, num_samples=config.samples_per_prompt, seed=config.seed, ordinals=ordinals
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
        metrics = describe(experience, [s.value for s in scores], self.kl_coefficient)
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
                matrix = getattr(experience, name)
                matrix[experience.rows[number], : batch.num_steps] = batch.scatter(flat)

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
        """Several epochs of clipped updates over the same rollouts; micro-batches keep their composition, not their order."""
        totals: dict[str, float] = {}
        counts, minibatch_count, first_deviation = experience.token_counts(), 0, 0.0
        ratio_max, ratio_min, metrics = 1.0, 1.0, {}
        for epoch in range(self.config.epochs):
            order = epoch_order(len(experience.batches), self.config.seed + number, epoch)
            epoch_kl = 0.0
            for cut in _split(order, self.config.minibatches):
                denominator = max(1, sum(counts[i] for i in cut))
                for index in cut:
                    stats = self._accumulate(experience, index, denominator)
                    ratio_max, ratio_min = max(ratio_max, stats["ratio_max"]), min(ratio_min, stats["ratio_min"])
                    if minibatch_count == 0:
                        first_deviation = max(first_deviation, stats["ratio_max"] - 1, 1 - stats["ratio_min"])
                    epoch_kl += stats["policy/approximate_kl"] * denominator / max(1, sum(counts))
                    for key in stats.keys() - {"ratio_max", "ratio_min"}:
                        totals[key] = totals.get(key, 0.0) + stats[key]
                metrics = self.learner.step()
                self._average()
                minibatch_count += 1
            if self.config.target_kl is not None and epoch_kl > self.config.target_kl:
                break
        if first_deviation > 0.2:
            raise TrainingError(
                f"before any update the ratio is off by {first_deviation:.3f}: old and new log-probabilities disagree"
            )
        return {
            **{key: value / minibatch_count for key, value in totals.items()},
            **metrics,
            "policy/ratio_max": ratio_max,
            "policy/ratio_min": ratio_min,
            "policy/first_ratio_deviation": first_deviation,
            "policy/epochs": epoch + 1,
        }

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

    @torch.no_grad()
    def _average(self) -> None:
        decay = self.config.ema_decay
        if decay is None:
            return
        if self.ema is None:
            self.ema = [m.detach().clone() for m in self.learner.masters]
        for average, master in zip(self.ema, self.learner.masters, strict=True):
            average.lerp_(master, 1 - decay)

    def train(
        self,
        prompts: Sequence[Prompt],
        run: RunDirectory,
        *,
        on_step: Callable[[int, dict[str, float]], dict[str, float]] | None = None,
        progress: Callable[[int, int, Any], None] | None = None,
    ) -> dict[str, Any]:
        """Train, or go on training, in `run`. `on_step` may add metrics (gold scores, alarms) before they are logged."""
        if not prompts:
            raise DataError("ppo needs at least one prompt")
        config, start = self.config, time.perf_counter()
        first = self._resume(run)
        for number in range(first, config.steps):
            metrics, rollouts, scores = self.step(self.prompts_of(prompts, number), number)
            if on_step is not None:
                metrics.update(on_step(number + 1, metrics))
            run.log(metrics, number + 1)
            run.sample(
                {"step": number + 1, "prompt": r.prompt.text, "response": r.text, "proxy": s.value, "stop": r.stop_reason.value}
                for r, s in list(zip(rollouts, scores, strict=True))[: config.sample_rows]
            )
            if (number + 1) % config.checkpoint_every == 0 or number + 1 == config.steps:
                self._save(run, number + 1)
            if progress:
                progress(number + 1, config.steps, metrics)
        self._end_with_average()
        return {**_summary(run.metrics()), "kl_coefficient": self.kl_coefficient, "seconds": time.perf_counter() - start}

    def prompts_of(self, prompts: Sequence[Prompt], number: int) -> list[Prompt]:
        """The prompts of a step: epochs of deterministic order, one after another."""
        size, count = self.config.prompts_per_step, len(prompts)
        places = range(number * size, (number + 1) * size)
        orders = {epoch: epoch_order(count, self.config.seed, epoch) for epoch in {p // count for p in places}}
        return [prompts[orders[p // count][p % count]] for p in places]

    def _end_with_average(self) -> None:
        if self.ema is not None:
            with torch.no_grad():
                for parameter, average in zip(self.learner.parameters, self.ema, strict=True):
                    parameter.copy_(average)

    def _save(self, run: RunDirectory, number: int) -> None:
        tensors, values = self.learner.state()
        average = prefixed("ema", {str(i): t for i, t in enumerate(self.ema or [])})
        state = {**values, "kl_coefficient": self.kl_coefficient, "normalizer": self.normalizer}
        save_checkpoint(run.path / "checkpoints", number, {**tensors, **average}, state)

    def _resume(self, run: RunDirectory) -> int:
        found = load_latest(run.path / "checkpoints")
        if found is None:
            run.truncate(0)
            return 0
        tensors, values = found
        self.learner.load_state(tensors, values)
        average = unprefixed("ema", tensors)
        self.ema = [average[str(i)].clone() for i in range(len(average))] or None
        self.kl_coefficient = values["kl_coefficient"]
        self.normalizer = tuple(values["normalizer"]) if values["normalizer"] else None
        self.engine.update_weights(values["step"])
        run.truncate(values["step"])
        return values["step"]


def _split(order: list[int], parts: int) -> list[list[int]]:
    """Nearly equal, never empty, in order."""
    parts = min(parts, len(order))
    return [order[len(order) * k // parts : len(order) * (k + 1) // parts] for k in range(parts)]


def _summary(history: list[dict[str, Any]]) -> dict[str, Any]:
    """First and last proxy score and KL (the last ones averaged over up to five steps), and what must stay zero."""
    recent = history[-max(1, min(5, len(history) // 2)) :]

    def mean(rows: list[dict[str, Any]], key: str) -> float | None:
        known = [row[key] for row in rows if row[key] is not None]
        return sum(known) / len(known) if known else None

    return {
        "steps": len(history),
        "proxy_first": mean(history[:1], "reward/proxy"),
        "proxy_last": mean(recent, "reward/proxy"),
        "kl": mean(recent, "kl/policy_reference_k1"),
        "first_ratio_deviation": max(row["policy/first_ratio_deviation"] for row in history),
        "failed_rewards": sum(row["reward/failed"] for row in history),
    }
