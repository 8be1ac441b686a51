"""Tasks are lent to people and come back judged: never more often than asked, never twice to one
person, never lost.
"""

# SQLModel types columns as the values in them, so that conditions on columns look like plain bools.
# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false, reportOptionalMemberAccess=false

from __future__ import annotations

import random
from dataclasses import KW_ONLY, dataclass

from sqlalchemy import bindparam, exists, func, select, text, update
from sqlmodel import Session

from tether.core.types import Conversation
from tether.data.rows import turns_of
from tether.people.annotation.exchange import opinion_of
from tether.people.annotation.queries import (
    HELD,
    JUDGED,
    LENT,
    LIVE,
    MINE,
    OPEN,
    TASKS,
    free,
    offered,
    recount,
    was_given,
)
from tether.people.annotation.queries import (
    count as rows_of,
)
from tether.people.annotation.store import Store, StoreError
from tether.people.annotation.tables import (
    AnnotatorRow,
    AssignmentRow,
    FlagRow,
    JudgmentRow,
    TaskRow,
    Where,
)
from tether.people.labels.votes import FLIPPED, MAX_COMMENT, Opinion

# Written once: to build and compile a statement costs more than to run it.
_LATE = select(AssignmentRow).where(text(Where.LEASED), AssignmentRow.expires < bindparam("now"))
_GIVEN = LENT.where(AssignmentRow.id == bindparam("assignment"), MINE)
_SHOWN = TASKS.where(TaskRow.id == bindparam("task"))
_LAST = select(JudgmentRow).order_by(JudgmentRow.id.desc()).limit(1)
_WITHDRAWN = _LAST.where(JudgmentRow.assignment_id == bindparam("assignment"), ~LIVE)
_HOW_MANY = select(func.count()).select_from(AssignmentRow).where(MINE)
_FREE = ~exists().where(
    AssignmentRow.task_id == TaskRow.id,
    text(Where.LEASED),
    AssignmentRow.counted.is_(False),
)
_ORDERED = select(TaskRow).order_by(TaskRow.priority, TaskRow.id).limit(1)
_WANTED = _ORDERED.where(*offered("annotator"))
_DISPUTED = _ORDERED.where(*offered("expert"), _FREE)  # no expert sees what another one holds
_GOLD = (
    select(TaskRow)
    .where(text(Where.GOLD), TaskRow.state == "open", ~was_given())
    .order_by(TaskRow.id)
    .limit(64)
)


@dataclass(frozen=True)
class Assigned:
    """A task on a person's screen: the conversation, both answers, and the answer on the left."""

    assignment: int
    task: int
    prompt: Conversation
    first: Conversation
    _: KW_ONLY
    second: Conversation
    left: str
    before: Opinion | None = None
    """This person's last opinion of the pair, taken back, to start from."""
    others: tuple[Opinion, ...] = ()
    """For an expert: the opinions of others, without names."""
    flags: tuple[str, ...] = ()

    @property
    def sides(self) -> tuple[Conversation, Conversation]:
        """The answer on the left and the answer on the right."""
        return (self.first, self.second) if self.left == "first" else (self.second, self.first)

    @property
    def places(self) -> dict[str, str]:
        """The sides of the first and of the second answer."""
        return {self.left: "left", FLIPPED[self.left]: "right"}


