"""A bound on the size of what a file holds, by its size on the disk.

Packed texts shrink to a tenth or so. A small file may be made to fill memories.
"""

from __future__ import annotations

from tether.core.errors import DataError

FREE_BYTES, MOST_GROWTH = 1 << 28, 200
"""Bytes that every file may grow to, and times its size that a larger one may."""


def check_growth(name: str, num_bytes: int, packed: int, *, when: str = "unpacked") -> None:
    """Look whether a file that is not so large has become so many bytes.

    Args:
        packed: its size, in bytes.
        when: the words for how it grows.

    Raises:
        DataError: it grows beyond all measure.
    """
    if num_bytes > FREE_BYTES and num_bytes > MOST_GROWTH * packed:
        raise DataError(
            f"{name} grows to more than {MOST_GROWTH} times its size when it is {when}: it is "
            "damaged, or made to fill memories. Save its rows as plain JSON lines if you trust it",
        )
