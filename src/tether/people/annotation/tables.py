"""The tables of a preference store. Times are seconds since 1970; ids of prompts and answers are
digests of their content.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import ClassVar, Literal

from sqlalchemy import JSON, Column, Index, UniqueConstraint, text
from sqlalchemy.orm import declared_attr
from sqlmodel import Field, SQLModel

from tether.core.types import Json, JsonValue

Role = Literal["annotator", "expert", "admin"]


class Where(StrEnum):
    """Conditions of the indexes below. A query must repeat them word for word, or the database
    walks through all rows.
    """

    WANTED = "state = 'open' AND taken < needed AND known IS NULL"
    DISPUTED = "state = 'expert'"
    GOLD = "known IS NOT NULL"
    LEASED = "state = 'leased'"


def _json(default: Callable[[], object] = dict) -> JsonValue:
    """A column that holds a JSON value."""
    return Field(default_factory=default, sa_column=Column(JSON, nullable=False))


def _only(name: str, *columns: str, where: str, unique: bool = False) -> Index:
    """An index of the few rows that are looked for again and again, however many others there
    are.
    """
    return Index(
        name,
        *columns,
        unique=unique,
        sqlite_where=text(where),
        postgresql_where=text(where),
    )


class _Table(SQLModel):
    @declared_attr.directive
    def __tablename__(cls) -> str:  # noqa: N805
        """`prompts` of PromptRow."""
        return f"{cls.__name__.removesuffix('Row').lower()}s"


class _Numbered(_Table):
    id: int = Field(default=None, primary_key=True)


class PromptRow(_Table, table=True):
    """A conversation that waits for an answer; `group` is what keeps all its comparisons together
    in a split.
    """

    id: str = Field(primary_key=True)
    messages: list[dict[str, str]] = _json(list)
    group: str = ""
    details: Json = _json()


class ResponseRow(_Table, table=True):
    """An answer and where it comes from; `score` and `spread` are a reward model's, in its own
    units.
    """

    id: str = Field(primary_key=True)
    prompt_id: str = Field(foreign_key="prompts.id", index=True)
    messages: list[dict[str, str]] = _json(list)
    model: str = ""
    checkpoint: str = ""
    sampling: Json = _json()
    score: float | None = None
    spread: float | None = None
    details: Json = _json()


class TaskRow(_Numbered, table=True):
    """Two answers to compare. `taken` counts live judgments and leases: never more than
    `needed`, which `recount` raises where more judgments were imported.
    """

    __table_args__ = (
        UniqueConstraint("pair", "round"),
        _only("tasks_wanted", "priority", "id", where=Where.WANTED),
        _only("tasks_disputed", "priority", "id", where=Where.DISPUTED),
        _only("tasks_gold", "id", where=Where.GOLD),
    )
    STATES: ClassVar[tuple[str, ...]] = ("open", "done", "expert", "settled")
    """Wants judgments; has them and they agree; waits for an expert; decided by one."""
    pair: str = ""
    """Both answers' ids in alphabetical order, as the store fills them in: the same two are one
    task, whichever comes first.
    """
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
    details: Json = _json()


class AnnotatorRow(_Numbered, table=True):
    """A person who judges. Of the invitation only a digest is kept."""

    name: str = Field(unique=True)
    role: str = "annotator"
    invitation: str | None = Field(default=None, index=True)
    invited_until: float = 0.0
    disabled: bool = False
    created: float = 0.0


class SessionRow(_Table, table=True):
    """A browser that an invitation let in."""

    digest: str = Field(primary_key=True)
    annotator_id: int = Field(foreign_key="annotators.id", index=True)
    expires: float


class AssignmentRow(_Numbered, table=True):
    """A task lent to a person until `expires`, with the answer on the left; one row for each task
    and person.
    """

    __table_args__ = (
        UniqueConstraint("annotator_id", "task_id"),
        _only("leases", "expires", where=Where.LEASED),
        _only("one_lease", "annotator_id", where=Where.LEASED, unique=True),
    )
    task_id: int = Field(foreign_key="tasks.id", index=True)
    annotator_id: int = Field(foreign_key="annotators.id")
    left: str
    state: str = "leased"
    counted: bool = True
    """True where it takes one of the task's places: an expert's and a gold question's do not."""
    role: str = "annotator"
    """The role of the person when it was lent, which a judgment keeps whatever becomes of the
    person.
    """
    begun: float
    expires: float


class JudgmentRow(_Numbered, table=True):
    """A judgment. One that was taken back stays, as withdrawn, and counts for nothing."""

    __table_args__ = (
        _only("one_judgment", "assignment_id", where="withdrawn IS NULL", unique=True),
        Index("latest_judgment", "annotator_id", "id"),
    )
    assignment_id: int = Field(foreign_key="assignments.id", index=True)
    task_id: int = Field(foreign_key="tasks.id", index=True)
    annotator_id: int = Field(foreign_key="annotators.id")
    choice: str
    strength: int | None = None
    ratings: dict[str, int] = _json()
    comment: str = ""
    correction: str = Field(default="", sa_column_kwargs={"server_default": ""})
    seconds: float = 0.0
    guidelines: int = 0
    at: float = 0.0
    withdrawn: float | None = None


class FlagRow(_Numbered, table=True):
    """A task for an expert, with the reason."""

    task_id: int = Field(foreign_key="tasks.id", index=True)
    annotator_id: int = Field(foreign_key="annotators.id")
    reason: str = ""
    at: float = 0.0
    resolved: float | None = None


class GuidelineRow(_Table, table=True):
    """A version of the guidelines, with its criteria and questions (`store.question_of`); every
    judgment names the version on its page.
    """

    version: int = Field(default=None, primary_key=True)
    text: str
    criteria: list[str] = _json(list)
    author: str = ""
    at: float = 0.0
