"""Where comparisons live: one database that acknowledges nothing that it could lose.

SQLite by default, in write-ahead mode with a flush at every commit; PostgreSQL by its URL. Every change of what is lent and
judged is one transaction that begins by taking the write lock, so that no two people get a task's last place.
"""

# SQLModel types columns as the values in them, so that conditions on columns look like plain bools.
# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false, reportOptionalMemberAccess=false

from __future__ import annotations

import hashlib
import json
import os
import secrets
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, get_args

from sqlalchemy import URL, Connection, Engine, event, func, insert, inspect, make_url, select, text, update
from sqlalchemy.exc import SQLAlchemyError
from sqlmodel import Session, SQLModel, create_engine

from tether.core.errors import ConfigError, DataError
from tether.core.types import Conversation
from tether.preferences.rows import turn_rows
from tether.preferences.tables import (
    AnnotatorRow,
    AssignmentRow,
    FlagRow,
    GuidelineRow,
    JudgmentRow,
    PromptRow,
    ResponseRow,
    Role,
    SessionRow,
    TaskRow,
    TaskState,
)
from tether.preferences.votes import CHOICES

DAY = 86400.0
PART = 500
Migration = Callable[[Connection], None]
MIGRATIONS: tuple[Migration, ...] = (SQLModel.metadata.create_all,)
"""What makes a store, and what brings an older one up to date, in order; a store knows how many of them it has seen.

The first makes today's tables, so that a new store needs none of the others.
"""


class StoreError(DataError):
    """What was asked of the store contradicts what is in it; nothing was changed."""


@dataclass(frozen=True)
class Answer:
    """One response to a prompt, with its provenance; `score` and `spread` are a reward model's."""

    prompt: Conversation
    response: Conversation
    group: str = ""
    model: str = ""
    checkpoint: str = ""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    score: float | None = None
    spread: float | None = None
    prompt_details: Mapping[str, Any] = field(default_factory=dict)
    details: Mapping[str, Any] = field(default_factory=dict)

    @property
    def prompt_id(self) -> str:
        return content_id(self.prompt)

    @property
    def id(self) -> str:
        return content_id(self.prompt, self.response)


@dataclass(frozen=True)
class Question:
    """A comparison to ask for: two answers of one prompt by their ids, and of how many people.

    `known` is the right choice of a gold question, which everybody may be asked; lower `priority` is asked first.
    """

    prompt_id: str
    first_id: str
    second_id: str
    needed: int = 1
    known: str | None = None
    strategy: str = ""
    priority: float = 0.0
    round: str = ""
    details: Mapping[str, Any] = field(default_factory=dict)


def content_id(*conversations: Conversation) -> str:
    """A digest of what was said, so that the same answer to the same prompt is one row wherever it comes from."""
    plain = [[(m.role, m.content) for m in conversation] for conversation in conversations]
    return hashlib.sha256(json.dumps(plain, ensure_ascii=False).encode("utf-8", "surrogatepass")).hexdigest()[:24]


def secret_digest(secret: str) -> str:
    """What the store keeps of a secret; secrets have 256 random bits, so that no salt is needed."""
    return hashlib.sha256(secret.encode()).hexdigest()


