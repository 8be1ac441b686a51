"""Control arms of a sweep: gains without part of the reward, next to the policies' own."""

from __future__ import annotations

from collections import defaultdict

from tether.report.about import control_lines
from tether.report.numbers import SENTENCES, bracketed
from tether.report.sweeps import MEASURES, Measured, Setting, Sweep
from tether.stats import normal_mean

JUDGED = ("gold", "heldout")
"""Gains that arms with different rewards have in common."""


def sweep_controls(
    sweep: Sweep,
    gain: Measured | None,
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
    gains: defaultdict[str, list[tuple[float, float, float]]] = defaultdict(list)
    for member in setting.members:
        own = read(member.policy)
        others = [arm for arm in member.journey.policies if arm.path != member.policy.path]
        for arm in others:
            theirs = read(arm)
            if own and theirs and str(arm.settings.get("reward_source")) in SENTENCES["controls"]:
                row = theirs.value, own.value, own.value - theirs.value
                gains[arm.title].append(row)
    return [
        [
            *setting.values,
            name,
            str(len(values)),
            *(bracketed(normal_mean(column), gain.show) for column in zip(*values, strict=True)),
        ]
        for name, values in gains.items()
    ]
