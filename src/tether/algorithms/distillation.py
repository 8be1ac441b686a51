"""Divergences between a student and its teachers over the whole vocabulary, without the matrix of
all logits.

q is the student, p the teacher, both at one token. The names of directions are the field's:
"reverse" KL is KL(q || p), which a student pays where it writes what its teacher would not, and
"forward" KL is KL(p || q), which it pays where it leaves out what its teacher would write.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tether.algorithms.logprobs import token_logprobs

States = Float[Tensor, "tokens dim"]
PerToken = Float[Tensor, " tokens"]
Logprobs = Float[Tensor, "rows vocab"]
PerRow = Float[Tensor, " rows"]
CHUNK = 128
"""Tokens whose logits exist at a time."""


class Unembedding(NamedTuple):
    """The output layer of a model, and the temperature of its distribution."""

    weight: Tensor
    bias: Tensor | None = None
    temperature: float = 1.0
    softcap: float | None = None

    def chosen(self, states: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probabilities of the targets, and entropies; see `token_logprobs`."""
        return token_logprobs(
            states,
            self.weight,
            targets,
            temperature=self.temperature,
            bias=self.bias,
            softcap=self.softcap,
        )

    def logprobs(self, states: Tensor) -> Tensor:
        """(rows, dim) -> (rows, vocab) log-probabilities in nats, at least in float32."""
        logits = states @ self.weight.to(states.dtype).T
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if self.bias is not None:
            logits = logits + self.bias
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        return torch.log_softmax(logits / self.temperature, -1)


class TeacherView(NamedTuple):
    """A teacher at the places of a batch.

    - states: (tokens, dim) what it computed there, in the student's order of tokens.
    - weight: its share in the sum over teachers.
    """

    states: Tensor
    unembedding: Unembedding
    weight: float = 1.0

    def beside(self, student: Logprobs, place: slice) -> tuple[Tensor, Tensor]:
        """The distributions of student and teacher over the same words."""
        return student, self.unembedding.logprobs(self.states[place])

    def likeliest(self, theirs: Logprobs, place: slice) -> Int64[Tensor, " rows"]:
        """The teacher's likeliest token at each place."""
        return theirs.argmax(-1)

    def counted(self, place: slice) -> Tensor | float:
        """1 at each place that counts."""
        return 1.0


class TopView(NamedTuple):
    """The likeliest tokens of a teacher at the places of a batch. The rest of its probability, and of
    the student's, counts as one more token: each divergence of what is coarser in this way is at most
    that of the whole distributions.

    - ids, logprobs: (tokens, k), the likeliest first; in nats at temperature 1.
    - covered: (tokens,) True where these have enough probability; other places do not count.
    """

    ids: Tensor
    logprobs: Tensor
    covered: Tensor
    weight: float = 1.0

    def beside(self, student: Logprobs, place: slice) -> tuple[Tensor, Tensor]:
        """See TeacherView."""
        ids, theirs = self.ids[place], self.logprobs[place]
        others = student.scatter(-1, ids, -torch.inf).logsumexp(-1, keepdim=True).clamp(min=-40)
        mass = theirs.double().exp().sum(-1, keepdim=True).clamp(max=1 - 1e-9)
        rest = torch.log1p(-mass).to(theirs.dtype)
        return torch.cat([student.gather(-1, ids), others], -1), torch.cat([theirs, rest], -1)

    def likeliest(self, theirs: Logprobs, place: slice) -> Int64[Tensor, " rows"]:
        """See TeacherView."""
        return self.ids[place, 0]

    def counted(self, place: slice) -> Tensor | float:
        """See TeacherView."""
        return self.covered[place]


def kl(first: Logprobs, second: Logprobs) -> PerRow:
    """KL(first || second) of each row.

    Equation: ``Σ_v exp(a_v) (a_v − b_v)``.
    Shapes: (rows, vocab) log-probabilities, twice -> (rows,) in nats.
    Trap: where ``first`` has no probability at all the term is 0, and not NaN.
    """
    gap = torch.where(first == -torch.inf, 0.0, first - second)
    return (first.exp() * gap).sum(-1)


def reverse_kl(student: Logprobs, teacher: Logprobs, beta: float = 1.0) -> PerRow:
    """KL(q || p): see `kl`."""
    return kl(student, teacher)


def forward_kl(student: Logprobs, teacher: Logprobs, beta: float = 0.0) -> PerRow:
    """KL(p || q): see `kl`."""
    return kl(teacher, student)


