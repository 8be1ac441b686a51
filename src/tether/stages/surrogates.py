"""The terms of the loss of one micro-batch that every published policy gradient chooses from: its
surrogate and its KL.
"""

from __future__ import annotations

from torch import Tensor

from tether.algorithms import kl as divergences
from tether.algorithms import policy_losses as losses
from tether.settings.policy import PolicyConfig
from tether.stages.rollouts import Experience


def surrogate(
    config: PolicyConfig,
    logprobs: Tensor,
    experience: Experience,
    index: int,
    denominator: int,
) -> tuple[Tensor, losses.PolicyDiagnostics]:
    """The surrogate loss of micro-batch `index`, one call for every published surrogate of the
    expected reward.

    Shapes: `logprobs` are those of the present policy, (sequences, time).
    """
    old, advantages, mask = (
        experience.rows_of(name, index) for name in ("logprobs", "advantages", "mask")
    )
    weights = None
    high = config.clip_range_high
    if config.importance != "none":
        rollout = experience.rows_of("rollout_logprobs", index)
        cap = config.importance_cap
        weights = losses.importance_weights(
            old,
            rollout,
            mask,
            cap=cap,
            truncate=config.importance == "truncate",
        )
    if config.surrogate == "cispo":
        assert high is not None
        return losses.cispo_loss(
            logprobs,
            old,
            advantages,
            mask,
            clip_range_high=high,
            weights=weights,
            denominator=denominator,
        )
    clipped, diagnostics = losses.ppo_clip_loss(
        logprobs,
        old,
        advantages,
        mask,
        sequence_ratio=config.surrogate == "sequence",
        clip_range=config.clip_range,
        clip_range_high=high,
        dual_clip=config.dual_clip,
        weights=weights,
        denominator=denominator,
    )
    # at its one update the ratio is 1 and nothing is clipped: the diagnostics hold
    if config.surrogate == "reinforce":
        return losses.reinforce_loss(
            logprobs,
            advantages,
            mask,
            weights=weights,
            denominator=denominator,
        ), diagnostics
    return clipped, diagnostics


def kl_term(config: PolicyConfig, logprobs: Tensor, experience: Experience, index: int) -> Tensor:
    """KL(policy || reference) of every token of micro-batch `index`, as the loss takes it."""
    reference = experience.rows_of("reference_logprobs", index)
    match config.kl.estimator:
        case "k2":
            return divergences.kl_policy_reference_k2(logprobs, reference)
        case "k3":
            return divergences.kl_policy_reference_k3(logprobs, reference)
        case "k3_corrected":
            return divergences.kl_policy_reference_k3_corrected(
                logprobs,
                experience.rows_of("logprobs", index),
                reference,
            )
