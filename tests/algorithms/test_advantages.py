"""Returns and GAE against the explicit double sums of the papers, row by row, on ragged batches."""

import itertools
import math
import statistics
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tether.algorithms.advantages import (
    gae,
    group_relative,
    leave_one_out_baseline,
    overlong_penalty,
    returns_to_go,
    running_mean,
    zero_signal,
)

number = st.floats(-10, 10)
episode = st.lists(st.tuples(number, number), min_size=0, max_size=7)
ragged = st.lists(episode, min_size=1, max_size=4)
discount = st.sampled_from([0.0, 0.3, 0.9, 0.95, 1.0])


def padded(episodes, garbage=math.nan):
    """Episodes of (reward, value) -> rewards, values and mask, right-padded with garbage."""
    time = max(map(len, episodes)) + 1
    rewards, values = (
        torch.full((len(episodes), time), garbage, dtype=torch.float64) for _ in range(2)
    )
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
        expected = [
            sum(gamma ** (k - t) * steps[k][0] for k in range(t, len(steps)))
            for t in range(len(steps))
        ]
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
        expected = [
            sum((gamma * lam) ** ahead * errors[t + ahead] for ahead in range(length - t))
            for t in range(length)
        ]
        assert advantages[row, :length].tolist() == pytest.approx(expected, abs=1e-8)
        assert returns[row, :length].tolist() == pytest.approx(
            [a + v for a, (_, v) in zip(expected, steps, strict=True)],
            abs=1e-8,
        )
        assert (advantages[row, length:] == 0).all()
        assert (returns[row, length:] == 0).all()


def test_gae_by_hand():
    # Rewards 0, 0, 1; values .5, .4, .2; γ = 1, λ = 1/2. δ = -.1, -.2, .8; A_2 = .8, A_1 = -.2 +
    # .4, A_0 = -.1 + .1.
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
    torch.testing.assert_close(
        advantages,
        torch.where(mask, expected - values, 0),
        atol=1e-9,
        rtol=0,
    )


def test_a_perfect_value_function_leaves_no_advantage():
    rewards, _, mask = padded([[(1.0, 0.0), (2.0, 0.0), (4.0, 0.0)], [(3.0, 0.0)]])
    advantages, _ = gae(rewards, returns_to_go(rewards, mask, 0.9), mask, 0.9, 0.95)
    torch.testing.assert_close(advantages, torch.zeros_like(advantages))


def test_longer_padding_changes_nothing():
    rewards, values, mask = (
        torch.randn(3, 5),
        torch.randn(3, 5),
        torch.arange(5)[None] < torch.tensor([[5], [3], [1]]),
    )
    wide = [torch.nn.functional.pad(tensor, (0, 4), value=1.0) for tensor in (rewards, values)]
    for narrow, padded_more in zip(
        gae(rewards, values, mask),
        gae(*wide, torch.nn.functional.pad(mask, (0, 4))),
        strict=True,
    ):
        assert torch.equal(narrow, padded_more[:, :5])


def test_neither_carries_gradient():
    values = torch.randn(2, 3, requires_grad=True)
    rewards, mask = torch.randn(2, 3, requires_grad=True), torch.ones(2, 3, dtype=torch.bool)
    assert not any(
        tensor.requires_grad
        for tensor in (*gae(rewards, values, mask), returns_to_go(rewards, mask))
    )


def test_no_time_at_all():
    empty, mask = torch.zeros(2, 0), torch.zeros(2, 0, dtype=torch.bool)
    assert all(
        tensor.shape == (2, 0) for tensor in (*gae(empty, empty, mask), returns_to_go(empty, mask))
    )


def test_shapes_do_not_broadcast(as_in_production):
    mask = torch.ones(2, 3, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"values \(2, 1\)"):
        gae(torch.zeros(2, 3), torch.zeros(2, 1), mask)
    with pytest.raises(ValueError, match=r"rewards \(1, 3\)"):
        returns_to_go(torch.zeros(1, 3), mask)
    with pytest.raises(ValueError, match=r"groups \(4,\)"):
        leave_one_out_baseline(torch.zeros(3), torch.zeros(4, dtype=torch.long))
    with pytest.raises(ValueError, match=r"groups \(4,\)"):
        group_relative(torch.zeros(3), torch.zeros(4, dtype=torch.long))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(number, st.integers(0, 3), st.booleans()), min_size=1, max_size=10))
