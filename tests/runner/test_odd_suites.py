"""Judges that cannot tell answers apart, files with other columns, and models without a template: a
sentence each, and nothing is lost.
"""

import html
import json

import pytest
from tests.bad_input.folders import make as model_folders
from tests.runner.test_evaluators import journey, run

from tether.core.errors import DataError
from tether.core.rundir import read_json
from tether.runner.run import run_recipe
from tether.watch.report.page import write_report

ODD = {
    "multiple_choice": {"instruction": "Is it?", "output": "yes"},
    "short_answers": {"instruction": "Is it?", "output": "yes"},
    "diversity": {"text_of": "no prompt"},
}
"""By evaluator a row whose columns are not its own."""


def test_a_judge_that_is_constant_shows_no_difference_and_ends_the_run(tmp_path):
    judge = tmp_path / "same.py"
    judge.write_text("def same(prompts, responses, **rest):\n    return [3.0] * len(responses)\n")
    call = {"call": f"{judge}:same"}
    recipe = journey(tmp_path, evaluators={}, judge=call)
    more = {
        "judge": recipe.ppo.evaluate.judge,
        "evaluators": {},
        "data": recipe.evaluate.data.model_copy(update={"limit": 20}),
    }
    evaluate = recipe.evaluate.model_copy(update=more)
    run_recipe(recipe.model_copy(update={"evaluate": evaluate}))
    summary = read_json(tmp_path / "run" / "evaluate" / "summary.json")["policies"]["ppo"]
    assert summary["gold_gain"]["value"] == 0 and summary["gold_win_rate"]["value"] == 0.5
    text = html.unescape(write_report(tmp_path / "run").read_text())
    verdict = text[text.index('id="at-verdict"') :]
    verdict = verdict[: verdict.index("</section>")]
    assert "same scores everywhere" in verdict
    assert ": not shown to be" in verdict


@pytest.mark.parametrize("name", ODD)
def test_a_file_with_other_columns_is_one_sentence_before_any_model(tmp_path, monkeypatch, name):
    monkeypatch.setattr("tether.models.loading.load_model", None)
    path = tmp_path / "rows.jsonl"
    path.write_text(f"{json.dumps(ODD[name])}\n" * 3)
    output = tmp_path / "out.json"
    done = run("tiny", "--suite", name, "--data", f"{name}={path}", "--output", output)
    assert isinstance(done.exception, DataError), done.output
    words = str(done.exception)
    assert "rows.jsonl" in words and len(words) < 600 and not output.exists()


def test_a_suite_measures_a_model_without_template(tmp_path):
    model_folders(tmp_path)
    folder = tmp_path / "model"
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    config = read_json(folder / "tokenizer_config.json")
    config.pop("chat_template", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    output = tmp_path / "out.json"
    done = run(folder, "--suite", "manner", "--limit", 4, "--output", output)
    assert done.exit_code == 0, done.output
    names = [record["evaluator"] for record in read_json(output)["evaluators"]]
    assert names == ["refusal", "diversity", "sycophancy"]
