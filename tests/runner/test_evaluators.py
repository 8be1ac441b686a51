"""A suite on a model, through the command: figures, a comparison, faults; and one evaluator more."""

import importlib.util
import json
from collections import Counter
from statistics import fmean

import pytest
from tests.runner.journeys import FEW, LETTERS
from typer.testing import CliRunner

from tether.cli import app
from tether.core.errors import ConfigError, DataError, MissingFileError
from tether.core.rundir import RunDirectory, read_jsonl
from tether.runner.assembly.evaluation import evaluators
from tether.runner.assembly.evaluation.evaluators import EVALUATORS, EvaluatorKind
from tether.runner.assembly.evaluation.suites import SUITES, chosen_evaluators
from tether.runner.run import run_recipe
from tether.settings.reading import build
from tether.settings.recipe import Recipe

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
    assert "refused_harmless" in result.output and "from tiny" in result.output
    report = json.loads(output.read_text(encoding="utf-8"))
    names = [record["evaluator"] for record in report["evaluators"]]
    assert names == ["multiple_choice", "refusal", "diversity", "sycophancy"]
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
    assert "1 rows are left" in " ".join(
        result.output.split(),
    )
    report = json.loads(output.read_text(encoding="utf-8"))
    assert report["left_out"]["tiny"]["count"] == 1
    assert report["evaluators"][0]["figures"]["acc"]["count"] == 20


def test_short_answers_are_checked(tmp_path):
    path = tmp_path / "sums.jsonl"
    rows = [{"question": f"{n}+1?", "answer": f"So.\n#### {n + 1}"} for n in range(3)]
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    result = run("tiny", "--suite", "short_answers", "--data", f"short_answers={path}")
    assert result.exit_code == 0, result.output
    assert "accuracy" in result.output


@pytest.fixture
def silence(tmp_path, monkeypatch):
    """One evaluator more: a file, and a row of the table."""
    (tmp_path / "silence.py").write_text(MODULE, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("silence")

    def make(material):
        return module.Silence(evaluators._rows(material, material.files, evaluators.Prompt))

    row = EvaluatorKind(
        help="empty answers",
        make=make,
        data="prompts",
        files=("tether:refusal_harmless",),
    )
    monkeypatch.setitem(EVALUATORS, "silence", row)


def test_one_evaluator_more_is_a_file_and_a_row(silence):
    result = run("tiny", "--suite", "silence", "--limit", 4)
    assert result.exit_code == 0, result.output
    assert "silence" in result.output and "empty" in result.output


def journey(tmp_path, **more):
    """A random reward on a few prompts, judged by letters along the way and at the end."""
    few = {"silence": {"limit": 4}}
    values = {
        "run": str(tmp_path / "run"),
        "model": {"source": "tiny", "dtype": "float32"},
        "ppo": {
            "data": FEW["prompts"],
            "reward_source": "random",
            "steps": 3,
            "prompts_per_step": 2,
            "max_new_tokens": 4,
            "optimizer": {"learning_rate": 1e-2},
            "evaluate": {
                "every": 1,
                "prompts": 2,
                "samples_per_prompt": 2,
                "temperatures": [0.5],
                "best_of": [2],
                "judge": LETTERS,
                "evaluators": few,
                **more,
            },
        },
        "evaluate": {
            "data": FEW["heldout"],
            "judge": LETTERS,
            "temperatures": [0.5],
            "evaluators": few,
        },
    }
    return build(Recipe, values)


def lines(path):
    return list(read_jsonl(path / "evaluations.jsonl"))


def test_the_same_row_serves_a_training_and_the_end_of_a_recipe(silence, tmp_path):
    """By hand: changes of the held-out score are differences of the means in heldout.jsonl."""
    recipe = journey(tmp_path)
    run_recipe(recipe)
    folder = tmp_path / "run" / "ppo"
    found = lines(folder)
    assert Counter((row["evaluator"], row["moment"]) for row in found) == {
        ("held_out", "before"): 1,
        ("held_out", "along"): 2,
        ("held_out", "after"): 1,
        ("kl", "before"): 1,
        ("kl", "along"): 2,
        ("kl", "after"): 1,
        ("silence", "before"): 1,
        ("silence", "along"): 2,
        ("silence", "after"): 1,
        ("decoding", "before"): 1,
        ("decoding", "after"): 1,
        ("best_of_n", "before"): 1,
    }
    scores = RunDirectory(folder).held_out()
    for row in found:
        if row["evaluator"] == "held_out":
            columns = scores[row["step"]]
            assert list(row["rows"]["score"].values()) == columns["score"]
            assert row["figures"]["score"]["value"] == pytest.approx(fmean(columns["score"]))
            if row["step"]:
                change = row["change"]["score"]
                moved = fmean(columns["score"]) - fmean(scores[0]["score"])
                assert change["paired"] and change["difference"]["value"] == pytest.approx(moved)
        if row["evaluator"] == "silence":
            metrics = {row["step"]: row for row in RunDirectory(folder).metrics()}
            if row["step"]:
                measured = metrics[row["step"]]["silence/empty"]
                assert row["figures"]["empty"]["value"] == measured
    at_end = lines(tmp_path / "run" / "evaluate")
    assert [(row["policy"], row["evaluator"]) for row in at_end] == [
        (policy, name)
        for policy in ("before", "ppo")
        for name in ("held_out", "kl", "decoding", "silence")
    ]
    summary = json.loads((tmp_path / "run" / "evaluate" / "summary.json").read_text())
    policy = summary["policies"]["ppo"]
    ended = {row["evaluator"]: row for row in at_end if row["policy"] == "ppo"}
    assert ended["held_out"]["figures"]["score"]["value"] == pytest.approx(policy["gold_after"])
    assert ended["held_out"]["change"]["score"]["difference"]["value"] == pytest.approx(
        policy["gold_after"] - policy["gold_before"],
    )
    assert ended["kl"]["figures"]["kl"] == policy["answers"]["kl"]


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ({"evaluators": {"loudness": {}}}, "no evaluator is called 'loudness'. There are: "),
        ({"evaluators": {"multiple_choice": {}}}, "ppo.evaluate.evaluators.multiple_choice.path"),
        ({"evaluators": {"kl": {}}}, "Take kl out here"),
        ({"sycophancy": {}, "evaluators": {"sycophancy": {}}}, "two ways to say the same"),
        ({"keep": "best", "keep_by": "diversity.length"}, "nothing measures 'diversity'"),
        ({"keep_by": "held_out.score"}, "keep_by has no effect without keep = 'best'"),
    ],
)
def test_faults_of_a_recipe_come_before_any_model(tmp_path, more, sentence):
    with pytest.raises(ConfigError) as caught:
        run_recipe(journey(tmp_path, **{"evaluators": {}, **more}))
    assert sentence in str(caught.value)
    assert not (tmp_path / "run" / "ppo" / "metrics.jsonl").exists()


