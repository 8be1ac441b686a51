"""An interval at another confidence, against quantiles of the normal distribution from a table."""

import math

import pytest

from tether.stats import Estimate, widened, without_interval


def test_each_side_grows_by_the_ratio_of_the_quantiles():
    made = widened(Estimate(1.0, 1.0 - 1.960, 1.0 + 2 * 1.960, 30), 0.99)
    assert made.low == pytest.approx(1 - 2.576, abs=1e-3)
    assert made.high == pytest.approx(1 + 2 * 2.576, abs=2e-3)
    assert (made.value, made.count) == (1.0, 30)


def test_a_number_without_an_interval_keeps_its_reason():
    made = widened(without_interval(0.4, 1, "values: 1, and 2 are needed"), 0.99)
    assert (made.low, made.high) == (-math.inf, math.inf)
    assert made.reason.startswith("too few")
