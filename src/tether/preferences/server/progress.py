"""What the pages tell about work done and left, read from the store without waiting for anybody."""

# SQLModel types columns as the values in them, so that conditions on columns look like plain bools.
# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false, reportOptionalMemberAccess=false

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from sqlalchemy import exists, func, or_, select
from sqlmodel import Session

from tether.core.types import Conversation
from tether.preferences.rows import turns_of
from tether.preferences.store import Store, StoreError, had_by
from tether.preferences.tables import AnnotatorRow, AssignmentRow, FlagRow, JudgmentRow, PromptRow, ResponseRow, TaskRow
from tether.preferences.work import answer_on, given

PATIENCE = 300
"""A count of what is left serves for so many times as long as it took, so that it never takes much of the machine."""


@dataclass(frozen=True)
class Progress:
    """How much a person has judged, and how much there is for them still."""

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
    """Whether this expert has skipped it."""


class WorkCount:
    """Counts a person's work exactly, and what is left as exactly as is cheap."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.known: dict[int, tuple[float, int, int]] = {}

    def of(self, person: AnnotatorRow) -> Progress:
        number, now = person.id or 0, time.monotonic()
        with self.store.reading() as session:
            own = (JudgmentRow.annotator_id == number, JudgmentRow.withdrawn.is_(None))
            mine = session.execute(select(func.count()).select_from(JudgmentRow).where(*own)).scalar_one()
            good_until, left, then = self.known.get(number, (0.0, 0, 0))
            if good_until < now:
                left, then = session.execute(_left(person)).scalar_one(), mine
                self.known[number] = (now + PATIENCE * (time.monotonic() - now), left, then)
        return Progress(mine, max(left - (mine - then), 0))

    def forget(self, person: AnnotatorRow) -> None:
        """Count anew what is left for a person: they have skipped or flagged a task."""
        self.known.pop(person.id or 0, None)


def _left(person: AnnotatorRow) -> Any:
    unseen = ~had_by(person.id, "judged", "skipped", "flagged")
    if person.role != "annotator":
        return select(func.count()).select_from(TaskRow).where(TaskRow.state == "expert", unseen)
    held = exists().where(
        AssignmentRow.task_id == TaskRow.id, AssignmentRow.annotator_id == person.id, AssignmentRow.state == "leased"
    )
    free = (TaskRow.state == "open", TaskRow.known.is_(None), or_(TaskRow.taken < TaskRow.needed, held))
    return select(func.count()).select_from(TaskRow).where(*free, unseen)


def side_on_left(store: Store, assignment: int, annotator: int) -> str:
    """Which answer stands on the left of a task on this person's screen.

    Raises:
        StoreError: it is not this person's task.
    """
    with store.reading() as session:
        return given(session, assignment, annotator)[0].left


def shown_conversation(store: Store, assignment: int, annotator: int, part: str) -> Conversation | None:
    """The prompt or an answer (`left`, `right`) of a task that was lent to this person; None when it was not."""
    with store.reading() as session, suppress(StoreError):
        row, task, _ = given(session, assignment, annotator)
        if part == "prompt":
            return turns_of(session.get_one(PromptRow, task.prompt_id).messages)
        side = task.first_id if answer_on(part, row.left) == "first" else task.second_id
        return turns_of(session.get_one(ResponseRow, side).messages)
    return None


def taken_back(store: Store, assignment: int) -> JudgmentRow | None:
    """What was last said of this task and taken back, to start from."""
    query = select(JudgmentRow).where(JudgmentRow.assignment_id == assignment, JudgmentRow.withdrawn.is_not(None))
    with store.reading() as session:
        return session.execute(query.order_by(JudgmentRow.id.desc()).limit(1)).scalar_one_or_none()


def waiting(store: Store, expert: AnnotatorRow, limit: int = 50) -> list[Waiting]:
    """The first so many tasks that wait for an expert, in the order in which they are handed out."""
    query = select(TaskRow).where(TaskRow.state == "expert").order_by(TaskRow.priority, TaskRow.id).limit(limit)
    with store.reading() as session:
        return [_waiting(session, task, expert) for task in session.execute(query).scalars().all()]


def _waiting(session: Session, task: TaskRow, expert: AnnotatorRow) -> Waiting:
    prompt = session.get_one(PromptRow, task.prompt_id)
    live = select(JudgmentRow).where(JudgmentRow.task_id == task.id, JudgmentRow.withdrawn.is_(None)).order_by(JudgmentRow.id)
    said: Sequence[JudgmentRow] = session.execute(live).scalars().all()
    flags = select(FlagRow.reason).where(FlagRow.task_id == task.id, FlagRow.resolved.is_(None))
    own = select(AssignmentRow.state).where(AssignmentRow.task_id == task.id, AssignmentRow.annotator_id == expert.id)
    return Waiting(
        task=task.id or 0,
        prompt=prompt.messages[-1]["content"][:300] if prompt.messages else "",
        choices=Counter(j.choice for j in said),
        comments=tuple(j.comment for j in said if j.comment),
        flags=tuple(session.execute(flags).scalars()),
        passed=session.execute(own).scalar_one_or_none() in ("skipped", "flagged"),
    )
