"""Keys and values of many rows of different ages, in slots that are allocated once, and the
attention that reads them there.
"""

from __future__ import annotations

import logging
import threading
import weakref
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache, DynamicLayer
from transformers.configuration_utils import PretrainedConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel

from tether.core.errors import ModelError
from tether.core.once import once
from tether.models.cpu.kernels import decode
from tether.models.cpu.llama import cache_bytes
from tether.models.cpu.memory import machine_memory
from tether.models.trunk import additive_mask, layer_windows, setting

ATTENTION = "tether_slots"
"""The name under which transformers' models find `slot_attention`."""
FEWER = (
    "keys and values of all engine_rows do not fit into their share of the memory (%.1f GB): "
    "fewer responses are decoded at once. Lower engine_rows to choose their number"
)
CROWDED = (
    "other programs leave %.1f GB of memory, too little for keys and values of all engine_rows: "
    "fewer responses are decoded at once than with the memory free, so answers of this run may "
    "differ from those of others. Lower engine_rows, or free memory"
)
_LOG = logging.getLogger(__name__)
_written = threading.local()


class SlotLayer(DynamicLayer):
    """One layer's (slots, heads, capacity, dim). Row k of a decoding pass writes at `lengths[k]`
    and reads what it has.

    If a model takes attention functions by name, `update` returns its new keys and values. It then
    calls `slot_attention`, which writes them and attends. Another model gets all places up to
    `width`, with its own attention.
    """

    def __init__(self, owner: SlotCache, window: int | None) -> None:
        super().__init__()
        # a cycle would keep the slots until the next garbage collection
        self.owner: SlotCache = weakref.proxy(owner)
        self.window = window
        self.store: tuple[Tensor, Tensor] | None = None

    def update(
        self,
        key_states: Tensor,
        value_states: Tensor,
        *args: object,
        **kwargs: object,
    ) -> tuple[Tensor, Tensor]:
        store = self.store
        if self.owner.in_place:
            _written.layer = self
            return key_states, value_states
        lengths = self.owner.lengths
        width = self.owner.width
        assert store is not None
        rows = torch.arange(len(lengths), device=lengths.device)
        for stored, new in zip(store, (key_states, value_states), strict=True):
            stored[rows, :, lengths] = new[:, :, 0]
        return store[0][: len(lengths), :, :width], store[1][: len(lengths), :, :width]

    def get_seq_length(self) -> int:
        return self.owner.width - 1

    def fill(self, slots: Tensor, keys: Tensor, values: Tensor, capacity: int) -> None:
        """Put the first tokens of new rows into their slots."""
        if self.store is None:
            slots_there = self.owner.num_slots
            self.store = (
                keys.new_zeros(slots_there, keys.shape[1], capacity, keys.shape[3]),
                values.new_zeros(slots_there, values.shape[1], capacity, values.shape[3]),
            )
        for stored, new in zip(self.store, (keys, values), strict=True):
            stored[slots, :, : new.shape[2]] = new

    def move(self, source: Tensor, target: Tensor) -> None:
        assert self.store is not None
        for stored in self.store:
            stored[target] = stored[source]  # what is indexed is copied first


class SlotCache(DynamicCache):
    """Cache with which a transformers model decodes rows together that began at different times.

    Every row begins at place 0 of its slot. There is no padding inside, and places beyond a row's
    length are masked. Before a decoding pass its caller sets `lengths` (rows,), the number of
    stored tokens of each row, and `width`, one more than the largest.

    Args:
        in_place: the model attends by `slot_attention`.

    Raises:
        ModelError: the model keeps states that are not keys and values (recurrent layers).
    """

    def __init__(
        self,
        config: PretrainedConfig,
        num_slots: int,
        capacity: int,
        *,
        in_place: bool = False,
    ) -> None:
        super().__init__()
        config = config.get_text_config(decoder=True)
        kinds = setting(config, "layer_types") or ["full_attention"] * config.num_hidden_layers
        foreign = set(kinds) - {"full_attention", "sliding_attention"}
        if foreign or setting(config, "num_kv_shared_layers"):
            what = (
                f"{sorted(foreign)[0]} layers" if foreign else "layers that share keys and values"
            )
            raise ModelError(
                f"the local engine cannot decode a model with {what}: it keeps keys "
                "and values of every layer",
            )
        self.num_slots = num_slots
        self.capacity = capacity
        self.in_place = in_place
        windows = layer_windows(config)
        self.windows = dict(zip(kinds, windows, strict=True))
        self.slots = [SlotLayer(self, window) for window in windows]
        self.layers = list(self.slots)
        self.lengths = torch.zeros(0, dtype=torch.long)
        self.width = 0

    @property
    def stores(self) -> list[tuple[Tensor, Tensor]]:
        """Of every layer keys and values, (slots, kv heads, capacity, dim); rows have been filled
        in before.
        """
        return [slot.store for slot in self.slots if slot.store is not None]

    def visibility(self, dtype: torch.dtype) -> Tensor | dict[str, Tensor]:
        """Additive masks (rows, 1, 1, width) for the pass that is coming, one for each kind of
        layer if there are several.
        """
        place = torch.arange(self.width, device=self.lengths.device)
        age = self.lengths[:, None] - place  # 0: the token itself; below 0: what others left there
        masks = {}
        for kind, window in self.windows.items():
            seen = (age >= 0) if window is None else (age >= 0) & (age < window)
            masks[kind] = additive_mask(seen, dtype)[:, None, None]
        return masks if len(masks) > 1 else masks.popitem()[1]