class Store:
    """An open preference store.

    Args:
        url: a path, or an SQLAlchemy URL such as `postgresql+psycopg://user@host/name`.
        clock: seconds since 1970.

    Raises:
        ConfigError: the database cannot be opened, is none, or was written by a newer tether.
    """

    def __init__(self, url: str | Path, *, clock: Callable[[], float] = time.time) -> None:
        self.clock = clock
        self.url = _address(url)
        try:
            self.engine = _engine(self.url)
            # SQLite lets waiting writers ask again and again, and some wait for seconds; threads of one process take turns.
            self._turn = threading.RLock() if self.sqlite else nullcontext()
            with self.transaction() as session:
                self.id = self._migrate(session.connection())
        except (SQLAlchemyError, ImportError, OSError) as error:
            cause = str(getattr(error, "orig", error)).splitlines()[0]
            cause += ". Install it with `pip install 'tether-rlhf[postgres]'`" if isinstance(error, ImportError) else ""
            raise ConfigError(f"{_without_password(self.url)}: this preference store cannot be opened: {cause}") from error

    @property
    def sqlite(self) -> bool:
        return self.engine.dialect.name == "sqlite"

    @contextmanager
    def transaction(self) -> Iterator[Session]:
        """Everything in it or nothing; it has the write lock from its first line and is durable when it is left."""
        with self._turn, Session(self.engine, expire_on_commit=False) as session, session.begin():
            if not self.sqlite:
                session.execute(text("SELECT pg_advisory_xact_lock(746574686572)"))
            yield session

    @contextmanager
    def reading(self) -> Iterator[Session]:
        """A consistent view that waits for nobody."""
        options = {"reads": True} if self.sqlite else {"isolation_level": "REPEATABLE READ"}
        with self.engine.connect().execution_options(**options) as connection, Session(connection) as session:
            yield session

    def close(self) -> None:
        self.engine.dispose()

    def _migrate(self, connection: Connection) -> str:
        """Bring the tables up to date; returns the store's own id, by which it knows its exports again."""
        _check_ours(inspect(connection).get_table_names(), self.url)
        connection.execute(text("CREATE TABLE IF NOT EXISTS schema_version (version INTEGER NOT NULL)"))
        connection.execute(text("CREATE TABLE IF NOT EXISTS store_id (id TEXT NOT NULL)"))
        known = connection.execute(text("SELECT max(version) FROM schema_version")).scalar() or 0
        if known > len(MIGRATIONS):
            raise ConfigError(f"{_without_password(self.url)} was written by a newer tether (schema {known}). Upgrade tether")
        for migration in MIGRATIONS[known:] if known else MIGRATIONS[:1]:
            migration(connection)
        if known < len(MIGRATIONS):
            connection.execute(text("INSERT INTO schema_version VALUES (:version)"), {"version": len(MIGRATIONS)})
        if found := connection.execute(text("SELECT id FROM store_id")).scalar():
            return found
        fresh = secrets.token_hex(8)
        connection.execute(text("INSERT INTO store_id VALUES (:id)"), {"id": fresh})
        return fresh

    # What is compared.

    def add_answers(self, answers: Iterable[Answer]) -> int:
        """Add prompts and responses; those that are there already are left as they are. Returns how many responses are new."""
        rows, new = iter(answers), 0
        with self.transaction() as session:
            while part := list(islice(rows, PART)):
                _insert(session, PromptRow, (PromptRow.id,), {(a.prompt_id,): _prompt_row(a) for a in part})
                new += _insert(session, ResponseRow, (ResponseRow.id,), {(a.id,): _response_row(a) for a in part})
        return new

    def add_questions(self, questions: Iterable[Question]) -> int:
        """Ask for comparisons; a pair that its round has already is left as it is. Returns how many tasks are new.

        Raises:
            StoreError: an answer is not in the store or does not belong to the prompt, or both sides are the same answer.
        """
        rows, new = iter(questions), 0
        with self.transaction() as session:
            while part := list(islice(rows, PART)):
                sides = {side for q in part for side in (q.first_id, q.second_id)}
                belongs = select(ResponseRow.id, ResponseRow.prompt_id).where(ResponseRow.id.in_(sides))
                known = dict(session.execute(belongs).all())
                tasks = {(row["pair"], row["round"]): row for row in (_task_row(question, known) for question in part)}
                new += _insert(session, TaskRow, (TaskRow.pair, TaskRow.round), tasks)
        return new

    # Who judges.

    def invite(self, name: str, role: Role = "annotator", days: float = 30.0) -> str:
        """A secret that lets `name` in for so long; a second invitation replaces the first and ends all open sessions.

        Raises:
            StoreError: the name is empty or long.
        """
        if not 0 < len(name.strip()) <= 80:
            raise StoreError("an annotator's name has 1 to 80 characters")
        secret, now = secrets.token_urlsafe(32), self.clock()
        with self.transaction() as session:
            row = session.execute(select(AnnotatorRow).where(AnnotatorRow.name == name.strip())).scalar_one_or_none()
            row = row or AnnotatorRow(name=name.strip(), created=now)
            row.role, row.disabled = role, False
            row.invitation, row.invited_until = secret_digest(secret), now + days * DAY
            session.add(row)
            session.flush()
            session.execute(SessionRow.__table__.delete().where(SessionRow.annotator_id == row.id))
        return secret

    def enter(self, secret: str, days: float = 7.0) -> str | None:
        """A session's secret for an invitation's; None when that is forged, has run out, or its owner is locked out."""
        now, session_secret = self.clock(), secrets.token_urlsafe(32)
        with self.transaction() as session:
            invited = select(AnnotatorRow).where(AnnotatorRow.invitation == secret_digest(secret))
            row = session.execute(invited).scalar_one_or_none()
            if row is None or row.disabled or row.invited_until < now:
                return None
            session.execute(SessionRow.__table__.delete().where(SessionRow.expires < now))
            session.add(SessionRow(digest=secret_digest(session_secret), annotator_id=row.id or 0, expires=now + days * DAY))
        return session_secret

    def who(self, session_secret: str) -> AnnotatorRow | None:
        """Whose session this is, while it lasts."""
        query = select(AnnotatorRow).join(SessionRow, SessionRow.annotator_id == AnnotatorRow.id)
        query = query.where(SessionRow.digest == secret_digest(session_secret), SessionRow.expires > self.clock())
        with self.reading() as session:
            return session.execute(query.where(AnnotatorRow.disabled.is_(False))).scalar_one_or_none()

    def leave(self, session_secret: str) -> None:
        with self.transaction() as session:
            session.execute(SessionRow.__table__.delete().where(SessionRow.digest == secret_digest(session_secret)))

    def lock_out(self, name: str, disabled: bool = True) -> None:
        """Take away (or give back) a person's access; what they judged stays."""
        with self.transaction() as session:
            changed = session.execute(update(AnnotatorRow).where(AnnotatorRow.name == name).values(disabled=disabled))
            if not changed.rowcount:
                raise StoreError(f"nobody here is called {name!r}")

    def annotators(self) -> list[AnnotatorRow]:
        with self.reading() as session:
            return list(session.execute(select(AnnotatorRow).order_by(AnnotatorRow.id)).scalars())

    # What they are asked to look for.

    def set_guidelines(self, text: str, author: str = "", criteria: Sequence[str] | None = None) -> int:
        """A new version of the guidelines, with what answers are rated by (None: as before); returns its number."""
        kept = list(self.guidelines().criteria if criteria is None else criteria)
        with self.transaction() as session:
            row = GuidelineRow(text=text, criteria=kept, author=author, at=self.clock())
            session.add(row)
            session.flush()
            return row.version or 0

    def guidelines(self, version: int | None = None) -> GuidelineRow:
        """A version, or the latest; version 0 is empty and stands for none."""
        query = select(GuidelineRow).order_by(GuidelineRow.version.desc()).limit(1)
        if version is not None:
            query = query.where(GuidelineRow.version == version)
        with self.reading() as session:
            return session.execute(query).scalar_one_or_none() or GuidelineRow(version=0, text="")

    def all_guidelines(self) -> list[GuidelineRow]:
        with self.reading() as session:
            return list(session.execute(select(GuidelineRow).order_by(GuidelineRow.version)).scalars())

    # How far it is.

    def counts(self) -> dict[str, int]:
        """Rows by kind, tasks by state, open places."""
        with self.reading() as session:
            count = lambda table, *only: session.execute(select(func.count()).select_from(table).where(*only)).scalar_one()  # noqa: E731
            places = select(func.sum(TaskRow.needed - TaskRow.judged)).where(TaskRow.state == "open", TaskRow.known.is_(None))
            return {
                "prompts": count(PromptRow), "responses": count(ResponseRow), "tasks": count(TaskRow),
                **{f"tasks_{state}": number for state, number in _states(session).items()},
                "judgments": count(JudgmentRow, JudgmentRow.withdrawn.is_(None)),
                "open_judgments": int(session.execute(places).scalar() or 0),
                "open_flags": count(FlagRow, FlagRow.resolved.is_(None)), "annotators": count(AnnotatorRow),
                "assignments": count(AssignmentRow),
            }  # fmt: skip

    def round(self, name: str) -> dict[str, int]:
        """Tasks of a round (gold questions apart), by state."""
        with self.reading() as session:
            return _states(session, TaskRow.round == name, TaskRow.known.is_(None))


