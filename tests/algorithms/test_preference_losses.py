"""Losses on comparisons and demonstrations."""

import math

import mpmath
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tether.algorithms.preference_losses import (
    bradley_terry_loss,
    centering_penalty,
    dpo_loss,
    ipo_loss,
    kto_loss,
    log1mexp,
    negative_log_likelihood,
    orpo_loss,
    robust_dpo_loss,
    simpo_loss,
)

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
    loss = bradley_terry_loss(
        tensor(math.log(3)),
        tensor(0.0),
        margin=tensor(math.log(2)),
        denominator=1,
    )
    assert loss.item() == pytest.approx(-math.log(3 / 5))
    assert (
        bradley_terry_loss(
            tensor(math.log(3)),
            tensor(0.0),
            margin=math.log(2),
            denominator=1,
        ).item()
        == loss.item()
    )


@settings(max_examples=60, deadline=None)
@given(score, score, st.floats(0, 3), st.floats(0, 1))
def test_a_soft_label_is_the_expectation_over_winners(first, second, margin, probability):
    arguments = {"margin": tensor(margin), "denominator": 1}
    soft = bradley_terry_loss(
        tensor(first),
        tensor(second),
        probability=tensor(probability),
        **arguments,
    )
    first_wins = bradley_terry_loss(tensor(first), tensor(second), **arguments)
    second_wins = bradley_terry_loss(tensor(second), tensor(first), **arguments)
    assert soft.item() == pytest.approx(
        (probability * first_wins + (1 - probability) * second_wins).item(),
        abs=1e-9,
    )
    exchanged = bradley_terry_loss(
        tensor(second),
        tensor(first),
        probability=tensor(1 - probability),
        **arguments,
    )
    assert exchanged.item() == pytest.approx(soft.item(), abs=1e-9)


@settings(max_examples=30, deadline=None)
@given(st.floats(0.05, 0.95))
def test_without_a_margin_the_soft_loss_is_least_at_the_log_odds(probability):
    """The cross-entropy is proper: its gradient vanishes where σ(d) = p."""
    difference = tensor(math.log(probability / (1 - probability))).requires_grad_()
    bradley_terry_loss(
        difference,
        tensor(0.0),
        probability=tensor(probability),
        denominator=1,
    ).backward()
    assert difference.grad.item() == pytest.approx(0.0, abs=1e-12)


def test_an_even_label_with_a_margin_pulls_to_equal_scores():
    chosen = tensor(0.0, 1.0, -1.0).requires_grad_()
    half, margin = torch.full_like(chosen, 0.5).detach(), torch.ones(3, dtype=torch.float64)
    bradley_terry_loss(
        chosen,
        torch.zeros(3, dtype=torch.float64),
        margin=margin,
        probability=half,
        denominator=1,
    ).backward()
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
    assert bradley_terry_loss(chosen + 7, rejected + 7, denominator=1).item() == pytest.approx(
        before,
    )
    assert centering_penalty(chosen, rejected, denominator=1).item() == 1.5**2 + 5.0**2
    assert centering_penalty(chosen + 7, rejected - 7, denominator=1).item() == 1.5**2 + 5.0**2
    assert centering_penalty(tensor(2.0), tensor(-2.0), denominator=1).item() == 0


def test_extreme_scores_stay_finite():
    chosen = torch.tensor([-1e4, 1e4], requires_grad=True)
    loss = bradley_terry_loss(
        chosen,
        torch.zeros(2),
        probability=torch.tensor([1.0, 0.5]),
        denominator=1,
    )
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
        pairs = bradley_terry_loss(
            chosen,
            rejected,
            margin=margin,
            probability=probability,
            denominator=7,
        )
        likelihood = negative_log_likelihood(chosen, probability > 0.3, denominator=torch.tensor(4))
        return pairs + 0.1 * centering_penalty(chosen, rejected, denominator=7) + likelihood

    tensors = (chosen, rejected, margin, probability)
    parts = [loss(*part) for part in zip(*(tensor.split(size) for tensor in tensors), strict=True)]
    torch.testing.assert_close(sum(parts), loss(*tensors))


