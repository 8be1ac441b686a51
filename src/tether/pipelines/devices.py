"""What a plan is made for: a GPU of a known kind, or this machine, whose rates are measured."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import psutil
import torch

from tether.core.errors import ConfigError
from tether.models.loading import pick_dtype

EFFICIENCY, DECODING_EFFICIENCY = 0.4, 0.6
"""Shares of a GPU's product rate and bandwidth that large passes and decoding may reach."""


@dataclass(frozen=True)
class Device:
    """memory in bytes; products in FLOP/s and bandwidth in bytes/s as they are reached, not as they are advertised."""

    name: str
    memory: float
    products: float
    bandwidth: float
    gpu: bool


def gpu(memory_gb: float, name: str = "h100") -> Device:
    """A GPU of a known kind with so much memory. Rates: bfloat16 without sparsity, from the makers' data sheets."""
    rates = {"a100": (312e12, 2.0e12), "h100": (989e12, 3.35e12), "h200": (989e12, 4.8e12), "l40s": (362e12, 0.86e12)}
    if name not in rates:
        raise ConfigError(f"no rates are known for {name!r}; there are: {', '.join(sorted(rates))}")
    products, bandwidth = rates[name]
    return Device(name, memory_gb * 1e9, products * EFFICIENCY, bandwidth * DECODING_EFFICIENCY, True)


def this_machine() -> Device:
    """This machine's processor, its rates measured for half a second each."""
    dtype = pick_dtype("auto", "cpu")
    left, right, long = torch.randn(1024, 576).to(dtype), torch.randn(1536, 576).to(dtype), torch.ones(2**25)
    products = _rate(lambda: left @ right.T) * 2 * 1024 * 576 * 1536
    return Device("this machine", psutil.virtual_memory().total, 0.75 * products, 0.8 * _rate(long.sum) * 4 * 2**25, False)


def _rate(work: Callable[[], Any], seconds: float = 0.5) -> float:
    work()
    count, start = 0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        work()
        count += 1
    return count / (time.perf_counter() - start)
