"""Tasks are lent to people and come back judged: never more often than asked, never twice to one person, never lost."""

# SQLModel types columns as the values in them, so that conditions on columns look like plain bools.
# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false, reportOptionalMemberAccess=false

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import bindparam, exists, func, select, text, update
from sqlalchemy.orm import aliased
from sqlmodel import Session

from tether.core.types import Conversation
from tether.preferences.rows import turns_of
from tether.preferences.store import HELD, Store, StoreError, free, had_by
from tether.preferences.tables import (
    DISPUTED,
    GOLD,
    LEASED,
    WANTED,
    AnnotatorRow,
    AssignmentRow,
    FlagRow,
    JudgmentRow,
    PromptRow,
    ResponseRow,
    TaskRow,
)
from tether.preferences.votes import CHOICES, Choice, more_than_half

MAX_COMMENT = 4000

# Written once: to build and compile a statement costs more than to run it.
_FIRST, _SECOND = aliased(ResponseRow), aliased(ResponseRow)
_LATE = select(AssignmentRow).where(text(LEASED), AssignmentRow.expires < bindparam("now"))
_GIVEN = (
    select(AssignmentRow, TaskRow, AnnotatorRow)
    .join(TaskRow, TaskRow.id == AssignmentRow.task_id)
    .join(AnnotatorRow, AnnotatorRow.id == AssignmentRow.annotator_id)
    .where(AssignmentRow.id == bindparam("assignment"), AssignmentRow.annotator_id == bindparam("annotator"))
)
_SHOWN = (
    select(PromptRow.messages, _FIRST.messages, _SECOND.messages)
    .select_from(PromptRow)
    .join(_FIRST, _FIRST.id == bindparam("first"))
    .join(_SECOND, _SECOND.id == bindparam("second"))
    .where(PromptRow.id == bindparam("prompt"))
)
_LENT = select(AssignmentRow).where(
    AssignmentRow.task_id == bindparam("task"), AssignmentRow.annotator_id == bindparam("annotator")
)
_HOW_MANY = select(func.count()).select_from(AssignmentRow).where(AssignmentRow.annotator_id == bindparam("annotator"))
_UNSEEN = ~had_by(bindparam("annotator"))
_FREE = ~exists().where(AssignmentRow.task_id == TaskRow.id, text(LEASED), AssignmentRow.counted.is_(False))
_ORDERED = select(TaskRow).order_by(TaskRow.priority, TaskRow.id).limit(1)
_WANTED = _ORDERED.where(text(WANTED), _UNSEEN)
_DISPUTED = _ORDERED.where(text(DISPUTED), _UNSEEN, _FREE)  # no expert sees what another one holds
_GOLD = select(TaskRow).where(text(GOLD), TaskRow.state == "open", _UNSEEN).order_by(TaskRow.id).limit(64)
_OPEN_FLAGS = select(func.count()).select_from(FlagRow).where(FlagRow.task_id == bindparam("task"), FlagRow.resolved.is_(None))
_SAID = select(JudgmentRow.choice).where(JudgmentRow.task_id == bindparam("task"), JudgmentRow.withdrawn.is_(None))


@dataclass(frozen=True)
class Verdict:
    """What a person says of two answers; `choice` names answers, not sides. `strength` 1 to 3, `ratings` 1 to 5 by criterion."""

    choice: Choice
    strength: int | None = None
    ratings: Mapping[str, int] = field(default_factory=dict)
    comment: str = ""
    seconds: float = 0.0
    guidelines: int = 0

    def check(self) -> None:
        """Raises StoreError for a field that is out of its range."""
        if self.choice not in CHOICES:
            raise StoreError(f"a choice is one of {', '.join(CHOICES)}, not {self.choice!r}")
        if self.strength is not None and self.strength not in (1, 2, 3):
            raise StoreError(f"a strength is 1, 2 or 3, not {self.strength!r}")
        if any(not 1 <= value <= 5 or not 0 < len(name) <= 40 for name, value in self.ratings.items()) or len(self.ratings) > 20:
            raise StoreError("ratings lie between 1 and 5, with names of at most 40 characters")
        if len(self.comment) > MAX_COMMENT:
            raise StoreError(f"a comment has at most {MAX_COMMENT} characters; this one has {len(self.comment)}")
        if "\0" in self.comment:
            raise StoreError("a comment has a null character, which not every database keeps")


@dataclass(frozen=True)
class Assigned:
    """A task on somebody's screen: the conversation, both answers, and which stands on the left."""

    assignment: int
    task: int
    prompt: Conversation
    first: Conversation
    second: Conversation
    left: str
    expires: float
    others: tuple[Mapping[str, Any], ...] = ()
    """For an expert: what others said, without names."""
    flags: tuple[str, ...] = ()

    @property
    def sides(self) -> tuple[Conversation, Conversation]:
        """What stands on the left, what stands on the right."""
        return (self.first, self.second) if self.left == "first" else (self.second, self.first)

    def chosen(self, side: str) -> Choice:
        return answer_on(side, self.left)


