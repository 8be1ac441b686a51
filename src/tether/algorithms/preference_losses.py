"""Losses on comparisons and demonstrations: sums over pairs or tokens, divided by a denominator the
caller counted.

The direct methods take a weight for every pair; a label that is only probable is given as both
orders, each with its probability.
"""

from jaxtyping import Bool, Float
from torch import Tensor, exp, expm1, finfo, log1p, sigmoid, where
from torch.nn.functional import logsigmoid

from tether.algorithms.masked import Denominator, Mask, Scalar, Values, check_same_shape, masked_sum

PerPair = Float[Tensor, " pairs"]
PerResponse = Float[Tensor, " responses"]


def bradley_terry_loss(
    chosen_scores: Values,
    rejected_scores: Values,
    *,
    margin: Values | float | None = None,
    probability: Values | None = None,
    denominator: Denominator,
) -> Scalar:
    """Compute the negative log-likelihood of comparisons under Bradley-Terry, with optional margins
    and soft labels.

    Equation: ``Σ [−p log σ(d − m) − (1 − p) log σ(−d − m)] / denominator`` with ``d = r_chosen −
    r_rejected``; ``p`` is 1 and ``m`` is 0 unless given.
    Paper: Stiennon et al. 2020, https://arxiv.org/abs/2009.01325, eq. 1; the margin: Touvron et al.
    2023, https://arxiv.org/abs/2307.09288, eq. 2; soft labels: Lee et al. 2023,
    https://arxiv.org/abs/2309.00267.
    Shapes: (pairs,), all alike; scores and margin in log-odds; ``probability`` in [0, 1] that the
        chosen answer is the better.
    Raises: ``ValueError`` when the shapes differ.
    Trap: the margin is how decisively the *winner* wins, for either winner. It is not signed. The
    loss is the expectation over a winner drawn with ``p``. Exchanging the answers and replacing p
    by 1 − p changes nothing. With p = ½ the loss is least at d = 0. With a margin the scores
    separate beyond the labels, so σ(d) is no longer a calibrated probability.
    """
    check_same_shape(
        chosen_scores=chosen_scores,
        rejected_scores=rejected_scores,
        margin=margin,
        probability=probability,
    )
    difference = chosen_scores - rejected_scores
    shift = 0.0 if margin is None else margin
    losses = -logsigmoid(difference - shift)
    if probability is not None:
        losses = probability * losses - (1.0 - probability) * logsigmoid(-difference - shift)
    return losses.sum() / denominator


def centering_penalty(
    chosen_scores: Values,
    rejected_scores: Values,
    *,
    denominator: Denominator,
) -> Scalar:
    """Penalize a reward model for scores whose sum drifts from zero, a direction Bradley-Terry
    leaves free.

    Equation: ``Σ (r_chosen + r_rejected)² / denominator``.
    Paper: Eisenstein et al. 2023, https://arxiv.org/abs/2312.09244.
    Shapes: (pairs,), alike; scores in log-odds, the penalty in their square.
    Raises: ``ValueError`` when the shapes differ.
    Trap: the penalty centres each pair. So the model can no longer call both answers to a prompt
    good. Keep its coefficient small (0.01).
    """
    check_same_shape(chosen_scores=chosen_scores, rejected_scores=rejected_scores)
    return (chosen_scores + rejected_scores).square().sum() / denominator


def length_disentangling_loss(
    quality: PerResponse,
    of_length: PerResponse,
    lengths: PerResponse,
) -> Scalar:
    """Penalize the correlation of the score of quality with length, and reward that of the score of
    length.

    Equation: ``|ρ(r_Q, n)| − ρ(r_L, n)`` with Pearson's ρ over the responses and n their lengths.
    Paper: ODIN, Chen et al. 2024, https://arxiv.org/abs/2402.07319: the sum r_Q + r_L is trained as
        the reward, only r_Q is kept.
    Shapes: (responses,), all alike; in [−1, 2] without a unit; no gradient flows to ``lengths``.
    Raises: ``ValueError`` when the shapes differ.
    Trap: a correlation belongs to a whole update, not to a sum over micro-batches. With few
    responses it is mostly chance, so use many in an update. Equal scores or equal lengths have the
    correlation 0.
    """
    check_same_shape(quality=quality, of_length=of_length, lengths=lengths)

    def pearson(scores: Tensor) -> Tensor:
        a = scores - scores.mean()
        b = lengths.to(scores) - lengths.to(scores).mean()
        return (a * b).sum() / (a.square().sum() * b.square().sum()).clamp(min=1e-12).sqrt()

    return pearson(quality).abs() - pearson(of_length)


