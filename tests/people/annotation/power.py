"""A store whose every flush is noted, and what it holds on the disks that a loss of power after any
of them may leave: `python -m tests.people.annotation.power FOLDER`.

SQLite flushes files by itself. So the library `flushes.c` has to be loaded before all others.
"""

from __future__ import annotations

import ctypes
import json
import random
import sqlite3
import sys
from pathlib import Path
from sqlite3 import dbapi2
from typing import Any

from sqlalchemy import select
from tests.disks import Disks, disks, put
from tests.people.annotation.conftest import filled, people

from tether.people.annotation.store import Store
from tether.people.annotation.tables import JudgmentRow
from tether.people.annotation.work import Work
from tether.people.labels.votes import Opinion

STORE = Path("new", "folder", "prefs.db")


def careless(*given: Any, **more: Any) -> sqlite3.Connection:
    """A connection of an SQLite that was built to flush nothing unless it is told to."""
    connection = sqlite3.connect(*given, **more)
    connection.execute("PRAGMA synchronous = OFF")
    return connection


def choices(path: Path) -> dict[int, str]:
    """The judgments of a store, by assignment."""
    store = Store(path)
    with store.reading() as session:
        found = {row.assignment_id: row.choice for row in session.scalars(select(JudgmentRow))}
    store.close()
    return found


def main(folder: Path) -> None:
    root, copy = folder / "disk", folder / "copy"
    root.mkdir()
    dbapi2.connect = careless
    seen = Disks(root)
    told = ctypes.CFUNCTYPE(None, ctypes.c_int)(seen.flushed)
    library = ctypes.CDLL(None)
    hook = ctypes.c_void_p.in_dll(library, "after_flush")
    confirmed: dict[int, str] = {}
    promises: dict[int, dict[int, str]] = {}
    with seen.noting():
        hook.value = ctypes.cast(told, ctypes.c_void_p).value
        for _ in range(2):
            store = Store(root / STORE)
            if not confirmed:
                filled(store)
                people(store, 2)
            work = Work(store)
            for turn in range(4):
                assigned = work.next(1 + turn % 2)
                assert assigned
                choice = ("first", "second", "tie")[turn % 3]
                work.judge(assigned.assignment, 1 + turn % 2, Opinion(choice))
                confirmed[assigned.assignment] = choice
                seen.note("confirmed")
                promises[len(seen.moments) - 1] = dict(confirmed)
            store.close()
        hook.value = None
    lost = []
    promise: dict[int, str] = {}
    for number, moment in enumerate(seen.moments):
        promise = promises.get(number, promise)
        for kind, disk in disks(seen, moment, random.Random(number)):
            if promise:
                put(disk, copy)
                held = choices(copy / STORE)
                if not promise.items() <= held.items():
                    lost.append([number, moment.change, kind, len(promise), len(held)])
    changes = [moment.change for moment in seen.moments]
    facts = {"changes": changes, "confirmed": len(confirmed), "lost": lost}
    (folder / "facts.json").write_text(json.dumps(facts), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
