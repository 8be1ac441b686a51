"""What the store keeps, whom it lets in, and what it refuses."""

from __future__ import annotations

import sqlite3
from concurrent.futures import ThreadPoolExecutor

import pytest
from sqlalchemy import select, text
from sqlmodel import SQLModel
from tests.people.annotation.conftest import filled

from tether.core.errors import ConfigError
from tether.core.types import assistant, user
from tether.people.annotation.database import SCHEMA
from tether.people.annotation.store import DAY, Answer, Store, StoreError
from tether.people.annotation.tables import TaskRow


def test_the_same_content_is_one_row_and_a_pair_is_one_task(store):
    questions = filled(store)
    assert store.counts()["responses"] == 12 and store.counts()["tasks"] == 12
    assert filled(store) == questions and store.counts()["tasks"] == 12
    turned = [
        {"prompt_id": q.prompt_id, "first_id": q.second_id, "second_id": q.first_id}
        for q in questions
    ]
    assert store.add_tasks(TaskRow(**task) for task in turned) == 0
    assert store.add_tasks(TaskRow(**task, round="two") for task in turned) == 12


def test_a_question_about_unknown_or_equal_answers_is_refused_whole(store):
    question = filled(store, prompts=1)[0]
    fresh = Answer((user("new"),), (assistant("a"),))
    store.add_answers([fresh])
    one = {"prompt_id": question.prompt_id, "first_id": question.first_id}
    for other, message in [
        ("nowhere", "no answer nowhere"),
        (fresh.id, "no answer"),
        (question.first_id, "two answers"),
    ]:
        with pytest.raises(StoreError, match=message):
            store.add_tasks(
                [
                    TaskRow(**one, second_id=question.second_id, round="x"),
                    TaskRow(**one, second_id=other),
                ],
            )
    assert store.counts()["tasks"] == 3


def test_an_invitation_lets_in_until_it_runs_out_is_replaced_or_taken_away(store, clock):
    secret = store.invite("Ada", days=2)
    session = store.enter(secret)
    assert (
        store.who(session).name == "Ada"
        and store.enter("forged") is None
        and store.who("forged") is None
    )
    clock.now += 3 * DAY
    assert store.enter(secret) is None and store.who(session).name == "Ada"
    again = store.invite("Ada", days=2)
    assert store.who(session) is None and store.enter(secret) is None
    session = store.enter(again)
    store.lock_out("Ada")
    assert store.who(session) is None and store.enter(again) is None
    store.lock_out("Ada", False)
    assert store.who(session).name == "Ada"
    store.leave(session)
    assert store.who(session) is None and len(store.annotators()) == 1
    clock.now += 8 * DAY
    assert store.who(store.enter(store.invite("Ada"))) is not None


def test_no_secret_is_written_down(store, tmp_path):
    secret = store.invite("Ada")
    session = store.enter(secret)
    with store.reading() as connection:
        rows = [
            row
            for table in SQLModel.metadata.sorted_tables
            for row in connection.execute(select(table))
        ]
    stored = str(rows).encode() + b"".join(path.read_bytes() for path in tmp_path.iterdir())
    assert b"Ada" in stored and secret.encode() not in stored and session.encode() not in stored


def test_guidelines_have_versions(store):
    assert store.guidelines().version == 0 and store.guidelines().text == ""
    assert [store.set_guidelines(text, "Ada") for text in ("be kind", "be true")] == [1, 2]
    assert store.guidelines().text == "be true" and store.guidelines(1).text == "be kind"
    assert [row.version for row in store.all_guidelines()] == [1, 2]


@pytest.mark.parametrize(("version", "whose"), [(1, "an older"), (9, "a newer")])
def test_a_store_of_another_tether_is_refused(tmp_path, version, whose):
    path = tmp_path / "p.db"
    filled(Store(path))
    with sqlite3.connect(path) as plain:
        plain.execute("UPDATE schema_version SET version = ?", (version,))
    with pytest.raises(ConfigError, match=f"written by {whose} tether"):
        Store(path)


def test_every_store_has_an_id_of_its_own_and_keeps_it(tmp_path):
    paths = [tmp_path / f"{n}.db" for n in range(5)]
    ids = [Store(path).id for path in paths]
    assert len(set(ids)) == 5 and [Store(path).id for path in paths] == ids


@pytest.mark.parametrize(
    "path",
    ["~/x/y.db", "sqlite:///~/x/y.db", "what?mode=ro#1 %41.db", "~nobody's.db"],
)
def test_a_path_is_the_file_that_it_names(tmp_path, monkeypatch, path):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    store = Store(path)
    filled(store)
    named = tmp_path / path.removeprefix("sqlite:///").replace("~/", "home/")
    assert (
        b"answer 1 to 1" in named.read_bytes() + named.with_name(f"{named.name}-wal").read_bytes()
    )
    assert {
        p.name.removesuffix("-wal").removesuffix("-shm") for p in tmp_path.rglob("*") if p.is_file()
    } == {named.name}


@pytest.mark.parametrize("journal", ["delete", "wal"])
def test_a_database_of_something_else_is_refused_and_left_alone(tmp_path, journal):
    path = tmp_path / "app.db"
    with sqlite3.connect(path) as plain:
        plain.execute(f"PRAGMA journal_mode={journal}")
        plain.execute("CREATE TABLE customers (name TEXT)")
        plain.execute("CREATE TABLE schema_version (version INTEGER)")
    plain.close()
    before = path.read_bytes()
    with pytest.raises(
        ConfigError,
        match=r"app\.db .*\(customers, schema_version\)",
    ):
        Store(path)
    assert path.read_bytes() == before


@pytest.mark.parametrize("content", [b"not a database, but long enough to look at" * 30])
def test_a_file_that_is_no_store_is_refused_and_left_alone(tmp_path, content):
    path = tmp_path / "p.db"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="cannot be opened"):
        Store(path)
    assert path.read_bytes() == content


@pytest.mark.parametrize("url", ["sqlite", "postgresql"], indirect=True)
def test_a_new_store_may_be_opened_by_many_at_once(url):
    with ThreadPoolExecutor(8) as pool:
        stores = list(pool.map(lambda _: Store(url), range(8)))
    filled(stores[0])
    assert {store.counts()["tasks"] for store in stores} == {12}
    with stores[1].reading() as session:
        assert session.execute(text("SELECT max(version) FROM schema_version")).scalar() == SCHEMA
    assert len({store.id for store in stores}) == 1
    for store in stores:
        store.close()


def test_a_view_stays_as_it_was_when_it_began(store):
    filled(store, prompts=1)
    with store.reading() as session:
        count = lambda: session.execute(text("SELECT count(*) FROM tasks")).scalar()  # noqa: E731
        assert count() == 3
        filled(store, prompts=2)
        assert count() == 3 and store.counts()["tasks"] == 6


@pytest.mark.parametrize(
    "url",
    [
        "nosuch://me:secret@host/name",
        "nosuch://host/name?user=me&password=secret",
        "nosuch://host/name?SSLPassword=secret&x=1",
        "nosuch://me:secret@host:port/name",
    ],
)
def test_an_address_is_told_without_its_password(url):
    with pytest.raises(ConfigError, match="nosuch://") as caught:
        Store(url)
    assert "secret" not in str(caught.value)


def test_a_place_that_cannot_be_is_told(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(
        ConfigError,
        match=r"file/sub/p\.db: .*be opened",
    ):
        Store(tmp_path / "file" / "sub" / "p.db")
