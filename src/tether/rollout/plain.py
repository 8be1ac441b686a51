"""Decoders of the plain kind (Llama and those built like it) with nothing between their matrix products but our own kernels.

Walking transformers' modules costs a small model on a CPU a third of a decoding step. Here a layer is four products and five
kernels. A model is taken only if it is of a known family, and then only after its states have been compared with its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from tether.models.kernels import add_norm, decode, gate, library_for, rotate
from tether.models.trunk import Role
from tether.rollout.cache import SlotCache
from tether.rollout.weights import KeysAndValues, Product, TreeDecoder, is_product, room_for_a_copy

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1}
"""Largest relative difference of the states that rounding may make: a few percent in bfloat16, 2e-5 in float32."""


@dataclass(frozen=True)
class _PlainLayer:
    before: Tensor
    attention: Product
    norms: tuple[Tensor | None, Tensor | None, float]
    out: Product
    after: Tensor
    both: Product
    down: Product
    window: int | None

    @property
    def products(self) -> tuple[Product, ...]:
        return self.attention, self.out, self.both, self.down


class PlainDecoder:
    """What TreeDecoder does, faster, for `FAMILIES` on a CPU."""

    def __init__(self, role: Role) -> None:
        decoder: Any = role.decoder
        config = decoder.config
        self.embedding, self.rotary, self.norm = decoder.embed_tokens, decoder.rotary_emb, decoder.norm
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.epsilon = config.rms_norm_eps
        windows = SlotCache(config, 1, 1).slots
        self.layers = [self._layer(m, role.adapter, s.window) for m, s in zip(decoder.layers, windows, strict=True)]
        self.head = Product([role.causal_model.get_output_embeddings()], role.adapter)
        self.products = [p for layer in self.layers for p in layer.products] + [self.head]
        self.in_place = True

    def _layer(self, module: Any, adapter: str | None, window: int | None) -> _PlainLayer:
        attention, mlp = module.self_attn, module.mlp
        norms = [getattr(getattr(attention, name, None), "weight", None) for name in ("q_norm", "k_norm")]
        return _PlainLayer(
            module.input_layernorm.weight.detach(),
            Product([attention.q_proj, attention.k_proj, attention.v_proj], adapter),
            (norms[0], norms[1], self.epsilon),
            Product([attention.o_proj], adapter),
            module.post_attention_layernorm.weight.detach(),
            Product([mlp.gate_proj, mlp.up_proj], adapter),
            Product([mlp.down_proj], adapter),
            window,
        )

    def prefill(self, ids: Tensor, prefix: KeysAndValues, lengths: Tensor | None = None) -> tuple[Tensor, KeysAndValues]:
        """See TreeDecoder.prefill. Padding takes part in attention alone, where it costs little."""
        (rows, time), start = ids.shape, prefix[0][0].shape[2] if prefix else 0
        real = torch.ones_like(ids, dtype=torch.bool) if lengths is None else torch.arange(time) < lengths[:, None]
        index = real.flatten().nonzero()[:, 0]
        place = torch.arange(start, start + time)
        age = place[:, None] - torch.arange(start + time)
        found: KeysAndValues = []

        def attend(number: int, layer: _PlainLayer, heads: Tensor) -> Tensor:
            padded = heads.new_zeros(rows * time, heads.shape[1], self.dim)
            padded[index] = heads
            parts = padded.view(rows, time, -1, self.dim).split([self.heads, self.kv_heads, self.kv_heads], 2)
            query, keys, values = (part.transpose(1, 2) for part in parts)
            if prefix:
                keys, values = (
                    torch.cat([old.expand(rows, -1, -1, -1), new], 2)
                    for old, new in zip(prefix[number], (keys, values), strict=True)
                )
            found.append((keys, values))
            visible = (age >= 0) if layer.window is None else (age >= 0) & (age < layer.window)
            attended = scaled_dot_product_attention(query, keys, values, attn_mask=visible, enable_gqa=True)
            return attended.transpose(1, 2).reshape(rows * time, -1)[index]

        states = self._run(ids.flatten()[index], place.repeat(rows)[index], attend)
        return states.new_zeros(rows * time, states.shape[1]).index_copy(0, index, states).view(rows, time, -1), found

    def decode(self, tokens: Tensor, cache: SlotCache) -> Tensor:
        """See TreeDecoder.decode."""
        scale = self.dim**-0.5

        def attend(number: int, layer: _PlainLayer, heads: Tensor) -> Tensor:
            query, keys, values = heads[:, :, None].split([self.heads, self.kv_heads, self.kv_heads], 1)
            store = cache.slots[number].store
            assert store is not None
            attended = decode(query, keys, values, store, cache.lengths, scale=scale, window=layer.window)
            assert attended is not None
            return attended.view(len(tokens), -1)

        return self._run(tokens, cache.lengths, attend)

    def _run(self, tokens: Tensor, positions: Tensor, attend: Any) -> Tensor:
        """(rows,) tokens at their positions -> (rows, dim); `attend` turns a layer's projected heads into what they attend to."""
        residual = self.embedding(tokens).detach()
        cosines, sines = (t[0].float().contiguous() for t in self.rotary(residual, positions[None]))
        delta = None
        for number, layer in enumerate(self.layers):
            states = add_norm(residual, delta, layer.before, self.epsilon)
            heads = layer.attention(states).view(len(tokens), -1, self.dim)
            rotate(heads, self.heads, self.kv_heads, cosines, sines, layer.norms)
            delta = layer.out(attend(number, layer, heads))
            states = add_norm(residual, delta, layer.after, self.epsilon)
            delta = layer.down(gate(*layer.both(states).chunk(2, 1)))
        return add_norm(residual, delta, self.norm.weight, self.epsilon)


@torch.no_grad()
def engine_decoder(role: Role) -> TreeDecoder | PlainDecoder:
    """The fastest decoder that computes what `role` computes."""
    if not _is_plain(role):
        return TreeDecoder(role)
    plain, vocab = PlainDecoder(role), role.causal_model.config.vocab_size
    ids = (torch.arange(1, 33) * (vocab // 33))[None]
    for product in plain.products:
        product.refresh()
    role.activate()
    expected = role.decoder(input_ids=ids, use_cache=False).last_hidden_state.float()
    first, layers = plain.prefill(ids[:, :9], [])
    rest, _ = plain.prefill(ids[:, 9:], layers)
    difference = (torch.cat([first, rest], 1).float() - expected).norm() / expected.norm()
    return plain if difference < TOLERANCE[first.dtype] else TreeDecoder(role)


def _is_plain(role: Role) -> bool:
    config = role.causal_model.config
    weight = role.causal_model.get_input_embeddings().weight
    if config.model_type not in FAMILIES or getattr(config, "hidden_act", None) != "silu" or library_for(weight) is None:
        return False
    names = {"self_attn": ("q_proj", "k_proj", "v_proj", "o_proj"), "mlp": ("gate_proj", "up_proj", "down_proj")}
    decoder: Any = role.decoder
    parts = [getattr(getattr(layer, part), name) for layer in decoder.layers for part in names for name in names[part]]
    parts.append(role.causal_model.get_output_embeddings())
    return all(is_product(part, role.adapter) for part in parts) and room_for_a_copy(role.causal_model)
