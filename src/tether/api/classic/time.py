"""The time that a classic training takes: measured on its first steps, and ended by a budget."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader

from tether.api.classic.config import Row
from tether.core.amounts import duration
from tether.core.budget import TimeLimit
from tether.settings.budget import BudgetConfig


class AnnouncedLimit:
    """A limit that reports the work before it begins, its time after the second step, and its end.

    The planner of recipes reads a model's shape from its source. Here the caller has loaded the
    model, so its steps are measured.
    """

    def __init__(self, name: str, budget: BudgetConfig | None) -> None:
        minutes = 0.0 if budget is None else budget.minutes
        self.limit = TimeLimit(60 * minutes or math.inf, minutes=minutes)
        self.name = name

    def begin(self, work: str) -> None:
        """Print what is to be done."""
        print(f"{self.name}: {work}; the first steps show the time that it takes.")
        if self.limit.bounded:
            minutes = f"{self.limit.minutes:g} min"
            print(f"{self.name}: the budget ends it after {minutes}, at a whole step.")

    def step(self, done: int, total: int, seconds: float | None) -> None:
        """Note a step of so many; after the second the time of the others is printed."""
        if done == 2 and total > 2 and seconds is not None:
            left = duration(seconds * (total - done))
            print(f"{self.name}: about {left} for the other {total - done:,} steps.")

    def end(self, done: int) -> None:
        """Print that time has ended it, if it has."""
        if self.limit.ended:
            print(f"{self.name}: the budget ended it after {done:,} steps.")


class TimedLoader(DataLoader[Row]):
    """Batches for a loop of the caller's own, until the next step would end after the limit."""

    clock: AnnouncedLimit | None = None

    def __iter__(self) -> Iterator[Any]:
        assert self.clock is not None
        limit = self.clock.limit
        if not limit.total:
            limit.begin(0, sys.maxsize)
            self.clock.begin(f"{len(self):,} batches of {self.batch_size} queries in a pass")
        for batch in super().__iter__():
            if limit.over():
                self.clock.end(limit.done)
                return
            yield batch
            limit.step(limit.done + 1)
            self.clock.step(limit.done, len(self), limit.pace.step)
