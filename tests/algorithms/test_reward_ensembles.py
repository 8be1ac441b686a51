"""Combinations of members' scores by hand, and what must not matter."""

import itertools
import math
import statistics

import pytest
import torch

from tether.algorithms.reward_ensembles import combine_members, spread_of_members

SCORES = torch.tensor([[1.0, 0.0, -2.0], [3.0, 0.0, 4.0], [5.0, 0.0, 1.0]])
"""Three members, three responses: means 3, 0, 1 and variances 8/3, 0, 6."""


@pytest.mark.parametrize(
    ("how", "weight", "expected"),
    [
        ("mean", 0.1, [3.0, 0.0, 1.0]),
        ("worst", 0.1, [1.0, 0.0, -2.0]),
        ("uncertainty", 0.0, [3.0, 0.0, 1.0]),
        ("uncertainty", 0.5, [3.0 - 4 / 3, 0.0, -2.0]),
    ],
)
def test_by_hand_whatever_the_order_of_the_members(how, weight, expected):
    for order in itertools.permutations(range(3)):
        found = combine_members(SCORES[list(order)], how, uncertainty_weight=weight)
        assert found.tolist() == pytest.approx(expected)


def test_spread_is_the_standard_deviation_over_members():
    scores = torch.randn(5, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert spread_of_members(scores).tolist() == pytest.approx(
        [statistics.pstdev(column) for column in scores.T.tolist()],
    )
    assert spread_of_members(SCORES)[0].item() == pytest.approx(math.sqrt(8 / 3))
    assert spread_of_members(SCORES[:1]).tolist() == [0.0, 0.0, 0.0]


def test_one_member_is_itself_however_it_is_combined():
    for how in ("mean", "worst", "uncertainty"):
        assert torch.equal(combine_members(SCORES[:1], how), SCORES[0])


def test_caution_orders_the_combinations_and_shifts_pass_through():
    """A score everybody raises by c rises by c; the worst is never above the mean, nor is the
    penalised mean.
    """
    mean = combine_members(SCORES)
    for how in ("worst", "uncertainty"):
        found = combine_members(SCORES, how)
        assert (found <= mean).all() and found[1] == mean[1]
        torch.testing.assert_close(combine_members(SCORES + 7.0, how), found + 7.0)


def test_no_members_and_negative_weights_are_refused():
    with pytest.raises(ValueError, match="at least one member"):
        combine_members(SCORES[:0])
    with pytest.raises(ValueError, match="weight from 0"):
        combine_members(SCORES, "uncertainty", uncertainty_weight=-0.1)
