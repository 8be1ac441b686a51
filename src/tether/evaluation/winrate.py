"""Win rates, accuracies and means, each with the interval that says how far to believe it."""

import math
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import stats

MaybeScores = Sequence[float | None]
Groups = Sequence[Hashable]


class Estimate(NamedTuple):
    """A number, its confidence interval, and how many observations it rests on."""

    value: float
    low: float
    high: float
    count: int

    def as_dict(self) -> dict[str, Any]:
        """Give the four fields by name, with None for what JSON cannot hold."""
        return {name: number if math.isfinite(number) else None for name, number in self._asdict().items()}


def wilson_interval(successes: float, total: int, confidence: float = 0.95) -> tuple[float, float]:
    """Compute Wilson's score interval of a proportion, which holds its level near 0 and 1 and on few trials.

    Equation: ``(p̂ + z²/2n ± z √(p̂(1−p̂)/n + z²/4n²)) / (1 + z²/n)`` with ``p̂ = successes / n``.
    Paper: Wilson 1927, https://doi.org/10.1080/01621459.1927.10502953; Brown et al. 2001, https://doi.org/10.1214/ss/1009213286.
    Units: ``successes`` may be fractional (ties count half); the interval is in [0, 1], and is [0, 1] without trials.
    Raises: ``ValueError`` when ``successes`` is not between 0 and ``total``, or ``confidence`` not inside (0, 1).
    Trap: it takes trials to be independent; several comparisons of one prompt are not (use groups).
    """
    if not 0 <= successes <= total:
        raise ValueError(f"successes must lie between 0 and total, got {successes} of {total}")
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must lie between 0 and 1, got {confidence}")
    if total == 0:
        return 0.0, 1.0
    z = float(stats.norm.ppf(0.5 + confidence / 2))
    share = successes / total
    centre = share + z * z / (2 * total)
    spread = z * math.sqrt(share * (1 - share) / total + z * z / (4 * total * total))
    scale = 1 + z * z / total
    # At 0 and n the formula gives the bound exactly, but rounding can push it past the edge.
    low = 0.0 if successes == 0 else max(0.0, (centre - spread) / scale)
    high = 1.0 if successes == total else min(1.0, (centre + spread) / scale)
    return low, high


def win_rate(
    first_scores: MaybeScores,
    second_scores: MaybeScores,
    *,
    groups: Groups | None = None,
    confidence: float = 0.95,
    num_resamples: int = 2000,
    seed: int = 0,
) -> Estimate:
    """Estimate the share of comparisons that the first side wins.

    Equation: ``mean([s_1 > s_2] + ½ [s_1 = s_2])``. The interval is Wilson's when every comparison has a prompt of its own,
    and otherwise a percentile bootstrap that resamples whole groups.
    Paper: Efron 1979, https://doi.org/10.1214/aos/1176344552; clusters: Field and Welsh 2007,
    https://doi.org/10.1111/j.1467-9868.2007.00593.x.
    Shapes: scores of one length, ``groups`` (which prompt) likewise if given. A pair with a None, a score that failed, is
    dropped whole; ``count`` says how many pairs remain.
    Raises: ``ValueError`` when lengths differ, a score is NaN, or no pair remains.
    Trap: several samples of a prompt are one draw of a prompt; without ``groups`` the interval is far too narrow. Where all
    groups agree, or only one exists, resampling sees no spread, and Wilson's interval over the *groups* is given instead.
    """
    first, second, groups = _paired(first_scores, second_scores, groups)
    return _rate(_wins(first, second), groups, confidence, num_resamples, seed)


def pairwise_accuracy(
    chosen_scores: MaybeScores,
    rejected_scores: MaybeScores,
    groups: Groups | None = None,
    *,
    confidence: float = 0.95,
    num_resamples: int = 2000,
    seed: int = 0,
) -> Estimate:
    """Estimate how often a reward model scores the chosen answer above the rejected one.

    Equation: ``mean([r_chosen > r_rejected] + ½ [r_chosen = r_rejected])``; the interval as for `win_rate`.
    Paper: Stiennon et al. 2020, https://arxiv.org/abs/2009.01325; RewardBench, https://arxiv.org/abs/2403.13787.
    Shapes, raises: as for `win_rate`.
    Trap: an exact tie is half right, else a model that gives every answer the same score would be all wrong, or all right.
    """
    return win_rate(chosen_scores, rejected_scores, groups=groups, confidence=confidence, num_resamples=num_resamples, seed=seed)


