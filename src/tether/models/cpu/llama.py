"""The CPU decoder: Llama and those built like it, with nothing between their matrix products but
our own kernels.

Walking transformers' modules costs a small model on a CPU a third of a decoding step. Here a layer
is four products and five kernels. A model is taken only if it is of a known family, and then only
after its states have been compared with its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from tether.models.cpu.kernels import add_norm, decode, gate, library_for, rotate
from tether.models.cpu.products import Product, is_product, room_for_a_copy
from tether.models.trunk import Role, has_adapters, layer_windows, setting

if TYPE_CHECKING:
    from transformers import PretrainedConfig

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1}
"""Largest relative difference of the states that rounding may make: a few percent in bfloat16, 2e-5
in float32.
"""
KeysAndValues = list[tuple[Tensor, Tensor]]
"""Of every layer: (rows, kv heads, places, dim)."""


class Slots(Protocol):
    """Keys and values of rows that are being decoded: of each layer (slots, kv heads, capacity,
    dim), row k in slot k.
    """

    lengths: Tensor

    @property
    def stores(self) -> Sequence[tuple[Tensor, Tensor]]: ...


class _Layer:
    """Weights of a layer of `FAMILIES`: its norms, and its products, side by side if they have one
    input.
    """

    def __init__(self, module: Any, adapter: str | None, window: int | None) -> None:
        attention = module.self_attn
        mlp = module.mlp
        self.before = module.input_layernorm.weight.detach()
        self.after = module.post_attention_layernorm.weight.detach()
        self.head_norms: tuple[Tensor | None, Tensor | None] = (None, None)
        if hasattr(attention, "q_norm"):
            self.head_norms = (attention.q_norm.weight, attention.k_norm.weight)
        self.attention = Product([attention.q_proj, attention.k_proj, attention.v_proj], adapter)
        self.out = Product([attention.o_proj], adapter)
        self.both = Product([mlp.gate_proj, mlp.up_proj], adapter)
        self.down = Product([mlp.down_proj], adapter)
        self.products = (self.attention, self.out, self.both, self.down)
        self.window = window


class LlamaDecoder:
    """A rollout.decoding.Decoder for `FAMILIES` on a CPU."""

    def __init__(self, role: Role) -> None:
        decoder: Any = role.decoder
        config = decoder.config
        self.embedding = decoder.embed_tokens
        self.rotary = decoder.rotary_emb
        self.norm = decoder.norm
        self.heads = config.num_attention_heads
        self.kv_heads = config.num_key_value_heads
        self.dim = head_dim(config)
        self.epsilon = config.rms_norm_eps
        self.layers = [
            _Layer(m, role.adapter, window)
            for m, window in zip(decoder.layers, layer_windows(config), strict=True)
        ]
        self.head = Product([role.causal_model.get_output_embeddings()], role.adapter)
        self.products = [p for layer in self.layers for p in layer.products] + [self.head]
        self.in_place = True

    def prefill(
        self,
        ids: Tensor,
        prefix: KeysAndValues,
        lengths: Tensor | None = None,
    ) -> tuple[Tensor, KeysAndValues]:
        """See Decoder.prefill. Padding takes part in attention alone, where it costs little."""
        (rows, time), start = ids.shape, prefix[0][0].shape[2] if prefix else 0
        real = (
            torch.ones_like(ids, dtype=torch.bool)
            if lengths is None
            else torch.arange(time) < lengths[:, None]
        )
        index = real.flatten().nonzero()[:, 0]
        place = torch.arange(start, start + time)
        age = place[:, None] - torch.arange(start + time)
        cached: KeysAndValues = []

        def attend(number: int, layer: _Layer, heads: Tensor) -> Tensor:
            padded = heads.new_zeros(rows * time, heads.shape[1], self.dim)
            padded[index] = heads
            parts = padded.view(rows, time, -1, self.dim).split(
                [self.heads, self.kv_heads, self.kv_heads],
                2,
            )
            query, keys, values = (part.transpose(1, 2) for part in parts)
            if prefix:
                before = (old.expand(rows, -1, -1, -1) for old in prefix[number])
                keys, values = (
                    torch.cat(pair, 2) for pair in zip(before, (keys, values), strict=True)
                )
            cached.append((keys, values))
            visible = (age >= 0) if layer.window is None else (age >= 0) & (age < layer.window)
            attended = scaled_dot_product_attention(
                query,
                keys,
                values,
                attn_mask=visible,
                enable_gqa=True,
            )
            return attended.transpose(1, 2).reshape(rows * time, -1)[index]

        states = self._run(ids.flatten()[index], place.repeat(rows)[index], attend)
        return states.new_zeros(rows * time, states.shape[1]).index_copy(0, index, states).view(
            rows,
            time,
            -1,
        ), cached

    def decode(self, tokens: Tensor, cache: Slots) -> Tensor:
        """See Decoder.decode."""
        stores = cache.stores
        scale = self.dim**-0.5

        def attend(number: int, layer: _Layer, heads: Tensor) -> Tensor:
            query, keys, values = heads[:, :, None].split(
                [self.heads, self.kv_heads, self.kv_heads],
                1,
            )
            attended = decode(
                query,
                keys,
                values,
                stores[number],
                cache.lengths,
                scale=scale,
                window=layer.window,
            )
            assert attended is not None
            return attended.view(len(tokens), -1)

        return self._run(tokens, cache.lengths, attend)

    def _run(
        self,
        tokens: Tensor,
        positions: Tensor,
        attend: Callable[[int, _Layer, Tensor], Tensor],
    ) -> Tensor:
        """(rows,) tokens at their positions -> (rows, dim); `attend` turns a layer's projected
        heads into what they attend to.
        """
        residual = self.embedding(tokens).detach()
        cosines, sines = (t[0].float().contiguous() for t in self.rotary(residual, positions[None]))
        delta = None
        for number, layer in enumerate(self.layers):
            states = add_norm(residual, delta, layer.before, self.epsilon)
            heads = layer.attention(states).view(len(tokens), -1, self.dim)
            rotate(
                heads,
                self.heads,
                self.kv_heads,
                cosines,
                sines,
                (*layer.head_norms, self.epsilon),
            )
            delta = layer.out(attend(number, layer, heads))
            states = add_norm(residual, delta, layer.after, self.epsilon)
            delta = layer.down(gate(layer.both(states)))
        return add_norm(residual, delta, self.norm.weight, self.epsilon)


def head_dim(config: PretrainedConfig) -> int:
    """Numbers of one attention head."""
    return setting(config, "head_dim") or config.hidden_size // (
        setting(config, "num_attention_heads") or 1
    )


def cache_bytes(config: PretrainedConfig, rows: int, places: int, element_size: int) -> int:
    """Keys and values of `rows` sequences; of a model without attention nothing."""
    config = config.get_text_config(decoder=True)
    unlike = setting(config, "is_heterogeneous")
    layers = config.per_layer_config if unlike else [config] * config.num_hidden_layers
    heads = (
        setting(layer, "num_key_value_heads") or setting(layer, "num_attention_heads") or 0
        for layer in layers
    )
    return (
        2
        * rows
        * places
        * element_size
        * sum(n * head_dim(layer) for n, layer in zip(heads, layers, strict=True))
    )


@torch.no_grad()
def llama_decoder(role: Role) -> LlamaDecoder | None:
    """A decoder that computes what `role` computes, or None where this kind cannot."""
    config = role.causal_model.config
    model = role.causal_model
    if (
        config.model_type not in FAMILIES
        or config.hidden_act != "silu"
        or has_adapters(model.get_input_embeddings())
    ):
        return None
    if library_for(model.get_input_embeddings().weight) is None or not room_for_a_copy(model):
        return None
    decoder = LlamaDecoder(role)
    if not all(
        is_product(source, role.adapter)
        for product in decoder.products
        for source in product.sources
    ):
        return None
    ids = (torch.arange(1, 33) * (config.vocab_size // 33))[None]
    for product in decoder.products:
        product.refresh()
    role.activate()
    expected = role.decoder(input_ids=ids, use_cache=False).last_hidden_state.float()
    first, cached = decoder.prefill(ids[:, :9], [])
    rest, _ = decoder.prefill(ids[:, 9:], cached)
    difference = (torch.cat([first, rest], 1).float() - expected).norm() / expected.norm()
    return decoder if difference < TOLERANCE[first.dtype] else None
