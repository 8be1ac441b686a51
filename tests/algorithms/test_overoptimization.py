"""Best-of-n against every subset and exact binomials, its KL against an integral, and Gao's fits against numpy and simulation."""

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate, optimize

from tether.algorithms.overoptimization import best_of_n_estimate, best_of_n_weights, fit_overoptimization, kl_best_of_n


def over_all_subsets(proxy, gold, n):
    """The mean over subsets of the gold of the best, the best being drawn from those that tie."""
    values = []
    for subset in itertools.combinations(range(len(proxy)), n):
        highest = max(proxy[i] for i in subset)
        best = [gold[i] for i in subset if proxy[i] == highest]
        values.append(sum(best) / len(best))
    return sum(values) / len(values)


def doubles(values):
    return torch.tensor(values, dtype=torch.float64)


def test_by_hand():
    # Of the six pairs three hold the fourth sample (-1), two more the second (2), and one is left (1).
    assert best_of_n_estimate(doubles([0.1, 0.5, 0.3, 0.9]), doubles([1.0, 2.0, 0.0, -1.0]), 2).item() == pytest.approx(1 / 6)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(st.integers(-2, 2), st.integers(-9, 9)), min_size=1, max_size=8).flatmap(
        lambda pool: st.tuples(st.just(pool), st.integers(1, len(pool)))
    )
)
def test_is_the_mean_over_all_subsets_with_ties_shared(case):
    pool, n = case
    proxy, gold = (list(map(float, column)) for column in zip(*pool, strict=True))
    assert best_of_n_estimate(doubles(proxy), doubles(gold), n).item() == pytest.approx(over_all_subsets(proxy, gold, n))


