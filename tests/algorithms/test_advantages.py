"""Returns and GAE against the explicit double sums of the papers, row by row, on ragged batches."""

import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tether.algorithms.advantages import gae, group_relative, leave_one_out, returns_to_go

number = st.floats(-10, 10)
episode = st.lists(st.tuples(number, number), min_size=0, max_size=7)
ragged = st.lists(episode, min_size=1, max_size=4)
discount = st.sampled_from([0.0, 0.3, 0.9, 0.95, 1.0])


def padded(episodes, garbage=math.nan):
    """Episodes of (reward, value) -> rewards, values and mask, right-padded with garbage."""
    time = max(map(len, episodes)) + 1
    rewards, values = (torch.full((len(episodes), time), garbage, dtype=torch.float64) for _ in range(2))
    for row, steps in enumerate(episodes):
        for column, (reward, value) in enumerate(steps):
            rewards[row, column], values[row, column] = reward, value
    mask = torch.arange(time)[None] < torch.tensor([len(steps) for steps in episodes])[:, None]
    return rewards, values, mask


@settings(max_examples=60, deadline=None)
@given(ragged, discount)
def test_returns_are_the_discounted_sums(episodes, gamma):
    rewards, _, mask = padded(episodes)
    returns = returns_to_go(rewards, mask, gamma)
    for row, steps in enumerate(episodes):
        expected = [sum(gamma ** (k - t) * steps[k][0] for k in range(t, len(steps))) for t in range(len(steps))]
        assert returns[row, : len(steps)].tolist() == pytest.approx(expected, abs=1e-9)
        assert (returns[row, len(steps) :] == 0).all()


@settings(max_examples=60, deadline=None)
@given(ragged, discount, discount, st.sampled_from([math.nan, math.inf, 1e30]))
def test_gae_is_the_weighted_sum_of_temporal_differences(episodes, gamma, lam, garbage):
    rewards, values, mask = padded(episodes, garbage)
    advantages, returns = gae(rewards, values, mask, gamma, lam)
    for row, steps in enumerate(episodes):
        length = len(steps)
        next_value = [steps[t + 1][1] if t + 1 < length else 0.0 for t in range(length)]
        errors = [steps[t][0] + gamma * next_value[t] - steps[t][1] for t in range(length)]
        expected = [sum((gamma * lam) ** ahead * errors[t + ahead] for ahead in range(length - t)) for t in range(length)]
        assert advantages[row, :length].tolist() == pytest.approx(expected, abs=1e-8)
        assert returns[row, :length].tolist() == pytest.approx(
            [a + v for a, (_, v) in zip(expected, steps, strict=True)], abs=1e-8
        )
        assert (advantages[row, length:] == 0).all()
        assert (returns[row, length:] == 0).all()


def test_gae_by_hand():
    # Rewards 0, 0, 1; values .5, .4, .2; γ = 1, λ = 1/2. δ = -.1, -.2, .8; A_2 = .8, A_1 = -.2 + .4, A_0 = -.1 + .1.
    rewards, values = torch.tensor([[0.0, 0.0, 1.0, 7.0]]), torch.tensor([[0.5, 0.4, 0.2, 7.0]])
    advantages, returns = gae(rewards, values, torch.tensor([[True, True, True, False]]), 1.0, 0.5)
    torch.testing.assert_close(advantages, torch.tensor([[0.0, 0.2, 0.8, 0.0]]))
    torch.testing.assert_close(returns, torch.tensor([[0.5, 0.6, 1.0, 0.0]]))


@settings(max_examples=30, deadline=None)
@given(ragged, discount)
def test_lambda_one_is_the_return_minus_the_value(episodes, gamma):
    rewards, values, mask = padded(episodes)
    advantages, returns = gae(rewards, values, mask, gamma, 1.0)
    expected = returns_to_go(rewards, mask, gamma)
    torch.testing.assert_close(returns, expected, atol=1e-9, rtol=0)
    torch.testing.assert_close(advantages, torch.where(mask, expected - values, 0), atol=1e-9, rtol=0)


