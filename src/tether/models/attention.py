"""Attention for training on a CPU: grouped heads without copies, nothing of the size of the scores kept for the backward pass.

transformers' eager attention repeats keys and values for every query head and keeps the probabilities twice, in float32 and in
the model's type; the fused kernel's backward pass is slow on a CPU. Here the heads of a group stand one below the other in a
single product a key head, and the probabilities are computed again in the backward pass from queries and keys (Rabe and Staats
2021, https://arxiv.org/abs/2112.05682, without the chunks, which short sequences do not need).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

GROUPED = "tether_grouped"
"""The name under which transformers' models find `grouped_attention`; they make masks for it as for their eager attention."""


class _Grouped(torch.autograd.Function):
    """query (B, K, G·T, D), key and value (B, K, S, D), mask (B or 1, 1, T, S) additive or None -> (B, K, G·T, D)."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> Tensor:
        ctx.save_for_backward(query, key, value, mask)
        ctx.scale = scale
        return _probabilities(query, key, mask, scale) @ value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, mask = ctx.saved_tensors
        (grad,) = grads
        probabilities = _probabilities(query, key, mask, ctx.scale)
        grad_value = probabilities.transpose(-1, -2) @ grad
        # d score = p (d p - sum p d p), and the sum is that of gradient times output over the head's numbers.
        inner = grad @ value.transpose(-1, -2)
        inner.sub_((probabilities * inner).sum(-1, keepdim=True, dtype=torch.float32).to(inner.dtype)).mul_(probabilities)
        return (inner @ key).mul_(ctx.scale), (inner.transpose(-1, -2) @ query).mul_(ctx.scale), grad_value, None, None


def _probabilities(query: Tensor, key: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """(B, K, G·T, S) in the queries' type; the softmax is computed in float32."""
    scores = query @ key.transpose(-1, -2)
    if scale != 1.0:
        scores.mul_(scale)
    if mask is not None:
        batch, heads, rows, width = scores.shape
        scores.view(batch, heads, rows // mask.shape[-2], mask.shape[-2], width).add_(mask[:, :, None])
    return torch.softmax(scores, -1, dtype=torch.float32).to(query.dtype)


def grouped_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None, **options: Any
) -> tuple[Tensor, None]:
    """transformers' attention interface: query (B, H, T, D), key and value (B, K, S, D) -> (B, T, H, D).

    Raises:
        NotImplementedError: soft caps, sinks or dropout inside attention; pick_attention gives such models the eager one.
    """
    if options.get("softcap") or options.get("s_aux") is not None or options.get("dropout"):
        raise NotImplementedError("grouped attention knows no soft cap, sinks or dropout; set model.attention = 'eager'")
    (batch, heads, time, dim), kv_heads = query.shape, key.shape[1]
    grouped = query.reshape(batch, kv_heads, heads // kv_heads * time, dim)
    scale = options.get("scaling") or dim**-0.5
    mask = None if attention_mask is None else attention_mask[..., : key.shape[2]]
    if mask is None and time > 1:
        visible = torch.ones(time, key.shape[2], dtype=torch.bool, device=query.device).tril(key.shape[2] - time)
        mask = torch.zeros_like(visible, dtype=query.dtype).masked_fill_(~visible, torch.finfo(query.dtype).min)[None, None]
    out = _Grouped.apply(grouped, key, value, mask, scale)
    return out.view(batch, heads, time, dim).transpose(1, 2), None


ALL_ATTENTION_FUNCTIONS.register(GROUPED, grouped_attention)
ALL_MASK_ATTENTION_FUNCTIONS.register(GROUPED, eager_mask)
