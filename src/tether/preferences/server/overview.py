"""What an administrator sees: how fast the work goes, how people agree, and who works how."""

# SQLModel types columns as the values in them, so that conditions on columns look like plain bools.
# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false, reportOptionalMemberAccess=false

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from sqlalchemy import select

from tether.preferences.agreement import Figure, krippendorff_alpha, raw_agreement
from tether.preferences.store import DAY, Store
from tether.preferences.tables import AnnotatorRow, AssignmentRow, JudgmentRow, TaskRow
from tether.preferences.votes import Vote

HOUR = 3600.0


@dataclass(frozen=True)
class Said:
    """A judgment that counts, with what is needed to sum it up; `verdict` is the choice with `both_bad` as a tie."""

    task: int
    annotator: int
    verdict: str
    seconds: float
    at: float
    left: str
    known: str | None


@dataclass(frozen=True)
class Share:
    """So many of so many."""

    part: int
    whole: int

    def __str__(self) -> str:
        return f"{self.part / self.whole:.0%} of {self.whole}" if self.whole else "–"


@dataclass(frozen=True)
class Person:
    """An annotator's work: agreement is with each other judgment of the same tasks, gold questions left out."""

    name: str
    role: str
    disabled: bool
    judged: int
    seconds: float | None
    agrees: Share
    left: Share
    gold: Share
    last: float | None


@dataclass(frozen=True)
class Overview:
    """Everything on the administrator's page, as of `at`."""

    at: float
    counts: dict[str, int]
    hours: list[tuple[float, int]]
    """Judgments in each of the last 24 hours, by when the hour began."""
    days: list[tuple[float, int]]
    raw: Figure
    alpha: Figure
    people: list[Person]


def overview(store: Store) -> Overview:
    """Sum up the whole store; agreement is that of annotators, without experts and gold questions."""
    now, people, said = store.clock(), store.annotators(), _judgments(store)
    annotators = {p.id for p in people if p.role == "annotator"}
    compared = [s for s in said if s.annotator in annotators and s.known is None]
    votes: Any = [Vote(str(s.task), str(s.annotator), s.verdict, at=s.at) for s in compared]
    return Overview(
        at=now,
        counts=store.counts(),
        hours=_histogram(said, now, HOUR, 24),
        days=_histogram(said, now, DAY, 14),
        raw=raw_agreement(votes, coding="verdict"),
        alpha=krippendorff_alpha(votes, coding="verdict"),
        people=_people(people, said, compared),
    )


class Remembered:
    """An overview that is made anew only after so many times as long as making it took."""

    def __init__(self, store: Store, patience: float = 20.0) -> None:
        self.store, self.patience, self.until, self.last = store, patience, 0.0, None

    def get(self) -> Overview:
        began = time.monotonic()
        if self.last is None or began >= self.until:
            self.last = overview(self.store)
            took = time.monotonic() - began
            # A small store is read at each visit; only one that takes long is shown as it was a moment ago.
            self.until = began + took * (1 + self.patience) if took > 0.5 else 0.0
        return self.last


def _judgments(store: Store) -> list[Said]:
    columns = (
        JudgmentRow.task_id, JudgmentRow.annotator_id, JudgmentRow.choice, JudgmentRow.seconds, JudgmentRow.at,
        AssignmentRow.left, TaskRow.known,
    )  # fmt: skip
    query = select(*columns).join(AssignmentRow, AssignmentRow.id == JudgmentRow.assignment_id)
    query = query.join(TaskRow, TaskRow.id == JudgmentRow.task_id).where(JudgmentRow.withdrawn.is_(None))
    with store.reading() as session:
        return [
            Said(task, who, _verdict(choice), seconds, at, left, known and _verdict(known))
            for task, who, choice, seconds, at, left, known in session.execute(query)
        ]


def _verdict(choice: str) -> str:
    return "tie" if choice == "both_bad" else choice


def _histogram(said: Sequence[Said], now: float, width: float, number: int) -> list[tuple[float, int]]:
    last = int(now // width)
    counts = Counter(int(s.at // width) for s in said)
    return [(place * width, counts[place]) for place in range(last - number + 1, last + 1)]


def _people(people: Sequence[AnnotatorRow], said: Sequence[Said], compared: Sequence[Said]) -> list[Person]:
    by_person: dict[int, list[Said]] = defaultdict(list)
    for one in said:
        by_person[one.annotator].append(one)
    verdicts: dict[int, Counter[str]] = defaultdict(Counter)
    for one in compared:
        verdicts[one.task][one.verdict] += 1
    agrees: dict[int, tuple[int, int]] = defaultdict(lambda: (0, 0))
    for one in compared:
        others, same = verdicts[one.task].total() - 1, verdicts[one.task][one.verdict] - 1
        agrees[one.annotator] = agrees[one.annotator][0] + same, agrees[one.annotator][1] + others
    return [_person(row, by_person[row.id or 0], Share(*agrees[row.id or 0])) for row in people]


def _person(row: AnnotatorRow, own: Sequence[Said], agrees: Share) -> Person:
    sided = [s for s in own if s.left and s.verdict in ("first", "second")]  # of imported ones nobody knows the side or the time
    timed = [s.seconds for s in own if s.seconds > 0]
    gold = [s for s in own if s.known is not None]
    return Person(
        name=row.name, role=row.role, disabled=row.disabled, judged=len(own),
        seconds=median(timed) if timed else None,
        agrees=agrees,
        left=Share(sum(s.verdict == s.left for s in sided), len(sided)),
        gold=Share(sum(s.verdict == s.known for s in gold), len(gold)),
        last=max((s.at for s in own), default=None),
    )  # fmt: skip
