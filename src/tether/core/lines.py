"""A reader of files that another process appends to: each time it reads only the new rows."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from pydantic_core import from_json

from tether.core.types import Json

CHUNK = 16 << 20
"""Bytes that are read at once: a longer line is left out, and counted."""
FAR = 8
"""Chunks without a row that are read at a time: a file may have a hole of terabytes."""


def open_inside(path: Path) -> int | None:
    """A descriptor of a regular file; None where there is none, or a link, a pipe or a device."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    if stat.S_ISREG(os.fstat(handle).st_mode):
        return handle
    os.close(handle)
    return None


class Lines:
    """The rows that a file of JSON lines gains, by byte offset.

    A last line without its end waits. Of a file that a resumed run wrote anew, all rows come again
    and `writing` counts on.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.place = 0
        self.file = 0
        self.writing = self.left_out = 0
        self.is_inside = False
        """The place is within a line that is too long."""

    def news(self) -> Iterator[tuple[bool, list[Json]]]:
        """All rows that there are now, a part at a time, and whether the file was written anew since
        the part before.
        """
        writing = self.writing
        while rows := self.read():
            yield self.writing != writing, rows
            writing = self.writing

    def read(self) -> list[Json]:
        """The next rows; empty: there are no more now."""
        handle = open_inside(self.path)
        if handle is None:
            return []
        with os.fdopen(handle, "rb") as file:
            status = os.fstat(handle)
            if status.st_ino != self.file or status.st_size < self.place:
                self.writing += self.file != 0
                self.place = 0
                self.file = status.st_ino
                self.left_out = 0
                self.is_inside = False
            for _ in range(FAR):
                file.seek(self.place)
                text = file.read(CHUNK)
                if self.is_inside:
                    past = text.find(b"\n") + 1
                    self.place += past or len(text)
                    self.is_inside = not past
                    continue
                whole, end, rest = text.rpartition(b"\n")
                if not end:
                    if len(rest) < CHUNK:
                        break
                    self.is_inside = True
                    self.left_out += 1
                    continue
                self.place += len(whole) + 1
                if rows := self._rows(whole):
                    return rows
        return []

    def _rows(self, text: bytes) -> list[Json]:
        rows = []
        for line in text.split(b"\n"):
            try:
                row = from_json(line) if line else None
            except ValueError:
                row = None
            if isinstance(row, dict):
                rows.append(row)
            else:
                self.left_out += 1
        return rows
