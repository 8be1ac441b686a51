"""Win rate at equal length: the share of comparisons a model would win if its answers were as long
as the baseline's.

The model of AlpacaEval: a logistic regression of the judge's preference on the difference in
length, read at difference 0.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tether.core.errors import DataError
from tether.evaluation.winrate import MaybeScores, mean_estimate
from tether.stats import Array, Estimate, group_indices, without_interval

STRENGTHS = np.logspace(-4, 4, 10)
"""Candidates for C, the inverse strength of the L1 penalty."""
FOLDS = 5
GAMED_WEIGHT = 0.2
"""Weight of all gamed rows of one pair; two gamed baselines share it."""
FEWEST_PROMPTS = 50
FEWEST_LOST = 10
"""Prompts worth of the rarer outcome: the logarithm of the odds is not near normal below."""
FEWEST_ACROSS = 0.05
"""Share of pairs in which the usually longer side is the shorter one, or equally long."""
REPLICATES = 200


class GamedRows(NamedTuple):
    """Verdicts on a baseline with the instruction to be short or long, against the plain baseline.

    They hold the coefficients of length and difficulty near what gaming alone does.
    `differences` are in standard deviations already; all have one entry a row.
    """

    wins: Sequence[float]
    differences: Sequence[float]
    difficulty: Sequence[float]


class LengthControlled(NamedTuple):
    """The share of wins as judged, and the share at equal length.

    `coefficients` belong to tanh of the difference (positive: the shorter model wins more), to
    difficulty where given, and to the model; `strength` is C.
    """

    raw: Estimate
    controlled: Estimate
    coefficients: dict[str, float]
    strength: float


class _Rows(NamedTuple):
    """Pairs as the regression reads them; `own` marks those that are not gamed."""

    wins: Array
    differences: Array
    difficulty: Array | None
    own: NDArray[np.bool_]
    prompts: NDArray[np.intp]


class _Fitted(NamedTuple):
    """The share at equal length, the coefficients, and C."""

    rate: float
    coefficients: Array
    strength: float


def length_controlled_win_rate(
    wins: MaybeScores,
    lengths: Sequence[int],
    baseline_lengths: Sequence[int],
    *,
    prompts: Sequence[Hashable] | None = None,
    difficulty: Sequence[float] | None = None,
    gamed: GamedRows | None = None,
    confidence: float = 0.95,
    seed: int = 0,
) -> LengthControlled:
    """Estimate the share of comparisons that a model wins at equal length.

    Equation: ``logit P(win) = a tanh(Δ / σ_Δ) + b d + c`` with Δ the baseline's length less the
        model's and d the instruction's difficulty, if given; the mean of P at Δ = 0. An L1 penalty
        of strength 1/C holds all coefficients; C has the least log loss over five folds.
    Paper: Dubois et al. 2024, https://arxiv.org/abs/2404.04475.
    Shapes: one entry a pair. ``wins`` lie in [0, 1] (½: a draw); a None, a verdict that failed, is
        left out of the regression. Lengths are characters.
    Interval: a bootstrap over prompts that repeats everything, choice of C included; normal on the
        logarithm of the odds. Too few: fewer than 50 prompts, or fewer than ten wins or losses.
    Raises: ``DataError`` when lengths hardly overlap: then equal length is not observed. ``ValueError``
        when lists differ in length.
    Trap: without difficulty and gamed rows the number is not that of AlpacaEval's leaderboard, and
        may be 13 points from there. The published standard error leaves the fit's own error out.
    """
    rows = _rows(wins, lengths, baseline_lengths, prompts, difficulty)
    raw = mean_estimate(wins, prompts, confidence=confidence)
    _check_overlap(rows)
    rows = rows if gamed is None else _with_gamed(rows, gamed)
    ones = np.ones(int(rows.prompts.max()) + 1)
    fitted = _controlled(rows, ones)
    rate = fitted.rate
    names = ["length", *(["difficulty"] if difficulty is not None else []), "model"]
    number = len(np.unique(rows.prompts[rows.own]))
    judged = rows.wins[rows.own & ~np.isnan(rows.wins)]
    rarer = min(judged.sum(), len(judged) - judged.sum()) * number / len(judged)
    if number < FEWEST_PROMPTS:
        estimate = without_interval(
            rate,
            len(judged),
            f"prompts: {number}, and {FEWEST_PROMPTS} are needed",
        )
    elif rarer < FEWEST_LOST:
        estimate = without_interval(
            rate,
            len(judged),
            f"wins or losses: {rarer:.0f}, and {FEWEST_LOST} are needed",
        )
    else:
        low, high = _interval(rows, rate, confidence, seed)
        estimate = Estimate(rate, low, high, len(judged))
    values = dict(zip(names, fitted.coefficients.tolist(), strict=True))
    return LengthControlled(raw, estimate, values, fitted.strength)


def _rows(
    wins: MaybeScores,
    lengths: Sequence[int],
    baseline_lengths: Sequence[int],
    prompts: Sequence[Hashable] | None,
    difficulty: Sequence[float] | None,
) -> _Rows:
    given = [wins, lengths, baseline_lengths, prompts, difficulty]
    counts = [len(column) for column in given if column is not None]
    if len(set(counts)) > 1:
        raise ValueError(f"expected lists of one length, got {', '.join(map(str, counts))}")
    judged = np.array([np.nan if win is None else win for win in wins], dtype=np.float64)
    differences = np.subtract(baseline_lengths, lengths, dtype=np.float64)
    if np.nanmin(judged) < 0 or np.nanmax(judged) > 1:
        raise ValueError("wins lie between 0 and 1")
    numbers = np.arange(len(wins)) if prompts is None else group_indices(prompts)
    return _Rows(
        judged,
        differences,
        None if difficulty is None else np.asarray(difficulty, dtype=np.float64),
        np.ones(len(wins), dtype=np.bool_),
        numbers,
    )


def _check_overlap(rows: _Rows) -> None:
    """Refuse pairs in which one side is nearly always the longer one."""
    shorter, longer = float((rows.differences >= 0).mean()), float((rows.differences <= 0).mean())
    if min(shorter, longer) < FEWEST_ACROSS:
        side = "longer" if shorter < longer else "shorter"
        raise DataError(
            f"the model's answer is {side} than the baseline's in {max(shorter, longer):.0%} of "
            f"{len(rows.wins):,} pairs. Lengths hardly overlap, so a win rate at equal length "
            "cannot be estimated. Compare with a baseline of similar length",
        )


def _with_gamed(rows: _Rows, gamed: GamedRows) -> _Rows:
    """Gamed rows first, as AlpacaEval has them: the folds depend on the order."""
    number = len(gamed.wins)
    scale = float(rows.differences.std(ddof=1))
    difficulty = None
    if rows.difficulty is not None:
        difficulty = np.concatenate([np.asarray(gamed.difficulty, float), rows.difficulty])
    return _Rows(
        np.concatenate([np.asarray(gamed.wins, float), rows.wins]),
        np.concatenate([np.asarray(gamed.differences, float) * scale, rows.differences]),
        difficulty,
        np.concatenate([np.zeros(number, dtype=np.bool_), rows.own]),
        np.concatenate([np.arange(number), number + rows.prompts]),
    )


def _controlled(rows: _Rows, draws: Array, start: Array | None = None) -> _Fitted:
    """The regression with each prompt counted `draws` times."""
    times = draws[rows.prompts]
    mean = np.average(rows.differences[rows.own], weights=times[rows.own])
    squares = times[rows.own] @ (rows.differences[rows.own] - mean) ** 2
    scale = np.sqrt(squares / max(times[rows.own].sum() - 1, 1))
    columns = [np.tanh(rows.differences / (scale or 1.0)), rows.own.astype(np.float64)]
    if rows.difficulty is not None:
        columns.insert(1, rows.difficulty)
    features, judged = np.stack(columns, axis=1), ~np.isnan(rows.wins)
    weights = np.where(rows.own, 1.0, GAMED_WEIGHT / 2)
    prompts = np.unique(rows.prompts[judged], return_inverse=True)[1]
    folds = (int(prompts.max()) - prompts) % FOLDS
    strength, coefficients = _fit(
        features[judged],
        rows.wins[judged],
        times[judged],
        weights[judged],
        folds,
        start,
    )
    level = features[rows.own].copy()
    level[:, 0] = 0.0
    rate = np.average(_sigmoid(level @ coefficients), weights=times[rows.own])
    return _Fitted(float(rate), coefficients, strength)


def _fit(
    features: Array,
    wins: Array,
    times: Array,
    weights: Array,
    folds: NDArray[np.intp],
    start: Array | None,
) -> tuple[float, Array]:
    """C of the least log loss on rows left out, and the coefficients on all rows."""
    outside = folds != np.arange(FOLDS)[:, None]
    count = len(STRENGTHS)
    strengths = np.concatenate([np.tile(STRENGTHS, FOLDS), STRENGTHS])
    masks = np.concatenate([np.repeat(outside, count, axis=0), np.ones((count, len(wins)))])
    fitted = regressions(features, wins, masks * times * weights, strengths, start)
    predicted = np.clip(_sigmoid(fitted[: FOLDS * count] @ features.T), 1e-15, 1 - 1e-15)
    losses = -(wins * np.log(predicted) + (1 - wins) * np.log1p(-predicted)) * weights
    inside = np.repeat(~outside, count, axis=0) * times
    means = (losses * inside).sum(1) / np.maximum(inside.sum(1), 1)
    best = int(means.reshape(FOLDS, count).mean(0).argmin())
    return float(STRENGTHS[best]), fitted[FOLDS * count + best]


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
        predicted = _sigmoid(current @ features.T)
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


def _interval(rows: _Rows, rate: float, confidence: float, seed: int) -> tuple[float, float]:
    """Bounds from prompts drawn with replacement, on the logarithm of the odds."""
    from scipy.special import expit, logit, stdtrit

    generator, number = np.random.default_rng(seed), int(rows.prompts.max()) + 1
    own = np.unique(rows.prompts[rows.own])
    start = _controlled(rows, np.ones(number)).coefficients
    rates = []
    for _ in range(REPLICATES):
        draws = np.ones(number)
        draws[own] = np.bincount(generator.integers(len(own), size=len(own)), minlength=len(own))
        rates.append(_controlled(rows, draws, start).rate)
    error = float(np.std(logit(np.clip(rates, 1e-6, 1 - 1e-6)), ddof=1))
    reach = float(stdtrit(len(own) - 1, 0.5 + confidence / 2)) * error
    middle = float(logit(min(max(rate, 1e-6), 1 - 1e-6)))
    return float(expit(middle - reach)), float(expit(middle + reach))


def _sigmoid(scores: Array) -> Array:
    return 0.5 * (1.0 + np.tanh(scores / 2.0))
