"""Step losses and step rewards against sums written out in plain Python, on ragged batches padded
with garbage.
"""

import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tether.algorithms.advantages import group_relative, returns_to_go
from tether.algorithms.process import (
    aggregate_steps,
    place_step_rewards,
    right_probabilities,
    step_cross_entropy,
    weakest_step,
)

logit = st.floats(-8, 8)
label = st.one_of(st.none(), st.sampled_from([0.0, 1.0]), st.floats(0, 1))
# A response: its length, and steps as (index of the last token, reward, or None where nobody judged
# it).
response = st.integers(1, 9).flatmap(
    lambda length: st.tuples(
        st.just(length),
        st.lists(
            st.tuples(st.integers(0, length - 1), st.one_of(st.none(), st.floats(-5, 5))),
            max_size=4,
            unique_by=lambda step: step[0],
        ).map(sorted),
    ),
)


def ragged(responses, garbage=math.nan):
    """Responses -> rewards, ends, known and token mask, padded on the right."""
    steps, time = max(len(s) for _, s in responses) + 1, max(length for length, _ in responses) + 1
    rewards = torch.full((len(responses), steps), garbage, dtype=torch.float64)
    ends, known = (
        torch.full((len(responses), steps), 10**6),
        torch.zeros(len(responses), steps, dtype=torch.bool),
    )
    for row, (_, found) in enumerate(responses):
        for column, (end, reward) in enumerate(found):
            ends[row, column] = end
            if reward is not None:
                rewards[row, column], known[row, column] = reward, True
    mask = torch.arange(time)[None] < torch.tensor([length for length, _ in responses])[:, None]
    return rewards, ends, known, mask


@settings(deadline=None)
@given(st.lists(st.tuples(logit, label), min_size=1, max_size=8))
def test_binary_loss_is_the_sum_of_two_logarithms(steps):
    logits = torch.tensor([z for z, _ in steps], dtype=torch.float64)
    known = torch.tensor([q is not None for _, q in steps])
    targets = torch.tensor([math.nan if q is None else q for _, q in steps], dtype=torch.float64)
    expected = 0.0
    for z, q in steps:
        if q is not None:
            right = 1 / (1 + math.exp(-z))
            expected -= q * math.log(right) + (1 - q) * math.log(1 - right)
    assert float(step_cross_entropy(logits, targets, known, denominator=7)) == pytest.approx(
        expected / 7,
        abs=1e-9,
    )
    # One logit is two classes of which the first has logit 0.
    two = torch.stack([torch.zeros_like(logits), logits], -1)
    both = torch.stack([1 - targets, targets], -1)
    assert float(step_cross_entropy(two, both, known, denominator=7)) == pytest.approx(
        expected / 7,
        abs=1e-9,
    )
    torch.testing.assert_close(right_probabilities(two), right_probabilities(logits))


def test_three_classes_by_hand():
    logits = torch.tensor([[0.0, math.log(2), math.log(5)], [1.0, 2.0, 3.0]], requires_grad=True)
    targets = torch.tensor([[0.0, 1.0, 0.0], [math.nan] * 3])
    loss = step_cross_entropy(logits, targets, torch.tensor([True, False]), denominator=1)
    assert loss.item() == pytest.approx(-math.log(2 / 8))
    assert right_probabilities(logits)[0].item() == pytest.approx(7 / 8)
    loss.backward()
    assert torch.allclose(logits.grad, torch.tensor([[1 / 8, 2 / 8 - 1, 5 / 8], [0.0, 0.0, 0.0]]))


def test_parts_add_up_to_the_whole_and_the_unjudged_get_no_gradient():
    logits, targets = torch.randn(10, requires_grad=True), torch.rand(10)
    known = torch.arange(10) % 3 > 0
    (whole,) = torch.autograd.grad(
        step_cross_entropy(logits, targets, known, denominator=6),
        logits,
    )
    parts = sum(
        step_cross_entropy(logits[p], targets[p], known[p], denominator=6)
        for p in (slice(0, 3), slice(3, 10))
    )
    torch.testing.assert_close(torch.autograd.grad(parts, logits)[0], whole)
    torch.testing.assert_close(
        whole,
        torch.where(known, (logits.sigmoid() - targets) / 6, 0).detach(),
    )


def test_aggregates_and_weakest_step_by_hand():
    nan = math.nan
    probabilities = torch.tensor(
        [[0.5, 0.2, 0.8, nan], [0.9, nan, nan, nan], [nan, 0.3, 0.3, 0.1], [nan] * 4],
    )
    known = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0], [0, 1, 1, 0], [0, 0, 0, 0]]).bool()
    expected = {
        "min": [0.2, 0.9, 0.3, nan],
        "product": [0.08, 0.9, 0.09, nan],
        "last": [0.8, 0.9, 0.3, nan],
    }
    for how, values in expected.items():
        assert aggregate_steps(probabilities, known, how).tolist() == pytest.approx(
            values,
            nan_ok=True,
        )
    assert weakest_step(probabilities, known).tolist() == [1, 0, 1, -1]
    empty = torch.zeros(2, 0)
    assert aggregate_steps(empty, empty.bool(), "last").isnan().all() and weakest_step(
        empty,
        empty.bool(),
    ).tolist() == [-1, -1]


