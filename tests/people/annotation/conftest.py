"""A small store: prompts with three answers each, and people who judge."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine, text

from tether.core.types import assistant, user
from tether.people.annotation.store import Answer, Store
from tether.people.annotation.tables import TaskRow


class Clock:
    """Time that moves when it is told to."""

    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


def filled(store: Store, prompts: int = 4, answers: int = 3, **question: Any) -> list[TaskRow]:
    """All pairs of so many answers to so many prompts, as tasks."""
    rows = [
        [
            Answer(
                (user(f"prompt {p}"),),
                (assistant(f"answer {k} to {p}"),),
                model="m",
                score=float(k),
            )
            for k in range(answers)
        ]
        for p in range(prompts)
    ]
    store.add_answers([answer for row in rows for answer in row])
    pairs = [pair for row in rows for pair in itertools.combinations(row, 2)]
    questions = [
        TaskRow(prompt_id=a.prompt_id, first_id=a.id, second_id=b.id, **question) for a, b in pairs
    ]
    store.add_tasks(questions)
    return questions


def people(store: Store, count: int, role: Any = "annotator") -> list[int]:
    for number in range(count):
        store.invite(f"{role} {number}", role)
    return [row.id or 0 for row in store.annotators() if row.role == role]


@pytest.fixture
def clock() -> Clock:
    return Clock()


# Names an empty PostgreSQL database, such as postgresql://user@127.0.0.1/tether_test; all tests of
# a store use it as well.
POSTGRES = os.environ.get("TETHER_TEST_POSTGRES", "")


@pytest.fixture(params=["sqlite", "postgresql"] if POSTGRES else ["sqlite"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """An empty database; on PostgreSQL a schema of its own."""
    if request.param == "sqlite":
        yield str(tmp_path / "prefs.db")
        return
    if not POSTGRES:
        pytest.skip(
            "TETHER_TEST_POSTGRES is not set: it names an empty PostgreSQL database, which the "
            "tests of a store then use too",
        )
    schema, engine = (
        f"test_{os.getpid()}_{os.urandom(4).hex()}",
        create_engine(
            POSTGRES.replace("postgresql://", "postgresql+psycopg://", 1),
            isolation_level="AUTOCOMMIT",
        ),
    )
    with engine.connect() as connection:
        connection.execute(text(f"CREATE SCHEMA {schema}"))
        yield f"{POSTGRES}{'&' if '?' in POSTGRES else '?'}options=-csearch_path%3D{schema}"
        connection.execute(text(f"DROP SCHEMA {schema} CASCADE"))
    engine.dispose()


@pytest.fixture
def store(url: str, clock: Callable[[], float]) -> Any:
    opened = Store(url, clock=clock)
    yield opened
    opened.close()
