"""The command line as a stranger meets it: exit codes, one clear message, never a traceback."""

import json
import platform
import subprocess
import sys

import pytest
import torch

from tether import __version__


def tether(*arguments, cwd=None, stdin=""):
    return subprocess.run(
        [sys.executable, "-m", "tether", *arguments], capture_output=True, text=True, cwd=cwd, input=stdin, check=False
    )


RECIPE = """
run = "run"
[model]
source = "tiny"
dtype = "float32"
[sft]
data = { path = "demos.jsonl" }
epochs = 1
[reward]
data = { path = "pairs.jsonl" }
heldout_fraction = 0.25
[ppo]
data = { path = "prompts.txt" }
steps = 2
prompts_per_step = 4
max_new_tokens = 8
"""


@pytest.fixture
def project(tmp_path):
    (tmp_path / "recipe.toml").write_text(RECIPE)
    rows = [{"prompt": f"question {n}", "chosen": f"good answer {n}", "rejected": f"bad {n}"} for n in range(20)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    (tmp_path / "demos.jsonl").write_text(
        "".join(json.dumps({"prompt": r["prompt"], "response": r["chosen"]}) + "\n" for r in rows)
    )
    (tmp_path / "prompts.txt").write_text("".join(r["prompt"] + "\n" for r in rows))
    return tmp_path


def test_grpo_runs_and_its_result_can_be_talked_to(project):
    recipe = RECIPE.replace("[ppo]", "[grpo]").replace('"tiny"', '"tiny"') + "samples_per_prompt = 2\n"
    (project / "recipe.toml").write_text(recipe)
    done = tether("run", "recipe.toml", cwd=project)
    assert done.returncode == 0, done.stderr
    summary = json.loads((project / "run" / "grpo" / "summary.json").read_text())
    assert summary["steps"] == 2 and summary["first_ratio_deviation"] == 0.0
    assert (project / "run" / "grpo" / "report.html").is_file()
    answer = tether("generate", "run", "-p", "hello", "--max-new-tokens", "4", cwd=project)
    assert answer.returncode == 0, answer.stderr


def test_plan_says_what_is_needed_and_what_to_switch_on(project):
    fits = tether("plan", "recipe.toml", cwd=project)
    assert fits.returncode == 0, fits.stderr
    assert "It fits" in fits.stdout and "rollout" in fits.stdout
    arguments = ["recipe.toml", "--shape", "llama-2-7b", "model.dtype=bfloat16", "ppo.lora={}", "sft.lora={}", "reward.lora={}"]
    large = tether("plan", *arguments, "--gpu-memory", "80", cwd=project)
    assert large.returncode == 0 and "6.74 billion parameters" in large.stdout, large.stdout
    small = tether("plan", *arguments, "--gpu-memory", "16", cwd=project)
    assert small.returncode == 1 and "does not fit" in small.stdout and "model.recompute=true" in small.stdout
    assert not (project / "run").exists()
    unknown = tether("plan", "recipe.toml", "--shape", "llama-9", cwd=project)
    assert unknown.returncode == 2 and "llama-2-7b" in unknown.stderr
    quickstart = tether("plan", "quickstart", "--gpu-memory", "80", "--shape", "smollm2-135m", cwd=project)
    assert quickstart.returncode == 0, quickstart.stderr


def test_a_recipe_runs_through_and_its_result_can_be_talked_to(project):
    done = tether("run", "recipe.toml", cwd=project)
    assert done.returncode == 0, done.stderr
    for stage in ("sft", "reward", "ppo"):
        assert json.loads((project / "run" / stage / "summary.json").read_text())["peak_rss_bytes"] > 0
        assert (project / "run" / stage / "report.html").is_file()
    answers = tether(
        "generate", "run", "-p", "hello", "-p", "again", "--samples", "2", "--max-new-tokens", "6", "-o", "out.jsonl", cwd=project
    )
    assert answers.returncode == 0, answers.stderr
    rows = [json.loads(line) for line in (project / "out.jsonl").read_text().splitlines()]
    assert [r["prompt"] for r in rows] == ["hello", "hello", "again", "again"]
    talk = tether("chat", "run", "--max-new-tokens", "5", cwd=project, stdin="hi\n\n")
    assert talk.returncode == 0 and "model>" in talk.stdout


def test_stages_one_by_one_need_their_predecessors(project):
    early = tether("reward", "recipe.toml", cwd=project)
    assert early.returncode == 2 and "run it first" in early.stderr and "Traceback" not in early.stderr
    assert tether("sft", "recipe.toml", cwd=project).returncode == 0
    assert tether("reward", "recipe.toml", cwd=project).returncode == 0
    asked = tether("generate", "run/reward", "-p", "hello", cwd=project)
    assert asked.returncode == 2 and "run/reward is a reward model, which scores" in " ".join(asked.stderr.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["sft", "nowhere.toml"], "recipe not found: nowhere.toml"),
        (["sft", "nonsense"], "no recipe named 'nonsense'"),
        (["run", "recipe.toml", "sft.epoch=2"], "unknown key 'sft.epoch' (did you mean 'epochs'?)"),
        (["run", "recipe.toml", "sft.data.path=missing.jsonl"], "data not found: missing.jsonl"),
        (["run", "recipe.toml", "sft.data.path=$NO_SUCH_VARIABLE/x"], "environment variable is not set"),
        (["run", "recipe.toml", "model.source=/no/such/model"], "has no config.json"),
        (["run", "recipe.toml", "model.source=neither-nor"], "neither an existing folder"),
        (["run", "recipe.toml", "ppo.roles=shared", "ppo.lora=false"], "needs adapters"),
        (["reward", "recipe.toml", "reward.data.path=demos.jsonl"], "not preferences"),
        (["data", "inspect", "no.jsonl"], "no.jsonl"),
        (["data", "inspect", "empty.jsonl"], "empty"),
        (["report", "folder"], "folder"),
        (["generate", "tiny"], "nothing to answer"),
        (["generate", "tiny", "-p", "long " * 300, "--max-new-tokens", "100"], "does not fit the model's context"),
    ],
)
def test_mistakes_are_one_clear_message(project, arguments, message):
    (project / "empty.jsonl").touch()
    (project / "folder").mkdir()
    if arguments[0] == "reward":
        assert tether("sft", "recipe.toml", cwd=project).returncode == 0
    result = tether(*arguments, cwd=project)
    assert result.returncode == 2, result.stdout + result.stderr
    assert message in " ".join(result.stderr.split()) and "Traceback" not in result.stderr