def negative_log_likelihood(logprobs: Values, mask: Mask, *, denominator: Denominator) -> Scalar:
    """Compute the supervised loss on the tokens that count.

    Equation: ``−Σ m · log π / denominator``.
    Paper: Ouyang et al. 2022, https://arxiv.org/abs/2203.02155, section 3.5.
    Shapes: any, alike; nats (per token when the denominator counts tokens).
    Raises: ``ValueError`` when the shapes differ.
    Trap: a denominator taken from one micro-batch gives short answers more weight than long ones.
    """
    return -masked_sum(logprobs, mask) / denominator


def dpo_loss(
    chosen_log_ratios: PerPair,
    rejected_log_ratios: PerPair,
    *,
    beta: float,
    label_smoothing: float = 0.0,
    weights: PerPair | None = None,
    denominator: Denominator,
) -> Scalar:
    """Compute direct preference optimisation's loss, a Bradley-Terry loss whose reward is the
    policy's own log ratio.

    Equation: ``Σ [−(1 − ε) log σ(βh) − ε log σ(−βh)] / denominator`` with ``h = log π/π_ref(chosen)
        − log π/π_ref(rejected)``.
    Paper: Rafailov et al. 2023, https://arxiv.org/abs/2305.18290, eq. 7; ε > 0, labels flipped at
    that rate (cDPO): Mitchell 2023, https://ericmitchell.ai/cdpo.pdf.
    Shapes: (pairs,), log-probabilities summed over each response, nats.
    Raises: ``ValueError`` when the shapes differ, ``beta`` is not positive, or ``label_smoothing``
        is not in [0, ½).
    Trap: with ε = 0 and a pair that every annotator orders alike, h grows without bound whatever β
        is.
    """
    difference = (
        _log_ratio_difference(chosen_log_ratios, rejected_log_ratios, beta, label_smoothing) * beta
    )
    losses = -(1.0 - label_smoothing) * logsigmoid(difference) - label_smoothing * logsigmoid(
        -difference,
    )
    return _total(losses, weights, denominator)


def robust_dpo_loss(
    chosen_log_ratios: PerPair,
    rejected_log_ratios: PerPair,
    *,
    beta: float,
    label_smoothing: float,
    weights: PerPair | None = None,
    denominator: Denominator,
) -> Scalar:
    """Compute the estimate, from labels flipped at a known rate, of the DPO loss that clean labels
    would give.

    Equation: ``Σ [−(1 − ε) log σ(βh) + ε log σ(−βh)] / ((1 − 2ε) denominator)``.
    Paper: Chowdhury et al. 2024, https://arxiv.org/abs/2403.00409, eq. 12.
    Shapes: (pairs,), log-probabilities summed over each response, nats.
    Raises: ``ValueError`` when the shapes differ, ``beta`` is not positive, or ``label_smoothing``
        is not in [0, ½).
    Trap: unbounded below: a confident pair whose label is taken to be flipped pays ever less.
    """
    difference = (
        _log_ratio_difference(chosen_log_ratios, rejected_log_ratios, beta, label_smoothing) * beta
    )
    losses = -(1.0 - label_smoothing) * logsigmoid(difference) + label_smoothing * logsigmoid(
        -difference,
    )
    return _total(losses, weights, denominator) / (1.0 - 2.0 * label_smoothing)


def ipo_loss(
    chosen_log_ratios: PerPair,
    rejected_log_ratios: PerPair,
    *,
    beta: float,
    weights: PerPair | None = None,
    denominator: Denominator,
) -> Scalar:
    """Compute identity preference optimisation's loss: regress the difference of log ratios onto a
    finite margin.

    Equation: ``Σ (h − 1/(2β))² / denominator``.
    Paper: Azar et al. 2023, https://arxiv.org/abs/2310.12036, eq. 17.
    Shapes: (pairs,), nats: summed over each response as in the paper, or averaged over its tokens
        as TRL does.
    Raises: ``ValueError`` when the shapes differ or ``beta`` is not positive.
    Trap: summed and averaged log ratios want very different β: the margin 1/(2β) is in the unit of
        h.
    """
    difference = _log_ratio_difference(chosen_log_ratios, rejected_log_ratios, beta, 0.0)
    return _total((difference - 1.0 / (2.0 * beta)).square(), weights, denominator)


