"""How the C library treats the large blocks that a model's passes allocate and free all the time."""

from __future__ import annotations

import ctypes
import os
import sys
from functools import cache

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
"""glibc's mallopt parameters (malloc.h)."""


@cache
def keep_freed_blocks() -> bool:
    """Let glibc keep freed blocks of up to 64 MB for the next operation instead of giving them back to the system.

    Every tensor above glibc's threshold would otherwise be mapped, touched page by page and unmapped again: measured on a small
    model, 15 to 20% of a forward pass. Up to 1 GB may stay with the process. Settings of the user's (MALLOC_* variables,
    GLIBC_TUNABLES, another allocator preloaded) are left alone. Returns whether it was done.
    """
    if sys.platform != "linux" or any(name.startswith(("MALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD")) for name in os.environ):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(MMAP_THRESHOLD, 64 << 20)) and bool(mallopt(TRIM_THRESHOLD, 1 << 30))
