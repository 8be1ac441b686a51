"""A check for a sandbox, in a file that imports no torch: its libraries alone may be larger than the
memory of a check.
"""

import os
import threading
import time


def make_trial():
    """A check that starts a thread, opens as many files as it can, and takes a gigabyte."""

    def trial():
        started, taken, files = True, True, []
        try:
            bytearray(1 << 30)
        except MemoryError:
            taken = False
        try:
            threading.Thread(target=time.sleep, args=(0,)).start()
        except RuntimeError:
            started = False
        try:
            while len(files) < 1000:
                files.append(os.open("/dev/null", os.O_RDONLY))
        except OSError:
            pass
        return [started, len(files), taken]

    return trial
