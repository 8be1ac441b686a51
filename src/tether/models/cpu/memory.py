"""Memory of the machine and of this process, and the allocator of a CPU's tensors.

heap.cpp spreads over hardly more memory than is in use at once.
"""

from __future__ import annotations

import ctypes
import gc
import os
import re
import resource
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import psutil
import torch

from tether.models.cpu.native import compiled

SOURCE = Path(__file__).with_name("heap.cpp")
TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
"""glibc's mallopt parameters (malloc.h)."""
GOOD_GLIBC = (2, 38)
"""From this version on glibc finds room for aligned blocks by itself."""
OWN_GROUPS = Path("/proc/self/cgroup")
GROUPS = Path("/sys/fs/cgroup")
VERSION_2 = ("", "memory.max", "memory.current", "inactive_file")
VERSION_1 = ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
"""Folder of the control groups, and the names of limit, use and cached pages, by version."""


@cache
def own_heap() -> ctypes.CDLL | None:
    """The heap, in use for torch's tensors from the first call on; None where there is none.

    It needs Linux, a glibc before 2.38 and a C++ compiler. Settings of the user's (MALLOC_*
    variables, GLIBC_TUNABLES, another allocator preloaded) are left alone. glibc is set
    to keep up to 1 GB of freed memory. Otherwise a forward pass would take 15 to
    20% longer, because each page would be mapped and touched anew.
    """
    if sys.platform != "linux" or any(
        name.startswith(("MALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD")) for name in os.environ
    ):
        return None
    if hasattr(process := ctypes.CDLL(None), "mallopt"):
        process.mallopt(MMAP_THRESHOLD, 64 << 20)
        process.mallopt(TRIM_THRESHOLD, 1 << 30)
    if not needs_heap():
        return None
    folder = Path(torch.__file__).parent
    abi = int(torch._C._GLIBCXX_USE_CXX11_ABI)
    flags = ["-O2", "-std=c++20", f"-D_GLIBCXX_USE_CXX11_ABI={abi}", f"-I{folder / 'include'}"]
    heap = compiled(
        SOURCE,
        ("g++", "c++", "clang++"),
        flags,
        [f"-L{folder / 'lib'}", "-lc10"],
        [torch.__version__],
    )
    if heap is None:
        return None
    heap.install.argtypes = [ctypes.c_size_t]
    addresses = 2 * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGESIZE")
    return heap if heap.install(addresses) else None


def needs_heap() -> bool:
    """True if the C library is a glibc before `GOOD_GLIBC`."""
    version = re.match(r"glibc (\d+)\.(\d+)", os.confstr("CS_GNU_LIBC_VERSION") or "")
    return version is not None and (int(version[1]), int(version[2])) < GOOD_GLIBC


class Memory(NamedTuple):
    """Bytes that there are, and those that are available."""

    total: int
    available: int


def machine_memory() -> Memory:
    """Memory of this machine, or of the control group of this process, such as a container's, if
    that is less. Pages of files that the group only caches are available.
    """
    memory = psutil.virtual_memory()
    total = memory.total
    available = memory.available
    for limit, used, cached in _groups():
        total = min(total, limit)
        available = min(available, max(0, limit - used + cached))
    return Memory(total, available)


def _groups() -> Iterator[tuple[int, int, int]]:
    """Limit, use and cached pages of the control groups of this process, the outer ones too."""
    for line in _lines(OWN_GROUPS):
        number, kinds, path = line.split(":", 2)
        if number != "0" and "memory" not in kinds.split(","):
            continue
        root, limit, used, cached = VERSION_2 if number == "0" else VERSION_1
        own = GROUPS / root / path.strip("/")
        for place in (own, *own.parents):
            if not place.is_relative_to(GROUPS / root):
                break
            bounds = [*_lines(place / limit), *_lines(place / used)]
            if len(bounds) == 2 and all(bound.isdecimal() for bound in bounds):
                stat = dict(entry.split(" ", 1) for entry in _lines(place / "memory.stat"))
                yield int(bounds[0]), int(bounds[1]), int(stat.get(cached, 0))


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def memory_in_use() -> dict[str, float]:
    """Bytes by the name of their metric: of the process, and, once CUDA has started, the most that
    its tensors took of a GPU.
    """
    held = {"memory/rss_bytes": float(psutil.Process().memory_info().rss)}
    if torch.cuda.is_initialized():
        held["memory/gpu_peak_bytes"] = float(torch.cuda.max_memory_allocated())
    return held


def peak_memory() -> dict[str, int]:
    """The most bytes so far: of this process, and of the tensors on a GPU since this was last
    read.
    """
    process = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    peak = {"peak_rss_bytes": process if sys.platform == "darwin" else process * 1024}
    if torch.cuda.is_initialized():
        peak["peak_gpu_bytes"] = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
    return peak


def free_memory() -> None:
    """Between stages: collect garbage, and give free memory of the heap and of the GPU back to the
    system.
    """
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    if own_heap.cache_info().currsize and (heap := own_heap()) is not None:
        heap.trim()
