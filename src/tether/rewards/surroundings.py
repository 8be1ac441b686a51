"""The state of the process that a user's function may change: the run has its own, and the function
its own.

Changes by a call are undone when the call ends. So the run computes the same numbers as with a
function that changes nothing. Later calls find what was left: random numbers, a default dtype. Each
begins in the run's working directory, or in the one that its file went to when it was imported.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import NoReturn, TypeVar

import torch

from tether.core.once import once
from tether.core.stopping import LEFT_BEHIND
from tether.rewards.facets import (
    FACETS,
    FOLDER,
    STREAMS,
    THREADS,
    Facet,
    put_names_back,
    values_of_names,
)

T = TypeVar("T")
CHANGED = (
    "%s changed %s. The run has its own again after each call, and the numbers of the run "
    "are the same."
)
LISTED = 20
"""Names that a warning lists at most."""
_LOG = logging.getLogger("tether.rewards")
_LEFT: dict[str, object] = {}
"""Values that the functions of this process left outside the run, by the facet's name. The next
call begins with them.
"""

_FOLDERS: dict[str | None, object] = {}
"""Working directories that files left when they were imported."""

_NAMED: set[tuple[str, str]] = set()
"""Functions and facets that a warning has named."""


def _read() -> dict[str, object]:
    """All facets; one that cannot be read, such as a working directory that was deleted, is left
    out.
    """
    values: dict[str, object] = {}
    for facet in FACETS:
        with contextlib.suppress(Exception, SystemExit):
            values[facet.name] = facet.read()
    return values


class Surroundings:
    """A block in which a user's code runs: afterwards everything that it changed is the run's
    again, and a warning names it once.

    Within the block `os._exit` raises SystemExit in this process, since it would end the run
    without a message.

    Args:
        source: the words for the code, such as "the reward function kindness (rewards.py)".
        silent: names of facets that are put back without a warning.
        file: of the code; the block begins in the folder that its import left.
    """

    def __init__(self, source: str, silent: Sequence[str] = (), *, file: str | None = None) -> None:
        self.source, self.silent, self.file = source, silent, file
        self.threads: set[threading.Thread] = set()
        self.copies: list[int] = []
        self.before: dict[str, object] = {}
        self.begins: dict[str, object] = {}
        self.inside: dict[str, object] = {}
        self.names: list[tuple[object, ...]] = []
        self.replaced: list[str] = []

    def __enter__(self) -> Surroundings:
        self.names = values_of_names()
        self.copies = [_copied(number) for number in range(3)]
        self.threads = set(threading.enumerate())
        self.before = _read()
        left = {**_LEFT, **({FOLDER: _FOLDERS[self.file]} if self.file in _FOLDERS else {})}
        for facet in FACETS:
            if facet.name in left:
                _write(facet, left[facet.name])
        self.begins = {**self.before, **left}
        self.end, process = os._exit, os.getpid()

        def leave(code: int = 0) -> NoReturn:
            if os.getpid() == process:
                raise SystemExit(f"os._exit({code})")
            self.end(code)

        os._exit = leave
        return self

    def note_folder(self, file: str | None) -> None:
        """Note the working directory in which later calls of this file's functions begin."""
        with contextlib.suppress(OSError):
            if (folder := os.getcwd()) != self.before.get(FOLDER):
                _FOLDERS[file] = folder

    def note_thread(self) -> None:
        """Note, in another thread in which the code ran, what that thread has for itself."""
        self.inside = {THREADS: torch.get_num_threads()}

    def run(self, code: Callable[..., T], *arguments: object) -> T:
        """Run code of the user's within the block. Afterwards Python's own modules have the run's
        functions again, on which the reading of its result depends.
        """
        try:
            return code(*arguments)
        finally:
            self.put_names_back()

    def put_names_back(self) -> None:
        """Give functions of Python's own modules that the code has replaced back to the run."""
        self.replaced += put_names_back(self.names)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.put_names_back()
        os._exit = self.end
        LEFT_BEHIND.update(
            thread
            for thread in set(threading.enumerate()) - self.threads
            if thread.name != self.source
        )
        streams = [number for number in range(3) if _put_back(number, self.copies[number])]
        changed = [*dict.fromkeys(self.replaced), *([STREAMS] if streams else [])]
        after = {**_read(), **self.inside}
        for facet in FACETS:
            name = facet.name
            if (
                _differs(facet, after, self.begins)
                and name not in self.silent
                and name not in changed
            ):
                changed.append(name)
            if not _differs(facet, after, self.before):
                _LEFT.pop(name, None)
                continue
            if facet.keeps and name in after:
                _LEFT[name] = after[name]
            if name in self.before:
                _write(facet, self.before[name])
        changed = [name for name in changed if (self.source, name) not in _NAMED]
        if changed:
            _NAMED.update((self.source, name) for name in changed)
            _LOG.warning(CHANGED, self.source, _listed(changed))


def _copied(number: int) -> int:
    """A copy of a descriptor; -1 of one that is closed."""
    try:
        return os.dup(number)
    except OSError:
        return -1


def _put_back(number: int, copy: int) -> bool:
    """Let a descriptor be again what its copy is, and close the copy; True where that was
    needed.
    """
    if copy < 0:
        return False
    try:
        was, now = os.fstat(copy), os.fstat(number)
        changed = (was.st_dev, was.st_ino, was.st_rdev) != (now.st_dev, now.st_ino, now.st_rdev)
    except OSError:
        changed = True
    if changed:
        os.dup2(copy, number)
    os.close(copy)
    return changed


def _differs(facet: Facet, one: Mapping[str, object], other: Mapping[str, object]) -> bool:
    there = facet.name in one, facet.name in other
    return there[0] != there[1] or (
        all(there) and not facet.same(one[facet.name], other[facet.name])
    )


def _write(facet: Facet, value: object) -> None:
    """Set a facet; where that fails, a warning says so."""
    try:
        facet.write(value)
    except Exception as error:  # noqa: BLE001 - the state of a process fails in many ways
        once(
            _LOG.warning,
            "%s cannot be put back after a call of a user's function: %s",
            facet.name,
            type(error).__name__,
        )


def _listed(names: list[str]) -> str:
    names = names if len(names) <= LISTED else [*names[:LISTED], f"{len(names) - LISTED} more"]
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
