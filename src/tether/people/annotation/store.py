"""The store of comparisons: one database that acknowledges nothing that it could lose.

SQLite by default, in write-ahead mode with a flush at every commit; PostgreSQL by its URL. Every
change of loans and judgments is one transaction. It begins with the write lock, so that no two
people get a task's last place.
"""

# SQLModel types columns as the values in them, so that conditions on columns look like plain bools.
# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false, reportOptionalMemberAccess=false

from __future__ import annotations

import hashlib
import json
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import KW_ONLY, dataclass, field
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import TypedDict, get_args

from sqlalchemy import delete, insert, select, text, update
from sqlalchemy.exc import SQLAlchemyError
from sqlmodel import Session

from tether.core.errors import ConfigError, DataError
from tether.core.types import Conversation, Facts, Json, Texts
from tether.data.rows import turn_rows, turns_of
from tether.people.annotation.database import database_url, engine_of, make_tables, shown
from tether.people.annotation.queries import HELD, LIVE, counts, free, states
from tether.people.annotation.tables import (
    AnnotatorRow,
    GuidelineRow,
    JudgmentRow,
    PromptRow,
    ResponseRow,
    Role,
    SessionRow,
    TaskRow,
)
from tether.people.labels.votes import QUESTIONS

DAY = 86400.0
PART = 500


class Origin(TypedDict, total=False):
    """The fields of an answer that say where it comes from."""

    model: str
    checkpoint: str
    sampling: Facts
    score: float | None
    spread: float | None
    details: Facts


ORIGIN = tuple(Origin.__annotations__)


class StoreError(DataError):
    """A request that contradicts the content of the store; nothing was changed."""


@dataclass(frozen=True)
class Answer:
    """One response to a prompt, with its provenance; `score` and `spread` are a reward model's."""

    prompt: Conversation
    response: Conversation
    group: str = ""
    _: KW_ONLY
    model: str = ""
    checkpoint: str = ""
    sampling: Facts = field(default_factory=dict)
    score: float | None = None
    spread: float | None = None
    prompt_details: Facts = field(default_factory=dict)
    details: Facts = field(default_factory=dict)

    @cached_property
    def prompt_id(self) -> str:
        return content_id(self.prompt)

    @cached_property
    def id(self) -> str:
        return content_id(self.prompt, self.response)


def content_id(*conversations: Conversation) -> str:
    """A digest of what was said, so that the same answer to the same prompt is one row wherever it
    comes from.
    """
    plain = [
        [
            (m.role, m.content, *m.tool_calls, *filter(None, (m.tools, m.template)))
            for m in conversation
        ]
        for conversation in conversations
    ]
    return hashlib.sha256(
        json.dumps(plain, ensure_ascii=False).encode("utf-8", "surrogatepass"),
    ).hexdigest()[:24]


def secret_digest(secret: str) -> str:
    """The digest that the store keeps of a secret; secrets have 256 random bits, so that no salt is
    needed.
    """
    return hashlib.sha256(secret.encode()).hexdigest()