def kto_loss(
    log_ratios: PerResponse,
    desirable: Bool[Tensor, " responses"],
    baseline_kl: Scalar,
    *,
    beta: float,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
    denominator: Denominator,
) -> Scalar:
    """Compute the Kahneman-Tversky loss on single responses that are good or bad by themselves.

    Equation: ``Σ λ_D (1 − σ(β(h − z0))) / denominator`` over the desirable, ``Σ λ_U (1 − σ(β(z0 −
    h))) / denominator`` over the others, with ``h = log π/π_ref(response)`` and ``z0 = max(0,
    baseline_kl)``, detached.
    Paper: Ethayarajh et al. 2024, https://arxiv.org/abs/2402.01306, eq. 7.
    Shapes: (responses,), log-probabilities summed over each response; ``baseline_kl`` the mean log
    ratio of *mismatched* prompts and responses over the whole step, nats.
    Raises: ``ValueError`` when the shapes differ or ``beta`` is not positive.
    Trap: λ_D n_D / λ_U n_U should lie in [1, 4/3]; unbalanced data with equal weights teaches the
        larger class alone.
    """
    check_same_shape(log_ratios=log_ratios, desirable=desirable)
    _check_beta(beta)
    advantage = beta * (log_ratios - baseline_kl.detach().clamp(min=0.0))
    gained = desirable_weight * (1.0 - sigmoid(advantage))
    lost = undesirable_weight * (1.0 - sigmoid(-advantage))
    return where(desirable, gained, lost).sum() / denominator


def orpo_loss(
    chosen_logprobs: PerPair,
    rejected_logprobs: PerPair,
    *,
    weights: PerPair | None = None,
    denominator: Denominator,
) -> Scalar:
    """Compute the odds-ratio term that ORPO adds, with a weight, to the likelihood of the chosen
    responses.

    Equation: ``Σ −log σ(log odds(chosen) − log odds(rejected)) / denominator`` with ``log odds = p̄
    − log(1 − exp p̄)`` of the mean log-probability p̄ of a response's tokens.
    Paper: Hong et al. 2024, https://arxiv.org/abs/2403.07691, eq. 6 and 7.
    Shapes: (pairs,), *mean* log-probabilities, nats a token, below 0.
    Raises: ``ValueError`` when the shapes differ.
    Trap: needs no reference, and so has no tether: the likelihood term beside it is what holds the
        policy.
    """
    check_same_shape(chosen_logprobs=chosen_logprobs, rejected_logprobs=rejected_logprobs)
    log_odds = [p - log1mexp(p) for p in (chosen_logprobs, rejected_logprobs)]
    return _total(-logsigmoid(log_odds[0] - log_odds[1]), weights, denominator)


def simpo_loss(
    chosen_logprobs: PerPair,
    rejected_logprobs: PerPair,
    *,
    beta: float,
    margin: float = 0.0,
    weights: PerPair | None = None,
    denominator: Denominator,
) -> Scalar:
    """Compute simple preference optimisation's loss: the policy's own mean log-probability is the
    reward, with a target margin.

    Equation: ``Σ −log σ(β(p̄_chosen − p̄_rejected) − γ) / denominator``.
    Paper: Meng et al. 2024, https://arxiv.org/abs/2405.14734, eq. 6.
    Shapes: (pairs,), *mean* log-probabilities, nats a token.
    Raises: ``ValueError`` when the shapes differ or ``beta`` is not positive.
    Trap: γ is not multiplied by β here; papers and libraries quote γ/β (0.1 to 0.8) as often as γ.
    """
    check_same_shape(chosen_logprobs=chosen_logprobs, rejected_logprobs=rejected_logprobs)
    _check_beta(beta)
    return _total(
        -logsigmoid(beta * (chosen_logprobs - rejected_logprobs) - margin),
        weights,
        denominator,
    )


def log1mexp(x: Values) -> Values:
    """Compute ``log(1 − exp x)`` for x < 0 without losing digits at either end.

    Equation: ``log(−expm1 x)`` above −log 2, ``log1p(−exp x)`` below.
    Source: Mächler 2012, https://cran.r-project.org/web/packages/Rmpfr/vignettes/log1mexp-note.pdf.
    Shapes: any, kept. Values at 0 are taken as the nearest number below, so that certainty stays
        finite.
    Trap: each branch's gradient is infinite where the other is meant, so both are fed numbers of
        their own side.
    """
    x = x.clamp(max=-finfo(x.dtype).tiny)
    near = x > -0.6931471805599453
    return where(near, (-expm1(where(near, x, -0.5))).log(), log1p(-exp(where(near, -1.0, x))))


def _total(losses: Tensor, weights: Tensor | None, denominator: Denominator) -> Tensor:
    check_same_shape(losses=losses, weights=weights)
    return (losses if weights is None else losses * weights).sum() / denominator


def _log_ratio_difference(
    chosen: Tensor,
    rejected: Tensor,
    beta: float,
    label_smoothing: float,
) -> Tensor:
    check_same_shape(chosen_log_ratios=chosen, rejected_log_ratios=rejected)
    _check_beta(beta)
    if not 0.0 <= label_smoothing < 0.5:
        raise ValueError(
            f"label_smoothing must lie in [0, 0.5), got {label_smoothing}: at 0.5 "
            "labels say nothing",
        )
    return chosen - rejected


def _check_beta(beta: float) -> None:
    if not beta > 0:
        raise ValueError(f"beta must be positive, got {beta}")
