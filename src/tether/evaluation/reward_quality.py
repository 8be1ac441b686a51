"""Quality of a reward model: accuracy overall and by slice, calibration, and the share that length
and format explain.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from itertools import combinations

import numpy as np

from tether.core.errors import DataError
from tether.core.types import Comparison, Conversation, Json
from tether.data.sources import group_of
from tether.evaluation.calibration import expected_calibration_error, reliability_curve
from tether.evaluation.winrate import correlation, pairwise_accuracy
from tether.stats import Array, group_indices
from tether.stats.groups import sigmoid

FEWEST = 10
"""Least number of pairs of a reported slice."""
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
    chosen = words(comparison.chosen)
    rejected = words(comparison.rejected)
    if max(chosen, rejected) <= SIMILAR * min(chosen, rejected):
        return "alike"
    return "chosen longer" if chosen > rejected else "chosen shorter"


def votes_slice(comparison: Comparison) -> str:
    """The slice of a pair by its votes: "unanimous", "divided", or empty with fewer than two
    annotators.
    """
    leans = {(a.preference > 0) - (a.preference < 0) for a in comparison.annotations}
    return "" if len(comparison.annotations) < 2 else "unanimous" if len(leans) == 1 else "divided"


def source_slice(comparison: Comparison) -> str:
    """A data set's own name for the part that a row is of, as RewardBench's `subset`."""
    return str(
        next(
            (
                comparison.metadata[key]
                for key in ("subset", "source", "category")
                if key in comparison.metadata
            ),
            "",
        ),
    )


def judge_rewards(
    comparisons: Sequence[Comparison],
    chosen: Sequence[float | None],
    rejected: Sequence[float | None],
) -> Json:
    """Everything below, of pairs with a direction; ties and failed scores are counted and left out.

    The likelier side of a label is the better one, whatever the row calls it, and a label of 1/2 is
    a tie. Every other label counts as certain. So with soft labels no model reaches accuracy 1, and
    a calibrated model looks underconfident.

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
        raise DataError(
            f"no pair of {len(comparisons)} has a direction and two scores. Give "
            "pairs that are not all ties.",
        )
    pairs, above, below = (list(column) for column in zip(*rows, strict=True))
    groups = [group_of(pair) for pair in pairs]
    difference = np.array(above) - np.array(below)
    lengths, formats = (
        np.array([[count(p.chosen), count(p.rejected)] for p in pairs], dtype=np.float64).T
        for count in (words, marks)
    )
    return {
        "num_pairs": len(pairs),
        "num_ties": len(comparisons) - len(directed),
        "num_failed": len(directed) - len(rows),
        "accuracy": pairwise_accuracy(above, below, groups).as_dict(),
        "length_only": pairwise_accuracy(
            lengths[0].tolist(),
            lengths[1].tolist(),
            groups,
        ).as_dict(),
        "slices": slices(pairs, above, below, groups),
        **calibration(difference, groups),
        "difference_with_length": correlation(
            difference.tolist(),
            (lengths[0] - lengths[1]).tolist(),
        ),
        "difference_with_marks": correlation(
            difference.tolist(),
            (formats[0] - formats[1]).tolist(),
        ),
        "annotators": annotators(pairs, difference),
    }


def slices(
    pairs: Sequence[Comparison],
    above: Sequence[float],
    below: Sequence[float],
    groups: Sequence[str],
) -> list[Json]:
    """Accuracy within slices of at least ten pairs: by length, by the source's own parts, by
    margin, by the annotators' votes.
    """
    margins = sorted(abs(p.margin) for p in pairs if p.margin is not None)
    edges = (
        [margins[len(margins) * k // 3] for k in (1, 2)]
        if margins and margins[0] < margins[-1]
        else []
    )

    def margin_slice(pair: Comparison) -> str:
        if pair.margin is None or not edges:
            return ""
        return ("small", "middle", "large")[sum(abs(pair.margin) >= edge for edge in edges)]

    kinds: dict[str, Name] = {
        "length": length_slice,
        "source": source_slice,
        "margin": margin_slice,
        "votes": votes_slice,
    }
    result = []
    for kind, name_of in kinds.items():
        names = list(map(name_of, pairs))
        members = {
            name: [i for i, other in enumerate(names) if other == name]
            for name in dict.fromkeys(names)
            if name
        }
        for name, rows in members.items():
            if len(rows) >= FEWEST and len(members) > 1:
                scores = [above[i] for i in rows], [below[i] for i in rows]
                accuracy = pairwise_accuracy(*scores, [groups[i] for i in rows]).as_dict()
                result.append({"kind": kind, "name": name, "accuracy": accuracy})
    return result


def calibration(difference: Array, groups: Sequence[str]) -> Json:
    """Calibration of sigma(difference), and what one temperature mends of it.

    The reported temperature is fitted on all pairs. The error after it is measured on other
    prompts: two halves, each with the other's temperature. Guo et al. 2017,
    https://arxiv.org/abs/1706.04599.
    """
    half = group_indices(groups) % 2
    temperature = fit_temperature(difference)
    parts = [difference[half == side] for side in (0, 1)]
    cooled = difference / temperature
    if all(map(len, parts)):
        cooled = np.where(
            half == 0,
            difference / fit_temperature(parts[1]),
            difference / fit_temperature(parts[0]),
        )
    probability = sigmoid(difference)
    after = sigmoid(cooled)
    return {
        "calibration_error": expected_calibration_error(probability),
        "reliability": reliability_curve(probability),
        "temperature": temperature,
        "calibration_error_after": expected_calibration_error(after),
        "loss": _loss(difference),
        "loss_after": _loss(cooled),
    }


def fit_temperature(difference: Array) -> float:
    """Find the T for which sigma(difference / T) explains the choices best: the smallest mean of
    log(1 + exp(-d/T)).

    If every pair is right, the loss falls without end as T falls. If most are wrong, the loss falls
    as T grows. T then ends at its bounds, 1e-3 and 1e3.
    """
    from scipy.optimize import minimize_scalar

    bounds = math.log(1e-3), math.log(1e3)
    fit = minimize_scalar(
        lambda log_t: _loss(difference / math.exp(log_t)),
        bounds=bounds,
        method="bounded",
    )
    return math.exp(float(fit.x))


def annotators(pairs: Sequence[Comparison], difference: Array) -> Json | None:
    """Rates of agreement on a pair's direction: of two annotators, and of the model with one. None
    without several annotators.
    """
    among = []
    with_model = []
    for pair, lead in zip(pairs, difference, strict=True):
        leans = [math.copysign(1.0, a.preference) for a in pair.annotations if a.preference]
        if len(leans) > 1:
            among += [first == second for first, second in combinations(leans, 2)]
            with_model += [(lead > 0) == (lean > 0) if lead else 0.5 for lean in leans]
    if not among:
        return None
    return {
        "agree": float(np.mean(among)),
        "model_agrees": float(np.mean(with_model)),
        "count": len(among),
    }


def _loss(difference: Array) -> float:
    return float(np.logaddexp(0.0, -difference).mean())
