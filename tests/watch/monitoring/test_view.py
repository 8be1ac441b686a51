"""The judgement of a window against scipy's exact tests and quantiles."""

import math

import numpy as np
import pytest
import scipy.stats

from tether.settings.watch import WatchConfig
from tether.watch.monitoring.view import View

LOOK = 0.02 / (10 * math.log(10))
"""The chance of the tenth look."""


def view(series, size, **values):
    empty = {"metrics": {}, "phrases": (), "texts": (), "columns": {}, "course": {}, "counts": {}}
    return View(
        **{"config": WatchConfig(), "steps": 10, "looks": 10, "first": 2, **empty, **values},
        series=series,
        size=size,
    )


@pytest.mark.parametrize(
    ("looks", "chance"),
    [(1, 0.00606826), (10, 0.000868589), (100, 0.0000434294)],
)
def test_a_later_look_sounds_more_rarely_and_its_limit_is_wider(looks, chance):
    """By hand: 0.02 / (n ln n) from n = 3 on. Of a normal series the limit is Student's quantile."""
    values = [*scipy.stats.norm.ppf((np.arange(400) + 0.5) / 400)]
    seen = view({"x": [*np.random.default_rng(2).permutation(values)]}, 4, looks=looks)
    assert seen.chance == pytest.approx(chance, rel=1e-5)
    exact = scipy.stats.t.isf(chance, 393) * math.sqrt(1 / 4 + 1 / 396)
    assert seen.moved("x").least == pytest.approx(exact, rel=0.05)


def test_the_mean_of_skewed_values_is_judged_by_its_own_quantile():
    """Four values of an exponential distribution have a gamma's mean: the exact limit is 1.5 times
    that of a normal distribution. Downwards, and between two windows, no skewness widens it.
    """
    values = scipy.stats.expon.ppf((np.arange(4000) + 0.5) / 4000)
    seen = view({"x": [*np.random.default_rng(2).permutation(values)]}, 4)
    normal = scipy.stats.norm.isf(LOOK) / 2
    exact = scipy.stats.gamma.isf(LOOK, 4, scale=1 / 4) - 1
    assert exact > 1.45 * normal
    assert seen.moved("x").least == pytest.approx(exact, rel=0.05)
    assert seen.moved("x", -1).least == pytest.approx(normal, rel=0.05)
    both = seen.contrast("x", (1.0, -1.0)).least
    assert both == pytest.approx(math.sqrt(2) * normal, rel=0.05)


@pytest.mark.parametrize("limit", [0.1, 0.5, 0.8])
def test_the_level_of_a_share_is_judged_by_a_binomial_test(limit):
    """Sixteen answers a step, hardly more in the last ones, which is no change; half the chance is for
    a change.
    """
    for count in range(49):
        low = count // 3 / 16
        window = [(count + place) // 3 / 16 for place in range(3)]
        seen = view({"x": [low] * 10 + window}, 3, counts={"x": 16}, limit=limit)
        exact = scipy.stats.binomtest(count, 48, limit, alternative="greater").pvalue
        judged = seen.above("x")
        assert judged.sure == (exact <= LOOK / 2)
        assert judged.sure == (count / 48 >= judged.least - 1e-9)


def test_steps_that_end_all_or_nothing_are_no_binomials():
    """Three such steps in a row end alike in one of eight cases: too often for an alarm."""
    earlier = [*np.random.default_rng(0).permutation([0.0, 1.0] * 15)]
    seen = view({"x": [*earlier, 1.0, 1.0, 1.0]}, 3, counts={"x": 16}, limit=0.5)
    assert not seen.above("x").sure and not seen.moved("x").sure


def test_a_share_below_its_limit_that_rose_is_judged_by_fishers_exact_test():
    for count in range(2, 17):
        seen = view({"x": [2 / 16] * 10 + [count / 16] * 3}, 3, counts={"x": 16}, limit=0.99)
        table = [[3 * count, 48 - 3 * count], [20, 140]]
        exact = scipy.stats.fisher_exact(table, alternative="greater").pvalue
        assert seen.above("x").sure == (exact <= LOOK / 2)


def test_a_mean_is_judged_by_students_t_where_no_counts_are_known():
    """Four values around a limit of 0, with a deviation of 1: t with three degrees of freedom."""
    window = np.asarray([-1.0, 1.0, 1.0, -1.0]) * math.sqrt(3 / 4)
    exact = scipy.stats.t.isf(LOOK / 2, 3) / 2
    for shift in (0.98 * exact, 1.02 * exact):
        seen = view({"x": [*(window + shift)]}, 4, limit=0.0)
        assert seen.above("x").sure == (shift > exact)
