"""Divergences between a student and its teachers over the whole vocabulary, without the matrix of
all logits.

q is the student, p the teacher, both at one token. The names of directions are the field's:
"reverse" KL is KL(q || p), which a student pays where it writes what its teacher would not, and
"forward" KL is KL(p || q), which it pays where it leaves out what its teacher would write.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor
from torch.autograd.function import once_differentiable

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

    def logprobs(self, states: Tensor) -> Tensor:
        """(rows, dim) -> (rows, vocab) log-probabilities in nats, at least in float32."""
        logits = states @ self.weight.to(states.dtype).T
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if self.bias is not None:
            logits = logits + self.bias
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        return torch.log_softmax(logits / self.temperature, -1)


class Opinion(NamedTuple):
    """A teacher at the places of a batch.

    - states: (tokens, dim) what it computed there, in the student's order of tokens.
    - weight: its share in the sum over teachers.
    """

    states: Tensor
    unembedding: Unembedding
    weight: float = 1.0


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
    opinions: Sequence[Opinion],
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
    _check(hidden, student, opinions)

    def part(own: Tensor, head: Unembedding, place: slice) -> Tensor:
        logprobs = head.logprobs(own)
        gaps = [
            one.weight
            * DIVERGENCES[kind](logprobs, one.unembedding.logprobs(one.states[place]), beta)
            for one in opinions
        ]
        return torch.stack(gaps).sum(0)

    return _Divergence.apply(hidden, student.weight, student.bias, student, part)


Part = Callable[[Tensor, Unembedding, slice], Tensor]


def _places(count: int) -> list[slice]:
    return [slice(start, start + CHUNK) for start in range(0, count, CHUNK)]


class _Divergence(torch.autograd.Function):
    """The divergences of one chunk of tokens after another; see `divergence`."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        student: Unembedding,
        part: Part,
    ) -> Tensor:
        ctx.student, ctx.part = student._replace(weight=weight, bias=bias), part
        trained = weight.requires_grad or (bias is not None and bias.requires_grad)
        ahead = hidden.requires_grad and not trained
        values, slopes = [], []
        for place in _places(len(hidden)):
            own = hidden[place].detach().requires_grad_(ahead)
            with torch.set_grad_enabled(ahead):
                found = part(own, ctx.student, place)
                slopes += torch.autograd.grad(found.sum(), own) if ahead else ()
            values.append(found.detach())
        ctx.save_for_backward(hidden, torch.cat(slopes) if slopes else None)
        return torch.cat(values) if values else hidden.new_zeros(0, dtype=torch.float32)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grad_outputs
        hidden, slope = ctx.saved_tensors
        if slope is not None:
            return (slope * grad[:, None]).to(hidden.dtype), None, None, None, None
        head = Unembedding(*ctx.student)
        layer = [one.detach().requires_grad_(True) for one in head[:2] if one is not None]
        sums = [
            torch.zeros_like(one, dtype=torch.promote_types(one.dtype, grad.dtype)) for one in layer
        ]
        grad_hidden = torch.empty_like(hidden)
        for place in _places(len(hidden)):
            own = hidden[place].detach().requires_grad_(True)
            with torch.enable_grad():
                found = ctx.part(own, Unembedding(*layer, *head[len(layer) :]), place)
            grad_hidden[place], *found = torch.autograd.grad(found, [own, *layer], grad[place])
            for total, one in zip(sums, found, strict=True):
                total += one
        given = [total.to(one.dtype) for total, one in zip(sums, layer, strict=True)]
        return grad_hidden, given[0], given[1] if len(given) > 1 else None, None, None


class Differences(NamedTuple):
    """What separates a student from its teachers at each token, in nats, and whether a teacher's
    likeliest token is another one than was written; (tokens,) each.
    """

    reverse: Tensor
    forward: Tensor
    other: Tensor
    entropy: Tensor


@torch.no_grad()
def differences(
    hidden: States,
    student: Unembedding,
    opinions: Sequence[Opinion],
    targets: Int64[Tensor, " tokens"],
) -> Differences:
    """Both directions of the KL, the share of other tokens, and the student's entropy.

    Shapes: see `divergence`; targets (tokens,) are the tokens that were written.
    """
    _check(hidden, student, opinions)
    parts = []
    for place in _places(len(hidden)):
        own = student.logprobs(hidden[place])
        entropy = -(own.exp() * own).sum(-1)
        sums = [torch.zeros_like(entropy) for _ in range(3)]
        for opinion in opinions:
            theirs = opinion.unembedding.logprobs(opinion.states[place])
            found = (
                reverse_kl(own, theirs),
                forward_kl(own, theirs),
                _other(theirs, targets[place]).to(entropy.dtype),
            )
            sums = [total + opinion.weight * one for total, one in zip(sums, found, strict=True)]
        parts.append((*sums, entropy))
    return Differences(*map(torch.cat, zip(*parts, strict=True)))


def _other(logprobs: Logprobs, targets: Int64[Tensor, " rows"]) -> Bool[Tensor, " rows"]:
    return logprobs.argmax(-1) != targets


def _check(hidden: Tensor, student: Unembedding, opinions: Sequence[Opinion]) -> None:
    for one in opinions:
        words = len(one.unembedding.weight), len(student.weight)
        if len(one.states) != len(hidden) or words[0] != words[1]:
            raise ValueError(
                f"a teacher has {len(one.states)} tokens and {words[0]} words, the student "
                f"{len(hidden)} and {words[1]}",
            )
