"""The policy and value losses: hand numbers, loops over tokens, and what must not change them."""

import math

import pytest
import torch

from tether.algorithms.policy_losses import (
    PolicyDiagnostics,
    cispo_loss,
    entropy_bonus,
    importance_weights,
    ppo_clip_loss,
    reinforce_loss,
    value_loss,
)

YES = torch.ones(1, dtype=torch.bool)


def one_token(
    ratio: float,
    advantage: float,
    clip_range: float = 0.2,
) -> tuple[float, float, PolicyDiagnostics]:
    """Loss, its derivative with respect to the log-probability, and the diagnostics of a single
    token.
    """
    logprobs = torch.tensor([math.log(ratio) - 2.0], dtype=torch.float64, requires_grad=True)
    old, advantages = (
        torch.tensor([-2.0], dtype=torch.float64),
        torch.tensor([advantage], dtype=torch.float64),
    )
    loss, diagnostics = ppo_clip_loss(
        logprobs,
        old,
        advantages,
        YES,
        clip_range=clip_range,
        denominator=1,
    )
    loss.backward()
    return loss.item(), logprobs.grad.item(), diagnostics


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient", "clipped"),
    [
        (1.0, 0.4, -0.4, -0.4, 0.0),
        (1.1, 0.4, -0.44, -0.44, 0.0),
        (1.5, 0.4, -0.48, 0.0, 1.0),  # good, and already likelier: held at 1.2 * 0.4
        (0.6, 0.4, -0.24, -0.24, 0.0),  # good, but less likely: pulled back with full force
        (0.6, -0.3, 0.24, 0.0, 1.0),  # bad, and already less likely: held at 0.8 * 0.3
        (1.5, -0.3, 0.45, 0.45, 0.0),  # bad, but likelier: pushed down with full force
        (0.9, -0.3, 0.27, 0.27, 0.0),
        (1.5, 0.0, 0.0, 0.0, 0.0),
    ],
)
def test_each_piece_by_hand(ratio, advantage, loss, gradient, clipped):
    got_loss, got_gradient, diagnostics = one_token(ratio, advantage)
    assert got_loss == pytest.approx(loss, abs=1e-12)
    assert got_gradient == pytest.approx(gradient, abs=1e-12)
    assert diagnostics.clip_fraction.item() == clipped
    assert diagnostics.ratio_max.item() == pytest.approx(ratio)
    assert diagnostics.ratio_min.item() == pytest.approx(ratio)
    # KL(old || new) by k3: (ratio - 1) - log ratio, the tokens being the old policy's.
    assert diagnostics.approximate_kl.item() == pytest.approx(
        ratio - 1 - math.log(ratio),
        abs=1e-12,
    )


def batch(seed=0, rows=4, time=6):
    generator = torch.Generator().manual_seed(seed)
    logprobs, old, advantages, values, old_values, returns = torch.randn(
        6,
        rows,
        time,
        generator=generator,
        dtype=torch.float64,
    )
    mask = torch.arange(time)[None] < torch.tensor([6, 3, 1, 0])[:rows, None]
    return logprobs, old, advantages, values, old_values, returns, mask


def losses(logprobs, old, advantages, values, old_values, returns, mask, denominator):
    """The three losses as one, and the gradients with respect to the log-probabilities and the
    values.
    """
    logprobs, values = logprobs.clone().requires_grad_(), values.clone().requires_grad_()
    policy, diagnostics = ppo_clip_loss(
        logprobs,
        old,
        advantages,
        mask,
        clip_range=0.2,
        denominator=denominator,
    )
    value, value_clipped = value_loss(
        values,
        old_values,
        returns,
        mask,
        clip_range=0.2,
        denominator=denominator,
    )
    bonus = entropy_bonus(-logprobs, mask, denominator=denominator)
    total = policy + 0.5 * value - 0.01 * bonus
    gradients = torch.autograd.grad(total, (logprobs, values))
    return (
        total.detach(),
        gradients,
        (diagnostics.clip_fraction, diagnostics.approximate_kl, value_clipped),
    )