def test_leave_one_out_is_the_mean_of_the_others(rows):
    scores = torch.tensor([s if known else math.nan for s, _, known in rows], dtype=torch.float64)
    groups, known = torch.tensor([g for _, g, _ in rows]), torch.tensor([k for *_, k in rows])
    baseline = leave_one_out_baseline(scores, groups, known)
    for i, (_, group, _) in enumerate(rows):
        if not known[i]:
            continue
        others = [s for j, (s, g, k) in enumerate(rows) if j != i and g == group and k]
        assert baseline[i].item() == pytest.approx(
            sum(others) / len(others) if others else scores[i].item(),
            abs=1e-9,
        )


def test_group_relative_by_hand():
    scores, groups = torch.tensor([1.0, 5.0, 9.0, 2.0, 2.0, 7.0]), torch.tensor([0, 0, 1, 0, 1, 1])
    known = torch.tensor([True, True, True, True, True, False])
    plain = group_relative(scores, groups, known, scale=False)
    # group 0: mean 8/3; group 1: 9 and 2, mean 5.5, the 7 is not known
    assert plain.tolist() == pytest.approx([1 - 8 / 3, 5 - 8 / 3, 3.5, 2 - 8 / 3, -3.5, 0.0])
    scaled = group_relative(scores, groups, known)
    deviations = [statistics.stdev([1.0, 5.0, 2.0]), statistics.stdev([9.0, 2.0])]
    expected = [
        a / (deviations[g] + 1e-4) for a, g in zip(plain.tolist(), groups.tolist(), strict=True)
    ]
    assert scaled.tolist() == pytest.approx(expected, abs=1e-6)
    assert group_relative(torch.tensor([4.0]), torch.tensor([0])).tolist() == [0.0]


@pytest.mark.audit
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_scores_have_no_advantage_to_the_last_bit(dtype):
    """Thirds, tenths and large odd numbers, whose sums no float holds."""
    for value in (1 / 3, 0.1, 100.1, 1000.1, -4567.89, 1e6 + 1 / 7):
        for size in (2, 3, 7, 8, 12, 64):
            scores, groups = (
                torch.full((size,), value, dtype=dtype),
                torch.zeros(size, dtype=torch.long),
            )
            assert (
                group_relative(scores, groups).abs().max()
                == 0
                == group_relative(scores, groups, scale=False).abs().max()
            )
            assert torch.equal(leave_one_out_baseline(scores, groups), scores)


@pytest.mark.audit
def test_small_differences_of_large_scores_against_fractions():
    """Scores of float32, exact as fractions: 4096 + k/2048 at the limit of their digits."""
    steps = [0, 1, 5, 2, 0, 7, 3]
    scores, groups = (
        torch.tensor([4096 + k / 2048 for k in steps], dtype=torch.float32),
        torch.zeros(7, dtype=torch.long),
    )
    exact = [Fraction(4096) + Fraction(k, 2048) for k in steps]
    centre = sum(exact) / 7
    plain = [float(s - centre) for s in exact]
    assert group_relative(scores, groups, scale=False).tolist() == pytest.approx(plain, rel=1e-6)
    spread = float(sum((s - centre) ** 2 for s in exact) / 6) ** 0.5
    assert group_relative(scores, groups).tolist() == pytest.approx(
        [d / (spread + 1e-4) for d in plain],
        rel=1e-6,
    )


