"""The tables of a preference store. Times are seconds since 1970; ids of prompts and answers are digests of their content."""

from __future__ import annotations

from typing import Any, Literal

from sqlalchemy import JSON, Column, Index, UniqueConstraint, text
from sqlmodel import Field, SQLModel

Role = Literal["annotator", "expert", "admin"]
TaskState = Literal["open", "done", "expert", "settled"]
"""Wants judgments; has them and they agree; waits for an expert; decided by one."""
Lease = Literal["leased", "judged", "skipped", "flagged", "expired"]

WANTED = "state = 'open' AND taken < needed AND known IS NULL"
DISPUTED = "state = 'expert'"
GOLD = "known IS NOT NULL"
LEASED = "state = 'leased'"
"""Which rows the indexes below hold. A query must say the same in the same words, or the database walks through all rows."""


def _only(name: str, *columns: str, where: str, unique: bool = False) -> Index:
    """An index of the few rows that are looked for again and again, however many others there are."""
    return Index(name, *columns, unique=unique, sqlite_where=text(where), postgresql_where=text(where))


class PromptRow(SQLModel, table=True):
    """A conversation that waits for an answer; `group` is what keeps all its comparisons together in a split."""

    __tablename__ = "prompts"  # pyright: ignore[reportAssignmentType]
    id: str = Field(primary_key=True)
    messages: list[dict[str, str]] = Field(sa_column=Column(JSON, nullable=False))
    group: str = ""
    details: dict[str, Any] = Field(default_factory=dict, sa_column=Column(JSON, nullable=False))


class ResponseRow(SQLModel, table=True):
    """An answer and where it comes from; `score` and `spread` are a reward model's, in its own units."""

    __tablename__ = "responses"  # pyright: ignore[reportAssignmentType]
    id: str = Field(primary_key=True)
    prompt_id: str = Field(foreign_key="prompts.id", index=True)
    messages: list[dict[str, str]] = Field(sa_column=Column(JSON, nullable=False))
    model: str = ""
    checkpoint: str = ""
    sampling: dict[str, Any] = Field(default_factory=dict, sa_column=Column(JSON, nullable=False))
    score: float | None = None
    spread: float | None = None
    details: dict[str, Any] = Field(default_factory=dict, sa_column=Column(JSON, nullable=False))


class TaskRow(SQLModel, table=True):
    """Two answers to compare. `taken` counts live judgments and leases: never more than `needed`."""

    __tablename__ = "tasks"  # pyright: ignore[reportAssignmentType]
    __table_args__ = (
        UniqueConstraint("pair", "round"),
        _only("tasks_wanted", "priority", "id", where=WANTED),
        _only("tasks_disputed", "priority", "id", where=DISPUTED),
        _only("tasks_gold", "id", where=GOLD),
    )
    id: int | None = Field(default=None, primary_key=True)
    pair: str
    """Both answers' ids in alphabetical order: the same two are one task, whichever comes first."""
    round: str = ""
    """Names a batch of tasks; a pair may be asked again in another."""
    prompt_id: str = Field(foreign_key="prompts.id", index=True)
    first_id: str = Field(foreign_key="responses.id")
    second_id: str = Field(foreign_key="responses.id")
    needed: int = 1
    taken: int = 0
    judged: int = 0
    state: str = "open"
    known: str | None = None
    """The right choice of a gold question, which everyone may get."""
    strategy: str = ""
    priority: float = 0.0
    """Lower comes first."""
    details: dict[str, Any] = Field(default_factory=dict, sa_column=Column(JSON, nullable=False))


class AnnotatorRow(SQLModel, table=True):
    """Somebody who judges. Of the invitation only a digest is kept."""

    __tablename__ = "annotators"  # pyright: ignore[reportAssignmentType]
    id: int | None = Field(default=None, primary_key=True)
    name: str = Field(unique=True)
    role: str = "annotator"
    invitation: str | None = Field(default=None, index=True)
    invited_until: float = 0.0
    disabled: bool = False
    created: float = 0.0


class SessionRow(SQLModel, table=True):
    """A browser that an invitation let in."""

    __tablename__ = "sessions"  # pyright: ignore[reportAssignmentType]
    digest: str = Field(primary_key=True)
    annotator_id: int = Field(foreign_key="annotators.id", index=True)
    expires: float


class AssignmentRow(SQLModel, table=True):
    """A task lent to a person until `expires`, with the answer that stands on the left; one row a task and person, ever."""

    __tablename__ = "assignments"  # pyright: ignore[reportAssignmentType]
    __table_args__ = (
        UniqueConstraint("annotator_id", "task_id"),
        _only("leases", "expires", where=LEASED),
        _only("one_lease", "annotator_id", where=LEASED, unique=True),
    )
    id: int | None = Field(default=None, primary_key=True)
    task_id: int = Field(foreign_key="tasks.id", index=True)
    annotator_id: int = Field(foreign_key="annotators.id")
    left: str
    state: str = "leased"
    counted: bool = True
    """Whether it takes one of the task's places: an expert's and a gold question's do not."""
    role: str = "annotator"
    """What the person was when it was lent: a judgment stays an annotator's or an expert's whatever becomes of the person."""
    begun: float
    expires: float


class JudgmentRow(SQLModel, table=True):
    """What somebody said. A judgment that was taken back stays, as withdrawn, and counts for nothing."""

    __tablename__ = "judgments"  # pyright: ignore[reportAssignmentType]
    __table_args__ = (
        _only("one_judgment", "assignment_id", where="withdrawn IS NULL", unique=True),
        Index("latest_judgment", "annotator_id", "id"),
    )
    id: int | None = Field(default=None, primary_key=True)
    assignment_id: int = Field(foreign_key="assignments.id", index=True)
    task_id: int = Field(foreign_key="tasks.id", index=True)
    annotator_id: int = Field(foreign_key="annotators.id")
    choice: str
    strength: int | None = None
    ratings: dict[str, int] = Field(default_factory=dict, sa_column=Column(JSON, nullable=False))
    comment: str = ""
    seconds: float = 0.0
    guidelines: int = 0
    at: float = 0.0
    withdrawn: float | None = None


class FlagRow(SQLModel, table=True):
    """A task that somebody wants an expert to look at, and why."""

    __tablename__ = "flags"  # pyright: ignore[reportAssignmentType]
    id: int | None = Field(default=None, primary_key=True)
    task_id: int = Field(foreign_key="tasks.id", index=True)
    annotator_id: int = Field(foreign_key="annotators.id")
    reason: str = ""
    at: float = 0.0
    resolved: float | None = None


class GuidelineRow(SQLModel, table=True):
    """A version of the guidelines, with the criteria to rate by; every judgment names the version that stood beside it."""

    __tablename__ = "guidelines"  # pyright: ignore[reportAssignmentType]
    version: int | None = Field(default=None, primary_key=True)
    text: str
    criteria: list[str] = Field(default_factory=list, sa_column=Column(JSON, nullable=False))
    author: str = ""
    at: float = 0.0