def bootstrap_mean(
    values: MaybeScores,
    groups: Groups | None = None,
    *,
    confidence: float = 0.95,
    num_resamples: int = 2000,
    seed: int = 0,
) -> Estimate:
    """Estimate a mean with a percentile bootstrap interval that resamples whole groups.

    Equation: ``x̄ = Σ x_i / n``; each resample draws G groups with replacement and takes ``Σ sums / Σ counts``.
    Paper: Efron 1979, https://doi.org/10.1214/aos/1176344552; clusters: Field and Welsh 2007,
    https://doi.org/10.1111/j.1467-9868.2007.00593.x.
    Shapes: values of one length with ``groups`` if given, else each value is its own group; the unit is that of the values. A
    None is dropped.
    Raises: ``ValueError`` when lengths differ, a value is NaN, or none remains.
    Trap: with one group nothing is known about other groups, and the interval is (−inf, inf), not a point; under some twenty
    groups it is too narrow.
    """
    kept, _, groups = _paired(values, values, groups)
    sums, counts = _by_group(kept, groups)
    value = float(kept.mean())
    if len(sums) == 1:
        return Estimate(value, -math.inf, math.inf, len(kept))
    return Estimate(value, *_bootstrap_interval(sums, counts, confidence, num_resamples, seed), len(kept))


def correlation(x: MaybeScores, y: MaybeScores) -> dict[str, float]:
    """Compute the linear and the rank correlation of two lists of numbers.

    Equation: ``pearson = cov(x, y) / (σ_x σ_y)``; ``spearman`` is the same on ranks, ties getting their mean rank.
    Paper: Spearman 1904, https://doi.org/10.2307/1412159.
    Shapes: two lists of one length; a pair with a None is dropped; both results lie in [−1, 1] and have no unit.
    Raises: ``ValueError`` when lengths differ, a number is NaN, or fewer than two pairs remain.
    Trap: where one list is constant neither is defined, and both are NaN, not 0.
    """
    kept_x, kept_y, _ = _paired(x, y, None)
    if len(kept_x) < 2:
        raise ValueError(f"a correlation needs at least two pairs, got {len(kept_x)}")
    if np.ptp(kept_x) == 0 or np.ptp(kept_y) == 0:
        return {"pearson": math.nan, "spearman": math.nan}
    pearson, spearman = stats.pearsonr(kept_x, kept_y), stats.spearmanr(kept_x, kept_y)
    return {"pearson": float(pearson.statistic), "spearman": float(spearman.statistic)}  # type: ignore[attr-defined]


def _paired(
    first: MaybeScores, second: MaybeScores, groups: Groups | None
) -> tuple[NDArray[np.float64], NDArray[np.float64], Groups | None]:
    """Drop pairs with a None and refuse NaN, which would silently lose every comparison."""
    if len(first) != len(second) or (groups is not None and len(groups) != len(first)):
        lengths = f"{len(first)} and {len(second)}" + ("" if groups is None else f" in {len(groups)} groups")
        raise ValueError(f"expected lists of one length, got {lengths}")
    kept = [index for index, (a, b) in enumerate(zip(first, second, strict=True)) if a is not None and b is not None]
    if not kept:
        raise ValueError("nothing to estimate: no observation is left after dropping those that failed (None)")
    first_kept, second_kept = (np.array([scores[index] for index in kept], dtype=np.float64) for scores in (first, second))
    if np.isnan(first_kept).any() or np.isnan(second_kept).any():
        raise ValueError("NaN among the scores; a score that failed is None")
    return first_kept, second_kept, None if groups is None else [groups[index] for index in kept]


def _wins(first: NDArray[np.float64], second: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.where(first == second, 0.5, first > second)


def _by_group(values: NDArray[np.float64], groups: Groups | None) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Sum and count the values of each group, in the order in which groups first appear."""
    if groups is None:
        return values, np.ones(len(values))
    numbers: dict[Hashable, int] = {}
    indices = [numbers.setdefault(group, len(numbers)) for group in groups]
    return np.bincount(indices, weights=values).astype(np.float64), np.bincount(indices).astype(np.float64)


def _rate(wins: NDArray[np.float64], groups: Groups | None, confidence: float, num_resamples: int, seed: int) -> Estimate:
    value = float(wins.mean())
    sums, counts = _by_group(wins, groups)
    means = sums / counts
    if counts.max() == 1 or np.ptp(means) == 0:
        return Estimate(value, *wilson_interval(value * len(sums), len(sums), confidence), len(wins))
    return Estimate(value, *_bootstrap_interval(sums, counts, confidence, num_resamples, seed), len(wins))


def _bootstrap_interval(
    sums: NDArray[np.float64], counts: NDArray[np.float64], confidence: float, num_resamples: int, seed: int
) -> tuple[float, float]:
    generator = np.random.default_rng(seed)
    # Bounded memory: a hundred thousand groups would otherwise want gigabytes of indices.
    rows = max(1, 1_000_000 // len(sums))
    means = []
    for start in range(0, num_resamples, rows):
        drawn = generator.integers(len(sums), size=(min(rows, num_resamples - start), len(sums)))
        means.append(sums[drawn].sum(1) / counts[drawn].sum(1))
    low, high = np.quantile(np.concatenate(means), [0.5 - confidence / 2, 0.5 + confidence / 2])
    return float(low), float(high)
