"""Figures for the pages, read without waiting for anybody: work done and left, the overview."""

# SQLModel types columns as the values in them, so that conditions on columns look like plain bools.
# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false, reportOptionalMemberAccess=false

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import Generic, NamedTuple, TypeVar

from sqlmodel import Session

from tether.people.annotation.exchange import gold_answers, gold_items, votes, workers
from tether.people.annotation.queries import HELD, LIVE, count, offered
from tether.people.annotation.store import DAY, Store
from tether.people.annotation.tables import (
    AnnotatorRow,
    JudgmentRow,
    TaskRow,
)
from tether.people.labels.agreement import krippendorff_alpha, raw_agreement
from tether.people.labels.quality import suspicious
from tether.people.labels.votes import Vote

T = TypeVar("T")
HOUR = 3600.0


class Remembered(Generic[T]):
    """Values by key that are kept `patience` times as long as making them took, so that it never
    takes much of the machine.

    A value that takes less than `quick` seconds is computed at each visit. Only slow values are a
    moment old.
    """

    def __init__(self, patience: float, quick: float = 0.0) -> None:
        self.patience = patience
        self.quick = quick
        self.values: dict[Hashable, tuple[float, T]] = {}

    def of(self, key: Hashable, make: Callable[[], T]) -> T:
        began = time.monotonic()
        until, value = self.values.get(key, (began, None))
        if value is None or until <= began:
            value = make()
            took = time.monotonic() - began
            self.values[key] = (
                began + took * (1 + self.patience) if took > self.quick else began,
                value,
            )
        return value


class Progress(NamedTuple):
    """The number of judgments by a person, and of tasks that are left for them."""

    mine: int
    left: int


class WorkCount:
    """Counts a person's work exactly, and what is left as exactly as is cheap."""

    def __init__(self, store: Store, quota: int = 0) -> None:
        self.store = store
        self.quota = quota
        self.totals = Remembered[int](patience=300)

    def of(self, person: AnnotatorRow) -> Progress:
        with self.store.reading() as session:
            mine = count(session, JudgmentRow, JudgmentRow.annotator_id == person.id, LIVE)
            total = self.totals.of(person.id, lambda: mine + _left(session, person))
        if self.quota and person.role == "annotator":
            total = min(total, self.quota)
        return Progress(mine, max(total - mine, 0))

    def forget(self, person: AnnotatorRow) -> None:
        """Count anew what is left for a person: they have skipped or flagged a task."""
        self.totals.values.pop(person.id, None)


def _left(session: Session, person: AnnotatorRow) -> int:
    """The number of tasks that there are for a person still, gold questions left out."""
    held = session.scalar(HELD, {"annotator": person.id})
    on_screen = held is not None and (held.counted or held.role != "annotator")
    return on_screen + count(session, TaskRow, *offered(person.role, person.id))


class Overview:
    """Everything on the administrator's page, as of `at`; agreement is that of annotators, without
    experts and gold questions.

    `hours` and `days` are the judgments in each of the last 24 hours and 14 days, by when it began.
    """

    def __init__(self, store: Store) -> None:
        self.at = store.clock()
        self.counts = store.counts()
        gold = gold_answers(store)
        golden = gold_items(store)
        cast = list(votes(store, names=True, gold=True, experts=True))
        compared = [vote for vote in cast if not vote.expert and vote.item not in golden]
        self.hours = _histogram(cast, self.at, HOUR, 24)
        self.days = _histogram(cast, self.at, DAY, 14)
        self.raw = raw_agreement(compared, coding="verdict")
        self.alpha = krippendorff_alpha(compared, coding="verdict")
        self.people = workers(store.annotators(), cast, gold, golden)
        self.suspects = suspicious((vote for vote in cast if not vote.expert), gold=gold)


def _histogram(
    cast: Sequence[Vote],
    now: float,
    width: float,
    number: int,
) -> list[tuple[float, int]]:
    last = int(now // width)
    counts = Counter(int(vote.at // width) for vote in cast)
    return [(place * width, counts[place]) for place in range(last - number + 1, last + 1)]
