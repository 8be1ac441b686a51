"""A small process that ends this one where a user's function holds the interpreter's lock far
beyond its time limit.

A regular expression that backtracks gives no other thread a turn. Neither does a sum of 10**12
numbers. Then the time limit and Ctrl-C cannot act. Checkpoints stay, and the sentence on standard
error names the function.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator

GRACE = 30.0
"""Seconds after the time limit in which the thread that waits for a call has to get a turn."""
WORDS = (
    "tether: {source} has held Python's interpreter for {seconds:.0f} s, and nothing can stop "
    "such a call. The run ends here. A regular expression that backtracks is a usual cause. Mend "
    "the function and start the same command again: it goes on from the last checkpoint"
)
PROGRAM = """
import os, select, signal, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
parent, left, words, unread = int(sys.argv[1]), None, b"", b""

def stopped():
    try:
        with open(f"/proc/{parent}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] in (b"T", b"t")
    except OSError:
        return False

while True:
    if select.select([0], [], [], None if left is None else 0.5)[0]:
        read = os.read(0, 65536)
        if not read:
            break
        *lines, unread = (unread + read).split(b"\\n")
        for line in lines:
            seconds, _, words = line.partition(b" ")
            left = float(seconds) if seconds else None
    elif not stopped():
        left -= 0.5
        if left <= 0:
            os.write(2, b"\\n" + words + b"\\n")
            os.kill(parent, signal.SIGKILL)
            break
"""
"""Time is counted in turns of its own, so that what stops both processes for a while, as Ctrl-Z
does, is not counted.
"""


class Sentinel:
    """The process, started at the first call; without one, as on Windows, calls go unwatched."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self.owner = 0

    @contextlib.contextmanager
    def watch(self, source: str, seconds: float) -> Iterator[None]:
        """A block that has to end within these seconds and the grace."""
        limit = seconds + GRACE
        self._send(f"{limit} {WORDS.format(source=source, seconds=limit)}".replace("\n", " "))
        try:
            yield
        finally:
            self._send("")

    def _send(self, line: str) -> None:
        if os.name != "posix":
            return
        if self.process is None or self.owner != os.getpid() or self.process.poll() is not None:
            command = (sys.executable, "-I", "-S", "-c", PROGRAM, str(os.getpid()))
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
            )
            self.owner = os.getpid()
        pipe = self.process.stdin
        assert pipe is not None
        with contextlib.suppress(OSError):  # it was killed: the next call starts another
            pipe.write(line.encode(errors="replace") + b"\n")
            pipe.flush()


SENTINEL = Sentinel()
"""Of this process."""
