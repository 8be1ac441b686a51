"""Control arms of a sweep: gains without part of the reward, next to the policies' own."""

from __future__ import annotations

import math
from collections import defaultdict

from tether.stats import Estimate, mean_of_runs
from tether.watch.report.about import control_lines
from tether.watch.report.measures import BY_KEY
from tether.watch.report.numbers import bracketed
from tether.watch.report.sweeps import Measured, Setting, Sweep, control_arms

JUDGED = ("gold", "heldout")
"""Gains that arms with different rewards have in common."""


def sweep_controls(
    sweep: Sweep,
    gain: Measured | None,
) -> tuple[list[str], list[list[str]], list[str]]:
    """Columns, a row an arm and setting, and a sentence for each arm: what it takes away.

    The last column compares each policy with the arm of the same seed.
    """
    if gain is None or gain.key not in JUDGED:
        return [], [], []
    rows = [row for setting in sweep.settings for row in _rows(setting, gain)]
    arms = [arm for member in sweep.members for arm in member.journey.policies]
    columns = [*sweep.keys, "arm", "runs", f"{gain.name} of the arm", "of the policy", "difference"]
    return columns, rows, list(dict.fromkeys(control_lines(arms))) if rows else []


def _rows(setting: Setting, gain: Measured) -> list[list[str]]:
    read = BY_KEY[gain.key].read
    gains: defaultdict[str, list[tuple[Estimate, Estimate, Estimate]]] = defaultdict(list)
    for member, arm in control_arms(setting.members):
        own = read(member.policy)
        theirs = read(arm)
        if own and theirs:
            ahead = Estimate(own.value - theirs.value, math.nan, math.nan, 0)
            gains[arm.title].append((theirs, own, ahead))
    return [
        [
            *setting.values,
            name,
            str(len(values)),
            *(bracketed(mean_of_runs(one)[0], gain.show) for one in zip(*values, strict=True)),
        ]
        for name, values in gains.items()
    ]
