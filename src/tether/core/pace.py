"""Time that is left: what was expected before, corrected by the steps that were measured."""

from __future__ import annotations

import statistics
from collections import deque
from typing import NamedTuple

FIRST = 1
"""Steps at the start that are left out of the typical one as soon as there are others: they warm
up.
"""


class Expected(NamedTuple):
    """Seconds of a stage: before its first step, in all of its steps, after the last; `timed`: a
    budget ends it by then.
    """

    before: float
    steps: float
    after: float
    timed: bool = False

    @property
    def seconds(self) -> float:
        """Of all of it."""
        return self.before + self.steps + self.after

    def within(self, seconds: float) -> Expected:
        """The same where a budget ends it after so many seconds."""
        if seconds >= self.seconds:
            return self
        return Expected(self.before, max(0.0, seconds - self.before - self.after), self.after, True)


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
    as the last ones. Work around the steps has its own count (`part`).
    """

    def __init__(self, now: float, expected: Expected | None = None) -> None:
        self.begun = self.since = now
        self.expected = expected
        self.pace = Pace()
        self.done = 0
        self.total = None
        self._part: tuple[float, int, int] | None = None

    def part(self, now: float, done: int = 0, total: int = 0) -> None:
        """Start or continue a piece of work, with the amount that is done; total 0: not counted."""
        begun = now if self._part is None or not done else self._part[0]
        self._part = (begun, done, total)
        if not self.pace.count:
            self.since = now if not done else self.since

    def step(self, now: float, done: int, total: int, seconds: float | None = None) -> None:
        """A step has ended, which took so many seconds; unset: since the one before, or since the
        last part began.
        """
        units = max(1, done - self.done) if self.pace.count or seconds is None else 1
        self.pace.add((now - self.since if seconds is None or self.pace.count else seconds) / units)
        self.done = done
        self.total = total
        self.since = now
        self._part = None

    def left(self, now: float) -> float | None:
        """Seconds. None if unknown, or if the work takes longer than expected: parts that follow
        the last step are then not counted.
        """
        timed = self.expected and self.expected.timed
        rest = self._expected_left(now) if timed else self._left(now)
        if rest is None and self.total and self.done >= self.total:
            return None
        of_part = None if timed and rest else self._left_of_part(now)
        return rest if of_part is None or (rest or 0.0) > of_part else of_part

    @property
    def slowness(self) -> float:
        """The seconds of a step over those that were expected; 1 where a budget decides on the
        time.
        """
        if (
            self.pace.step is None
            or self.total is None
            or self.expected is None
            or self.expected.timed
            or not self.expected.steps
        ):
            return 1.0
        return self.pace.step * self.total / self.expected.steps

    def whole(self, now: float) -> float | None:
        """All of the stage, by what is known now."""
        left = self.left(now)
        return None if left is None else now - self.begun + left

    def _expected_left(self, now: float) -> float | None:
        left = 0.0 if self.expected is None else self.expected.seconds - (now - self.begun)
        return left if left > 0 else None

    def _left(self, now: float) -> float | None:
        if self.pace.step is None or self.total is None:
            return self._expected_left(now)
        # slow steps mean a slow machine; quick ones say nothing of other work, such as a judge's
        after = 0.0 if self.expected is None else self.expected.after * max(1.0, self.slowness)
        left = self.pace.step * (self.total - self.done) + after - (now - self.since)
        return left if left > 0 else None

    def _left_of_part(self, now: float) -> float | None:
        if self._part is None or not self._part[1]:
            return None
        begun, done, total = self._part
        return (now - begun) / done * (total - done) or None


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
