"""Numbers without an interval say why, and numbers with one say nothing."""

import numpy as np
import pytest

from tether.evaluation.decoding import over_best_decoding
from tether.evaluation.winrate import mean_estimate


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ([-np.inf, *[1.0, 2.0, 3.0] * 10], "too few finite values: an infinite one has no mean"),
        ([1 + 1e-13 * place for place in range(20)], "too few groups differ: by no more than "),
    ],
)
def test_means_of_infinite_numbers_or_of_rounding_have_no_interval(values, reason):
    estimate = mean_estimate(values, list(range(len(values))))
    assert (estimate.low, estimate.high) == (-np.inf, np.inf)
    assert estimate.reason.startswith(reason)


def test_bounds_that_other_temperatures_give_need_no_reason():
    """The best pair of temperatures scored alike everywhere; the bounds come from other pairs."""
    groups = [str(place) for place in range(40)]
    right = [1.0] * 20 + [0.0] * 20
    ours = [0.0] * 6 + right[6:20] + [1.0] * 5 + right[25:]
    theirs = right[:6] + [0.0] * 6 + right[12:25] + [1.0] * 5 + right[30:]
    result = over_best_decoding({1.0: right, 0.0: theirs}, {1.0: right, 0.0: ours}, groups)
    assert result is not None and result["value"] == 0
    assert result["low"] < 0 < result["high"] and "reason" not in result


def test_a_bound_that_no_temperature_gives_has_a_reason():
    groups = [str(place) for place in range(40)]
    half, whole = [1.0] * 20 + [0.0] * 20, [1.0] * 40
    result = over_best_decoding({1.0: half, 0.0: whole}, {1.0: whole}, groups)
    assert result is not None and result["low"] is None
    assert result["reason"].startswith("too few groups differ")