def test_a_perfect_value_function_leaves_no_advantage():
    rewards, _, mask = padded([[(1.0, 0.0), (2.0, 0.0), (4.0, 0.0)], [(3.0, 0.0)]])
    advantages, _ = gae(rewards, returns_to_go(rewards, mask, 0.9), mask, 0.9, 0.95)
    torch.testing.assert_close(advantages, torch.zeros_like(advantages))


def test_longer_padding_changes_nothing():
    rewards, values, mask = torch.randn(3, 5), torch.randn(3, 5), torch.arange(5)[None] < torch.tensor([[5], [3], [1]])
    wide = [torch.nn.functional.pad(tensor, (0, 4), value=1.0) for tensor in (rewards, values)]
    for narrow, padded_more in zip(gae(rewards, values, mask), gae(*wide, torch.nn.functional.pad(mask, (0, 4))), strict=True):
        assert torch.equal(narrow, padded_more[:, :5])


def test_neither_carries_gradient():
    values = torch.randn(2, 3, requires_grad=True)
    rewards, mask = torch.randn(2, 3, requires_grad=True), torch.ones(2, 3, dtype=torch.bool)
    assert not any(tensor.requires_grad for tensor in (*gae(rewards, values, mask), returns_to_go(rewards, mask)))


def test_no_time_at_all():
    empty, mask = torch.zeros(2, 0), torch.zeros(2, 0, dtype=torch.bool)
    assert all(tensor.shape == (2, 0) for tensor in (*gae(empty, empty, mask), returns_to_go(empty, mask)))


def test_shapes_do_not_broadcast(as_in_production):
    mask = torch.ones(2, 3, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"values \(2, 1\)"):
        gae(torch.zeros(2, 3), torch.zeros(2, 1), mask)
    with pytest.raises(ValueError, match=r"rewards \(1, 3\)"):
        returns_to_go(torch.zeros(1, 3), mask)
    with pytest.raises(ValueError, match=r"groups \(4,\)"):
        leave_one_out(torch.zeros(3), torch.zeros(4, dtype=torch.long))
    with pytest.raises(ValueError, match=r"groups \(4,\)"):
        group_relative(torch.zeros(3), torch.zeros(4, dtype=torch.long))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(number, st.integers(0, 3), st.booleans()), min_size=1, max_size=10))
def test_leave_one_out_is_the_mean_of_the_others(rows):
    scores = torch.tensor([s if known else math.nan for s, _, known in rows], dtype=torch.float64)
    groups, known = torch.tensor([g for _, g, _ in rows]), torch.tensor([k for *_, k in rows])
    baseline = leave_one_out(scores, groups, known)
    for i, (_, group, _) in enumerate(rows):
        if not known[i]:
            continue
        others = [s for j, (s, g, k) in enumerate(rows) if j != i and g == group and k]
        assert baseline[i].item() == pytest.approx(sum(others) / len(others) if others else scores[i].item(), abs=1e-9)


def test_group_relative_by_hand():
    scores, groups = torch.tensor([1.0, 5.0, 9.0, 2.0, 2.0, 7.0]), torch.tensor([0, 0, 1, 0, 1, 1])
    known = torch.tensor([True, True, True, True, True, False])
    plain = group_relative(scores, groups, known, scale=False)
    # group 0: mean 8/3; group 1: 9 and 2, mean 5.5, the 7 is not known
    assert plain.tolist() == pytest.approx([1 - 8 / 3, 5 - 8 / 3, 3.5, 2 - 8 / 3, -3.5, 0.0])
    scaled = group_relative(scores, groups, known)
    deviations = [statistics.stdev([1.0, 5.0, 2.0]), statistics.stdev([9.0, 2.0])]
    expected = [a / (deviations[g] + 1e-4) for a, g in zip(plain.tolist(), groups.tolist(), strict=True)]
    assert scaled.tolist() == pytest.approx(expected, abs=1e-6)
    assert group_relative(torch.tensor([4.0]), torch.tensor([0])).tolist() == [0.0]
