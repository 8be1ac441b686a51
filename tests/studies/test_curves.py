"""Best-of-n against every subset and exact binomials, and Gao's fits against numpy and
simulation.
"""

import itertools
import math
import statistics
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate, optimize
from studies.curves import (
    best_of_n_by_prompt,
    best_of_n_curve,
    best_of_n_estimate,
    best_of_n_weights,
    fit_overoptimization,
)

from tether.algorithms.kl import kl_best_of_n


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
    # Of the six pairs three hold the fourth sample (-1), two more the second (2), and one is left
    # (1).
    assert best_of_n_estimate(
        doubles([0.1, 0.5, 0.3, 0.9]),
        doubles([1.0, 2.0, 0.0, -1.0]),
        2,
    ).item() == pytest.approx(1 / 6)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(st.integers(-2, 2), st.integers(-9, 9)), min_size=1, max_size=8).flatmap(
        lambda pool: st.tuples(st.just(pool), st.integers(1, len(pool))),
    ),
)
def test_is_the_mean_over_all_subsets_with_ties_shared(case):
    pool, n = case
    proxy, gold = (list(map(float, column)) for column in zip(*pool, strict=True))
    assert best_of_n_estimate(doubles(proxy), doubles(gold), n).item() == pytest.approx(
        over_all_subsets(proxy, gold, n),
    )


@pytest.mark.parametrize(
    ("samples", "n"),
    [(4096, 1000), (4096, 2), (4096, 4095), (4096, 4096), (1000, 1), (7, 3)],
)
def test_weights_are_exact_binomials_without_overflow(samples, n):
    order = np.random.default_rng(0).permutation(samples)
    weights = best_of_n_weights(torch.from_numpy(order.astype(np.float32)), n).numpy()[
        np.argsort(order)
    ]
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
        assert together[i, j].item() == pytest.approx(
            over_all_subsets(proxy[i, j].tolist(), gold[i, j].tolist(), 4),
            abs=1e-6,
        )


def test_is_unbiased_where_the_naive_estimate_is_noisier():
    """Standard normal proxy, gold its square: best of 4 has E[max²], known by integration; pools of
    12, many times over.
    """
    generator = torch.Generator().manual_seed(1)
    proxy = torch.randn(40_000, 12, generator=generator, dtype=torch.float64)
    gold = proxy.square()

    def density(x):
        return (
            4
            * math.exp(-x * x / 2)
            / math.sqrt(2 * math.pi)
            * (0.5 + 0.5 * math.erf(x / math.sqrt(2))) ** 3
        )

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


def test_shapes_do_not_broadcast():
    with pytest.raises(ValueError, match=r"gold \(1, 4\)"):
        best_of_n_estimate(torch.zeros(2, 4), torch.zeros(1, 4), 2)


def test_curve_is_the_mean_over_prompts_of_every_subset():
    generator = np.random.default_rng(0)
    proxy = [generator.integers(0, 4, size=6).astype(float).tolist() for _ in range(5)]
    gold = [generator.normal(size=6).tolist() for _ in range(5)]
    proxy[2][1], gold[3][4] = None, None  # a sample counts where both are known
    proxy.append([None] * 6)
    gold.append([1.0] * 6)
    points = best_of_n_curve(proxy, gold)
    assert [point.n for point in points] == [1, 2, 4, 5]  # the smallest pool has five
    for point in points:
        assert point.count == 5
        assert point.kl == pytest.approx(math.log(point.n) - (point.n - 1) / point.n)
        for name, scores in (("proxy", proxy), ("gold", gold)):
            means = []
            for p, s, g in zip(proxy[:5], scores[:5], gold[:5], strict=True):
                known = [i for i in range(6) if p[i] is not None and g[i] is not None]
                values = []
                for subset in itertools.combinations(known, point.n):
                    best = [s[i] for i in subset if p[i] == max(p[j] for j in subset)]
                    values.append(statistics.fmean(best))
                means.append(statistics.fmean(values))
            assert getattr(point, name) == pytest.approx(statistics.fmean(means))
        assert point.low < point.gold < point.high


def test_curve_of_a_normal_proxy_is_known_and_its_intervals_cover():
    """Gold correlates with a standard normal proxy by 0.6: best of 2 gains 0.6 / sqrt(pi); prompts
    differ by a constant.
    """
    generator = np.random.default_rng(1)
    covered, truth = 0, 0.6 / math.sqrt(math.pi)
    for _ in range(60):
        proxy = generator.normal(size=(40, 16))
        gold = 0.6 * proxy + 0.8 * generator.normal(size=(40, 16)) + generator.normal(size=(40, 1))
        points = best_of_n_curve(proxy.tolist(), gold.tolist())
        assert [point.n for point in points] == [1, 2, 4, 8, 16]
        covered += points[1].low <= truth <= points[1].high
    assert covered / 60 >= 0.85
    sizes, proxies, golds = best_of_n_by_prompt(proxy.tolist(), gold.tolist())
    assert golds.shape == proxies.shape == (40, len(sizes))
    assert golds[:, 0] == pytest.approx(gold.mean(1))
    assert proxies[:, -1] == pytest.approx(proxy.max(1))


@pytest.mark.parametrize(
    ("proxy", "gold", "message"),
    [
        ([[1.0]], [[1.0], [2.0]], "for every sample"),
        ([[1.0, 2.0]], [[1.0]], "for every sample"),
        ([[None, 1.0]], [[1.0, None]], "nothing to choose from"),
        ([[1.0, math.nan]], [[1.0, 1.0]], "NaN"),
    ],
)
def test_curve_refuses_what_it_cannot_read(proxy, gold, message):
    with pytest.raises(ValueError, match=message):
        best_of_n_curve(proxy, gold)


KLS = [kl_best_of_n(2**k) for k in range(13)]
FORMS = {
    "best_of_n": lambda d, a, b: d * (a - b * d),
    "rl": lambda d, a, b: d * (a - b * np.log(d)),
}


@pytest.mark.parametrize("kind", ["best_of_n", "rl"])
@pytest.mark.parametrize(("alpha", "beta"), [(1.3, 0.4), (0.2, 0.05), (2.0, 2.0)])
def test_noiseless_curves_give_back_what_made_them(kind, alpha, beta):
    gold = [0.0] + [float(FORMS[kind](math.sqrt(kl), alpha, beta)) for kl in KLS[1:]]
    fit = fit_overoptimization(KLS, gold, kind)
    assert (fit.alpha, fit.beta) == pytest.approx((alpha, beta), rel=1e-9)
    assert [fit.gold(kl) for kl in KLS] == pytest.approx(gold, abs=1e-9)
    highest = optimize.minimize_scalar(
        lambda d: -FORMS[kind](d, alpha, beta),
        bounds=(1e-3, 400),
        method="bounded",
    )
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
            assert fit.covariance == pytest.approx(
                (covariance[0, 0], covariance[0, 1], covariance[1, 1]),
                rel=1e-7,
            )
    assert np.mean(errors) == pytest.approx(np.std(peaks), rel=0.15)


@pytest.mark.parametrize(
    ("kind", "alpha", "beta"),
    [("best_of_n", 1.0, -0.1), ("rl", 1.0, -0.1), ("best_of_n", -0.5, 0.2)],
)
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
