"""Decoders of the local engine: any transformers decoder as a tree of modules, those of Llama's
kind in cpu.llama.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache

from tether.models.cpu.llama import KeysAndValues, llama_decoder
from tether.models.cpu.products import Product, is_product, room_for_a_copy
from tether.models.trunk import Role, has_adapters, setting
from tether.rollout.cache import ATTENTION, SlotCache


class Decoder(Protocol):
    """Interface of a policy's decoder to the engine: states of whole prompts, and of one more token
    a row.
    """

    in_place: bool

    @property
    def products(self) -> Sequence[Product]:
        """Copies of weights that `refresh` brings up to date."""
        ...

    @property
    def head(self) -> Callable[[Tensor], Tensor]: ...

    def prefill(
        self,
        ids: Tensor,
        prefix: KeysAndValues,
        lengths: Tensor | None = None,
    ) -> tuple[Tensor, KeysAndValues]:
        """Last hidden states (rows, time, dim) of tokens that follow `prefix`, and all keys and
        values, the prefix's included.

        Args:
            lengths: how many tokens of each row are real; states beyond them mean nothing.
        """
        ...

    def decode(self, tokens: Tensor, cache: SlotCache) -> Tensor:
        """The states after one more token a row, (rows, dim); its keys and values go to the row's
        slot.

        Args:
            cache: with `lengths` and `width` of this pass.
        """
        ...


def engine_decoder(role: Role, *, cpu_kernels: bool = True) -> Decoder:
    """The fastest decoder that computes what `role` computes."""
    return (llama_decoder(role) if cpu_kernels else None) or TreeDecoder(role, packed=cpu_kernels)


class TreeDecoder:
    """Any transformers decoder: a second tree of modules over the learner's parameters, with
    products in place of linear layers.

    Neither the routing of adapters nor the choice of an attention function here touches the
    learner's passes.

    Args:
        packed: on a CPU, products laid out for it and our own attention; otherwise everything is
            torch's.
    """

    def __init__(self, role: Role, *, packed: bool = True) -> None:
        adapter = role.adapter
        model = role.causal_model
        self.products: list[Product] = []
        shared: dict[int, object] = {id(t): t for t in (*model.parameters(), *model.buffers())}
        head = model.get_output_embeddings()
        if packed and role.device.type == "cpu" and room_for_a_copy(model):
            inside: set[int] = set()
            adapted = {id(module) for module in role.decoder.modules() if has_adapters(module)}
            for module in (*role.decoder.modules(), head):
                product = is_product(module, adapter)
                if id(module) in inside or not (product or id(module) in adapted):
                    continue
                # an adapted layer that is no product reads its own parts
                inside.update(map(id, module.modules()))
                if product:
                    self.products.append(Product([module], adapter))
                    shared[id(module)] = _Layer(self.products[-1])
        self.decoder: Any = copy.deepcopy(role.decoder, shared)
        self.head: Any = shared.get(id(head), head)
        for module in self.decoder.modules():
            if has_adapters(module):
                module._active_adapter = [] if adapter is None else [adapter]
        self.decoder.eval()
        self.attention = self.decoder.config._attn_implementation
        # Latents in place of keys and values (DeepSeek) are not what an attention function could be
        # given in place.
        latent = setting(role.config, "kv_lora_rank")
        self.in_place = (
            (packed or role.device.type != "cpu")
            and model._supports_attention_backend
            and not latent
        )

    def prefill(
        self,
        ids: Tensor,
        prefix: KeysAndValues,
        lengths: Tensor | None = None,
    ) -> tuple[Tensor, KeysAndValues]:
        """See Decoder.prefill."""
        cache = DynamicCache()
        for number, (keys, values) in enumerate(prefix):
            cache.update(
                keys.expand(len(ids), -1, -1, -1),
                values.expand(len(ids), -1, -1, -1),
                number,
            )
        start = prefix[0][0].shape[2] if prefix else 0
        positions = torch.arange(start, start + ids.shape[1], device=ids.device).repeat(len(ids), 1)
        self.decoder.config._attn_implementation = self.attention
        output = self.decoder(
            input_ids=ids,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
        )
        layers: list[Any] = cache.layers
        return output.last_hidden_state, [(layer.keys, layer.values) for layer in layers]

    def decode(self, tokens: Tensor, cache: SlotCache) -> Tensor:
        """See Decoder.decode."""
        self.decoder.config._attn_implementation = ATTENTION if self.in_place else self.attention
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