def test_a_batch_is_the_sum_over_its_tokens():
    logprobs, old, advantages, *_, mask = batch()
    loss, diagnostics = ppo_clip_loss(
        logprobs,
        old,
        advantages,
        mask,
        clip_range=0.2,
        denominator=7.0,
    )
    ratios, total, clipped, kl = [], 0.0, 0, 0.0
    for row, column in mask.nonzero().tolist():
        ratio = math.exp(logprobs[row, column].item() - old[row, column].item())
        advantage = advantages[row, column].item()
        held = min(max(ratio, 0.8), 1.2)
        ratios.append(ratio)
        total -= min(ratio * advantage, held * advantage)
        clipped += held * advantage < ratio * advantage
        kl += ratio - 1 - math.log(ratio)
    assert len(ratios) == 10
    assert 0 < clipped < 10
    assert loss.item() == pytest.approx(total / 7)
    assert diagnostics.clip_fraction.item() == pytest.approx(clipped / 7)
    assert diagnostics.approximate_kl.item() == pytest.approx(kl / 7)
    assert diagnostics.ratio_max.item() == pytest.approx(max(ratios))
    assert diagnostics.ratio_min.item() == pytest.approx(min(ratios))
    assert not any(tensor.requires_grad for tensor in diagnostics)


def test_on_policy_it_is_the_vanilla_policy_gradient():
    """At ratio 1 the gradient is that of −Σ A log π: through a softmax, to the logits."""
    logits = torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True)
    tokens, advantages = torch.randint(0, 5, (2, 3, 1)), torch.randn(2, 3, dtype=torch.float64)
    mask = torch.tensor([[True, True, True], [True, False, False]])
    logprobs = logits.log_softmax(-1).gather(-1, tokens).squeeze(-1)
    loss, diagnostics = ppo_clip_loss(
        logprobs,
        logprobs.detach(),
        advantages,
        mask,
        clip_range=0.2,
        denominator=4,
    )
    (ours,) = torch.autograd.grad(loss, logits, retain_graph=True)
    (vanilla,) = torch.autograd.grad(-(advantages * logprobs)[mask].sum() / 4, logits)
    torch.testing.assert_close(ours, vanilla)
    assert diagnostics.clip_fraction.item() == 0
    assert diagnostics.ratio_max.item() == diagnostics.ratio_min.item() == 1
    assert diagnostics.approximate_kl.item() == 0


@pytest.mark.parametrize("splits", [[1, 3], [2, 2], [1, 1, 1, 1]])
@pytest.mark.parametrize("as_tensor", [False, True])
def test_micro_batches_add_up_to_the_batch(splits, as_tensor):
    tensors = batch()
    denominator = tensors[-1].sum() if as_tensor else int(tensors[-1].sum())
    whole, whole_gradients, whole_diagnostics = losses(*tensors, denominator)
    parts = [
        losses(*part, denominator)
        for part in zip(*(tensor.split(splits) for tensor in tensors), strict=True)
    ]
    torch.testing.assert_close(sum(part[0] for part in parts), whole)
    for index in range(2):
        torch.testing.assert_close(
            torch.cat([part[1][index] for part in parts]),
            whole_gradients[index],
        )
    for index in range(3):
        torch.testing.assert_close(sum(part[2][index] for part in parts), whole_diagnostics[index])


def test_packed_rows_give_the_same_loss():
    tensors = batch()
    mask = tensors[-1]
    whole, whole_gradients, _ = losses(*tensors, 10)
    packed, packed_gradients, _ = losses(*(tensor[mask] for tensor in tensors), 10)
    torch.testing.assert_close(packed, whole)
    for ours, theirs in zip(packed_gradients, whole_gradients, strict=True):
        torch.testing.assert_close(ours, theirs[mask])


