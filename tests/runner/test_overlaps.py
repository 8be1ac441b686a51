"""Prompts of [evaluate] that training rows hold, too: by what they say, whatever the file."""

import json

import pytest
from tests.runner.test_budgets import recipe

from tether.cli import app
from tether.runner.jobs import expand
from tether.runner.methods.overlaps import overlap_of
from tether.runner.run import run_recipe

TRAINED = [f"Tell me about number {n}." for n in range(6)]


def length(prompts, responses):
    return [float(len(response)) for response in responses]


def made(tmp_path, heldout, **grpo):
    files = {}
    for name, lines in (("train", TRAINED), ("heldout", heldout)):
        files[name] = {"path": str(tmp_path / f"{name}.txt")}
        (tmp_path / f"{name}.txt").write_text("".join(f"{line}\n" for line in lines))
    own = {
        "data": files["train"],
        "function": {"call": "tests.runner.test_overlaps:length"},
        "steps": 1,
        "prompts_per_step": 2,
        "samples_per_prompt": 2,
        "max_new_tokens": 4,
    }
    judge = {"call": "tests.runner.test_overlaps:length"}
    evaluate = {"data": files["heldout"], "judge": judge, "temperatures": []}
    return recipe(tmp_path / "run", grpo={**own, **grpo}, evaluate=evaluate)


def judged(tmp_path, heldout, **grpo):
    """The job of the evaluation."""
    (job,) = expand(made(tmp_path, heldout, **grpo), ["evaluate"])
    return job


SENTENCE = "[evaluate]: 2 of 3 prompts are among the rows of [grpo]."


def test_equal_prompts_are_counted_whatever_their_file_and_case(tmp_path):
    heldout = ["TELL me  about number 3.", TRAINED[0], "Something else?"]
    assert overlap_of(judged(tmp_path, heldout)).startswith(SENTENCE)
    assert not overlap_of(judged(tmp_path, ["Something else?"]))


def test_log_summary_and_page_name_them(tmp_path, caplog):
    import tether

    results = run_recipe(made(tmp_path, [TRAINED[0], TRAINED[3], "Something else?"]))
    assert sum(SENTENCE in record.getMessage() for record in caplog.records) == 1
    expected = {"count": 2, "total": 3, "stages": ["grpo"]}
    assert results["evaluate"]["trained_on"] == expected
    whole = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert whole["evaluation"]["trained_on"] == expected
    run = tether.load(tmp_path / "run")
    run.report()
    page = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert "2 of 3 prompts" in page
    assert "Answers to the same held-out prompts" not in page


def test_prompts_that_a_stage_sets_aside_are_not_trained_on(tmp_path):
    """The training sets two of six aside, so four are trained on."""
    evaluate = {"prompts": 2, "temperatures": [], "best_of": []}
    sentence = overlap_of(judged(tmp_path, TRAINED, evaluate=evaluate))
    assert sentence.startswith("[evaluate]: 4 of 6 prompts")


def test_a_plan_names_them(tmp_path, capsys):
    config = made(tmp_path, [TRAINED[0], TRAINED[3], "Something else?"])
    lines = ["run = 'run'", "model = { source = 'tiny' }"]
    for name, keys in {
        "grpo": f"data = {{ path = '{config.grpo.data.paths[0]}' }}\n"
        "function = { call = 'tests.runner.test_overlaps:length' }",
        "evaluate": f"data = {{ path = '{config.evaluate.data.paths[0]}' }}\n"
        "judge = { call = 'tests.runner.test_overlaps:length' }",
    }.items():
        lines += [f"[{name}]", keys]
    path = tmp_path / "mine.toml"
    path.write_text("\n".join(lines))
    with pytest.raises(SystemExit) as ended:
        app(["plan", str(path)])
    assert ended.value.code in (0, None)
    assert SENTENCE in " ".join(capsys.readouterr().out.split())


def test_prompts_that_a_measurement_on_the_way_leaves_out_are_named(tmp_path, caplog):
    held = tmp_path / "held.txt"
    held.write_text("".join(f"{line}\n" for line in (TRAINED[1], "Another?", "A third?")))
    evaluate = {"data": {"path": str(held)}, "temperatures": [], "best_of": []}
    run_recipe(made(tmp_path, ["Something else?"], evaluate=evaluate), ["grpo"])
    words = "[grpo.evaluate]: 1 of 3 prompts are trained on, and are left out."
    assert [words in record.getMessage() for record in caplog.records].count(True) == 1