def generalised_jsd(student: Logprobs, teacher: Logprobs, beta: float) -> PerRow:
    """The generalised Jensen-Shannon divergence between student and teacher.

    Equation: ``β KL(p || m) + (1 − β) KL(q || m)`` with ``m = β p + (1 − β) q``.
    Paper: Agarwal et al. 2024 (GKD), https://arxiv.org/abs/2306.13649, section 2.
    Shapes: (rows, vocab) log-probabilities, twice -> (rows,) in nats.
    Raises: ``ValueError`` unless β lies between 0 and 1.
    Trap: as β goes to 0 it goes to 0 itself, β times the forward KL; as β goes to 1, (1 − β) times
        the reverse KL. The limits 0 and 1 are therefore no divergences.
    """
    if not 0 < beta < 1:
        raise ValueError(f"beta must lie between 0 and 1, got {beta}")
    share = torch.tensor(beta, dtype=student.dtype, device=student.device)
    middle = torch.logaddexp(teacher + share.log(), student + (1 - share).log())
    return beta * kl(teacher, middle) + (1 - beta) * kl(student, middle)


DIVERGENCES: dict[str, Callable[[Tensor, Tensor, float], Tensor]] = {
    "reverse": reverse_kl,
    "forward": forward_kl,
    "jsd": generalised_jsd,
}
"""Divergences of whole distributions, by the name that a recipe has for them."""


def divergence(
    hidden: States,
    student: Unembedding,
    views: Sequence[TeacherView | TopView],
    kind: str,
    beta: float = 0.5,
) -> PerToken:
    """The weighted sum over teachers of each token's divergence, with gradient to the student.

    Equation: ``Σ_k w_k D(q, p_k)``, D one of `DIVERGENCES`.
    Shapes: hidden (tokens, dim) of the student, as many states of each teacher -> (tokens,) in nats.
    At most `CHUNK` rows of logits exist at a time. With a frozen output layer the gradient of the
    states comes with the result, as in Liger Kernel, https://arxiv.org/abs/2410.10989; otherwise
    backward computes the logits again, as in Cut Your Losses, https://arxiv.org/abs/2411.09009.
    Raises: ``ValueError`` on teachers with another number of tokens or of words.
    """
    _check(hidden, student, views)

    def part(own: Tensor, place: slice) -> Tensor:
        logprobs = student.logprobs(own)
        gaps = [
            one.weight * one.counted(place) * DIVERGENCES[kind](*one.beside(logprobs, place), beta)
            for one in views
        ]
        return torch.stack(gaps).sum(0)

    layer = student.weight, student.bias
    trained = any(one is not None and one.requires_grad for one in layer)
    ahead = torch.is_grad_enabled() and not trained
    parts = []
    for place in _places(len(hidden)):
        own = hidden[place]
        if ahead:
            leaf = own.detach().requires_grad_(True)
            gaps = part(leaf, place)
            (slope,) = torch.autograd.grad(gaps.sum(), leaf)
            parts.append(gaps.detach() + ((own - own.detach()) * slope).sum(-1))
        else:
            parts.append(checkpoint(part, own, place, use_reentrant=False))
    return torch.cat(parts)


def _places(count: int) -> list[slice]:
    return [slice(start, start + CHUNK) for start in range(0, count, CHUNK)]


class TokenGaps(NamedTuple):
    """The distance of a student from its teachers at each token, in nats, and whether a teacher's
    likeliest token is another one than was written; (tokens,) each. `counted` has the weight of the
    teachers for which the token counts, which the first three hold.
    """

    reverse: Tensor
    forward: Tensor
    other: Tensor
    counted: Tensor
    entropy: Tensor


@torch.no_grad()
def token_gaps(
    hidden: States,
    student: Unembedding,
    views: Sequence[TeacherView | TopView],
    targets: Int64[Tensor, " tokens"],
) -> TokenGaps:
    """Both directions of the KL, the share of other tokens, and the student's entropy.

    Shapes: see `divergence`; targets (tokens,) are the tokens that were written.
    """
    _check(hidden, student, views)
    parts = []
    for place in _places(len(hidden)):
        own = student.logprobs(hidden[place])
        entropy = -(own.exp() * own).sum(-1)
        sums = [torch.zeros_like(entropy) for _ in range(4)]
        for opinion in views:
            mine, theirs = opinion.beside(own, place)
            other = opinion.likeliest(theirs, place) != targets[place]
            measures = (
                reverse_kl(mine, theirs),
                forward_kl(mine, theirs),
                other.to(entropy.dtype),
                torch.ones_like(entropy),
            )
            share = opinion.weight * opinion.counted(place)
            sums = [total + share * one for total, one in zip(sums, measures, strict=True)]
        parts.append((*sums, entropy))
    return TokenGaps(*map(torch.cat, zip(*parts, strict=True)))


def _check(
    hidden: Tensor,
    student: Unembedding,
    views: Sequence[TeacherView | TopView],
) -> None:
    for one in views:
        if isinstance(one, TopView):
            continue
        words = len(one.unembedding.weight), len(student.weight)
        if len(one.states) != len(hidden) or words[0] != words[1]:
            raise ValueError(
                f"a teacher has {len(one.states)} tokens and {words[0]} words, the student "
                f"{len(hidden)} and {words[1]}",
            )
