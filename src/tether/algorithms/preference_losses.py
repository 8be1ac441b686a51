"""Losses on comparisons and demonstrations: sums over pairs or tokens, divided by a denominator the caller counted."""

from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import logsigmoid

from tether.algorithms.masked import Denominator, check_same_shape, masked_sum


def bradley_terry_loss(
    chosen_scores: Float[Tensor, "*shape"],
    rejected_scores: Float[Tensor, "*shape"],
    *,
    margin: Float[Tensor, "*shape"] | float | None = None,
    probability: Float[Tensor, "*shape"] | None = None,
    denominator: Denominator,
) -> Float[Tensor, ""]:
    """Compute the negative log-likelihood of comparisons under Bradley-Terry, with optional margins and soft labels.

    Equation: ``Σ [−p log σ(d − m) − (1 − p) log σ(−d − m)] / denominator`` with ``d = r_chosen − r_rejected``; ``p`` is 1 and
    ``m`` is 0 unless given.
    Paper: Stiennon et al. 2020, https://arxiv.org/abs/2009.01325, eq. 1; the margin: Touvron et al. 2023,
    https://arxiv.org/abs/2307.09288, eq. 2; soft labels: Lee et al. 2023, https://arxiv.org/abs/2309.00267.
    Shapes: (pairs,), all alike; scores and margin in log-odds; ``probability`` in [0, 1] that the chosen answer is the better.
    Raises: ``ValueError`` when the shapes differ.
    Trap: the margin is how decisively the *winner* wins, whichever that is. It is not signed, and the loss is the expectation
    over a winner drawn with ``p``: exchanging the answers and replacing p by 1 − p changes nothing, and p = ½ is least at d = 0.
    With a margin the scores separate beyond the labels, so that σ(d) is no longer a calibrated probability.
    """
    check_same_shape(chosen_scores=chosen_scores, rejected_scores=rejected_scores)
    if isinstance(margin, Tensor):
        check_same_shape(chosen_scores=chosen_scores, margin=margin)
    difference = chosen_scores - rejected_scores
    shift = 0.0 if margin is None else margin
    losses = -logsigmoid(difference - shift)
    if probability is not None:
        check_same_shape(chosen_scores=chosen_scores, probability=probability)
        losses = probability * losses - (1.0 - probability) * logsigmoid(-difference - shift)
    return losses.sum() / denominator


def centering_penalty(
    chosen_scores: Float[Tensor, "*shape"], rejected_scores: Float[Tensor, "*shape"], *, denominator: Denominator
) -> Float[Tensor, ""]:
    """Penalize a reward model for scores whose sum drifts from zero, a direction Bradley-Terry leaves free.

    Equation: ``Σ (r_chosen + r_rejected)² / denominator``.
    Paper: Eisenstein et al. 2023, https://arxiv.org/abs/2312.09244.
    Shapes: (pairs,), alike; scores in log-odds, the penalty in their square.
    Raises: ``ValueError`` when the shapes differ.
    Trap: it centres each pair, and so takes from the model the freedom to say that both answers to a prompt are good; keep its
    coefficient small (0.01).
    """
    check_same_shape(chosen_scores=chosen_scores, rejected_scores=rejected_scores)
    return (chosen_scores + rejected_scores).square().sum() / denominator


def negative_log_likelihood(
    logprobs: Float[Tensor, "*shape"], mask: Bool[Tensor, "*shape"], *, denominator: Denominator
) -> Float[Tensor, ""]:
    """Compute the supervised loss on the tokens that count.

    Equation: ``−Σ m · log π / denominator``.
    Paper: Ouyang et al. 2022, https://arxiv.org/abs/2203.02155, section 3.5.
    Shapes: any, alike; nats (per token when the denominator counts tokens).
    Raises: ``ValueError`` when the shapes differ.
    Trap: a denominator taken from one micro-batch gives short answers more weight than long ones.
    """
    return -masked_sum(logprobs, mask) / denominator