def test_shapes_do_not_broadcast(as_in_production):
    three, one = torch.zeros(3), torch.zeros(1)
    for arguments in ({"rejected_scores": one}, {"margin": one}, {"probability": one}):
        with pytest.raises(ValueError, match="equal shapes"):
            bradley_terry_loss(
                **(
                    {"chosen_scores": three, "rejected_scores": three, "denominator": 1} | arguments
                ),
            )
    with pytest.raises(ValueError, match="equal shapes"):
        centering_penalty(three, one, denominator=1)
    with pytest.raises(ValueError, match="equal shapes"):
        negative_log_likelihood(three, torch.ones(1, dtype=torch.bool), denominator=1)


DIRECT = {
    "dpo": lambda c, r: dpo_loss(c, r, beta=0.3, denominator=1),
    "cdpo": lambda c, r: dpo_loss(c, r, beta=0.3, label_smoothing=0.1, denominator=1),
    "robust": lambda c, r: robust_dpo_loss(c, r, beta=0.3, label_smoothing=0.1, denominator=1),
    "ipo": lambda c, r: ipo_loss(c, r, beta=0.3, denominator=1),
    "simpo": lambda c, r: simpo_loss(c, r, beta=0.3, margin=0.2, denominator=1),
}


@pytest.mark.parametrize(
    ("name", "by_hand"),
    [
        ("dpo", lambda h: math.log1p(math.exp(-0.3 * h))),
        (
            "cdpo",
            lambda h: 0.9 * math.log1p(math.exp(-0.3 * h)) + 0.1 * math.log1p(math.exp(0.3 * h)),
        ),
        (
            "robust",
            lambda h: (
                (0.9 * math.log1p(math.exp(-0.3 * h)) - 0.1 * math.log1p(math.exp(0.3 * h))) / 0.8
            ),
        ),
        ("ipo", lambda h: (h - 1 / 0.6) ** 2),
        ("simpo", lambda h: math.log1p(math.exp(-0.3 * h + 0.2))),
    ],
)
def test_direct_losses_by_hand(name, by_hand):
    chosen = torch.tensor([1.0, -2.0, 0.5, 0.0], dtype=torch.float64)
    rejected = torch.tensor([-1.0, 0.5, 0.5, 3.0], dtype=torch.float64)
    expected = sum(by_hand(c - r) for c, r in zip(chosen.tolist(), rejected.tolist(), strict=True))
    assert DIRECT[name](chosen, rejected).item() == pytest.approx(expected, rel=1e-12)
    assert 4 * DIRECT[name](chosen[:1], rejected[:1]).item() != pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("name", [*DIRECT, "orpo"])
def test_every_loss_pushes_the_sides_apart(name):
    """Up with the chosen, down with the rejected, whichever is ahead (for IPO and robust DPO: short
    of their margins).
    """
    loss = DIRECT.get(name, lambda c, r: orpo_loss(c, r, denominator=1))
    for better, worse in ((-1.0, -0.4), (-0.5, -0.5), (-0.4, -1.0)):
        chosen, rejected = tensor(better).requires_grad_(), tensor(worse).requires_grad_()
        loss(chosen, rejected).backward()
        assert chosen.grad.item() < 0 < rejected.grad.item()


@pytest.mark.parametrize(
    ("ours", "plain"),
    [
        (
            lambda c, r: orpo_loss(c, r, denominator=3),
            lambda c, r: (
                -torch.log(1 / (1 + (r.exp() / (1 - r.exp())) / (c.exp() / (1 - c.exp()))))
            ),
        ),
        (
            lambda c, r: simpo_loss(c, r, beta=2.5, margin=0.7, denominator=3),
            lambda c, r: torch.log(1 + torch.exp(0.7 - 2.5 * (c - r))),
        ),
    ],
    ids=["orpo", "simpo"],
)
def test_reference_free_losses_are_their_formulas_with_gradients(ours, plain):
    sides = [tensor(-0.2, -3.0, -0.7), tensor(-0.9, -0.01, -0.7)]
    found, expected = ([side.clone().requires_grad_() for side in sides] for _ in range(2))
    ours(*found).backward()
    (plain(*expected).sum() / 3).backward()
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-9, atol=0)


