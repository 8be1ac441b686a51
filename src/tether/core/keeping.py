"""The one writer of what is kept.

A new file or folder is made beside its place and flushed, takes its name, and the name is flushed.
The record that calls it finished is written later, and what it replaces is removed last. So a file
or folder is whole after a loss of power, or as it was.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from tether.core.errors import RunError

MARK = ".tether-unfinished"
"""The end of the names of tether's unfinished folders, the only ones with a dot that it removes."""


@contextlib.contextmanager
def durable(target: str | Path, *, over: bool = False) -> Iterator[Path]:
    """A path at which to write a file or a folder. It is flushed and takes the name of `target` at
    the end; on any error `target` is as it was. A link of that name is replaced.

    Args:
        over: also where a folder of that name is to be replaced.
    """
    target = Path(target)
    with unfinished_folder(target) as folder:
        made = folder / "new" / "made"  # no name that others look for
        made.parent.mkdir()
        yield made
        # safetensors gives its files to their owner alone
        flush_all(made, made.parent.stat().st_mode & 0o666)
        if over and os.path.lexists(target):
            os.rename(target, folder / "old")
        os.replace(made, target)
        flush(target.parent)


@contextlib.contextmanager
def added_to(folder: str | Path) -> Iterator[Path]:
    """A folder of the same name for files that join those of `folder` at the end, each by
    `durable`.
    """
    folder = Path(folder).resolve()
    with unfinished_folder(folder / "new") as unfinished:
        yield (new := unfinished / folder.name)
        for made in sorted(new.rglob("*")):
            if made.is_file():
                with durable(folder / made.relative_to(new)) as place:
                    made.rename(place)


def write_whole(path: Path, content: bytes) -> None:
    """Write a file so that a reader sees the old one or the new one, whole in either case."""
    with durable(path) as unfinished:
        unfinished.write_bytes(content)


def remove(path: Path) -> None:
    """Remove a file or a folder that no record names any more: all of it, or nothing."""
    with unfinished_folder(path) as folder, contextlib.suppress(FileNotFoundError):
        os.rename(path, folder / "old")
        flush(path.parent)


def own_file(path: Path) -> IO[bytes]:
    """A file of tether's own, opened to be read and added to; it is made where it is missing.

    Raises:
        RunError: a link or a folder has that name. Nothing is written.
    """
    make_folder(path.parent)
    if path.is_symlink() or path.is_dir():
        raise RunError(
            f"{path} is a link or a folder, and tether writes into its own files alone. Move it "
            "away, or choose another run directory.",
        )
    how = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
    return os.fdopen(os.open(path, how, 0o666), "a+b")


def check_own(file: IO[bytes], path: Path, own: bytes) -> None:
    """Check that what a file begins with, if it is not empty, is of tether's making.

    Args:
        own: a regular expression of its first 300 bytes.

    Raises:
        RunError: another program or a person made it.
    """
    file.seek(0)
    if (beginning := file.read(300)) and not re.fullmatch(own, beginning, re.DOTALL):
        raise RunError(
            f"{path} is no file of tether's. Move it away, or choose another run directory.",
        )


def make_folder(path: Path) -> None:
    """Make a folder and those above it where they are missing; their names are on the disk then."""
    missing = [one for one in (path, *path.parents) if not one.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for one in missing:
        flush(one.parent)


def flush(path: Path) -> None:
    """Wait until a file, or a folder's list of names, is on the disk itself."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def flush_all(path: Path, rights: int = 0) -> None:
    """Wait until a file, or a folder with all that is in it, is on the disk itself.

    Args:
        rights: to be added to those that the files have.
    """
    walk = os.walk(path, topdown=False)
    inside = (Path(at, name) for at, _, names in walk for name in (*names, ""))
    for place in (path, *inside):
        # logs and journals of other processes may go meanwhile
        with contextlib.suppress(FileNotFoundError):
            if rights and place.is_file():
                place.chmod(place.stat().st_mode | rights)
            if place.is_file() or place.is_dir():
                flush(place)


@contextlib.contextmanager
def unfinished_folder(target: Path) -> Iterator[Path]:
    """A temporary folder beside `target`, to be filled and renamed; what is left of it goes at the
    end.

    Those for the same target that killed processes left are removed first.
    """
    make_folder(target.parent)
    remove_left(target.parent, glob.escape(target.name))
    while True:
        folder = Path(tempfile.mkdtemp(MARK, f".{target.name}.", target.parent))
        # before it is locked, another process may take the folder for one that was left
        with contextlib.suppress(FileNotFoundError):
            lock = os.open(folder, os.O_RDONLY)
            with contextlib.suppress(OSError):
                fcntl.flock(lock, fcntl.LOCK_SH)
            if folder.exists():
                break
            os.close(lock)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def temporary_folder(name: str) -> contextlib.AbstractContextManager[Path]:
    """A folder for temporary files, which goes at the end.

    Those of the same name that killed processes left are removed first.
    """
    return unfinished_folder(Path(tempfile.gettempdir(), name))


def entries(folder: Path, pattern: str) -> list[Path]:
    """The paths that match in the folder of a living run, in order, without hidden and so unfinished
    files, and without those that go meanwhile.
    """
    return [folder / name for name in sorted(glob.glob(pattern, root_dir=folder, recursive=True))]


def remove_left(parent: Path, name: str) -> None:
    """Remove unfinished folders of targets whose names match, unless a living process has their
    locks.
    """
    for folder in parent.glob(f".{name}.????????{MARK}"):
        with contextlib.suppress(OSError):
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)
