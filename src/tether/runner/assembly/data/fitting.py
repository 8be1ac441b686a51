"""Prompts that fit into a budget. A stage answers prompts in random order, measures the first ones,
and ends with as many as the time allows.
"""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from tether.core.budget import TimeLimit
from tether.core.errors import RewardError
from tether.core.rundir import read_if_there, write_json
from tether.core.types import Json, Prompt
from tether.runner.assembly.judges import TextJudge
from tether.stages.learner.ranks import Ranks

_LOG = logging.getLogger("tether.budget")
MEASURED_PROMPTS = "measured_prompts.json"
"""The file of the number of held-out prompts, in the stage's folder."""
LEAST = 32
"""Prompts that a stage answers however short the time is."""
AT_MOST_MEASURING = 0.15
"""Share of a training's time that one measurement on held-out prompts may take."""
PROBED = 16
"""Answers, or held-out prompts, on which time is measured."""
FITTING = "fitting.json"
"""The file that notes how many prompts a stage answers, in the stage's folder."""
Item = TypeVar("Item")


class Fitting:
    """The number of prompts of one stage, noted in a file so that a start that goes on has the same.

    Args:
        note: the file.
        total: prompts that there are.
    """

    def __init__(self, limit: TimeLimit, note: Path, total: int) -> None:
        self.limit = limit
        self.note = note
        self.total = total
        self.clock = limit.clock
        self.reserve = 0.0
        """Seconds of what follows for the prompts that are answered."""
        noted = read_if_there(note)
        self.limit.before = max(self.limit.before, noted.get("spent", 0.0))
        self.count: int | None = noted.get("count")
        if self.count is None and not limit.bounded:
            self.count = total
        if self.count is not None and self.count < total:
            self._ended(noted.get("minutes", limit.minutes))

    def order(self, items: Sequence[Item], seed: int) -> list[Item]:
        """The items in the order in which they are answered. If all rows are answered, it is their
        order, else a random one, since files are often sorted.
        """
        items = list(items)
        if self.count != self.total:
            random.Random(seed).shuffle(items)
        return items[: self.count]

    def next(self, done: int, each: float, most: int) -> int:
        """The number of prompts to answer next; 0: as many as fit are answered.

        Args:
            each: seconds that a prompt takes, all that follows included, as it was measured.
            most: prompts that are answered at once.
        """
        if self.count is not None:
            return min(most, self.count - done)
        if done < min(LEAST, self.total):
            return min(most, LEAST - done, self.total - done)
        left = self.limit.seconds - self.limit.spent - self.reserve
        fits = math.floor(left / each) if each > 0 else self.total
        return max(0, min(most, self.total - done, fits))

    def answer(
        self,
        missing: Sequence[tuple[int, Prompt]],
        most: int,
        answer: Callable[[Sequence[tuple[int, Prompt]]], Sequence[Json]],
        judge: TextJudge | None,
        *,
        sides: int = 1,
        opening: float = 0.0,
        times: int = 1,
    ) -> None:
        """Answer as many of the prompts as fit, a part at a time.

        Args:
            missing: prompts without an answer, each with its place; those before them have one.
            answer: answers a part, and returns a row for each prompt with its `responses`.
            judge: scores all answers afterwards; its time is measured on the first ones. That of a
                language model is not.
            sides: that answer the same prompts, one after another.
            opening: seconds in which a side was loaded.
            times: answers that are judged for each of a row's.
        """
        done = (self.total if self.count is None else self.count) - len(missing)
        each = 0.0
        judging = 0.0
        answering = 0.0
        while missing and (size := self.next(done, each, most)):
            begun = self.clock()
            part = missing[:size]
            missing = missing[size:]
            rows = answer(part)
            done += size
            took = self.clock() - begun
            answering += took
            if self.count is None and judge is not None and not judging:
                prompts = []
                texts = []
                for (_, prompt), row in zip(part, rows, strict=True):
                    prompts += [prompt] * len(row["responses"])
                    texts += row["responses"]
                each_answer = seconds_an_answer(judge, prompts, texts, self.clock)
                judging = times * each_answer * len(texts) / size
            each = sides * (took / size + judging)
            self.reserve = (sides - 1) * (opening + answering) + sides * judging * done
            self.keep()

    def keep(self) -> None:
        """Note the time so far."""
        limit = self.limit
        if limit.bounded:
            noted = {"spent": limit.spent, "count": self.count, "minutes": limit.minutes}
            write_json(self.note, noted)

    def close(self, done: int) -> None:
        """Note that these are all."""
        self.count = done
        self.keep()
        if done < self.total:
            self._ended(self.limit.minutes)

    def _ended(self, minutes: float) -> None:
        assert self.count is not None
        limit = self.limit
        limit.ended = True
        limit.done = self.count
        limit.drawn = self.count
        limit.total = self.total
        limit.minutes = minutes


def measured_prompts(
    limit: TimeLimit,
    note: Path,
    count: int,
    measure: Callable[[int], object],
    ranks: Ranks,
) -> int:
    """The number of held-out prompts of a training with a budget, at least 16: as many as `measure`
    answers in a part of its time. The number is noted, and the same in every start.
    """
    begun = limit.clock()
    probed = min(count, PROBED)
    is_new = limit.bounded and not any(p.is_file() for p in (note, note.parent / "heldout.jsonl"))
    if ranks.once(lambda: is_new):
        measure(probed)
        share = AT_MOST_MEASURING * max(0.0, limit.seconds - limit.spent)
        seconds = limit.clock() - begun
        fits = max(probed, math.floor(probed * share / seconds) if seconds else count)
        ranks.once(lambda: write_json(note, {"count": min(count, fits)}))
    fits = ranks.once(lambda: read_if_there(note).get("count", count))
    if fits < count:
        words = "%s: its measurements take %d of %d held-out prompts, since its time is limited."
        _LOG.warning(words, note.parent.name, fits, count)
    return fits


def has_time(limit: TimeLimit, seconds: float, note: Path) -> bool:
    """True if a control of so many seconds before the first step leaves half of the time to the
    training. The answer is noted, and the same in every start.
    """
    noted = read_if_there(note)
    if not limit.bounded or "control" in noted:
        return noted.get("control", True)
    fits = limit.spent + seconds + limit.reserve <= limit.seconds / 2
    write_json(note, {**noted, "control": fits})
    return fits


def seconds_an_answer(
    judge: TextJudge,
    prompts: Sequence[Prompt],
    responses: Sequence[str],
    clock: Callable[[], float],
) -> float:
    """The time in which a judge scores one answer; the first call, in which it may load a model,
    is not counted. 0 where it scores none of these.
    """
    try:
        judge(prompts[:PROBED], responses[:PROBED])
        start = clock()
        timed = responses[PROBED : 2 * PROBED]
        if timed:
            judge(prompts[PROBED : 2 * PROBED], timed)
        return (clock() - start) / max(1, len(timed))
    except RewardError:
        return 0.0
