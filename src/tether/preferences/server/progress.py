"""Figures and texts for the pages, read from the store without waiting for anybody: work done and left, tasks in view."""

# SQLModel types columns as the values in them, so that conditions on columns look like plain bools.
# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false, reportOptionalMemberAccess=false

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

from sqlalchemy import and_, func, or_, select
from sqlmodel import Session

from tether.core.types import Conversation
from tether.preferences.queries import LIVE, had_by
from tether.preferences.rows import turns_of
from tether.preferences.store import Store, StoreError
from tether.preferences.tables import AnnotatorRow, AssignmentRow, FlagRow, JudgmentRow, PromptRow, ResponseRow, TaskRow
from tether.preferences.votes import answer_on
from tether.preferences.work import given

PATIENCE = 300
"""A count of what is left is kept this many times as long as it took, so that it never takes much of the machine."""


@dataclass(frozen=True)
class Progress:
    """The number of judgments by a person, and of tasks that are left for them."""

    mine: int
    left: int


@dataclass(frozen=True)
class Waiting:
    """A task that waits for an expert: what it is about, what was said (without names), and why it was flagged."""

    task: int
    prompt: str
    choices: Counter[str]
    comments: tuple[str, ...]
    flags: tuple[str, ...]
    passed: bool
    """True where this expert has skipped it."""


class WorkCount:
    """Counts a person's work exactly, and what is left as exactly as is cheap."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.known: dict[int, tuple[float, int, int]] = {}

    def of(self, person: AnnotatorRow) -> Progress:
        number, now = person.id or 0, time.monotonic()
        with self.store.reading() as session:
            mine = _count(session, JudgmentRow, JudgmentRow.annotator_id == number, LIVE)
            good_until, left, then = self.known.get(number, (0.0, 0, 0))
            if good_until < now:
                left, then = _count(session, TaskRow, *_left(person)), mine
                self.known[number] = (now + PATIENCE * (time.monotonic() - now), left, then)
        return Progress(mine, max(left - (mine - then), 0))

    def forget(self, person: AnnotatorRow) -> None:
        """Count anew what is left for a person: they have skipped or flagged a task."""
        self.known.pop(person.id or 0, None)


def _count(session: Session, table: Any, *only: Any) -> int:
    return session.scalar(select(func.count()).select_from(table).where(*only)) or 0


def _left(person: AnnotatorRow) -> tuple[Any, ...]:
    """The conditions on a task that there is for a person still."""
    unseen = ~had_by(person.id, "judged", "skipped", "flagged")
    if person.role != "annotator":
        return TaskRow.state == "expert", unseen
    mine = and_(AssignmentRow.task_id == TaskRow.id, AssignmentRow.annotator_id == person.id, AssignmentRow.state == "leased")
    free = or_(TaskRow.taken < TaskRow.needed, select(AssignmentRow.id).where(mine).exists())
    return TaskRow.state == "open", TaskRow.known.is_(None), free, unseen


def side_on_left(store: Store, assignment: int, annotator: int) -> str:
    """The answer that stands on the left of a task on this person's screen; StoreError where it is not this person's task."""
    with store.reading() as session:
        return given(session, assignment, annotator)[0].left


def shown_conversation(store: Store, assignment: int, annotator: int, part: str) -> Conversation | None:
    """The prompt or an answer (`left`, `right`) of a task that was lent to this person; None when it was not."""
    with store.reading() as session:
        try:
            row, task, _ = given(session, assignment, annotator)
        except StoreError:
            return None
        if part == "prompt":
            return turns_of(session.get_one(PromptRow, task.prompt_id).messages)
        side = task.first_id if answer_on(part, row.left) == "first" else task.second_id
        return turns_of(session.get_one(ResponseRow, side).messages)


def taken_back(store: Store, assignment: int) -> JudgmentRow | None:
    """The judgment of this task that was taken back last, to start from."""
    query = select(JudgmentRow).where(JudgmentRow.assignment_id == assignment, JudgmentRow.withdrawn.is_not(None))
    with store.reading() as session:
        return session.scalar(query.order_by(JudgmentRow.id.desc()).limit(1))


def waiting(store: Store, expert: AnnotatorRow, limit: int = 50) -> list[Waiting]:
    """The first tasks that wait for an expert, in the order in which they are handed out."""
    query = select(TaskRow, PromptRow).join(PromptRow, PromptRow.id == TaskRow.prompt_id).where(TaskRow.state == "expert")
    with store.reading() as session:
        rows = session.execute(query.order_by(TaskRow.priority, TaskRow.id).limit(limit)).all()
        return [_waiting(session, task, prompt, expert) for task, prompt in rows]


def _waiting(session: Session, task: TaskRow, prompt: PromptRow, expert: AnnotatorRow) -> Waiting:
    judged = session.scalars(select(JudgmentRow).where(JudgmentRow.task_id == task.id, LIVE).order_by(JudgmentRow.id)).all()
    flags = session.scalars(select(FlagRow.reason).where(FlagRow.task_id == task.id, FlagRow.resolved.is_(None)))
    own = select(AssignmentRow.state).where(AssignmentRow.task_id == task.id, AssignmentRow.annotator_id == expert.id)
    words, comments = prompt.messages[-1]["content"][:300], tuple(judgment.comment for judgment in judged if judgment.comment)
    choices, passed = Counter(judgment.choice for judgment in judged), session.scalar(own) in ("skipped", "flagged")
    return Waiting(task.id or 0, words, choices, comments, tuple(flags), passed)