@pytest.mark.parametrize("name", [*DIRECT, "orpo"])
def test_a_weight_is_a_share_of_a_pair(name):
    """A label of 0.8 as both orders, weighted: the expectation over which side is the better."""
    losses = {
        "dpo": lambda *a, **k: dpo_loss(*a, beta=0.3, **k),
        "cdpo": lambda *a, **k: dpo_loss(*a, beta=0.3, label_smoothing=0.1, **k),
        "robust": lambda *a, **k: robust_dpo_loss(*a, beta=0.3, label_smoothing=0.1, **k),
        "ipo": lambda *a, **k: ipo_loss(*a, beta=0.3, **k),
        "simpo": lambda *a, **k: simpo_loss(*a, beta=0.3, margin=0.2, **k),
        "orpo": orpo_loss,
    }
    loss, first, second = losses[name], tensor(-0.3), tensor(-1.1)
    both = loss(
        torch.cat([first, second]),
        torch.cat([second, first]),
        weights=tensor(0.8, 0.2),
        denominator=1,
    )
    expected = 0.8 * loss(first, second, denominator=1) + 0.2 * loss(second, first, denominator=1)
    assert both.item() == pytest.approx(expected.item(), rel=1e-12)
    assert both.item() != pytest.approx(loss(first, second, denominator=1).item(), rel=1e-3)


def test_robust_dpo_is_unbiased_under_flipped_labels():
    """Averaged over flips at rate e, the loss of the noisy label is the DPO loss of the clean one
    (the paper's lemma 3.1).
    """
    chosen, rejected = torch.tensor([0.7, -1.3]).double(), torch.tensor([-0.4, 0.9]).double()
    noisy = [
        robust_dpo_loss(a, b, beta=0.3, label_smoothing=0.2, denominator=1)
        for a, b in ((chosen, rejected), (rejected, chosen))
    ]
    clean = dpo_loss(chosen, rejected, beta=0.3, denominator=1)
    assert (0.8 * noisy[0] + 0.2 * noisy[1]).item() == pytest.approx(clean.item(), rel=1e-12)


def expected_loss(loss, logits, reference, preferred):
    """Sum over ordered pairs of arms of P(a beats b) times the loss of (a, b): all that infinite
    data would say.
    """
    ratios = logits.log_softmax(-1) - reference
    pairs = [(a, b) for a in range(len(logits)) for b in range(len(logits)) if a != b]
    return sum(preferred[a, b] * loss(ratios[a : a + 1], ratios[b : b + 1]) for a, b in pairs)


def optimum(loss, reference, preferred, steps=100):
    logits = reference.clone().requires_grad_()
    optimizer = torch.optim.LBFGS(
        [logits],
        lr=1,
        max_iter=steps,
        tolerance_grad=1e-14,
        tolerance_change=0,
        line_search_fn="strong_wolfe",
    )

    def closure():
        optimizer.zero_grad()
        value = expected_loss(loss, logits, reference, preferred)
        value.backward()
        return value

    optimizer.step(closure)
    return logits.detach().log_softmax(-1)


def test_dpo_recovers_the_closed_form_optimum_of_a_bandit():
    generator = torch.Generator().manual_seed(0)
    rewards, reference = torch.randn(2, 5, generator=generator, dtype=torch.float64)
    reference = reference.log_softmax(-1)
    preferred = torch.sigmoid(rewards[:, None] - rewards[None])
    found = optimum(lambda c, r: dpo_loss(c, r, beta=0.4, denominator=1), reference, preferred)
    torch.testing.assert_close(
        found,
        (reference + rewards / 0.4).log_softmax(-1),
        atol=1e-6,
        rtol=0,
    )


