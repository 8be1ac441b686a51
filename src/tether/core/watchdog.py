"""The place where a program hangs: the stacks of all threads in a file of the run, and one line on
the terminal.

The watchdog never ends anything. It waits by the monotonic clock, so a change of the wall clock has
no effect.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

from tether.core.keeping import own_file

logger = logging.getLogger("tether")
FIRST_STEPS = 3
"""Steps before a median is used."""


def place(thread: int, file: str | None = None) -> str:
    """Function, file and line where a thread (its `ident`) is: innermost, or innermost in `file`
    where it is anywhere there.
    """
    frame = innermost = sys._current_frames().get(thread)
    while frame is not None and file is not None and frame.f_code.co_filename != file:
        frame = frame.f_back
    frame = frame or innermost
    if frame is None:
        return "nowhere: the thread is over"
    return f"{frame.f_code.co_name} ({Path(frame.f_code.co_filename).name}, line {frame.f_lineno})"


def dump_stacks(path: Path, reason: str) -> None:
    """Append the stacks of all threads to a file, innermost call first."""
    with own_file(path) as file:
        file.write(f"== {time.strftime('%Y-%m-%d %H:%M:%S')}: {reason}\n".encode())
        file.flush()
        faulthandler.dump_traceback(file, all_threads=False)  # of many threads, some are left out
        faulthandler.dump_traceback(file, all_threads=True)
        file.write(b"\n")


class Watchdog:
    """Notices a step that takes far longer than those before it, and reports what is late.

    Args:
        path: file for the stacks, such as stacks.txt in the run directory; None writes none.
        times: number of medians of earlier steps that is too long.
        least: seconds that are never too long. Before the first three steps are finished, six times
            as many.
        say: gets the one message of a run; default: a warning on the terminal.
    """

    def __init__(
        self,
        path: Path | None,
        *,
        times: float = 10.0,
        least: float = 300.0,
        say: Callable[[str], None] = logger.warning,
    ) -> None:
        self.path = path
        self.times = times
        self.least = least
        self.say = say
        self.said = False
        self.durations: deque[float] = deque(maxlen=64)

    @property
    def path(self) -> Path | None:
        return self._path

    @path.setter
    def path(self, path: Path | None) -> None:
        # what is late may be a user's function, in another working directory
        self._path = None if path is None else path.absolute()

    @property
    def limit(self) -> float:
        """Seconds after which the next step is too long."""
        if len(self.durations) < FIRST_STEPS:
            return 6 * self.least
        return max(self.least, self.times * statistics.median(self.durations))

    @contextlib.contextmanager
    def step(self, name: str = "step") -> Iterator[None]:
        """Around one step; costs the start of a thread (under 0.2 ms)."""
        timer = threading.Timer(
            self.limit,
            self.late,
            (f"a {name}", self.limit, threading.get_ident()),
        )
        timer.daemon = True
        timer.start()
        start = time.perf_counter()
        try:
            yield
        finally:
            timer.cancel()
            self.durations.append(time.perf_counter() - start)

    def late(self, what: str, seconds: float, thread: int, file: str | None = None) -> str:
        """Report that something takes too long: all stacks to the file, a message once. Returns the
        `place` where it is.
        """
        where = place(thread, file)
        message = f"{what} has taken {round(seconds, 1):g} s so far, in {where}"
        if self.path is not None:
            dump_stacks(self.path, message)
        if not self.said:
            self.said = True
            self.say(message + ("" if self.path is None else f"; all stacks: {self.path}"))
        return where
