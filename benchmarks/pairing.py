"""Fair comparisons: the contestants take turns in one run, and medians and ratios are told with their spread."""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version


@dataclass(frozen=True)
class Result:
    """Work per second of one contestant in every round."""

    name: str
    rates: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.rates)


def alternate(contestants: dict[str, Callable[[], float]], rounds: int = 3) -> dict[str, Result]:
    """Every contestant once to warm up, then `rounds` times in turn. A contestant returns the amount of its work."""
    rates: dict[str, list[float]] = {name: [] for name in contestants}
    for number in range(rounds + 1):
        for name, work in contestants.items():
            start = time.perf_counter()
            amount = work()
            seconds = time.perf_counter() - start
            if number:
                rates[name].append(amount / seconds)
    return {name: Result(name, tuple(values)) for name, values in rates.items()}


def row(results: dict[str, Result], ours: str, peer: str) -> str:
    """ours, peer, and the ratios round by round: smallest, median, largest."""
    ratios = sorted(a / b for a, b in zip(results[ours].rates, results[peer].rates, strict=True))
    spread = f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
    return f"{results[ours].median:,.0f} | {results[peer].median:,.0f} | {spread}"


def machine() -> str:
    """Processor, cores and versions, for the heading of a table."""
    import os

    import torch

    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            lines = file.read().splitlines()
        model = next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
        flags = next((line for line in lines if line.startswith("flags")), "")
    except (OSError, StopIteration):
        model, flags = platform.processor(), ""
    wide = [name for name in ("amx_bf16", "avx512_bf16", "avx512f") if name in flags]
    return (
        f"{model}, {os.cpu_count()} cores{', ' + wide[0] if wide else ''}; Python {platform.python_version()}, "
        f"torch {torch.__version__}, transformers {version('transformers')}"
    )


def matrix_rate(seconds: float = 1.0) -> float:
    """FLOP/s of this machine's own bfloat16 matrix product, in the shapes of a small model's layers."""
    import torch

    left, right = torch.randn(2048, 576).bfloat16(), torch.randn(576, 1536).bfloat16()
    count, start = 0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        left @ right
        count += 1
    return count * 2 * 2048 * 576 * 1536 / (time.perf_counter() - start)
