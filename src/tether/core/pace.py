"""Time that is left: what was expected before, corrected by the steps that were measured."""

from __future__ import annotations

import statistics
from collections import deque

FIRST = 1
"""Steps at the start that are left out of the typical one as soon as there are others: they warm
up.
"""


class Pace:
    """Seconds a step, from the steps so far; of an earlier start their number and the seconds of
    one.
    """

    def __init__(self, count: int = 0, step: float | None = None) -> None:
        self.count = count
        self._recent: deque[float] = deque([] if step is None else [step], maxlen=32)

    def add(self, seconds: float) -> None:
        """Note a step."""
        self.count += 1
        if self.count == FIRST + 1:
            self._recent.clear()
        self._recent.append(seconds)

    @property
    def step(self) -> float | None:
        """The mean of the last steps; None before the first."""
        return statistics.fmean(self._recent) if self._recent else None


class Forecast:
    """Seconds that are left of one stage. Times are those of one clock.

    Before the first step they are the expected seconds. Afterwards the remaining steps take as long
    as the last ones.
    """

    def __init__(self, now: float, expected: float | None = None) -> None:
        self.begun = self.since = now
        self.expected = expected
        self.pace = Pace()
        self.done = 0
        self.total: int | None = None

    def part(self, now: float) -> None:
        """A piece of work begins: the first step takes its time from the last one before it."""
        if not self.pace.count:
            self.since = now

    def step(self, now: float, done: int, total: int, seconds: float | None = None) -> None:
        """A step has ended, which took so many seconds; unset: since the one before, or since the
        last part began.
        """
        if seconds is None or self.pace.count:
            seconds = (now - self.since) / max(1, done - self.done)
        self.pace.add(seconds)
        self.done = done
        self.total = total
        self.since = now

    def left(self, now: float) -> float | None:
        """Seconds; None where they are unknown, or where the work takes longer than expected."""
        if self.pace.step is not None and self.total is not None:
            left = self.pace.step * (self.total - self.done) - (now - self.since)
        else:
            left = (self.expected or 0.0) - (now - self.begun)
        return left if left > 0 else None


class Crowd:
    """Notices that the threads of this process often wait for a core, since other processes use
    the machine.
    """

    LONG = 0.25
    """Share of a step in which its threads wait, from which on the cores are short."""
    LATELY = 3
    """Steps that are looked at. All of them must be slowed."""

    def __init__(self) -> None:
        self._shares: deque[float] = deque(maxlen=self.LATELY)
        self._is_noticed = False

    def add(self, seconds: float, worked: float, waited: float) -> float | None:
        """Note the seconds of a step, those in which its threads had a core, and those in which
        they waited for one.

        Returns the median share of waiting in the last steps, once, if cores are short. A process
        that is idle for most of a step does not need them.
        """
        idle = worked + waited < seconds / 2
        self._shares.append(0.0 if idle else waited / max(1e-9, worked + waited))
        if self._is_noticed or len(self._shares) < self.LATELY or min(self._shares) < self.LONG:
            return None
        self._is_noticed = True
        return statistics.median(self._shares)