def _states(session: Session, *only: Any) -> dict[str, int]:
    found = dict(session.execute(select(TaskRow.state, func.count()).where(*only).group_by(TaskRow.state)).all())
    return {state: found.get(state, 0) for state in get_args(TaskState)}


def _address(url: str | Path) -> URL:
    """Where the database is, of a path or a URL; ConfigError for what looks like a URL and is none."""
    try:
        # The driver is that of the extra `postgres`.
        known = make_url(str(url).replace("postgresql://", "postgresql+psycopg://", 1)) if "://" in str(url) else None
    except (SQLAlchemyError, ValueError):  # the text may hold a password
        raise ConfigError(f"{str(url).partition('://')[0]}://…: this is no database's URL. Write scheme://host/name") from None
    address = known or URL.create("sqlite", database=str(url))
    if address.get_backend_name() == "sqlite" and address.database:
        address = address.set(database=os.path.expanduser(address.database))
    return address


def _check_ours(tables: Collection[str], url: URL) -> None:
    if tables and not {"schema_version", "judgments"} <= set(tables):
        some = ", ".join(sorted(tables)[:3])
        raise ConfigError(f"{_without_password(url)} is no preference store: it has other tables ({some}). Give another place")


def _engine(url: URL) -> Engine:
    is_file = url.get_backend_name() == "sqlite"
    if is_file and url.database:
        Path(url.database).parent.mkdir(parents=True, exist_ok=True)
    engine = create_engine(url, pool_pre_ping=not is_file, pool_size=16, max_overflow=64)
    if not is_file:
        return engine

    @event.listens_for(engine, "connect")
    def _connected(connection: Any, _: Any) -> None:
        connection.isolation_level = None  # we say BEGIN ourselves, below
        connection.execute("PRAGMA busy_timeout=60000")
        # Write-ahead mode is written into the file, so that it comes after the check.
        _check_ours([name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")], url)
        for setting in ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON"):
            connection.execute(f"PRAGMA {setting}")

    @event.listens_for(engine, "begin")
    def _begun(connection: Connection) -> None:
        reads = connection.get_execution_options().get("reads")
        connection.exec_driver_sql("BEGIN" if reads else "BEGIN IMMEDIATE")

    return engine


def _insert(session: Session, table: Any, columns: Sequence[Any], rows: Mapping[tuple[str, ...], dict[str, Any]]) -> int:
    """Insert the rows whose values of these columns are not in the table yet; returns how many."""
    query = select(*columns).where(columns[0].in_({key[0] for key in rows}))
    seen = set(map(tuple, session.execute(query)))
    if fresh := [row for key, row in rows.items() if key not in seen]:
        session.execute(insert(table), fresh)
    return len(fresh)


def _prompt_row(answer: Answer) -> dict[str, Any]:
    known = {"group": answer.group or answer.prompt_id, "details": dict(answer.prompt_details)}
    return {"id": answer.prompt_id, "messages": turn_rows(answer.prompt), **known}


def _response_row(answer: Answer) -> dict[str, Any]:
    known = {name: getattr(answer, name) for name in ("model", "checkpoint", "score", "spread", "prompt_id", "id")}
    known |= {"sampling": dict(answer.sampling), "details": dict(answer.details)}
    return {**known, "messages": turn_rows(answer.response)}


def _task_row(question: Question, belongs: Mapping[str, str]) -> dict[str, Any]:
    for side in (question.first_id, question.second_id):
        if belongs.get(side) != question.prompt_id:
            raise StoreError(f"the store has no answer {side} to the prompt {question.prompt_id}: add the answers first")
    if question.first_id == question.second_id:
        raise StoreError(f"a comparison needs two answers, and both sides are {question.first_id}")
    if question.known is not None and question.known not in CHOICES:
        raise StoreError(f"a gold question's known choice is one of {', '.join(CHOICES)}, not {question.known!r}")
    if question.needed < 1:
        raise StoreError(f"a comparison needs at least one judgment, {question.needed} were asked for")
    pair = "/".join(sorted((question.first_id, question.second_id)))
    return {**vars(question), "details": dict(question.details), "pair": pair, "taken": 0, "judged": 0, "state": "open"}


def _without_password(url: URL) -> str:
    """The address as it may be shown; a file's is its path."""
    if url.get_backend_name() == "sqlite":
        return str(url.database)
    return url.difference_update_query([name for name in url.query if "pass" in name.lower()]).render_as_string()