@pytest.mark.parametrize("garbage", [math.inf, -math.inf, math.nan, 1e300])
def test_padding_may_hold_anything(garbage):
    *tensors, mask = batch()
    clean, clean_gradients, clean_diagnostics = losses(*tensors, mask, 10)
    spoiled = [torch.where(mask, tensor, garbage) for tensor in tensors]
    total, gradients, diagnostics = losses(*spoiled, mask, 10)
    assert torch.equal(total, clean)
    assert all(torch.equal(a, b) for a, b in zip(diagnostics, clean_diagnostics, strict=True))
    for ours, theirs in zip(gradients, clean_gradients, strict=True):
        assert torch.equal(ours, theirs)
        assert (ours[~mask] == 0).all()


def test_only_the_trained_tensors_get_gradient():
    *tensors, mask = batch()
    tensors = [tensor.requires_grad_() for tensor in tensors]
    logprobs, old, advantages, values, old_values, returns = tensors
    policy, _ = ppo_clip_loss(logprobs, old, advantages, mask, clip_range=0.2, denominator=1)
    value, value_clipped = value_loss(
        values,
        old_values,
        returns,
        mask,
        clip_range=0.2,
        denominator=1,
    )
    (policy + value).backward()
    assert [tensor.grad is not None for tensor in tensors] == [
        True,
        False,
        False,
        True,
        False,
        False,
    ]
    assert not value_clipped.requires_grad


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_an_exploding_ratio_stays_finite(advantage):
    logprobs = torch.tensor([-1.0], requires_grad=True)
    loss, diagnostics = ppo_clip_loss(
        logprobs,
        torch.tensor([-200.0]),
        torch.tensor([advantage]),
        YES,
        clip_range=0.2,
        denominator=1,
    )
    loss.backward()
    assert math.isfinite(loss.item())
    assert math.isfinite(logprobs.grad.item())
    assert diagnostics.ratio_max.item() > 1e8


def test_the_extreme_ratios_are_of_what_counts():
    logprobs, mask = torch.tensor([[-1.5, -1.25, -1.0]]), torch.tensor([[True, True, False]])

    def extremes(mask, shift):
        arguments = (torch.full((1, 3), -1.0), torch.ones(1, 3), mask)
        diagnostics = ppo_clip_loss(logprobs + shift, *arguments, clip_range=0.2, denominator=1)[1]
        return diagnostics.ratio_min.item(), diagnostics.ratio_max.item()

    assert extremes(mask, 0.0) == pytest.approx((math.exp(-0.5), math.exp(-0.25)))
    assert extremes(mask, 1.0) == pytest.approx((math.exp(0.5), math.exp(0.75)))
    # nothing yet, for max and min over micro-batches
    assert extremes(torch.zeros_like(mask), 0.0) == (math.inf, -math.inf)


def test_nothing_that_counts():
    *tensors, mask = batch()
    total, gradients, diagnostics = losses(*tensors, torch.zeros_like(mask), 10)
    assert total.item() == 0
    assert all((gradient == 0).all() for gradient in gradients)
    assert all(diagnostic.item() == 0 for diagnostic in diagnostics)


@pytest.mark.parametrize(
    ("value", "loss", "gradient", "clipped"),
    # The old value is 1, the return 2, the clip range 0.2: the clipped value lies in [0.8, 1.2].
    [
        (1.1, 0.405, -0.9, 0.0),  # inside: (1.1 - 2)² / 2
        # moved towards the return further than allowed: (1.2 - 2)² / 2, no pull
        (1.5, 0.32, 0.0, 1.0),
        (0.5, 1.125, -1.5, 0.0),  # moved away: the worse of both, (0.5 - 2)² / 2, with full pull
        (4.0, 2.0, 2.0, 0.0),  # far past the return: (4 - 2)² / 2 is worse than the clipped one
    ],
)
def test_value_loss_by_hand(value, loss, gradient, clipped):
    values = torch.tensor([value], dtype=torch.float64, requires_grad=True)
    old, returns = (
        torch.tensor([1.0], dtype=torch.float64),
        torch.tensor([2.0], dtype=torch.float64),
    )
    got, got_clipped = value_loss(values, old, returns, YES, clip_range=0.2, denominator=1)
    got.backward()
    assert got.item() == pytest.approx(loss)
    assert values.grad.item() == pytest.approx(gradient)
    assert got_clipped.item() == clipped