@dataclass
class Work:
    """The work of people on a store: taking tasks, judging, skipping, flagging, undoing.

    Args:
        lease: seconds for which a task belongs to a person.
        gold_every: one task in so many of a person's is a gold question, while there are unseen
            ones; 0: none.
        quota: the most judgments of one annotator, gold questions included; 0: any number.
        seed: decides which answer is on the left.
    """

    store: Store
    _: KW_ONLY
    lease: float = 1800.0
    gold_every: int = 10
    quota: int = 0
    seed: int = 0

    def next(self, annotator: int) -> Assigned | None:
        """The task that the person has already, or another one; None when there is nothing (more)
        for them.
        """
        now = self.store.clock()
        with self.store.transaction() as session:
            free_late(session, now)
            person = session.get(AnnotatorRow, annotator)
            if person is None or person.disabled:
                raise StoreError("this annotator is not known here, or was locked out")
            held = session.scalar(HELD, {"annotator": annotator})
            if held is None:
                task = self._pick(session, person)
                return (
                    None
                    if task is None
                    else _assigned(session, self._lend(session, task, person, now))
                )
            held.expires = now + self.lease
            return _assigned(session, held)

    def shown(self, assignment: int, annotator: int) -> Assigned:
        """A task that was lent to this person, as on the screen; StoreError if it was not."""
        with self.store.reading() as session:
            return _assigned(session, _given(session, assignment, annotator)[0])

    def _lend(
        self,
        session: Session,
        task: TaskRow,
        person: AnnotatorRow,
        now: float,
    ) -> AssignmentRow:
        left = random.Random(f"{self.seed}/{task.id}/{person.id}").choice(("first", "second"))
        row = session.scalar(
            select(AssignmentRow).where(AssignmentRow.task_id == task.id, MINE),
            {"annotator": person.id},
        )
        row = row or AssignmentRow(
            task_id=task.id,
            annotator_id=person.id,
            left=left,
            begun=now,
            expires=now,
        )
        row.state = "leased"
        row.begun = now
        row.expires = now + self.lease
        _take(session, row, task, person)
        return row

    def judge(self, assignment: int, annotator: int, opinion: Opinion) -> None:
        """Keep a judgment; when this returns it is on the disk. The same one twice is one.

        Raises:
            StoreError: it is not this person's task, the lease has run out and others took the
                place, or it was judged otherwise.
        """
        if problem := opinion.problem():
            raise StoreError(problem)
        now = self.store.clock()
        with self.store.transaction() as session:
            row, task, person = _given(session, assignment, annotator)
            if row.state == "judged":
                before = session.scalars(
                    select(JudgmentRow).where(LIVE, JudgmentRow.assignment_id == assignment),
                ).one()
                if any(
                    getattr(before, name) != getattr(opinion, name)
                    for name in ("choice", "strength", "ratings", "comment", "correction")
                ):
                    raise StoreError("this task is judged already; take the judgment back first")
                return
            _check_open(row)
            if row.role != "annotator" and task.state == "settled":
                raise StoreError("another expert has settled this task. Go on with the next one")
            if row.state == "expired":
                full = (
                    task.known is None
                    and row.role == "annotator"
                    and (task.taken >= task.needed or task.state != "open")
                )
                if full or row.role != person.role or self._is_spent(session, person):
                    raise StoreError(
                        "the time for this task ran out, and others have judged it "
                        "since, or you have given all your judgments. Go on with the next one",
                    )
                _take(session, row, task, person)
            row.state = "judged"
            session.add(judgment_row(row, opinion, now))
            if row.role != "annotator":
                session.execute(
                    update(FlagRow).where(FlagRow.task_id == task.id, OPEN).values(resolved=now),
                )
            recount(session, task)

    def undo(self, annotator: int) -> Assigned | None:
        """Take the person's latest judgment back and lend them its task again; None when there is
        none.

        Raises:
            StoreError: an expert has settled the task since.
        """
        now = self.store.clock()
        with self.store.transaction() as session:
            free_late(session, now)
            last = session.scalar(_LAST.where(LIVE, JudgmentRow.annotator_id == annotator))
            if last is None:
                return None
            row, task, _ = _given(session, last.assignment_id, annotator)
            if task.state == "settled" and row.role == "annotator":
                raise StoreError("an expert has decided this task since; it cannot be taken back")
            # What the person holds goes back, so that they may hold this; it may come to them
            # later.
            free(session, session.scalars(HELD, {"annotator": annotator}).all(), "expired")
            last.withdrawn = now
            row.state = "leased"
            row.expires = now + self.lease
            if row.role == "annotator":
                recount(session, task)
            else:
                session.execute(
                    update(FlagRow).where(FlagRow.task_id == task.id).values(resolved=None),
                )
                task.state = "expert"
            return _assigned(session, row)

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
            row, task, _ = _given(session, assignment, annotator)
            if row.state == state:
                return
            _check_open(row)
            free(session, [row], state)
            if reason:
                session.add(
                    FlagRow(
                        task_id=row.task_id,
                        annotator_id=annotator,
                        reason=reason,
                        at=self.store.clock(),
                    ),
                )
                task.state = task.state if task.state == "settled" else "expert"

    def _is_spent(self, session: Session, person: AnnotatorRow) -> bool:
        mine = (JudgmentRow.annotator_id == person.id, LIVE)
        return 0 < self.quota <= rows_of(session, JudgmentRow, *mine)

    def _pick(self, session: Session, person: AnnotatorRow) -> TaskRow | None:
        who = {"annotator": person.id}
        if person.role != "annotator":
            return session.scalar(_DISPUTED, who)
        if self._is_spent(session, person):
            return None
        if self.gold_every:
            count = session.scalar(_HOW_MANY, who) or 0
            # Within every so many tasks the gold one has a place of its own for each person, so
            # that it cannot be guessed.
            place = random.Random(f"{self.seed}/{person.id}/{count // self.gold_every}").randrange(
                self.gold_every,
            )
            if count % self.gold_every == place and (tasks := session.scalars(_GOLD, who).all()):
                return random.Random(f"{self.seed}/{person.id}/{count}").choice(tasks)
        return session.scalar(_WANTED, who)


