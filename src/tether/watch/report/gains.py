"""A policy's gains and the KL that they cost: from its summary, else from the steps so far;
and the parts of the judge's score before and after training.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import NamedTuple

import numpy as np

from tether.core.types import Row
from tether.stats import Estimate, grouped_mean, without_interval
from tether.watch.report.reading import (
    KL_KEYS,
    SubRun,
    estimate,
    finite,
    mapping,
    present,
    printable,
    trend_of,
)


class HeldOutGain(NamedTuple):
    """The training's own reward on held-out prompts.

    `checked`: the reward is a checked answer instead of a model's guess. `halves`: the step was
    chosen for its score, and each half of the prompts is judged at the step that the other half
    chose.
    """

    before: Estimate
    after: Estimate
    gain: Estimate
    num_prompts: int
    checked: bool
    halves: bool


def heldout_gain(policy: SubRun) -> HeldOutGain | None:
    """The run's measurement on held-out prompts: the share of right answers, where answers are
    checked.
    """
    stored = mapping(policy.summary, "heldout")
    checked = "correct" in stored
    halves = stored.get("judged_by") == ("the prompts that did not choose the step")
    values = mapping(stored, "correct" if checked else "score")
    before, after, gain = (estimate(values, key) for key in ("before", "after", "gain"))
    if before is None or after is None or gain is None:
        return None
    return HeldOutGain(
        before,
        after,
        gain,
        int(finite(stored, "num_prompts") or 0),
        checked,
        halves,
    )


def gold_gain(policy: SubRun) -> Estimate | None:
    """The gain of the summary, else the last gold score less the first."""
    values = [value for _, value in present(policy.metrics, "gold/score")]
    return policy.estimate("gold_gain") or (
        estimate(values[-1] - values[0]) if len(values) > 1 else None
    )


def proxy_gain(policy: SubRun) -> Estimate | None:
    """The gain of the summary, else over the steps so far."""
    course = trend_of(policy.metrics, "reward/proxy")
    return policy.estimate("proxy_gain") or (estimate(course.gain) if course else None)


def spent_kl(policy: SubRun) -> Estimate | None:
    """The KL of the summary, else of the last steps so far, with its interval where there is
    one.
    """
    kl, noise = (finite(policy.summary, key) for key in ("kl", "kl_noise"))
    if kl is None and (measured := estimate(policy.summary, "answers", "kl")):
        return measured
    if kl is None and (course := trend_of(policy.metrics, *KL_KEYS)):
        kl = course.last
        noise = course.noise
    if kl is None:
        return None
    if noise is not None:
        return Estimate(kl, kl - noise, kl + noise, 0)
    return without_interval(kl, 0, "steps")


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
