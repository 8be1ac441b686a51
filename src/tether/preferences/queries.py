"""Queries that several parts of a store share: tasks with their texts, judgments with their people, counts."""

# SQLModel types columns as the values in them, so that conditions on columns look like plain bools.
# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false, reportOptionalMemberAccess=false

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from sqlalchemy import and_, bindparam, exists, func, select, text
from sqlalchemy.orm import aliased
from sqlmodel import Session

from tether.preferences.tables import AnnotatorRow, AssignmentRow, FlagRow, JudgmentRow, PromptRow, ResponseRow, TaskRow, Where
from tether.preferences.votes import more_than_half

_FIRST, _SECOND = aliased(ResponseRow), aliased(ResponseRow)
LIVE = JudgmentRow.withdrawn.is_(None)
TASKS = (
    select(TaskRow, PromptRow, _FIRST, _SECOND)
    .join(PromptRow, PromptRow.id == TaskRow.prompt_id)
    .join(_FIRST, _FIRST.id == TaskRow.first_id)
    .join(_SECOND, _SECOND.id == TaskRow.second_id)
)
"""Tasks, each with its prompt and its two answers."""
JUDGED = (
    select(JudgmentRow, AssignmentRow, AnnotatorRow)
    .join(AssignmentRow, AssignmentRow.id == JudgmentRow.assignment_id)
    .join(AnnotatorRow, AnnotatorRow.id == JudgmentRow.annotator_id)
    .where(LIVE)
)
"""Live judgments, each with its assignment and its person."""
LENT = (
    select(AssignmentRow, TaskRow, AnnotatorRow)
    .join(TaskRow, TaskRow.id == AssignmentRow.task_id)
    .join(AnnotatorRow, AnnotatorRow.id == AssignmentRow.annotator_id)
)
"""Assignments, each with its task and its person."""
HELD = select(AssignmentRow).where(AssignmentRow.annotator_id == bindparam("annotator"), text(Where.LEASED))
_OPEN_FLAGS = select(func.count()).select_from(FlagRow).where(FlagRow.task_id == bindparam("task"), FlagRow.resolved.is_(None))
_PLACES = (
    select(AssignmentRow.role, AssignmentRow.counted, JudgmentRow.choice)
    .outerjoin(JudgmentRow, and_(JudgmentRow.assignment_id == AssignmentRow.id, LIVE))
    .where(AssignmentRow.task_id == bindparam("task"), AssignmentRow.state.in_(("leased", "judged")))
)


def had_by(annotator: Any, *states: str) -> Any:
    """A condition: somebody was given the two answers of a task, in whatever round; leases that ran out do not count.

    Nested, so that a database looks for the few tasks of a pair and not through all that a person was given.
    """
    other = aliased(TaskRow)
    state = AssignmentRow.state.in_(states) if states else AssignmentRow.state != "expired"
    given = exists().where(AssignmentRow.task_id == other.id, AssignmentRow.annotator_id == annotator, state)
    return exists().where(other.pair == TaskRow.pair, given.correlate(other, AnnotatorRow)).correlate(TaskRow, AnnotatorRow)


def recount(session: Session, task: TaskRow) -> None:
    """Bring the counts and the state of a task up to date with its judgments, leases and open flags."""
    session.flush()
    places = session.execute(_PLACES, {"task": task.id}).all()
    judged = [(role, choice) for role, _, choice in places if choice]
    task.judged, task.taken = sum(role == "annotator" for role, _ in judged), sum(counted for _, counted, _ in places)
    if any(role != "annotator" for role, _ in judged):
        task.state = "settled"
    elif task.state == "settled":  # by an expert whose role a store of an older tether did not keep
        return
    elif task.state == "expert" and session.scalar(_OPEN_FLAGS, {"task": task.id}):
        return  # a flag makes its task wait for an expert at once, so that no other task has one
    elif task.known is None:
        task.needed = max(task.needed, task.taken)
        agreed = more_than_half([choice for _, choice in judged])
        task.state = "open" if task.judged < task.needed else "done" if agreed else "expert"


def free(session: Session, rows: Iterable[AssignmentRow], state: str) -> None:
    """End leases without a judgment, and give their places to others."""
    for row in rows:
        if row.counted:
            session.get_one(TaskRow, row.task_id).taken -= 1
        row.state, row.counted = state, False
    session.flush()