def answer_on(side: str, left: str) -> Choice:
    """The answer on a side (`left`, `right`) as a choice, `left` standing there; `tie` and `both_bad` are themselves."""
    if side in ("tie", "both_bad"):
        return side
    if side not in ("left", "right"):
        raise StoreError(f"a verdict is left, right, tie or both_bad, not {side!r}")
    return "first" if (side == "left") == (left == "first") else "second"


class Work:
    """What people do with a store.

    Args:
        lease: seconds for which a task is somebody's.
        gold_every: every so manieth task of a person is a gold question, while there are unseen ones; 0: none.
        seed: decides which answer stands on the left.
    """

    def __init__(self, store: Store, *, lease: float = 1800.0, gold_every: int = 10, seed: int = 0) -> None:
        self.store, self.lease, self.gold_every, self.seed = store, lease, gold_every, seed

    def next(self, annotator: int) -> Assigned | None:
        """The task that the person has already, or another one; None when there is nothing (more) for them."""
        now = self.store.clock()
        with self.store.transaction() as session:
            _release(session, now)
            person = session.get(AnnotatorRow, annotator)
            if person is None or person.disabled:
                raise StoreError("this annotator is not known here, or was locked out")
            held = session.execute(HELD, {"annotator": annotator}).scalar_one_or_none()
            if held is not None:
                held.expires = now + self.lease
                return _assigned(session, held, session.get_one(TaskRow, held.task_id))
            task = self._pick(session, person)
            return None if task is None else _assigned(session, self._lend(session, task, person, now), task)

    def _lend(self, session: Session, task: TaskRow, person: AnnotatorRow, now: float) -> AssignmentRow:
        left = random.Random(f"{self.seed}/{task.id}/{person.id}").choice(("first", "second"))
        row = session.execute(_LENT, {"task": task.id, "annotator": person.id}).scalar_one_or_none()
        row = row or AssignmentRow(task_id=task.id or 0, annotator_id=person.id or 0, left=left, begun=now, expires=now)
        row.state, row.begun, row.expires = "leased", now, now + self.lease
        _take(session, row, task, person)
        return row

    def judge(self, assignment: int, annotator: int, verdict: Verdict) -> None:
        """Keep a judgment; when this returns it is on the disk. The same one twice is one.

        Raises:
            StoreError: it is not this person's task, the lease has run out and others took the place, or it was judged otherwise.
        """
        verdict.check()
        now = self.store.clock()
        with self.store.transaction() as session:
            row, task, person = given(session, assignment, annotator)
            if row.state == "judged":
                kept = session.execute(_live().where(JudgmentRow.assignment_id == assignment)).scalar_one()
                if any(getattr(kept, name) != getattr(verdict, name) for name in ("choice", "strength", "ratings", "comment")):
                    raise StoreError("this task is judged already; take the judgment back first")
                return
            if row.state not in ("leased", "expired"):
                raise StoreError(f"this task was {row.state}; go on with the next one")
            if row.role != "annotator" and task.state == "settled":
                raise StoreError("another expert has settled this task. Go on with the next one")
            if row.state == "expired":
                full = task.known is None and row.role == "annotator" and (task.taken >= task.needed or task.state != "open")
                if full or row.role != person.role:
                    raise StoreError("the time for this task ran out, and others have judged it since. Go on with the next one")
                _take(session, row, task, person)
            row.state = "judged"
            said = {"choice": verdict.choice, "strength": verdict.strength, "ratings": dict(verdict.ratings)}
            more = {"comment": verdict.comment, "seconds": verdict.seconds, "guidelines": verdict.guidelines, "at": now}
            session.add(JudgmentRow(assignment_id=assignment, task_id=row.task_id, annotator_id=annotator, **said, **more))
            session.flush()
            self._settle(session, task, row, +1)

    def undo(self, annotator: int) -> Assigned | None:
        """Take the person's latest judgment back and lend them its task again; None when there is none.

        Raises:
            StoreError: an expert has settled the task since.
        """
        now = self.store.clock()
        with self.store.transaction() as session:
            _release(session, now)
            last = session.execute(
                _live().where(JudgmentRow.annotator_id == annotator).order_by(JudgmentRow.id.desc()).limit(1)
            ).scalar_one_or_none()
            if last is None:
                return None
            task, row = session.get_one(TaskRow, last.task_id), session.get_one(AssignmentRow, last.assignment_id)
            if task.state == "settled" and row.role == "annotator":
                raise StoreError("an expert has decided this task since; it cannot be taken back")
            _set_aside(session, annotator)
            last.withdrawn = now
            row.state, row.expires = "leased", now + self.lease
            session.flush()
            self._settle(session, task, row, -1)
            return _assigned(session, row, task)

    def skip(self, assignment: int, annotator: int) -> None:
        """Give a task back; this person does not see it again."""
        self._give_back(assignment, annotator, "skipped")

    def flag(self, assignment: int, annotator: int, reason: str) -> None:
        """Give a task to the experts, with a reason.

        Raises:
            StoreError: there is no reason, or a very long one.
        """
        if not 0 < len(reason.strip()) <= MAX_COMMENT or "\0" in reason:
            raise StoreError(f"say in 1 to {MAX_COMMENT} characters what an expert should look at")
        self._give_back(assignment, annotator, "flagged", reason.strip())

    def _give_back(self, assignment: int, annotator: int, state: str, reason: str = "") -> None:
        with self.store.transaction() as session:
            row, task, _ = given(session, assignment, annotator)
            if row.state == state:
                return
            if row.state not in ("leased", "expired"):
                raise StoreError(f"this task was {row.state}; go on with the next one")
            free(session, [row], state)
            if reason:
                session.add(FlagRow(task_id=row.task_id, annotator_id=annotator, reason=reason, at=self.store.clock()))
                task.state = task.state if task.state == "settled" else "expert"

    def _pick(self, session: Session, person: AnnotatorRow) -> TaskRow | None:
        who = {"annotator": person.id}
        if person.role != "annotator":
            return session.execute(_DISPUTED, who).scalar_one_or_none()
        if self.gold_every:
            count = session.execute(_HOW_MANY, who).scalar_one()
            # Within every so many tasks the gold one has a place of its own for each person, so that it cannot be guessed.
            place = random.Random(f"{self.seed}/{person.id}/{count // self.gold_every}").randrange(self.gold_every)
            if count % self.gold_every == place and (tasks := session.execute(_GOLD, who).scalars().all()):
                return random.Random(f"{self.seed}/{person.id}/{count}").choice(tasks)
        return session.execute(_WANTED, who).scalar_one_or_none()

    def _settle(self, session: Session, task: TaskRow, row: AssignmentRow, sign: int) -> None:
        """Count a judgment in (or out) and say what becomes of its task."""
        if row.role != "annotator":
            task.state = "settled" if sign > 0 else "expert"
            flags = update(FlagRow).where(FlagRow.task_id == task.id)
            flags = flags.where(FlagRow.resolved.is_(None) if sign > 0 else FlagRow.resolved.is_not(None))
            session.execute(flags.values(resolved=self.store.clock() if sign > 0 else None))
            return
        task.judged += sign
        if task.known is None and task.state in ("open", "done", "expert"):
            # A flag makes its task wait for an expert at once, so that any other task has none.
            flagged = task.state == "expert" and session.execute(_OPEN_FLAGS, {"task": task.id}).scalar_one()
            if flagged or task.judged < task.needed:
                task.state = "expert" if flagged else "open"
            else:
                task.state = "done" if more_than_half(session.execute(_SAID, {"task": task.id}).scalars().all()) else "expert"


