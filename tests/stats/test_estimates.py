"""Intervals over groups: how often they hold the truth, by simulation; and what they are by other
people's code.
"""

import numpy as np
import pytest
from scipy import stats

from tether.evaluation.process import StepCounts, step_estimates, step_f1
from tether.evaluation.winrate import mean_estimate, win_rate
from tether.people.labels.agreement import krippendorff_alpha, raw_agreement
from tether.people.labels.votes import Vote
from tether.stats import Influence, jackknife, share_interval, wilson_interval


def covered(trials, truth, draw, of):
    """The share of intervals that hold the truth, those of unanimous groups among them."""
    held = 0
    for seed in range(trials):
        found = of(*draw(np.random.default_rng(seed)))
        held += found.low <= truth <= found.high
    return held / trials


def uneven(generator, groups):
    """Groups of one to eight observations: which group each is of."""
    return np.repeat(np.arange(groups), generator.integers(1, 9, groups))


@pytest.mark.audit
@pytest.mark.parametrize("groups", [20, 40, 150])
@pytest.mark.parametrize("rate", [0.6, 0.9])
def test_win_rates_hold_the_truth(groups, rate):
    """Prompts have win rates of their own, from a beta of concentration two: a third of the
    variance is between prompts.
    """

    def draw(generator):
        owner = uneven(generator, groups)
        wins = (
            generator.random(len(owner)) < generator.beta(2 * rate, 2 * (1 - rate), groups)[owner]
        )
        return wins.tolist(), owner.tolist()

    share = covered(
        1500,
        rate,
        draw,
        lambda wins, owner: win_rate(wins, [0.5] * len(wins), groups=owner),
    )
    assert 0.935 <= share <= 0.98


@pytest.mark.audit
@pytest.mark.parametrize("groups", [20, 40, 150])
def test_means_hold_the_truth(groups):
    def draw(generator):
        owner = uneven(generator, groups)
        return (
            generator.normal(size=groups)[owner] + generator.normal(size=len(owner))
        ).tolist(), owner.tolist()

    assert 0.935 <= covered(1500, 0.0, draw, mean_estimate) <= 0.97


@pytest.mark.audit
@pytest.mark.parametrize("groups", [20, 40, 150])
def test_f1_of_problems_holds_the_truth(groups):
    """Wrong steps are found with 0.9; as many right ones are called wrong as makes the ratio of the
    sums 0.9 too.
    """

    def draw(generator):
        wrong = 1 + generator.binomial(5, generator.beta(1, 3, groups))
        hits, false = generator.binomial(wrong, 0.9), generator.binomial(wrong, 0.1)
        counts = [
            StepCounts(float(h), float(f), 5.0, float(w - h))
            for h, f, w in zip(hits, false, wrong, strict=True)
        ]
        return counts, list(range(groups))

    share = covered(
        600,
        0.9,
        draw,
        lambda counts, owner: step_estimates(counts, owner, [step_f1])["step_f1"],
    )
    assert 0.935 <= share <= (0.995 if groups == 20 else 0.985)


@pytest.mark.audit
@pytest.mark.parametrize("items", [20, 40])
def test_agreement_holds_the_truth(items):
    """Three people who are right with 0.9, of a fair coin, agree in 0.82: alpha 0.64."""

    def draw(generator):
        right = generator.random((items, 3)) < 0.9
        truth = generator.random(items) < 0.5
        return (
            [
                Vote(str(i), str(k), "first" if right[i, k] == truth[i] else "second")
                for i in range(items)
                for k in range(3)
            ],
        )

    assert 0.93 <= covered(400, 0.82, draw, raw_agreement) <= 0.985
    assert 0.93 <= covered(400, 0.64, draw, krippendorff_alpha) <= 0.985


def test_groups_that_are_alike_count_as_often_as_they_are_there():
    without, sizes = np.array([1.0, 2.0, 4.0]), np.array([3.0, 1.0, 2.0])
    repeats = np.array([2.0, 1.0, 3.0])
    plain = jackknife(np.repeat(without, [2, 1, 3]), np.repeat(sizes, [2, 1, 3]))
    told = jackknife(without, sizes, repeats)
    assert (told.error, told.groups, told.equal, told.carriers) == pytest.approx(
        (plain.error, plain.groups, plain.equal, plain.carriers),
    )
    values = np.random.default_rng(0).normal(size=9)
    alone = jackknife((values.sum() - values) / 8)
    assert (alone.error, alone.groups, alone.equal) == pytest.approx((stats.sem(values), 9, 9.0))


def test_a_share_of_independent_trials_is_nearly_wilsons():
    """Of 400 trials in groups of their own the jackknife's G / (G − 1) is small change."""
    wins = np.repeat([1.0, 0.0], [120, 280])
    influence = jackknife((wins.sum() - wins) / 399)
    assert share_interval(0.3, influence, 400) == pytest.approx(wilson_interval(120, 400), abs=1e-3)
    silent = Influence(np.zeros(12), np.ones(12), 12.0)
    assert share_interval(1.0, silent, 48) == pytest.approx(wilson_interval(12, 12))
