"""Rewards of the steps of a solution: learning them, combining them, and crediting tokens.

Steps are (batch, steps) matrices, padded on the right. `known` is True for a step with a
judgement. All other places may hold anything, NaN included.
"""

from typing import Literal

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor
from torch.nn.functional import log_softmax, logsigmoid, pad

from tether.algorithms.masked import Denominator, check_same_shape

PerStep = Float[Tensor, "batch steps"]
KnownSteps = Bool[Tensor, "batch steps"]


def step_cross_entropy(
    logits: Float[Tensor, "steps *classes"],
    targets: Float[Tensor, "steps *classes"],
    known: Bool[Tensor, " steps"],
    *,
    denominator: Denominator,
) -> Float[Tensor, ""]:
    """Compute the cross-entropy of the judgements of steps, each read from the state at the step's
    last token.

    Equation: ``Σ_known [−q log σ(z) − (1 − q) log σ(−z)] / denominator`` of one logit a step, and
    ``Σ_known −Σ_c q_c log softmax(z)_c / denominator`` of several.
    Paper: Lightman et al. 2023, https://arxiv.org/abs/2305.20050 (right, neutral, wrong); soft
    ``q``, the share of roll-outs from a step that end right: Wang et al. 2024,
    https://arxiv.org/abs/2312.08935.
    Shapes: logits and targets (steps,), or (steps, classes) with targets that sum to 1; known
        (steps,); nats.
    Raises: ``ValueError`` when the shapes differ.
    Trap: the denominator counts known *steps*, of the whole update. A mean over each solution's
    steps, or over a micro-batch, would give steps of short solutions more weight.
    """
    check_same_shape(logits=logits, targets=targets)
    check_same_shape(steps=logits.select(-1, 0) if logits.dim() > 1 else logits, known=known)
    logits = logits[known]
    targets = targets[known]
    if logits.dim() > 1:
        return -(targets * log_softmax(logits, -1)).sum() / denominator
    return (
        -(targets * logsigmoid(logits) + (1.0 - targets) * logsigmoid(-logits)).sum() / denominator
    )


def right_probabilities(logits: Float[Tensor, "steps *classes"]) -> Float[Tensor, " steps"]:
    """Read the probability that each step is not wrong.

    Equation: ``σ(z)`` of one logit; ``1 − softmax(z)_0`` of several, whose first class is *wrong*.
    Paper: Lightman et al. 2023, https://arxiv.org/abs/2305.20050: a neutral step passes.
    Shapes: (steps,) or (steps, classes) -> (steps,).
    Trap: after soft labels this is the chance that a continuation from here ends correctly, not
        that the step is right.
    """
    return torch.sigmoid(logits) if logits.dim() == 1 else 1.0 - torch.softmax(logits, -1)[:, 0]


def aggregate_steps(
    probabilities: PerStep,
    known: KnownSteps,
    how: Literal["min", "product", "last"] = "min",
) -> Float[Tensor, " batch"]:
    """Put the probabilities of a solution's steps together to one score.

    Equation: ``min_k p_k``, ``Π_k p_k``, or ``p`` of the last known step.
    Paper: Lightman et al. 2023, https://arxiv.org/abs/2305.20050 (product and minimum); Wang et al.
    2024, https://arxiv.org/abs/2312.08935 (minimum).
    Shapes: (batch, steps) -> (batch,), in [0, 1]; NaN for a response without a known step.
    Raises: ``ValueError`` when the shapes differ.
    Trap: the product falls with every step: a policy that is trained on it learns to write few and
        long ones.
    """
    check_same_shape(probabilities=probabilities, known=known)
    # A column of ones changes no minimum and no product, and gives a batch without any step
    # something to reduce.
    kept = pad(torch.where(known, probabilities, 1.0), (0, 1), value=1.0)
    known = pad(known, (0, 1))
    last = (known * torch.arange(known.shape[1], device=known.device)).amax(-1, keepdim=True)
    scores = {
        "min": kept.amin(-1),
        "product": kept.prod(-1),
        "last": kept.gather(1, last).squeeze(-1),
    }[how]
    return torch.where(known.any(-1), scores, torch.nan)


def weakest_step(probabilities: PerStep, known: KnownSteps) -> Int64[Tensor, " batch"]:
    """Find the step that is most likely wrong: the first of the least probable ones.

    Equation: ``argmin_k p_k``.
    Shapes: (batch, steps) -> (batch,), −1 for a response without a known step.
    Raises: ``ValueError`` when the shapes differ.
    Trap: every response has a weakest step, the flawless ones too; whether it is wrong is a
        question of its probability.
    """
    check_same_shape(probabilities=probabilities, known=known)
    weakest = pad(torch.where(known, probabilities, torch.inf), (0, 1), value=torch.inf).argmin(-1)
    return torch.where(known.any(-1), weakest, -1)


@torch.no_grad()
def place_step_rewards(
    rewards: PerStep,
    ends: Int64[Tensor, "batch steps"],
    known: KnownSteps,
    mask: Bool[Tensor, "batch time"],
) -> Float[Tensor, "batch time"]:
    """Put each step's reward on the token that ends it, as PPO wants it.

    Equation: ``r_t = Σ_{k: end_k = t} r_k``.
    Paper: Uesato et al. 2022, https://arxiv.org/abs/2211.14275.
    Shapes: rewards, ends (index of a step's last token) and known (batch, steps), mask (batch,
    time) -> (batch, time). The unit is that of the rewards. Masked-out tokens get 0. No gradient
    flows through.
    Raises: ``ValueError`` when the shapes differ.
    Trap: probabilities are never negative, so their sum grows with the number of steps, and a
    policy learns to write many. Subtract the reward of an average step (GRPO does so by itself).
    Or reward the last step alone with the aggregate.
    """
    check_same_shape(rewards=rewards, ends=ends, known=known)
    placed = torch.zeros(mask.shape, dtype=rewards.dtype, device=rewards.device)
    placed.scatter_add_(1, torch.where(known, ends, 0), torch.where(known, rewards, 0.0))
    return torch.where(mask, placed, 0.0)
