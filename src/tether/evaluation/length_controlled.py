"""Win rate at equal length: the share of comparisons a model would win if its answers were as long
as the baseline's.

The model of AlpacaEval: a logistic regression of the judge's preference on the difference in
length, read at difference 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tether.core.types import Score
from tether.evaluation.winrate import MaybeScores
from tether.stats import Array, Estimate, group_indices, without_interval
from tether.stats.groups import Bounds, Groups, Indices, sigmoid, student

STRENGTHS = np.logspace(-4, 4, 10)
"""Candidates for C, the inverse strength of the L1 penalty."""
FOLDS = 5
FEWEST_PROMPTS = 50
FEWEST_LOST = 10
"""Prompts worth of the rarer outcome: the logarithm of the odds is not near normal below."""
FEWEST_ACROSS = 0.05
"""Share of pairs in which the usually longer side is the shorter one, or equally long."""
REPLICATES = 200


class _Rows(NamedTuple):
    """Judged pairs as the regression reads them."""

    wins: Array
    differences: Array
    prompts: Indices


def length_controlled_win_rate(
    wins: MaybeScores,
    lengths: Sequence[int],
    baseline_lengths: Sequence[int],
    prompts: Groups | None = None,
) -> Estimate:
    """Estimate the share of comparisons that a model wins at equal length.

    Equation: ``logit P(win) = a tanh(Δ / σ_Δ) + c`` with Δ the baseline's length less the model's;
        P at Δ = 0. An L1 penalty of strength 1/C holds both coefficients; C has the least log loss
        over five folds.
    Paper: Dubois et al. 2024, https://arxiv.org/abs/2404.04475.
    Shapes: one entry a pair. ``wins`` lie in [0, 1] (½: a draw); a None, a verdict that failed, is
        left out. Lengths are characters.
    Interval: a bootstrap over prompts that repeats everything, choice of C included; normal on the
        logarithm of the odds. Too few: fewer than 50 prompts, or fewer than ten wins or losses.
        If one side is longer in more than 95% of pairs, equal length was not observed, and the
        value is NaN.
    Trap: AlpacaEval's leaderboard also has the difficulty of its instructions and two gamed
        baselines, and may be 13 points from here.
    """
    judged = [place for place, win in enumerate(wins) if win is not None]
    owners = np.arange(len(wins)) if prompts is None else group_indices(prompts)
    rows = _Rows(
        np.array([wins[place] for place in judged], dtype=np.float64),
        np.subtract(baseline_lengths, lengths, dtype=np.float64)[judged],
        np.unique(owners[judged], return_inverse=True)[1],
    )
    count = len(judged)
    number = int(rows.prompts.max()) + 1
    across = min((rows.differences >= 0).mean(), (rows.differences <= 0).mean())
    if across < FEWEST_ACROSS:
        why = f"pairs across lengths: one side is the longer one in {1 - across:.0%} of {count:,}"
        return without_interval(math.nan, count, why)
    coefficients = _controlled(rows, np.ones(number))
    rate = float(sigmoid(coefficients[1]))
    if number < FEWEST_PROMPTS:
        return without_interval(rate, count, f"prompts: {number}, and {FEWEST_PROMPTS} are needed")
    won = rows.wins.sum()
    rarer = min(won, count - won) * number / count
    if rarer < FEWEST_LOST:
        why = f"wins or losses: {rarer:.0f}, and {FEWEST_LOST} are needed"
        return without_interval(rate, count, why)
    return Estimate(rate, *_interval(rows, coefficients), count)


def answers_at_equal_length(
    answers: Sequence[tuple[str, Score]],
    baseline: Sequence[tuple[str, Score]],
    prompts: Groups,
) -> Estimate:
    """The same of answers that were scored one by one: the higher score wins."""
    scores = [(a.value, b.value) for (_, a), (_, b) in zip(answers, baseline, strict=True)]
    wins = [None if a is None or b is None else (a > b) + (a == b) / 2 for a, b in scores]
    lengths, others = ([len(text) for text, _ in side] for side in (answers, baseline))
    return length_controlled_win_rate(wins, lengths, others, prompts)


def _controlled(rows: _Rows, draws: Array, start: Array | None = None) -> Array:
    """The coefficients of length and model, with each prompt counted `draws` times."""
    times = draws[rows.prompts]
    mean = np.average(rows.differences, weights=times)
    squares = times @ (rows.differences - mean) ** 2
    scale = np.sqrt(squares / max(times.sum() - 1, 1))
    features = np.stack([np.tanh(rows.differences / (scale or 1.0)), np.ones(len(times))], axis=1)
    folds = (int(rows.prompts.max()) - rows.prompts) % FOLDS
    return _fit(features, rows.wins, times, folds, start)


def _fit(
    features: Array,
    wins: Array,
    times: Array,
    folds: Indices,
    start: Array | None,
) -> Array:
    """The coefficients on all rows with the C of the least log loss on rows left out."""
    outside = folds != np.arange(FOLDS)[:, None]
    count = len(STRENGTHS)
    strengths = np.concatenate([np.tile(STRENGTHS, FOLDS), STRENGTHS])
    masks = np.concatenate([np.repeat(outside, count, axis=0), np.ones((count, len(wins)))])
    fitted = regressions(features, wins, masks * times, strengths, start)
    predicted = np.clip(sigmoid(fitted[: FOLDS * count] @ features.T), 1e-15, 1 - 1e-15)
    losses = -(wins * np.log(predicted) + (1 - wins) * np.log1p(-predicted))
    inside = np.repeat(~outside, count, axis=0) * times
    means = (losses * inside).sum(1) / np.maximum(inside.sum(1), 1)
    return fitted[FOLDS * count + int(means.reshape(FOLDS, count).mean(0).argmin())]


def regressions(
    features: Array,
    wins: Array,
    weights: Array,
    strengths: Array,
    start: Array | None = None,
) -> Array:
    """Fit many logistic regressions with an L1 penalty on the same rows.

    Equation: the least ``‖w‖₁ + C Σ_i s_i (log(1 + exp(x_i·w)) − y_i x_i·w)``, by Newton steps
        whose quadratic with the penalty is minimised one coefficient at a time.
    Shapes: ``features`` (rows, columns), ``wins`` (rows) in [0, 1], ``weights`` (fits, rows),
        ``strengths`` (fits); the result is (fits, columns).
    """
    outer = (features[:, :, None] * features[:, None, :]).reshape(len(features), -1)
    shape = len(weights), features.shape[1]
    current = np.zeros(shape) if start is None else np.tile(start, (shape[0], 1))

    def objective(values: Array) -> Array:
        scores = values @ features.T
        losses = np.logaddexp(0.0, scores) - wins * scores
        return np.abs(values).sum(1) + strengths * (weights * losses).sum(1)

    value = objective(current)
    for _ in range(100):
        predicted = sigmoid(current @ features.T)
        slope = strengths[:, None] * ((weights * (predicted - wins)) @ features)
        bend = strengths[:, None] * ((weights * predicted * (1 - predicted)) @ outer)
        step = _penalised_step(current, slope, bend.reshape(*shape, shape[1]))
        size, improved = np.ones(shape[0]), objective(current + step)
        for _ in range(30):
            worse = improved > value + 1e-12 * np.abs(value)
            if not worse.any():
                break
            size[worse] /= 2
            improved = objective(current + size[:, None] * step)
        current = current + size[:, None] * step
        settled = np.abs(size[:, None] * step).max() < 1e-8
        value = improved
        if settled:
            break
    return current


def _penalised_step(current: Array, slope: Array, bend: Array) -> Array:
    """The least ``slope·d + ½ d·bend·d + ‖current + d‖₁`` of each fit."""
    step = np.zeros_like(current)
    for _ in range(100):
        moved = 0.0
        for column in range(current.shape[1]):
            curvature = np.maximum(bend[:, column, column], 1e-12)
            rest = slope[:, column] + (bend[:, column] * step).sum(1)
            goal = current[:, column] + step[:, column] - rest / curvature
            shrunk = np.sign(goal) * np.maximum(np.abs(goal) - 1 / curvature, 0.0)
            change = shrunk - current[:, column] - step[:, column]
            step[:, column] += change
            moved = max(moved, float(np.abs(change).max()))
        if moved < 1e-10:
            break
    return step


def _interval(rows: _Rows, coefficients: Array) -> Bounds:
    """Bounds from prompts drawn with replacement, on the logarithm of the odds."""
    generator = np.random.default_rng(0)
    number = int(rows.prompts.max()) + 1
    drawn = generator.integers(number, size=(REPLICATES, number))
    odds = [
        _controlled(rows, np.bincount(prompts, minlength=number).astype(float), coefficients)[1]
        for prompts in drawn
    ]
    reach = student(number - 1, 0.95) * np.std(np.clip(odds, -14.0, 14.0), ddof=1)
    return float(sigmoid(coefficients[1] - reach)), float(sigmoid(coefficients[1] + reach))