def test_value_loss_without_clipping_is_half_the_squared_error():
    _, _, _, values, old_values, returns, mask = batch()
    got, clipped = value_loss(
        values.requires_grad_(),
        old_values,
        returns,
        mask,
        clip_range=None,
        denominator=4,
    )
    expected = (
        sum(
            (v - r) ** 2 for v, r in zip(values[mask].tolist(), returns[mask].tolist(), strict=True)
        )
        / 8
    )
    assert got.item() == pytest.approx(expected)
    assert clipped.item() == 0
    (gradient,) = torch.autograd.grad(got, values)
    torch.testing.assert_close(gradient, torch.where(mask, values - returns, 0).detach() / 4)


def test_rounding_is_not_counted_as_value_clipping():
    generator = torch.Generator().manual_seed(0)
    # Drawn apart: were the values made as old + change, the change would come back from them
    # without rounding.
    values, old = 0.09 * (2 * torch.rand(2, 5000, generator=generator) - 1)
    returns, mask = torch.randn(5000, generator=generator), torch.ones(5000, dtype=torch.bool)
    assert (old + (values - old) != values).any()
    assert value_loss(values, old, returns, mask, clip_range=0.2, denominator=5000)[1].item() == 0


def test_entropy_bonus_by_hand():
    entropy, mask = torch.tensor([[1.0, 2.0, math.nan]]), torch.tensor([[True, True, False]])
    assert entropy_bonus(entropy, mask, denominator=4).item() == 0.75


@pytest.mark.parametrize("clip_range", [0.0, -0.2, math.nan])
def test_refuses_a_clip_range_without_effect(clip_range):
    tensors = torch.zeros(3, 1)
    with pytest.raises(ValueError, match="clip_range must be positive"):
        ppo_clip_loss(*tensors, YES, clip_range=clip_range, denominator=1)
    with pytest.raises(ValueError, match="clip_range must be positive"):
        value_loss(*tensors, YES, clip_range=clip_range, denominator=1)


def test_shapes_do_not_broadcast(as_in_production):
    wide, narrow, mask = torch.zeros(2, 3), torch.zeros(2, 1), torch.ones(2, 3, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"advantages \(2, 1\)"):
        ppo_clip_loss(wide, wide, narrow, mask, clip_range=0.2, denominator=1)
    with pytest.raises(ValueError, match=r"returns \(2, 1\)"):
        value_loss(wide, wide, narrow, mask, clip_range=None, denominator=1)
    with pytest.raises(ValueError, match="equal shapes"):
        entropy_bonus(narrow, mask, denominator=1)


def test_reinforce_by_enumeration_is_the_gradient_of_the_expected_reward():
    """Three actions, each counted with its probability: exactly the derivative of sum pi r,
    whatever the baseline.
    """
    logits = torch.tensor([0.2, -0.5, 1.0], dtype=torch.float64, requires_grad=True)
    rewards = torch.tensor([1.0, 3.0, -2.0], dtype=torch.float64)
    (exact,) = torch.autograd.grad((logits.softmax(0) * rewards).sum(), logits)
    for baseline in (0.0, 5.0):
        logprobs = logits.log_softmax(0)
        weighted = logprobs.detach().exp() * (rewards - baseline)
        loss = reinforce_loss(logprobs, weighted, torch.ones(3, dtype=torch.bool), denominator=1)
        (gradient,) = torch.autograd.grad(loss, logits)
        torch.testing.assert_close(-gradient, exact)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        (4.0, -1.0, 3.0, 0.0),  # bad and far likelier: without the bound the loss is 4
        (2.0, -1.0, 2.0, 2.0),
        (0.5, -1.0, 0.8, 0.0),
        (4.0, 1.0, -1.2, 0.0),  # a good token knows no second bound
    ],
)
def test_dual_clip_by_hand(ratio, advantage, loss, gradient):
    logprobs = torch.tensor([math.log(ratio)], dtype=torch.float64, requires_grad=True)
    old, advantages = (
        torch.zeros(1, dtype=torch.float64),
        torch.tensor([advantage], dtype=torch.float64),
    )
    got, diagnostics = ppo_clip_loss(
        logprobs,
        old,
        advantages,
        YES,
        clip_range=0.2,
        dual_clip=3.0,
        denominator=1,
    )
    got.backward()
    assert got.item() == pytest.approx(loss) and logprobs.grad.item() == pytest.approx(gradient)
    assert diagnostics.clip_fraction.item() == (gradient == 0.0)