class Store:
    """An open preference store.

    Args:
        url: a path, or an SQLAlchemy URL such as `postgresql+psycopg://user@host/name`.
        clock: seconds since 1970.

    Raises:
        ConfigError: the database cannot be opened, is none, or was written by another tether.
    """

    def __init__(self, url: str | Path, *, clock: Callable[[], float] = time.time) -> None:
        self.clock = clock
        self.url = database_url(url)
        try:
            self.engine = engine_of(self.url)
            # SQLite lets waiting writers ask again and again, and some wait for seconds; threads of
            # one process take turns.
            self._turn = threading.RLock() if self.sqlite else nullcontext()
            with self.transaction() as session:
                self.id = make_tables(session.connection(), self.url)
        except (SQLAlchemyError, ImportError, OSError) as error:
            cause = str(getattr(error, "orig", error)).splitlines()[0]
            cause += (
                ". Install it with `pip install 'tether-rlhf[postgres]'`"
                if isinstance(error, ImportError)
                else ""
            )
            raise ConfigError(
                f"{shown(self.url)}: this preference store cannot be opened: {cause}",
            ) from error

    @property
    def sqlite(self) -> bool:
        return self.engine.dialect.name == "sqlite"

    @contextmanager
    def transaction(self) -> Iterator[Session]:
        """Everything in it or nothing; it has the write lock from its first line and is durable
        when it is left.
        """
        with self._turn, Session(self.engine, expire_on_commit=False) as session, session.begin():
            if not self.sqlite:
                session.execute(text("SELECT pg_advisory_xact_lock(746574686572)"))
            yield session

    @contextmanager
    def reading(self) -> Iterator[Session]:
        """A consistent view that does not wait."""
        options = {"reads": True} if self.sqlite else {"isolation_level": "REPEATABLE READ"}
        with (
            self.engine.connect().execution_options(**options) as connection,
            Session(connection) as session,
        ):
            yield session

    def close(self) -> None:
        self.engine.dispose()

    # What is compared.

    def add_answers(self, answers: Iterable[Answer]) -> int:
        """Add prompts and responses; those that are there already are left as they are. Returns how
        many responses are new.
        """
        rows = iter(answers)
        new = 0
        with self.transaction() as session:
            while part := list(islice(rows, PART)):
                _insert(session, PromptRow, map(_prompt_row, part), "id")
                rows_of_part = (
                    {name: getattr(answer, name) for name in ("id", "prompt_id", *ORIGIN)}
                    | {"messages": turn_rows(answer.response)}
                    for answer in part
                )
                new += _insert(session, ResponseRow, rows_of_part, "id")
        return new

    def add_tasks(self, tasks: Iterable[TaskRow]) -> int:
        """Ask for comparisons; a pair that its round has already is left as it is. Returns how many
        tasks are new.

        A task names its prompt and answers; of what it is asked with, `needed`, `known`,
        `strategy`, `priority`, `round` and `details` are taken.

        Raises:
            StoreError: an answer is not in the store or does not belong to the prompt, or both
                sides are the same answer.
        """
        rows = iter(tasks)
        new = 0
        with self.transaction() as session:
            while part := list(islice(rows, PART)):
                sides = {side for task in part for side in (task.first_id, task.second_id)}
                belongs = select(ResponseRow.id, ResponseRow.prompt_id).where(
                    ResponseRow.id.in_(sides),
                )
                prompts = dict(session.execute(belongs).all())
                new += _insert(
                    session,
                    TaskRow,
                    (_asked(task, prompts) for task in part),
                    "pair",
                    "round",
                )
        return new

    # Who judges.

    def invite(self, name: str, role: Role | None = None, days: float = 30.0) -> str:
        """A secret that lets `name` in for so long; a second invitation replaces the first and ends
        all open sessions.

        Args:
            role: None: as before, or annotator. Judgments in another role stay; a task that is held
                goes back.

        Raises:
            StoreError: the name is empty or long, or there is no such role.
        """
        check_person(name, role)
        secret = secrets.token_urlsafe(32)
        now = self.clock()
        with self.transaction() as session:
            row = session.scalar(select(AnnotatorRow).where(AnnotatorRow.name == name.strip()))
            if row and role not in (None, row.role):
                free(session, session.scalars(HELD, {"annotator": row.id}).all(), "expired")
            row = row or AnnotatorRow(name=name.strip(), created=now)
            row.role = role or row.role
            row.disabled = False
            row.invitation = secret_digest(secret)
            row.invited_until = now + days * DAY
            session.add(row)
            session.flush()
            session.execute(delete(SessionRow).where(SessionRow.annotator_id == row.id))
        return secret

    def enter(self, secret: str, days: float = 7.0) -> str | None:
        """A session's secret for an invitation's; None when that is forged, has run out, or its
        owner is locked out.
        """
        now = self.clock()
        session_secret = secrets.token_urlsafe(32)
        with self.transaction() as session:
            row = session.scalar(
                select(AnnotatorRow).where(AnnotatorRow.invitation == secret_digest(secret)),
            )
            if row is None or row.disabled or row.invited_until < now:
                return None
            session.execute(delete(SessionRow).where(SessionRow.expires < now))
            session.add(
                SessionRow(
                    digest=secret_digest(session_secret),
                    annotator_id=row.id,
                    expires=now + days * DAY,
                ),
            )
        return session_secret

    def who(self, session_secret: str) -> AnnotatorRow | None:
        """The person whose session this is, while it lasts."""
        lasting = (
            SessionRow.digest == secret_digest(session_secret),
            SessionRow.expires > self.clock(),
        )
        with self.reading() as session:
            return session.scalar(
                select(AnnotatorRow)
                .join(SessionRow)
                .where(*lasting, AnnotatorRow.disabled.is_(False)),
            )

    def leave(self, session_secret: str) -> None:
        with self.transaction() as session:
            session.execute(
                delete(SessionRow).where(SessionRow.digest == secret_digest(session_secret)),
            )

    def lock_out(self, name: str, disabled: bool = True) -> None:
        """Take away (or give back) a person's access; what they judged stays."""
        with self.transaction() as session:
            changed = session.execute(
                update(AnnotatorRow).where(AnnotatorRow.name == name).values(disabled=disabled),
            )
            if not changed.rowcount:
                raise StoreError(f"nobody here is called {name!r}")

    def annotators(self) -> list[AnnotatorRow]:
        with self.reading() as session:
            return list(session.scalars(select(AnnotatorRow).order_by(AnnotatorRow.id)))

    # What they are asked to look for.

    def set_guidelines(
        self,
        text: str | None,
        author: str = "",
        criteria: Sequence[str] | None = None,
    ) -> int:
        """Put guidelines, and what answers are rated by and asked on, in force (None: as before);
        returns the number of their version.

        It is a new version, unless they are in force already.

        Raises:
            ConfigError: as `checked_criteria`.
        """
        now = self.guidelines()
        text = now.text if text is None else text.strip()
        criteria = now.criteria if criteria is None else checked_criteria(criteria)
        if (text, criteria) == (now.text, now.criteria):
            return now.version or 0
        with self.transaction() as session:
            row = GuidelineRow(text=text, criteria=criteria, author=author, at=self.clock())
            session.add(row)
            session.flush()
            return row.version

    def guidelines(self, version: int | None = None) -> GuidelineRow:
        """A version, or the latest; version 0 is empty and means none."""
        rows = [row for row in self.all_guidelines() if version in (None, row.version)]
        return rows[-1] if rows else GuidelineRow(version=0, text="")

    def all_guidelines(self) -> list[GuidelineRow]:
        with self.reading() as session:
            return list(session.scalars(select(GuidelineRow).order_by(GuidelineRow.version)))

    # How far it is.

    def counts(self) -> dict[str, int]:
        """Rows by kind, tasks by state (what everybody has skipped waits for new people), open
        places; gold questions apart.
        """
        with self.reading() as session:
            return counts(session)

    def check_round(self, name: str | None) -> None:
        """Refuse the name of a round that no task is in.

        Raises:
            StoreError: there is no such round.
        """
        if name is None:
            return
        with self.reading() as session:
            rounds = session.scalars(select(TaskRow.round).distinct()).all()
        if name not in rounds:
            known = ", ".join(map(repr, sorted(rounds))) or "none"
            raise StoreError(f"there is no round {name!r}; there are: {known}")

    def questions(self) -> list[str]:
        """The names of all criteria and further questions with an answer."""
        with self.reading() as session:
            answered = session.scalars(select(JudgmentRow.ratings).where(LIVE))
            parts = {key.rpartition("/")[0] for ratings in answered for key in ratings}
        return sorted({name.removesuffix("/better") for name in parts} - {""})

    def round(self, name: str, *only: object) -> dict[str, int]:
        """Tasks of a round (gold questions apart) that meet these conditions, by state."""
        with self.reading() as session:
            return states(session, TaskRow.round == name, TaskRow.known.is_(None), *only)


