"""Devices of a plan: a GPU of a known kind, or this machine, whose rates are measured."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.utils.benchmark import Timer

from tether.core.errors import ConfigError
from tether.core.tables import table_beside
from tether.models.cpu.memory import machine_memory
from tether.models.loading import pick_device, pick_dtype

EFFICIENCY = 0.32
DECODING_EFFICIENCY = 0.6
"""Shares of a GPU's product rate and bandwidth that large passes and decoding may reach."""
LAYER_PASS, LAYER_TOKEN, ADAPTED = 1.8e-3, 0.2e-3, 1.6
"""Seconds of a GPU in addition to the arithmetic of a layer. The first is for a pass of a
micro-batch, the second for a decoding step that is replayed as a graph. Also the factor with an
adapter.

Fitted, with the shares above, to an H100 (torch 2.11) within a quarter. Without graphs LAYER_TOKEN
is 1.25e-3. The data:

- 28 layers: 7.3, 11 and 24 ms a step of 64, 256 and 1,024 rows
- 28 layers: 0.45 s for an update of 16 x 1,024 tokens
- 32 layers of 7 billion weights: 1.4 s for four micro-batches of 2 x 1,024 tokens
- 32 layers of 7 billion weights: 8 s for a step of PPO with 16 answers of 256 tokens
"""


DISPATCH = 4e-5
"""Of a GPU: seconds by which a stage's start and the report are timed alone.

Fitted to the quickstart on the same machine, whose five stages took 172 s, 68 of them beside the
stages' own work.
"""


@dataclass(frozen=True, kw_only=True)
class Device:
    """memory in bytes; products in FLOP/s and bandwidth in bytes/s as they are reached, not as they
    are advertised.

    dispatch: seconds that the start of one small operation takes, whatever its size; of a GPU
        DISPATCH.
    """

    name: str
    memory: float
    products: float
    bandwidth: float
    gpu: bool
    dispatch: float = 1e-5

    @property
    def layer_pass(self) -> float:
        """Seconds beside the arithmetic that a layer takes in a forward or a backward pass."""
        return LAYER_PASS if self.gpu else 2500 * self.dispatch

    def layer_token(self, adapted: bool) -> float:
        """The same in a decoding step, of all rows together."""
        return LAYER_TOKEN * ADAPTED**adapted if self.gpu else 500 * self.dispatch


KINDS = table_beside(__file__, "devices.toml")
"""By kind: 10^12 operations and 10^12 bytes a second, and GB. bfloat16 without sparsity, from the
makers' data sheets.
"""


def gpu(memory_gb: float | None = None, name: str | None = None) -> Device:
    """A GPU of a known kind, with the memory of its kind or another; without a kind, one with the
    rates of an h100.

    Raises:
        ConfigError: no rates are known for this kind.
    """
    kind = re.sub("[ -]", "", (name or "h100").lower())
    if kind not in KINDS:
        raise ConfigError(
            f"no rates are known for --gpu {name}; there are: {', '.join(sorted(KINDS))}",
        )
    products, bandwidth, usual = KINDS[kind]
    memory = usual if memory_gb is None else memory_gb
    title = f"{kind}, {memory:g} GB" if name else f"a GPU of {memory:g} GB, times as on an {kind}"
    return Device(
        name=title,
        memory=memory * 1e9,
        products=products * 1e12 * EFFICIENCY,
        bandwidth=bandwidth * 1e12 * DECODING_EFFICIENCY,
        gpu=True,
        dispatch=DISPATCH,
    )


def machine_for(device: str) -> Device:
    """This machine as `model.device` uses it: its GPU, by the data sheet of its kind or else
    measured, or its processor.
    """
    place = pick_device(device)
    if place.type != "cuda":
        total = machine_memory().total
        return _measured(place, "this machine", total, (1024, 576, 1536), 0.75)
    name = torch.cuda.get_device_name(place)
    memory = torch.cuda.get_device_properties(place).total_memory
    if (kind := kind_of(name)) is not None:
        return gpu(round(memory / 1e9, 1), kind)
    return _measured(place, name, memory, (4096, 4096, 4096), 0.5)


def kind_of(name: str) -> str | None:
    """The data sheet of a GPU, by the words of its name: an L40 is no L4. None: there is none here,
    as for a mobile card.
    """
    words = re.sub(r"rtx[ -](?=\d)", "rtx", name.lower()).replace("-", " ").split()
    return None if "laptop" in words else next((kind for kind in KINDS if kind in words), None)


def _measured(
    place: torch.device,
    name: str,
    memory: float,
    sizes: tuple[int, int, int],
    share: float,
) -> Device:
    """A device as it is now, other work beside it included: each rate is measured for a third of a
    second.

    Args:
        sizes: rows, length and columns of a product.
        share: of its rate that passes reach.
    """
    dtype = pick_dtype("auto", str(place))
    on_card = place.type == "cuda"
    rows, length, columns = sizes
    left, right = (torch.randn(n, length, device=place).to(dtype) for n in (rows, columns))
    long = torch.ones(2 ** (25 + on_card), device=place)
    small = torch.randn(16, 64)
    return Device(
        name=f"{name}, {memory / 1e9:.0f} GB",
        memory=memory,
        products=share * _rate(lambda: left @ right.T) * 2 * math.prod(sizes),
        bandwidth=0.8 * _rate(long.sum) * 4 * len(long),
        gpu=on_card,
        dispatch=DISPATCH if on_card else 1 / _rate(lambda: small + small),
    )


def _rate(work: Callable[[], object]) -> float:
    """Number of calls of `work` a second. The mean includes pauses that other programs cause."""
    timer = Timer("work()", globals={"work": work}, num_threads=torch.get_num_threads())
    return 1 / timer.blocked_autorange(min_run_time=0.3).mean