def _live() -> Any:
    return select(JudgmentRow).where(JudgmentRow.withdrawn.is_(None))


def given(session: Session, assignment: int, annotator: int) -> tuple[AssignmentRow, TaskRow, AnnotatorRow]:
    """What a person was lent, its task, and the person; StoreError where it was lent to nobody or to another."""
    found = session.execute(_GIVEN, {"assignment": assignment, "annotator": annotator}).one_or_none()
    if found is None:
        raise StoreError("this task was not given to you")
    return found[0], found[1], found[2]


def _take(session: Session, row: AssignmentRow, task: TaskRow, person: AnnotatorRow) -> None:
    """Let a lease have one of its task's places, if it needs one."""
    row.role, row.counted = person.role, task.known is None and person.role == "annotator"
    session.add(row)
    task.taken += row.counted
    session.flush()


def _release(session: Session, now: float) -> None:
    """Take back what was lent for too long."""
    free(session, session.execute(_LATE, {"now": now}).scalars().all(), "expired")


def _set_aside(session: Session, annotator: int) -> None:
    """Take back what a person holds, so that they may hold another; it may come back to them later."""
    free(session, session.execute(HELD, {"annotator": annotator}).scalars().all(), "expired")


def _assigned(session: Session, row: AssignmentRow, task: TaskRow) -> Assigned:
    assert row.id is not None and task.id is not None
    sides = {"prompt": task.prompt_id, "first": task.first_id, "second": task.second_id}
    turns = [turns_of(side) for side in session.execute(_SHOWN, sides).one()]
    more: dict[str, Any] = {}
    if row.role != "annotator":
        said = session.execute(
            _live().where(JudgmentRow.task_id == task.id, JudgmentRow.annotator_id != row.annotator_id)
        ).scalars()
        more["others"] = tuple({"choice": j.choice, "strength": j.strength, "comment": j.comment} for j in said)
        more["flags"] = tuple(session.execute(select(FlagRow.reason).where(FlagRow.task_id == task.id)).scalars())
    return Assigned(row.id, task.id, *turns, left=row.left, expires=row.expires, **more)
