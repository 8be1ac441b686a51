"""Calibration: hand numbers, edges of bins, and the fold of one-sided predictions."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tether.evaluation.calibration import (
    ReliabilityBin,
    bin_indices,
    expected_calibration_error,
    reliability_curve,
)

PROBABILITIES = [0.9] * 10 + [0.6] * 10
OUTCOMES = [1] * 9 + [0] + [1] * 3 + [0] * 7


def test_bins_of_probabilities_on_and_beside_an_edge():
    probabilities = [0.0, 0.3, math.nextafter(0.9, 0), 0.9, 1.0]
    assert bin_indices(probabilities)[0].tolist() == [0, 3, 8, 9, 9]


def test_error_by_hand():
    # Ten at .9, nine right: exact. Ten at .6, three right: off by .3, on half the data.
    assert expected_calibration_error(PROBABILITIES, OUTCOMES) == pytest.approx(0.15)
    assert expected_calibration_error(np.array(PROBABILITIES), np.array(OUTCOMES)) == pytest.approx(
        0.15,
    )
    # In one bin the two kinds hide each other: mean .75 against 12 of 20.
    assert expected_calibration_error(PROBABILITIES, OUTCOMES, num_bins=1) == pytest.approx(0.15)
    assert expected_calibration_error([0.8, 0.2], [0, 1], num_bins=1) == pytest.approx(0.0)
    assert expected_calibration_error([0.8, 0.2], [0, 1]) == pytest.approx(0.8)


def test_curve_by_hand():
    low, high = reliability_curve(PROBABILITIES, OUTCOMES)
    assert low == pytest.approx((0.6, 0.7, 0.6, 0.3, 10))
    assert high == pytest.approx((0.9, 1.0, 0.9, 0.9, 10))
    assert isinstance(low, ReliabilityBin)


@pytest.mark.parametrize("num_bins", [2, 3, 5, 7, 10, 15, 20, 100])
def test_a_prediction_on_an_edge_opens_the_upper_bin(num_bins):
    """Each k/K lands in bin k; multiplying by K or taking np.linspace's edges misplaces some by
    rounding.
    """
    edges = [k / num_bins for k in range(num_bins + 1)]
    curve = reliability_curve(edges, [1] * len(edges), num_bins)
    assert [bin_.count for bin_ in curve] == [1] * (num_bins - 1) + [2]
    for k in range(num_bins):
        assert reliability_curve([edges[k]], [0], num_bins)[0].low == edges[k]


def test_the_one_sided_form_folds():
    # The model gives the preferred answer .9, .9, .9 and .1: said with confidence .9, right three
    # times in four.
    assert reliability_curve([0.9, 0.9, 0.9, 0.1]) == [pytest.approx((0.9, 1.0, 0.9, 0.75, 4))]
    assert expected_calibration_error([0.9, 0.9, 0.9, 0.1]) == pytest.approx(0.15)


def test_an_even_prediction_is_neither_right_nor_wrong():
    assert reliability_curve([0.5] * 4) == [(0.5, 0.6, 0.5, 0.5, 4)]
    assert expected_calibration_error([0.5] * 4) == 0
    # Just off the middle it is right or wrong as usual.
    assert reliability_curve([0.5 + 1e-9])[0].frequency == 1
    assert reliability_curve([0.5 - 1e-9])[0].frequency == 0


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0, 1), st.sampled_from([0.0, 0.5, 1.0])), min_size=1, max_size=40),
    st.integers(1, 20),
)
def test_bins_partition_the_predictions(pairs, num_bins):
    probabilities, outcomes = zip(*pairs, strict=True)
    curve = reliability_curve(probabilities, outcomes, num_bins)
    assert sum(bin_.count for bin_ in curve) == len(pairs)
    assert sum(bin_.count * bin_.mean_probability for bin_ in curve) == pytest.approx(
        sum(probabilities),
        abs=1e-9,
    )
    assert sum(bin_.count * bin_.frequency for bin_ in curve) == pytest.approx(
        sum(outcomes),
        abs=1e-9,
    )
    for bin_ in curve:
        inside = [p for p in probabilities if bin_.low <= p < bin_.high or (bin_.high == 1.0 == p)]
        assert len(inside) == bin_.count
    # Merging bins can only hide error (the triangle inequality), and one bin hides all but that of
    # the mean.
    floor = abs(sum(probabilities) - sum(outcomes)) / len(pairs)
    assert floor - 1e-9 <= expected_calibration_error(probabilities, outcomes, num_bins) <= 1


def test_honest_predictions_have_little_error():
    generator = np.random.default_rng(0)
    probabilities = generator.random(50_000)
    outcomes = generator.random(50_000) < probabilities
    assert expected_calibration_error(probabilities, outcomes) < 0.01
    assert expected_calibration_error(probabilities, ~outcomes) > 0.4
