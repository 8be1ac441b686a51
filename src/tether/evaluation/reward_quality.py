"""How far a reward model can be believed: accuracy overall and by slice, calibration, what length and format explain."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize_scalar

from tether.core.errors import DataError
from tether.core.types import Comparison, Conversation
from tether.data.sources import group_of
from tether.evaluation.calibration import expected_calibration_error, reliability_curve
from tether.evaluation.winrate import correlation, pairwise_accuracy

FEWEST = 10
"""Pairs of a slice that is told."""
SIMILAR = 1.2
"""Lengths are alike up to this factor."""
MARKS = re.compile(r"^\s*(?:[-*•]|\d+[.)])\s|\*\*|^#+\s|```", re.MULTILINE)
Name = Callable[[Comparison], str]


def words(conversation: Conversation) -> int:
    return sum(len(turn.content.split()) for turn in conversation)


def marks(conversation: Conversation) -> int:
    """Marks of format: list items, bold, headings, fences."""
    return sum(len(MARKS.findall(turn.content)) for turn in conversation)


def length_slice(comparison: Comparison) -> str:
    chosen, rejected = words(comparison.chosen), words(comparison.rejected)
    if max(chosen, rejected) <= SIMILAR * min(chosen, rejected):
        return "alike"
    return "chosen longer" if chosen > rejected else "chosen shorter"


def votes_slice(comparison: Comparison) -> str:
    """Whether all annotators said the same, where several did."""
    leans = {(a.preference > 0) - (a.preference < 0) for a in comparison.annotations}
    return "" if len(comparison.annotations) < 2 else "unanimous" if len(leans) == 1 else "divided"


def source_slice(comparison: Comparison) -> str:
    """A data set's own name for the part that a row is of, as RewardBench's `subset`."""
    found = next((comparison.metadata[key] for key in ("subset", "source", "category") if key in comparison.metadata), "")
    return str(found)


def judge_rewards(
    comparisons: Sequence[Comparison], chosen: Sequence[float | None], rejected: Sequence[float | None]
) -> dict[str, Any]:
    """Everything below, of pairs with a direction; ties and failed scores are counted and left out.

    The likelier side of a label is the better one, whatever the row calls it, and a label of 1/2 is a tie. Beyond that a label
    counts as certain: of soft ones no model can have all, and a calibrated model seems to be too little sure.

    Args:
        chosen, rejected: the model's scores of both sides, None where scoring failed.

    Raises:
        DataError: no pair is left.
    """
    directed = [
        (comparison, c, r) if comparison.probability > 0.5 else (comparison.swap(), r, c)
        for comparison, c, r in zip(comparisons, chosen, rejected, strict=True)
        if not comparison.tie and comparison.probability != 0.5
    ]
    rows = [row for row in directed if None not in row[1:]]
    if not rows:
        raise DataError(f"no pair of {len(comparisons)} has a direction and two scores. Give pairs that are not all ties.")
    pairs, above, below = (list(column) for column in zip(*rows, strict=True))
    groups = [group_of(pair) for pair in pairs]
    difference = np.array(above) - np.array(below)
    longer = [float(words(p.chosen)) for p in pairs], [float(words(p.rejected)) for p in pairs]
    marked = [float(marks(p.chosen)) for p in pairs], [float(marks(p.rejected)) for p in pairs]
    return {
        "num_pairs": len(pairs),
        "num_ties": len(comparisons) - len(directed),
        "num_failed": len(directed) - len(rows),
        "accuracy": pairwise_accuracy(above, below, groups).as_dict(),
        "length_only": pairwise_accuracy(*longer, groups).as_dict(),
        "slices": slices(pairs, above, below, groups),
        **calibration(difference, groups),
        "difference_with_length": _correlated(difference, np.array(longer[0]) - longer[1]),
        "difference_with_marks": _correlated(difference, np.array(marked[0]) - marked[1]),
        "annotators": annotators(pairs, difference),
    }


def slices(
    pairs: Sequence[Comparison], above: Sequence[float], below: Sequence[float], groups: Sequence[str]
) -> list[dict[str, Any]]:
    """Accuracy within slices of at least ten pairs: by length, by the source's own parts, by margin, by the annotators' votes."""
    margins = sorted(abs(p.margin) for p in pairs if p.margin is not None)
    edges = [margins[len(margins) * k // 3] for k in (1, 2)] if margins and margins[0] < margins[-1] else []

    def margin_slice(pair: Comparison) -> str:
        if pair.margin is None or not edges:
            return ""
        return ("small", "middle", "large")[sum(abs(pair.margin) >= edge for edge in edges)]

    kinds: dict[str, Name] = {"length": length_slice, "source": source_slice, "margin": margin_slice, "votes": votes_slice}
    found = []
    for kind, name_of in kinds.items():
        members: dict[str, list[int]] = {}
        for index, pair in enumerate(pairs):
            if name := name_of(pair):
                members.setdefault(name, []).append(index)
        for name, rows in members.items():
            if len(rows) >= FEWEST and len(members) > 1:
                scores = [above[i] for i in rows], [below[i] for i in rows]
                accuracy = pairwise_accuracy(*scores, [groups[i] for i in rows]).as_dict()
                found.append({"kind": kind, "name": name, "accuracy": accuracy})
    return found


def calibration(difference: NDArray[np.float64], groups: Sequence[str]) -> dict[str, Any]:
    """Calibration of sigma(difference), and what one temperature mends of it.

    The temperature that is told is fitted on all pairs; the error after it is measured on prompts that it was not fitted on
    (two halves, each with the other's temperature). Guo et al. 2017, https://arxiv.org/abs/1706.04599.
    """
    places = {group: place for place, group in enumerate(dict.fromkeys(groups))}
    half = np.array([places[group] % 2 for group in groups])
    halves = [difference[half == side] for side in (0, 1)]
    cooled = difference / fit_temperature(difference)
    if all(len(part) for part in halves):
        cooled = np.where(half == 0, difference / fit_temperature(halves[1]), difference / fit_temperature(halves[0]))
    probability, after = _sigmoid(difference), _sigmoid(cooled)
    return {
        "calibration_error": expected_calibration_error(probability),
        "reliability": reliability_curve(probability),
        "temperature": fit_temperature(difference),
        "calibration_error_after": expected_calibration_error(after),
        "loss": _loss(difference),
        "loss_after": _loss(cooled),
    }


def fit_temperature(difference: NDArray[np.float64]) -> float:
    """Find the T for which sigma(difference / T) explains the choices best: the smallest mean of log(1 + exp(-d/T)).

    Where every pair is right the loss falls for ever as T falls, and where most are wrong it is best to know nothing: T ends at
    its bounds, 1e-3 and 1e3.
    """
    found = minimize_scalar(
        lambda log_t: _loss(difference / math.exp(log_t)), bounds=(math.log(1e-3), math.log(1e3)), method="bounded"
    )
    return math.exp(float(found.x))


def annotators(pairs: Sequence[Comparison], difference: NDArray[np.float64]) -> dict[str, Any] | None:
    """How often two annotators of a pair agree on its direction, how often the model does with one; None without several."""
    among, with_model = [], []
    for pair, lead in zip(pairs, difference, strict=True):
        leans = [math.copysign(1.0, a.preference) for a in pair.annotations if a.preference]
        if len(leans) > 1:
            among += [first == second for first, second in combinations(leans, 2)]
            with_model += [(lead > 0) == (lean > 0) if lead else 0.5 for lean in leans]
    if not among:
        return None
    return {"agree": float(np.mean(among)), "model_agrees": float(np.mean(with_model)), "count": len(among)}


def _correlated(x: NDArray[np.float64], y: NDArray[np.float64]) -> dict[str, float]:
    """Of a single pair nothing can be said."""
    return correlation(x.tolist(), y.tolist()) if len(x) > 1 else {"pearson": math.nan, "spearman": math.nan}


def _sigmoid(difference: NDArray[np.float64]) -> NDArray[np.float64]:
    return 0.5 * (1.0 + np.tanh(difference / 2.0))


def _loss(difference: NDArray[np.float64]) -> float:
    return float(np.logaddexp(0.0, -difference).mean())
