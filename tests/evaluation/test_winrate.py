"""Win rates and their intervals: published numbers, coverage by simulation, and invariances."""

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from tether.evaluation.winrate import Estimate, correlation, mean_estimate, pairwise_accuracy, wilson_interval, win_rate


@pytest.mark.parametrize(("successes", "total"), [(0, 1), (0, 20), (3, 10), (5, 10), (15, 148), (81, 263), (20, 20)])
@pytest.mark.parametrize("confidence", [0.9, 0.95])
def test_wilson_is_scipys(successes, total, confidence):
    expected = stats.binomtest(successes, total).proportion_ci(confidence, method="wilson")
    assert wilson_interval(successes, total, confidence) == pytest.approx((expected.low, expected.high), abs=1e-12)


def test_wilson_published_numbers():
    # Newcombe 1998, https://doi.org/10.1002/(SICI)1097-0258(19980430)17:8<857::AID-SIM777>3.0.CO;2-E, table I: 81 of 263.
    assert wilson_interval(81, 263) == pytest.approx((0.2553, 0.3662), abs=5e-5)
    assert wilson_interval(0, 20) == pytest.approx((0.0, 0.1611), abs=5e-5)


@settings(deadline=None)
@given(st.integers(1, 500), st.floats(0, 1))
def test_wilson_is_symmetric_and_holds_the_share(total, share):
    successes = share * total
    low, high = wilson_interval(successes, total)
    assert 0 <= low <= share + 1e-12
    assert share - 1e-12 <= high <= 1
    assert wilson_interval(total - successes, total) == pytest.approx((1 - high, 1 - low), abs=1e-9)


def test_wilson_knows_nothing_without_trials_and_refuses_nonsense():
    assert wilson_interval(0, 0) == (0.0, 1.0)
    for arguments in ((-1, 3), (4, 3), (math.nan, 3)):
        with pytest.raises(ValueError, match="between 0 and total"):
            wilson_interval(*arguments)
    with pytest.raises(ValueError, match="confidence"):
        wilson_interval(1, 3, 1.0)


def test_win_rate_by_hand():
    # Two wins, a loss, a tie; the pairs with a None are dropped whole.
    first = [1.0, 2.0, 0.0, 5.0, None, 9.0]
    second = [0.0, 1.5, 3.0, 5.0, 1.0, None]
    estimate = win_rate(first, second)
    assert estimate.value == 2.5 / 4
    assert estimate.count == 4
    assert (estimate.low, estimate.high) == wilson_interval(2.5, 4)
    assert pairwise_accuracy(first, second) == estimate


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(-3, 3), st.integers(-3, 3), st.integers(0, 3)), min_size=1, max_size=20), st.booleans())
def test_exchanging_the_sides_mirrors_the_estimate(rows, grouped):
    first, second, prompts = (list(map(float, column)) for column in zip(*rows, strict=True))
    groups = prompts if grouped else None
    forward = win_rate(first, second, groups=groups)
    backward = win_rate(second, first, groups=groups)
    assert (backward.value, backward.low, backward.high) == pytest.approx(
        (1 - forward.value, 1 - forward.high, 1 - forward.low), abs=1e-9
    )
    assert 0 <= forward.low <= forward.value + 1e-9
    assert forward.value - 1e-9 <= forward.high <= 1


def test_one_comparison_a_prompt_needs_no_bootstrap():
    first, second = [1.0, 0.0, 1.0], [0.0, 1.0, 0.0]
    assert win_rate(first, second, groups=["a", "b", "c"]) == win_rate(first, second)


def test_copies_of_a_prompt_add_no_certainty():
    generator = np.random.default_rng(0)
    first, second = generator.normal(size=(2, 60)).tolist()
    alone = win_rate(first, second)
    copied = win_rate(first * 10, second * 10, groups=list(range(60)) * 10)
    ignored = win_rate(first * 10, second * 10)
    assert copied.value == pytest.approx(alone.value)
    assert copied.count == 600
    assert copied.high - copied.low == pytest.approx(alone.high - alone.low, rel=0.15)
    assert ignored.high - ignored.low < 0.4 * (copied.high - copied.low)


