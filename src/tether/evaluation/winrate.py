"""Win rates, accuracies and means, each with the interval that says how far to believe it."""

import math
from collections.abc import Sequence

import numpy as np

from tether.stats import (
    Array,
    Estimate,
    EstimateFields,
    grouped_balance,
    grouped_mean,
    without_interval,
)
from tether.stats.groups import Groups

MaybeScores = Sequence[float | None]


def win_rate(
    first_scores: MaybeScores,
    second_scores: MaybeScores,
    *,
    groups: Groups | None = None,
    confidence: float = 0.95,
) -> Estimate:
    """Estimate the share of comparisons that the first side wins.

    Equation: ``mean([s_1 > s_2] + ½ [s_1 = s_2])``; the interval is that of
        `stats.grouped_balance`.
    Shapes: scores of one length, ``groups`` (which prompt) likewise if given. A pair with a None, a
    score that failed, is dropped whole; ``count`` says how many pairs remain.
    Raises: ``ValueError`` when lengths differ, a score is NaN, or no pair remains.
    Trap: several samples of a prompt are one draw of a prompt; without ``groups`` the interval is
    far too narrow. Of one prompt with several samples nothing is known about others, and the bounds
    are infinite.
    """
    first, second, groups = _paired(first_scores, second_scores, groups)
    return grouped_balance(np.where(first == second, 0.5, first > second), groups, confidence)


def pairwise_accuracy(
    chosen_scores: MaybeScores,
    rejected_scores: MaybeScores,
    groups: Groups | None = None,
    *,
    probabilities: Sequence[float] | None = None,
) -> Estimate:
    """Estimate how often a reward model scores the chosen answer above the rejected one.

    Equation: ``mean([r_chosen > r_rejected] + ½ [r_chosen = r_rejected])``; the interval as for
        `win_rate`.
    Paper: Stiennon et al. 2020, https://arxiv.org/abs/2009.01325; RewardBench,
        https://arxiv.org/abs/2403.13787.
    Shapes, raises: as for `win_rate`; ``probabilities`` are the labels' own, and a pair of ½, which
    has no better side, is left out. Where all are ½ nothing is known: ½ of no pair, without bounds.
    Trap: an exact tie is half right, else a model that gives every answer the same score would be
        all wrong, or all right.
    """
    if probabilities is not None:
        if set(probabilities) <= {0.5}:
            return without_interval(0.5, 0, "pairs: none has a better side")
        chosen_scores = [
            None if p == 0.5 else score
            for p, score in zip(probabilities, chosen_scores, strict=True)
        ]
    return win_rate(chosen_scores, rejected_scores, groups=groups)


def share_in_order(leads: Sequence[float], probabilities: Sequence[float]) -> float:
    """The value of `pairwise_accuracy` alone, of how far each chosen answer is ahead."""
    right = [
        (d > 0) + 0.5 * (d == 0) for d, p in zip(leads, probabilities, strict=True) if p != 0.5
    ]
    return sum(right) / len(right) if right else 0.5


def mean_estimate(
    values: MaybeScores,
    groups: Groups | None = None,
    *,
    confidence: float = 0.95,
) -> Estimate:
    """Estimate a mean of observations that hang together in groups.

    Equation: ``x̄ = Σ x_i / n``, with the interval of `stats.grouped_mean`.
    Shapes: values of one length with ``groups`` if given, else each value is its own group; the
    unit is that of the values. A None is dropped.
    Raises: ``ValueError`` when lengths differ, a value is NaN, or none remains.
    Trap: where groups are too few or all alike, nothing is known about others: the bounds are
        infinite, and ``reason`` says why.
    """
    scores, _, groups = _paired(values, values, groups)
    return grouped_mean(scores, groups, confidence=confidence)


def gain(
    before: MaybeScores,
    after: MaybeScores,
    groups: Groups,
    *,
    confidence: float = 0.95,
) -> Estimate | None:
    """The mean of the paired differences with its interval over prompts; None where nothing was
    scored twice.

    Trap: with only two levels, such as rewards of 0 and 1, all observed differences may rise. The
    interval still allows that differences fall.
    """
    both = [(a, b) for a, b in zip(before, after, strict=True) if a is not None and b is not None]
    if not both:
        return None
    levels = {score for pair in both for score in pair}
    reach = max(levels) - min(levels)
    gains = [None if a is None or b is None else b - a for a, b in zip(before, after, strict=True)]
    differences, _, prompts = _paired(gains, gains, groups)
    return grouped_mean(
        differences,
        prompts,
        bounds=(-reach, reach) if len(levels) == 2 else None,
        confidence=confidence,
    )


def before_and_after(
    before: MaybeScores,
    after: MaybeScores,
    groups: Groups,
) -> dict[str, EstimateFields] | None:
    """The means of both sides, the gain and the win rate of the second, as a summary holds them;
    None as for `gain`.
    """
    if (gained := gain(before, after, groups)) is None:
        return None
    means = {"before": mean_estimate(before, groups), "after": mean_estimate(after, groups)}
    estimates = {**means, "gain": gained, "win_rate": win_rate(after, before, groups=groups)}
    return {name: estimate.as_dict() for name, estimate in estimates.items()}


def correlation(x: MaybeScores, y: MaybeScores) -> dict[str, float]:
    """Compute the linear and the rank correlation of two lists of numbers.

    Equation: ``pearson = cov(x, y) / (σ_x σ_y)``; ``spearman`` is the same on ranks, ties getting
        their mean rank.
    Paper: Spearman 1904, https://doi.org/10.2307/1412159.
    Shapes: two lists of one length; a pair with a None is dropped; both results lie in [−1, 1] and
        have no unit.
    Raises: ``ValueError`` when lengths differ, a number is NaN, or no pair remains.
    Trap: of a single pair, or where one list is constant, neither is defined, and both are NaN, not
        0.
    """
    from scipy.stats import pearsonr, spearmanr

    first, second, _ = _paired(x, y, None)
    if len(first) < 2 or np.ptp(first) == 0 or np.ptp(second) == 0:
        return {"pearson": math.nan, "spearman": math.nan}
    pearson = pearsonr(first, second)
    spearman = spearmanr(first, second)
    return {"pearson": float(pearson.statistic), "spearman": float(spearman.statistic)}  # type: ignore[attr-defined]


def _paired(
    first: MaybeScores,
    second: MaybeScores,
    groups: Groups | None,
) -> tuple[Array, Array, Groups | None]:
    """Drop pairs with a None and refuse NaN, which would silently lose every comparison."""
    if len(first) != len(second) or (groups is not None and len(groups) != len(first)):
        lengths = f"{len(first)} and {len(second)}" + (
            "" if groups is None else f" in {len(groups)} groups"
        )
        raise ValueError(f"expected lists of one length, got {lengths}")
    places = [
        index
        for index, (a, b) in enumerate(zip(first, second, strict=True))
        if a is not None and b is not None
    ]
    if not places:
        raise ValueError(
            "nothing to estimate: no observation is left after dropping those that failed (None)",
        )
    pairs = np.array(
        [[scores[index] for index in places] for scores in (first, second)],
        dtype=np.float64,
    )
    if np.isnan(pairs).any():
        raise ValueError("NaN among the scores; a score that failed is None")
    return pairs[0], pairs[1], None if groups is None else [groups[index] for index in places]
