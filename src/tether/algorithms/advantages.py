"""From rewards and values to advantages."""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int64, Num
from torch import Tensor

from tether.algorithms.masked import check_same_shape

PerToken = Float[Tensor, "batch time"]
TokenMask = Bool[Tensor, "batch time"]
PerResponse = Float[Tensor, " batch"]
Groups = Int64[Tensor, " batch"]
Flags = Bool[Tensor, " batch"]


@torch.no_grad()
def returns_to_go(rewards: PerToken, mask: TokenMask, gamma: float = 1.0) -> PerToken:
    """Sum the discounted rewards from each token to the end of its episode.

    Equation: ``G_t = r_t + γ G_{t+1}``, and 0 after the last real token.
    Paper: Sutton and Barto, Reinforcement Learning, 2nd edition, eq. 3.9,
        http://incompleteideas.net/book/the-book-2nd.html.
    Shapes: rewards and mask (batch, time), the mask a prefix of each row (right padding); the unit
    is that of the reward. Masked-out positions come back 0. No gradient flows through.
    Raises: ``ValueError`` when the shapes differ.
    Trap: γ below 1 discounts by tokens, so that it is a hidden length penalty; language models use
        1.
    """
    check_same_shape(rewards=rewards, mask=mask)
    return _discounted_sums(torch.where(mask, rewards, 0), gamma)


@torch.no_grad()
def gae(
    rewards: PerToken,
    values: PerToken,
    mask: TokenMask,
    gamma: float = 1.0,
    lam: float = 0.95,
) -> tuple[PerToken, PerToken]:
    """Estimate advantages as an exponentially weighted sum of temporal-difference errors, and the
    value targets with them.

    Equation: ``δ_t = r_t + γ V_{t+1} − V_t``, ``A_t = δ_t + γλ A_{t+1}``, ``returns_t = A_t +
    V_t``; the value after the last real token is 0, since the episode ends there.
    Paper: Schulman et al. 2016, https://arxiv.org/abs/1506.02438, eq. 16.
    Shapes: all (batch, time), the mask a prefix of each row (right padding); the unit is that of
    the reward. Masked-out positions come back 0 in both. No gradient flows through.
    Raises: ``ValueError`` when the shapes differ.
    Trap: the returns belong to the advantages *before* whitening; whiten afterwards, and only the
        advantages.
    """
    check_same_shape(rewards=rewards, values=values, mask=mask)
    values = torch.where(mask, values, 0)
    next_values = torch.nn.functional.pad(values[:, 1:], (0, 1)) if values.shape[1] else values
    errors = torch.where(mask, rewards + gamma * next_values - values, 0)
    advantages = _discounted_sums(errors, gamma * lam)
    return advantages, advantages + values


@torch.no_grad()
def leave_one_out_baseline(
    scores: PerResponse,
    groups: Groups,
    known: Flags | None = None,
) -> PerResponse:
    """Average, for each response, the scores of the other responses to its prompt: a baseline that
    leaves the gradient unbiased.

    Equation: ``b_i = 1/(k−1) Σ_{j≠i} s_j`` over the k known scores of i's group. A single score
    is its own baseline, because it cannot be compared.
    Paper: Kool et al. 2019, https://openreview.net/forum?id=r1lgTGL5DE; for language models
    Ahmadian et al. 2024, https://arxiv.org/abs/2402.14740.
    Shapes: scores, groups (any non-negative ids) and known (batch,) -> (batch,); the unit is that
        of the scores.
    Raises: ``ValueError`` when the shapes differ.
    Trap: with the group's plain mean each score is part of its own baseline, which shrinks every
        advantage by (k−1)/k.
    """
    known = _checked(scores, groups, known)
    start, above = _above_start(scores, groups, known)
    counted = known.double()
    others = _group_sums(counted, groups) - counted
    baseline = start + (_group_sums(above, groups) - above) / others.clamp(min=1)
    return torch.where(others > 0, baseline, torch.where(known, scores, 0)).to(scores.dtype)


@torch.no_grad()
def group_relative(
    scores: PerResponse,
    groups: Groups,
    known: Flags | None = None,
    *,
    scale: bool = True,
) -> PerResponse:
    """Compare each response's score with those of its whole group: GRPO's advantage, one number for
    every token of a response.

    Equation: ``A_i = s_i − μ``, with ``scale`` divided by ``σ + 1e-4``. μ and σ are the mean and
    the standard deviation (k − 1 degrees of freedom) of the k known scores of i's group. An unknown
    score has the advantage 0.
    Paper: Shao et al. 2024, https://arxiv.org/abs/2402.03300, section 4.1; without ``scale`` Dr.
    GRPO, Liu et al. 2025, https://arxiv.org/abs/2503.20783.
    Shapes: scores, groups (any non-negative ids) and known (batch,) -> (batch,); the unit of the
        scores, or none when scaled.
    Raises: ``ValueError`` when the shapes differ.
    Trap: scaling gives a prompt with almost equal answers the same weight as one with very
    different answers. If scores are noisy, the policy learns that noise.
    """
    known = _checked(scores, groups, known)
    _, above = _above_start(scores, groups, known)
    count = _group_sums(known.double(), groups)
    deviations = torch.where(known, above - _group_sums(above, groups) / count.clamp(min=1), 0)
    if scale:
        deviations = deviations / (
            (_group_sums(deviations.square(), groups) / (count - 1).clamp(min=1)).sqrt() + 1e-4
        )
    return deviations.to(scores.dtype)


