"""Followers of files that another process appends to. Each reads only what is new."""

from __future__ import annotations

import os
import stat
from array import array
from bisect import bisect_right
from pathlib import Path

from pydantic_core import from_json

from tether.core.types import Json

CHUNK = 16 << 20
"""Bytes that are read at once: a longer line is left out, and counted."""
FAR = 8
"""Chunks without a row that are read at a time: a file may have a hole of terabytes."""
MOST = 4000
"""Points of a curve. Beyond them every second one of the older half goes."""


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
        self.path, self.place, self.file = path, 0, 0
        self.writing = self.left_out = 0
        self.is_inside = False
        """The place is within a line that is too long."""

    def read(self) -> list[Json]:
        """The next rows; empty: there are no more now."""
        handle = open_inside(self.path)
        if handle is None:
            return []
        with os.fdopen(handle, "rb") as file:
            status = os.fstat(handle)
            if status.st_ino != self.file or status.st_size < self.place:
                self.writing += self.file != 0
                self.place, self.file, self.left_out = 0, status.st_ino, 0
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


class Curve:
    """Points of one metric, each with the tick at which it was read; at most `MOST` of them."""

    def __init__(self) -> None:
        self.steps, self.values, self.ticks = array("d"), array("d"), array("Q")

    def __len__(self) -> int:
        return len(self.steps)

    def add(self, step: float, value: float, tick: int) -> None:
        """Add a point, rounded to six digits."""
        if len(self.steps) == MOST:
            half = MOST // 2
            self.steps[:half] = self.steps[:half:2]
            self.values[:half] = self.values[:half:2]
            self.ticks[:half] = self.ticks[:half:2]
        self.steps.append(step)
        self.values.append(float(f"{value:.6g}"))
        self.ticks.append(tick)

    def after(self, since: int, until: int) -> tuple[list[float], list[float]]:
        """Steps and values that were read after one tick, up to another."""
        part = slice(bisect_right(self.ticks, since), bisect_right(self.ticks, until))
        return self.steps[part].tolist(), self.values[part].tolist()
