"""Several reward models' scores of the same responses combined into one, and their
disagreement.

Scores are (members, responses) matrices, each member's on the same scale.
"""

from typing import Literal

from jaxtyping import Float
from torch import Tensor


def combine_members(
    scores: Float[Tensor, "members responses"],
    how: Literal["mean", "worst", "uncertainty"] = "mean",
    *,
    uncertainty_weight: float = 0.1,
) -> Float[Tensor, " responses"]:
    """Combine the members' scores of each response: their mean, their minimum, or the mean less the
    disagreement.

    Equation: ``r̄ = Σ_k r_k / K``; ``min_k r_k`` (worst-case optimisation); ``r̄ − λ Σ_k (r_k −
        r̄)² / K`` (uncertainty-weighted).
    Paper: Coste et al. 2023, https://arxiv.org/abs/2310.02743, eq. 2 to 4; there λ is 0.5 for
        best-of-n and 0.1 for PPO.
    Shapes: (members, responses) -> (responses,); ``uncertainty_weight``, λ, is one over the unit of
        the scores.
    Raises: ``ValueError`` for an unknown ``how``, no members, or a negative λ.
    Trap: the members need one scale (for example each with deviation 1). A member with twice the
    spread decides the minimum. The variance is not linear, so λ has another meaning on another
    scale. A mistake that all members share passes.
    """
    if not len(scores) or uncertainty_weight < 0:
        raise ValueError(
            f"at least one member and a weight from 0, got {len(scores)} members and "
            f"{uncertainty_weight}",
        )
    if how == "worst":
        return scores.amin(0)
    if how == "mean":
        return scores.mean(0)
    if how == "uncertainty":
        return scores.mean(0) - uncertainty_weight * scores.var(0, correction=0)
    raise ValueError(f"how must be 'mean', 'worst' or 'uncertainty', got {how!r}")


def spread_of_members(scores: Float[Tensor, "members responses"]) -> Float[Tensor, " responses"]:
    """Measure how far the members differ about each response.

    Equation: ``√(Σ_k (r_k − r̄)² / K)``.
    Paper: Coste et al. 2023, https://arxiv.org/abs/2310.02743, section 3.
    Shapes: (members, responses) -> (responses,), in the unit of the scores; 0 for a single member.
    Trap: agreement is no proof: members that grew from one trunk on one set of labels share their
        errors, and agree on them.
    """
    return scores.std(0, correction=0)
