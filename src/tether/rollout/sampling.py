"""Drawing tokens: one counter-based uniform a token, turned into a token by the inverse CDF.

A draw depends on (seed, prompt ordinal, sample index, position) and on the row's logits, never on
the rest of the batch. Without a random state, a resumed run or another split of the batch draws the
same tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from tether.core.errors import ModelError
from tether.core.types import Sampling
from tether.models.cpu.kernels import draw_tokens

BLOCK = 256
CPU_STRIP_ELEMENTS = 2**20
"""Number of logits that are sampled from at a time on a CPU. The float32 copies then stay in its
caches.
"""
_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB


def counter_uniform(seed: int, ordinals: Tensor, samples: Tensor, positions: Tensor) -> Tensor:
    """Uniforms in (0, 1), float64: the SplitMix64 finaliser
    (https://doi.org/10.1145/2714064.2660195) chained over the counters.

    `ordinals`, `samples` and `positions` are int64 tensors of one shape.
    """
    state = torch.full_like(ordinals, _signed(seed * _GOLDEN))
    for counter in (ordinals, samples, positions):
        state = _mix(state ^ _mix(counter + _signed(_GOLDEN)))
    return (_shift(state, 11).double() + 0.5) * 2.0**-53


def _signed(value: int) -> int:
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >= 1 << 63 else value


def _shift(value: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)


def _mix(value: Tensor) -> Tensor:
    value = (value ^ _shift(value, 30)) * _signed(_MIX_1)
    value = (value ^ _shift(value, 27)) * _signed(_MIX_2)
    return value ^ _shift(value, 31)


def sample_tokens(
    logits: Tensor,
    uniforms: Tensor,
    sampling: Sampling,
    *,
    cpu_kernels: bool = True,
) -> tuple[Tensor, Tensor]:
    """One token a row, with its log-probability under the distribution that it was drawn from.

    Args:
        logits: (rows, vocab), any float dtype.
        uniforms: (rows,) in (0, 1); not used when greedy.
        sampling: temperature first, then top-k, top-p and min-p on the tempered distribution.

    Returns:
        tokens (rows,) int64 and log-probabilities (rows,) float32. Greedy log-probabilities are
        those of temperature 1. If a row's logits are no distribution (one is NaN or infinite, or
        all are minus infinity), its log-probability is not finite.
    """
    if cpu_kernels and sampling.temperature > 0 and not sampling.truncates:
        drawn = draw_tokens(logits, uniforms, sampling.temperature)
        if drawn is not None:
            return drawn
    strip = (
        max(1, CPU_STRIP_ELEMENTS // logits.shape[-1])
        if logits.device.type == "cpu"
        else len(logits)
    )
    parts = [
        _sample(logits[i : i + strip], uniforms[i : i + strip], sampling)
        for i in range(0, len(logits), max(1, strip))
    ]
    tokens, logprobs = zip(*parts, strict=True)
    return torch.cat(tokens), torch.cat(logprobs)


def _sample(logits: Tensor, uniforms: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    scaled = logits.float()
    if sampling.temperature == 0.0:
        tokens = scaled.argmax(-1)
        return tokens, scaled.gather(-1, tokens[:, None])[:, 0] - scaled.logsumexp(-1)
    if sampling.temperature != 1.0:
        scaled = scaled / sampling.temperature
    largest = scaled.amax(-1, keepdim=True)
    weights = (scaled - largest).exp_()
    if sampling.truncates:
        weights = _truncate(weights, sampling)
    tokens, total = _inverse_cdf(weights, uniforms)
    return tokens, (weights.gather(-1, tokens[:, None])[:, 0].log() - total.log()).float()


def check_distributions(logprobs: Sequence[float]) -> None:
    """Check what was drawn: the log-probability of a token is not finite where the logits were no
    distribution.

    Raises:
        ModelError: one is not.
    """
    broken = sum(not math.isfinite(logprob) for logprob in logprobs)
    if broken:
        raise ModelError(
            f"the model's logits for the next token are NaN or infinite in {broken} of "
            f"{len(logprobs)} responses: its weights have diverged, or its dtype overflows. Go "
            "back to an earlier checkpoint with a lower learning rate, or set model.dtype = "
            "'float32'.",
        )


def _truncate(weights: Tensor, sampling: Sampling) -> Tensor:
    """Zero what top-k, top-p and min-p leave out; `weights` are relative to each row's largest,
    which is 1.
    """
    if sampling.top_k:
        kth = weights.topk(min(sampling.top_k, weights.shape[-1]), dim=-1).values[:, -1:]
        weights = weights * (weights >= kth)
    if sampling.top_p < 1.0:
        ordered = weights.sort(dim=-1, descending=True).values
        before = running_sums(ordered) - ordered
        inside = before < sampling.top_p * ordered.sum(-1, keepdim=True)
        threshold = torch.where(inside, ordered, torch.inf).amin(-1, keepdim=True)
        weights = weights * (weights >= threshold)
    if sampling.min_p > 0.0:
        weights = weights * (weights >= sampling.min_p)
    return weights


def _inverse_cdf(weights: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """First token whose cumulative weight passes the uniform; two levels, so that most of the
    vocabulary is only summed.
    """
    rows, vocab = weights.shape
    padded = torch.nn.functional.pad(weights, (0, -vocab % BLOCK)).view(rows, -1, BLOCK)
    cumulative = running_sums(padded.sum(-1).double())
    total = cumulative[:, -1]
    target = uniforms * total
    block = torch.searchsorted(cumulative, target[:, None], right=True).clamp_(
        max=cumulative.shape[-1] - 1,
    )
    before = torch.where(block > 0, cumulative.gather(-1, (block - 1).clamp_(min=0)), 0.0)
    chosen = padded[torch.arange(rows, device=weights.device), block[:, 0]]
    inside = running_sums(chosen.double())
    index = (inside <= target[:, None] - before).sum(-1)
    # rounding must not reach a token of weight 0
    last_possible = BLOCK - 1 - (chosen.flip(-1) > 0).int().argmax(-1)
    return (block[:, 0] * BLOCK + torch.minimum(index, last_possible)).clamp_(max=vocab - 1), total


def running_sums(values: Tensor) -> Tensor:
    """Sums of all numbers up to each place, (..., n).

    A GPU's own `cumsum` of fractions adds in no fixed order, so two runs could draw other tokens.
    There each `BLOCK` of numbers is multiplied by a triangle of ones, and so are the sums of the
    blocks.
    """
    if values.device.type == "cpu":
        return values.cumsum(-1)
    width = values.shape[-1]
    if width <= BLOCK:
        return values @ _triangle(width, values.dtype, values.device)
    blocks = torch.nn.functional.pad(values, (0, -width % BLOCK)).unflatten(-1, (-1, BLOCK))
    inside = blocks @ _triangle(BLOCK, values.dtype, values.device)
    sums = inside[..., -1]
    sums = (inside + (running_sums(sums) - sums)[..., None]).flatten(-2)
    return sums[..., :width].contiguous()


@cache
def _triangle(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.ones(size, size, dtype=dtype, device=device).triu()
