"""Queries that several parts of a store share: tasks with their texts, judgments with their people,
counts.
"""

# SQLModel types columns as the values in them, so that conditions on columns look like plain bools.
# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false, reportOptionalMemberAccess=false

from __future__ import annotations

from collections.abc import Iterable

from sqlalchemy import (
    ColumnElement,
    Exists,
    TextClause,
    and_,
    bindparam,
    exists,
    func,
    select,
    text,
)
from sqlalchemy.orm import aliased
from sqlmodel import Session

from tether.people.annotation.tables import (
    AnnotatorRow,
    AssignmentRow,
    FlagRow,
    JudgmentRow,
    PromptRow,
    ResponseRow,
    TaskRow,
    Where,
)
from tether.people.labels.votes import more_than_half

FIRST = aliased(ResponseRow)
SECOND = aliased(ResponseRow)
ESCALATED = "escalated"
"""The detail of a task that was sent to the experts: there it stays until one decides."""
LIVE = JudgmentRow.withdrawn.is_(None)
OPEN = FlagRow.resolved.is_(None)
TASKS = select(TaskRow, PromptRow, FIRST, SECOND).select_from(TaskRow).join(PromptRow)
TASKS = TASKS.join(FIRST, FIRST.id == TaskRow.first_id).join(SECOND, SECOND.id == TaskRow.second_id)
"""Tasks, each with its prompt and its two answers."""
JUDGED = (
    select(JudgmentRow, AssignmentRow, AnnotatorRow)
    .select_from(JudgmentRow)
    .join(AssignmentRow)
    .where(LIVE)
)
JUDGED = JUDGED.join(AnnotatorRow, AnnotatorRow.id == JudgmentRow.annotator_id)
"""Live judgments, each with its assignment and its person."""
LENT = (
    select(AssignmentRow, TaskRow, AnnotatorRow)
    .select_from(AssignmentRow)
    .join(TaskRow)
    .join(AnnotatorRow)
)
"""Assignments, each with its task and its person."""
ANYBODY = bindparam("annotator")
MINE = AssignmentRow.annotator_id == ANYBODY
HELD = select(AssignmentRow).where(MINE, text(Where.LEASED))
"""The task on the annotator's screen."""
_SEATS = (
    select(AssignmentRow.role, AssignmentRow.counted, JudgmentRow.choice)
    .outerjoin(JudgmentRow, and_(JudgmentRow.assignment_id == AssignmentRow.id, LIVE))
    .where(
        AssignmentRow.task_id == bindparam("task"),
        AssignmentRow.state.in_(("leased", "judged")),
    )
)


def count(session: Session, table: object, *only: object) -> int:
    """The number of rows of a table on which these conditions hold."""
    return session.scalar(select(func.count()).select_from(table).where(*only)) or 0


def states(session: Session, *only: object) -> dict[str, int]:
    """The numbers of these tasks by state."""
    numbers = dict(
        session.execute(
            select(TaskRow.state, func.count()).where(*only).group_by(TaskRow.state),
        ).all(),
    )
    return {state: numbers.get(state, 0) for state in TaskRow.STATES}


def counts(session: Session) -> dict[str, int]:
    """Everything that is counted of a store: see `Store.counts`."""
    ours = TaskRow.known.is_(None)
    places = select(func.sum(TaskRow.needed - TaskRow.judged)).where(TaskRow.state == "open", ours)
    return {
        "prompts": count(session, PromptRow),
        "responses": count(session, ResponseRow),
        "tasks": count(session, TaskRow, ours),
        **{f"tasks_{state}": number for state, number in states(session, ours).items()},
        "tasks_that_nobody_can_take": count(session, TaskRow, nobody_can_take()),
        "gold_questions": count(session, TaskRow, ~ours),
        "judgments": count(session, JudgmentRow, LIVE),
        "open_judgments": int(session.scalar(places) or 0),
        "open_flags": count(session, FlagRow, OPEN),
        "annotators": count(session, AnnotatorRow),
        "assignments": count(session, AssignmentRow),
    }


def was_given(annotator: object = ANYBODY) -> Exists:
    """A condition: the annotator was given the two answers of a task, in any round; leases that ran
    out do not count.

    Nested, so that a database reads the few tasks of a pair instead of all tasks of a person.
    """
    other = aliased(TaskRow)
    given = exists().where(
        AssignmentRow.annotator_id == annotator,
        AssignmentRow.state != "expired",
    )
    given = given.where(AssignmentRow.task_id == other.id).correlate(other, AnnotatorRow)
    return exists().where(other.pair == TaskRow.pair, given).correlate(TaskRow, AnnotatorRow)


def nobody_can_take() -> ColumnElement[bool]:
    """A condition: everybody who could judge a task that wants judgments has had it."""
    had = exists().where(
        AssignmentRow.task_id == TaskRow.id,
        AssignmentRow.state.in_(("judged", "skipped")),
    )
    able = exists().where(
        AnnotatorRow.role == "annotator",
        AnnotatorRow.disabled.is_(False),
        ~was_given(AnnotatorRow.id),
    )
    return and_(text(Where.WANTED), had, ~able.correlate(TaskRow))


def offered(role: str, annotator: object = ANYBODY) -> tuple[TextClause, ColumnElement[bool]]:
    """The conditions on a task that a person of this role may get still."""
    return text(Where.WANTED if role == "annotator" else Where.DISPUTED), ~was_given(annotator)


def recount(session: Session, task: TaskRow) -> None:
    """Bring the counts and the state of a task up to date with its judgments, leases and open
    flags.
    """
    session.flush()
    places = session.execute(_SEATS, {"task": task.id}).all()
    judged = [(role, choice) for role, _, choice in places if choice]
    task.judged = sum(role == "annotator" for role, _ in judged)
    task.taken = sum(counted for _, counted, _ in places)
    if any(role != "annotator" for role, _ in judged):
        task.state = "settled"
    elif task.state == "expert" and count(session, FlagRow, FlagRow.task_id == task.id, OPEN):
        return  # a flag makes its task wait for an expert at once, so that no other task has one
    elif task.known is None:
        task.needed = max(task.needed, task.taken)
        agreed = not task.details.get(ESCALATED) and more_than_half(
            [choice for _, choice in judged],
        )
        task.state = "open" if task.judged < task.needed else "done" if agreed else "expert"


def free(session: Session, rows: Iterable[AssignmentRow], state: str) -> None:
    """End leases without a judgment, and give their places to others."""
    for row in rows:
        if row.counted:
            session.get_one(TaskRow, row.task_id).taken -= 1
        row.state = state
        row.counted = False
    session.flush()
