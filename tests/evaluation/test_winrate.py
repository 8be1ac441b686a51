"""Win rates and their intervals: published numbers, coverage by simulation, and invariances."""

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from tether.evaluation.winrate import correlation, gain, mean_estimate, pairwise_accuracy, win_rate
from tether.stats import Estimate, mid_interval, trials_interval, wilson_interval


@pytest.mark.parametrize(
    ("successes", "total"),
    [(0, 1), (0, 20), (3, 10), (5, 10), (15, 148), (81, 263), (20, 20)],
)
@pytest.mark.parametrize("confidence", [0.9, 0.95])
def test_wilson_is_scipys(successes, total, confidence):
    expected = stats.binomtest(successes, total).proportion_ci(confidence, method="wilson")
    assert wilson_interval(successes, total, confidence) == pytest.approx(
        (expected.low, expected.high),
        abs=1e-12,
    )


def test_wilson_published_numbers():
    # Newcombe 1998,
    # https://doi.org/10.1002/(SICI)1097-0258(19980430)17:8<857::AID-SIM777>3.0.CO;2-E, table I: 81
    # of 263.
    assert wilson_interval(81, 263) == pytest.approx((0.2553, 0.3662), abs=5e-5)
    assert wilson_interval(0, 20) == pytest.approx((0.0, 0.1611), abs=5e-5)


@pytest.mark.parametrize(
    ("successes", "total"),
    [(0, 1), (0, 20), (3, 10), (49, 50), (81, 263), (20, 20)],
)
def test_a_share_of_single_trials_has_the_mid_p_interval(successes, total):
    """By scipy's binomial: at a bound the tail with half the probability of what was seen is
    2.5%; without a success or a failure scipy's exact interval.
    """
    low, high = mid_interval(successes, total)
    if 0 < successes < total:
        half = stats.binom.pmf(successes, total, [low, high]) / 2
        above = stats.binom.sf(successes, total, low) + half[0]
        below = stats.binom.cdf(successes - 1, total, high) + half[1]
        assert (above, below) == pytest.approx((0.025, 0.025), abs=1e-9)
    else:
        expected = stats.binomtest(successes, total).proportion_ci(0.95, method="exact")
        assert (low, high) == pytest.approx((expected.low, expected.high), abs=1e-9)
    estimate = win_rate([1.0] * successes + [0.0] * (total - successes), [0.5] * total)
    assert (estimate.low, estimate.high) == trials_interval(successes, total)
    if min(successes, total - successes) >= 10:
        assert (estimate.low, estimate.high) == (low, high)


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
    # Four wins, two losses, two ties; the pairs with a None are dropped whole.
    first = [1.0, 2.0, 0.0, 5.0] * 2 + [None, 9.0]
    second = [0.0, 1.5, 3.0, 5.0] * 2 + [1.0, None]
    estimate = win_rate(first, second)
    assert estimate.value == 2.5 / 4
    assert estimate.count == 8
    # Wins 4 of 8 and losses 2 of 8, each with Wilson's interval, combined as Zou and Donner do with
    # a correlation of -1/sqrt(3).
    won, lost, rho = (
        wilson_interval(4, 8),
        wilson_interval(2, 8),
        -math.sqrt(0.5 * 0.25 / (0.5 * 0.75)),
    )
    a, b = 0.5 - won[0], lost[1] - 0.25
    c, d = won[1] - 0.5, 0.25 - lost[0]
    assert 2 * estimate.low - 1 == pytest.approx(0.25 - math.sqrt(a * a + b * b - 2 * rho * a * b))
    assert 2 * estimate.high - 1 == pytest.approx(0.25 + math.sqrt(c * c + d * d - 2 * rho * c * d))
    assert pairwise_accuracy(first, second) == estimate


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(-3, 3), st.integers(-3, 3), st.integers(0, 3)),
        min_size=1,
        max_size=20,
    ),
    st.booleans(),
)
def test_exchanging_the_sides_mirrors_the_estimate(rows, grouped):
    first, second, prompts = (list(map(float, column)) for column in zip(*rows, strict=True))
    groups = prompts if grouped else None
    forward = win_rate(first, second, groups=groups)
    backward = win_rate(second, first, groups=groups)
    assert (backward.value, backward.low, backward.high) == pytest.approx(
        (1 - forward.value, 1 - forward.high, 1 - forward.low),
        abs=1e-9,
    )
    assert forward.low - 1e-9 <= forward.value <= forward.high + 1e-9
    assert forward.reason or 0 <= forward.low <= forward.high <= 1


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
    assert (copied.low, copied.high) == (alone.low, alone.high)
    assert ignored.high - ignored.low < 0.4 * (copied.high - copied.low)


