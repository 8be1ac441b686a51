"""Estimates of the KL divergence from samples, the controller of its coefficient, and the KL of
best-of-n.

Everything here estimates KL(policy || reference) for tokens sampled from the policy. With ``r =
π_ref / π``: k1 = −log r, k2 = ½ log² r, k3 = r − 1 − log r (Schulman,
http://joschu.net/blog/kl-approx.html). ρ k3 is k3 times the differentiable ratio ``ρ = π / π_old``
to the policy that drew the tokens.

An estimator with the right value may have the wrong gradient, because the samples depend on the
policy too. The expected value and the expected gradient of each:

- k1: KL(policy || reference); 0. Use k1 in the reward.
- k2: close to KL for small KL; ∇ KL(policy || reference). Use k2 as a loss.
- k3: KL(policy || reference); ∇ KL(reference || policy). Use k3 in reports.
- ρ k3: KL(policy || reference); ∇ KL(policy || reference). Use ρ k3 as a loss.
"""

import math

import torch

from tether.algorithms.masked import Values, check_same_shape

MAX_LOG_RATIO = 20.0
"""exp(20) is 5e8: already past anything meaningful, and far from the float32 overflow at
exp(88).
"""

MAX_KL_ERROR = 0.2


def kl_policy_reference_k1(logprobs: Values, reference_logprobs: Values) -> Values:
    """Estimate KL(policy || reference) per token by the log ratio: unbiased, of high variance,
    negative at times.

    Equation: ``k1 = log π − log π_ref``.
    Paper: Ziegler et al. 2019, https://arxiv.org/abs/1909.08593 (the penalty inside the reward).
    Shapes: any, kept; nats per token.
    Raises: ``ValueError`` when the shapes differ.
    Trap: not a loss. Its expected gradient is zero, so differentiating it only adds noise.
    """
    check_same_shape(logprobs=logprobs, reference_logprobs=reference_logprobs)
    return logprobs - reference_logprobs


def kl_policy_reference_k2(logprobs: Values, reference_logprobs: Values) -> Values:
    """Estimate KL(policy || reference) per token by half the squared log ratio: biased in value,
    right in gradient.

    Equation: ``k2 = ½ (log π − log π_ref)²``.
    Paper: Schulman 2020, http://joschu.net/blog/kl-approx.html; as a loss:
        https://arxiv.org/abs/2510.01555.
    Shapes: any, kept; nats per token.
    Raises: ``ValueError`` when the shapes differ.
    Trap: this is the estimator to differentiate: per state, E ∇k2 = ∇ KL(policy || reference). Its
    value is off when the two policies are far apart. Mask the log-probabilities, not the result, if
    padding may hold infinities: a zero gradient times an infinite difference is NaN.
    """
    return 0.5 * kl_policy_reference_k1(logprobs, reference_logprobs).square()


def kl_policy_reference_k3(logprobs: Values, reference_logprobs: Values) -> Values:
    """Estimate KL(policy || reference) per token without bias and with low variance. The estimate
    is at least zero.

    Equation: ``k3 = r − 1 − log r`` with ``log r = min(log π_ref − log π, 20)``, which guards exp
        against overflow.
    Paper: Schulman 2020, http://joschu.net/blog/kl-approx.html; as GRPO's penalty:
        https://arxiv.org/abs/2402.03300.
    Shapes: any, kept; nats per token.
    Raises: ``ValueError`` when the shapes differ.
    Trap: as a plain loss it descends the *other* divergence: E ∇k3 = ∇ KL(reference || policy). It
    has the right gradient only when multiplied by the differentiable ratio π/π_old.
    """
    log_ratio = (-kl_policy_reference_k1(logprobs, reference_logprobs)).clamp(max=MAX_LOG_RATIO)
    # expm1 keeps the digits where the two policies nearly agree, and there a difference of logs is
    # all there is.
    return torch.expm1(log_ratio) - log_ratio


