"""The figures of docs/guides/corrections.md."""

import math

import pytest
import torch

from tether.algorithms.kl import kl_policy_reference_k1
from tether.algorithms.policy_losses import ppo_clip_loss
from tether.algorithms.preference_losses import bradley_terry_loss

HALF = math.log(0.5)


def clip_gradient(logit: torch.Tensor, advantage: float) -> float:
    old, mask = torch.full((1, 1), HALF), torch.ones(1, 1, dtype=torch.bool)
    logprobs = torch.nn.functional.logsigmoid(logit).view(1, 1)
    loss, _ = ppo_clip_loss(
        logprobs,
        old,
        torch.full((1, 1), advantage),
        mask,
        clip_range=0.2,
        denominator=1,
    )
    (gradient,) = torch.autograd.grad(loss, logit)
    return float(gradient)


def test_one_step_jumps_over_the_edge_and_nothing_pulls_it_back() -> None:
    start = torch.zeros((), requires_grad=True)
    assert clip_gradient(start, 1.0) == pytest.approx(-0.5)  # by hand: d log σ(θ)/dθ = 1 − ½
    after = torch.tensor(0.5, requires_grad=True)  # a step of ½, the gradient scaled to 1
    ratio = float(torch.sigmoid(after)) / 0.5
    assert ratio == pytest.approx(1.245, abs=5e-4) and ratio > 1.2
    assert clip_gradient(after, 1.0) == 0.0
    # beyond the edge on the other side the whole gradient is there
    assert clip_gradient(after, -1.0) > 0.0


def test_the_loss_of_a_pair_is_unbounded_and_its_gradient_is_not() -> None:
    for lead, right in ((-30.0, 30.0), (-300.0, 300.0)):
        chosen, rejected = torch.tensor([lead], requires_grad=True), torch.zeros(1)
        loss = bradley_terry_loss(chosen, rejected, denominator=1)
        (gradient,) = torch.autograd.grad(loss, chosen)
        assert (
            float(loss.detach()) == pytest.approx(right, rel=1e-6) and -1.0 <= float(gradient) < 0.0
        )


def test_a_penalty_of_the_wrong_sign_makes_samples_likelier() -> None:
    logprobs = torch.tensor([-1.0], requires_grad=True)
    wrong = -kl_policy_reference_k1(logprobs, torch.tensor([-2.0])).mean()
    (gradient,) = torch.autograd.grad(wrong, logprobs)
    assert float(gradient) < 0.0  # descent raises log π, wherever the reference stands
