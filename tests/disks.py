"""Files whose every flush, rename and removal is noted, and the disks that a loss of power after any
of them may leave.

The disk forgets all that was not flushed. A file's content lasts if the file was flushed, and a name
if its folder was. What was not flushed may be there too, so of every moment there are several disks.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import shutil
import stat
import subprocess
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Tree = dict[int, dict[str, int]]
"""Names in each folder; files and folders are numbers, the first of which is the root's."""
Disk = dict[str, bytes]
"""Contents by path. The paths of folders end in "/"."""
CHANGES = ("rename", "replace", "unlink", "remove", "rmdir", "mkdir")
EVERY = 8
"""Changes from one copy of an image to the next."""


@dataclass
class Moment:
    """The files after one change: as programs see them, and as they were flushed."""

    change: str
    seen: Tree
    names: Tree
    contents: dict[int, str]
    sizes: dict[int, int]


@dataclass
class Disks:
    """Notes every change below `root` in this process."""

    root: Path
    moments: list[Moment] = field(default_factory=list)
    blobs: dict[str, bytes] = field(default_factory=dict)
    held: list[int] = field(default_factory=list)
    numbers: dict[tuple[int, int], int] = field(default_factory=dict)
    folders: set[int] = field(default_factory=set)
    names: Tree = field(default_factory=dict)
    contents: dict[int, str] = field(default_factory=dict)
    before: dict[str, Any] = field(default_factory=dict)
    image: Path | None = None
    turn: threading.RLock = field(default_factory=threading.RLock)

    def number(self, path: Path) -> int:
        """The number of a file or folder. It is held open, so that nothing new gets its inode."""
        status = path.lstat()
        key = status.st_dev, status.st_ino
        if key not in self.numbers:
            self.held.append(os.open(path, os.O_PATH | os.O_NOFOLLOW))
            self.numbers[key] = len(self.numbers)
            if stat.S_ISDIR(status.st_mode):
                self.folders.add(self.numbers[key])
        return self.numbers[key]

    def look(self) -> tuple[Tree, dict[int, int]]:
        tree: Tree = {}
        sizes: dict[int, int] = {}
        for folder, _, files in os.walk(self.root):
            here = Path(folder)
            entries = [*here.iterdir()]
            tree[self.number(here)] = {path.name: self.number(path) for path in entries}
            sizes |= {self.number(here / name): (here / name).stat().st_size for name in files}
        return tree, sizes

    def note(self, change: str) -> None:
        seen, sizes = self.look()
        if self.image and len(self.moments) % EVERY == 0:
            copy = self.image.with_name(f"{len(self.moments)}.image")
            subprocess.run(["cp", "--sparse=always", self.image, copy], check=True)
        self.moments.append(Moment(change, seen, dict(self.names), dict(self.contents), sizes))

    def flushed(self, handle: int) -> None:
        """A file's content, or a folder's names, are on the disk from now on."""
        place = Path(os.readlink(f"/proc/self/fd/{handle}"))
        if not place.is_relative_to(self.root):
            return
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            self.names[self.number(place)] = {p.name: self.number(p) for p in place.iterdir()}
        else:
            text = place.read_bytes()
            name = hashlib.sha256(text).hexdigest()
            self.blobs[name] = text
            self.contents[self.number(place)] = name
        self.note(f"flush {place.relative_to(self.root)}")

    def watch(self) -> None:
        """From now on, until `rest`."""
        self.number(self.root)
        before = self.before = {name: getattr(os, name) for name in (*CHANGES, "fsync")}

        def fsync(handle: Any) -> None:
            number = handle if isinstance(handle, int) else handle.fileno()
            with self.turn:
                before["fsync"](number)
                self.flushed(number)

        def changing(name: str) -> Callable[..., Any]:
            def change(*paths: Any, **more: Any) -> Any:
                with self.turn:
                    result = before[name](*paths, **more)
                    self.note(f"{name} {Path(os.fspath(paths[-1 if name[0] == 'r' else 0])).name}")
                    return result

            return change

        for name in CHANGES:
            setattr(os, name, changing(name))
        os.fsync = fsync

    def rest(self) -> None:
        for name, function in self.before.items():
            setattr(os, name, function)

    @contextlib.contextmanager
    def noting(self) -> Iterator[Disks]:
        """From here to the end of the block, at which the files that were held open are closed."""
        self.watch()
        try:
            yield self
            self.note("the end")
        finally:
            self.rest()
            for handle in self.held:
                os.close(handle)


def disks(noted: Disks, moment: Moment, rng: random.Random) -> Iterator[tuple[str, Disk]]:
    """The disks that a loss of power right after a moment may leave: only what was flushed; all
    names, with zeros in place of contents; each name as flushed or as seen, by chance.
    """

    def content(number: int) -> bytes:
        flushed = noted.blobs[moment.contents[number]] if number in moment.contents else b""
        return flushed + bytes(max(0, moment.sizes.get(number, 0) - len(flushed)))

    def either(folder: int) -> dict[str, int]:
        ways = moment.names.get(folder, {}), moment.seen.get(folder, {})
        picked = {name: rng.choice(ways).get(name) for name in sorted({*ways[0], *ways[1]})}
        return {name: number for name, number in picked.items() if number is not None}

    def disk(entries: Callable[[int], dict[str, int]]) -> Disk:
        found: Disk = {}

        def add(folder: int, place: str) -> None:
            for name, number in entries(folder).items():
                if number in noted.folders:
                    found[f"{place}{name}/"] = b""
                    add(number, f"{place}{name}/")
                else:
                    found[place + name] = content(number)

        add(0, "")
        return found

    yield "flushed", disk(lambda folder: moment.names.get(folder, {}))
    yield "seen", disk(lambda folder: moment.seen.get(folder, moment.names.get(folder, {})))
    yield "by chance", disk(either)


def put(disk: Disk, root: Path) -> None:
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir()
    for name, text in disk.items():
        (root / name if name.endswith("/") else (root / name).parent).mkdir(
            parents=True,
            exist_ok=True,
        )
        if not name.endswith("/"):
            (root / name).write_bytes(text)
