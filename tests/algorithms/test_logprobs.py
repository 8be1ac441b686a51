"""token_logprobs against torch's own log_softmax, finite differences, and a recorder of what is
allocated.
"""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from tether.algorithms import logprobs as module
from tether.algorithms.logprobs import token_logprobs

VOCAB, DIM = 11, 5


def naive(hidden, weight, targets, temperature=1.0, bias=None, softcap=None):
    """The whole matrix of logits through torch's distribution object."""
    logits = torch.nn.functional.linear(hidden, weight, bias)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    distribution = torch.distributions.Categorical(logits=logits / temperature)
    return distribution.log_prob(targets), distribution.entropy()


def example(num_tokens=7, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(num_tokens, DIM, generator=generator, dtype=torch.float64)
    weight = torch.randn(VOCAB, DIM, generator=generator, dtype=torch.float64)
    bias = torch.randn(VOCAB, generator=generator, dtype=torch.float64)
    targets = torch.randint(0, VOCAB, (num_tokens,), generator=generator)
    return hidden.to(dtype), weight.to(dtype), bias.to(dtype), targets


@pytest.fixture
def small_strips(monkeypatch):
    """Two rows a strip, so that a chunk of three is cut as a chunk of a large vocabulary is."""
    monkeypatch.setattr(module, "CPU_STRIP_ELEMENTS", 2 * VOCAB)


SETTINGS = pytest.mark.parametrize(
    "options",
    [{}, {"temperature": 0.7}, {"softcap": 2.0}, {"temperature": 1.3, "softcap": 1.5}],
    ids=str,
)


@SETTINGS
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("chunk_size", [1, 3, 7, 256])
def test_values_are_those_of_a_categorical_distribution(
    options,
    with_bias,
    chunk_size,
    small_strips,
):
    hidden, weight, bias, targets = example()
    bias = bias if with_bias else None
    got = token_logprobs(hidden, weight, targets, bias=bias, chunk_size=chunk_size, **options)
    for ours, theirs in zip(got, naive(hidden, weight, targets, bias=bias, **options), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@SETTINGS
@pytest.mark.parametrize("chunk_size", [3, 256])
def test_gradients_by_finite_differences(options, chunk_size, small_strips):
    hidden, weight, bias, targets = example()
    inputs = [tensor.requires_grad_() for tensor in (hidden, weight, bias)]

    def both(hidden, weight, bias):
        return token_logprobs(hidden, weight, targets, bias=bias, chunk_size=chunk_size, **options)

    assert torch.autograd.gradcheck(both, inputs)
    assert torch.autograd.gradcheck(lambda *tensors: both(*tensors)[0], inputs)
    assert torch.autograd.gradcheck(lambda *tensors: both(*tensors)[1], inputs)


@pytest.mark.parametrize(
    "needs",
    [(True, False, False), (False, True, False), (False, False, True), (True, True, False)],
)
def test_only_what_requires_a_gradient_gets_one(needs):
    hidden, weight, bias, targets = example()
    inputs = [
        tensor.requires_grad_(need)
        for tensor, need in zip((hidden, weight, bias), needs, strict=True)
    ]
    logprobs, entropy = token_logprobs(hidden, weight, targets, bias=bias, chunk_size=3)
    (logprobs.sum() + entropy.square().sum()).backward()
    ours = [tensor.grad for tensor in inputs]
    for tensor in inputs:
        tensor.grad = None
    logprobs, entropy = naive(hidden, weight, targets, bias=bias)
    (logprobs.sum() + entropy.square().sum()).backward()
    for got, tensor, need in zip(ours, inputs, needs, strict=True):
        assert (got is not None) == need
        if need:
            torch.testing.assert_close(got, tensor.grad)


@SETTINGS
@pytest.mark.parametrize("chunk_size", [3, 256])
@pytest.mark.parametrize("with_entropy", [False, True])
def test_gradients_beside_a_frozen_output_layer(options, chunk_size, with_entropy, small_strips):
    hidden, weight, bias, targets = example()
    hidden.requires_grad_()

    def loss(hidden):
        logprobs, entropy = token_logprobs(
            hidden,
            weight,
            targets,
            bias=bias,
            chunk_size=chunk_size,
            **options,
        )
        return logprobs.square().sum() + (entropy.square().sum() if with_entropy else 0.0)

    assert torch.autograd.gradcheck(loss, [hidden])


def test_gradient_of_a_nearly_certain_token_keeps_its_digits():
    """1 - p is a thousandth: rounded to bfloat16 after the sum over the vocabulary, nothing would
    be left of it.
    """
    hidden, weight, _, _ = example(num_tokens=40)
    targets = (hidden @ weight.T).argmax(1)
    hidden = (hidden * 4).bfloat16().requires_grad_()
    logprobs, _ = token_logprobs(hidden, weight.bfloat16(), targets)
    logprobs.sum().backward()
    exact = hidden.detach().double().requires_grad_()
    values, _ = naive(exact, weight.bfloat16().double(), targets)
    values.sum().backward()
    sure = (values.exp() > 0.99) & (values.exp() < 0.9999)
    assert sure.sum() >= 5
    assert (hidden.grad.double() - exact.grad)[sure].norm() / exact.grad[sure].norm() < 0.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_precision_agrees_with_float64(dtype):
    hidden, weight, _, targets = example(num_tokens=40, dtype=dtype)
    exact_hidden, exact_weight = hidden.double().requires_grad_(), weight.double().requires_grad_()
    hidden.requires_grad_(), weight.requires_grad_()
    upstream = torch.linspace(-1, 1, 40)
    for first, second, function in (
        (exact_hidden, exact_weight, naive),
        (hidden, weight, token_logprobs),
    ):
        logprobs, entropy = function(first, second, targets, temperature=0.7)
        (logprobs @ upstream.to(logprobs.dtype) + 0.3 * entropy.sum()).backward()
        assert (
            logprobs.dtype
            == entropy.dtype
            == (torch.float64 if first is exact_hidden else torch.float32)
        )
    # bfloat16 rounds each logit of size 8 by up to 1/64, and gradients by one part in 256.
    tolerance = 1e-5 if dtype == torch.float32 else 0.03
    with torch.no_grad():
        for ours, exact in zip(
            token_logprobs(hidden, weight, targets),
            naive(exact_hidden, exact_weight, targets),
            strict=True,
        ):
            torch.testing.assert_close(ours.double(), exact, rtol=tolerance, atol=tolerance)
    for ours, exact in ((hidden.grad, exact_hidden.grad), (weight.grad, exact_weight.grad)):
        assert ours.dtype == dtype
        assert (ours.double() - exact).norm() / exact.norm() < tolerance


def test_weight_gradient_of_bfloat16_is_summed_in_float32():
    """Five hundred chunks of one equal token: a bfloat16 sum stops growing at 256 times its
    term.
    """
    hidden = torch.ones(512, 1, dtype=torch.bfloat16)
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    token_logprobs(hidden, weight, torch.zeros(512, dtype=torch.int64), chunk_size=1)[
        0
    ].sum().backward()
    assert weight.grad.flatten().tolist() == [256.0, -256.0]  # 512 * (1 - 1/2)


def test_float32_weight_under_bfloat16_states():
    hidden, weight, _, targets = example(dtype=torch.float32)
    hidden = hidden.bfloat16()
    weight.requires_grad_()
    logprobs, _ = token_logprobs(hidden, weight, targets)
    logprobs.sum().backward()
    assert weight.grad.dtype == torch.float32
    torch.testing.assert_close(
        logprobs.detach(),
        token_logprobs(hidden, weight.detach().bfloat16(), targets)[0],
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bit_equal_with_and_without_gradients(dtype):
    hidden, weight, _, targets = example(num_tokens=50, dtype=dtype)
    with torch.no_grad():
        quiet = token_logprobs(hidden, weight, targets, temperature=0.7)
    trained = token_logprobs(hidden.requires_grad_(), weight, targets, temperature=0.7)
    for without, with_gradient in zip(quiet, trained, strict=True):
        assert torch.equal(without, with_gradient)
        assert with_gradient.requires_grad
        assert not without.requires_grad


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 1000), st.sampled_from([0.1, 1.0, 30.0, 1000.0]), st.integers(1, 9))
def test_properties_of_a_distribution(seed, scale, chunk_size):
    """Probabilities over all targets sum to one, the entropy is −Σ p log p, and stays within 0 and
    log V at any scale.
    """
    hidden, weight, _, _ = example(num_tokens=1, dtype=torch.float32, seed=seed)
    targets = torch.arange(VOCAB)
    logprobs, entropy = token_logprobs(
        scale * hidden.expand(VOCAB, DIM),
        weight,
        targets,
        chunk_size=chunk_size,
    )
    assert logprobs.exp().sum().item() == pytest.approx(1.0, abs=1e-5)
    assert (logprobs <= 0).all()
    assert (entropy >= 0).all()
    assert (entropy <= math.log(VOCAB) + 1e-6).all()
    expected = -sum(p * math.log(p) for p in logprobs.double().exp().tolist() if p > 0)
    assert entropy[0].item() == pytest.approx(expected, abs=2e-5)


def test_uniform_by_hand():
    logprobs, entropy = token_logprobs(torch.zeros(2, 3), torch.randn(8, 3), torch.tensor([0, 7]))
    assert logprobs.tolist() == pytest.approx([-math.log(8)] * 2)
    assert entropy.tolist() == pytest.approx([math.log(8)] * 2)


def test_large_common_offset_costs_no_digits():
    """Softmax does not see a constant added to every logit; a naive lse − Σ p z loses four digits
    to one of 10⁴.
    """
    hidden, weight, _, targets = example(dtype=torch.float32)
    _, entropy = token_logprobs(hidden, weight, targets, bias=torch.full((VOCAB,), 8192.0))
    # The logits themselves were rounded to 1/1024 by the sum, and the entropy's derivative is of
    # order one.
    exact = naive(
        (hidden @ weight.T + 8192.0).double() - 8192.0,
        torch.eye(VOCAB, dtype=torch.float64),
        targets,
    )[1]
    torch.testing.assert_close(entropy.double(), exact, atol=2e-6, rtol=1e-5)


def test_no_tokens():
    hidden, weight, _, _ = example(dtype=torch.float32)
    hidden, weight = hidden[:0].requires_grad_(), weight.requires_grad_()
    logprobs, entropy = token_logprobs(hidden, weight, torch.zeros(0, dtype=torch.int64))
    assert logprobs.shape == entropy.shape == (0,)
    (logprobs.sum() + entropy.sum()).backward()
    assert hidden.grad.shape == (0, DIM)
    assert torch.equal(weight.grad, torch.zeros(VOCAB, DIM))


class LargestTensor(TorchDispatchMode):
    """Records the most elements that any operation's result had."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, torch.Tensor):
                self.largest = max(self.largest, tensor.numel())
        return result


@SETTINGS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_never_more_logits_than_a_chunk(options, dtype):
    num_tokens, vocab, dim, chunk_size = 64, 100, 4, 8
    hidden = torch.randn(num_tokens, dim).to(dtype).requires_grad_()
    weight = torch.randn(vocab, dim).to(dtype).requires_grad_()
    targets = torch.randint(0, vocab, (num_tokens,))
    with LargestTensor() as recorder:
        logprobs, entropy = token_logprobs(
            hidden,
            weight,
            targets,
            chunk_size=chunk_size,
            **options,
        )
        (logprobs.sum() + entropy.sum()).backward()
    assert chunk_size * vocab // 2 < recorder.largest <= chunk_size * vocab
    with LargestTensor() as recorder:
        naive(hidden, weight, targets)
    assert recorder.largest == num_tokens * vocab  # the recorder sees what it should


def test_keeps_nothing_of_the_logits_for_backward():
    hidden, weight, bias, targets = example(num_tokens=100)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: kept.append(tensor.numel()) or tensor,
        lambda tensor: tensor,
    ):
        token_logprobs(hidden.requires_grad_(), weight, targets, bias=bias, chunk_size=10)
    given = [hidden.numel(), weight.numel(), bias.numel(), 100]
    slope = hidden.numel()
    assert sorted(kept) == sorted([*given, 100, 100, slope])
    kept.clear()
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: kept.append(tensor.numel()) or tensor,
        lambda tensor: tensor,
    ):
        token_logprobs(hidden, weight.requires_grad_(), targets, bias=bias, chunk_size=10)
    assert sorted(kept) == sorted([*given, 100, 100])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": torch.zeros(6, DIM)}, "do not fit"),
        ({"weight": torch.zeros(VOCAB, DIM + 1)}, "do not fit"),
        ({"bias": torch.zeros(1)}, "bias"),
        ({"temperature": 0.0}, "must be positive"),
        ({"softcap": 0.0}, "must be positive"),
        ({"chunk_size": 0}, "must be positive"),
    ],
)
def test_refuses(change, message, as_in_production):
    arguments = {
        "hidden": torch.zeros(7, DIM),
        "weight": torch.zeros(VOCAB, DIM),
        "targets": torch.zeros(7, dtype=torch.int64),
    }
    with pytest.raises(ValueError, match=message):
        token_logprobs(**(arguments | change))


def test_a_target_outside_the_vocabulary_is_an_error():
    hidden, weight, _, targets = example()
    with pytest.raises(RuntimeError, match="out of bounds"):
        token_logprobs(hidden, weight, torch.full_like(targets, -100))