def test_a_file_of_another_kind_is_refused_before_any_model(tmp_path, questions):
    wrong = {"multiple_choice": {"path": str(FEW["prompts"]["path"])}}
    with pytest.raises(DataError, match="multiple-choice"):
        run_recipe(journey(tmp_path, evaluators=wrong))


@pytest.mark.parametrize("number", [1, 3])
@pytest.mark.parametrize("name", ["refusal", "sycophancy"])
def test_an_evaluator_of_two_files_refuses_other_numbers(tmp_path, name, number):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a"}\n')
    words = rf"{name} reads two files.*{number} is named by --data {name}=PATH. Name two"
    with pytest.raises(ConfigError, match=words):
        chosen_evaluators(name, [f"{name}={path}"] * number)
    assert len(chosen_evaluators(name, [f"{name}={path}"] * 2)[name].files) == 2


@pytest.mark.parametrize(
    ("suite", "data", "sentence"),
    [
        ("everything", [], "no suite or evaluator is called 'everything'. Suites: all, tax"),
        ("tax", [], "multiple_choice needs files (questions with choices"),
        ("manner", ["multiple_choice=x"], "--data multiple_choice=… has no effect"),
        ("manner", ["refusal"], "--data is NAME=PATH"),
        (",", [], "--suite is empty"),
        ("lm_eval", [], "lm_eval needs tasks (names of lm-eval, such as arc_easy, or YAML files)"),
        ("kl", [], "kl measures a recipe's held-out answers"),
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
        ("recipe.toml", "--tasks", "arc_easy"),
        ("tiny", "--suite", "manner", "--tasks", "arc_easy"),
        ("tiny", "ppo.steps=3", "--suite", "manner"),
    ):
        result = run(*words)
        assert isinstance(result.exception, ConfigError), result.output


@pytest.mark.skipif(bool(importlib.util.find_spec("lm_eval")), reason="lm-eval is installed")
def test_without_lm_eval_its_suite_says_what_to_install():
    result = run("tiny", "--suite", "lm_eval", "--tasks", "arc_easy,hellaswag")
    assert isinstance(result.exception, ConfigError)
    assert "pip install 'tether-rlhf[lm-eval]'" in str(result.exception)


def test_suites_name_rows_of_the_table():
    own = {name for name, row in EVALUATORS.items() if row.data and not row.named}
    assert {name for names in SUITES.values() for name in names} == own
