import math
import random
from collections import Counter

import pytest

from tether.core.types import Prompt, user
from tether.people.labels.annotators import label_pairs, noise_for_agreement

PROMPTS = [Prompt((user(f"question {n}"),), f"q{n}") for n in range(300)]
RESPONSES = [[f"answer {n} {k}" for k in range(4)] for n in range(300)]
RNG = random.Random(1)
SCORES = [[RNG.gauss(0, 1) for _ in range(4)] for _ in range(300)]


@pytest.mark.parametrize("agreement", [0.6, 0.7, 0.9])
def test_noise_is_fitted_to_the_wanted_agreement(agreement):
    differences = [RNG.gauss(0, 1) for _ in range(2000)]
    scale = noise_for_agreement(differences, agreement)
    draw = random.Random(5)
    same = 0
    for difference in differences * 5:  # an independent simulation of two annotators
        p = 1 / (1 + math.exp(-difference / scale))
        same += (draw.random() < p) == (draw.random() < p)
    assert same / 10_000 == pytest.approx(agreement, abs=0.015)


def test_votes_follow_bradley_terry():
    """Among pairs of similar difference, the share of votes for the better side is sigma(difference
    / noise), ties aside.
    """
    comparisons, figures = label_pairs(
        PROMPTS,
        RESPONSES,
        SCORES,
        agreement=0.7,
        undecided=0.0,
        num_annotators=3,
    )
    bins = Counter(), Counter()
    for row in comparisons:
        difference = row.metadata["gold_difference"]
        for annotation in row.annotations:
            better = annotation.preference * (1 if difference > 0 else -1)
            key = min(4, int(abs(difference) / figures["noise"] / 0.75))
            bins[0][key] += better > 0
            bins[1][key] += 1
    for key in range(4):
        expected = 1 / (1 + math.exp(-0.75 * (key + 0.5)))
        assert bins[0][key] / bins[1][key] == pytest.approx(expected, abs=0.05)


def test_majority_decides_and_the_rest_is_dropped():
    comparisons, figures = label_pairs(
        PROMPTS,
        RESPONSES,
        SCORES,
        agreement=0.7,
        undecided=0.5,
        num_annotators=3,
    )
    assert 300 * 6 == len(comparisons) + figures["dropped_no_majority"] > len(comparisons)
    for row in comparisons:
        assert sum(a.preference == 1 for a in row.annotations) >= 2
        assert row.group == row.id.rsplit("-", 1)[0]
    assert figures["majority_gold_agreement"] > figures["annotator_gold_agreement"] > 0.6


def test_labels_do_not_depend_on_the_order_of_prompts():
    once, _ = label_pairs(PROMPTS, RESPONSES, SCORES, agreement=0.7)
    again, _ = label_pairs(PROMPTS[::-1], RESPONSES[::-1], SCORES[::-1], agreement=0.7)
    assert {(c.id, c.chosen) for c in once} == {(c.id, c.chosen) for c in again}


def test_equal_and_empty_answers_are_not_asked_about():
    comparisons, figures = label_pairs(
        PROMPTS[:2],
        [["a", "a", "b"], ["", "x", "y"]],
        [[0, 0, 1], [0, 1, 2]],
        agreement=0.7,
        undecided=0.0,
    )
    assert len(comparisons) + figures["dropped_no_majority"] == figures["dropped_equal"] == 3
