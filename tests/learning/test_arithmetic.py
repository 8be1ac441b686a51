"""A verifiable reward mends what a demonstrator taught wrong; a random one does not, and a baseline
makes constants harmless.
"""

from statistics import fmean

import pytest

pytestmark = pytest.mark.slow
METHODS = ("REINFORCE", "RLOO", "GRPO", "Dr. GRPO", "GRPO, process rewards")


@pytest.fixture(scope="module")
def results(experiment):
    return experiment("arithmetic", long=0)


def on_the_way(results, name):
    return [fmean(result["arms"][name]["curve"]) for result in results]


def test_imitation_gets_some_right(results):
    assert all(0.3 < result["sft"]["sampled"] < 0.5 for result in results)


@pytest.mark.parametrize("name", METHODS)
def test_every_method_learns_more(results, name):
    """On average: of 24 seeds one or two hardly learn from so few answers, and which ones depends
    on the processor's rounding.
    """
    arms = [result["arms"][name] for result in results]
    assert (
        fmean(
            arm["sampled"] - result["sft"]["sampled"]
            for arm, result in zip(arms, results, strict=True)
        )
        > 0.15
    )
    assert (
        fmean(
            arm["curve"][-1] - result["sft"]["greedy"]
            for arm, result in zip(arms, results, strict=True)
        )
        > 0.25
    )


def test_random_rewards_teach_nothing(results):
    final = {
        name: fmean(result["arms"][name]["sampled"] for result in results)
        for name in (*METHODS, "GRPO, random rewards")
    }
    assert all(
        result["arms"]["GRPO, random rewards"]["sampled"] < result["sft"]["sampled"] + 0.1
        for result in results
    )
    assert final.pop("GRPO, random rewards") < min(final.values()) - 0.15


def test_rewards_of_steps_teach_where_right_answers_are_rare(results):
    for result in results:
        curves = {name: fmean(arm["curve"]) for name, arm in result["rare"]["arms"].items()}
        assert result["rare"]["sft"]["sampled"] < 0.3  # a guess is right one time in five
        assert curves["GRPO, process rewards"] > max(curves["GRPO"], curves["RLOO"]) + 0.05


def test_a_constant_on_every_score_is_nothing_to_a_baseline_and_much_without_one(results):
    shifted = on_the_way(results, "RLOO, all scores 2 higher")
    assert shifted == pytest.approx(on_the_way(results, "RLOO"), abs=0.01)
    assert fmean(on_the_way(results, "REINFORCE, all scores 2 higher")) < fmean(shifted) - 0.05