def slot_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: object = None,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **options: object,
) -> tuple[Tensor, None]:
    """transformers' attention interface for one new token a row: (rows, heads, 1, dim) -> (rows, 1,
    heads, dim).

    A row's length and the layer's window decide the visible places, so the mask is not read.
    """
    layer: SlotLayer = _written.layer
    del _written.layer
    assert layer.store is not None
    scale = scaling or query.shape[-1] ** -0.5
    settings = {"scale": scale, "window": layer.window, "softcap": softcap}
    if s_aux is None:
        attended = decode(query, key, value, layer.store, layer.owner.lengths, **settings)
        if attended is not None:
            return attended, None
    owner = layer.owner
    return attend_to_slots(
        query,
        key,
        value,
        layer.store,
        owner.lengths,
        owner.width,
        sinks=s_aux,
        **settings,
    ), None


def attend_to_slots(
    query: Tensor,
    new_keys: Tensor,
    new_values: Tensor,
    store: tuple[Tensor, Tensor],
    lengths: Tensor,
    width: int,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of one new token a row to its slot: cpu.kernels.decode in torch's operations, on
    any device.

    Args:
        width: places of the longest row, its new token included.
        sinks: (heads,) logits that take probability and give nothing.
    """
    (rows, heads, _, dim), (keys, values) = query.shape, store
    places = torch.arange(rows, device=lengths.device)
    keys[places, :, lengths], values[places, :, lengths] = new_keys[:, :, 0], new_values[:, :, 0]
    kv_heads = keys.shape[1]
    grouped = query.reshape(rows, kv_heads, heads // kv_heads, dim)
    scores = (grouped * scale) @ keys[:rows, :, :width].transpose(2, 3)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    # 0: the token itself; below 0: what others left there
    age = lengths[:, None] - torch.arange(width, device=lengths.device)
    hidden = (age < 0) if window is None else (age < 0) | (age >= window)
    scores = scores.float().masked_fill_(hidden[:, None, None], -torch.inf)
    if sinks is not None:
        scores = torch.cat(
            [scores, sinks.float().view(1, kv_heads, -1, 1).expand(rows, -1, -1, 1)],
            -1,
        )
    weights = scores.softmax(-1)[..., :width].to(values.dtype)
    return (weights @ values[:rows, :, :width]).reshape(rows, 1, heads, dim)


ALL_ATTENTION_FUNCTIONS.register(ATTENTION, slot_attention)


class Allowance(NamedTuple):
    """Bytes for the keys and values of one engine: a share of its device's memory, and what of that
    memory was free at the start.

    The share decides alone how many rows are decoded at once, so that a run rounds alike beside
    other programs and when it is resumed. Free memory takes part only where keys and values would
    not fit into it.
    """

    share: int
    free: int


def share_of(accelerator: bool) -> int:
    """Keys and values take the memory divided by this: a third of an accelerator's, a quarter of
    the machine's.
    """
    return 3 if accelerator else 4


def allowance(device: torch.device) -> Allowance:
    """The allowance on a device as it is now."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return Allowance(
            total // share_of(True),
            free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device),
        )
    memory = machine_memory()
    return Allowance(memory.total // share_of(False), memory.available)


def rows_that_fit(model: PreTrainedModel, capacity: int, wanted: int, allowed: Allowance) -> int:
    """Number of the `wanted` rows of `capacity` places that are decoded at once. A number below
    `wanted` is logged.
    """
    row_bytes = cache_bytes(model.config, 1, capacity, next(model.parameters()).element_size())
    rows, there = (max(1, min(wanted, memory // row_bytes)) for memory in allowed)
    if rows < wanted:
        once(_LOG.warning, FEWER, allowed.share / 1e9)
    if there < rows:
        once(_LOG.warning, CROWDED, allowed.free / 1e9)
    return min(rows, there)
