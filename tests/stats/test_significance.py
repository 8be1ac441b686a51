"""P-values against scipy's t-test and a table; Holm's correction against statsmodels."""

import numpy as np
import pytest
from scipy.stats import ttest_1samp
from statsmodels.stats.multitest import multipletests

from tether.stats import Estimate, holm, normal_mean, p_above_zero, without_interval


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
    _, expected = ttest_1samp(values, 0)
    assert p_above_zero(normal_mean(values), len(values) - 1) == pytest.approx(expected)


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