def check_person(name: str, role: str | None) -> None:
    """Refuse the name or the role of a person who cannot be invited.

    Raises:
        StoreError: the name is empty or long, or there is no such role.
    """
    if not 0 < len(name.strip()) <= 80:
        raise StoreError("an annotator's name has 1 to 80 characters")
    if role not in (None, *get_args(Role)):
        raise StoreError(f"a role is one of {', '.join(get_args(Role))}, not {role!r}")


def checked_criteria(names: Sequence[str]) -> list[str]:
    """The criteria and questions without blanks around them and without empty ones.

    Raises:
        ConfigError: too many, too long, one twice, or a question of no kind of `QUESTIONS`.
    """
    criteria = [": ".join(map(str.strip, name.split(":"))) for name in names if name.strip()]
    plain = [question_of(name)[0] for name in criteria]
    odd = any(":" in name or len(name) > 30 or not name.isprintable() for name in plain)
    if len(criteria) > 10 or len(set(plain)) < len(criteria) or odd:
        raise ConfigError(
            "criteria and questions: at most 10 different ones, each of at most 30 characters; a "
            f"question is written NAME: KIND, of {', '.join(QUESTIONS)}",
        )
    return criteria


def question_of(entry: str) -> tuple[str, list[str]]:
    """The name of a criterion or question, and what may be said to a question; `helpful: two`."""
    name, _, kind = entry.rpartition(": ")
    return (name, QUESTIONS[kind].split()) if kind in QUESTIONS and name else (entry, [])


def _insert(session: Session, table: object, rows: Iterable[Json], *columns: str) -> int:
    """Insert the rows whose values of these columns are not in the table yet; returns how many."""
    by_key = {tuple(row[name] for name in columns): row for row in rows}
    first, *others = (getattr(table, name) for name in columns)
    seen = set(
        map(
            tuple,
            session.execute(select(first, *others).where(first.in_({key[0] for key in by_key}))),
        ),
    )
    if fresh := [row for key, row in by_key.items() if key not in seen]:
        session.execute(insert(table), fresh)
    return len(fresh)


def answer_of(prompt: PromptRow, row: ResponseRow) -> Answer:
    """The answer that two rows hold."""
    return Answer(
        turns_of(prompt.messages),
        turns_of(row.messages),
        prompt.group,
        model=row.model,
        checkpoint=row.checkpoint,
        sampling=row.sampling,
        score=row.score,
        spread=row.spread,
        prompt_details=prompt.details,
        details=row.details,
    )


def _prompt_row(answer: Answer) -> Json:
    group = answer.group or answer.prompt_id
    details = dict(answer.prompt_details)
    return {
        "id": answer.prompt_id,
        "messages": turn_rows(answer.prompt),
        "group": group,
        "details": details,
    }


def _asked(task: TaskRow, belongs: Texts) -> Json:
    """The row of a task without a judgment."""
    for side in (task.first_id, task.second_id):
        if belongs.get(side) != task.prompt_id:
            raise StoreError(
                f"the store has no answer {side} to the prompt {task.prompt_id}: add "
                "the answers first",
            )
    if task.first_id == task.second_id:
        raise StoreError(f"a comparison needs two answers, and both sides are {task.first_id}")
    return task.model_dump(exclude={"id"}) | {
        "pair": "/".join(sorted((task.first_id, task.second_id))),
    }
