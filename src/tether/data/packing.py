"""Sequences of many lengths become few rows of bounded length."""

from __future__ import annotations

from collections.abc import Sequence


def pack(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Indices grouped into rows of at most `capacity` tokens: best fit on decreasing lengths.

    A sequence longer than `capacity` gets a row of its own. Every index appears exactly once; the result depends on
    the lengths alone.
    """
    if capacity < 1:
        raise ValueError(f"capacity must be at least 1, got {capacity}")
    rows: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        fits = [row for row, free in enumerate(room) if free >= lengths[index]]
        if fits:
            best = min(fits, key=room.__getitem__)
            rows[best].append(index)
            room[best] -= lengths[index]
        else:
            rows.append([index])
            room.append(capacity - lengths[index])
    return rows
