"""Proportions with few successes: exact coverage by enumeration, and bounds by the binomial itself."""

import numpy as np
import pytest
from scipy.stats import binom

from tether.evaluation.decoding import over_best_decoding
from tether.evaluation.process import StepCounts, accuracy_erroneous, step_estimates
from tether.evaluation.winrate import gain, mean_estimate, pairwise_accuracy
from tether.stats import few_interval, grouped_share, trials_interval


def coverage(total, rate):
    """The share of draws whose interval holds the rate, without chance: over all counts."""
    bounds = [trials_interval(count, total) for count in range(total + 1)]
    held = [low <= rate <= high for low, high in bounds]
    return float(binom.pmf(np.arange(total + 1), total, rate) @ held)


@pytest.mark.audit
@pytest.mark.parametrize("total", [5, 10, 20, 50, 150])
def test_every_rate_is_held_in_93_of_100_draws(total):
    rates = np.linspace(0.3 / total, 1 - 0.3 / total, 151)
    held = [coverage(total, rate) for rate in rates]
    assert min(held) >= 0.93
    assert total < 20 or np.mean(np.array(held) <= 0.97) > 0.9


def test_coverage_is_as_near_to_95_as_counts_allow():
    """Mid-P intervals with equal tails hold these rates in 99.3%, 98.9% and 98.2%."""
    assert coverage(20, 0.02) == pytest.approx(0.940, abs=0.001)
    assert coverage(20, 0.1) == pytest.approx(0.957, abs=0.001)
    # of 50 draws at .02 counts up to two have 92.2%, up to three 98.2%: nothing lies between
    assert coverage(50, 0.02) == pytest.approx(binom.cdf(3, 50, 0.02))
    assert binom.cdf(2, 50, 0.02) < 0.93


def test_bounds_of_small_counts_are_those_of_the_binomial():
    """All of three: lower rates miss three of three in over 93%. None of 400: near 3.2 / n."""
    assert few_interval(3, 3) == (pytest.approx(0.07 ** (1 / 3)), 1.0)
    low, high = few_interval(1, 20)
    assert low == pytest.approx(1 - 0.93 ** (1 / 20), abs=2e-4)
    assert few_interval(19, 20) == pytest.approx((1 - high, 1 - low))
    assert 3.0 < 400 * few_interval(0, 400)[1] < 3.7


def test_equal_answers_of_one_prompt_are_one_observation():
    alone = grouped_share(np.array([1.0] * 19 + [0.0]), None)
    four = grouped_share(np.repeat([1.0] * 19 + [0.0], 4), np.repeat(np.arange(20), 4).tolist())
    assert (four.value, four.low, four.high) == (alone.value, alone.low, alone.high)


def test_few_prompts_with_an_error_are_too_few():
    """Where prompts have several pairs, one to four with an error do not show what is in common."""
    owners = np.repeat(np.arange(50), 4).tolist()
    for errors in range(7):
        right = np.ones(200)
        right[: 4 * errors : 4] = 0.0
        estimate = pairwise_accuracy(right.tolist(), [0.5] * 200, owners)
        few = 1 <= errors <= 4
        assert estimate.reason == (f"too few groups differ: {errors} of 50" if few else "")
        assert np.isfinite(estimate.low) != few


def test_a_gain_of_few_changed_prompts_is_too_few():
    for changed in range(8):
        before = [0.0, 1.0] * 25
        after = [1 - score if place < changed else score for place, score in enumerate(before)]
        estimate = gain(before, after, list(range(50)))
        assert estimate is not None
        assert bool(estimate.reason) == (changed < 5), changed


def test_first_errors_that_few_problems_miss_are_too_few():
    for missed in range(8):
        counts = [StepCounts(erroneous=2.0, located=2.0 - (n < missed)) for n in range(40)]
        estimate = step_estimates(counts, list(range(40)), [accuracy_erroneous])
        assert bool(estimate["accuracy_erroneous"].reason) == (1 <= missed <= 4), missed


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


def test_a_bound_of_decoding_that_is_missing_has_a_reason():
    """At two of four pairs of temperatures fewer than five prompts differ."""
    groups = [str(place) for place in range(40)]
    before = {1.0: [1.0] * 37 + [0.0] * 3, 0.0: [1.0] * 38 + [0.0] * 2}
    after = {1.0: [1.0] * 36 + [0.0] * 4, 0.0: [1.0] * 20 + [0.0] * 20}
    result = over_best_decoding(before, after, groups)
    assert result is not None and result["high"] is None and result["low"] is None
    assert result["reason"].startswith("too few groups differ")
