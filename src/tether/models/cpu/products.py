"""Packed weights: the engine's own arrangement of a policy's matrices, adapters merged, laid out
for the processor's product.

A decoding step multiplies a few dozen rows by every matrix of the model. On a CPU, the layout for
oneDNN's kernel takes a third to a half of the time of such a product. So each matrix is laid out
once. A merged adapter then takes no time at each token. All other tensors (embeddings, norms,
everything on an accelerator) are the learner's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad

from tether.models.carried import change_of
from tether.models.cpu import kernels
from tether.models.cpu.memory import machine_memory
from tether.models.targets import bare_layer
from tether.models.trunk import has_adapters


class Product:
    """One or several linear layers over the same input, side by side, each with its adapter merged
    in.
    """

    def __init__(self, sources: Sequence[nn.Module], adapter: str | None) -> None:
        self.sources = sources
        self.adapter = adapter
        self.compute: Callable[[Tensor], Tensor] | None = None
        self.versions: list[tuple[int, int]] = []

    def refresh(self) -> None:
        """Take in what has changed since the last call."""
        parts = [_tensors(source, self.adapter) for source in self.sources]
        versions = [(tensor.data_ptr(), tensor._version) for tensors in parts for tensor in tensors]
        if versions == self.versions:
            return
        self.versions = versions
        weights, biases = zip(
            *(_merged(source, self.adapter) for source in self.sources),
            strict=True,
        )
        filled = [
            w.new_zeros(len(w)) if b is None else b for w, b in zip(weights, biases, strict=True)
        ]
        bias = torch.cat(filled) if any(b is not None for b in biases) else None
        self.compute = _laid_out(weights[0] if len(weights) == 1 else torch.cat(weights), bias)

    def __call__(self, states: Tensor) -> Tensor:
        assert self.compute is not None, "refresh comes first"
        return self.compute(states)


def _tensors(source: nn.Module, adapter: str | None) -> list[Tensor]:
    """Weight, bias, and the adapter's two matrices."""
    from peft.tuners.lora import Linear as LoraLinear

    tensors: list[Tensor] = [*bare_layer(source).parameters(recurse=False)]
    if isinstance(source, LoraLinear) and adapter is not None and adapter in source.lora_A:
        matrices = source.lora_A[adapter], source.lora_B[adapter]
        tensors += [matrix.get_parameter("weight") for matrix in matrices]
    return tensors


def _merged(source: Any, adapter: str | None) -> tuple[Tensor, Tensor | None]:
    weight, *rest = (t.detach() for t in _tensors(source, adapter))
    carried = change_of(bare_layer(source))
    whole = weight.float() if carried is None else weight.float() + carried
    if len(rest) > 1:
        down, up = (t.float() for t in rest[-2:])
        whole = whole + source.scaling[adapter] * (up @ down)
    if len(rest) > 1 or carried is not None:
        weight = dithered(whole, weight.dtype)
    return weight, rest[0] if len(rest) % 2 else None


def dithered(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Round float32 to bfloat16 up or down with probabilities that keep the mean, the same way at
    every call.

    An adapter's share of a weight is mostly smaller than half a unit in bfloat16's last place.
    Rounding to nearest would give the base weight back. The engine would then sample from the
    reference while the learner trains the policy.
    """
    if dtype != torch.bfloat16:
        return weight.to(dtype)
    generator = torch.Generator().manual_seed(weight.shape[0] * 65_537 + weight.shape[1])
    dither = torch.randint(0, 1 << 16, weight.shape, generator=generator, dtype=torch.int32)
    return (
        ((weight.view(torch.int32) + dither.to(weight.device)) & -(1 << 16))
        .view(torch.float32)
        .to(torch.bfloat16)
    )


def is_product(module: nn.Module, adapter: str | None) -> bool:
    """True if `module` is a plain linear layer, with a plain adapter on it or none."""
    from peft.tuners.lora import Linear as LoraLinear

    if has_adapters(module):
        if (
            not isinstance(module, LoraLinear)
            or type(module.get_base_layer()) is not nn.Linear
            or module.merged
        ):
            return False
        plain = not module.use_dora.get(adapter or "", False) and not module.fan_in_fan_out
        return plain and not module.lora_bias.get(adapter or "", False)
    return type(module) is nn.Linear


class Panels:
    """A matrix (outputs, inputs) laid out for products with few rows: states (..., inputs) -> (...,
    outputs).

    The kernel of oneDNN in bfloat16 waits for weights: at 32 rows a fifth of the time, at 64 rows a
    seventh. The product of torch in float32 lays the matrix out anew each time. This kernel fetches
    the next panel of weights while it multiplies by the present one. From 256 rows on, all are
    equally fast.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.columns, self.inputs = weight.shape
        width = kernels.panel_width(weight)
        each = 4 // weight.element_size()
        missing = -self.columns % width
        padded = pad(weight, (0, 0, 0, missing)).view(-1, width, self.inputs // each, each)
        self.panels = padded.transpose(1, 2).contiguous()
        self.bias = None if bias is None else pad(bias.float(), (0, missing))

    @staticmethod
    def fit(weight: Tensor) -> bool:
        """True if this machine has such a kernel for such a matrix and lacks a better one."""
        return kernels.panel_width(weight) > 0 and weight.shape[1] * weight.element_size() % 4 == 0

    def __call__(self, states: Tensor) -> Tensor:
        if states.dtype != self.panels.dtype or states.shape[-1] != self.inputs:
            given = f"{states.dtype} of width {states.shape[-1]}"
            raise RuntimeError(
                f"a matrix of {self.panels.dtype} with {self.inputs} inputs cannot be multiplied "
                f"with states of {given}",
            )
        return kernels.product(states.contiguous(), self.panels, self.bias, self.columns)


def _laid_out(weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    """The product with a matrix, in the arrangement that is fastest here."""
    if Panels.fit(weight):
        return Panels(weight, bias)
    if (
        weight.dtype == torch.bfloat16
        and weight.device.type == "cpu"
        and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    ):
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, 64)
        return lambda states: torch.ops.mkldnn._linear_pointwise(
            states,
            packed,
            bias,
            "none",
            [],
            "",
        )
    return lambda states: linear(states, weight, bias)


def room_for_a_copy(model: nn.Module) -> bool:
    """Rearranged weights are a second copy; it may take a sixth of the machine's memory.

    The memory that is free decides nothing: a run beside other programs takes the products that it
    takes alone.
    """
    return (
        6 * sum(p.numel() * p.element_size() for p in model.parameters()) < machine_memory().total
    )