@pytest.mark.parametrize(("samples", "n"), [(4096, 1000), (4096, 2), (4096, 4095), (4096, 4096), (1000, 1), (7, 3)])
def test_weights_are_exact_binomials_without_overflow(samples, n):
    order = np.random.default_rng(0).permutation(samples)
    weights = best_of_n_weights(torch.from_numpy(order.astype(np.float32)), n).numpy()[np.argsort(order)]
    whole = math.comb(samples, n)
    for i in (*range(1, samples + 1, max(1, samples // 50)), samples - 1, samples):
        expected = float(Fraction(math.comb(i - 1, n - 1), whole))
        assert weights[i - 1] == pytest.approx(expected, rel=1e-9, abs=1e-300)
    assert weights.sum() == pytest.approx(1.0, abs=1e-12)


def test_many_prompts_are_as_each_alone_and_infinities_have_a_rank():
    generator = torch.Generator().manual_seed(0)
    proxy = torch.randint(0, 6, (2, 3, 16), generator=generator).float()
    proxy[0, 0, :2] = torch.tensor([math.inf, -math.inf])
    gold = torch.randn(2, 3, 16, generator=generator)
    together = best_of_n_estimate(proxy, gold, 4)
    for i, j in itertools.product(range(2), range(3)):
        assert together[i, j].item() == pytest.approx(over_all_subsets(proxy[i, j].tolist(), gold[i, j].tolist(), 4), abs=1e-6)


def test_is_unbiased_where_the_naive_estimate_is_noisier():
    """Standard normal proxy, gold its square: best of 4 has E[max²], known by integration; pools of 12, many times over."""
    generator = torch.Generator().manual_seed(1)
    proxy = torch.randn(40_000, 12, generator=generator, dtype=torch.float64)
    gold = proxy.square()
    density = lambda x: 4 * math.exp(-x * x / 2) / math.sqrt(2 * math.pi) * (0.5 + 0.5 * math.erf(x / math.sqrt(2))) ** 3  # noqa: E731
    exact = integrate.quad(lambda x: x * x * density(x), -9, 9)[0]
    estimates = best_of_n_estimate(proxy, gold, 4)
    error = float(estimates.std()) / math.sqrt(len(estimates))
    assert float(estimates.mean()) == pytest.approx(exact, abs=4 * error)
    naive = gold.gather(1, proxy[:, :4].argmax(1, keepdim=True))[:, 0]
    assert estimates.std() < 0.8 * naive.std()


@pytest.mark.parametrize("n", [0, -1, 5])
def test_refuses_an_n_that_the_pool_does_not_hold(n):
    with pytest.raises(ValueError, match="between 1 and the size of the pool"):
        best_of_n_weights(torch.zeros(4), n)


def test_shapes_do_not_broadcast(as_in_production):
    with pytest.raises(ValueError, match=r"gold \(1, 4\)"):
        best_of_n_estimate(torch.zeros(2, 4), torch.zeros(1, 4), 2)


@pytest.mark.parametrize("n", [1, 2, 7, 64, 4096])
def test_kl_is_the_integral_over_the_quantile(n):
    """The best of n has density n u^(n-1) over the quantile u of the score, against 1 before."""
    integral = integrate.quad(lambda t: n * math.exp(-n * t) * (math.log(n) - (n - 1) * t), 0, math.inf)[0]  # u = exp(-t)
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


KLS = [kl_best_of_n(2**k) for k in range(13)]
FORMS = {"best_of_n": lambda d, a, b: d * (a - b * d), "rl": lambda d, a, b: d * (a - b * np.log(d))}


@pytest.mark.parametrize("kind", ["best_of_n", "rl"])
@pytest.mark.parametrize(("alpha", "beta"), [(1.3, 0.4), (0.2, 0.05), (2.0, 2.0)])
def test_noiseless_curves_give_back_what_made_them(kind, alpha, beta):
    gold = [0.0] + [float(FORMS[kind](math.sqrt(kl), alpha, beta)) for kl in KLS[1:]]
    fit = fit_overoptimization(KLS, gold, kind)
    assert (fit.alpha, fit.beta) == pytest.approx((alpha, beta), rel=1e-9)
    assert [fit.gold(kl) for kl in KLS] == pytest.approx(gold, abs=1e-9)
    highest = optimize.minimize_scalar(lambda d: -FORMS[kind](d, alpha, beta), bounds=(1e-3, 400), method="bounded")
    assert fit.peak == pytest.approx(highest.x, rel=1e-4)
    assert fit.peak_error == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("kind", ["best_of_n", "rl"])
def test_least_squares_are_numpys_and_errors_are_what_noise_makes_of_them(kind):
    generator = np.random.default_rng(0)
    d = np.sqrt(np.linspace(0.5, 7.0, 40))
    truth, noise = FORMS[kind](d, 1.5, 0.6), 0.03
    columns = np.stack([d, -d * d if kind == "best_of_n" else -d * np.log(d)], 1)
    peaks, errors = [], []
    for trial in range(400):
        gold = truth + noise * generator.normal(size=len(d))
        fit = fit_overoptimization((d * d).tolist(), gold.tolist(), kind)
        peaks.append(fit.peak)
        errors.append(fit.peak_error)
        if trial < 5:
            solution, squares, *_ = np.linalg.lstsq(columns, gold, rcond=None)
            covariance = np.linalg.inv(columns.T @ columns) * squares[0] / (len(d) - 2)
            assert (fit.alpha, fit.beta) == pytest.approx(tuple(solution), rel=1e-9)
            assert fit.covariance == pytest.approx((covariance[0, 0], covariance[0, 1], covariance[1, 1]), rel=1e-7)
    assert np.mean(errors) == pytest.approx(np.std(peaks), rel=0.15)


@pytest.mark.parametrize(("kind", "alpha", "beta"), [("best_of_n", 1.0, -0.1), ("rl", 1.0, -0.1), ("best_of_n", -0.5, 0.2)])
def test_says_when_there_is_no_peak(kind, alpha, beta):
    gold = [float(FORMS[kind](math.sqrt(kl), alpha, beta)) for kl in KLS[1:]]
    fit = fit_overoptimization(KLS[1:], gold, kind)
    assert fit.peak is None
    assert fit.peak_error is None


def test_a_peak_beyond_all_numbers_is_none():
    gold = [math.sqrt(kl) * (1.0 - 1e-4 * math.log(math.sqrt(kl))) for kl in KLS[1:]]
    assert fit_overoptimization(KLS[1:], gold, "rl").peak is None


@pytest.mark.parametrize(
    ("kl", "gold", "message"),
    [
        ([1.0, 2.0], [1.0, 1.0, 1.0], "as many gold"),
        ([1.0, 2.0, -0.1], [1.0, 1.0, 1.0], "KL 0 or more"),
        ([1.0, 2.0, 3.0], [1.0, math.nan, 1.0], "must be finite"),
        ([0.0, 1.0, 2.0], [0.0, 1.0, 1.0], "at least three points beyond KL 0"),
        ([2.0, 2.0, 2.0, 2.0], [1.0, 0.9, 1.1, 1.0], "not all at one distance"),
        ([], [], "at least three points"),
    ],
)
def test_refuses_what_no_curve_can_be_fitted_to(kl, gold, message):
    with pytest.raises(ValueError, match=message):
        fit_overoptimization(kl, gold, "best_of_n")
