"""Baselines leave the mean gradient where it is. What they do to its variance depends on where the
scores lie.
"""

import pytest

pytestmark = pytest.mark.slow
START, SUMS = "letters at the start, scores 3 higher", "sums, right or wrong"
BASELINES = ("running mean", "leave-one-out", "learned value")


@pytest.fixture(scope="module")
def results(experiment):
    return experiment("variance", value_steps=20, batches=40)


def factor(result, task, name):
    arms = result["tasks"][task]["arms"]
    return arms["no baseline"]["trace"] / arms[name]["trace"]


@pytest.mark.parametrize("name", BASELINES)
def test_scores_far_from_zero_need_a_baseline(results, name):
    for result in results:
        task = result["tasks"][START]
        assert task["score"] > 2 * task["deviation"]
        assert factor(result, START, name) > 3


@pytest.mark.parametrize("name", ["running mean", "learned value"])
def test_the_mean_stays(results, name):
    for result in results:
        arm = result["tasks"][START]["arms"][name]
        assert arm["along"] == pytest.approx(1, abs=0.2) and arm["deviations"] < 4


def test_the_same_measurement_sees_a_bias(results):
    """Of four samples the group's mean holds a quarter of each score: the gradient shrinks to three
    quarters.
    """
    for result in results:
        arm = result["tasks"][START]["arms"]["group mean"]
        assert arm["along"] == pytest.approx(0.75, abs=1e-4) and arm["deviations"] > 5


def test_right_or_wrong_is_best_left_as_it_is(results):
    """Wrong answers are made of unlikely tokens, whose gradients are long; a score of 0 leaves them
    out, and a baseline brings them in. The best constant lies far below the mean score.
    """
    for result in results:
        task = result["tasks"][SUMS]
        assert factor(result, SUMS, "running mean") < 1 <= factor(result, SUMS, "best constant")
        assert task["constant"] < task["score"] / 2