def kl_policy_reference_k3_corrected(
    logprobs: Values,
    old_logprobs: Values,
    reference_logprobs: Values,
) -> Values:
    """Estimate KL(policy || reference) per token by k3 under the ratio to the policy that sampled:
    right in both.

    Equation: ``ρ (r − 1 − log r)`` with ``ρ = π / π_old``, which carries gradient, and r as for k3.
    Paper: the unbiased KL of DeepSeek-V3.2, https://arxiv.org/abs/2512.02556, section 3.1, eq. 7.
    Shapes: any, kept; nats per token. Gradient flows through ``logprobs`` only.
    Raises: ``ValueError`` when the shapes differ.
    Trap: ``ρ`` must not be detached: its gradient is what turns the direction round. It is exact as
    long as the tokens come from ``old_logprobs``'s policy; after several epochs without clipping
    its variance grows with ρ.
    """
    check_same_shape(logprobs=logprobs, old_logprobs=old_logprobs)
    ratio = (logprobs - old_logprobs.detach()).clamp(max=MAX_LOG_RATIO).exp()
    return ratio * kl_policy_reference_k3(logprobs, reference_logprobs.detach())


def kl_target_reached(observed: float, target: float) -> bool:
    """Say whether the tether has run out: the controller that neither holds nor adapts the
    coefficient, but ends the training.

    Equation: ``observed > target``.
    Source: Spinning Up's early stop for PPO,
    https://spinningup.openai.com/en/latest/algorithms/ppo.html, here against the reference.
    Units: nats per *sequence*, both.
    Raises: ``ValueError`` when ``target`` is not positive or ``observed`` is NaN.
    Trap: one step's KL is an estimate from its samples; a target close to its noise stops a run
        that was still fine.
    """
    if not target > 0 or math.isnan(observed):
        raise ValueError(
            f"KL target {target} must be positive, and the observed KL a number, got {observed}",
        )
    return observed > target


def adapt_kl_coefficient(
    coefficient: float,
    observed: float,
    target: float,
    horizon: float,
    num_episodes: int,
    *,
    bounds: tuple[float, float] = (0.0, math.inf),
) -> float:
    """Move the KL coefficient up when the policy is further from the reference than wished, and
    down when nearer.

    Equation: ``e = clip(observed / target − 1, −0.2, 0.2)``, ``β ← clip(β (1 + e · num_episodes /
        horizon), low, high)`` with the ``bounds`` low and high.
    Paper: Ziegler et al. 2019, https://arxiv.org/abs/1909.08593, section 2.2. The bounds are ours:
        if no coefficient reaches the target, the product grows, or falls, without end.
    Units: ``observed`` and ``target`` in nats per *sequence* (token KL summed, then averaged over
    the batch); ``horizon`` and ``num_episodes`` (those of this step) in episodes.
    Raises: ``ValueError`` when ``target`` or ``horizon`` is not positive, or ``observed`` is NaN.
    Also when the coefficient could reach zero, because the step is five horizons or larger.
    Trap: giving the per-token mean for ``observed`` makes the KL look tiny, and the coefficient
        sinks without end.
    """
    if not (target > 0 and horizon > 0):
        raise ValueError(
            f"KL target and horizon must be positive, got target {target} and horizon {horizon}",
        )
    if math.isnan(observed):
        raise ValueError("the observed KL is NaN; the coefficient cannot follow it")
    if MAX_KL_ERROR * num_episodes >= horizon:
        raise ValueError(
            f"{num_episodes} episodes a step against a KL horizon of {horizon}; use a horizon "
            f"above {num_episodes / 5}",
        )
    error = min(max(observed / target - 1.0, -MAX_KL_ERROR), MAX_KL_ERROR)
    moved = coefficient * (1.0 + error * num_episodes / horizon)
    return min(max(moved, bounds[0]), bounds[1])


def kl_best_of_n(n: int) -> float:
    """Compute the KL of best-of-n from the policy, without a model.

    Equation: ``KL(best of n || policy) = log n − (n − 1)/n``.
    Paper: Stiennon et al. 2020, https://arxiv.org/abs/2009.01325, appendix G.3; as a bound: Beirami
    et al. 2024, https://arxiv.org/abs/2401.01879.
    Units: nats a response.
    Raises: ``ValueError`` when n is below 1.
    Trap: exact only if no two responses tie. Otherwise it is an upper bound. For a policy with few
    different answers the bound is loose: the KL is at most −log of the best answer's probability.
    """
    if n < 1:
        raise ValueError(f"best of {n}: n must be 1 or more")
    return math.log(n) - (n - 1) / n
