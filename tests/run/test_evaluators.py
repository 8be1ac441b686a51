"""A suite on a model, through the command: figures, a comparison, faults; and one evaluator more."""

import importlib
import json

import pytest
from typer.testing import CliRunner

from tether.build import evaluators
from tether.build.evaluators import EVALUATORS, SUITES, EvaluatorKind, chosen_evaluators
from tether.cli import app
from tether.core.errors import ConfigError, MissingFileError

MODULE = '''
from tether.evaluation.short_answers import greedy_answers, share_of_ones
from tether.evaluation.suite import Figures


class Silence:
    """Speaks core.protocols.Evaluator: the share of empty answers."""

    name = "silence"

    def __init__(self, prompts):
        self.prompts = prompts

    def __call__(self, policy, step):
        answers = greedy_answers(policy, self.prompts, 4)
        empty = [float(not answer.text.strip()) for answer in answers]
        rows = {prompt.id: value for prompt, value in zip(self.prompts, empty)}
        return Figures({"empty": share_of_ones(empty)}, {"empty": rows})
'''


@pytest.fixture
def questions(tmp_path):
    path = tmp_path / "questions.jsonl"
    rows = [
        {"question": f"Is {n} even?", "choices": ["yes", "no"], "answer": n % 2} for n in range(20)
    ]
    rows.append({"question": "x" * 2000, "choices": ["yes", "no"], "answer": 0})
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return path


def run(*words):
    return CliRunner().invoke(app, ["evaluate", *map(str, words)], env={"COLUMNS": "200"})


def test_a_suite_measures_a_model_beside_another(questions, tmp_path):
    """Against itself every difference is 0, and the rows are the same."""
    output = tmp_path / "out.json"
    data = f"multiple_choice={questions}"
    words = ("--suite", "multiple_choice,manner", "--data", data, "--limit", 20, "-o", output)
    result = run("tiny", *words, "--against", "tiny")
    assert result.exit_code == 0, result.output
    assert "refused_harmless" in result.output and "more than tiny" in result.output
    report = json.loads(output.read_text(encoding="utf-8"))
    names = [record["evaluator"] for record in report["evaluators"]]
    assert names == ["multiple_choice", "refusal", "diversity"]
    acc = report["evaluators"][0]["figures"]["acc"]
    assert acc["count"] == 20 and acc["low"] < acc["value"] < acc["high"]
    for name, figures in report["changes"].items():
        for figure, change in figures.items():
            assert change["difference"]["value"] == 0, (name, figure)
    assert report["changes"]["multiple_choice"]["acc"]["paired"]
    assert not report["changes"]["diversity"]["distinct_1"]["paired"]


def test_rows_that_do_not_fit_are_left_out_and_counted(questions, tmp_path):
    output = tmp_path / "out.json"
    suite = ("--suite", "multiple-choice", "--data", f"multiple-choice={questions}")
    result = run("tiny", *suite, "-o", output)
    assert result.exit_code == 0, result.output
    assert "1 rows are left out: does not fit the model's context" in " ".join(
        result.output.split()
    )
    report = json.loads(output.read_text(encoding="utf-8"))
    assert report["left_out"]["tiny"]["count"] == 1
    assert report["evaluators"][0]["figures"]["acc"]["count"] == 20


def test_short_answers_are_checked(tmp_path):
    path = tmp_path / "sums.jsonl"
    rows = [{"question": f"{n}+1?", "answer": f"So.\n#### {n + 1}"} for n in range(3)]
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    pytest.importorskip("math_verify")
    result = run("tiny", "--suite", "short_answers", "--data", f"short_answers={path}")
    assert result.exit_code == 0, result.output
    assert "accuracy" in result.output


def test_one_evaluator_more_is_a_file_and_a_row(tmp_path, monkeypatch):
    (tmp_path / "silence.py").write_text(MODULE, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    silence = importlib.import_module("silence")

    def make(material):
        return silence.Silence(evaluators._rows(material, material.files, evaluators.Prompt))

    row = EvaluatorKind("empty answers", make, "prompts", ("tether:refusal_harmless",))
    monkeypatch.setitem(EVALUATORS, "silence", row)
    result = run("tiny", "--suite", "silence", "--limit", 4)
    assert result.exit_code == 0, result.output
    assert "silence" in result.output and "empty" in result.output


@pytest.mark.parametrize(
    ("suite", "data", "sentence"),
    [
        ("everything", [], "no suite or evaluator is called 'everything'. Suites: all, tax"),
        ("tax", [], "multiple_choice needs files (questions with choices"),
        ("manner", ["multiple_choice=x"], "--data multiple_choice=… has no effect"),
        ("manner", ["refusal"], "--data is NAME=PATH"),
        (",", [], "--suite is empty"),
    ],
)
def test_faults_are_named(suite, data, sentence):
    with pytest.raises(ConfigError) as caught:
        chosen_evaluators(suite, data)
    assert sentence in str(caught.value)


def test_options_without_effect_and_missing_files_are_refused(tmp_path):
    with pytest.raises(MissingFileError):
        chosen_evaluators("diversity", [f"diversity={tmp_path / 'nowhere.jsonl'}"])
    for words in (
        ("recipe.toml", "--against", "tiny"),
        ("tiny", "ppo.steps=3", "--suite", "manner"),
    ):
        result = run(*words)
        assert isinstance(result.exception, ConfigError), result.output


def test_suites_name_rows_of_the_table():
    assert {name for names in SUITES.values() for name in names} == set(EVALUATORS)
