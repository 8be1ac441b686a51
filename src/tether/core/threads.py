"""Threads of OpenMP, which computes torch's products: how many there are, and how they wait. OpenMP
reads both when it starts.

A thread that spins while it waits takes the processor from the one that it waits for, as soon as
another program needs a core. One that sleeps is late. So threads sleep where other programs need
the cores when tether starts, and spin elsewhere (docs/guides/machines.md has the seconds). The choice
changes no number of a run.
"""

from __future__ import annotations

import os
import re
import sys
import time
from contextlib import suppress
from math import ceil
from pathlib import Path
from statistics import median

WAITING = "OMP_WAIT_POLICY"
CHOSEN = WAITING, "GOMP_SPINCOUNT", "KMP_BLOCKTIME"
"""Variables by which a user chooses how threads wait."""
THREADS = "OMP_NUM_THREADS"
QUOTAS = Path("/sys/fs/cgroup/cpu.max"), Path("/sys/fs/cgroup/cpu/cpu.cfs_quota_us")
"""Microseconds of processor time a period, of control groups of version 2 and 1."""
FAST = Path("/sys/devices/cpu_core/cpus")
"""The fast cores of a processor that has slow ones, too, as Linux lists them: 0-11."""


RUNNING = Path("/proc/stat")
"""Its line procs_running counts the threads that run or wait for a core, this one included."""
THREADS_TIMES = Path("/proc/self/task")
"""Has a folder for each thread. Its schedstat has the nanoseconds on a core, and those of waiting."""
LOOKS = 7
BETWEEN = 0.003
"""Looks at the running threads, and the seconds between two."""


def share_the_machine() -> None:
    """Set the number of threads and how they wait, if the user has not, as long as torch is not
    loaded.
    """
    if "torch" in sys.modules:
        return
    if (cores := fewer_cores()) is not None:
        os.environ.setdefault(THREADS, str(cores))
    if not any(name in os.environ for name in CHOSEN) and cores_are_short():
        os.environ[WAITING] = "PASSIVE"


def cores_are_short() -> bool:
    """True if other programs run on cores that this one's threads need, in most of several looks."""
    threads = num_threads()
    return threads > 1 and threads + _others() > (os.cpu_count() or 1)


def _others() -> float:
    """Threads of other programs that run or wait for a core, the median of several looks."""
    counts = []
    for look in range(LOOKS):
        if look:
            time.sleep(BETWEEN)
        running = re.search(r"^procs_running (\d+)", _read(RUNNING), re.M)
        if running is None:
            return 0.0
        counts.append(int(running[1]) - 1)
    return median(counts)


def spin_while_waiting() -> bool:
    """True if there are several threads, and they spin while they wait."""
    return num_threads() > 1 and os.environ.get(WAITING, "").upper() != "PASSIVE"


def num_threads() -> int:
    """Threads of OpenMP."""
    wanted = os.environ.get(THREADS, "")
    return int(wanted) if wanted.isdecimal() else os.cpu_count() or 1


def waited() -> float:
    """Seconds in which the present threads of this process waited for a core, added up; 0 if the
    system does not count them.
    """
    listed = [_read(path).split() for path in THREADS_TIMES.glob("*/schedstat")]
    return sum(int(times[1]) for times in listed if len(times) > 1) / 1e9


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
