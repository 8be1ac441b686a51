"""Threads of OpenMP, which computes torch's products: how many there are. OpenMP reads it when it
starts.

A thread that spins while it waits takes the processor from the one that it waits for, as soon as
another program needs a core. One that sleeps is late: alone on two cores, 16 rollouts of 32 tokens
took 1.9 s instead of 1.4; beside one busy program 2.5 s instead of 4.1. So waiting is left to the
user: OMP_WAIT_POLICY=PASSIVE suits a machine that others use.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from math import ceil
from pathlib import Path

WAITING = "OMP_WAIT_POLICY"
THREADS = "OMP_NUM_THREADS"
QUOTAS = Path("/sys/fs/cgroup/cpu.max"), Path("/sys/fs/cgroup/cpu/cpu.cfs_quota_us")
"""Microseconds of processor time a period, of control groups of version 2 and 1."""
FAST = Path("/sys/devices/cpu_core/cpus")
"""The fast cores of a processor that has slow ones, too, as Linux lists them: 0-11."""


def share_the_machine() -> None:
    """Set the number of threads, if the user has not, as long as torch is not loaded."""
    if "torch" in sys.modules:
        return
    if (cores := fewer_cores()) is not None:
        os.environ.setdefault(THREADS, str(cores))


def fewer_cores() -> int | None:
    """Threads for a process that may use fewer cores, or has fewer fast ones, than OpenMP would
    count; None: no fewer.
    """
    if not hasattr(os, "sched_getaffinity"):
        return None
    allowed = os.sched_getaffinity(0)
    fast = _numbers(_read(FAST)) & allowed
    cores = len(fast) or len(allowed)
    if (quota := _quota()) is not None:
        cores = min(cores, max(1, ceil(quota)))
    return cores if cores < len(allowed) else None


def _quota() -> float | None:
    """Cores' worth of time that the control group allows; None: no limit."""
    second, first = (_read(path).split() for path in QUOTAS)
    if second and second[0] != "max":
        return int(second[0]) / int(second[1])
    if first and int(first[0]) > 0:
        return int(first[0]) / int(_read(QUOTAS[1].with_name("cpu.cfs_period_us")) or 100_000)
    return None


def _read(path: Path) -> str:
    with suppress(OSError):
        return path.read_text(encoding="ascii").strip()
    return ""


def _numbers(listed: str) -> set[int]:
    """`0-3,8` as numbers."""
    numbers: set[int] = set()
    for part in filter(None, listed.split(",")):
        first, _, last = part.partition("-")
        numbers |= set(range(int(first), int(last or first) + 1))
    return numbers
