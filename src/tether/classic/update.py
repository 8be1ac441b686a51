"""tether's policy-gradient step with what the classic one does otherwise, and its statistics under their classic names."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tether.algorithms.kl import kl_policy_reference_k1, kl_policy_reference_k2
from tether.algorithms.masked import masked_mean, masked_variance, whiten
from tether.classic.config import PPOConfig
from tether.data.batches import TokenBatch, make_batch
from tether.data.chat import ChatEncoder
from tether.models.trunk import Role
from tether.stages.experience import Experience
from tether.stages.policy_gradient import PolicyGradient


class ClassicStep(PolicyGradient):
    """`learn` alone is used: sampling and scoring are the caller's.

    Mini-batches are rows in the order given, not token budgets; a response may have tokens that are not the policy's; rewards may
    take another penalty than k1, and be whitened; a mini-batch whose mean ratio is beyond the threshold has no gradient.
    `passes` keeps what the update's forward passes measured.
    """

    def __init__(self, settings: PPOConfig, policy: Role, reference: Role, value: Role, encoder: ChatEncoder) -> None:
        absent: Any = None
        super().__init__(settings.policy_config(), policy, reference, value, absent, absent, encoder)
        self.settings = settings
        self.response_masks: Sequence[Tensor] = ()
        self.penalties = torch.zeros(0)
        self.passes: list[dict[str, Tensor]] = []

    def evaluate(self, experience: Experience) -> None:
        """See PolicyGradient.evaluate; before it the rows are cut and what is not the policy's own is masked."""
        size, count, device = self.settings.mini_batch, len(experience.rollouts), experience.mask.device
        sequences = [self.encoder.rollout(r.prompt_ids, r.response_ids) for r in experience.rollouts]
        cuts = [range(start, min(start + size, count)) for start in range(0, count, size)]
        experience.batches = [make_batch([sequences[i] for i in cut], self.encoder.pad_id).to(device) for cut in cuts]
        experience.rows = [torch.tensor(cut, device=device) for cut in cuts]
        parts = self.settings.gradient_accumulation_steps
        experience.minibatches = [[*range(start, min(start + parts, len(cuts)))] for start in range(0, len(cuts), parts)]
        for row, mask in enumerate(self.response_masks):
            experience.mask[row, : len(mask)] &= mask.to(device)
        super().evaluate(experience)
        self.penalties, self.passes = self._penalties(experience), []

    @torch.no_grad()
    def _penalties(self, experience: Experience) -> Tensor:
        """What the tether takes off every token's reward, before its coefficient; (sequences, time)."""
        k1 = kl_policy_reference_k1(experience.logprobs, experience.reference_logprobs)
        match self.settings.kl_penalty:
            case "kl":
                return k1
            case "abs":
                return k1.abs()
            case "mse":
                return kl_policy_reference_k2(experience.logprobs, experience.reference_logprobs)
        assert self.reference is not None
        whole = torch.zeros_like(k1)
        for number, batch in enumerate(experience.batches):
            ours, theirs = (
                (role.logits(role.hidden(batch)[batch.predict]).float() / self.config.temperature).log_softmax(-1)
                for role in (self.policy, self.reference)
            )
            whole[experience.rows[number], : batch.num_steps] = batch.scatter((ours.exp() * (ours - theirs)).sum(-1))
        return whole

    def shape(self, experience: Experience) -> Tensor:
        """See PolicyGradient.shape."""
        k1 = kl_policy_reference_k1(experience.logprobs, experience.reference_logprobs)
        rewards = super().shape(experience) + self.kl_coefficient * (k1 - self.penalties)
        rewards = torch.where(experience.mask, rewards, 0.0)
        return whiten(rewards, experience.mask, shift_mean=False) if self.settings.whiten_rewards else rewards

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
        index = next(i for i, known in enumerate(self.experience.batches) if known is batch)
        mask, old, returns = (self.experience.part(name, index) for name in ("mask", "logprobs", "returns"))
        new, predicted, spread = (batch.scatter(flat.detach())[mask] for flat in (logprobs, values, entropy))
        change = new - old[mask]
        found = {"policykl": -change, "approxkl": 0.5 * change.square(), "ratio": change.exp(), "entropy": spread}
        self.passes.append({**found, "vpred": predicted, "error": (predicted - returns[mask]).square()})
        if len(change) and found["ratio"].mean() > self.settings.ratio_threshold:
            warnings.warn(f"a mini-batch has a mean ratio of {found['ratio'].mean():.2f}; it is not learned from", stacklevel=2)
            logprobs, values = (flat.detach() + 0.0 * flat for flat in (logprobs, values))
        return logprobs, entropy, values


