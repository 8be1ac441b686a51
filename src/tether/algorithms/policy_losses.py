"""Losses of the policy and of the value function.

Every loss is a sum over the tokens that count, divided by a denominator the caller counted over the whole optimizer
step: then micro-batches, packing and data-parallel ranks add up to the same gradient.
"""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tether.algorithms.kl import MAX_LOG_RATIO
from tether.algorithms.masked import Denominator, check_same_shape, masked_sum


class PolicyDiagnostics(NamedTuple):
    """What a clipped policy loss tells about the step; detached scalars.

    The first two add over micro-batches, like the loss. The ratios combine by max and min; they are −inf and +inf when
    nothing counts. ``approximate_kl`` estimates KL(old policy || policy), in nats, by k3: the tokens come from the old policy.
    """

    clip_fraction: Float[Tensor, ""]
    approximate_kl: Float[Tensor, ""]
    ratio_max: Float[Tensor, ""]
    ratio_min: Float[Tensor, ""]


def ppo_clip_loss(
    logprobs: Float[Tensor, "*shape"],
    old_logprobs: Float[Tensor, "*shape"],
    advantages: Float[Tensor, "*shape"],
    mask: Bool[Tensor, "*shape"],
    *,
    clip_range: float,
    denominator: Denominator,
    clip_range_high: float | None = None,
) -> tuple[Float[Tensor, ""], PolicyDiagnostics]:
    """Compute PPO's clipped surrogate loss, a pessimistic bound on the change in expected advantage.

    Equation: ``Σ m · max(−A ρ, −A clip(ρ, 1−ε, 1+ε_high)) / denominator`` with ``ρ = exp(logprobs − old_logprobs)``;
    ``ε_high = ε`` unless given.
    Paper: Schulman et al. 2017, https://arxiv.org/abs/1707.06347, eq. 7; the higher upper bound is DAPO's, Yu et al. 2025,
    https://arxiv.org/abs/2503.14476.
    Shapes: all alike, (batch, time) or packed; log-probabilities in nats. Gradient flows through ``logprobs`` only. The
    diagnostics are sums over the same denominator, so that they are means per token when that counts tokens.
    Raises: ``ValueError`` when the shapes differ or a clip range is not positive.
    Trap: both log-probabilities must come from the same numerics and the same temperature; otherwise the ratio of the first
    epoch is not 1, and clipping answers to rounding.
    """
    check_same_shape(logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages, mask=mask)
    clip_range_high = clip_range if clip_range_high is None else clip_range_high
    if not (clip_range > 0 and clip_range_high > 0):
        raise ValueError(f"clip_range must be positive, got {clip_range} and {clip_range_high}")
    advantages = torch.where(mask, advantages.detach(), 0)
    # Above the bound the ratio would overflow to inf, and its unselected branch would send 0 * inf = NaN backwards.
    log_ratio = torch.where(mask, logprobs - old_logprobs.detach(), 0).clamp(max=MAX_LOG_RATIO)
    ratio = log_ratio.exp()
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1.0 - clip_range, 1.0 + clip_range_high)
    loss = torch.maximum(unclipped, clipped).sum() / denominator
    with torch.no_grad():
        diagnostics = PolicyDiagnostics(
            clip_fraction=(clipped > unclipped).to(loss.dtype).sum() / denominator,
            approximate_kl=(torch.expm1(log_ratio) - log_ratio).sum() / denominator,
            ratio_max=ratio.detach().masked_fill(~mask, -torch.inf).amax(),
            ratio_min=ratio.detach().masked_fill(~mask, torch.inf).amin(),
        )
    return loss, diagnostics


def value_loss(
    values: Float[Tensor, "*shape"],
    old_values: Float[Tensor, "*shape"],
    returns: Float[Tensor, "*shape"],
    mask: Bool[Tensor, "*shape"],
    *,
    clip_range: float | None,
    denominator: Denominator,
) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
    """Compute the squared error of the value function, clipped around the values it had when the rollout was scored.

    Equation: ``½ Σ m · max((V − R)², (clip(V, V_old − ε, V_old + ε) − R)²) / denominator``; without ``clip_range`` only the
    first of the two.
    Paper: Schulman et al. 2016, https://arxiv.org/abs/1506.02438; the clip as in openai/lm-human-preferences.
    Shapes: all alike; values in units of the reward, the loss in their square. Gradient flows through ``values`` only. The
    second result is the number of tokens whose loss is the clipped one, over the denominator; detached.
    Raises: ``ValueError`` when the shapes differ or ``clip_range`` is not positive.
    Trap: ``clip_range`` is in units of the reward, not a ratio: 0.2 stops learning when returns are in the tens.
    """
    check_same_shape(values=values, old_values=old_values, returns=returns, mask=mask)
    if clip_range is not None and not clip_range > 0:
        raise ValueError(f"clip_range must be positive or None, got {clip_range}")
    values, old_values, returns = (torch.where(mask, tensor, 0) for tensor in (values, old_values.detach(), returns.detach()))
    unclipped = (values - returns).square()
    if clip_range is None:
        return 0.5 * unclipped.sum() / denominator, torch.zeros_like(unclipped.sum()).detach()
    # Clamping the value itself, not its difference, leaves it bit-equal inside the range: rounding is not counted as clipping.
    clipped = (values.clamp(old_values - clip_range, old_values + clip_range) - returns).square()
    clip_fraction = (clipped > unclipped).to(unclipped.dtype).sum() / denominator
    return 0.5 * torch.maximum(unclipped, clipped).sum() / denominator, clip_fraction


def entropy_bonus(
    entropy: Float[Tensor, "*shape"], mask: Bool[Tensor, "*shape"], *, denominator: Denominator
) -> Float[Tensor, ""]:
    """Sum the policy's entropy over the tokens that count, to be *subtracted* from the loss with a coefficient.

    Equation: ``Σ m · H / denominator``.
    Paper: Mnih et al. 2016, https://arxiv.org/abs/1602.01783.
    Shapes: any, alike; nats per token.
    Raises: ``ValueError`` when the shapes differ.
    Trap: the sign. This is the bonus, not a loss; adding it makes the policy collapse faster.
    """
    return masked_sum(entropy, mask) / denominator
