"""What every pipeline tells while it runs: how far it is, and how much memory its process holds."""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable
from typing import Any

Progress = Callable[[int, int, Any], None]


def peak_rss_bytes() -> int:
    """The largest resident size of this process so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def current_rss_bytes() -> int:
    """The resident size of this process now."""
    import psutil

    return psutil.Process().memory_info().rss
