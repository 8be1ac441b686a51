"""tether's policy-gradient step with what the classic one does otherwise, and its statistics under their classic names."""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tether.algorithms.kl import kl_policy_reference_k1, kl_policy_reference_k2
from tether.algorithms.masked import masked_mean, masked_variance, whiten
from tether.classic.config import PPOConfig
from tether.core.types import Json, Rollout, Score
from tether.data.batches import TokenBatch
from tether.data.chat import ChatEncoder
from tether.models.trunk import Role
from tether.stages.policy_gradient import PolicyGradient
from tether.stages.rollouts import Experience, gather


class ClassicStep(PolicyGradient):
    """`learn` alone is used: sampling and scoring are the caller's.

    Mini-batches are rows in the order given, not token budgets; a response may have tokens that are not the policy's; rewards may
    take another penalty than k1, and be whitened; a mini-batch whose mean ratio is beyond the threshold has no gradient.
    `passes` keeps the measurements of the update's forward passes, `penalties` the KL of every token, (sequences, time).
    """

    def __init__(self, settings: PPOConfig, policy: Role, reference: Role, value: Role, encoder: ChatEncoder) -> None:
        absent: Any = None
        super().__init__(settings.policy_config(), policy, reference, value, absent, absent, encoder)
        self.settings, self.penalties = settings, torch.zeros(0)
        self.response_masks: Sequence[Tensor] = ()
        self.passes: list[dict[str, Tensor]] = []

    def gather(self, rollouts: Sequence[Rollout], scores: Sequence[Score], number: int) -> Experience:
        """See PolicyGradient.gather; a micro-batch is a mini-batch of rows, whose tokens are masked where they are others'."""
        size, parts, count = self.settings.mini_batch, self.settings.gradient_accumulation_steps, len(rollouts)
        cuts = [range(start, min(start + size, count)) for start in range(0, count, size)]
        experience = gather(rollouts, scores, self.encoder, sys.maxsize, self.policy.device, minibatches=cuts)
        experience.minibatches = [[*range(start, min(start + parts, len(cuts)))] for start in range(0, len(cuts), parts)]
        for row, mask in enumerate(self.response_masks):
            experience.mask[row, : len(mask)] &= mask.to(experience.mask.device)
        self.passes = []
        return experience

    def shape(self, experience: Experience) -> Tensor:
        """See PolicyGradient.shape."""
        k1 = kl_policy_reference_k1(experience.logprobs, experience.reference_logprobs)
        self.penalties = self._penalties(experience, k1)
        rewards = super().shape(experience) + self.kl_coefficient * (k1 - self.penalties)
        rewards = torch.where(experience.mask, rewards, 0.0)
        return whiten(rewards, experience.mask, shift_mean=False) if self.settings.whiten_rewards else rewards

    @torch.no_grad()
    def _penalties(self, experience: Experience, k1: Tensor) -> Tensor:
        """The KL that is taken off every token's reward, before its coefficient."""
        if self.settings.kl_penalty != "full":
            k2 = kl_policy_reference_k2(experience.logprobs, experience.reference_logprobs)
            return {"kl": k1, "abs": k1.abs(), "mse": k2}[self.settings.kl_penalty]
        assert self.reference is not None
        whole, temperature = torch.zeros_like(k1), self.config.temperature
        for number, batch in enumerate(experience.batches):
            logits = [role.logits(role.hidden(batch)[batch.predict]).float() for role in (self.policy, self.reference)]
            ours, theirs = ((each / temperature).log_softmax(-1) for each in logits)
            whole[experience.rows[number], : batch.num_steps] = batch.scatter((ours.exp() * (ours - theirs)).sum(-1))
        return whole

    def advantages(self, experience: Experience) -> tuple[Tensor, Tensor]:
        """See PolicyGradient.advantages; over the policy's own tokens, as if the others between them were not there."""
        order = experience.mask.int().argsort(dim=-1, descending=True, stable=True)
        own = {name: getattr(experience, name).gather(-1, order) for name in ("mask", "rewards", "values")}
        advantages, returns = super().advantages(replace(experience, **own))
        back = order.argsort(dim=-1)
        return advantages.gather(-1, back), returns.gather(-1, back)

    def forward(self, batch: TokenBatch, common: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor | None]:
        """See PolicyGradient.forward; a pass of the update is measured, and cut off where its ratios have exploded."""
        logprobs, entropy, values = super().forward(batch, common)
        if values is None or not torch.is_grad_enabled():
            return logprobs, entropy, values
        index = next(i for i, own in enumerate(self.experience.batches) if own is batch)
        mask, old, returns = (self.experience.part(name, index) for name in ("mask", "logprobs", "returns"))
        new, predicted, spread = (batch.scatter(flat.detach())[mask] for flat in (logprobs, values, entropy))
        change = new - old[mask]
        ratio, error = change.exp(), (predicted - returns[mask]).square()
        policy = {"policykl": -change, "approxkl": 0.5 * change.square(), "ratio": ratio, "entropy": spread}
        self.passes.append({**policy, "vpred": predicted, "error": error})
        if len(ratio) and ratio.mean() > self.settings.ratio_threshold:
            warnings.warn(f"a mini-batch has a mean ratio of {ratio.mean():.2f}; it is not learned from", stacklevel=2)
            logprobs, values = (flat.detach() + 0.0 * flat for flat in (logprobs, values))
        return logprobs, entropy, values


