"""The engine's own arrangement of a policy's weights: adapters merged, matrices laid out for the processor's product.

A decoding step multiplies a few dozen rows by every matrix of the model. On a CPU, laying a matrix out for oneDNN's kernel
costs a third to a half of such a product, so it is done once; and a merged adapter costs nothing a token. Whatever is not
rearranged (embeddings, norms, everything on an accelerator) is the learner's own tensor.
"""

from __future__ import annotations

import copy
from typing import Any

import psutil
import torch
from peft.tuners.lora import Linear as LoraLinear
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from tether.models.trunk import Role


class EngineWeights:
    """A decoder and an output layer that compute what a role's do, kept up with the role by `refresh`.

    `decoder` is a second tree of modules over the same parameters, so that neither the routing of adapters nor the choice of
    an attention kernel here touches the learner's passes.
    """

    def __init__(self, role: Role) -> None:
        model = role.causal_model
        self.products: list[Product] = []
        shared: dict[int, Any] = {id(t): t for t in (*model.parameters(), *model.buffers())}
        rearranged = role.device.type == "cpu" and _room_for_a_copy(model)
        head = model.get_output_embeddings()
        if rearranged:
            inside: set[int] = set()
            for module in (*role.decoder.modules(), head):
                if id(module) in inside or not _is_product(module, role.adapter):
                    continue
                inside.update(map(id, module.modules()))
                shared[id(module)] = Product(module, role.adapter)
                self.products.append(shared[id(module)])
        self.decoder: Any = copy.deepcopy(role.decoder, shared)
        self.head: Any = shared.get(id(head), head)
        for module in self.decoder.modules():
            if isinstance(module, BaseTunerLayer):
                module._active_adapter = [] if role.adapter is None else [role.adapter]
        self.decoder.eval()

    def refresh(self) -> None:
        """Take in what has changed since the last call."""
        for product in self.products:
            product.refresh()


class Product(nn.Module):
    """A linear layer with its adapter merged in."""

    def __init__(self, source: nn.Module, adapter: str | None) -> None:
        super().__init__()
        self.sources = [source]  # in a list: not a submodule, its parameters are the learner's
        adapted = isinstance(source, LoraLinear) and adapter is not None and adapter in source.lora_A
        self.adapter = adapter if adapted else None
        self.packed: Tensor | None = None
        self.merged: Tensor | None = None
        self.seen: tuple[int, ...] = ()

    @property
    def base(self) -> Any:
        source = self.sources[0]
        return source.get_base_layer() if isinstance(source, BaseTunerLayer) else source

    def refresh(self) -> None:
        tensors = [self.base.weight]
        source: Any = self.sources[0]
        if self.adapter is not None:
            tensors += [source.lora_A[self.adapter].weight, source.lora_B[self.adapter].weight]
        seen = tuple(number for tensor in tensors for number in (tensor.data_ptr(), tensor._version))
        if seen == self.seen:
            return
        self.seen, weight = seen, self.base.weight.detach()
        if self.adapter is not None:
            down, up = (t.detach().float() for t in tensors[1:])
            weight = dithered(weight.float() + source.scaling[self.adapter] * (up @ down), weight.dtype)
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight, 64) if _packs(weight) else None
        self.merged = weight if self.packed is None else None

    def forward(self, states: Tensor) -> Tensor:
        bias = self.base.bias
        if self.packed is None:
            assert self.merged is not None
            return nn.functional.linear(states, self.merged, bias)
        return torch.ops.mkldnn._linear_pointwise(states, self.packed, bias, "none", [], "")


def dithered(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Round float32 to bfloat16 up or down with probabilities that keep the mean, the same way at every call.

    An adapter's share of a weight is mostly smaller than half a unit in bfloat16's last place: rounding to nearest would give the
    base weight back, and the engine would sample from the reference while the learner trains the policy.
    """
    if dtype != torch.bfloat16:
        return weight.to(dtype)
    generator = torch.Generator().manual_seed(weight.shape[0] * 65_537 + weight.shape[1])
    dither = torch.randint(0, 1 << 16, weight.shape, generator=generator, dtype=torch.int32)
    return ((weight.view(torch.int32) + dither.to(weight.device)) & -(1 << 16)).view(torch.float32).to(torch.bfloat16)


def _is_product(module: nn.Module, adapter: str | None) -> bool:
    """Whether `module` is a plain linear layer, with a plain adapter on it or none."""
    if isinstance(module, BaseTunerLayer):
        if not isinstance(module, LoraLinear) or type(module.get_base_layer()) is not nn.Linear or module.merged:
            return False
        plain = not module.use_dora.get(adapter or "", False) and not module.fan_in_fan_out
        return plain and not module.lora_bias.get(adapter or "", False)
    return type(module) is nn.Linear


def _packs(weight: Tensor) -> bool:
    return weight.dtype == torch.bfloat16 and weight.device.type == "cpu" and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def _room_for_a_copy(model: Any) -> bool:
    """Rearranged weights are a second copy; it may take a quarter of the memory that is free."""
    return 4 * sum(p.numel() * p.element_size() for p in model.parameters()) < psutil.virtual_memory().available
