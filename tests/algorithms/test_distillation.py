"""Divergences over a vocabulary against sums in numpy, their gradients against float64, and the
sampled estimate against the whole sum.
"""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tether.algorithms import distillation
from tether.algorithms.distillation import (
    DIVERGENCES,
    TeacherView,
    TopView,
    Unembedding,
    divergence,
    generalised_jsd,
    token_gaps,
)


def softmax(z):
    z = z - z.max(-1, keepdims=True)
    return np.exp(z) / np.exp(z).sum(-1, keepdims=True)


def oracle(kind, q, p, beta):
    """The definitions, a word at a time."""

    def kl(a, b):
        return sum(x * (np.log(x) - np.log(y)) for x, y in zip(a, b, strict=True))

    middle = [beta * y + (1 - beta) * x for x, y in zip(q, p, strict=True)]
    return {
        "reverse": lambda: kl(q, p),
        "forward": lambda: kl(p, q),
        "jsd": lambda: beta * kl(p, middle) + (1 - beta) * kl(q, middle),
    }[kind]()


def made(seed, tokens=300, dims=(6, 9), vocab=17, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)

    def random(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    student = Unembedding(random(vocab, dims[0]), random(vocab), 0.7, 5.0)
    views = [
        TeacherView(random(tokens, dims[1]), Unembedding(random(vocab, dims[1])), 0.25),
        TeacherView(random(tokens, dims[0]), Unembedding(random(vocab, dims[0]), None, 2.0), 0.75),
    ]
    return random(tokens, dims[0]), student, views


def logits(states, one):
    z = states.double().numpy() @ one.weight.double().numpy().T
    z = z if one.bias is None else z + one.bias.double().numpy()
    z = z if one.softcap is None else one.softcap * np.tanh(z / one.softcap)
    return z / one.temperature


@pytest.mark.parametrize("kind", DIVERGENCES)
@given(seed=st.integers(0, 1000), beta=st.floats(0.05, 0.95))
@settings(max_examples=8, deadline=None)
def test_a_divergence_is_its_sum_over_the_vocabulary(kind, seed, beta):
    hidden, student, views = made(seed, tokens=5)
    ours = divergence(hidden, student, views, kind, beta)
    q = softmax(logits(hidden, student))
    sums = [
        sum(
            one.weight * oracle(kind, q[t], softmax(logits(one.states, one.unembedding))[t], beta)
            for one in views
        )
        for t in range(len(q))
    ]
    np.testing.assert_allclose(ours.numpy(), sums, rtol=1e-10)


@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("kind", DIVERGENCES)
def test_float32_in_chunks_has_the_gradient_of_float64_in_one_piece(kind, frozen):
    """Over two chunks and a part of one, with an upstream weight a token."""
    found = {}
    weights = torch.linspace(0.1, 2, 300, dtype=torch.float64)
    for dtype in (torch.float32, torch.float64):
        hidden, student, views = made(3, dtype=dtype)
        hidden.requires_grad_(True)
        layer = [] if frozen else [student.weight, student.bias]
        for one in layer:
            one.requires_grad_(True)
        if dtype == torch.float64:
            own = student.logprobs(hidden)
            theirs = [one.unembedding.logprobs(one.states) for one in views]
            parts = [
                one.weight * DIVERGENCES[kind](own, other, 0.3)
                for one, other in zip(views, theirs, strict=True)
            ]
            result = sum(parts)
        else:
            result = divergence(hidden, student, views, kind, 0.3)
        (result * weights.to(dtype)).sum().backward()
        found[dtype] = [one.double() for one in (result, hidden.grad, *(o.grad for o in layer))]
    for ours, exact in zip(*found.values(), strict=True):
        assert (ours - exact).norm() <= 1e-5 * exact.norm()


def coarse(p, ids):
    """A distribution over these words and one for all others."""
    return np.append(p[ids], 1 - p[ids].sum())


@pytest.mark.parametrize("count", [1, 4, 12])
@pytest.mark.parametrize("kind", DIVERGENCES)
def test_the_likeliest_words_of_a_teacher_are_compared_with_all_others_as_one(kind, count):
    """Against sums in numpy; the less is known the smaller it is, and places that are covered too
    little do not count.
    """
    hidden, student, (whole, _) = made(5, tokens=200)
    q = softmax(logits(hidden, student))
    p = softmax(logits(whole.states, whole.unembedding))
    ids = np.argsort(-p, -1)[:, :count]
    top = torch.tensor(np.log(np.take_along_axis(p, ids, -1)))
    covered = torch.arange(200) % 3 > 0
    view = TopView(torch.tensor(ids), top, covered, 0.25)
    ours = divergence(hidden, student, [view], kind, 0.3)
    sums = [
        0.25 * covered[t].item() * oracle(kind, coarse(q[t], ids[t]), coarse(p[t], ids[t]), 0.3)
        for t in range(200)
    ]
    np.testing.assert_allclose(ours.numpy(), sums, rtol=1e-6, atol=1e-9)
    full = divergence(hidden, student, [whole._replace(weight=0.25)], kind, 0.3)
    assert bool((ours <= full + 1e-9).all())
    gaps = token_gaps(hidden, student, [view], torch.tensor(ids[:, 0]))
    assert not gaps.other.any()
    assert gaps.counted.tolist() == [0.25 * counts for counts in covered.tolist()]
    if kind in ("reverse", "forward"):
        np.testing.assert_allclose(getattr(gaps, kind).numpy(), sums, rtol=1e-6, atol=1e-9)
    hidden.requires_grad_(True)
    divergence(hidden, student, [view], kind, 0.3).sum().backward()
    slope, hidden.grad = hidden.grad, None
    own, theirs = view.beside(student.logprobs(hidden), slice(0, 200))
    (0.25 * covered * DIVERGENCES[kind](own, theirs, 0.3)).sum().backward()
    torch.testing.assert_close(slope, hidden.grad)


def test_no_teacher_gets_a_gradient_and_no_chunk_is_kept(monkeypatch):
    hidden, student, views = made(1, dtype=torch.float32)
    hidden.requires_grad_(True)
    for one in views:
        one.states.requires_grad_(True)
        one.unembedding.weight.requires_grad_(True)
    sizes = []
    original = Unembedding.logprobs
    monkeypatch.setattr(
        distillation.Unembedding,
        "logprobs",
        lambda self, states: sizes.append(len(states)) or original(self, states),
    )
    divergence(hidden, student, views, "reverse").sum().backward()
    assert max(sizes) <= distillation.CHUNK < len(hidden)
    assert hidden.grad is not None
    assert all(one.states.grad is None and one.unembedding.weight.grad is None for one in views)


def test_a_word_without_any_probability_costs_nothing_where_it_is_not_written():
    """No number that is not finite comes from probabilities of exactly zero."""
    never = torch.tensor([[0.0, -torch.inf]])
    even = torch.tensor([[0.5, 0.5]]).log()
    assert float(DIVERGENCES["reverse"](never, even, 0.5)) == pytest.approx(np.log(2))
    assert float(DIVERGENCES["forward"](never, even, 0.5)) == np.inf
    exact = 0.5 * (0.5 * np.log(0.5 / 0.75) + 0.5 * np.log(0.5 / 0.25)) + 0.5 * np.log(1 / 0.75)
    assert float(generalised_jsd(never, even, 0.5)) == pytest.approx(exact)


@pytest.mark.parametrize("beta", [0.0, 1.0, -0.1])
def test_the_limits_of_beta_are_refused(beta):
    with pytest.raises(ValueError, match="between 0 and 1"):
        generalised_jsd(torch.zeros(1, 2).log_softmax(-1), torch.zeros(1, 2).log_softmax(-1), beta)


def test_what_differs_is_measured_by_the_same_sums():
    hidden, student, views = made(5)
    targets = torch.arange(300) % 17
    found = token_gaps(hidden, student, views, targets)
    for name in ("reverse", "forward"):
        torch.testing.assert_close(
            getattr(found, name),
            divergence(hidden, student, views, name),
        )
    q = softmax(logits(hidden, student))
    np.testing.assert_allclose(found.entropy.numpy(), -(q * np.log(q)).sum(-1), rtol=1e-10)
    others = sum(
        one.weight * (logits(one.states, one.unembedding).argmax(-1) != targets.numpy())
        for one in views
    )
    np.testing.assert_allclose(found.other.numpy(), others)


def test_a_teacher_of_other_words_is_refused():
    hidden, student, views = made(0)
    few = TeacherView(views[0].states, Unembedding(views[0].unembedding.weight[:-1]))
    with pytest.raises(ValueError, match="300 tokens and 16 words, the student 300 and 17"):
        divergence(hidden, student, [few], "forward")


def test_the_gradient_of_sampled_tokens_is_on_average_that_of_the_whole_reverse_kl():
    """E over tokens of (log q − log p) ∇ log q, with its interval of 4 deviations."""
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(12, generator=generator, dtype=torch.float64, requires_grad=True)
    teacher = torch.randn(12, generator=generator, dtype=torch.float64).log_softmax(0)
    own = z.log_softmax(0)
    exact = torch.autograd.grad(DIVERGENCES["reverse"](own[None], teacher[None], 1.0).sum(), z)[0]
    q = own.detach().exp()
    drawn = torch.multinomial(q, 200_000, replacement=True, generator=generator)
    # ∇ log q of a token is its indicator less q
    gaps = (own.detach() - teacher)[drawn]
    samples = gaps[:, None] * (torch.nn.functional.one_hot(drawn, 12).double() - q)
    error = samples.std(0) / len(drawn) ** 0.5
    assert ((samples.mean(0) - exact).abs() < 4 * error).all()
    assert (exact.abs() > 20 * error).any()
