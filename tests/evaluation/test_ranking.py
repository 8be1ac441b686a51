"""Rankings of policies, against evalica, against refits without a prompt, and by simulation."""

import math

import numpy as np
import pytest
from tests.evaluation.oracles.evalica_numbers import contests

from tether.core.errors import DataError
from tether.evaluation.ranking import rank_policies

EVALICA = {
    (1, 60): {
        "ant": 0.540575,
        "bee": 0.073341,
        "cat": -1.179966,
        "dog": 0.698123,
        "eel": -0.132073,
    },
    (2, 500): {
        "ant": -0.142901,
        "bee": 0.271231,
        "cat": -0.781082,
        "dog": 0.714778,
        "eel": -0.062026,
    },
}
"""Logarithms of scores, of mean 0; printed by oracles/evalica_numbers.py (evalica 0.4.2)."""


@pytest.mark.parametrize("case", EVALICA, ids=str)
def test_strengths_are_those_of_evalica(case):
    ranking = rank_policies(*contests(*case))
    strengths = dict(zip(ranking.names, ranking.strengths.tolist(), strict=True))
    assert strengths == pytest.approx(EVALICA[case], abs=2e-6)
    assert list(ranking.names) == sorted(strengths, key=strengths.__getitem__, reverse=True)


def covariance(ranking):
    """Of the strengths: the sandwich of the jackknife."""
    groups = len(ranking.sizes)
    return groups / (groups - 1) * ranking.influences.T @ ranking.influences


def test_two_policies_differ_by_the_log_odds_of_their_wins():
    """30 of 40, by hand: log 3, with variance 1/30 + 1/10 of binomial log-odds."""
    ranking = rank_policies(["a"] * 40, ["b"] * 40, [1.0] * 30 + [0.0] * 10)
    assert ranking.difference("a", "b").value == pytest.approx(math.log(3), abs=1e-9)
    contrast = np.array([1.0, -1.0])
    variance = contrast @ covariance(ranking) @ contrast
    assert variance == pytest.approx(1 / 30 + 1 / 10, rel=0.06)


def test_influences_are_those_of_refits_without_one_prompt():
    """One Newton step from the fit with all prompts ends near the fit without one of them."""
    first, second, wins = contests(3, 400)
    prompts = [number // 4 for number in range(400)]
    ranking = rank_policies(first, second, wins, prompts)
    refits = []
    for left_out in range(100):
        rows = [i for i, prompt in enumerate(prompts) if prompt != left_out]
        parts = [[column[i] for i in rows] for column in (first, second, wins)]
        without = rank_policies(*parts)
        refits.append([without.strengths[without.names.index(name)] for name in ranking.names])
    moved = np.array(refits)
    wanted = 99 / 100 * (moved - moved.mean(0)).T @ (moved - moved.mean(0))
    assert covariance(ranking) == pytest.approx(wanted, rel=0.01, abs=5e-5)


def simulated(seed, prompts):
    """Three policies, compared four times each on every prompt, which favours one of them by its own."""
    generator = np.random.default_rng(seed)
    strengths = np.array([0.5, 0.0, -0.5])
    names, first, second, wins, owner = "abc", [], [], [], []
    for prompt in range(prompts):
        leans = generator.normal(0, 1.0, 3)
        for left, right in ((0, 1), (1, 2), (2, 0)) * 4:
            odds = strengths[left] - strengths[right] + leans[left] - leans[right]
            first.append(names[left])
            second.append(names[right])
            wins.append(float(generator.random() < 1 / (1 + math.exp(-odds))))
            owner.append(prompt)
    return first, second, wins, owner


def truth():
    """The strengths to which the fit of a great many prompts goes: leans flatten odds."""
    ranking = rank_policies(*simulated(10**6, 20_000)[:3])
    return ranking.difference("a", "c").value


@pytest.mark.slow
@pytest.mark.audit
@pytest.mark.parametrize("prompts", [30, 100])
def test_differences_hold_the_truth(prompts):
    wanted, held, alone = truth(), 0, 0
    for seed in range(1000):
        rows = simulated(seed, prompts)
        estimate = rank_policies(*rows).difference("a", "c")
        held += estimate.low <= wanted <= estimate.high
        estimate = rank_policies(*rows[:3]).difference("a", "c")
        alone += estimate.low <= wanted <= estimate.high
    assert 0.93 <= held / 1000 <= 0.97
    assert alone / 1000 < 0.92, "without prompts the interval is too narrow"


def test_places_overlap_where_policies_cannot_be_told_apart():
    """Two equal policies share the first places; a third, far weaker, has the last alone."""
    first = ["a", "a", "b"] * 60
    second = ["b", "c", "c"] * 60
    wins = [1.0, 1.0, 1.0, 0.0, 1.0, 1.0, 0.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 1.0] * 12
    rows = {row.name: row for row in rank_policies(first, second, wins).standings()}
    assert (rows["a"].best, rows["a"].worst) == (rows["b"].best, rows["b"].worst) == (1, 2)
    assert (rows["c"].best, rows["c"].worst) == (3, 3)
    assert sum(row.strength.value for row in rows.values()) == pytest.approx(0, abs=1e-9)


def test_faults_are_refused():
    with pytest.raises(DataError, match=r"c never won.*a, b"):
        rank_policies(["a", "b", "a"], ["b", "a", "c"], [1.0, 1.0, 1.0])
    few = rank_policies(["a"] * 30, ["b"] * 30, [1.0, 0.0, 0.5] * 10, [i % 10 for i in range(30)])
    assert few.difference("a", "b").reason == "too few prompts: 10, and 16 are needed"
