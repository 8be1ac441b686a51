"""The KL estimators, with expectations taken by enumeration over a small vocabulary; best-of-n's KL
against an integral.
"""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate

from tether.algorithms.kl import (
    adapt_kl_coefficient,
    kl_best_of_n,
    kl_policy_reference_k1,
    kl_policy_reference_k2,
    kl_policy_reference_k3,
    kl_policy_reference_k3_corrected,
    kl_target_reached,
)

POLICY = torch.tensor([0.5, -1.0, 0.3, 2.0, -0.4], dtype=torch.float64)
REFERENCE = torch.tensor([0.1, 0.4, -0.7, 1.0, 0.2], dtype=torch.float64).log_softmax(0)


def kl(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """KL(p || q) of two categorical distributions given by log-probabilities: the definition."""
    return sum(p[i].exp() * (p[i] - q[i]) for i in range(len(p)))


def expected_value(estimate) -> float:
    logprobs = POLICY.log_softmax(0)
    return sum(
        logprobs[i].exp() * estimate(logprobs[i], REFERENCE[i]) for i in range(len(POLICY))
    ).item()


def expected_gradient(estimate) -> torch.Tensor:
    """E_{token ~ policy} of the gradient of the estimate: what a sampled loss follows, the sampling
    left undifferentiated.
    """
    logits = POLICY.clone().requires_grad_()
    logprobs = logits.log_softmax(0)
    weights = logprobs.detach().exp()
    (gradient,) = torch.autograd.grad(
        sum(weights[i] * estimate(logprobs[i], REFERENCE[i]) for i in range(5)),
        logits,
    )
    return gradient


def true_gradient(divergence) -> torch.Tensor:
    logits = POLICY.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(divergence(logits.log_softmax(0)), logits)
    return gradient


def test_k1_and_k3_are_unbiased_and_k2_is_not():
    exact = kl(POLICY.log_softmax(0), REFERENCE).item()
    assert exact > 0.2
    assert expected_value(kl_policy_reference_k1) == pytest.approx(exact, rel=1e-12)
    assert expected_value(kl_policy_reference_k3) == pytest.approx(exact, rel=1e-12)
    assert abs(expected_value(kl_policy_reference_k2) - exact) > 0.01


def test_gradient_of_k1_is_zero():
    torch.testing.assert_close(
        expected_gradient(kl_policy_reference_k1),
        torch.zeros(5, dtype=torch.float64),
        atol=1e-14,
        rtol=0,
    )


def test_gradient_of_k2_is_that_of_the_kl_to_the_reference():
    torch.testing.assert_close(
        expected_gradient(kl_policy_reference_k2),
        true_gradient(lambda p: kl(p, REFERENCE)),
    )


def test_gradient_of_k3_is_that_of_the_other_divergence():
    gradient = expected_gradient(kl_policy_reference_k3)
    torch.testing.assert_close(gradient, true_gradient(lambda p: kl(REFERENCE, p)))
    assert not torch.allclose(gradient, true_gradient(lambda p: kl(p, REFERENCE)), atol=0.01)


def test_the_corrected_k3_has_the_right_value_and_gradient_even_off_policy():
    """Tokens from an old policy: the ratio carries both over to the present one, exactly, by
    enumeration.
    """
    old = torch.tensor([-0.3, 0.8, 0.1, 1.0, 0.0], dtype=torch.float64).log_softmax(0)
    for sampler in (POLICY.log_softmax(0), old):
        logits = POLICY.clone().requires_grad_()
        logprobs = logits.log_softmax(0)
        estimate = sum(
            sampler[i].exp()
            * kl_policy_reference_k3_corrected(logprobs[i], sampler[i], REFERENCE[i])
            for i in range(5)
        )
        assert estimate.item() == pytest.approx(
            kl(POLICY.log_softmax(0), REFERENCE).item(),
            rel=1e-12,
        )
        (gradient,) = torch.autograd.grad(estimate, logits)
        torch.testing.assert_close(gradient, true_gradient(lambda p: kl(p, REFERENCE)))


@pytest.mark.parametrize(
    ("observed", "reached"),
    [(5.9, False), (6.0, False), (6.1, True), (-0.2, False)],
)
def test_the_target_is_reached_beyond_it(observed, reached):
    assert kl_target_reached(observed, 6.0) is reached


@pytest.mark.parametrize(("observed", "target"), [(math.nan, 6.0), (1.0, 0.0), (1.0, -2.0)])
def test_the_target_refuses(observed, target):
    with pytest.raises(ValueError, match="KL target"):
        kl_target_reached(observed, target)


def test_direction_and_numbers_by_hand():
    # The policy gives 1/2 to a token that the reference gives 1/4: log ratio ln 2, r = 1/2.
    logprobs, reference = torch.tensor([math.log(0.5)]), torch.tensor([math.log(0.25)])
    assert kl_policy_reference_k1(logprobs, reference).item() == pytest.approx(
        math.log(2),
        rel=1e-6,
    )
    assert kl_policy_reference_k2(logprobs, reference).item() == pytest.approx(
        math.log(2) ** 2 / 2,
        rel=1e-6,
    )
    assert kl_policy_reference_k3(logprobs, reference).item() == pytest.approx(
        0.5 - 1 + math.log(2),
        rel=1e-5,
    )


@settings(max_examples=100, deadline=None)
@given(st.floats(-60, 0, width=32), st.floats(-60, 0, width=32))
def test_k3_is_never_negative_and_always_finite(logprob, reference):
    logprob = torch.tensor([logprob], requires_grad=True)
    estimate = kl_policy_reference_k3(logprob, torch.tensor([reference]))
    (gradient,) = torch.autograd.grad(estimate.sum(), logprob)
    assert estimate.item() >= 0
    assert math.isfinite(estimate.item())
    assert math.isfinite(gradient.item())


def test_k3_survives_a_token_the_policy_thought_impossible():
    logprob = torch.tensor([-1000.0], requires_grad=True)
    estimate = kl_policy_reference_k3(logprob, torch.tensor([-1.0]))
    estimate.sum().backward()
    assert math.isfinite(estimate.item())
    assert estimate.item() > 1e8
    assert math.isfinite(logprob.grad.item())


def test_shapes_do_not_broadcast(as_in_production):
    for estimate in (kl_policy_reference_k1, kl_policy_reference_k2, kl_policy_reference_k3):
        with pytest.raises(ValueError, match="equal shapes"):
            estimate(torch.zeros(3, 1), torch.zeros(3, 4))


@pytest.mark.parametrize(
    ("observed", "expected"),
    [
        (6.0, 0.15),  # on target: unchanged
        (6.6, 0.15 * (1 + 0.1 * 512 / 10_000)),  # a tenth over
        (5.4, 0.15 * (1 - 0.1 * 512 / 10_000)),
        (60.0, 0.15 * 1.01024),  # clipped: 1 + 0.2 * 0.0512
        (math.inf, 0.15 * 1.01024),
        (0.0, 0.15 * 0.98976),
        (-3.0, 0.15 * 0.98976),
    ],
)
def test_controller_by_hand(observed, expected):
    assert adapt_kl_coefficient(
        0.15,
        observed,
        target=6.0,
        horizon=10_000.0,
        num_episodes=512,
    ) == pytest.approx(expected, rel=1e-12)


def test_controller_settles_a_plant_on_its_target():
    """Where the KL falls as the coefficient rises, the loop closes on the target."""
    coefficient = 1.0
    for _ in range(2000):
        coefficient = adapt_kl_coefficient(
            coefficient,
            2.0 / coefficient,
            target=8.0,
            horizon=10_000.0,
            num_episodes=256,
        )
    assert 2.0 / coefficient == pytest.approx(8.0, rel=1e-3)


@pytest.mark.parametrize(("observed", "bound"), [(50.0, 3.0), (0.0, 0.02)])
def test_controller_stays_within_its_bounds(observed, bound):
    """A KL that no coefficient brings to its target: 1.02^k passes 10 at the 117th step, 0.98^k
    falls below 1/15 at the 135th. From the bound the first step back counts in full.
    """
    coefficient = 0.3
    for _ in range(200):
        coefficient = adapt_kl_coefficient(
            coefficient,
            observed,
            6.0,
            1000.0,
            100,
            bounds=(0.02, 3.0),
        )
    assert coefficient == bound
    back = adapt_kl_coefficient(coefficient, 50.0 - observed, 6.0, 1000.0, 100, bounds=(0.02, 3.0))
    assert back == pytest.approx(bound * (0.98 if bound == 3.0 else 1.02))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"target": 0.0}, "must be positive"),
        ({"horizon": -1.0}, "must be positive"),
        ({"observed": math.nan}, "NaN"),
        ({"num_episodes": 50_000}, "horizon above 10000"),
    ],
)
def test_controller_refuses(change, message):
    arguments = {
        "coefficient": 0.1,
        "observed": 1.0,
        "target": 6.0,
        "horizon": 10_000.0,
        "num_episodes": 64,
    } | change
    with pytest.raises(ValueError, match=message):
        adapt_kl_coefficient(**arguments)


@pytest.mark.parametrize("n", [1, 2, 7, 64, 4096])
def test_kl_is_the_integral_over_the_quantile(n):
    """The best of n has density n u^(n-1) over the quantile u of the score, against 1 before."""
    # u = exp(-t)
    integral = integrate.quad(
        lambda t: n * math.exp(-n * t) * (math.log(n) - (n - 1) * t),
        0,
        math.inf,
    )[0]
    assert kl_best_of_n(n) == pytest.approx(integral, abs=1e-8)


def test_kl_is_an_upper_bound_with_ties():
    masses = np.array([0.5, 0.3, 0.15, 0.05])  # from the worst answer to the best
    below = np.concatenate([[0.0], masses.cumsum()])
    for n in (2, 5, 30, 1000):
        best = np.diff(below**n)
        exact = float(sum(b * math.log(b / m) for b, m in zip(best, masses, strict=True) if b > 0))
        assert exact < kl_best_of_n(n)
        assert exact < -math.log(0.05) + 1e-9
    with pytest.raises(ValueError, match="1 or more"):
        kl_best_of_n(0)