def two_sequences():
    """Lengths 3 and 2 with different ratios; the last position of the second holds garbage."""
    logprobs = torch.tensor([[-1.0, -2.0, -0.5], [-0.7, -1.1, math.inf]], dtype=torch.float64)
    old = torch.tensor([[-1.1, -1.8, -0.6], [-0.2, -1.0, math.nan]], dtype=torch.float64)
    mask = torch.tensor([[True, True, True], [True, True, False]])
    return logprobs, old, mask


def test_a_sequence_ratio_is_the_geometric_mean_by_hand():
    logprobs, old, mask = two_sequences()
    logprobs = logprobs.masked_fill(~mask, 0.0).requires_grad_()
    advantages = torch.tensor([[2.0] * 3, [-1.0] * 3], dtype=torch.float64)
    share = torch.tensor([[1 / 3] * 3, [1 / 2] * 3], dtype=torch.float64)
    loss, _ = ppo_clip_loss(
        logprobs,
        old,
        advantages,
        mask,
        clip_range=10.0,
        sequence_ratio=True,
        weights=share,
        denominator=2,
    )
    first, second = math.exp((0.1 - 0.2 + 0.1) / 3), math.exp((-0.5 - 0.1) / 2)
    assert loss.item() == pytest.approx((-2.0 * first + 1.0 * second) / 2)
    loss.backward()
    expected = torch.tensor(
        [[-2.0 * first / 6] * 3, [second / 4, second / 4, 0.0]],
        dtype=torch.float64,
    )
    torch.testing.assert_close(logprobs.grad, expected)


def test_on_policy_a_sequence_ratio_and_token_ratios_are_one():
    """GSPO is GRPO with sequence weights as long as nothing has moved."""
    logprobs, _, mask = two_sequences()
    advantages = torch.tensor([[2.0] * 3, [-1.0] * 3], dtype=torch.float64)
    share = torch.tensor([[1 / 3] * 3, [1 / 2] * 3], dtype=torch.float64)
    gradients = []
    for sequence in (True, False):
        leaf = logprobs.masked_fill(~mask, 0.0).requires_grad_()
        loss, _ = ppo_clip_loss(
            leaf,
            leaf.detach(),
            advantages,
            mask,
            clip_range=3e-4,
            sequence_ratio=sequence,
            weights=share,
            denominator=2,
        )
        gradients.append(torch.autograd.grad(loss, leaf)[0])
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize(("ratio", "advantage"), [(0.3, 1.0), (1.0, -2.0), (9.0, 1.0), (9.0, -1.0)])
def test_cispo_keeps_every_gradient_and_caps_its_weight(ratio, advantage):
    logprobs = torch.tensor([math.log(ratio) - 1.0], dtype=torch.float64, requires_grad=True)
    old, advantages = (
        torch.tensor([-1.0], dtype=torch.float64),
        torch.tensor([advantage], dtype=torch.float64),
    )
    loss, diagnostics = cispo_loss(
        logprobs,
        old,
        advantages,
        YES,
        clip_range_high=4.0,
        denominator=1,
    )
    loss.backward()
    assert logprobs.grad.item() == pytest.approx(-advantage * min(ratio, 5.0))
    assert diagnostics.clip_fraction.item() == (ratio > 5.0)


