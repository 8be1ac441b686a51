"""Weighted sums by hand, and a constrained bandit in closed form."""

import math

import pytest
import torch

from tether.algorithms.objectives import dual_update, lagrangian, weighted

SCORES = torch.tensor([[1.0, 0.0, -2.0], [3.0, 0.5, 4.0]])
"""Two objectives, three responses."""
TEMPERATURE = 0.5


def best_choice(multiplier):
    """How often a bandit pulls its better-paid arm, which pays (1, -1) in reward and safety where
    the other pays (0, 1).

    The policy that maximises the Lagrangian plus TEMPERATURE times its entropy is a softmax of the
    two arms.
    """
    arms = lagrangian(
        torch.tensor([1.0, 0.0]),
        torch.tensor([[-1.0, 1.0]]),
        torch.tensor([multiplier]),
    )
    return float((arms.double() / TEMPERATURE).softmax(0)[0])


def trained(threshold, rate=0.05, steps=1000):
    """Multipliers and choices when each step's safety, exactly expected, moves the multiplier."""
    multipliers, choices = [0.0], []
    for _ in range(steps):
        choices.append(best_choice(multipliers[-1]))
        multipliers.append(dual_update(multipliers[-1], threshold - (1 - 2 * choices[-1]), rate))
    return multipliers, choices


def test_weighted_by_hand():
    assert weighted(SCORES, torch.tensor([2.0, 0.5])).tolist() == [3.5, 0.25, -2.0]


@pytest.mark.usefixtures("as_in_production")
def test_other_numbers_of_weights_and_multipliers_are_refused():
    with pytest.raises(ValueError, match="2 objectives and 3 weights"):
        weighted(SCORES, torch.ones(3))
    with pytest.raises(ValueError, match="each of 2 constraints"):
        lagrangian(SCORES[0], SCORES, torch.ones(1))


def test_lagrangian_by_hand():
    reward = torch.tensor([1.0, 2.0, 3.0])
    assert lagrangian(reward, SCORES, torch.tensor([1.0, 2.0])).tolist() == [8 / 4, 3 / 4, 9 / 4]
    assert torch.equal(lagrangian(reward, SCORES, torch.zeros(2)), reward)
    assert torch.equal(lagrangian(reward, SCORES[:0], torch.zeros(0)), reward)
    with pytest.raises(ValueError, match="from 0"):
        lagrangian(reward, SCORES, torch.tensor([1.0, -0.1]))


def test_the_scale_stays_while_the_multiplier_grows():
    """Between objectives of one scale the Lagrangian is an average: it never leaves their range."""
    reward = torch.tensor([-1.0, 0.5, 1.0])
    for multiplier in (0.0, 0.3, 10.0, 1e6):
        found = lagrangian(reward, reward.flip(0)[None], torch.tensor([multiplier]))
        assert found.abs().max() <= 1 + 1e-6


@pytest.mark.parametrize("threshold", [-0.2, 0.0, 0.4])
def test_the_multiplier_finds_the_constrained_optimum(threshold):
    """1 - 2p = threshold fixes p; (1 - 2m) / (1 + m) = T logit(p) then fixes the multiplier m."""
    multipliers, choices = trained(threshold)
    best = (1 - threshold) / 2
    slope = TEMPERATURE * math.log(best / (1 - best))
    assert best < best_choice(0.0)  # the constraint binds
    assert choices[-1] == pytest.approx(best, abs=1e-5)
    assert multipliers[-1] == pytest.approx((1 - slope) / (2 + slope), abs=1e-4)


def test_a_slack_constraint_changes_nothing():
    multipliers, choices = trained(-0.9, steps=50)
    assert set(multipliers) == {0.0} and set(choices) == {best_choice(0.0)}


def test_a_multiplier_comes_back_to_zero_and_leaves_it_again():
    value = 0.0
    for violation, expected in ((1.0, 0.5), (-0.5, 0.25), (-2.0, 0.0), (-2.0, 0.0), (0.5, 0.25)):
        value = dual_update(value, violation, 0.5)
        assert value == expected


@pytest.mark.parametrize(
    ("multiplier", "violation", "rate"),
    [(-0.1, 0.0, 0.1), (0.0, math.nan, 0.1), (0.0, 1.0, 0.0)],
)
def test_a_negative_multiplier_a_nan_and_a_rate_of_zero_are_refused(multiplier, violation, rate):
    with pytest.raises(ValueError, match="a multiplier from 0"):
        dual_update(multiplier, violation, rate)
