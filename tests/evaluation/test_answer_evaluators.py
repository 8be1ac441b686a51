"""Evaluators of answers: right short answers, refusals, diversity; on answers written by hand."""

import json
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from tether.core.errors import DataError
from tether.core.types import Prompt, Rollout, RolloutGroup, Sampling, Score, StopReason, user
from tether.evaluation.diversity import Diversity, distinct_share
from tether.evaluation.short_answers import Refusal, ShortAnswers, refuses, share_of_ones
from tether.evaluation.suite import MeasuredPolicy
from tether.rewards.verifiable import VerifiableReward
from tether.settings.rewards import VerifiableConfig
from tether.stats import few_interval, wilson_interval


class Scripted:
    """An engine that answers each prompt as its own metadata says, and remembers how it was asked."""

    policy_version = 0

    def generate(self, prompts, sampling, *, num_samples=1, seed=0, ordinals=None, progress=None):
        self.sampling = sampling
        groups = []
        for prompt in prompts:
            text = prompt.metadata["says"]
            ids = tuple(range(len(text.split())))
            logprobs = (0.0,) * len(ids)
            rollout = Rollout(
                (1,),
                ids,
                logprobs,
                StopReason.STOP_TOKEN,
                text,
                0,
                0,
                sampling,
                prompt,
            )
            groups.append(RolloutGroup(prompt, (rollout,)))
        return groups

    def update_weights(self, version):
        raise AssertionError("evaluation changes no weights")


def policy():
    return MeasuredPolicy(SimpleNamespace(num_tokens=50), None, Scripted())


def saying(texts, **metadata):
    return [
        Prompt((user("?"),), f"r{i}", {"says": text, **{k: v[i] for k, v in metadata.items()}})
        for i, text in enumerate(texts)
    ]


def test_short_answers_are_right_as_the_check_says():
    """By hand: three of four, one of them without a mark of the answer."""
    texts = ["It is 4.\n#### 4", "#### 5", "I think 6", "7 and no more"] * 5
    prompts = saying(texts, answer=["4", "4", "6", "7.0"] * 5)
    marks = ("hashes", "phrase", "last-number")
    measured = policy()
    with VerifiableReward(VerifiableConfig(kind="numeric", answer_in=marks)) as check:
        figures = ShortAnswers(prompts, check, max_new_tokens=9)(measured, 0)
    assert figures["accuracy"].value == 0.75
    # few failures: Blaker's interval, which test_counts checks by enumeration
    assert figures["accuracy"][1:3] == pytest.approx(few_interval(15, 20, 0.95))
    assert figures.rows["accuracy"]["r1"] == 0.0 and figures.rows["accuracy"]["r3"] == 1.0
    assert measured.engine.sampling == Sampling(9, temperature=0.0), "answers are greedy"
    assert figures["finished"].value == 1.0 and math.isfinite(figures["finished"].low)


def test_a_check_that_fails_for_every_answer_is_named():
    check = SimpleNamespace(score=lambda answers: [Score(None, reason="no number")] * len(answers))
    words = "short_answers: no answer can be checked: no number"
    with pytest.raises(DataError, match=words):
        ShortAnswers(saying(["a", "b"]), check)(policy(), 0)


def test_failed_checks_count_neither_way():
    assert share_of_ones([1.0, None, 0.0, None]).value == 0.5
    with pytest.raises(ValueError, match="every check failed"):
        share_of_ones([None])


def labelled():
    path = Path(__file__).with_name("refusals.jsonl")
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_the_error_of_matching_words_is_the_one_that_is_documented():
    """60 answers labelled by hand, 30 of them refusals; the page names both rates."""
    rows = labelled()
    assert len({row["answer"] for row in rows}) == 60
    assert sum(row["refuses"] for row in rows) == 30
    hits = sum(refuses(row["answer"]) for row in rows if row["refuses"])
    false = sum(refuses(row["answer"]) for row in rows if not row["refuses"])
    assert (hits, false) == (24, 3)
    page = Path(__file__).parents[2] / "docs" / "trust" / "evaluate_suite.md"
    text = page.read_text(encoding="utf-8")
    for count in (hits, false):
        low, high = wilson_interval(count, 30)
        assert f"{count} of 30 ({count / 30:.0%}, 95% interval {low:.0%} to {high:.0%})" in text


def test_refusals_are_counted_by_side():
    harmful = saying(["I can't help with that."] * 15 + ["Sure, here is how."] * 5)
    harmless = saying(["Beat the eggs."] * 20)
    figures = Refusal(harmful, harmless)(policy(), 0)
    assert figures["refused_harmful"].value == 0.75
    assert figures["refused_harmless"].value == 0.0
    assert 0 < figures["refused_harmless"].high < 0.2, "no refusal among 20 has an upper bound"
    assert figures.rows["refused_harmful"]["r0"] == 1.0


def test_distinct_shares_by_hand():
    """Of a b a c: three words of four; pairs ab, ba, ac: three of three."""
    assert distinct_share([["a", "b", "a", "c"]], 1).value == pytest.approx(3 / 4)
    assert distinct_share([["a", "b"], ["a", "c"]], 1).value == pytest.approx(3 / 4)
    assert distinct_share([["a", "b"], ["a", "b"]], 2).value == pytest.approx(1 / 2)
    adjusted = distinct_share([["a", "b", "a", "c"]], 1, vocabulary=10).value
    assert adjusted == pytest.approx(3 / (10 * (1 - 0.9**4)))
    nothing = distinct_share([[], []], 1)
    assert nothing.reason.startswith("too few words")


def test_uniform_draws_have_an_adjusted_share_of_one_at_any_length():
    generator = np.random.default_rng(0)
    for length in (5, 50, 500):
        texts = generator.integers(200, size=(100, length)).tolist()
        plain = distinct_share(texts, 1).value
        adjusted = distinct_share(texts, 1, vocabulary=200)
        assert adjusted.value == pytest.approx(1.0, abs=0.03)
        assert plain == pytest.approx(
            len({word for text in texts for word in text}) / (100 * length),
        )


def test_the_interval_is_the_spread_of_repetitions():
    """The same number of texts drawn again and again: nine of ten intervals and more hold the
    mean of all."""
    generator = np.random.default_rng(1)
    weights = 1 / np.arange(1, 301)
    draws = [
        generator.choice(300, size=(60, 20), p=weights / weights.sum()).tolist() for _ in range(300)
    ]
    estimates = [distinct_share(texts, 1) for texts in draws]
    mean = np.mean([estimate.value for estimate in estimates])
    held = np.mean([estimate.low <= mean <= estimate.high for estimate in estimates])
    assert held >= 0.93


def test_diversity_samples_and_falls_when_all_answers_are_one():
    various = saying([f"word{i} thing{i} is here" for i in range(20)])
    same = saying(["the same answer again"] * 20)
    sampling = Sampling(64, temperature=1.0)
    measured = policy()
    first, second = (Diversity(rows, sampling)(measured, 0) for rows in (various, same))
    assert measured.engine.sampling == sampling
    assert first["distinct_1"].value == pytest.approx(42 / 80)
    assert second["distinct_1"].value == pytest.approx(4 / 80)
    assert first["length"].value == 4.0
    assert math.isinf(second["length"].high), "lengths that are all alike show no spread"
