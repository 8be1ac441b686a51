"""Multiple choice by likelihood, against lm-eval's own numbers and a model's own logits."""

import json
import math
import random
import re
import time

import numpy as np
import pytest
import torch
from tests.evaluation.oracles.lm_eval_numbers import rows, tokenizer

from tether.core.errors import DataError
from tether.data.sources import Quarantine
from tether.evaluation.multiple_choice import (
    ChoiceLogprobs,
    calibration_estimate,
    check_question,
    choice_likelihoods,
    choice_probabilities,
    encode_choice,
    multiple_choice_figures,
    right_choices,
)
from tether.evaluation.questions import Question, _without_marks, read_questions
from tether.models.tiny import tiny_model
from tether.models.trunk import Role

LM_EVAL = {
    "arc": (
        [18, 12, 12],
        [
            -68.188,
            -63.396,
            -36.335,
            -57.452,
            -43.542,
            -22.865,
            -69.372,
            -24.358,
            -18.317,
            -73.928,
            -19.056,
            -42.149,
            -83.581,
            -50.413,
            -38.48,
            -30.865,
        ],
    ),
    "mmlu": (
        [16, 16, 16],
        [
            -11.461,
            -13.08,
            -12.791,
            -12.456,
            -11.541,
            -12.491,
            -12.316,
            -12.687,
            -12.214,
            -12.648,
            -12.292,
            -13.251,
            -12.191,
            -12.588,
            -12.61,
            -12.655,
        ],
    ),
    "hellaswag": (
        [17, 16, 15],
        [
            -116.567,
            -159.697,
            -55.856,
            -73.217,
            -82.451,
            -98.635,
            -127.05,
            -66.028,
            -56.335,
            -65.085,
            -55.838,
            -161.907,
            -112.009,
            -40.395,
            -85.742,
            -70.05,
        ],
    ),
}
"""Right answers of 60 by acc, acc_norm and acc_bytes, and the log-probabilities of the choices of
the first four questions; printed by oracles/lm_eval_numbers.py (lm-eval 0.4.13).
"""


@pytest.fixture(scope="module")
def role():
    return Role(tiny_model(vocab=360))


@pytest.fixture(scope="module")
def words():
    return tokenizer()


def written(folder, lines, name="questions.jsonl"):
    path = folder / name
    path.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    return path


@pytest.mark.parametrize("layout", LM_EVAL)
def test_the_numbers_are_those_of_lm_eval(layout, tmp_path, role, words):
    figures, logprobs = LM_EVAL[layout]
    questions = read_questions(written(tmp_path, rows(layout)))
    assert {question.layout for question in questions} == {layout}
    read = choice_likelihoods(role, words, 0, questions)
    assert np.concatenate(read.logprobs[:4]) == pytest.approx(logprobs, abs=2e-3)
    right = right_choices(questions, read)
    assert [sum(right[name]) for name in ("acc", "acc_norm", "acc_bytes")] == figures
    estimates = multiple_choice_figures(questions, read)
    assert estimates["acc"].value == pytest.approx(figures[0] / 60)
    assert estimates["acc"].low < estimates["acc"].value < estimates["acc"].high
    assert estimates["ece"].reason == "too few questions: 60, and 100 are needed"


def test_log_probabilities_are_sums_of_the_models_own(role, words):
    question = Question("q", "Question: river stone ", ("cloud café", "horse"), 0, "plain")
    read = choice_likelihoods(role, words, 0, [question])
    for place, choice in enumerate(question.choices):
        ids = words.encode(f"{question.context} {choice}")
        start = len(words.encode(question.context.rstrip()))
        with torch.no_grad():
            logits = role.model(torch.tensor([ids])).logits[0].log_softmax(-1)
        wanted = sum(logits[t - 1, ids[t]].item() for t in range(start, len(ids)))
        assert read.logprobs[0][place] == pytest.approx(wanted, abs=1e-4)
        assert read.tokens[0][place] == len(ids) - start
    odds = read.logprobs[0][0] - read.logprobs[0][1]
    assert choice_probabilities(read)[0] == pytest.approx(1 / (1 + math.exp(-abs(odds))))


def test_white_space_moves_to_the_choice(words):
    """As lm-eval has it: the same tokens count behind "a: " + "b" and "a:" + " b"."""
    apart, together = (
        encode_choice(words, *parts) for parts in (("a: ", "river"), ("a:", " river"))
    )
    assert apart == together
    assert (
        words.decode([i for i, own in zip(apart.ids, apart.trained, strict=True) if own])
        == " river"
    )
    alone = encode_choice(words, "", "river")
    assert alone.ids[0] == words.eos_token_id and alone.num_trained == len(alone.ids) - 1
    with pytest.raises(DataError, match="no token of its own"):
        encode_choice(words, "river", "")


def test_tokens_normalise_as_well():
    """By hand: sums −2 and −3 of one and three tokens, −2 and −1 each."""
    question = Question("q", "c", ("a", "bbbbbb"), 1, "plain")
    read = ChoiceLogprobs((np.array([-2.0, -3.0]),), (np.array([1.0, 3.0]),))
    assert right_choices([question], read) == {
        "acc": [0.0],
        "acc_norm": [1.0],
        "acc_bytes": [1.0],
        "acc_tokens": [1.0],
    }