@torch.no_grad()
def zero_signal(scores: PerResponse, groups: Groups, known: Flags | None = None) -> Flags:
    """Mark the responses whose whole group has one score, so that comparing inside the group says
    nothing.

    Equation: ``max s_j = min s_j`` over the known scores of i's group (also when fewer than two are
    known). With rewards of 0 and 1 and a success rate p a group of G is of this kind with
    probability ``p^G + (1−p)^G``.
    Paper: the dynamic sampling of DAPO, Yu et al. 2025, https://arxiv.org/abs/2503.14476, section
        3.2.
    Shapes: scores, groups (any non-negative ids) and known (batch,) -> (batch,).
    Raises: ``ValueError`` when the shapes differ.
    Trap: they add zeros to the sum but count in its denominator: kept, they shrink the step in
        proportion.
    """
    known = _checked(scores, groups, known)
    highest = _group_extremes(torch.where(known, scores, -torch.inf), groups, "amax")
    return ~(highest > _group_extremes(torch.where(known, scores, torch.inf), groups, "amin"))


@torch.no_grad()
def overlong_penalty(lengths: Num[Tensor, " batch"], max_length: int, buffer: int) -> PerResponse:
    """Penalize responses that come close to the length at which they would be cut off.

    Equation: ``min(0, (L_max − B − |y|) / B)``, so that it falls linearly from 0 to −1 over the
        last B tokens.
    Paper: DAPO, Yu et al. 2025, https://arxiv.org/abs/2503.14476, eq. 13.
    Shapes: lengths (batch,) in tokens -> (batch,), to be added to the score with a weight.
    Raises: ``ValueError`` when ``buffer`` is not between 1 and ``max_length``.
    Trap: in units of the score: against scores in the tens a penalty of 1 is nothing.
    """
    if not 1 <= buffer <= max_length:
        raise ValueError(
            f"the buffer must lie between 1 and max_length = {max_length}, got {buffer}",
        )
    return ((max_length - buffer - lengths.to(torch.get_default_dtype())) / buffer).clamp(max=0.0)


def running_mean(
    mean: float,
    count: int,
    scores: Sequence[float],
    window: int,
) -> tuple[float, int]:
    """Move a baseline on by the scores of a step: the mean of all scores so far, and of about the
    last ``window`` later on.

    Equation: ``m ← m + Σ (s_i − m) / (c + n)``, ``c ← min(c + n, window)``.
    Paper: the reinforcement baseline of Williams 1992, https://doi.org/10.1007/BF00992696, section
        4.
    Units: those of the scores; n of them.
    Raises: ``ValueError`` when ``window`` is below 1.
    Trap: use the mean from *before* the step for the step's own scores. One that contains them is
    correlated with them, and the gradient is then biased.
    """
    if window < 1:
        raise ValueError(f"window must be at least 1, got {window}")
    if not scores:
        return mean, count
    return mean + sum(s - mean for s in scores) / (count + len(scores)), min(
        count + len(scores),
        window,
    )


def _checked(scores: Tensor, groups: Tensor, known: Tensor | None) -> Tensor:
    """The marks of the scores that count, by default all, in the shape of the scores."""
    marks = torch.ones_like(groups, dtype=torch.bool) if known is None else known
    check_same_shape(scores=scores, groups=groups, known=marks)
    return marks


def _above_start(scores: Tensor, groups: Tensor, known: Tensor) -> tuple[Tensor, Tensor]:
    """Each group's lowest known score, and what each known score has above it, in float64: equal
    scores differ by exactly 0.
    """
    scores = scores.double()
    lowest = _group_extremes(torch.where(known, scores, torch.inf), groups, "amin")
    return lowest, torch.where(known, scores - lowest, 0)


def _group_extremes(values: Tensor, groups: Tensor, reduce: str) -> Tensor:
    """The least ("amin") or the largest ("amax") of its group's values, for each of them."""
    extremes = values.new_zeros(int(groups.max()) + 1 if len(groups) else 0)
    return extremes.scatter_reduce(0, groups, values, reduce, include_self=False)[groups]


def _group_sums(values: Tensor, groups: Tensor) -> Tensor:
    """The sum of its group's values, for each of them."""
    return values.new_zeros(int(groups.max()) + 1 if len(groups) else 0).index_add(
        0,
        groups,
        values,
    )[groups]


def _discounted_sums(terms: Tensor, discount: float) -> Tensor:
    """``S_t = x_t + discount · S_{t+1}`` along the last dimension; trailing zeros stay zero."""
    sums = torch.empty_like(terms)
    running = terms.new_zeros(terms.shape[0])
    for time in reversed(range(terms.shape[1])):
        running = terms[:, time] + discount * running
        sums[:, time] = running
    return sums
