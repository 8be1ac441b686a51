"""The gain over decoding alone: a policy beside the model that it started from, both at several
temperatures.

A lower temperature makes the answers of most models better, and costs nothing. Training moves
probability to rewarded answers, so a trained policy is also sharper than its start. A comparison at
one temperature counts this as a gain. The gain of training itself is the best decoding of the one
model against the best decoding of the other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Literal

import numpy as np

from tether.core.types import Facts, Json, Sampling
from tether.evaluation.held_out import HeldOutAnswers
from tether.evaluation.suite import Figures, MeasuredPolicy
from tether.evaluation.winrate import MaybeScores, before_and_after, gain, win_rate
from tether.stats import (
    Estimate,
    EstimateFields,
    best_against_best,
    group_indices,
    shown_difference,
)

Columns = Mapping[float, MaybeScores]
"""By temperature, 0 being greedy: the scores of all answers. The first is the temperature of
training.
"""
Pairs = Mapping[tuple[float, float], Estimate]
"""Estimates by the temperatures of the policy and of the start."""
Verdict = Literal["better", "sharper", "undecided", "worse"]


def other_temperatures(sampling: Sampling, temperatures: Sequence[float]) -> list[float]:
    """These, once each, without the one at which `sampling` draws."""
    return [
        temperature
        for temperature in dict.fromkeys(temperatures)
        if temperature != sampling.temperature
    ]


@dataclass
class Decoding:
    """Implements core.protocols.Evaluator: the scores of held-out answers at other temperatures,
    the control of `control`. The temperature begins the name of each figure: `0.5/score`.
    """

    name = "decoding"

    answers: HeldOutAnswers
    temperatures: Sequence[float]

    def __call__(self, policy: MeasuredPolicy, step: int) -> Figures:
        result = Figures({})
        for temperature in self.temperatures:
            rollouts = self.answers.at(policy, temperature)
            figures = self.answers.scored(rollouts, name=f"{temperature:g}/")
            rows = {**result.rows, **figures.rows}
            result = Figures({**result, **figures}, rows, figures.groups)
        return result


def by_temperature(
    before: Columns,
    after: Columns,
    groups: Sequence[str],
) -> dict[str, dict[str, EstimateFields]]:
    """Means before and after, the gain and the win rate at each temperature that both have, with
    intervals over prompts.
    """
    shared = sorted(before.keys() & after.keys(), reverse=True)
    rows = {
        f"{temperature:g}": before_and_after(before[temperature], after[temperature], groups)
        for temperature in shared
    }
    return {temperature: row for temperature, row in rows.items() if row is not None}


def over_best_decoding(before: Columns, after: Columns, groups: Sequence[str]) -> Json | None:
    """The gain over the best decoding of the start, by the policy at its own best; None where
    nothing was scored on both sides.

    The gain is that of `stats.best_against_best`, over the answers that were scored at every
    temperature. Where scores have but two levels, and for the win rate, the interval comes from
    pairs of temperatures. With g_pb the estimate at temperature p of the policy against temperature
    b of the start, ``max_p min_b g_pb`` is in ``[max_p min_b low_pb, min_b max_p high_pb]``. Each
    bound has the level (1 − 0.95) / 2 over the number of temperatures from which its outer choice
    is made (Bonferroni). The inner choice needs no correction: to beat the best is to beat each
    (the intersection-union test).
    Paper: Berger 1982, https://doi.org/10.1080/00401706.1982.10487790.
    Trap: to choose the best and then compare with it, by the usual interval, calls an unchanged
        policy better or worse too often.
    """
    ours, theirs = (
        {t: scores for t, scores in side.items() if any(s is not None for s in scores)}
        for side in (after, before)
    )
    if not (ours and theirs):
        return None
    rows = [
        row
        for row in zip(*ours.values(), *theirs.values(), groups, strict=True)
        if None not in row[:-1]
    ]
    rates = _by_pairs(ours, theirs, groups, win_rate)
    if not rates:
        return None
    if not rows or len({score for row in rows for score in row[:-1]}) <= 2:
        (own, start), value = _saddle(_by_pairs(ours, theirs, groups, _gain_over))
    else:
        scores = np.array([row[:-1] for row in rows], dtype=np.float64)
        width = len(ours)
        contest = best_against_best(
            scores[:, :width],
            scores[:, width:],
            group_indices([row[-1] for row in rows]),
        )
        own = list(ours)[contest.ours]
        start = list(theirs)[contest.theirs]
        value = contest.gain
    return {
        **value.as_dict(),
        "win_rate": _saddle(rates)[1].as_dict(),
        "temperature": start,
        "policy_temperature": own,
    }


def _gain_over(
    ours: MaybeScores,
    theirs: MaybeScores,
    *,
    groups: Sequence[str],
    confidence: float,
) -> Estimate:
    """The gain of the first over the second, which were scored together."""
    gained = gain(theirs, ours, groups, confidence=confidence)
    assert gained is not None  # pairs without a common score are left out before
    return gained


def _by_pairs(
    ours: Columns,
    theirs: Columns,
    groups: Sequence[str],
    measure: Callable[..., Estimate],
) -> Pairs:
    """An estimate of each temperature of ours against each of theirs, with a low and a high bound
    of Bonferroni's levels.
    """
    by_low, by_high = (1 - 0.05 / len(side) for side in (ours, theirs))
    pairs = {}
    for own, start in product(ours, theirs):
        sides = ours[own], theirs[start]
        if any(a is not None and b is not None for a, b in zip(*sides, strict=True)):
            low, high = (
                measure(*sides, groups=groups, confidence=level) for level in (by_low, by_high)
            )
            pairs[own, start] = low._replace(high=high.high)
    return pairs


def _saddle(estimates: Pairs) -> tuple[tuple[float, float], Estimate]:
    """The best temperature of the policy with its worst opponent, and ``max min`` of values and
    bounds.
    """
    ours, theirs = (list(dict.fromkeys(pair[side] for pair in estimates)) for side in (0, 1))
    worst = [
        min((pair for pair in estimates if pair[0] == own), key=lambda pair: estimates[pair].value)
        for own in ours
    ]
    place = max(worst, key=lambda pair: estimates[pair].value)
    low = max(min(e.low for (p, _), e in estimates.items() if p == own) for own in ours)
    high = min(max(e.high for (_, b), e in estimates.items() if b == other) for other in theirs)
    bounded = math.isfinite(low) and math.isfinite(high)
    reasons = [estimates[place].reason, *(estimate.reason for estimate in estimates.values())]
    if bounded:
        return place, estimates[place]._replace(low=low, high=high, reason="")
    # one bound alone is no interval
    reason = next(filter(None, reasons), "")
    return place, estimates[place]._replace(low=-math.inf, high=math.inf, reason=reason)


def sharpening(
    start: Mapping[float, tuple[float, MaybeScores]],
    now: tuple[float, MaybeScores],
    groups: Sequence[str],
    at: float,
) -> dict[str, float]:
    """Measure how much of a gain at the temperature of training a lower temperature of the start
    would have given.

    The policy is compared with its start at the `temperature` of the same entropy. `gain` is the
    whole gain. `share` is the part of the gain that the start reaches at this temperature. `sure`
    is 1 if the gain is significant and its part beyond the sharper start is not. Else it is 0.

    Equation: two measured temperatures of the start have entropies that enclose the policy's.
    Between them, scores and temperature are interpolated linearly in the entropy. This is done
    answer by answer, so the difference has an interval over prompts.
    Args: ``start`` by temperature, ``now`` of the policy: (entropy in nats a token, scores). Empty
        where nothing can be compared.
    Trap: entropy is that of the answers given, so a policy that answers in fewer words is not of
        itself a sharper one.
    """
    entropy, scores = now
    points = sorted(
        (own, temperature) for temperature, (own, _) in start.items() if temperature <= at
    )
    if len(points) < 2 or (whole := gain(start[at][1], scores, groups)) is None:
        return {}
    below = max((point for point in points if point[0] <= entropy), default=points[0])
    above = min((point for point in points if point[0] >= entropy), default=points[-1])
    weight = 0.0 if above[0] == below[0] else (entropy - below[0]) / (above[0] - below[0])
    low = start[below[1]][1]
    high = start[above[1]][1]
    between = [
        None if a is None or b is None else a + weight * (b - a)
        for a, b in zip(low, high, strict=True)
    ]
    if (beyond := gain(between, scores, groups)) is None:
        return {}
    share = 1 - beyond.value / whole.value if whole.value > 0 else 0.0
    temperature = below[1] + weight * (above[1] - below[1])
    sure = whole.low > 0 >= beyond.low
    return {"gain": whole.value, "share": share, "temperature": temperature, "sure": float(sure)}


def verdict(gain: Facts, over_best: Facts) -> Verdict:
    """In a word: the win rate over the best decoding decides. `sharper` says that decoding alone
    may give the gain at the temperature of training.
    """
    shown = shown_difference(_bounds(over_best["win_rate"]), _bounds(over_best))
    if shown == "better" or shown == "worse":
        return shown
    return "sharper" if shown == "undecided" and (gain["low"] or 0) > 0 else "undecided"


def _bounds(fields: Facts) -> Estimate:
    low, high = (math.nan if fields[key] is None else fields[key] for key in ("low", "high"))
    return Estimate(math.nan, low, high, 0)


def control(before: Columns, after: Columns, groups: Sequence[str], at: float) -> Json:
    """All of it, for a summary: `by_temperature`, `over_best_decoding` and `verdict`; `at` is the
    temperature of training.
    """
    rows = by_temperature(before, after, groups)
    over_best = over_best_decoding(before, after, groups)
    if over_best is None or f"{at:g}" not in rows:
        return {"by_temperature": rows}
    return {
        "by_temperature": rows,
        "over_best_decoding": over_best,
        "verdict": verdict(rows[f"{at:g}"]["gain"], over_best),
    }
