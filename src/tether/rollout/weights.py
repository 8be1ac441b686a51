"""The engine's own arrangement of a policy's weights: adapters merged, matrices laid out for the processor's product.

A decoding step multiplies a few dozen rows by every matrix of the model. On a CPU, laying a matrix out for oneDNN's kernel
costs a third to a half of such a product, so it is done once; and a merged adapter costs nothing a token. Whatever is not
rearranged (embeddings, norms, everything on an accelerator) is the learner's own tensor.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import psutil
import torch
from peft.tuners.lora import Linear as LoraLinear
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache

from tether.models.kernels import Panels
from tether.models.trunk import Role
from tether.rollout.cache import ATTENTION, SlotCache

KeysAndValues = list[tuple[Tensor, Tensor]]
"""Of every layer: (rows, kv heads, places, dim)."""


class Product:
    """One or several linear layers over the same input, side by side, each with its adapter merged in."""

    def __init__(self, sources: Sequence[nn.Module], adapter: str | None) -> None:
        self.sources: list[Any] = list(sources)
        self.adapter = adapter
        self.compute: Callable[[Tensor], Tensor] | None = None
        self.seen: list[int] = []

    def refresh(self) -> None:
        """Take in what has changed since the last call."""
        seen = [
            number for source in self.sources for t in _tensors(source, self.adapter) for number in (t.data_ptr(), t._version)
        ]
        if seen == self.seen:
            return
        self.seen = seen
        weights, biases = zip(*(_merged(source, self.adapter) for source in self.sources), strict=True)
        weight = weights[0] if len(weights) == 1 else torch.cat(weights)
        filled = [w.new_zeros(len(w)) if b is None else b for w, b in zip(weights, biases, strict=True)]
        self.compute = _laid_out(weight, torch.cat(filled) if any(b is not None for b in biases) else None)

    def __call__(self, states: Tensor) -> Tensor:
        assert self.compute is not None, "refresh comes first"
        return self.compute(states)


class TreeDecoder:
    """Any transformers decoder: a second tree of modules over the learner's parameters, with products in place of linear layers.

    Neither the routing of adapters nor the choice of an attention function here touches the learner's passes.
    """

    def __init__(self, role: Role) -> None:
        model = role.causal_model
        self.products: list[Product] = []
        shared: dict[int, Any] = {id(t): t for t in (*model.parameters(), *model.buffers())}
        head = model.get_output_embeddings()
        if role.device.type == "cpu" and room_for_a_copy(model):
            inside: set[int] = set()
            for module in (*role.decoder.modules(), head):
                if id(module) not in inside and is_product(module, role.adapter):
                    inside.update(map(id, module.modules()))
                    self.products.append(Product([module], role.adapter))
                    shared[id(module)] = _Layer(self.products[-1])
        self.decoder: Any = copy.deepcopy(role.decoder, shared)
        self.head: Any = shared.get(id(head), head)
        for module in self.decoder.modules():
            if isinstance(module, BaseTunerLayer):
                module._active_adapter = [] if role.adapter is None else [role.adapter]
        self.decoder.eval()
        # Latents in place of keys and values (DeepSeek) are not what an attention function could be given in place.
        latent = getattr(model.config.get_text_config(), "kv_lora_rank", None)
        self.in_place = bool(getattr(model, "_supports_attention_backend", False)) and not latent

    def prefill(self, ids: Tensor, prefix: KeysAndValues, lengths: Tensor | None = None) -> tuple[Tensor, KeysAndValues]:
        """Last hidden states (rows, time, dim) of tokens that follow `prefix`, and all keys and values, the prefix's included.

        Args:
            lengths: how many tokens of each row are real; what comes out beyond them means nothing.
        """
        cache = DynamicCache()
        for number, (keys, values) in enumerate(prefix):
            cache.update(keys.expand(len(ids), -1, -1, -1), values.expand(len(ids), -1, -1, -1), number)
        start = prefix[0][0].shape[2] if prefix else 0
        positions = torch.arange(start, start + ids.shape[1], device=ids.device).repeat(len(ids), 1)
        output = self.decoder(input_ids=ids, position_ids=positions, past_key_values=cache, use_cache=True)
        layers: list[Any] = cache.layers
        return output.last_hidden_state, [(layer.keys, layer.values) for layer in layers]

    def decode(self, tokens: Tensor, cache: SlotCache) -> Tensor:
        """The states after one more token a row, (rows, dim); its keys and values go to the row's slot."""
        cache.width = int(cache.lengths.max()) + 1
        with _attending(self.decoder, ATTENTION if self.in_place else None):
            output = self.decoder(
                input_ids=tokens[:, None],
                attention_mask=cache.visibility(next(self.decoder.parameters()).dtype),
                position_ids=cache.lengths[:, None],
                past_key_values=cache,
                use_cache=True,
            )
        return output.last_hidden_state[:, -1]


class _Layer(nn.Module):
    """A product where a module is expected; its parameters stay the learner's."""

    def __init__(self, product: Product) -> None:
        super().__init__()
        self.product = product

    def forward(self, states: Tensor) -> Tensor:
        return self.product(states)


def _tensors(source: Any, adapter: str | None) -> list[Tensor]:
    """Weight, bias, and the adapter's two matrices."""
    base: Any = source.get_base_layer() if isinstance(source, BaseTunerLayer) else source
    found: list[Any] = [base.weight] if base.bias is None else [base.weight, base.bias]
    if isinstance(source, LoraLinear) and adapter is not None and adapter in source.lora_A:
        layers: list[Any] = [source.lora_A[adapter], source.lora_B[adapter]]
        found += [layer.weight for layer in layers]
    return found


def _merged(source: Any, adapter: str | None) -> tuple[Tensor, Tensor | None]:
    weight, *rest = (t.detach() for t in _tensors(source, adapter))
    if len(rest) > 1:
        down, up = (t.float() for t in rest[-2:])
        weight = dithered(weight.float() + source.scaling[adapter] * (up @ down), weight.dtype)
    return weight, rest[0] if len(rest) % 2 else None


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


def is_product(module: nn.Module, adapter: str | None) -> bool:
    """Whether `module` is a plain linear layer, with a plain adapter on it or none."""
    if isinstance(module, BaseTunerLayer):
        if not isinstance(module, LoraLinear) or type(module.get_base_layer()) is not nn.Linear or module.merged:
            return False
        plain = not module.use_dora.get(adapter or "", False) and not module.fan_in_fan_out
        return plain and not module.lora_bias.get(adapter or "", False)
    return type(module) is nn.Linear


def _laid_out(weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    """The product with a matrix, in the arrangement that is fastest here."""
    if Panels.fit(weight):
        return Panels(weight, bias)
    if weight.dtype == torch.bfloat16 and weight.device.type == "cpu" and torch.ops.mkldnn._is_mkldnn_bf16_supported():
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, 64)
        return lambda states: torch.ops.mkldnn._linear_pointwise(states, packed, bias, "none", [], "")
    return lambda states: nn.functional.linear(states, weight, bias)


def room_for_a_copy(model: Any) -> bool:
    """Rearranged weights are a second copy; it may take a quarter of the memory that is free."""
    return 4 * sum(p.numel() * p.element_size() for p in model.parameters()) < psutil.virtual_memory().available


@contextmanager
def _attending(decoder: Any, implementation: str | None) -> Iterator[None]:
    """Let the engine's tree of modules attend by another function for a while."""
    before = decoder.config._attn_implementation
    decoder.config._attn_implementation = implementation or before
    try:
        yield
    finally:
        decoder.config._attn_implementation = before
