"""RMS norms and gated layers as one operation each, for training on a CPU.

transformers spells a norm as eight passes over memory and keeps three float32 tensors of it for the backward pass; a gated layer
keeps one product more than it needs. `fuse` gives modules that are spelled just so a class of their own with our kernels inside;
parameters, names and adapters stay what they are.
"""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers.activations import SiLUActivation
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from tether.cpu.kernels import TYPES, add_norm, gate, gate_back, library_for, norm_back


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
    return x.dtype in TYPES and (x.is_meta or library_for(x) is not None)


class _FusedNorm:
    """Before a module's own class, whose forward pass is there for what the kernels do not take."""

    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        if self.weight.requires_grad or hidden_states.dtype != self.weight.dtype or not _has_kernels(hidden_states):
            return super().forward(hidden_states)  # pyright: ignore[reportAttributeAccessIssue]
        return _Norm.apply(hidden_states, self.weight, self.variance_epsilon)


class _FusedGated:
    def forward(self: Any, x: Tensor) -> Tensor:
        a, b = self.gate_proj(x), self.up_proj(x)
        alike = a.dtype == b.dtype and a.shape == b.shape
        return self.down_proj(_Gate.apply(a, b) if alike and _has_kernels(a) else self.act_fn(a) * b)


def fuse(model: nn.Module) -> nn.Module:
    """Give every norm and gated layer of `model` that is spelled like Llama's the fused class. Returns the model."""
    for module in model.modules():
        own = type(module)
        if not isinstance(module, (_FusedNorm, _FusedGated)):
            if _spelled_like(own, LlamaRMSNorm):
                module.__class__ = _class(_FusedNorm, own)
            elif _spelled_like(own, LlamaMLP) and isinstance(module.act_fn, (nn.SiLU, SiLUActivation)):
                module.__class__ = _class(_FusedGated, own)
    return model


@cache
def _spelled_like(own: type[nn.Module], model: type[nn.Module]) -> bool:
    """Whether two classes' forward passes are the same code. Numbers could not tell: a few drawn ones miss a mean that is taken
    away, a clamp, a dropout."""
    return inspect.isfunction(own.forward) and _instructions(own.forward) == _instructions(model.forward)


def _instructions(function: Any) -> tuple[object, ...]:
    code = function.__code__
    constants = [constant for constant in code.co_consts if constant != function.__doc__]
    return code.co_code, code.co_names, code.co_varnames, constants


@cache
def _class(kind: type, own: type) -> type:
    return type(own.__name__, (kind, own), {"__module__": own.__module__})