@settings(max_examples=60, deadline=None)
@given(st.lists(response, min_size=1, max_size=4))
def test_rewards_stand_on_the_tokens_that_end_steps(responses):
    rewards, ends, known, mask = ragged(responses)
    placed = place_step_rewards(rewards, ends, known, mask)
    expected = torch.zeros(mask.shape, dtype=torch.float64)
    for row, (_, steps) in enumerate(responses):
        for end, reward in steps:
            expected[row, end] += reward or 0.0
    torch.testing.assert_close(placed, expected)


def test_two_steps_of_one_token_share_it_and_a_response_that_does_not_count_gets_nothing():
    rewards, ends = torch.tensor([[1.0, 2.0], [5.0, 5.0]]), torch.tensor([[1, 1], [0, 1]])
    mask = torch.tensor([[True, True], [False, False]])
    assert place_step_rewards(rewards, ends, torch.ones(2, 2).bool(), mask).tolist() == [
        [0.0, 3.0],
        [0.0, 0.0],
    ]


def process_advantages(rewards, ends, known, groups, mask, *, scale=True):
    """GRPO under process supervision as the stage composes it."""
    relative = torch.zeros_like(rewards)
    relative[known] = group_relative(
        rewards[known],
        groups[:, None].expand_as(known)[known],
        scale=scale,
    )
    return returns_to_go(place_step_rewards(relative, ends, known, mask), mask)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(response, st.integers(0, 2)), min_size=1, max_size=6), st.booleans())
def test_process_advantages_are_the_papers_double_sum(rows, scale):
    responses, groups = [r for r, _ in rows], [g for _, g in rows]
    rewards, ends, known, mask = ragged(responses)
    advantages = process_advantages(rewards, ends, known, torch.tensor(groups), mask, scale=scale)
    for row, (length, steps) in enumerate(responses):
        pool = [
            r
            for (_, found), g in zip(responses, groups, strict=True)
            if g == groups[row]
            for _, r in found
            if r is not None
        ]
        spread = (statistics.stdev(pool) if len(pool) > 1 else 0.0) + 1e-4 if scale else 1.0
        for token in range(mask.shape[1]):
            later = [
                (r - statistics.fmean(pool)) / spread
                for end, r in steps
                if r is not None and end >= token
            ]
            expected = sum(later) if token < length else 0.0
            assert advantages[row, token].item() == pytest.approx(expected, rel=1e-6, abs=1e-6)


def test_one_step_at_the_end_is_outcome_supervision():
    scores, groups = torch.tensor([1.0, 0.0, 0.5, 3.0]), torch.tensor([0, 0, 1, 1])
    lengths = torch.tensor([4, 2, 3, 1])
    mask = torch.arange(4)[None] < lengths[:, None]
    advantages = process_advantages(
        scores[:, None],
        lengths[:, None] - 1,
        torch.ones(4, 1).bool(),
        groups,
        mask,
    )
    torch.testing.assert_close(advantages, group_relative(scores, groups)[:, None] * mask)


def test_padding_with_more_steps_and_tokens_changes_nothing():
    rewards, ends = torch.randn(3, 2), torch.tensor([[1, 3], [0, 2], [2, 4]])
    known, mask = (
        torch.tensor([[1, 1], [1, 0], [1, 1]]).bool(),
        torch.arange(5)[None] < torch.tensor([[4], [3], [5]]),
    )
    wide = [
        torch.nn.functional.pad(x, (0, 3), value=v)
        for x, v in ((rewards, math.inf), (ends, 99), (known, False))
    ]
    narrow = process_advantages(rewards, ends, known, torch.tensor([0, 0, 1]), mask)
    more = process_advantages(*wide, torch.tensor([0, 0, 1]), torch.nn.functional.pad(mask, (0, 2)))
    assert torch.equal(narrow, more[:, :5]) and (more[:, 5:] == 0).all()


def test_shapes_do_not_broadcast(as_in_production):
    with pytest.raises(ValueError, match=r"targets \(1,\)"):
        step_cross_entropy(torch.zeros(3), torch.zeros(1), torch.ones(3).bool(), denominator=1)
    with pytest.raises(ValueError, match=r"known \(3,\)"):
        step_cross_entropy(
            torch.zeros(2, 3),
            torch.zeros(2, 3),
            torch.ones(3).bool(),
            denominator=1,
        )
    with pytest.raises(ValueError, match=r"known \(2, 1\)"):
        place_step_rewards(
            torch.zeros(2, 3),
            torch.zeros(2, 3).long(),
            torch.ones(2, 1).bool(),
            torch.ones(2, 4).bool(),
        )
