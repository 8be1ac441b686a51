"""The best measurement of a training, and a test for a fall of the last one below an earlier one.

Every function reads the scores of the same answers at several steps, `groups` naming the prompt of
each answer.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from itertools import compress

import numpy as np

from tether.stats import Array, group_indices, peak

FALSE_STOPS = 0.05
"""Of runs whose score never falls, at most this share is ended by `has_fallen`, over all their
measurements together.
"""
Measured = Mapping[int, Mapping[str, Sequence[float | None]]]
"""By step: columns of numbers, one an answer; `score` is the judge's."""


def best_step(measured: Measured) -> int | None:
    """The step of the highest mean score; the first of equals."""
    means = {
        step: statistics.fmean(scores)
        for step, rows in measured.items()
        if (scores := without_none(rows["score"]))
    }
    return max(sorted(means), key=means.__getitem__, default=None)


def without_none(values: Sequence[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def chosen_by_others(measured: Measured, groups: Sequence[str]) -> list[int | None]:
    """For each answer the best step of the other half of the prompts: its score there had no part
    in the choice.
    """
    sides = group_indices(groups) % 2

    def best_of(side: int) -> int | None:
        return best_step(
            {
                step: {"score": list(compress(rows["score"], sides == side))}
                for step, rows in measured.items()
            },
        )

    by_others = best_of(1), best_of(0)
    return [by_others[side] for side in sides]


DRAWS = 10_000
"""Of T without any change."""


def has_fallen(measured: Measured, groups: Sequence[str], looks: int) -> bool:
    """True if the last measurement lies clearly below an earlier one: few runs without a fall would
    show as much.

    Equation: T = max over earlier s of (x̄_s − x̄_now) / se_s. T is compared with draws of T
    without any change. For a draw, every prompt's deviations are multiplied by one normal number.
    The draw is then divided by a root of χ²/(G − 1), as in Student's t. So the distribution
    includes the choice of the highest measurement and the correlation of neighbouring measurements.
    Each of the `looks` planned measurements gets an equal part of `FALSE_STOPS` (Bonferroni).
    Paper: White 2000, https://doi.org/10.1111/1468-0262.00152; multipliers: Chernozhukov et al.
    2013, https://doi.org/10.1214/13-AOS1161.
    Trap: it asks for a fall below *any* earlier measurement, not below the highest alone, which
        noise has chosen.
    """
    from scipy.special import stdtr

    steps, sums, counts = _by_prompt(measured, groups)
    if len(steps) < 2 or steps[-1] != max(measured) or len(sums) < 2:
        return False
    freedom = len(sums) - 1
    total = counts.sum(0)
    level = FALSE_STOPS / max(looks, len(steps) - 1)
    means = sums.sum(0) / total
    parts = (sums - counts * means) / total  # what each prompt adds to the error of each mean
    moved = parts[:, :-1] - parts[:, -1:]
    errors = np.sqrt((freedom + 1) / freedom * (moved**2).sum(0)) + 1e-9 * (1 + np.abs(means[-1]))
    highest = float(((means[:-1] - means[-1]) / errors).max())
    alone = float(stdtr(freedom, -highest))
    # too little were it the only comparison, or enough were they unrelated
    if alone >= level or alone * len(errors) < level:
        return alone < level
    generator = np.random.default_rng(0)
    scale = np.sqrt((freedom + 1) / generator.chisquare(freedom, DRAWS))
    draws = (generator.standard_normal((DRAWS, len(sums))) @ (moved / errors)).max(1) * scale
    return (1 + int((draws >= highest).sum())) / (1 + DRAWS) < level


def peak_interval(measured: Measured, groups: Sequence[str]) -> tuple[int, int] | None:
    """Between which steps the highest mean lies (`stats.peak`); None without any score, and where
    prompts are too few.
    """
    steps, sums, counts = _by_prompt(measured, groups)
    places = peak(sums, counts) if steps else None
    return None if places is None else (steps[places[0]], steps[places[1]])


def _by_prompt(measured: Measured, groups: Sequence[str]) -> tuple[list[int], Array, Array]:
    """The steps at which anything was scored, and each prompt's sum and number of scores there,
    (prompts, steps).
    """
    steps = [step for step in sorted(measured) if without_none(measured[step]["score"])]
    prompts = group_indices(groups)
    columns = [measured[step]["score"] for step in steps]
    # None becomes NaN
    scores = np.array(columns, dtype=np.float64).reshape(len(steps), len(groups)).T
    sums, counts = np.zeros((2, len(set(groups)), len(steps)))
    np.add.at(sums, prompts, np.nan_to_num(scores))
    np.add.at(counts, prompts, ~np.isnan(scores))
    return steps, sums, counts