RENAMED = {
    "objective/kl": "kl/policy_reference_k1",
    "objective/kl_coef": "kl/coefficient",
    "ppo/loss/policy": "policy/loss",
    "ppo/loss/value": "value/loss",
    "ppo/loss/total": "loss",
    "ppo/policy/clipfrac": "policy/clip_fraction",
    "ppo/val/clipfrac": "value/clip_fraction",
    "ppo/val/mean": "value/mean",
    "ppo/learning_rate": "learning_rate",
}
"""Classic statistics that are metrics of tether's own."""


def classic_statistics(stage: ClassicStep, metrics: Mapping[str, float], scores: Sequence[float]) -> Json:
    """Numbers as floats, and what belongs to single tokens or responses as numpy arrays."""
    experience, mask, limit = stage.experience, stage.experience.mask, stage.config.score_clip or math.inf
    kl = kl_policy_reference_k1(experience.logprobs, experience.reference_logprobs) * mask
    clipped = torch.tensor([min(max(s, -limit), limit) for s in scores if math.isfinite(s)])
    passes = [row for row in stage.passes if len(row["ratio"])]
    means = {name: torch.stack([row[name].mean() for row in passes]).mean() for name in (passes[0] if passes else ())}
    variance = masked_variance(experience.returns, mask)
    stats: Json = {
        **{name: metrics[own] for name, own in RENAMED.items()},
        "objective/kl_dist": kl.sum(-1),
        "objective/logprobs": experience.logprobs,
        "objective/ref_logprobs": experience.reference_logprobs,
        "objective/entropy": -(experience.logprobs * mask).sum(-1).mean(),
        "ppo/mean_non_score_reward": -metrics["kl/coefficient"] * masked_mean(stage.penalties, mask),
        "ppo/mean_scores": clipped.mean(),
        "ppo/std_scores": deviation(clipped),
        **{f"ppo/policy/{name}": means.get(name, 0.0) for name in ("entropy", "approxkl", "policykl")},
        "ppo/policy/advantages": experience.advantages[mask],
        "ppo/policy/advantages_mean": masked_mean(experience.advantages, mask),
        "ppo/policy/ratio": torch.cat([row["ratio"] for row in stage.passes]),
        **{f"ppo/val/{name}": means.get(name, 0.0) for name in ("vpred", "error")},
        "ppo/val/var": masked_variance(experience.values, mask),
        "ppo/val/var_explained": 1 - means.get("error", 0.0) / variance.clamp(min=1e-12),
        "ppo/returns/mean": masked_mean(experience.returns, mask),
        "ppo/returns/var": variance,
    }
    for name, side in {"queries": "prompt_ids", "responses": "response_ids"}.items():
        lengths = torch.tensor([float(len(getattr(rollout, side))) for rollout in experience.rollouts])
        stats |= {f"tokens/{name}_len_mean": lengths.mean(), f"tokens/{name}_len_std": deviation(lengths)}
        stats[f"tokens/{name}_dist"] = lengths
    return {k: (float(v) if v.dim() == 0 else v.cpu().numpy()) if isinstance(v, Tensor) else v for k, v in stats.items()}


def deviation(values: Tensor) -> Tensor:
    """The standard deviation of a sample; 0 of a single value."""
    return values.std(correction=min(1, len(values) - 1))
