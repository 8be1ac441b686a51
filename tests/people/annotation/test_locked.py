"""A database that another program keeps to itself answers within seconds, with a sentence that
names it.
"""

import sqlite3
import time

import pytest

from tether.cli import main
from tether.core.errors import ConfigError, DataError
from tether.judges import cache
from tether.judges.cache import CachedModel
from tether.people.annotation import database
from tether.people.annotation.store import Store


class Silent:
    name = "silent"

    def usage(self):
        return {}

    def verdicts(self, talks, options, *, told=None):
        raise AssertionError("nobody is asked")


@pytest.fixture
def short(monkeypatch):
    assert database.WAIT_FOR_STORE <= 10 and cache.WAIT_FOR_CACHE <= 10
    monkeypatch.setattr(database, "WAIT_FOR_STORE", 1)
    monkeypatch.setattr(cache, "WAIT_FOR_CACHE", 1.0)


def holding(path):
    """A connection that holds the file for writing and for reading."""
    held = sqlite3.connect(path, isolation_level=None)
    held.execute("PRAGMA locking_mode = EXCLUSIVE")
    held.execute("BEGIN EXCLUSIVE")
    return held


def test_a_store_that_is_locked_is_refused(tmp_path, short, monkeypatch, capsys):
    Store(tmp_path / "store.sqlite").engine.dispose()
    held = holding(tmp_path / "store.sqlite")
    began = time.monotonic()
    with pytest.raises(
        ConfigError,
        match=r"store\.sqlite: .*opened: .*locked",
    ):
        Store(tmp_path / "store.sqlite")
    assert time.monotonic() - began < 20
    held.close()


def test_a_store_that_is_locked_while_it_is_open_ends_a_command_with_a_sentence(
    tmp_path,
    short,
    monkeypatch,
    capsys,
):
    path = tmp_path / "store.sqlite"
    store = Store(path)
    held = sqlite3.connect(path, isolation_level=None)
    held.execute("BEGIN IMMEDIATE")

    def work():
        with store.transaction() as session:
            session.connection()

    monkeypatch.setattr("tether.cli.app", lambda **_: work())
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    words = capsys.readouterr().err
    assert (
        f"the database cannot be used: {path}: database is locked. Wait until no other program "
        "uses this database"
    ) in words
    held.close()


def test_a_cache_of_answers_that_is_locked_is_refused_at_the_beginning_and_in_the_middle(
    tmp_path,
    short,
):
    path = tmp_path / "answers.sqlite"
    open_one = CachedModel(Silent(), path)
    open_one._file.close()
    held = holding(path)
    with pytest.raises(DataError, match=r"answers\.sqlite .*\(.*locked\)"):
        CachedModel(Silent(), path)
    held.close()
    again = CachedModel(Silent(), path)
    held = sqlite3.connect(path, isolation_level=None)
    held.execute("BEGIN IMMEDIATE")
    with pytest.raises(
        DataError,
        match=r"answers\.sqlite .*is locked\). Wait",
    ):
        again._run("INSERT OR REPLACE INTO answers VALUES (?, ?)", "key", "[]")
    held.close()