def test_groups_in_agreement_are_few_trials_not_certainty():
    """Three prompts with ten wins each: resampling would say 100% to 100%."""
    first, second, groups = [1.0] * 30, [0.0] * 30, ["a", "b", "c"] * 10
    estimate = win_rate(first, second, groups=groups)
    assert estimate == (1.0, *wilson_interval(3, 3), 30)
    single = win_rate([1.0, 1.0, 0.0], [0.0, 0.0, 1.0], groups=["a"] * 3)
    assert single.low < 0.3
    assert single.high > 0.9


def test_mean_estimate_agrees_with_the_central_limit():
    values = np.random.default_rng(2).normal(3.0, 2.0, size=400)
    estimate = mean_estimate(values.tolist())
    error = values.std() / math.sqrt(400)
    assert estimate.value == pytest.approx(values.mean())
    assert estimate.low == pytest.approx(values.mean() - 1.96 * error, abs=0.15 * error)
    assert estimate.high == pytest.approx(values.mean() + 1.96 * error, abs=0.15 * error)
    assert estimate.count == 400
    narrower = mean_estimate(values.tolist(), confidence=0.5)
    assert estimate.low < narrower.low < narrower.high < estimate.high


def test_mean_estimate_weighs_observations_not_groups():
    estimate = mean_estimate([0.0, 3.0, 3.0, None], ["a", "b", "b", "b"])
    assert estimate.value == 2.0
    # Without a it is 3, without b 0: an error of 1.5, and Student's quantile of one degree of freedom.
    assert (estimate.low, estimate.high) == pytest.approx((2.0 - 1.5 * 12.7062, 2.0 + 1.5 * 12.7062), abs=1e-3)
    assert estimate.count == 3


def test_of_equal_groups_it_is_students_interval_of_their_means():
    values = np.random.default_rng(5).normal(size=(12, 4))
    estimate = mean_estimate(values.ravel().tolist(), np.repeat(np.arange(12), 4).tolist(), confidence=0.9)
    expected = stats.ttest_1samp(values.mean(1), 0.0).confidence_interval(0.9)
    assert (estimate.low, estimate.high) == pytest.approx((expected.low, expected.high))


def test_mean_estimate_of_one_group_claims_nothing():
    estimate = mean_estimate([1.0, 2.0], ["a", "a"])
    assert estimate == (1.5, -math.inf, math.inf, 2)
    assert json.loads(json.dumps(estimate.as_dict(), allow_nan=False)) == {"value": 1.5, "low": None, "high": None, "count": 2}


def test_names_of_groups_do_not_matter():
    values = np.random.default_rng(4).normal(size=20).tolist()
    groups = [index // 2 for index in range(20)]
    assert mean_estimate(values, groups) == mean_estimate(values, [("prompt", str(group)) for group in groups])


def test_estimate_as_dict():
    assert Estimate(0.5, 0.4, 0.6, 10).as_dict() == {"value": 0.5, "low": 0.4, "high": 0.6, "count": 10}


def test_correlation_by_hand():
    # Deviations -1.5 -.5 .5 1.5 against -6.5 -3.5 1.5 8.5: products sum to 25, squares to 5 and 129.
    result = correlation([1.0, 2.0, 3.0, 4.0, None], [1.0, 4.0, 9.0, 16.0, 7.0])
    assert result["pearson"] == pytest.approx(25 / math.sqrt(5 * 129))
    assert result["spearman"] == pytest.approx(1.0)
    assert correlation([1.0, 2.0, 3.0], [3.0, 2.0, 1.0]) == pytest.approx({"pearson": -1.0, "spearman": -1.0})


@pytest.mark.parametrize("numbers", [[1.0, 1.0, 1.0], [1.0]])
def test_correlation_with_a_constant_is_undefined(numbers):
    assert all(math.isnan(value) for value in correlation(numbers, [1.0, 2.0, 3.0][: len(numbers)]).values())


@pytest.mark.parametrize("function", [win_rate, pairwise_accuracy, correlation])
def test_pairs_must_fit(function):
    with pytest.raises(ValueError, match="one length"):
        function([1.0, 2.0], [1.0])
    with pytest.raises(ValueError, match="nothing to estimate"):
        function([None, 1.0], [1.0, None])
    with pytest.raises(ValueError, match="NaN"):
        function([math.nan, 1.0], [1.0, 1.0])


def test_groups_must_fit():
    with pytest.raises(ValueError, match="in 1 groups"):
        win_rate([1.0, 2.0], [1.0, 1.0], groups=["a"])
    with pytest.raises(ValueError, match="nothing to estimate"):
        mean_estimate([])
