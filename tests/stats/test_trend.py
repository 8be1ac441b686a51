"""Whether a noisy series moved, against series whose movement is known."""

import random

import pytest

from tether.stats import trend, vague

pytestmark = pytest.mark.audit


def test_the_ends_by_hand():
    found = trend([float(n) for n in range(100)])
    assert (found.first, found.last, found.span) == (4.5, 94.5, 10)
    assert [trend([0.0] * n).span for n in (1, 4, 7, 8, 14, 20, 50, 60)] == [1, 1, 1, 2, 3, 5, 5, 6]
    assert (
        trend([]) is None
        and trend([1.0, 3.0]).gain["value"] == 2.0
        and trend([1.0] * 5).noise is None
    )
    assert trend([1.0, 2.0] * 10).gain["reason"] == "too few steps: 20, and 30 are needed"
    assert trend([1.0] * 40).gain["reason"] == "too few steps differ: all 40 are alike"


@pytest.mark.parametrize(("count", "drift"), [(50, 0.0), (100, 0.02)])
def test_the_interval_of_the_gain_holds_what_it_should(count, drift):
    draw, held = random.Random(count), 0
    for _ in range(1000):
        gain = trend([drift * step + draw.gauss(0, 1) for step in range(count)]).gain
        span = trend([0.0] * count).span
        held += gain["low"] <= drift * (count - span) <= gain["high"]
    assert 0.93 < held / 1000 < 0.98


def test_a_kl_that_is_clearly_there_needs_no_excuse():
    assert vague(3.0, 0.5) == vague(3.0, None) == ""
    assert vague(0.2, 0.5) == "indistinguishable from 0" and "may be negative" in vague(-0.07, 0.1)


@pytest.mark.parametrize("count", [250, 400])
def test_a_loss_that_falls_steeply_once_ends_no_run(count):
    """All weight lies on one size of the noise: the interval's search begins at its root."""
    draw = random.Random(0)
    falling = [0.1 + 5.6 * 0.95**step + draw.gauss(0, 0.001) for step in range(count)]
    course = trend(falling)
    assert course.last < course.first
    assert "independent" in course.lacking or course.gain_noise > 0