def test_layouts_are_read_and_faults_named(tmp_path):
    lines = [
        {"question": "Is it?", "choices": ["yes", "no"], "answer": 1},
        {"question": "Is it?", "choices": ["yes", "no"], "answer": "A", "context": "It is."},
        {"question": "Is it?", "choices": ["yes", "no"], "answer": "no", "id": "mine"},
        {"question": "Is it?", "choices": ["yes"], "answer": 0},
        {"question": "Is it?", "choices": ["yes", "yes"], "answer": 0},
        {"question": "Is it?", "choices": ["yes", "no"], "answer": 2},
        {"question": "Is it?", "choices": ["yes", "no"], "answer": "perhaps"},
        {"question": "Is it?", "choices": ["yes", "no"], "answer": "9" * 5000},
        {"question": "Is it?", "choices": ["yes", ""], "answer": 0},
        {"text": "nothing of the kind"},
    ]
    quarantine = Quarantine()
    read = read_questions(written(tmp_path, lines), quarantine)
    assert [(q.id, q.answer) for q in read] == [("q1", 1), ("q2", 0), ("mine", 1)]
    assert read[1].context == "It is.\nQuestion: Is it?\nAnswer:"
    assert quarantine.reasons == {
        "too few choices": 1,
        "equal choices": 1,
        "answer out of range": 1,
        "unknown answer": 2,
        "empty choice": 1,
        "no multiple-choice question": 1,
    }
    table = tmp_path / "mmlu.csv"
    table.write_text("question,A,B,answer\nOne?,a,b,B\n")
    (lettered,) = read_questions(table)
    assert (lettered.context, lettered.choices, lettered.answer) == (
        "One?\nA. a\nB. b\nAnswer:",
        ("A", "B"),
        1,
    )
    with pytest.raises(DataError, match="layouts mmlu and plain"):
        read_questions([table, written(tmp_path, lines)], Quarantine())


def test_more_choices_than_letters_are_set_aside(tmp_path):
    row = {"question": "Is it?", "subject": "law", "answer": 1}
    lines = [{**row, "choices": [f"choice {n}" for n in range(count)]} for count in (26, 27, 400)]
    quarantine = Quarantine()
    (question,) = read_questions(written(tmp_path, lines), quarantine)
    assert question.choices[-1] == "Z" and quarantine.reasons == {"too many choices": 2}


def test_marks_are_taken_out_as_lm_eval_takes_them_and_in_time_that_grows_with_the_text():
    draw = random.Random(7)
    for _ in range(2000):
        text = "".join(draw.choice("[]a \n") for _ in range(draw.randrange(30)))
        expected = re.sub(r"\[.*?\]", "", text.strip()).replace("  ", " ")
        assert _without_marks(text) == expected, text
    start = time.process_time()
    assert len(_without_marks("[" * 3_000_000)) == 3_000_000
    assert time.process_time() - start < 5


def test_a_question_beyond_the_context_is_refused(words):
    question = Question("q", "river " * 50, ("a", "b"), 0, "plain")
    with pytest.raises(DataError, match="context of 20:"):
        check_question(words, question, 20)


def answered(generator, count, error):
    """Probabilities, and answers that are right less often than they say."""
    probabilities = 0.25 + 0.75 / (1 + np.exp(-generator.normal(size=count)))
    chance = probabilities - error * (probabilities - 0.25)
    return probabilities, (generator.random(count) < chance).astype(float)


@pytest.mark.parametrize("error", [0.0, 0.1, 0.4])
def test_the_calibration_error_lies_in_its_interval(error):
    """The truth is that of 400,000 answers; bounds are wide rather than narrow, by design."""
    truth = calibration_estimate(*answered(np.random.default_rng(1), 400_000, error)).value
    truth = 0.0 if error == 0 else truth
    held, excluded = 0, 0
    for seed in range(500):
        estimate = calibration_estimate(*answered(np.random.default_rng(seed), 400, error))
        held += estimate.low <= truth <= estimate.high
        excluded += estimate.low > 0
    assert held / 500 >= 0.93
    assert (excluded / 500 > 0.9) if error == 0.4 else True
    if error == 0:
        assert excluded / 500 <= 0.05


@pytest.mark.parametrize(
    ("said", "rate", "count"),
    [(0.99, 0.99, 100), (0.9, 0.97, 100), (0.999, 0.999, 1000), (0.6, 0.6, 300), (0.9, 0.7, 100)],
)
def test_the_calibration_error_of_equally_sure_answers_lies_in_its_interval(said, rate, count):
    """All answers fall into one bin, so the true error is the distance of the two numbers."""
    generator = np.random.default_rng(5)
    draws = [
        calibration_estimate(np.full(count, said), (generator.random(count) < rate).astype(float))
        for _ in range(400)
    ]
    slack = 1e-9
    truth = abs(said - rate)
    assert np.mean([one.low - slack <= truth <= one.high + slack for one in draws]) >= 0.93
    above = np.mean([one.low > slack for one in draws])
    assert above <= 0.05 if said == rate else above > 0.9 or truth < 0.1
