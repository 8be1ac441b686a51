"""P-values against scipy's t-test and a table; Holm's correction against statsmodels."""

import math

import numpy as np
import pytest
from scipy.stats import norm, t, ttest_1samp
from statsmodels.stats.multitest import multipletests

from tether.stats import Estimate, grouped_mean, holm, mean_of_runs, p_above_zero, without_interval


@pytest.mark.parametrize(
    "p_values",
    [[0.01, 0.04, 0.03, 0.005], [0.5], [], [0.9, 0.9, 1e-9, 0.02, 0.02]],
)
def test_holm_is_that_of_statsmodels(p_values):
    assert holm(p_values) == pytest.approx(
        np.asarray(multipletests(p_values, method="holm")[1]).tolist() if p_values else [],
    )


@pytest.mark.parametrize("values", [[0.65, 1.0, 1.35], [0.1, -0.3, 0.4, 0.5], [3.0, 3.1, 3.2]])
def test_the_p_value_of_a_mean_is_that_of_students_test(values):
    """Runs that share no error have one over their seeds alone."""
    test = ttest_1samp(values, 0)
    runs = [without_interval(value, 1, "prompts") for value in values]
    mean, freedom = mean_of_runs(runs, Estimate(0.0, 0.0, 0.0, 0))
    assert p_above_zero(mean, freedom) == pytest.approx(test.pvalue)
    assert (mean.low, mean.high) == pytest.approx(test.confidence_interval())


def test_the_lower_bound_alone_decides():
    assert p_above_zero(Estimate(2.576, 2.576 - 1.960, 100.0, 30)) == pytest.approx(0.01, abs=1e-4)


@pytest.mark.parametrize(
    ("estimate", "expected"),
    [
        (without_interval(0.4, 1, "values: 1, and 2 are needed"), 1.0),
        (Estimate(-1.0, -1.1, -0.9, 30), 1.0),
        (Estimate(0.0, 0.0, 0.0, 30), 1.0),
        (Estimate(0.5, 0.5, 0.5, 30), 0.0),
    ],
)
def test_p_values_at_the_edges(estimate, expected):
    assert p_above_zero(estimate) == expected


def test_more_seeds_do_not_shrink_the_error_that_they_share():
    """Of equal runs only that error is left; 4 runs at -1 and 4 at 1 have a variance of 8/7, of
    which 8/7 - 0.25 is more than their own intervals say.
    """
    quantile = norm.isf(0.025)
    alike = [Estimate(0.3, 0.3 - quantile, 0.3 + quantile, 150)] * 8
    assert mean_of_runs(alike)[0][:3] == pytest.approx((0.3, 0.3 - quantile, 0.3 + quantile))
    apart = [Estimate(side, side - quantile / 2, side + quantile / 2, 150) for side in (-1, 1) * 4]
    mean, freedom = mean_of_runs(apart)
    seen = 8 / 7 / 8 + 8 / 7 - 0.25
    assert freedom == pytest.approx(7 * (seen + 0.25) / seen)
    assert mean.high == pytest.approx(t.isf(0.025, freedom) * (seen + 0.25) ** 0.5)
    shared, _ = mean_of_runs(apart, Estimate(0.0, -quantile, quantile, 150))
    assert shared.high == pytest.approx(t.isf(0.025, 7 * (1 / 7 + 1) * 7) * (1 / 7 + 1) ** 0.5)


@pytest.mark.parametrize("seeds", [3, 5, 10])
@pytest.mark.parametrize("prompts", [None, 60])
def test_runs_of_one_start_gain_nothing_in_95_of_100_sweeps(seeds, prompts):
    """The start's error is common to all runs: as a mean alone, and in each prompt's own score."""
    generator = np.random.default_rng(seeds)
    called = 0
    for _ in range(600):
        if prompts is None:
            ends = generator.normal(size=seeds) - generator.normal()
            mean, _ = mean_of_runs([Estimate(end, end - 1, end + 1, 150) for end in ends])
        else:
            start = generator.normal(size=prompts)
            gains = generator.normal(size=(seeds, prompts)) - start
            runs = [Estimate(one.mean(), -9.0, 9.0, prompts) for one in gains]
            mean, _ = mean_of_runs(runs, grouped_mean(gains.mean(0), None))
        called += mean.low > 0
    assert called <= 0.06 * 600


def test_a_reason_is_left_where_nothing_bounds_the_mean():
    bare = [Estimate(value, math.nan, math.nan, 0) for value in (0.1, 0.2, 0.3)]
    assert math.isfinite(mean_of_runs(bare)[0].low)
    assert mean_of_runs(bare[:2])[0].reason == "too few values: 2, and 3 are needed"
    assert mean_of_runs(bare[:1] * 3)[0].reason.endswith("all 3 are alike")
    few = [without_interval(value, 9, "groups") for value in (0.1, 0.2, 0.3)]
    assert mean_of_runs(few)[0].reason == "too few prompts in a run"
