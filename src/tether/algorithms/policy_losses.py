"""Losses of the policy and of the value function.

Every loss is a sum over the tokens that count, divided by a denominator. The caller counts the
denominator over the whole optimizer step. So micro-batches, packing and data-parallel ranks add up
to the same gradient.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from tether.algorithms.kl import MAX_LOG_RATIO
from tether.algorithms.masked import (
    Denominator,
    Mask,
    Scalar,
    Values,
    check_same_shape,
    masked_mean,
    masked_sum,
)


class PolicyDiagnostics(NamedTuple):
    """Diagnostics of a step with a clipped policy loss; detached scalars.

    The first two add over micro-batches, like the loss. The ratios combine by max and min; they are
    −inf and +inf when nothing counts. ``approximate_kl`` estimates KL(old policy || policy) in
    nats. It uses k3 of every token's own ratio, for every kind of loss, because the tokens come
    from the old policy.
    """

    clip_fraction: Scalar
    approximate_kl: Scalar
    ratio_max: Scalar
    ratio_min: Scalar


def reinforce_loss(
    logprobs: Values,
    advantages: Values,
    mask: Mask,
    *,
    denominator: Denominator,
    weights: Values | None = None,
) -> Scalar:
    """Compute the loss whose gradient is the policy gradient itself, without ratio or clip.

    Equation: ``−Σ m · w · A log π / denominator``; w is 1 unless given.
    Paper: Williams 1992, https://doi.org/10.1007/BF00992696; its weights: `importance_weights`.
    Shapes: all alike, (batch, time) or packed; log-probabilities in nats. Gradient flows through
        ``logprobs``.
    Raises: ``ValueError`` when the shapes differ.
    Trap: right for tokens that this very policy drew. A second step on the same rollouts is off
    policy, without a correction.
    """
    check_same_shape(logprobs=logprobs, advantages=advantages, mask=mask)
    return (
        masked_sum(-_weighted(advantages, mask, weights) * torch.where(mask, logprobs, 0), mask)
        / denominator
    )


def ppo_clip_loss(
    logprobs: Values,
    old_logprobs: Values,
    advantages: Values,
    mask: Mask,
    *,
    clip_range: float,
    denominator: Denominator,
    clip_range_high: float | None = None,
    dual_clip: float | None = None,
    sequence_ratio: bool = False,
    weights: Values | None = None,
) -> tuple[Scalar, PolicyDiagnostics]:
    """Compute PPO's clipped surrogate loss, a pessimistic bound on the change in expected
    advantage.

    Equation: ``Σ m · w · max(−A ρ, −A clip(ρ, 1−ε, 1+ε_high)) / denominator`` with ``ρ =
    exp(logprobs − old_logprobs)``; ``ε_high = ε`` unless given. With ``dual_clip`` c the term of a
    negative advantage is at most ``−c A``. With ``sequence_ratio`` every token has its row's ``ρ =
    exp(mean_t (logprobs − old_logprobs))`` over the tokens that count.
    Paper: Schulman et al. 2017, https://arxiv.org/abs/1707.06347, eq. 7; the higher upper bound is
    DAPO's, Yu et al. 2025, https://arxiv.org/abs/2503.14476; the dual clip: Ye et al. 2020,
    https://arxiv.org/abs/1912.09729, eq. 4; a sequence's ratio: GSPO, Zheng et al. 2025,
    https://arxiv.org/abs/2507.18071, eq. 7; the weights: `importance_weights`.
    Shapes: all alike, (batch, time) or packed (with ``sequence_ratio`` rows are whole sequences);
    log-probabilities in nats. Gradient flows through ``logprobs`` only. The diagnostics are sums
    over the same denominator. If it counts tokens, they are means per token.
    Raises: ``ValueError`` when the shapes differ, a clip range is not positive, or ``dual_clip`` is
        not above 1.
    Trap: both log-probabilities must come from the same numerics and the same temperature.
    Otherwise the ratio of the first epoch is not 1, and clipping reacts to rounding. A sequence's
    ratio is a geometric mean: its clip ranges are a thousand times smaller (3e-4).
    """
    check_same_shape(logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages, mask=mask)
    clip_range_high = clip_range if clip_range_high is None else clip_range_high
    if not (clip_range > 0 and clip_range_high > 0):
        raise ValueError(f"clip_range must be positive, got {clip_range} and {clip_range_high}")
    if dual_clip is not None and not dual_clip > 1:
        raise ValueError(f"dual_clip must be above 1, got {dual_clip}")
    advantages = _weighted(advantages, mask, weights)
    log_ratio = _log_ratio(logprobs, old_logprobs, mask)
    ratio = (
        torch.where(mask, masked_mean(log_ratio, mask, -1)[..., None], 0)
        if sequence_ratio
        else log_ratio
    ).exp()
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1.0 - clip_range, 1.0 + clip_range_high)
    losses = torch.maximum(unclipped, clipped)
    if dual_clip is not None:
        losses = torch.where(advantages < 0, torch.minimum(losses, -advantages * dual_clip), losses)
    return losses.sum() / denominator, _diagnosed(
        ratio,
        log_ratio,
        losses != unclipped,
        mask,
        denominator,
    )


def cispo_loss(
    logprobs: Values,
    old_logprobs: Values,
    advantages: Values,
    mask: Mask,
    *,
    clip_range_high: float,
    denominator: Denominator,
    weights: Values | None = None,
) -> tuple[Scalar, PolicyDiagnostics]:
    """Compute the policy gradient with a truncated, detached ratio: no token loses its gradient, as
    it does under a clip.

    Equation: ``−Σ m · w · min(ρ, 1+ε_high) A log π / denominator``, ρ without gradient.
    Paper: MiniMax-M1 2025, https://arxiv.org/abs/2506.13585, eq. 4 and 5 (its lower bound is not
        used there either).
    Shapes: all alike, (batch, time) or packed. Gradient flows through ``logprobs`` only.
    Raises: ``ValueError`` when the shapes differ or ``clip_range_high`` is not positive.
    Trap: the loss's value means nothing (it is not a surrogate), only its gradient does.
    """
    check_same_shape(logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages, mask=mask)
    if not clip_range_high > 0:
        raise ValueError(f"clip_range_high must be positive, got {clip_range_high}")
    log_ratio = _log_ratio(logprobs.detach(), old_logprobs, mask)
    ratio = log_ratio.exp()
    kept = ratio.clamp(max=1.0 + clip_range_high)
    terms = -_weighted(advantages, mask, weights) * kept * torch.where(mask, logprobs, 0)
    return terms.sum() / denominator, _diagnosed(ratio, log_ratio, ratio > kept, mask, denominator)


@torch.no_grad()
def importance_weights(
    logprobs: Values,
    rollout_logprobs: Values,
    mask: Mask,
    *,
    cap: float,
    truncate: bool = True,
) -> Values:
    """Weigh tokens by the learner's probability relative to the engine that drew them. Numerics or
    weights of the two may differ.

    Equation: ``w = min(π_learner / π_engine, cap)``; without ``truncate`` w is the ratio inside
        [1/cap, cap] and 0 outside it.
    Paper: Yao et al. 2025, https://fengyao.notion.site/off-policy-rl (truncated); the masked
    variant is IcePop's, https://arxiv.org/abs/2510.18855.
    Shapes: all alike; log-probabilities of the same tokens at the same temperature, nats;
    ``logprobs`` those of the learner *before* the update. Masked-out positions come back 0. No
    gradient flows through.
    Raises: ``ValueError`` when the shapes differ or ``cap`` is below 1.
    Trap: this is not PPO's ratio. It corrects for the engine (other numerics, or older weights),
    not for the update's own steps, and multiplies that ratio.
    """
    check_same_shape(logprobs=logprobs, rollout_logprobs=rollout_logprobs, mask=mask)
    if not cap >= 1:
        raise ValueError(f"cap must be at least 1, got {cap}")
    ratio = _log_ratio(logprobs, rollout_logprobs, mask).exp()
    weights = (
        ratio.clamp(max=cap)
        if truncate
        else torch.where((ratio >= 1 / cap) & (ratio <= cap), ratio, 0)
    )
    return torch.where(mask, weights, 0)


def value_loss(
    values: Values,
    old_values: Values,
    returns: Values,
    mask: Mask,
    *,
    clip_range: float | None,
    denominator: Denominator,
) -> tuple[Scalar, Scalar]:
    """Compute the squared error of the value function, clipped around the values it had when the
    rollout was scored.

    Equation: ``½ Σ m · max((V − R)², (clip(V, V_old − ε, V_old + ε) − R)²) / denominator``; without
    ``clip_range`` only the first of the two.
    Paper: Schulman et al. 2016, https://arxiv.org/abs/1506.02438; the clip as in
        openai/lm-human-preferences.
    Shapes: all alike; values in units of the reward, the loss in their square. Gradient flows
    through ``values`` only. The second result is the number of tokens whose loss is the clipped
    one, over the denominator; detached.
    Raises: ``ValueError`` when the shapes differ or ``clip_range`` is not positive.
    Trap: ``clip_range`` is in units of the reward, not a ratio: 0.2 stops learning when returns are
        in the tens.
    """
    check_same_shape(values=values, old_values=old_values, returns=returns, mask=mask)
    if clip_range is not None and not clip_range > 0:
        raise ValueError(f"clip_range must be positive or None, got {clip_range}")
    values, old_values, returns = (
        torch.where(mask, tensor, 0) for tensor in (values, old_values.detach(), returns.detach())
    )
    unclipped = (values - returns).square()
    if clip_range is None:
        return 0.5 * unclipped.sum() / denominator, torch.zeros_like(unclipped.sum()).detach()
    # Clamping the value itself, not its difference, leaves it bit-equal inside the range: rounding
    # is not counted as clipping.
    clipped = (values.clamp(old_values - clip_range, old_values + clip_range) - returns).square()
    clip_fraction = (clipped > unclipped).to(unclipped.dtype).sum() / denominator
    return 0.5 * torch.maximum(unclipped, clipped).sum() / denominator, clip_fraction


def entropy_bonus(entropy: Values, mask: Mask, *, denominator: Denominator) -> Scalar:
    """Sum the policy's entropy over the tokens that count, to be *subtracted* from the loss with a
    coefficient.

    Equation: ``Σ m · H / denominator``.
    Paper: Mnih et al. 2016, https://arxiv.org/abs/1602.01783.
    Shapes: any, alike; nats per token.
    Raises: ``ValueError`` when the shapes differ.
    Trap: the sign. This is the bonus, not a loss; adding it makes the policy collapse faster.
    """
    return masked_sum(entropy, mask) / denominator


def _weighted(advantages: Tensor, mask: Tensor, weights: Tensor | None) -> Tensor:
    check_same_shape(advantages=advantages, weights=weights)
    return torch.where(mask, (advantages if weights is None else advantages * weights).detach(), 0)


def _log_ratio(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> Tensor:
    """Above the bound the ratio would overflow to inf, and an unselected branch would send 0 * inf
    = NaN backwards.
    """
    return torch.where(mask, logprobs - old_logprobs.detach(), 0).clamp(max=MAX_LOG_RATIO)


@torch.no_grad()
def _diagnosed(
    ratio: Tensor,
    log_ratio: Tensor,
    clipped: Tensor,
    mask: Tensor,
    denominator: Denominator,
) -> PolicyDiagnostics:
    return PolicyDiagnostics(
        clip_fraction=(clipped & mask).to(ratio.dtype).sum() / denominator,
        approximate_kl=(torch.expm1(log_ratio) - log_ratio).sum() / denominator,
        ratio_max=ratio.masked_fill(~mask, -torch.inf).amax(),
        ratio_min=ratio.masked_fill(~mask, torch.inf).amin(),
    )
