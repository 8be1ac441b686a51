"""Reward models whose faults are known are told apart: by slice, by calibration, by what length
explains.
"""

import math

import numpy as np
import pytest

from tether.core.types import Annotation, Comparison, assistant, user
from tether.evaluation.reward_quality import fit_temperature, judge_rewards

RNG = np.random.default_rng(0)


def pair(number, chosen_words, rejected_words, **more):
    sides = [(assistant(" ".join(["word"] * count)),) for count in (chosen_words, rejected_words)]
    return Comparison((user(f"q{number}"),), *sides, group=f"g{number}", **more)


def test_a_judge_of_length_alone_is_seen_through():
    pairs = (
        [pair(n, 30, 10) for n in range(60)]
        + [pair(n, 10, 30) for n in range(60, 100)]
        + [pair(n, 10, 11) for n in range(100, 120)]
    )
    scores = [[float(len(side[-1].content)) for side in (p.chosen, p.rejected)] for p in pairs]
    found = judge_rewards(pairs, *zip(*scores, strict=True))
    assert found["accuracy"]["value"] == found["length_only"]["value"] == pytest.approx(60 / 120)
    by_name = {
        row["name"]: row["accuracy"]["value"] for row in found["slices"] if row["kind"] == "length"
    }
    assert by_name == {"chosen longer": 1.0, "chosen shorter": 0.0, "alike": 0.0}
    assert found["difference_with_length"]["pearson"] == pytest.approx(1.0)


def test_ties_and_failures_are_left_out_and_counted():
    pairs = [pair(0, 3, 5), pair(1, 3, 5, tie=True), pair(2, 3, 5), pair(3, 5, 3)]
    found = judge_rewards(pairs, [1.0, 1.0, None, 0.5], [0.0, 0.0, 0.0, 0.5])
    assert (found["num_pairs"], found["num_ties"], found["num_failed"]) == (2, 1, 1)
    assert found["accuracy"]["value"] == 0.75  # one right, one exact tie of scores
    assert found["length_only"]["value"] == 0.5
    with pytest.raises(ValueError, match="no pair"):
        judge_rewards(pairs[1:2], [1.0], [0.0])


@pytest.mark.parametrize("true", [0.5, 1.0, 3.0])
def test_the_temperature_is_found_and_mends_the_calibration(true):
    """Choices are drawn with probability sigma(d / T); a model that says d is too sure by a factor
    of T.
    """
    lead = RNG.normal(0, 3, 6000)
    right = RNG.random(6000) < 1 / (1 + np.exp(-lead / true))
    difference = np.where(right, lead, -lead)
    assert fit_temperature(difference) == pytest.approx(true, rel=0.1)
    pairs = [pair(n, 5, 6) for n in range(6000)]
    found = judge_rewards(pairs, difference.tolist(), [0.0] * 6000)
    assert found["calibration_error_after"] < 0.025
    assert found["loss_after"] <= found["loss"] + 1e-3
    if true != 1.0:
        assert found["calibration_error"] > 2 * found["calibration_error_after"]
    entropy = np.mean(
        np.logaddexp(0, -np.abs(lead) / true)
        + np.abs(lead) / true / (1 + np.exp(np.abs(lead) / true)),
    )
    # the least that any model of these choices can lose
    assert found["loss_after"] == pytest.approx(entropy, abs=0.02)


def test_slices_by_source_margin_and_votes():
    votes = [(1.0, 1.0, 1.0), (1.0, 1.0, -1.0)]
    pairs = [
        pair(
            n,
            5,
            5,
            margin=float(n % 3),
            metadata={"subset": "ab"[n % 2]},
            annotations=[Annotation(f"a{k}", v) for k, v in enumerate(votes[n % 2])],
        )
        for n in range(60)
    ]
    found = judge_rewards(pairs, [float(n % 2 == 0) for n in range(60)], [0.5] * 60)
    slices = {(row["kind"], row["name"]): row["accuracy"] for row in found["slices"]}
    assert slices["source", "a"]["value"] == 1.0 and slices["source", "b"]["value"] == 0.0
    assert (
        slices["votes", "unanimous"]["value"] == 1.0 and slices["votes", "divided"]["value"] == 0.0
    )
    assert {name for kind, name in slices if kind == "margin"} == {"small", "middle", "large"}
    assert all(found["count"] >= 10 for found in slices.values())
    # Of three votes of which one differs, one pair of three agrees; half of the rows are unanimous.
    assert found["annotators"]["agree"] == pytest.approx((1 + 1 / 3) / 2)
    assert found["annotators"]["model_agrees"] == pytest.approx((1 + 1 / 3) / 2)


def test_marks_of_format_are_counted():
    def marked(number, text):
        return Comparison(
            (user(f"q{number}"),),
            (assistant(text),),
            (assistant("plain words"),),
            group=str(number),
        )

    pairs = [
        marked(n, text)
        for n, text in enumerate(["- a\n- b\n**c**", "# h\n1. x", "none", "```\nx\n```"])
    ]
    # 4 marks (bold opens and closes), 2, 0, 2
    found = judge_rewards(pairs, [4.0, 2.0, 0.0, 2.0], [0.0] * 4)
    assert found["difference_with_marks"]["pearson"] == pytest.approx(1.0)
    assert math.isfinite(found["calibration_error"])


@pytest.mark.audit
def test_a_label_below_one_half_prefers_the_other_side():
    """A model that agrees with every label, whichever side a row calls chosen, is right; even
    labels have no right side.
    """
    pairs = [pair(n, 4, 9, probability=0.1) for n in range(20)] + [
        pair(n, 9, 4, probability=0.8) for n in range(20, 30)
    ]
    even = [pair(n, 5, 6, probability=0.5) for n in range(30, 35)]
    scores = [-1.0] * 20 + [1.0] * 10
    found = judge_rewards([*pairs, *even], [*scores, *[-3.0] * 5], [0.0] * 35)
    assert (
        found["accuracy"]["value"],
        found["num_pairs"],
        found["num_ties"],
        found["num_failed"],
    ) == (1.0, 30, 5, 0)
    assert found["length_only"]["value"] == 1.0  # the better side is the longer one of every pair
    turned = judge_rewards([p.swap() for p in pairs], [-s for s in scores], [0.0] * 30)
    assert turned == judge_rewards(pairs, scores, [0.0] * 30)
    with pytest.raises(ValueError, match="no pair"):
        judge_rewards(even, [1.0] * 5, [0.0] * 5)
