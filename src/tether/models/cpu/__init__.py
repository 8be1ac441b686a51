"""Faster passes on a CPU, behind one door: `speed_up`. Nothing here changes what a model computes
beyond rounding.
"""

from __future__ import annotations

import logging

from tether.core.errors import ModelError
from tether.core.once import once
from tether.models.cpu.kernels import library
from tether.models.cpu.memory import own_heap
from tether.models.loading import LoadedModel, pick_device, plain_attention
from tether.models.trunk import GROUPED


def speed_up(loaded: LoadedModel) -> LoadedModel:
    """Give a model the attention of this room, and its tensors the allocator; returns the same
    model.

    Its modules stay transformers' own; the engine's decoder, which is ours, reads their weights.

    `loaded.cpu_kernels` then names what was put in place. `model.cpu_kernels = false` leaves
    everything as transformers made it; without a compiler, or with TETHER_KERNELS=0, attention
    alone is ours, in torch's operations.

    Raises:
        ModelError: grouped attention was asked for and the model needs more than it does.
    """
    from tether.models.cpu.attention import computes_alike, pick_attention

    config = loaded.config
    device = pick_device(loaded.config.device)
    if not config.cpu_kernels:
        return loaded
    attention = pick_attention(config.attention, device, loaded.model)
    if attention == GROUPED and not computes_alike(loaded.model):
        if config.attention == GROUPED.removeprefix("tether_"):
            kind = type(loaded.model).__name__
            raise ModelError(
                f"model.attention = 'grouped' does not compute what {kind} does; use "
                "'eager' or 'sdpa'",
            )
        attention = plain_attention(config.attention, device, loaded.model)
    loaded.model.set_attn_implementation(attention)
    on_cpu = device.type == "cpu"
    parts = {"attention": attention == GROUPED}
    parts |= {
        "decoding": on_cpu and library() is not None,
        "allocator": on_cpu and own_heap() is not None,
    }
    loaded.cpu_kernels = tuple(name for name, is_ours in parts.items() if is_ours)
    once(
        logging.getLogger(__name__).info,
        "CPU kernels in use: %s",
        ", ".join(loaded.cpu_kernels) or "none",
    )
    return loaded
