"""Win rates that few judgments by people and many by a machine give, against ppi_py and by simulation."""

import math

import numpy as np
import pytest
from tests.stats.oracles.ppi_py_numbers import items

from tether.stats import grouped_mean
from tether.stats.prediction_powered import prediction_powered_win_rate

PPI_PY = {
    (200, 1000): (0.58510426, 0.52944089, 0.64076763, 0.544),
    (400, 400): (0.64371615, 0.60082392, 0.68660838, 0.665),
}
"""The corrected mean with the best λ, its 95% bounds, and the mean with λ = 1; printed by
oracles/ppi_py_numbers.py (ppi-python 0.2.3).
"""


def some_judged(people, few):
    return [*people[:few].tolist(), *[None] * (len(people) - few)]


@pytest.mark.parametrize("case", PPI_PY, ids=str)
def test_the_numbers_are_those_of_ppi_py(case):
    """Its bounds are normal and take λ for known; ours choose λ anew, and are Wilson's for wins. Two choices
    of λ may differ by 0.2% of the width.
    """
    few, many = case
    people, machine = items(few, many)
    point, low, high, plain = PPI_PY[case]
    result = prediction_powered_win_rate(some_judged(people, few), machine.tolist())
    assert result.estimate.value == pytest.approx(point, abs=1e-8)
    assert result.estimate.count == few
    # θ moves in a line from people's mean at λ = 0 to the plain one at λ = 1
    alone = people[:few].mean()
    assert result.weight == pytest.approx((point - alone) / (plain - alone), abs=1e-5)
    width = result.estimate.high - result.estimate.low
    assert width == pytest.approx(high - low, rel=0.1)
    assert width >= (high - low) * 0.99
    assert result.human_only == grouped_mean(people[:few], None)


def drawn(generator, few, many, kind, rate=0.6):
    """Items judged by a machine that leans, of which a random few are judged by people."""
    total = few + many
    if kind == "prompts":
        owner = np.repeat(np.arange(total // 4), 4)
        chance = generator.beta(2 * rate, 2 * (1 - rate), total // 4)[owner]
    else:
        owner, chance = np.arange(total), rate
    people = (generator.random(total) < chance).astype(float)
    machine = np.where(generator.random(total) < 0.85, people, 1 - people)
    machine[generator.random(total) < 0.1] = 1.0
    if kind == "soft":
        machine = 1 / (1 + np.exp(-(2 * people - 0.5 + generator.normal(0, 1, total))))
    judged = np.zeros(total, dtype=bool)
    judged[generator.permutation(total)[:few]] = True
    labels = [label if own else None for label, own in zip(people.tolist(), judged, strict=True)]
    return labels, machine.tolist(), owner.tolist()


@pytest.mark.slow
@pytest.mark.audit
@pytest.mark.parametrize(
    ("kind", "few", "many", "narrower"),
    [
        ("win", 100, 2000, 0.87),
        ("prompts", 120, 1200, 0.88),
        ("soft", 60, 1500, 0.82),
    ],
)
def test_intervals_hold_the_truth_and_are_narrower_than_those_of_people_alone(
    kind,
    few,
    many,
    narrower,
):
    """The machine's own mean is off by 0.05 to 0.3, which no number of its judgments mends."""
    held, widths = 0, np.zeros(2)
    for seed in range(1000):
        labels, machine, owner = drawn(np.random.default_rng(seed), few, many, kind)
        result = prediction_powered_win_rate(labels, machine, owner)
        held += result.estimate.low <= 0.6 <= result.estimate.high
        sides = result.estimate, result.human_only
        widths += [side.high - side.low for side in sides]
    assert 0.93 <= held / 1000 <= 0.97
    assert widths[0] / widths[1] < narrower


def test_a_machine_that_knows_nothing_costs_nothing():
    generator = np.random.default_rng(3)
    people = generator.random(200).round().tolist()
    machine = generator.random(2200).tolist()
    result = prediction_powered_win_rate([*people, *[None] * 2000], machine)
    assert result.weight < 0.1
    widths = [side.high - side.low for side in (result.estimate, result.human_only)]
    assert widths[0] == pytest.approx(widths[1], rel=0.02)


def test_people_alone_count_where_nothing_corrects_the_machine():
    """No other items; too few judgments; or a machine that differed from people only twice."""
    generator = np.random.default_rng(4)
    people = (generator.random(100) < 0.6).astype(float)
    machine = people.copy()
    machine[:2] = 1 - machine[:2]
    rest = (generator.random(900) < 0.6).astype(float).tolist()
    for labels, judged in (
        (people.tolist(), machine.tolist()),
        ([*people, *[None] * 900], [*machine, *rest]),
        ([*people[:10], *[None] * 900], [*(1 - people[:10]), *rest]),
    ):
        result = prediction_powered_win_rate(labels, judged)
        assert (result.weight, result.estimate) == (0.0, result.human_only)
        assert math.isfinite(result.estimate.low)


def test_a_win_rate_stays_between_0_and_1_and_faults_are_refused():
    generator = np.random.default_rng(5)
    people = (generator.random(60) < 0.9).astype(float)
    machine = np.where(generator.random(660) < 0.9, 1.0, 0.0)
    result = prediction_powered_win_rate([*people, *[None] * 600], machine.tolist())
    assert 0 <= result.estimate.low < result.estimate.high <= 1
    with pytest.raises(ValueError, match="people judged no item"):
        prediction_powered_win_rate([None, None], [0.0, 1.0])
