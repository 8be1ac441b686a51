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

from tether.build.judges import TextJudge
from tether.core.budget import TimeLimit
from tether.core.errors import RewardError
from tether.core.rundir import read_json, write_json
from tether.core.types import Json, Prompt

_LOG = logging.getLogger("tether.budget")
MEASURED_PROMPTS = "measured_prompts.json"
"""The file of the number of held-out prompts, in the stage's folder."""
LEAST = 32
"""Prompts that a stage answers however short the time is."""
AT_MOST_MEASURING = 0.15
"""Share of a training's time that the measurement after its last step may take."""
PROBED = 16
"""Answers on which the time of a judge is measured."""
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
        noted = read_json(note) if note.is_file() else {}
        self.limit.before = max(self.limit.before, noted.get("spent", 0.0))
        self.count: int | None = noted.get("count")
        if self.count is None and not limit.bounded:
            self.count = total
        if self.count is not None and self.count < total:
            self._ended(noted.get("minutes", limit.minutes))

    @property
    def left(self) -> float:
        """Seconds that are left for more prompts."""
        return self.limit.seconds - self.limit.spent - self.limit.closing - self.reserve

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
        fits = math.floor(self.left / each) if each > 0 else self.total
        return max(0, min(most, self.total - done, fits))

    def answer(
        self,
        missing: Sequence[tuple[int, Prompt]],
        most: int,
        answer: Callable[[Sequence[tuple[int, Prompt]]], Sequence[Json]],
        judge: TextJudge | None,
    ) -> None:
        """Answer as many of the prompts as fit, a part at a time.

        Args:
            missing: prompts without an answer, each with its place; those before them have one.
            answer: answers a part, and returns a row for each prompt with its `responses`.
            judge: scores all answers afterwards; its time is measured on the first ones. That of a
                language model is not.
        """
        done = (self.total if self.count is None else self.count) - len(missing)
        each = judging = 0.0
        while missing and (size := self.next(done, each + judging, most)):
            begun = self.clock()
            part = missing[:size]
            missing = missing[size:]
            rows = answer(part)
            done += size
            each = (self.clock() - begun) / size
            if self.count is None and judge is not None and not judging:
                prompts = []
                texts = []
                for (_, prompt), row in zip(part, rows, strict=True):
                    prompts += [prompt] * len(row["responses"])
                    texts += row["responses"]
                each_answer = seconds_an_answer(judge, prompts, texts, self.clock)
                judging = each_answer * len(texts) / size
            self.reserve = judging * done
            self.keep(done)

    def keep(self, done: int) -> None:
        """Note the time so far."""
        if self.limit.bounded:
            self._write(self.count)

    def close(self, done: int) -> None:
        """Note that these are all."""
        self.count = done
        if self.limit.bounded:
            self._write(done)
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

    def _write(self, count: int | None) -> None:
        self.note.parent.mkdir(parents=True, exist_ok=True)
        noted = {"spent": self.limit.spent, "count": count, "minutes": self.limit.minutes}
        write_json(self.note, noted)


def measured_prompts(limit: TimeLimit, note: Path, count: int) -> int:
    """The number of held-out prompts of a training with a budget, at least 16. As many are taken as
    fit into a part of its time, by the price. The number is noted, and the same in every start.
    """
    words = "%s: its measurements take %d of %d held-out prompts, since its time is limited."
    if note.is_file():
        if (fits := int(read_json(note)["count"])) < count:
            _LOG.warning(words, note.parent.name, fits, count)
        return fits
    if not limit.bounded or (note.parent / "heldout.jsonl").is_file():
        return count  # as the start before
    share = AT_MOST_MEASURING * (limit.seconds - limit.spent) / limit.after if limit.after else 1.0
    fits = min(count, max(LEAST // 2, math.floor(count * share)))
    write_json(note, {"count": fits})
    if fits < count:
        _LOG.warning(words, note.parent.name, fits, count)
    return fits


def has_time(limit: TimeLimit, seconds: float, note: Path) -> bool:
    """True if a control of so many seconds before the first step leaves half of the time to the
    training. The answer is noted, and the same in every start.
    """
    noted = read_json(note) if note.is_file() else {}
    if not limit.bounded or noted.get("control"):
        return noted.get("control", True)
    fits = limit.spent + seconds + limit.reserve <= limit.seconds / 2
    write_json(note, {**noted, "control": fits})
    return fits


def measurements_cut(note: Path, prompts: int) -> str:
    """The measurements that the time of a training has left out, in words; empty: none.

    Args:
        prompts: held-out prompts that its settings have.
    """
    noted = read_json(note) if note.is_file() else {}
    if noted.get("count", prompts) < prompts:
        return f"it is measured on {noted['count']} of {prompts} held-out prompts"
    return "" if noted.get("control", True) else "the best answers of its start are not measured"


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
