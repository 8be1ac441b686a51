"""Accuracy of finding wrong steps: step by step, and as the first error of a solution.

A solution has two lists: the labels of its judged steps, right or wrong, and a model's
probabilities of a right step. A step is called wrong if its probability lies below a threshold. All
reported figures are functions of eight counts, which add up over solutions. Intervals come from
leaving out one problem at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from tether.core.types import Json
from tether.stats import Array, Estimate, group_indices, jackknife, share_interval, without_interval
from tether.stats.groups import FEWEST_EVENTS, Groups

Right = Sequence[bool]
Probabilities = Sequence[float]


class StepCounts(NamedTuple):
    """Counts of one solution, which add up over solutions.

    The first four count steps: called wrong or right, and rightly (`true`) or not. The others count
    solutions: with an error, with their first error called exactly, without an error, without an
    error or a false alarm.
    """

    true_wrong: float = 0.0
    false_wrong: float = 0.0
    true_right: float = 0.0
    false_right: float = 0.0
    erroneous: float = 0.0
    located: float = 0.0
    flawless: float = 0.0
    passed: float = 0.0


TRUE_WRONG, FALSE_WRONG, TRUE_RIGHT, FALSE_RIGHT = range(4)
ERRONEOUS, LOCATED, FLAWLESS, PASSED = range(4, 8)
"""Places of the counts in an array of them."""


def count_calls(right: Right, probabilities: Probabilities, threshold: float) -> StepCounts:
    """Count what a threshold calls wrong in one solution.

    Raises: ``ValueError`` when there is not one probability a step.
    Trap: NaN lies below no threshold, and would pass for right; it is refused.
    """
    if len(right) != len(probabilities) or any(map(math.isnan, probabilities)):
        raise ValueError(
            f"{len(right)} steps need as many probabilities, none of them NaN; got "
            f"{list(probabilities)}",
        )
    return _expected(right, [float(p < threshold) for p in probabilities])


def count_blind(right: Right, rate: float) -> StepCounts:
    """Expect what calling steps wrong at random, each with probability ``rate``, adds for one
    solution: chance, exactly.

    Equation: each step counts as ``rate`` calls; the first error, the k-th step, is found with ``(1
    − rate)^{k−1} rate``, and n right steps pass with ``(1 − rate)^n``.
    """
    return _expected(right, [rate] * len(right))


def _expected(right: Right, called: Sequence[float]) -> StepCounts:
    """Counts where step k is called wrong with probability `called[k]`, independently."""
    wrong = sum(c for r, c in zip(right, called, strict=True) if not r)
    total = sum(called)
    num_right = sum(right)
    first = next((k for k, r in enumerate(right) if not r), None)
    silent = math.prod(1.0 - c for c in called[:first])
    return StepCounts(
        true_wrong=wrong,
        false_wrong=total - wrong,
        true_right=num_right - (total - wrong),
        false_right=len(right) - num_right - wrong,
        erroneous=float(first is not None),
        located=0.0 if first is None else silent * called[first],
        flawless=float(first is None),
        passed=silent if first is None else 0.0,
    )


def _ratio(part: Array, whole: Array, empty: float = math.nan) -> Array:
    return np.divide(part, whole, out=np.full_like(whole, empty), where=whole > 0)


def _f1(hits: Array, false: Array, missed: Array) -> Array:
    return _ratio(2 * hits, 2 * hits + false + missed, 0.0)


def step_f1(counts: Array) -> Array:
    """F1 of the wrong steps, ``2 TP / (2 TP + FP + FN)`` with *wrong* as the positive class; 0
    where none is called rightly.
    """
    return _f1(counts[..., TRUE_WRONG], counts[..., FALSE_WRONG], counts[..., FALSE_RIGHT])


def macro_f1(counts: Array) -> Array:
    """Mean of the F1 of wrong and of right steps: the PRMScore of PRMBench,
    https://arxiv.org/abs/2501.03124.
    """
    return (
        step_f1(counts)
        + _f1(counts[..., TRUE_RIGHT], counts[..., FALSE_RIGHT], counts[..., FALSE_WRONG])
    ) / 2


def accuracy_erroneous(counts: Array) -> Array:
    """Share of the solutions with an error whose first wrong step is the first that is called
    wrong.
    """
    return _ratio(counts[..., LOCATED], counts[..., ERRONEOUS])


def accuracy_flawless(counts: Array) -> Array:
    """Share of the solutions without an error in which nothing is called wrong."""
    return _ratio(counts[..., PASSED], counts[..., FLAWLESS])


def first_error_f1(counts: Array) -> Array:
    """Harmonic mean of the two accuracies: ProcessBench, Zheng et al. 2024,
    https://arxiv.org/abs/2412.06559.
    """
    first = accuracy_erroneous(counts)
    second = accuracy_flawless(counts)
    return np.where(
        np.isnan(first + second),
        math.nan,
        _ratio(2 * first * second, first + second, 0.0),
    )


Metric = Callable[[Array], Array]
FAMILIES: dict[str, tuple[Metric, ...]] = {
    "step": (step_f1, macro_f1),
    "first_error": (first_error_f1, accuracy_erroneous, accuracy_flawless),
}
"""Two questions, which steps are wrong and where it first goes wrong; the first metric of each
chooses its threshold.
"""
_OBSERVATIONS: dict[Metric, tuple[list[int], ...]] = {
    step_f1: ([TRUE_WRONG, FALSE_WRONG, FALSE_RIGHT],),
    macro_f1: ([TRUE_WRONG, FALSE_WRONG, FALSE_RIGHT], [TRUE_RIGHT, FALSE_WRONG, FALSE_RIGHT]),
    first_error_f1: ([ERRONEOUS], [FLAWLESS]),
    accuracy_erroneous: ([ERRONEOUS],),
    accuracy_flawless: ([FLAWLESS],),
}
"""The counts of which a metric is made: steps that are wrong or called so, or solutions; of two
kinds the rarer one limits it.
"""
_LOCATED: dict[Metric, tuple[list[int], ...]] = {
    first_error_f1: ([ERRONEOUS, LOCATED], [FLAWLESS, PASSED]),
    accuracy_erroneous: ([ERRONEOUS, LOCATED],),
    accuracy_flawless: ([FLAWLESS, PASSED],),
}
"""The counts of solutions of one kind, and of those that were judged rightly."""
_COUNTED: dict[Metric, list[int]] = {
    step_f1: [TRUE_WRONG, FALSE_WRONG, TRUE_RIGHT, FALSE_RIGHT],
    macro_f1: [TRUE_WRONG, FALSE_WRONG, TRUE_RIGHT, FALSE_RIGHT],
    accuracy_erroneous: [ERRONEOUS],
    accuracy_flawless: [FLAWLESS],
}
"""The counts that are observations of a metric; `first_error_f1` observes solutions with and
without an error.
"""
_FEWEST_PROBLEMS = 8
"""Problems of equal size that a metric must rest on."""


def step_estimates(
    counts: Sequence[StepCounts],
    groups: Groups,
    metrics: Sequence[Metric],
) -> dict[str, Estimate]:
    """Estimate metrics of many solutions, each with the interval of a share over whole problems
    (`stats.share_interval`).

    Shapes: ``counts`` and ``groups`` (which problem) of one length; all results lie in [0, 1].
    ``count`` is the number of steps or of solutions that a metric looks at.
    Raises: ``ValueError`` when lengths differ or there is nothing.
    Trap: the data have many versions of one problem; by solution the intervals would be far too
    narrow. A metric of a rare outcome depends on the few problems that have it. The bounds are
    infinite in three cases: fewer than eight problems, one problem that decides, or one to four
    problems with the rarer outcome.
    """
    if not counts or len(counts) != len(groups):
        raise ValueError(
            "expected as many groups as solutions, and at least one, got "
            f"{len(groups)} and {len(counts)}",
        )
    sums = np.zeros((len(set(groups)), len(StepCounts._fields)))
    np.add.at(sums, group_indices(groups), np.array(counts, dtype=np.float64))
    return {metric.__name__: _estimate(metric, sums) for metric in metrics}


def _estimate(metric: Metric, sums: Array) -> Estimate:
    """One metric from the counts of each problem, (problems, counts)."""
    total = sums.sum(0)
    value = float(metric(total))
    without = metric(total - sums)
    count = round(float(total[_COUNTED.get(metric, [ERRONEOUS, FLAWLESS])].sum()))
    sizes = [sums[:, columns].sum(1) for columns in _OBSERVATIONS[metric]]
    equal, trials = min(
        (float(size.sum() ** 2 / max((size**2).sum(), 1e-9)), float(size.sum())) for size in sizes
    )
    if equal < _FEWEST_PROBLEMS or math.isnan(value) or np.isnan(without).any():
        return without_interval(value, count, f"problems: {equal:.3g} of equal size bear on it")
    solutions = [sums[:, pair].T for pair in _LOCATED.get(metric, ())]
    rarest = min(
        (np.count_nonzero(part) for whole, right in solutions for part in (right, whole > right)),
        default=0,
    )
    if 0 < rarest < FEWEST_EVENTS:
        return without_interval(
            value,
            count,
            f"problems differ: {rarest:.0f} have the rarer outcome",
        )
    influence = jackknife(without)._replace(equal=equal)
    spread = _spread(metric, total, value)
    return Estimate(
        value,
        *share_interval(value, influence, max(trials, equal), spread=spread),
        count,
    )


def _spread(metric: Metric, total: Array, value: float) -> float:
    """The variance that one observation gives to a metric, in units of p(1 − p); a mean of two
    metrics has half of theirs.

    Equation: of F1 by the delta method, where W steps are wrong and R right: ``(a² TP FN / W + b²
    FP TR / R) n / F(1 − F)`` with ``a = 2 (W + FP) / D²``, ``b = 2 TP / D²``, ``D = 2 TP + FP + FN``
    and ``n = TP + FP + FN``.
    """
    if metric is not step_f1 or not 0 < value < 1:
        return 0.5 if len(_OBSERVATIONS[metric]) == 2 else 1.0
    hits, false, spared, missed = total[:4]
    wrong = hits + missed
    whole = 2 * hits + false + missed
    by_hits = 2 * (wrong + false) / whole**2
    by_false = 2 * hits / whole**2
    variance = by_hits**2 * hits * missed / wrong
    variance += by_false**2 * false * spared / max(false + spared, 1.0)
    return float(variance * (whole - hits) / (value * (1 - value)))


CANDIDATES = 200
"""Thresholds, or rates, that are compared."""


def best_threshold(
    right: Sequence[Right],
    probabilities: Sequence[Probabilities],
    metric: Metric,
) -> float:
    """Choose the threshold with the highest metric, among quantiles of the probabilities.

    Raises: ``ValueError`` when the metric is not defined on these solutions.
    Trap: a threshold that is chosen on the reported solutions flatters the model. Choose it on
    other solutions, and on problems that the model was not trained on: on trained ones its
    probabilities are more extreme.
    """
    values = np.unique([p for row in probabilities for p in row])
    between = (values[1:] + values[:-1]) / 2
    if len(between) > CANDIDATES:
        between = np.quantile(between, np.linspace(0, 1, CANDIDATES))
    # Below all of them nothing is called wrong, above all everything is.
    candidates = [
        float(values[0]),
        *map(float, between),
        math.nextafter(float(values[-1]), math.inf),
    ]
    return _best(
        candidates,
        lambda c: [count_calls(r, p, c) for r, p in zip(right, probabilities, strict=True)],
        metric,
    )


def best_rate(right: Sequence[Right], metric: Metric) -> float:
    """Choose the rate of calling steps wrong blindly that has the highest metric: the best that can
    be done without looking.
    """
    candidates = [k / CANDIDATES for k in range(CANDIDATES + 1)]
    return _best(candidates, lambda c: [count_blind(r, c) for r in right], metric)


def _best(
    candidates: Sequence[float],
    counted: Callable[[float], list[StepCounts]],
    metric: Metric,
) -> float:
    scores = [float(metric(np.array(counted(c), dtype=np.float64).sum(0))) for c in candidates]
    if any(map(math.isnan, scores)):
        raise ValueError(f"{metric.__name__} needs solutions with and without an error")
    return candidates[int(np.argmax(scores))]


def compare_with_chance(
    right: Sequence[Right],
    probabilities: Sequence[Probabilities],
    groups: Groups,
    calibration: tuple[Sequence[Right], Sequence[Probabilities]],
) -> dict[str, Json]:
    """Report all metrics with their intervals: of the model at the thresholds that are best on
    ``calibration``, and of chance.

    Shapes: one sequence of judged steps a solution, in ``right`` and ``probabilities`` alike, and
    in both parts of ``calibration``. Returns ``thresholds``, and for ``model``, ``random`` and
    ``blind`` every metric as an `Estimate`'s fields. ``random`` calls as many steps wrong as there
    are. ``blind`` calls as many steps wrong as is best on ``calibration``.
    Raises: ``ValueError`` when lengths differ or there is nothing.
    Trap: the threshold of the first error needs flawless and erroneous solutions in
    ``calibration``. If one kind is missing, the threshold of the steps is used for both questions.
    """
    labels, calibrated = calibration
    mixed = len({all(row) for row in labels}) == 2
    share = 1 - sum(map(sum, labels)) / sum(map(len, labels))
    result: dict[str, Json] = {"thresholds": {}, "model": {}, "random": {}, "blind": {}}
    for family, metrics in FAMILIES.items():
        chooser = metrics[0] if mixed else step_f1
        threshold = best_threshold(labels, calibrated, chooser)
        rate = best_rate(labels, chooser)
        counts = {
            "model": [
                count_calls(row, given, threshold)
                for row, given in zip(right, probabilities, strict=True)
            ],
            "random": [count_blind(row, share) for row in right],
            "blind": [count_blind(row, rate) for row in right],
        }
        result["thresholds"][family] = threshold
        for name, rows in counts.items():
            result[name] |= {
                key: value.as_dict() for key, value in step_estimates(rows, groups, metrics).items()
            }
    return result