def test_groups_in_agreement_are_few_trials_not_certainty():
    """Three prompts with ten wins each: resampling would say 100% to 100%."""
    first, second, groups = [1.0] * 30, [0.0] * 30, ["a", "b", "c"] * 10
    estimate = win_rate(first, second, groups=groups)
    assert (estimate.low, estimate.high) == pytest.approx(
        wilson_interval(3, 3),
    ) and estimate.count == 30
    single = win_rate([1.0, 1.0, 0.0], [0.0, 0.0, 1.0], groups=["a"] * 3)
    assert single == (2 / 3, -math.inf, math.inf, 3, "too few groups: all observations are of one")


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
    assert estimate == (2.0, -math.inf, math.inf, 3, "too few groups: 2, and 16 are needed")


def test_of_equal_symmetric_groups_it_is_students_interval_of_their_means():
    """Without skew and with a kurtosis below the normal's nothing is added to Student's."""
    means = np.random.default_rng(5).uniform(-1, 1, size=20)
    values = (np.concatenate([means, -means])[:, None] + np.array([-0.5, -0.1, 0.1, 0.5])).ravel()
    estimate = mean_estimate(values.tolist(), np.repeat(np.arange(40), 4).tolist(), confidence=0.9)
    expected = stats.ttest_1samp(values.reshape(40, 4).mean(1), 0.0).confidence_interval(0.9)
    assert (estimate.low, estimate.high) == pytest.approx((expected.low, expected.high))


def test_mean_estimate_of_one_group_claims_nothing():
    estimate = mean_estimate([1.0, 2.0], ["a", "a"])
    fields = {
        "value": 1.5,
        "low": None,
        "high": None,
        "count": 2,
        "reason": ("too few groups: 1, and 16 are needed"),
    }
    assert json.loads(json.dumps(estimate.as_dict(), allow_nan=False)) == fields


def test_means_of_what_shows_no_spread_claim_nothing():
    assert mean_estimate([3.0] * 50).reason == "too few groups differ: all 50 are alike"
    assert mean_estimate([0.0] * 48 + [0.3, 0.7]).reason == "too few groups differ: 2 of 50"
    assert gain([1.0] * 50, [1.0] * 50, list(range(50))).reason == (
        "too few groups differ: all 50 are alike"
    )


def test_rewards_of_two_levels_are_a_share_between_them():
    rewards, prompts = [1.0] * 49 + [0.0], list(range(50))
    estimate = mean_estimate(rewards, prompts)
    assert (estimate.low, estimate.high) == trials_interval(49, 50)
    other = mean_estimate([5 * r - 2 for r in rewards], prompts)
    assert (other.low, other.high) == pytest.approx((5 * estimate.low - 2, 5 * estimate.high - 2))


def test_a_gain_of_two_levels_may_also_be_a_loss():
    """Five of fifty rose and none fell: that none can fall is not known. Three are too few."""
    gained = gain([1.0] * 45 + [0.0] * 5, [1.0] * 50, list(range(50)))
    assert gained.value == 0.1 and -0.02 < gained.low < 0.05 and 0.15 < gained.high < 0.23
    assert gain([1.0] * 47 + [0.0] * 3, [1.0] * 50, list(range(50))).reason


def test_names_of_groups_do_not_matter():
    values = np.random.default_rng(4).normal(size=40).tolist()
    groups = [index // 2 for index in range(40)]
    assert mean_estimate(values, groups) == mean_estimate(
        values,
        [("prompt", str(group)) for group in groups],
    )


def test_estimate_as_dict():
    assert Estimate(0.5, 0.4, 0.6, 10).as_dict() == {
        "value": 0.5,
        "low": 0.4,
        "high": 0.6,
        "count": 10,
    }


def test_correlation_by_hand():
    # Deviations -1.5 -.5 .5 1.5 against -6.5 -3.5 1.5 8.5: products sum to 25, squares to 5 and
    # 129.
    result = correlation([1.0, 2.0, 3.0, 4.0, None], [1.0, 4.0, 9.0, 16.0, 7.0])
    assert result["pearson"] == pytest.approx(25 / math.sqrt(5 * 129))
    assert result["spearman"] == pytest.approx(1.0)
    assert correlation([1.0, 2.0, 3.0], [3.0, 2.0, 1.0]) == pytest.approx(
        {"pearson": -1.0, "spearman": -1.0},
    )


@pytest.mark.parametrize("numbers", [[1.0, 1.0, 1.0], [1.0]])
def test_correlation_with_a_constant_is_undefined(numbers):
    assert all(
        math.isnan(value)
        for value in correlation(numbers, [1.0, 2.0, 3.0][: len(numbers)]).values()
    )


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
