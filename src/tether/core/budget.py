"""Budgets of wall-clock time: a training ends at a whole step, and its schedules are drawn over the
steps that fit.

As in Lightning's `Timer`, the seconds of earlier starts count. Once schedules are drawn they stay:
a start that goes on has the schedule of the one before.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar

from tether.core.pace import Pace
from tether.core.types import Facts, Json

logger = logging.getLogger(__name__)
BUDGET = "budget"
"""The key of a config and of a summary. It may change from one start to the next."""
ANEW = "To use more time, start anew with run=PATH."
MEASURED = 3
AT_LEAST = 0.1
AT_MOST = 0.25
"""Schedules are drawn after so many steps and this share of the time, and as soon as steps have
taken the larger share.
"""


class TimeLimit:
    """The time of one training. Without a budget it has no end and draws no schedule.

    Args:
        seconds: of all starts together.
        minutes: the budgets that a person gave, so that a resumed run can detect a change; 0: none.
        clock: seconds that only grow.
        began: the time on that clock from which seconds count; unset: now.
        kept: seconds beside these, kept for so many `answers` of later stages.
    """

    def __init__(
        self,
        seconds: float = math.inf,
        *,
        minutes: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
        began: float | None = None,
        kept: float = 0.0,
        answers: float = 0.0,
    ) -> None:
        self.seconds = seconds
        self.kept = kept
        self.answers = answers
        self.minutes = minutes
        self.clock = clock
        self.began = clock() if began is None else began
        self.before = 0.0
        """Seconds of earlier starts."""
        self.reserve = 0.0
        """Measured seconds of what follows the last step."""
        self.left_out = 0.0
        """Seconds of the steps that the end has left out, as far as they are known."""
        self.drawn: int | None = None
        """Steps over which the schedules are drawn; None: over all."""
        self.done = 0
        self.total = 0
        self.ended = False
        self.pace = Pace()
        self._last = self.began

    @property
    def spent(self) -> float:
        """Seconds so far, of all starts."""
        return self.before + self.clock() - self.began

    @property
    def bounded(self) -> bool:
        """True if the time is limited."""
        return not math.isinf(self.seconds)

    def begin(self, done: int, total: int) -> None:
        """The steps begin, or go on."""
        self.done, self.total, self._last = done, total, self.clock()

    def answered(self, seconds: float) -> None:
        """An answer and its judgment take so many seconds: later stages keep no more than theirs
        take at this pace.
        """
        spare = max(0.0, self.kept - self.answers * seconds)
        self.seconds += spare
        self.kept -= spare

    def step(self, done: int) -> bool:
        """Note that a step has ended; True where schedules are to be drawn over `drawn` steps from
        now on.
        """
        now = self.clock()
        self.done = done
        self.pace.add(now - self._last)
        self._last = now
        step = self.pace.step or 0.0
        is_late = self.pace.count >= MEASURED and self.spent >= AT_LEAST * self.seconds
        enough = is_late or self.pace.count * step >= AT_MOST * self.seconds
        if (
            self.drawn is not None
            or done >= self.total
            or self.pace.count < 2
            or not (step and enough)
        ):
            return False
        fits = done + math.floor((self.seconds - self.spent - self.reserve) / step)
        self.drawn = min(self.total, max(done + 1, fits))
        return True

    def over(self) -> bool:
        """True if the next step would end after the time. At least one step is made."""
        more = self.spent + (self.pace.step or 0.0) + self.reserve
        self.ended = self.bounded and 0 < self.done < self.total and more > self.seconds
        self.left_out = (self.total - self.done) * (self.pace.step or 0.0) if self.ended else 0.0
        return self.ended

    def state(self) -> Json:
        """Values that a checkpoint holds of this limit."""
        return {
            "seconds": self.seconds if self.bounded else None,
            "minutes": self.minutes,
            "spent": self.spent,
            "measured": self.reserve,
            "pace": [self.pace.count, self.pace.step],
            "drawn": self.drawn,
            "total": self.total,
        }

    def load_state(self, values: Facts, place: object) -> None:
        """Go on where `state` was taken. Schedules that are drawn keep their budget, and a line
        says so.

        Args:
            place: of the run, for that line.
        """
        self.before = values["spent"]
        self.drawn = values["drawn"]
        self.pace = Pace(*values["pace"])
        self.reserve = max(self.reserve, values["measured"])
        before = math.inf if values["seconds"] is None else values["seconds"]
        is_same = self.minutes == values["minutes"]
        if is_same or (self.drawn is not None and self.seconds > before):
            self.seconds = before
            self.minutes = values["minutes"]
        if not is_same and self.minutes == values["minutes"]:
            logger.warning(
                "%s",
                f"{place} keeps its budget of {self.minutes:g} minutes: its learning rate was drawn "
                f"over {values['drawn']} of {values['total']} steps. {ANEW}",
            )

    def summary(self) -> Json:
        """The entry of the stage's summary: empty unless time ended it."""
        if not self.ended:
            return {}
        return {"budget": {**self.state(), "ended_at": self.done, "left_out": self.left_out}}


_LIMIT: ContextVar[TimeLimit | None] = ContextVar("limit", default=None)


@contextlib.contextmanager
def limited_by(limit: TimeLimit) -> Iterator[TimeLimit]:
    """Trainings within this block have this limit."""
    token = _LIMIT.set(limit)
    try:
        yield limit
    finally:
        _LIMIT.reset(token)


def time_limit() -> TimeLimit:
    """The limit of the training in hand; without one, a limit that never ends."""
    return _LIMIT.get() or TimeLimit()


@contextlib.contextmanager
def shared_time(number: int, count: int) -> Iterator[None]:
    """Within this block the training in hand is the one at place `number` of `count`, which share
    what is left alike.
    """
    whole = time_limit()
    if not whole.bounded:
        yield
        return
    left = max(0.0, whole.seconds - whole.spent) / (count - number)
    part = TimeLimit(left, minutes=whole.minutes, clock=whole.clock)
    with limited_by(part):
        yield
    if part.ended:
        whole.ended = True
        whole.done = part.done
        whole.total = part.total
        whole.drawn = part.drawn
        whole.left_out += part.left_out
