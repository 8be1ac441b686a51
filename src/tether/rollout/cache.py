"""A key-value cache that is allocated once for a whole generation instead of being copied at every token."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer


class PreallocatedLayer(DynamicLayer):
    """A layer with room for `capacity` tokens; reads are views of what has been written."""

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.capacity = capacity
        self.length = 0
        self.store: tuple[Tensor, Tensor] | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if self.store is None:
            self.lazy_initialization(key_states, value_states)
            rows, heads, _, dim = key_states.shape
            self.store = (
                key_states.new_empty(rows, heads, self.capacity, dim),
                value_states.new_empty(rows, heads, self.capacity, value_states.shape[-1]),
            )
        end = self.length + key_states.shape[-2]
        self.store[0][:, :, self.length : end] = key_states
        self.store[1][:, :, self.length : end] = value_states
        self.length = end
        return self._refresh()

    def get_seq_length(self) -> int:
        return self.length

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._rebuild(lambda t: t.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        self._rebuild(lambda t: t.index_select(0, indices))

    def _rebuild(self, change: Any) -> None:
        if self.store is None:
            return
        rebuilt = []
        for old in self.store:
            written = change(old[:, :, : self.length])
            new = old.new_empty(written.shape[0], *old.shape[1:])
            new[:, :, : self.length] = written
            rebuilt.append(new)
        self.store = (rebuilt[0], rebuilt[1])
        self._refresh()

    def _refresh(self) -> tuple[Tensor, Tensor]:
        assert self.store is not None
        keys, values = (stored[:, :, : self.length] for stored in self.store)
        self.keys, self.values = keys, values
        return keys, values


def make_cache(config: Any, capacity: int) -> DynamicCache:
    """The cache that `config`'s model wants, with its plain full-attention layers preallocated."""
    cache = DynamicCache(config=config)
    layers = cache.layers or [DynamicLayer() for _ in range(config.num_hidden_layers)]
    cache.layers = [PreallocatedLayer(capacity) if type(layer) is DynamicLayer else layer for layer in layers]
    return cache


def select_rows(cache: DynamicCache, rows: Tensor) -> None:
    """Keep only `rows` of the batch."""
    for layer in cache.layers:
        cast(DynamicLayer, layer).batch_select_indices(rows)


def repeat_rows(cache: DynamicCache, repeats: int) -> None:
    """Every row `repeats` times in a row: one prefill serves a whole group."""
    with torch.no_grad():
        for layer in cache.layers:
            cast(DynamicLayer, layer).batch_repeat_interleave(repeats)
