"""Does a probability mean what it says?"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

Numbers = Sequence[float] | NDArray[np.floating]


class ReliabilityBin(NamedTuple):
    """One bin of a reliability curve: predictions in [low, high), their mean, and how often the
    event came true.
    """

    low: float
    high: float
    mean_probability: float
    frequency: float
    count: int


def bin_indices(
    probabilities: ArrayLike,
    num_bins: int = 10,
) -> tuple[NDArray[np.intp], NDArray[np.float64]]:
    """Give the equally wide bin of each probability, and the edges of the bins.

    Trap: ``k / K`` is the float nearest to an edge, as is a literal 0.3. ``linspace`` and ``p * K``
    are not, and misplace predictions on an edge.
    """
    edges = np.arange(num_bins + 1) / num_bins
    places = np.searchsorted(edges, np.asarray(probabilities), side="right") - 1
    return np.minimum(places, num_bins - 1), edges


def reliability_curve(
    probabilities: Numbers,
    outcomes: Numbers | None = None,
    num_bins: int = 10,
) -> list[ReliabilityBin]:
    """Compare predicted probabilities with observed frequencies, in bins of equal width.

    Equation: in bin b, ``p̄_b = mean p_i`` and ``ȳ_b = mean y_i``; bins are ``[k/K, (k+1)/K)``, the
        last one closed.
    Paper: DeGroot and Fienberg 1983, https://doi.org/10.2307/2987588; Guo et al. 2017,
        https://arxiv.org/abs/1706.04599.
    Shapes: ``probabilities`` and ``outcomes`` of one length, both in [0, 1]; a soft outcome (half
    for a tie) is allowed. Without ``outcomes`` each probability is that of the *preferred* answer
    of a comparison, and is folded. The prediction becomes ``max(p, 1 − p)``, the outcome 1 if p is
    above ½ and 0 if below. Empty bins are left out.
    Trap: without the fold every outcome would be 1, and any model looks underconfident. At exactly
    ½ the model chose neither answer, so the outcome is ½. An outcome of 0 or 1 would add an error
    of ½ to a perfect "I don't know".
    """
    predicted = np.asarray(probabilities, dtype=np.float64)
    observed = outcomes
    if observed is None:
        observed = np.where(predicted == 0.5, 0.5, predicted > 0.5)
        predicted = np.maximum(predicted, 1.0 - predicted)
    indices, edges = bin_indices(predicted, num_bins)
    curve = []
    for index in np.unique(indices):
        inside = indices == index
        means = float(predicted[inside].mean()), float(np.asarray(observed)[inside].mean())
        curve.append(
            ReliabilityBin(float(edges[index]), float(edges[index + 1]), *means, int(inside.sum())),
        )
    return curve


def expected_calibration_error(
    probabilities: Numbers,
    outcomes: Numbers | None = None,
    num_bins: int = 10,
) -> float:
    """Average the distance between predicted probability and observed frequency over the bins of
    the reliability curve.

    Equation: ``ECE = Σ_b (n_b / n) |p̄_b − ȳ_b|``.
    Paper: Naeini et al. 2015, https://doi.org/10.1609/aaai.v29i1.9602; Guo et al. 2017,
        https://arxiv.org/abs/1706.04599.
    Shapes: as for `reliability_curve`, the form with ``probabilities`` of the preferred answer
        alone included; a probability.
    Trap: biased upwards on few samples (each bin's noise counts as error), so that numbers compare
        at equal n only.
    """
    curve = reliability_curve(probabilities, outcomes, num_bins)
    total = sum(bin_.count for bin_ in curve)
    return sum(bin_.count / total * abs(bin_.mean_probability - bin_.frequency) for bin_ in curve)