def test_ipo_stays_finite_where_dpo_runs_away():
    """One pair that everybody orders alike: IPO stops at h = 1/(2 beta), DPO's h grows with every
    further iteration.
    """
    reference, sure = (
        torch.zeros(2, dtype=torch.float64).log_softmax(-1),
        torch.tensor([[0.0, 1.0], [0.0, 0.0]]).double(),
    )
    ipo = optimum(lambda c, r: ipo_loss(c, r, beta=0.25, denominator=1), reference, sure)
    assert (ipo[0] - ipo[1]).item() == pytest.approx(2.0, abs=1e-6)

    def slope(loss, h):
        gap = torch.tensor([float(h)], dtype=torch.float64, requires_grad=True)
        loss(gap, torch.zeros(1, dtype=torch.float64)).backward()
        return float(gap.grad)

    assert all(
        slope(lambda c, r: dpo_loss(c, r, beta=0.25, denominator=1), h) < 0 for h in (2, 20, 200)
    )
    assert (
        slope(lambda c, r: ipo_loss(c, r, beta=0.25, denominator=1), 1.9)
        < 0
        < slope(DIRECT["ipo"], 2.1)
    )
    gaps = [
        optimum(lambda c, r: dpo_loss(c, r, beta=0.25, denominator=1), reference, sure, n)
        for n in (2, 4, 8)
    ]
    found = [(gap[0] - gap[1]).item() for gap in gaps]
    assert found[0] < found[1] < found[2] and found[2] > 20


def test_kto_by_hand():
    ratios = torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64, requires_grad=True)
    good, baseline = (
        torch.tensor([True, False, True]),
        torch.tensor(0.3, dtype=torch.float64, requires_grad=True),
    )
    loss = kto_loss(
        ratios,
        good,
        baseline,
        beta=0.2,
        desirable_weight=1.5,
        undesirable_weight=0.5,
        denominator=3,
    )
    squash = [1 / (1 + math.exp(-0.2 * x)) for x in (0.5 - 0.3, 0.3 + 1.0, 2.0 - 0.3)]
    assert loss.item() == pytest.approx(
        (1.5 * (1 - squash[0]) + 0.5 * (1 - squash[1]) + 1.5 * (1 - squash[2])) / 3,
        rel=1e-12,
    )
    loss.backward()
    assert baseline.grad is None and ratios.grad[0] < 0 < ratios.grad[1]
    below = kto_loss(ratios.detach(), good, torch.tensor(-5.0).double(), beta=0.2, denominator=3)
    assert torch.equal(
        below,
        kto_loss(ratios.detach(), good, torch.tensor(0.0).double(), beta=0.2, denominator=3),
    )


def test_orpo_by_its_odds():
    chosen, rejected = torch.tensor([-0.2, -3.0]).double(), torch.tensor([-0.9, -0.01]).double()
    odds = [[math.exp(p) / (1 - math.exp(p)) for p in row.tolist()] for row in (chosen, rejected)]
    expected = sum(-math.log(1 / (1 + b / a)) for a, b in zip(*odds, strict=True)) / 2
    assert orpo_loss(chosen, rejected, denominator=2).item() == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("x", [-1e-12, -1e-5, -0.5, -0.7, -3.0, -40.0, -300.0])
def test_log1mexp_keeps_its_digits(x):
    mpmath.mp.dps = 60
    ours = log1mexp(torch.tensor([x], dtype=torch.float64, requires_grad=True))
    assert ours.item() == pytest.approx(float(mpmath.log(1 - mpmath.exp(mpmath.mpf(x)))), rel=1e-14)
    ours.backward()


def test_log1mexp_is_finite_at_certainty():
    certain = torch.zeros(3, requires_grad=True)
    log1mexp(certain).sum().backward()
    assert certain.grad.isfinite().all()


def test_direct_losses_do_not_broadcast(as_in_production):
    three, one = torch.zeros(3), torch.zeros(1)
    for loss in DIRECT.values():
        with pytest.raises(ValueError, match="equal shapes"):
            loss(three, one)
    with pytest.raises(ValueError, match="equal shapes"):
        dpo_loss(three, three, beta=0.1, weights=one, denominator=1)
    with pytest.raises(ValueError, match="equal shapes"):
        kto_loss(three, one.bool(), torch.zeros(()), beta=0.1, denominator=1)


def test_direct_losses_refuse_what_means_nothing():
    one = torch.ones(1)
    with pytest.raises(ValueError, match="beta must be positive"):
        dpo_loss(one, one, beta=0.0, denominator=1)
    with pytest.raises(ValueError, match="labels say nothing"):
        robust_dpo_loss(one, one, beta=0.1, label_smoothing=0.5, denominator=1)
