"""What a policy-gradient step descends: one call for every published surrogate and every KL term."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tether.algorithms.kl import kl_policy_reference_k2, kl_policy_reference_k3, kl_policy_reference_k3_corrected
from tether.algorithms.policy_losses import PolicyDiagnostics, cispo_loss, importance_weights, ppo_clip_loss, reinforce_loss
from tether.stages.experience import Experience
from tether.stages.policy_config import PolicyConfig


def surrogate(
    config: PolicyConfig, logprobs: Tensor, experience: Experience, index: int, denominator: int
) -> tuple[Tensor, PolicyDiagnostics]:
    """What stands for the expected reward, over micro-batch `index`; logprobs: its (sequences, time) under the present policy."""
    old, mask = experience.part("logprobs", index), experience.part("mask", index)
    advantages, weights, high = experience.part("advantages", index), None, config.clip_range_high
    if config.importance != "none":
        rollout, cap = experience.part("rollout_logprobs", index), config.importance_cap
        weights = importance_weights(old, rollout, mask, cap=cap, truncate=config.importance == "truncate")
    common: dict[str, Any] = {"denominator": denominator, "weights": weights}
    if config.surrogate == "cispo":
        assert high is not None
        return cispo_loss(logprobs, old, advantages, mask, clip_range_high=high, **common)
    clipped, diagnostics = ppo_clip_loss(
        logprobs,
        old,
        advantages,
        mask,
        clip_range=config.clip_range,
        clip_range_high=high,
        dual_clip=config.dual_clip,
        sequence_ratio=config.surrogate == "sequence",
        **common,
    )
    if config.surrogate == "reinforce":  # at its one update the ratio is 1 and nothing is clipped: the diagnostics hold
        return reinforce_loss(logprobs, advantages, mask, **common), diagnostics
    return clipped, diagnostics


def kl_term(estimator: str, logprobs: Tensor, experience: Experience, index: int) -> Tensor:
    """KL(policy || reference) of every token of micro-batch `index`, as the loss takes it."""
    reference = experience.part("reference_logprobs", index)
    match estimator:
        case "k2":
            return kl_policy_reference_k2(logprobs, reference)
        case "k3":
            return kl_policy_reference_k3(logprobs, reference)
    return kl_policy_reference_k3_corrected(logprobs, experience.part("logprobs", index), reference)