def test_importance_weights_by_hand():
    learner = torch.tensor(
        [math.log(r) for r in (0.2, 0.6, 1.0, 1.9, 3.0)] + [math.nan],
        dtype=torch.float64,
    )
    mask = torch.tensor([True] * 5 + [False])
    engine = torch.zeros(6, dtype=torch.float64)
    capped = importance_weights(learner, engine, mask, cap=2.0)
    torch.testing.assert_close(
        capped,
        torch.tensor([0.2, 0.6, 1.0, 1.9, 2.0, 0.0], dtype=torch.float64),
    )
    masked = importance_weights(learner, engine, mask, cap=2.0, truncate=False)
    torch.testing.assert_close(
        masked,
        torch.tensor([0.0, 0.6, 1.0, 1.9, 0.0, 0.0], dtype=torch.float64),
    )


def test_importance_weights_make_an_engines_samples_the_learners():
    """By enumeration: the weighted gradient over the engine's tokens is the gradient under the
    learner's own distribution.
    """
    logits = torch.tensor([0.2, -0.5, 1.0], dtype=torch.float64, requires_grad=True)
    engine = torch.tensor([0.4, -0.3, 0.7], dtype=torch.float64).log_softmax(0)
    rewards, mask = (
        torch.tensor([1.0, 3.0, -2.0], dtype=torch.float64),
        torch.ones(3, dtype=torch.bool),
    )
    (exact,) = torch.autograd.grad((logits.softmax(0) * rewards).sum(), logits)
    logprobs = logits.log_softmax(0)
    weights = importance_weights(logprobs.detach(), engine, mask, cap=100.0)
    loss = reinforce_loss(logprobs, engine.exp() * rewards, mask, weights=weights, denominator=1)
    torch.testing.assert_close(-torch.autograd.grad(loss, logits)[0], exact)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda x, m: ppo_clip_loss(x, x, x, m, clip_range=0.2, dual_clip=1.0, denominator=1),
            "dual_clip must be above 1",
        ),
        (
            lambda x, m: cispo_loss(x, x, x, m, clip_range_high=0.0, denominator=1),
            "clip_range_high must be positive",
        ),
        (lambda x, m: importance_weights(x, x, m, cap=0.5), "cap must be at least 1"),
    ],
)
def test_refusals(call, message):
    with pytest.raises(ValueError, match=message):
        call(torch.zeros(2), torch.ones(2, dtype=torch.bool))


def test_the_walk_through_of_a_single_logit():
    """One action of probability sigmoid(z), advantage 1, rate 0.5, as tutorials print it. The
    objective is flat beyond 1.2.

    The first step goes from z = 0 to z = 0.5, where the ratio is sigmoid(0.5) / 0.5 = 1.2449:
    already past the clip, so that the printed 1.082 and 1.170 follow from no step of that rule (the
    gradient's own step, to z = 0.25, gives 1.1244).
    """
    z = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    old = z.detach().sigmoid().log()

    def surrogate(at):
        return -ppo_clip_loss(
            at.sigmoid().log(),
            old,
            torch.ones(1, dtype=torch.float64),
            YES,
            clip_range=0.2,
            denominator=1,
        )[0]

    (slope,) = torch.autograd.grad(surrogate(z), z)
    assert slope.item() == pytest.approx(0.5)
    stepped = torch.full((1,), 0.5, dtype=torch.float64, requires_grad=True)
    assert (stepped.sigmoid() / 0.5).item() == pytest.approx(1.2449, abs=5e-5)
    assert surrogate(stepped).item() == pytest.approx(1.2)
    assert torch.autograd.grad(surrogate(stepped), stepped)[0].item() == 0.0
    assert (torch.tensor(0.5 * 0.5).sigmoid() / 0.5).item() == pytest.approx(1.1244, abs=5e-5)
