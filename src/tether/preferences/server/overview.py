"""The administrator's overview: the pace of the work, the agreement of people, and the work of each of them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from tether.preferences.agreement import Coefficient, krippendorff_alpha, raw_agreement
from tether.preferences.exchange import Worker, gold_answers, votes, workers
from tether.preferences.quality import Suspicion, suspicious
from tether.preferences.store import DAY, Store
from tether.preferences.votes import Vote

HOUR = 3600.0


@dataclass(frozen=True)
class Overview:
    """Everything on the administrator's page, as of `at`."""

    at: float
    counts: dict[str, int]
    hours: list[tuple[float, int]]
    """Judgments in each of the last 24 hours, by when the hour began."""
    days: list[tuple[float, int]]
    raw: Coefficient
    alpha: Coefficient
    people: list[Worker]
    suspects: list[Suspicion]


def overview(store: Store) -> Overview:
    """Sum up the whole store; agreement is that of annotators, without experts and gold questions."""
    now, people, gold = store.clock(), store.annotators(), gold_answers(store)
    cast = list(votes(store, names=True, gold=True, experts=True))
    compared = [vote for vote in cast if not vote.expert and vote.item not in gold]
    return Overview(
        at=now,
        counts=store.counts(),
        hours=_histogram(cast, now, HOUR, 24),
        days=_histogram(cast, now, DAY, 14),
        raw=raw_agreement(compared, coding="verdict"),
        alpha=krippendorff_alpha(compared, coding="verdict"),
        people=workers(people, cast, gold),
        suspects=suspicious((vote for vote in cast if not vote.expert), gold=gold),
    )


class CachedOverview:
    """An overview that is kept `patience` times as long as making it took."""

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


def _histogram(cast: Sequence[Vote], now: float, width: float, number: int) -> list[tuple[float, int]]:
    last = int(now // width)
    counts = Counter(int(vote.at // width) for vote in cast)
    return [(place * width, counts[place]) for place in range(last - number + 1, last + 1)]