def classic_statistics(stage: ClassicStep, metrics: Mapping[str, float], scores: Sequence[float]) -> dict[str, Any]:
    """Numbers as floats, and what belongs to single tokens or responses as numpy arrays."""
    experience, mask, limit = stage.experience, stage.experience.mask, stage.config.score_clip or math.inf
    kl = kl_policy_reference_k1(experience.logprobs, experience.reference_logprobs) * mask
    known = torch.tensor([min(max(s, -limit), limit) for s in scores if math.isfinite(s)])
    passes = [row for row in stage.passes if len(row["ratio"])]
    seen = {name: float(sum(row[name].mean() for row in passes)) / len(passes) for name in (passes[0] if passes else ())}
    moments = {
        name: {"mean": masked_mean(matrix, mask), "var": masked_variance(matrix, mask)}
        for name, matrix in (("returns", experience.returns), ("val", experience.values))
    }
    stats: dict[str, Any] = {
        "objective/kl": metrics["kl/policy_reference_k1"],
        "objective/kl_dist": kl.sum(-1),
        "objective/logprobs": experience.logprobs,
        "objective/ref_logprobs": experience.reference_logprobs,
        "objective/kl_coef": metrics["kl/coefficient"],
        "objective/entropy": -(experience.logprobs * mask).sum(-1).mean(),
        "ppo/mean_non_score_reward": -metrics["kl/coefficient"] * masked_mean(stage.penalties, mask),
        "ppo/mean_scores": known.mean(),
        "ppo/std_scores": known.std(correction=min(1, len(known) - 1)),
        "ppo/loss/policy": metrics["policy/loss"],
        "ppo/loss/value": metrics["value/loss"],
        "ppo/loss/total": metrics["loss"],
        **{f"ppo/policy/{name}": seen.get(name, 0.0) for name in ("entropy", "approxkl", "policykl")},
        "ppo/policy/clipfrac": metrics["policy/clip_fraction"],
        "ppo/policy/advantages": experience.advantages[mask],
        "ppo/policy/advantages_mean": masked_mean(experience.advantages, mask),
        "ppo/policy/ratio": torch.cat([row["ratio"] for row in stage.passes]),
        **{f"ppo/val/{name}": seen.get(name, 0.0) for name in ("vpred", "error")},
        "ppo/val/clipfrac": metrics["value/clip_fraction"],
        **{f"ppo/{name}/{moment}": value for name, found in moments.items() for moment, value in found.items()},
        "ppo/val/var_explained": 1 - seen.get("error", 0.0) / moments["returns"]["var"].clamp(min=1e-12),
        "ppo/learning_rate": metrics["learning_rate"],
    }
    for name in ("queries", "responses"):
        lengths = torch.tensor([float(len(r.prompt_ids if name == "queries" else r.response_ids)) for r in experience.rollouts])
        stats |= {f"tokens/{name}_len_mean": lengths.mean(), f"tokens/{name}_dist": lengths[None].flatten()}
        stats[f"tokens/{name}_len_std"] = lengths.std(correction=min(1, len(lengths) - 1))
    return {k: (float(v) if v.dim() == 0 else v.cpu().numpy()) if isinstance(v, Tensor) else v for k, v in stats.items()}