def _given(
    session: Session,
    assignment: int,
    annotator: int,
) -> tuple[AssignmentRow, TaskRow, AnnotatorRow]:
    """An assignment of a person, its task, and the person; StoreError if it does not belong to the
    person.
    """
    row = session.execute(_GIVEN, {"assignment": assignment, "annotator": annotator}).one_or_none()
    if row is None:
        raise StoreError("this task was not given to you")
    return row[0], row[1], row[2]


def judgment_row(row: AssignmentRow, opinion: Opinion, at: float) -> JudgmentRow:
    """The row of an opinion on an assignment that is in the store."""
    return JudgmentRow(
        assignment_id=row.id,
        task_id=row.task_id,
        annotator_id=row.annotator_id,
        choice=opinion.choice,
        strength=opinion.strength,
        ratings=dict(opinion.ratings),
        comment=opinion.comment,
        correction=opinion.correction,
        seconds=opinion.seconds,
        guidelines=opinion.guidelines,
        at=at,
    )


def _check_open(row: AssignmentRow) -> None:
    if row.state not in ("leased", "expired"):
        raise StoreError(f"this task was {row.state}; go on with the next one")


def _take(session: Session, row: AssignmentRow, task: TaskRow, person: AnnotatorRow) -> None:
    """Let a lease have one of its task's places, if it needs one."""
    row.role = person.role
    row.counted = task.known is None and person.role == "annotator"
    session.add(row)
    task.taken += row.counted
    session.flush()


def free_late(session: Session, now: float) -> None:
    """Take back what was lent for too long."""
    free(session, session.scalars(_LATE, {"now": now}).all(), "expired")


def _assigned(session: Session, row: AssignmentRow) -> Assigned:
    task, *texts = session.execute(_SHOWN, {"task": row.task_id}).one()
    before = session.scalar(_WITHDRAWN, {"assignment": row.id})
    others = ()
    flags = ()
    if row.role != "annotator":
        judged = JUDGED.where(
            JudgmentRow.task_id == task.id,
            JudgmentRow.annotator_id != row.annotator_id,
        )
        others = tuple(opinion_of(one, lease) for one, lease, _ in session.execute(judged))
        flags = tuple(session.scalars(select(FlagRow.reason).where(FlagRow.task_id == task.id)))
    prompt, first, second = (turns_of(text.messages) for text in texts)
    return Assigned(
        assignment=row.id,
        task=task.id,
        prompt=prompt,
        first=first,
        second=second,
        left=row.left,
        before=None if before is None else opinion_of(before, row),
        others=others,
        flags=flags,
    )
