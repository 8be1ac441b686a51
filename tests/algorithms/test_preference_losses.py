"""Losses on comparisons and demonstrations."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tether.algorithms.preference_losses import bradley_terry_loss, centering_penalty, negative_log_likelihood

score = st.floats(-8, 8)


def tensor(*numbers: float) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def probability_of(difference: float) -> float:
    return 1 / (1 + math.exp(-difference))


def test_bradley_terry_by_hand():
    # e^r is 3 against 1, and 1 against 4: the chosen wins with probability 3/4, and 1/5.
    chosen, rejected = tensor(math.log(3), 0.0), tensor(0.0, math.log(4))
    expected = -(math.log(3 / 4) + math.log(1 / 5))
    assert bradley_terry_loss(chosen, rejected, denominator=1).item() == pytest.approx(expected)
    assert bradley_terry_loss(chosen, rejected, denominator=2).item() == pytest.approx(expected / 2)


def test_margin_by_hand():
    # Ahead by ln 3, asked for ln 2: what is left is ln 1.5, and σ(ln 1.5) = 3/5.
    loss = bradley_terry_loss(tensor(math.log(3)), tensor(0.0), margin=tensor(math.log(2)), denominator=1)
    assert loss.item() == pytest.approx(-math.log(3 / 5))
    assert bradley_terry_loss(tensor(math.log(3)), tensor(0.0), margin=math.log(2), denominator=1).item() == loss.item()


@settings(max_examples=60, deadline=None)
@given(score, score, st.floats(0, 3), st.floats(0, 1))
def test_a_soft_label_is_the_expectation_over_winners(first, second, margin, probability):
    arguments = {"margin": tensor(margin), "denominator": 1}
    soft = bradley_terry_loss(tensor(first), tensor(second), probability=tensor(probability), **arguments)
    first_wins = bradley_terry_loss(tensor(first), tensor(second), **arguments)
    second_wins = bradley_terry_loss(tensor(second), tensor(first), **arguments)
    assert soft.item() == pytest.approx((probability * first_wins + (1 - probability) * second_wins).item(), abs=1e-9)
    exchanged = bradley_terry_loss(tensor(second), tensor(first), probability=tensor(1 - probability), **arguments)
    assert exchanged.item() == pytest.approx(soft.item(), abs=1e-9)


@settings(max_examples=30, deadline=None)
@given(st.floats(0.05, 0.95))
def test_without_a_margin_the_soft_loss_is_least_at_the_log_odds(probability):
    """The cross-entropy is proper: its gradient vanishes where σ(d) = p."""
    difference = tensor(math.log(probability / (1 - probability))).requires_grad_()
    bradley_terry_loss(difference, tensor(0.0), probability=tensor(probability), denominator=1).backward()
    assert difference.grad.item() == pytest.approx(0.0, abs=1e-12)


def test_an_even_label_with_a_margin_pulls_to_equal_scores():
    chosen = tensor(0.0, 1.0, -1.0).requires_grad_()
    half, margin = torch.full_like(chosen, 0.5).detach(), torch.ones(3, dtype=torch.float64)
    bradley_terry_loss(chosen, torch.zeros(3, dtype=torch.float64), margin=margin, probability=half, denominator=1).backward()
    assert chosen.grad[0].item() == 0
    assert chosen.grad[1].item() > 0 > chosen.grad[2].item()


def test_bradley_terry_gradient_is_the_surprise():
    chosen, rejected = tensor(0.3, -1.0).requires_grad_(), tensor(-0.2, 2.0).requires_grad_()
    bradley_terry_loss(chosen, rejected, denominator=5).backward()
    expected = [-(1 - probability_of(0.5)) / 5, -(1 - probability_of(-3.0)) / 5]
    assert chosen.grad.tolist() == pytest.approx(expected)
    assert rejected.grad.tolist() == pytest.approx([-g for g in expected])


def test_bradley_terry_knows_only_differences_and_centering_only_sums():
    chosen, rejected = tensor(1.0, 2.0), tensor(0.5, 3.0)
    before = bradley_terry_loss(chosen, rejected, denominator=1).item()
    assert bradley_terry_loss(chosen + 7, rejected + 7, denominator=1).item() == pytest.approx(before)
    assert centering_penalty(chosen, rejected, denominator=1).item() == 1.5**2 + 5.0**2
    assert centering_penalty(chosen + 7, rejected - 7, denominator=1).item() == 1.5**2 + 5.0**2
    assert centering_penalty(tensor(2.0), tensor(-2.0), denominator=1).item() == 0


def test_extreme_scores_stay_finite():
    chosen = torch.tensor([-1e4, 1e4], requires_grad=True)
    loss = bradley_terry_loss(chosen, torch.zeros(2), probability=torch.tensor([1.0, 0.5]), denominator=1)
    loss.backward()
    assert loss.item() == pytest.approx(1.5e4)
    assert torch.isfinite(chosen.grad).all()


def test_negative_log_likelihood_by_hand():
    logprobs = torch.tensor([[math.log(0.5), math.log(0.25), -math.inf]], requires_grad=True)
    mask = torch.tensor([[True, True, False]])
    loss = negative_log_likelihood(logprobs, mask, denominator=2)
    loss.backward()
    assert loss.item() == pytest.approx(math.log(8) / 2)
    assert logprobs.grad.tolist() == [[-0.5, -0.5, 0.0]]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_micro_batches_add_up_to_the_batch(size):
    generator = torch.Generator().manual_seed(0)
    chosen, rejected, margin = torch.randn(3, 7, generator=generator, dtype=torch.float64)
    probability = torch.rand(7, generator=generator, dtype=torch.float64)

    def loss(chosen, rejected, margin, probability):
        pairs = bradley_terry_loss(chosen, rejected, margin=margin, probability=probability, denominator=7)
        likelihood = negative_log_likelihood(chosen, probability > 0.3, denominator=torch.tensor(4))
        return pairs + 0.1 * centering_penalty(chosen, rejected, denominator=7) + likelihood

    tensors = (chosen, rejected, margin, probability)
    parts = [loss(*part) for part in zip(*(tensor.split(size) for tensor in tensors), strict=True)]
    torch.testing.assert_close(sum(parts), loss(*tensors))


def test_shapes_do_not_broadcast(as_in_production):
    three, one = torch.zeros(3), torch.zeros(1)
    for arguments in ({"rejected_scores": one}, {"margin": one}, {"probability": one}):
        with pytest.raises(ValueError, match="equal shapes"):
            bradley_terry_loss(**({"chosen_scores": three, "rejected_scores": three, "denominator": 1} | arguments))
    with pytest.raises(ValueError, match="equal shapes"):
        centering_penalty(three, one, denominator=1)
    with pytest.raises(ValueError, match="equal shapes"):
        negative_log_likelihood(three, torch.ones(1, dtype=torch.bool), denominator=1)
