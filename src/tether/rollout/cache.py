"""Keys and values of many rows of different ages, in slots that are allocated once, and the attention that reads them there."""

from __future__ import annotations

import threading
import weakref
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache, DynamicLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tether.core.errors import ModelError
from tether.models.kernels import decode, torch_decode

ATTENTION = "tether_slots"
"""The name under which transformers' models find `slot_attention`."""
_written = threading.local()


class SlotLayer(DynamicLayer):
    """One layer's (slots, heads, capacity, dim). Row k of a decoding pass writes at `lengths[k]` and reads what it has.

    A model that takes attention functions by name gets its new keys and values back from `update`, and `slot_attention`, which
    it calls next, writes them and attends. Another model gets all places up to `width`, to attend to as it will.
    """

    def __init__(self, owner: SlotCache, window: int | None) -> None:
        super().__init__()
        self.owner: SlotCache = weakref.proxy(owner)  # a cycle would keep the slots until the next garbage collection
        self.window = window
        self.store: tuple[Tensor, Tensor] | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if self.owner.in_place:
            _written.layer = self
            return key_states, value_states
        lengths, width = self.owner.lengths, self.owner.width
        assert self.store is not None
        rows = torch.arange(len(lengths), device=lengths.device)
        for stored, new in zip(self.store, (key_states, value_states), strict=True):
            stored[rows, :, lengths] = new[:, :, 0]
        return self.store[0][: len(lengths), :, :width], self.store[1][: len(lengths), :, :width]

    def get_seq_length(self) -> int:
        return self.owner.width - 1

    def fill(self, slots: Tensor, keys: Tensor, values: Tensor, capacity: int) -> None:
        """Put the first tokens of new rows into their slots."""
        if self.store is None:
            shapes = [(self.owner.num_slots, t.shape[1], capacity, t.shape[3]) for t in (keys, values)]
            self.store = (keys.new_zeros(shapes[0]), values.new_zeros(shapes[1]))
        for stored, new in zip(self.store, (keys, values), strict=True):
            stored[slots, :, : new.shape[2]] = new

    def move(self, source: Tensor, target: Tensor) -> None:
        assert self.store is not None
        for stored in self.store:
            stored[target] = stored[source]


class SlotCache(DynamicCache):
    """What a transformers model writes to while rows that began at different times are decoded together.

    Every row begins at place 0 of its slot: there is no padding inside, and what stands beyond a row's length is masked.

    Args:
        in_place: the model attends by `slot_attention`.

    Raises:
        ModelError: the model keeps states that are not keys and values (recurrent layers).
    """

    def __init__(self, config: Any, num_slots: int, capacity: int, *, in_place: bool = False) -> None:
        super().__init__()
        config = config.get_text_config(decoder=True)
        kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
        foreign = set(kinds) - {"full_attention", "sliding_attention"}
        if foreign or getattr(config, "num_kv_shared_layers", 0):
            what = f"{sorted(foreign)[0]} layers" if foreign else "layers that share keys and values"
            raise ModelError(f"the local engine cannot decode a model with {what}: it keeps keys and values of every layer")
        window = getattr(config, "sliding_window", None)
        self.kinds, self.num_slots, self.capacity, self.in_place = kinds, num_slots, capacity, in_place
        self.windows = {"full_attention": None if hasattr(config, "layer_types") else window, "sliding_attention": window}
        self.slots = [SlotLayer(self, self.windows[kind]) for kind in kinds]
        self.layers = list(self.slots)
        self.lengths = torch.zeros(0, dtype=torch.long)
        self.width = 0

    def visibility(self, dtype: torch.dtype) -> Tensor | dict[str, Tensor]:
        """Additive masks (rows, 1, 1, width) for the pass that is coming, one for each kind of layer if there are several."""
        place = torch.arange(self.width, device=self.lengths.device)
        age = self.lengths[:, None] - place  # 0: the token itself; below 0: what others left there
        masks = {}
        for kind in set(self.kinds):
            window = self.windows[kind]
            seen = (age >= 0) if window is None else (age >= 0) & (age < window)
            masks[kind] = torch.zeros_like(seen, dtype=dtype).masked_fill_(~seen, torch.finfo(dtype).min)[:, None, None]
        return masks if len(masks) > 1 else masks.popitem()[1]


def slot_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, **options: Any
) -> tuple[Tensor, None]:
    """transformers' attention interface for one new token a row: (rows, heads, 1, dim) -> (rows, 1, heads, dim).

    What a row may see follows from its length and the layer's window, so the mask is not looked at.
    """
    layer: SlotLayer = _written.layer
    del _written.layer
    assert layer.store is not None
    scale = options.get("scaling") or query.shape[-1] ** -0.5
    settings = {"scale": scale, "window": layer.window, "softcap": options.get("softcap")}
    sinks = options.get("s_aux")
    if sinks is None:
        attended = decode(query, key, value, layer.store, layer.owner.lengths, **settings)
        if attended is not None:
            return attended, None
    return torch_decode(query, key, value, layer.store, layer.owner.lengths, sinks=sinks, **settings), None


ALL_ATTENTION_FUNCTIONS.register(ATTENTION, slot_attention)


def rows_that_fit(model: Any, capacity: int) -> int:
    """How many rows of `capacity` places a quarter of the free memory holds (half of it on an accelerator)."""
    config, weight = model.config.get_text_config(decoder=True), next(model.parameters())
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    row_bytes = 2 * config.num_hidden_layers * heads * dim * weight.element_size() * capacity
    if weight.device.type == "cuda":
        free = torch.cuda.mem_get_info(weight.device)[0] // 2
    else:
        free = psutil.virtual_memory().available // 4
    return max(1, free // row_bytes)