def test_the_group_of_the_textbook():
    """[.8 .2 .9 .1]: mean .5, deviations .3 -.3 .4 -.4; sample deviation sqrt(.5/3) = .4082,
    population .3536, never .2217.
    """
    scores, groups = (
        torch.tensor([0.8, 0.2, 0.9, 0.1], dtype=torch.float64),
        torch.zeros(4, dtype=torch.long),
    )
    got = group_relative(scores, groups)
    expected = [d / (math.sqrt(0.5 / 3) + 1e-4) for d in (0.3, -0.3, 0.4, -0.4)]
    assert got.tolist() == pytest.approx(expected, rel=1e-12)
    assert [round(v, 3) for v in got.tolist()] == [0.735, -0.735, 0.98, -0.98]
    assert [round(v, 12) for v in group_relative(scores, groups, scale=False).tolist()] == [
        0.3,
        -0.3,
        0.4,
        -0.4,
    ]


def test_leave_one_out_is_the_centred_score_stretched():
    """s_i − mean of the others = G/(G−1) · (s_i − mean of all)."""
    scores = torch.tensor([0.8, 0.2, 0.9, 0.1, -3.0, 5.0, 2.0, 7.0], dtype=torch.float64)
    groups = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])
    ours = scores - leave_one_out_baseline(scores, groups)
    torch.testing.assert_close(ours, 4 / 3 * group_relative(scores, groups, scale=False))


def test_groups_without_signal():
    scores = torch.tensor([1.0, 1.0, 1.0, 0.0, 2.0, 5.0, 7.0, 9.0])
    groups = torch.tensor([0, 0, 1, 1, 2, 2, 3, 3])
    known = torch.tensor([True, True, True, True, True, False, False, False])
    assert zero_signal(scores, groups, known).tolist() == [
        True,
        True,
        False,
        False,
        True,
        True,
        True,
        True,
    ]


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_the_share_of_silent_groups_follows_the_rate(rate):
    """p^G + (1−p)^G, by enumeration of all groups of four with rewards 0 and 1."""
    silent = 0.0
    for outcome in itertools.product([0.0, 1.0], repeat=4):
        chance = math.prod(rate if s else 1 - rate for s in outcome)
        silent += (
            chance * zero_signal(torch.tensor(outcome), torch.zeros(4, dtype=torch.long))[0].item()
        )
    assert silent == pytest.approx(rate**4 + (1 - rate) ** 4)


def test_overlong_penalty_by_hand():
    lengths = torch.tensor([1, 12, 13, 14, 16])
    assert overlong_penalty(lengths, 16, 4).tolist() == pytest.approx([0.0, 0.0, -0.25, -0.5, -1.0])
    for buffer in (0, 17):
        with pytest.raises(ValueError, match="buffer must lie"):
            overlong_penalty(lengths, 16, buffer)


def test_running_mean_is_the_mean_until_the_window_is_full():
    mean, count, seen = 0.0, 0, []
    for batch in ([1.0, 2.0], [6.0], [0.0, 4.0, 4.0]):
        mean, count = running_mean(mean, count, batch, 100)
        seen += batch
        assert mean == pytest.approx(sum(seen) / len(seen)) and count == len(seen)
    assert running_mean(2.0, 10, [5.0, 5.0], 10) == (pytest.approx(2.0 + 6.0 / 12), 10)
    assert running_mean(2.0, 10, [], 10) == (2.0, 10)
    with pytest.raises(ValueError, match="window"):
        running_mean(0.0, 0, [1.0], 0)


def test_a_baseline_spares_variance_and_moves_no_mean():
    """Exact over a bandit: E[A ∇log π] is the same for every baseline, and its variance least near
    the expected reward.
    """
    logits = torch.tensor([0.3, -0.2, 0.8, 0.0], dtype=torch.float64)
    chances, rewards = logits.softmax(0), torch.tensor([4.0, 5.0, 6.0, 3.0], dtype=torch.float64)
    scores = torch.eye(4, dtype=torch.float64) - chances  # row a: the gradient of log π(a)
    expected_reward = float(chances @ rewards)
    spread = {}
    for baseline in (0.0, expected_reward):
        samples = (rewards - baseline)[:, None] * scores
        mean = chances @ samples
        torch.testing.assert_close(mean, chances * (rewards - expected_reward))
        spread[baseline] = float(chances @ (samples - mean).square().sum(-1))
    assert spread[expected_reward] < 0.1 * spread[0.0]
