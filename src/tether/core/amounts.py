"""Amounts for people."""

from collections.abc import Sequence
from itertools import pairwise

BARS = "▁▂▃▄▅▆▇█"


def plural(count: float, what: str) -> str:
    """`1 round`, `2 rounds`."""
    return f"{count:,.0f} {what}{'s' if count != 1 else ''}"


def duration(seconds: float) -> str:
    """Seconds, minutes or hours."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def gigabytes(size: float) -> str:
    """Of a number of bytes."""
    return f"{size / 1e9:.2f} GB"


def sparkline(values: Sequence[float], width: int = 40) -> str:
    """A small curve of characters: means of equal parts, from the lowest to the highest."""
    # small enough that sums of the largest floats are finite
    values = [value / 1e9 for value in values]
    count = min(width, len(values))
    cuts = [len(values) * i // count for i in range(count + 1)] if count else []
    means = [sum(values[start:end]) / (end - start) for start, end in pairwise(cuts)]
    low, high = (min(means), max(means)) if means else (0.0, 0.0)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((mean - low) * scale)] for mean in means)
