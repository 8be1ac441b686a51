"""RMS norms and gated layers as one operation each, for training on a CPU.

transformers spells a norm as eight passes over memory and keeps three float32 tensors of it for the backward pass; a gated layer
keeps one product more than it needs. `fuse` gives modules that compute just that a class of their own with our kernels inside,
after comparing the two; parameters, names and adapters stay what they are.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from tether.models.kernels import add_norm, gate, gate_back, library_for, norm_back


class _Norm(torch.autograd.Function):
    """x / rms(x) * weight, over the last dimension; the weight is frozen."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        x = x.contiguous()
        ctx.save_for_backward(x, weight)
        ctx.epsilon = epsilon
        return torch.empty_like(x) if x.is_meta else add_norm(x.view(-1, x.shape[-1]), None, weight, epsilon).view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        return torch.empty_like(x) if x.is_meta else norm_back(x, weight, ctx.epsilon, grads[0].contiguous()), None, None


class _Gate(torch.autograd.Function):
    """silu(a) * b."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        a, b = a.contiguous(), b.contiguous()
        ctx.save_for_backward(a, b)
        return torch.empty_like(a) if a.is_meta else gate(a, b)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        a, b = ctx.saved_tensors
        return (torch.empty_like(a), torch.empty_like(b)) if a.is_meta else gate_back(a, b, grads[0].contiguous())


def _has_kernels(x: Tensor) -> bool:
    return x.is_meta or library_for(x) is not None


class _FusedNorm:
    """Before a module's own class: its forward pass is the plan for what the kernels do not take."""

    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        if self.weight.requires_grad or hidden_states.dtype != self.weight.dtype or not _has_kernels(hidden_states):
            return super().forward(hidden_states)  # pyright: ignore[reportAttributeAccessIssue]
        return _Norm.apply(hidden_states, self.weight, self.variance_epsilon)


class _FusedGated:
    def forward(self: Any, x: Tensor) -> Tensor:
        a, b = self.gate_proj(x), self.up_proj(x)
        return self.down_proj(_Gate.apply(a, b) if _has_kernels(a) else self.act_fn(a) * b)


def fuse(model: nn.Module) -> nn.Module:
    """Give every module of `model` that is exactly such a norm or gated layer the fused class. Returns the model."""
    trusted: dict[Any, bool] = {}
    for module in model.modules():
        kind = _kind(module)
        if kind is None:
            continue
        own = type(module)
        key = own, getattr(module, "variance_epsilon", None)
        if key not in trusted:
            trusted[key] = _same(module, _class(kind, own))
        if trusted[key]:
            module.__class__ = _class(kind, own)
    return model


def _kind(module: Any) -> type | None:
    if isinstance(module, (_FusedNorm, _FusedGated)):
        return None
    if {name for name, _ in module.named_parameters()} == {"weight"} and hasattr(module, "variance_epsilon"):
        return _FusedNorm
    return _FusedGated if {name for name, _ in module.named_children()} >= {"gate_proj", "up_proj", "down_proj"} else None


@cache
def _class(kind: type, own: type) -> type:
    return type(own.__name__, (kind, own), {"__module__": own.__module__})


@torch.no_grad()
def _same(module: Any, fused: type) -> bool:
    """Whether the fused class computes what the module does."""
    weight = module.weight if hasattr(module, "weight") else module.gate_proj.weight
    if weight.is_meta:
        return True
    x = torch.randn(3, weight.shape[-1], generator=torch.Generator().manual_seed(0)).to(weight)
    try:
        expected = module(x).float()
        own, module.__class__ = type(module), fused
        try:
            found = module(x).float()
        finally:
            module.__class__ = own
    except (TypeError, AttributeError, RuntimeError):
        return False
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2}.get(weight.dtype, 0.0)
    return bool((found - expected).norm() <= tolerance * expected.norm())
