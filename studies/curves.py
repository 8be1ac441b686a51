"""The best-of-n curve from a pool of samples, and Gao's curves of gold reward over distance.

The distance is d = √KL(policy || initial policy), KL in nats a response: in it the first steps of
every method look alike.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from tether.algorithms.kl import kl_best_of_n
from tether.algorithms.masked import check_same_shape
from tether.evaluation.winrate import MaybeScores, mean_estimate
from tether.stats import Array


def best_of_n_weights(
    proxy: Float[Tensor, "*prompts samples"],
    n: int,
) -> Float[Tensor, "*prompts samples"]:
    """Compute for every sample of a pool how likely it is to be the best by proxy of n drawn from
    the pool without replacement.

    Equation: ``w_i = (S(#{proxy ≤ proxy_i}) − S(#{proxy < proxy_i})) / #{proxy = proxy_i}`` with
    ``S(m) = C(m, n) / C(N, n)``, the probability that all n are among the lowest m. Without ties
    the i-th smallest has ``C(i − 1, n − 1) / C(N, n)``.
    Paper: Nakano et al. 2021, https://arxiv.org/abs/2112.09332, appendix I; Gao et al. 2022,
        https://arxiv.org/abs/2210.10760.
    Shapes: the last dimension is the pool of N samples; kept. Float64, sums to 1 over each pool.
    Raises: ``ValueError`` when n is not between 1 and N.
    Trap: a failed score has no place in a pool; drop it before. NaN has no rank, and minus infinity
        would be the worst answer.
    """
    samples = proxy.shape[-1]
    if not 1 <= n <= samples:
        raise ValueError(
            f"best of {n} from a pool of {samples}: n must lie between 1 and the size of the pool",
        )
    ordered = proxy.sort(-1).values
    below = torch.searchsorted(ordered, proxy.contiguous())
    up_to = torch.searchsorted(ordered, proxy.contiguous(), right=True)
    # S(m) = Π (1 − n/j) over j = m + 1 .. N, in logs: no binomial is ever formed, so none
    # overflows.
    places = torch.arange(n + 1, samples + 1, dtype=torch.float64, device=proxy.device)
    share = places.new_zeros(samples + 1)
    share[samples] = 1.0
    share[n:samples] = torch.log1p(-n / places).flip(0).cumsum(0).flip(0).exp()
    return (share[up_to] - share[below]) / (up_to - below)


def best_of_n_estimate(
    proxy: Float[Tensor, "*prompts samples"],
    gold: Float[Tensor, "*prompts samples"],
    n: int,
) -> Float[Tensor, "*prompts"]:
    """Estimate without bias the gold score of the best by proxy of n fresh samples, from a pool of
    N.

    Equation: ``Σ_i w_i gold_i``: the mean over all subsets of n, equal proxies taking turns at
        being the best.
    Paper: Nakano et al. 2021, https://arxiv.org/abs/2112.09332, appendix I; Gao et al. 2022,
        https://arxiv.org/abs/2210.10760.
    Shapes: alike, the last dimension is the pool; the result lacks it, in the unit of gold,
        float64.
    Raises: ``ValueError`` when the shapes differ or n is not between 1 and N.
    Trap: unbiased is not sure. At n = N it is the gold of a single sample a prompt; keep N a few
        times the largest n.
    """
    check_same_shape(proxy=proxy, gold=gold)
    return (best_of_n_weights(proxy, n) * gold).sum(-1)


class CurvePoint(NamedTuple):
    """Best of n: its KL in nats, the mean proxy and gold score, the interval of gold, and the
    number of prompts.
    """

    n: int
    kl: float
    proxy: float
    gold: float
    low: float
    high: float
    count: int


def best_of_n_by_prompt(
    proxy: Sequence[MaybeScores],
    gold: Sequence[MaybeScores],
) -> tuple[list[int], Array, Array]:
    """Estimate for every prompt the proxy and the gold score of the best by proxy of n = 1, 2, 4, …
    samples, up to the pool.

    Equation: best_of_n_estimate.
    Shapes: a pool of samples a prompt; a sample counts where both scores are known. Gives the n,
        and (prompts, n) for each score.
    Raises: ``ValueError`` when lengths differ, a score is NaN, or no prompt has a sample with both
        scores.
    Trap: all prompts stand behind every n, so the largest is the smallest pool's size; a prompt of
    which nothing could be scored is left out.
    """
    if len(proxy) != len(gold) or any(len(p) != len(g) for p, g in zip(proxy, gold, strict=False)):
        raise ValueError("expected a proxy and a gold score for every sample of every prompt")
    scored = [
        [pair for pair in zip(*pool, strict=True) if None not in pair]
        for pool in zip(proxy, gold, strict=True)
    ]
    pools = [torch.tensor(pairs, dtype=torch.float64).T.contiguous() for pairs in scored if pairs]
    if not pools:
        raise ValueError("nothing to choose from: no sample has both a proxy and a gold score")
    if any(bool(pool.isnan().any()) for pool in pools):
        raise ValueError("NaN among the scores; a score that failed is None")
    largest = min(pool.shape[1] for pool in pools)
    sizes = [2**power for power in range(largest.bit_length()) if 2**power < largest] + [largest]
    values = torch.stack(
        [torch.stack([pool @ best_of_n_weights(pool[0], n) for n in sizes], 1) for pool in pools],
    )
    return sizes, values[:, 0].numpy(), values[:, 1].numpy()


def best_of_n_curve(
    proxy: Sequence[MaybeScores],
    gold: Sequence[MaybeScores],
    *,
    confidence: float = 0.95,
) -> list[CurvePoint]:
    """Estimate the best-of-n curve, with intervals of gold over prompts.

    Equation: the mean over prompts of best_of_n_estimate; KL ``log n − (n − 1)/n``.
    Paper: Gao et al. 2022, https://arxiv.org/abs/2210.10760.
    Shapes: a pool of samples a prompt, the last n being the size of the smallest; KL in nats a
        response, scores in their unit.
    Raises: as best_of_n_by_prompt.
    Trap: the intervals hold what prompts differ by, so neighbouring points move together. Whether
    gold falls after a peak is read off differences prompt by prompt (best_of_n_by_prompt), not off
    whether intervals overlap.
    """
    sizes, by_proxy, by_gold = best_of_n_by_prompt(proxy, gold)
    return [
        CurvePoint(
            n,
            kl_best_of_n(n),
            float(proxies.mean()),
            *mean_estimate(golds.tolist(), confidence=confidence)[:4],
        )
        for n, proxies, golds in zip(sizes, by_proxy.T, by_gold.T, strict=True)
    ]


class OveroptimizationFit(NamedTuple):
    """A fitted curve of gold reward over d = √KL. `covariance`: (var α, cov αβ, var β)."""

    kind: Literal["best_of_n", "rl"]
    alpha: float
    beta: float
    covariance: tuple[float, float, float]

    def gold(self, kl: float) -> float:
        """Give the curve's gold reward at a KL in nats."""
        rise, fall = _terms(self.kind, kl)
        return self.alpha * rise + self.beta * fall

    @property
    def peak(self) -> float | None:
        """The distance √KL at which gold is highest; None where the curve has no maximum beyond 0
        (β ≤ 0: it never turns).
        """
        if self.beta <= 0 or (self.kind == "best_of_n" and self.alpha <= 0):
            return None
        if self.kind == "best_of_n":
            return self.alpha / (2 * self.beta)
        exponent = self.alpha / self.beta - 1
        # nothing ever gets there, and exp would overflow
        return math.exp(exponent) if exponent < 700 else None

    @property
    def peak_error(self) -> float | None:
        """The peak's standard error to first order (delta method) from the covariance."""
        if self.peak is None:
            return None
        scale = 0.5 if self.kind == "best_of_n" else self.peak
        by_alpha, by_beta = scale / self.beta, -scale * self.alpha / self.beta**2
        variance, covariance, beta_variance = self.covariance
        return math.sqrt(
            max(
                0.0,
                by_alpha**2 * variance
                + 2 * by_alpha * by_beta * covariance
                + by_beta**2 * beta_variance,
            ),
        )


def fit_overoptimization(
    kl: Sequence[float],
    gold: Sequence[float],
    kind: Literal["best_of_n", "rl"],
) -> OveroptimizationFit:
    """Fit Gao's curve of gold reward over distance by least squares; both forms are linear in α and
    β.

    Equation: with ``d = √KL``, best_of_n: ``R = d (α − β d)``, peak at ``α / 2β``; rl: ``R = d (α −
    β log d)``, peak at ``exp(α/β − 1)``. Covariance: ``σ² (XᵀX)⁻¹`` with ``σ² = Σ residuals² /
    (points − 2)``.
    Paper: Gao et al. 2022, https://arxiv.org/abs/2210.10760.
    Units: ``kl`` in nats a response; ``gold`` is the *gain* over the initial policy (R(0) = 0); the
        peak is a distance √KL.
    Raises: ``ValueError`` when lengths differ, a number is not finite, a KL is below 0, or there
    are not three points beyond 0, at more than one distance.
    Trap: points of one pool or one run go up and down together, which the covariance does not know;
    resample prompts or runs, fit each, and take the spread. A peak beyond the last point is a
    guess. The rl form rises infinitely steeply at 0: leave out the first steps (KL below some 0.5
    nats).
    """
    if len(kl) != len(gold):
        raise ValueError(f"expected as many gold rewards as KLs, got {len(gold)} and {len(kl)}")
    if not all(map(math.isfinite, (*kl, *gold))) or min(kl, default=0.0) < 0:
        raise ValueError(
            "KLs and gold rewards must be finite, and a KL 0 or more; an estimate below 0 is "
            "noise around 0: leave it out",
        )
    terms = torch.tensor([_terms(kind, k) for k in kl if k > 0], dtype=torch.float64).reshape(-1, 2)
    target = torch.tensor([g for k, g in zip(kl, gold, strict=True) if k > 0], dtype=torch.float64)
    square = terms.T @ terms
    if len(terms) < 3 or torch.linalg.det(square) <= 1e-12 * square[0, 0] * square[1, 1]:
        raise ValueError(
            "a fit needs at least three points beyond KL 0, not all at one "
            f"distance; got {len(terms)}",
        )
    inverse = torch.linalg.inv(square)
    best = inverse @ terms.T @ target
    variances = (target - terms @ best).square().sum() / (len(terms) - 2) * inverse
    alpha, beta = best.tolist()
    return OveroptimizationFit(
        kind,
        alpha,
        beta,
        (float(variances[0, 0]), float(variances[0, 1]), float(variances[1, 1])),
    )


def _terms(kind: Literal["best_of_n", "rl"], kl: float) -> tuple[float, float]:
    """What α and β are multiplied by."""
    distance = math.sqrt(kl)
    if kind == "best_of_n":
        return distance, -kl
    return distance, -distance * math.log(distance) if distance > 0 else 0.0
