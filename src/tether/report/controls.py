"""Control arms of a sweep: gains without part of the reward, next to the policies' own."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from tether.report.about import control_lines
from tether.report.numbers import SENTENCES, bracketed
from tether.report.sweeps import MEASURES, Measured, Setting, Sweep
from tether.stats import normal_mean

JUDGED = ("gold", "heldout")
"""Gains that arms with different rewards have in common."""


def sweep_controls(
    sweep: Sweep, gain: Measured | None
) -> tuple[list[str], list[list[str]], list[str]]:
    """Columns, a row an arm and setting, and a sentence for each arm: what it takes away.

    Intervals are over seeds. The last column compares each policy with the arm of the same seed.
    """
    if gain is None or gain.key not in JUDGED:
        return [], [], []
    rows = [row for setting in sweep.settings for row in _rows(setting, gain)]
    arms = [arm for member in sweep.members for arm in member.journey.policies]
    columns = [*sweep.keys, "arm", "runs", f"{gain.name} of the arm", "of the policy", "difference"]
    return columns, rows, list(dict.fromkeys(control_lines(arms))) if rows else []


def _rows(setting: Setting, gain: Measured) -> list[list[str]]:
    read = next(one.read for one in MEASURES if one.key == gain.key)
    pairs: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    for member in setting.members:
        own = read(member.policy)
        others = [arm for arm in member.journey.policies if arm.path != member.policy.path]
        for arm in others:
            theirs = read(arm)
            if own and theirs and str(arm.settings.get("reward_source")) in SENTENCES["controls"]:
                pairs[arm.title].append((theirs.value, own.value))
    return [
        [
            *setting.values,
            name,
            str(len(values)),
            _mean([theirs for theirs, _ in values], gain),
            _mean([own for _, own in values], gain),
            _mean([own - theirs for theirs, own in values], gain),
        ]
        for name, values in pairs.items()
    ]


def _mean(values: Sequence[float], gain: Measured) -> str:
    return bracketed(normal_mean(values), gain.show)
