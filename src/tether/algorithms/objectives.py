"""Several objectives as one: weighted sums, and constraints with Lagrange multipliers.

Scores are (objectives, responses) matrices; more is better in each.
"""

import math

from jaxtyping import Float
from torch import Tensor


def weighted(
    scores: Float[Tensor, "objectives responses"],
    weights: Float[Tensor, " objectives"],
) -> Float[Tensor, " responses"]:
    """Add the objectives' scores of each response, each times its weight: linear scalarisation.

    Equation: ``r = Σ_k w_k r_k``.
    Paper: Roijers et al. 2013, https://arxiv.org/abs/1402.0590.
    Shapes: (objectives, responses) and (objectives,) -> (responses,); a weight is one over the unit
        of its objective.
    Raises: ``ValueError`` for another number of weights than of objectives.
    Trap: all weights reach only the convex part of a Pareto front. A balanced point in a concave
    part loses to a neighbour at an extreme. The scale of an objective is part of its weight.
    """
    if len(scores) != len(weights):
        raise ValueError(f"{len(scores)} objectives and {len(weights)} weights")
    return weights @ scores


def lagrangian(
    reward: Float[Tensor, " responses"],
    constrained: Float[Tensor, "constraints responses"],
    multipliers: Float[Tensor, " constraints"],
) -> Float[Tensor, " responses"]:
    """Combine the reward to maximise and the constrained objectives into one reward.

    Equation: ``(r + Σ_k λ_k r_k) / (1 + Σ_k λ_k)``.
    Paper: Safe RLHF, Dai et al. 2023, https://arxiv.org/abs/2310.12773, where ``r_k`` is minus a
        cost and K is 1.
    Shapes: (responses,), (constraints, responses) and (constraints,) -> (responses,); thresholds
    are constants and leave the gradient alone.
    Raises: ``ValueError`` for another number of multipliers than of constraints, or a negative
        multiplier.
    Trap: the division keeps the size of the reward while λ grows, and so the meaning of a KL
    coefficient. But scores of different λ are then not comparable. A rising or falling mean of
    this number has little meaning: look at the objectives.
    """
    if len(constrained) != len(multipliers) or bool((multipliers < 0).any()):
        raise ValueError(
            f"one multiplier from 0 for each of {len(constrained)} constraints, got "
            f"{multipliers.tolist()}",
        )
    return (reward + multipliers @ constrained) / (1 + multipliers.sum())


def dual_update(multiplier: float, violation: float, rate: float) -> float:
    """Raise a constraint's Lagrange multiplier while the constraint is violated, lower it while
    there is room.

    Equation: ``λ ← max(0, λ + η v)``, ``v = threshold − E[r_k]``: projected ascent on the dual.
    Paper: Safe RLHF, Dai et al. 2023, https://arxiv.org/abs/2310.12773, ascends on ln λ instead, by
    ``η λ v``. That never reaches 0, and near 0 it changes λ by η λ² v. So after a long time without
    violation it reacts late. Here λ can be 0, a satisfied constraint changes nothing, and λ grows
    in proportion to the violation.
    Units: ``violation`` in those of the objective; the multiplier then is the sum of past
        violations times ``rate``.
    Raises: ``ValueError`` for a negative multiplier, a rate that is not positive, or a violation
        that is not finite.
    Trap: λ sums violations, so it lags behind the policy. With a large rate, or a violation that is
    also averaged over past steps, both overshoot the threshold. If no policy satisfies the
    constraint, λ grows without end.
    """
    if not (multiplier >= 0 and rate > 0 and math.isfinite(violation)):
        raise ValueError(
            "a multiplier from 0, a rate above 0 and a finite violation, got "
            f"{multiplier}, {rate} and {violation}",
        )
    return max(0.0, multiplier + rate * violation)
