"""A run directory belongs to one process at a time."""

from __future__ import annotations

import contextlib
import glob
import os
import re
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from tether.core.errors import RunError

_HELD: dict[Path, IO[str]] = {}
LOCKS = "TETHER_LOCKS"
"""The environment variable that is 0 where run directories shall not be locked."""
_UNFINISHED = re.compile(r"\..+\.[a-z0-9_]{8}")
"""Names of temporary files, as `whole_file` makes them."""


def hold(folder: Path) -> None:
    """Keep other processes out of a run directory until `release`, or the end of this one, whatever
    that is.

    Raises:
        RunError: another process holds it.
    """
    place = folder.resolve() / ".lock"
    while place not in _HELD:
        file = place.open("a+", encoding="utf-8")
        try:
            if not _locked(file, folder):
                return
            is_same = place.exists() and os.path.samestat(place.stat(), os.fstat(file.fileno()))
        except BaseException:
            file.close()
            raise
        # whoever held the lock has removed its file meanwhile: there is another one now
        if not is_same:
            file.close()
            continue
        file.truncate(0)
        file.write(f"{os.getpid()} {socket.gethostname()}\n")
        file.flush()
        _HELD[place] = file
        _remove_unfinished(folder)


def _locked(file: IO[str], folder: Path) -> bool:
    """True if the lock is this file's now; False if this process has it already, or wants none.

    Raises:
        RunError: another process has it, or the file system has no locks.
    """
    if os.environ.get(LOCKS) == "0":
        file.close()
        return False
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        owner = file.read().partition(" ")[0].strip()
        mine = os.fstat(file.fileno())
        # the folder was moved meanwhile
        if any(os.path.samestat(mine, os.fstat(held.fileno())) for held in _HELD.values()):
            file.close()
            return False
        raise RunError(
            f"process {owner} is at work in {folder}. Wait for its end, or choose "
            "another run directory.",
        ) from None
    except (ImportError, OSError) as error:
        reason = (isinstance(error, OSError) and error.strerror) or "this system has none"
        raise RunError(
            f"{folder} cannot be locked against other processes ({reason}). Choose a run "
            "directory on a file system with locks, "
            f"or set {LOCKS}=0 where no other process writes there.",
        ) from None
    return True


def _remove_unfinished(folder: Path) -> None:
    """Remove what `whole_file` had begun when its process was killed; the folder is this process's
    alone.
    """
    for path in folder.rglob(".*"):
        if _UNFINISHED.fullmatch(path.name) and path.is_file():
            path.unlink(missing_ok=True)


def release(folder: Path) -> None:
    """Let other processes in again."""
    place = folder.resolve() / ".lock"
    if file := _HELD.pop(place, None):
        place.unlink(missing_ok=True)
        file.close()


@contextlib.contextmanager
def unfinished_folder(target: Path) -> Iterator[Path]:
    """A temporary folder beside `target`, to be filled and renamed; what is left of it goes at the
    end.

    Those for the same target that killed processes left are removed first. One that a living
    process fills has its lock.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    for left in target.parent.glob(f".{glob.escape(target.name)}.????????.partial"):
        _remove_left(left)
    folder, lock = _own_folder(target)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


@contextlib.contextmanager
def temporary_folder(name: str) -> Iterator[Path]:
    """A folder for temporary files, which goes at the end.

    Those of the same name that killed processes left are removed first.
    """
    with unfinished_folder(Path(tempfile.gettempdir(), name)) as folder:
        yield folder


def _remove_left(folder: Path) -> None:
    """Remove an unfinished folder, unless a living process has its lock."""
    with contextlib.suppress(ImportError, OSError):
        import fcntl

        lock = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(lock)


def _own_folder(target: Path) -> tuple[Path, int]:
    """A new unfinished folder for a target, and the descriptor that holds its lock."""
    while True:
        folder = Path(
            tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}.", suffix=".partial"),
        )
        # before it is locked, another process may take the folder for one that was left
        with contextlib.suppress(FileNotFoundError):
            lock = os.open(folder, os.O_RDONLY)
            with contextlib.suppress(ImportError, OSError):
                import fcntl

                fcntl.flock(lock, fcntl.LOCK_SH)
            if folder.exists():
                return folder, lock
            os.close(lock)
