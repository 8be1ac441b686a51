"""What every contestant's process speaks: a line when it is ready, then one round of work for every
line it is sent.

Only the standard library: contestants live in environments of their own.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

MARK = "@@contestant "
STARTED = time.perf_counter()


def settings() -> dict[str, Any]:
    """The task as the arena wrote it down."""
    return json.loads(Path(sys.argv[1]).read_text())


def say(**message: Any) -> None:
    sys.stdout.write(f"\n{MARK}{json.dumps(message)}\n")
    sys.stdout.flush()


def commands(**facts: Any) -> Iterator[float]:
    """Say that all is loaded; then yield once for every round that is asked for, with the time at
    which it was.
    """
    say(
        ready=True,
        startup=time.perf_counter() - STARTED,
        threads=os.environ.get("OMP_NUM_THREADS"),
        **facts,
    )
    for _ in sys.stdin:
        yield time.perf_counter()


def serve(work: Callable[[], dict[str, Any]], **facts: Any) -> None:
    """For contestants that do a round by a call. `work` returns at least its amount."""
    for start in commands(**facts):
        result = work()
        say(seconds=time.perf_counter() - start, peak=peak_memory(), **result)


class Gate:
    """For contestants whose library owns the loop: call `updated` after every update; a round is
    `updates` of them.
    """

    def __init__(self, updates: int, amount: Callable[[int], float], **facts: Any) -> None:
        self.updates, self.amount = updates, amount
        self.rounds, self.count, self.losses = commands(**facts), 0, []
        self.start = next(self.rounds)

    def updated(self) -> None:
        self.count += 1
        if self.count % self.updates:
            return
        number = self.count // self.updates - 1
        seconds = time.perf_counter() - self.start
        say(
            seconds=seconds,
            peak=peak_memory(),
            amount=self.amount(number),
            losses=self.losses[-self.updates :],
        )
        self.start = next(self.rounds, 0.0)
        if not self.start:
            os._exit(0)


def peak_memory() -> float:
    """Most resident memory of this process and its children so far, in GB (each at its own
    peak).
    """
    total = 0
    for process in [os.getpid(), *_children(os.getpid())]:
        try:
            status = Path(f"/proc/{process}/status").read_text()
        except OSError:
            continue
        total += sum(
            int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")
        )
    return total / 1e6


def _children(process: int) -> list[int]:
    found = []
    for path in Path(f"/proc/{process}/task").glob("*/children"):
        for child in path.read_text().split():
            found += [int(child), *_children(int(child))]
    return found