def test_the_version_names_what_a_report_of_a_fault_needs(project):
    said = tether("--version", cwd=project).stdout
    assert all(word in said for word in (f"tether {__version__}", platform.python_version(), f"torch {torch.__version__}"))


def test_bad_rows_are_set_aside_and_counted(project):
    with (project / "pairs.jsonl").open("a") as file:
        file.write(json.dumps({"prompt": "same", "chosen": "equal", "rejected": "equal"}) + "\n")
        file.write(json.dumps({"prompt": "long", "chosen": "x" * 3000, "rejected": "y"}) + "\n")
        file.write("{broken\n")
    assert tether("sft", "recipe.toml", cwd=project).returncode == 0
    assert tether("reward", "recipe.toml", cwd=project).returncode == 0
    summary = json.loads((project / "run" / "reward" / "summary.json").read_text())
    assert summary["quarantine"]["count"] == 2 and sum(summary["skipped"].values()) == 1
    rows = [json.loads(line) for line in (project / "run" / "reward" / "quarantine-reward.jsonl").read_text().splitlines()]
    assert [r["line"] for r in rows] == [21, 23]
    strict = tether("reward", "recipe.toml", "run=other", "sft.data.strict=true", "reward.data.strict=true", cwd=project)
    assert strict.returncode == 2


def test_inspect_shows_what_is_in_a_file(project):
    shown = tether("data", "inspect", "pairs.jsonl", cwd=project)
    assert shown.returncode == 0 and "20" in shown.stdout and "good answer" in shown.stdout
    with (project / "pairs.jsonl").open("a") as file:
        file.write("{broken\n")
    assert tether("data", "inspect", "pairs.jsonl", "--strict", cwd=project).returncode == 2
