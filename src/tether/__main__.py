"""The program `tether`: a signal ends it with one line from its first moment, while its modules
load, to its last.
"""

import atexit
import os
import signal
import sys
import threading
from types import FrameType

_WORDS = {signal.SIGINT: b"interrupted", signal.SIGTERM: b"terminated"}


def program() -> None:
    """Run the command line."""
    ended = [1]
    atexit.register(_end, ended)  # the first, so that this function is called after all others
    for number in _WORDS:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _before)
    from tether.cli import main as command
    from tether.core.stopping import end_in_time

    try:
        command()
    except SystemExit as stop:
        ended[0] = int(stop.code or 0)
        raise
    finally:
        end_in_time(ended[0])
        for number in _WORDS:
            signal.signal(number, _after)


def _before(number: int, _: FrameType | None) -> None:
    """Nothing is open yet, and an exception could be lost in a half-loaded module."""
    os.write(
        2,
        b"tether: "
        + _WORDS[signal.Signals(number)]
        + b" before anything was begun; start the same command again.\n",
    )
    os._exit(128 + number)


def _after(number: int, _: FrameType | None) -> None:
    """Handle a signal while open things are being closed. A second signal ends the program at once."""
    signal.signal(number, signal.SIG_DFL)


def _end(ended: list[int]) -> None:
    """End the program at once while daemon threads are at work.

    Python 3.11 to 3.13 unwind such a thread. Inside of C++ code this aborts the program.
    """
    if any(thread.daemon for thread in threading.enumerate()):
        sys.stdout.flush()
        os._exit(ended[0])


if __name__ == "__main__":
    program()
