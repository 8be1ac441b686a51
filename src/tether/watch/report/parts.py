"""The parts of the judge's score before and after training."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import NamedTuple

import numpy as np

from tether.stats import Estimate, grouped_mean
from tether.watch.report.reading import Row, SubRun, finite, mapping, printable


class Part(NamedTuple):
    """One part of the gold score before and after; `noise` is how far off its change may be, where
    answers show it.
    """

    name: str
    before: float
    after: float
    noise: float | None

    @property
    def change(self) -> float:
        return self.after - self.before

    @property
    def moved(self) -> Estimate:
        """The change with its noise as its interval."""
        noise = math.nan if self.noise is None else self.noise
        return Estimate(self.change, self.change - noise, self.change + noise, 0)

    @property
    def direction(self) -> int:
        """+1 risen, -1 fallen, 0 no clear change."""
        floor = 0.01 * max(abs(self.before), abs(self.after)) if self.noise is None else self.noise
        return (self.change > floor) - (self.change < -floor)


def gold_parts(policy: SubRun, answers: Sequence[Row] = ()) -> list[Part]:
    """The parts of the gold score in a policy's summary, with the noise of its evaluated
    answers.
    """
    changes: dict[str, dict[str, list[float]]] = {}
    for index, answer in enumerate(answers):
        before, after = (mapping(answer, f"parts_{side}") for side in ("before", "after"))
        for name in before:
            ends = finite(before[name]), finite(after, name)
            if ends[0] is not None and ends[1] is not None:
                prompt = str(answer.get("id", index))
                changes.setdefault(printable(name, 60), {}).setdefault(prompt, []).append(
                    ends[1] - ends[0],
                )
    parts = []
    for raw, stored in mapping(policy.summary, "gold_parts").items():
        name = printable(raw, 60)
        start, end = (finite(stored, key) for key in ("before", "after"))
        parts += (
            []
            if start is None or end is None
            else [Part(name, start, end, _noise(changes.get(name, {})))]
        )
    return parts


def _noise(changes: Mapping[str, Sequence[float]]) -> float | None:
    """The longer side of the 95% interval of the mean change, over prompts; infinite of too few,
    None where none is known.
    """
    if not changes:
        return None
    moved = grouped_mean(np.array(list(map(fmean, changes.values()))), None)
    return max(moved.high - moved.value, moved.value - moved.low)
