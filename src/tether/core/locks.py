"""A run directory belongs to one thread of one process at a time."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import threading
from pathlib import Path
from typing import IO

from tether.core.errors import RunError
from tether.core.keeping import check_own, own_file

_HELD: dict[Path, tuple[IO[bytes], int]] = {}
"""Locks of this process, each with the thread that took it."""
LOCKS = "TETHER_LOCKS"
"""The environment variable that is 0 where run directories shall not be locked."""
_OTHERWISE = "Wait for its end, or choose another run directory."
_OWNER = rb"\d+( \S+)?\n?|\0*"
"""The content of a lock: the process that holds it, or held it, and its machine. A loss of power may
leave zeros.
"""


def hold(folder: Path) -> None:
    """Keep others out of a run directory until `release`, or the end of this process, whatever that
    is.

    Raises:
        RunError: another process or thread holds it, or the lock is a link or another program's
            file.
    """
    place = folder.resolve() / ".lock"
    if place in _HELD and _HELD[place][1] != threading.get_ident():
        raise RunError(f"another thread of this process is at work in {folder}. {_OTHERWISE}")
    while place not in _HELD:
        with contextlib.ExitStack() as closing:
            file = closing.enter_context(own_file(place))
            if not _locked(file, folder):
                return
            check_own(file, place, _OWNER)
            # whoever held the lock may have removed its file meanwhile: there is another one then
            if place.exists() and os.path.samestat(place.stat(), os.fstat(file.fileno())):
                file.truncate(0)
                file.write(f"{os.getpid()} {socket.gethostname()}\n".encode())
                file.flush()
                _HELD[place] = file, threading.get_ident()
                closing.pop_all()


def _locked(file: IO[bytes], folder: Path) -> bool:
    """True if the lock is this file's now; False if this process has it already, or wants none.

    Raises:
        RunError: another process has it, or the file system has no locks.
    """
    if os.environ.get(LOCKS) == "0":
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        owner = file.read(300).decode(errors="replace").partition(" ")[0].strip()
        mine = os.fstat(file.fileno())
        # the folder was moved meanwhile
        if any(
            os.path.samestat(mine, os.fstat(held.fileno())) and thread == threading.get_ident()
            for held, thread in _HELD.values()
        ):
            return False
        raise RunError(f"process {owner} is at work in {folder}. {_OTHERWISE}") from None
    except OSError as error:
        raise RunError(
            f"{folder} cannot be locked against other processes ({error.strerror}). Choose a run "
            "directory on a file system with locks, "
            f"or set {LOCKS}=0 where no other process writes there.",
        ) from None
    return True


def release(folder: Path) -> None:
    """Let others in again, if this thread keeps them out."""
    place = folder.resolve() / ".lock"
    file, thread = _HELD.get(place, (None, 0))
    if file and thread == threading.get_ident():
        del _HELD[place]
        place.unlink(missing_ok=True)
        file.close()
