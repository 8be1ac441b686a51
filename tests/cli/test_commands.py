"""The command line as a stranger meets it: exit codes, one clear message, never a traceback."""

import io
import json
import platform
import re
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, chdir, redirect_stderr, redirect_stdout
from unittest import mock

import pytest
import torch

from tether import __version__
from tether.cli import main


def tether(*arguments, cwd, stdin=""):
    """The command line in this process, as in one of its own: exit code, output, errors."""
    out, errors, before = io.StringIO(), io.StringIO(), signal.getsignal(signal.SIGTERM)
    with ExitStack() as changed:
        changed.enter_context(chdir(cwd))
        changed.enter_context(mock.patch.object(sys, "stdin", io.StringIO(stdin)))
        changed.enter_context(mock.patch.object(sys, "argv", ["tether", *arguments]))
        changed.enter_context(redirect_stdout(out))
        changed.enter_context(redirect_stderr(errors))
        changed.callback(signal.signal, signal.SIGTERM, before)
        with pytest.raises(SystemExit) as left:
            main()
    return subprocess.CompletedProcess(arguments, left.value.code or 0, out.getvalue(), errors.getvalue())


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
    (project / "sft.toml").write_text(RECIPE[: RECIPE.index("[reward]")])
    arguments = ["sft.toml", "--shape", "llama-2-7b", "model.dtype=bfloat16", "sft.lora={}"]
    large = tether("plan", *arguments, "--gpu-memory", "80", cwd=project)
    assert large.returncode == 0 and "6.74 billion parameters" in large.stdout, large.stdout
    small = tether("plan", *arguments, "--gpu-memory", "16", cwd=project)
    assert small.returncode == 1 and "does not fit" in small.stdout and "model.recompute=true" in small.stdout
    assert not (project / "run").exists()
    unknown = tether("plan", "recipe.toml", "--shape", "llama-9", cwd=project)
    assert unknown.returncode == 2 and "llama-2-7b" in unknown.stderr
    smoke = tether("plan", "smoke", "--gpu-memory", "80", cwd=project)
    assert smoke.returncode == 0, smoke.stderr


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


def test_the_quickstart_ends_with_its_verdict(project):
    done = tether("quickstart", "--smoke", "run=run", cwd=project)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((project / "run" / "summary.json").read_text())["ppo"]
    assert set(found["gold_by_temperature"]) == {"1", "0.7", "0.5", "0"} and found["over_best_decoding"]["win_rate"]["count"] > 0
    words = " ".join(done.stdout.split())
    assert "over its best, " in words and "nats a response" in words
    headlines = {"better": "Better than any", "sharper": "Sharper, not", "undecided": "Not shown to be", "worse": "Worse"}
    assert headlines[found["verdict"]] in words


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


@pytest.fixture
def here(project, monkeypatch, capsys):
    """The command line, in this process and in the project's folder: (exit code, all that it wrote)."""
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.chdir(project)

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["tether", *arguments])
        with pytest.raises(SystemExit) as left:
            main()
        written = capsys.readouterr()
        return left.value.code or 0, written.out + written.err

    yield call
    signal.signal(signal.SIGTERM, before)


@pytest.mark.audit
@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["dpo", "recipe.toml"], 2, "`tether dpo` runs [direct] with loss = 'dpo', and recipe.toml has no such section"),
        (["simpo", "direct.toml"], 2, "direct.toml says direct.loss = 'ipo', and `tether simpo` is 'simpo'"),
        (["run", "recipe.toml", "dpo.beta=0.1"], 2, "unknown key 'dpo' (DPO is [direct] with loss = 'dpo')"),
        (["serve"], 2, "No such command 'serve'. It is `tether prefs serve`."),
        (["inspect", "pairs.jsonl"], 2, "No such command 'inspect'. It is `tether data inspect`."),
        (["plan", "smoke"], 0, "It fits"),
        *(
            (["plan", study], 2, f"{study} is a recipe of `tether {study}`, not of single")
            for study in ("loop", "compare", "overopt")
        ),
        (["doctor", "loop"], 2, "loop is a recipe of `tether loop`, not of single stages"),
        (["loop", "compare"], 2, "compare is a recipe of `tether compare`, not of `tether loop`"),
        *(
            ([study, "model.sauce=tiny"], 2, f"{study}.toml with 'model.sauce=tiny': unknown key 'model.sauce' (did you mean")
            for study in ("loop", "compare", "overopt")
        ),
        (["run", "model.source=tiny"], 2, "'model.source=tiny' is an override, and the recipe comes before it"),
    ],
)
def test_what_a_newcomer_types_first_is_understood(project, here, arguments, code, message):
    (project / "direct.toml").write_text(
        'run = "run"\n[model]\nsource = "tiny"\n[direct]\nloss = "ipo"\ndata = { path = "pairs.jsonl" }\n'
    )
    found, text = here(*arguments)
    words = " ".join(text.split())
    assert found == code and message in words and words.count("unknown key") <= 1, words


@pytest.mark.audit
def test_a_method_is_a_command_and_sets_the_loss(project):
    recipe = 'run = "run"\n[model]\nsource = "tiny"\ndtype = "float32"\n[direct]\ndata = { path = "pairs.jsonl" }\n'
    (project / "direct.toml").write_text(recipe)
    done = tether("ipo", "direct.toml", cwd=project)
    assert done.returncode == 0, done.stderr
    assert json.loads((project / "run" / "direct" / "config.json").read_text())["direct"]["loss"] == "ipo"


@pytest.mark.audit
@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["reward.data.path=demos.jsonl"], "demos.jsonl looks like"),
        (["ppo.data.path=empty.jsonl"], "empty.jsonl is empty"),
        (["reward.test.more.path=demos.jsonl"], "not preferences"),
        (["ppo.evaluate.data.path=empty.jsonl"], "empty.jsonl is empty"),
        (["kto.data.path=prompts.txt"], "not"),
        (["grpo.reward_source=random"], "the [grpo] section names no data: set grpo.data.path"),
    ],
)
def test_data_of_every_stage_is_looked_at_before_the_first_is_trained(project, here, overrides, message):
    (project / "empty.jsonl").touch()
    code, text = here("run", "recipe.toml", "model.source=nowhere/at-all", *overrides)
    assert code == 2 and message in " ".join(text.split()), text
    assert "nowhere" not in text and not (project / "run" / "sft").exists()
    assert not list(project.glob("run/**/quarantine*"))


@pytest.mark.audit
@pytest.mark.parametrize(
    ("command", "number", "stage"),
    [
        (["quickstart", "--smoke", "ppo.steps=500"], signal.SIGINT, "ppo"),
        (["run", "recipe.toml", "ppo.steps=500"], signal.SIGTERM, "ppo"),
        (["compare", "compare.toml"], signal.SIGINT, "seed-0/arms/slow"),
        (["compare", "compare.toml"], signal.SIGTERM, "seed-0/arms/slow"),
    ],
)
def test_one_interrupt_one_advice(project, command, number, stage):
    (project / "compare.toml").write_text(COMPARE)
    process = subprocess.Popen(
        [sys.executable, "-m", "tether", *command, "run=run"],
        cwd=project,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    while not (project / "run" / stage / "metrics.jsonl").is_file() and process.poll() is None:
        time.sleep(0.02)
    process.send_signal(number)
    _, errors = process.communicate()
    lines = [line for line in errors.splitlines() if line.startswith("tether: ")]
    assert process.returncode == 128 + number and len(lines) == 1, errors
    form = rf"tether: stopped after step \d+ of 500 of {stage}, which is saved\. Go on with: tether resume run"
    assert re.fullmatch(form, lines[0]), lines
    assert errors.count("tether resume") == 1 and errors.rstrip().endswith(lines[0])


COMPARE = """
seeds = [0]
judge = "letters"
max_prompts = 8
max_new_tokens = 8
[model]
source = "tiny"
dtype = "float32"
[sft]
epochs = 1
batch_size = 8
row_tokens = 256
[pairs]
samples_per_prompt = 2
temperature = 1.0
[reward]
prompts_per_update = 4
heldout_fraction = 0.25
[arms.slow.ppo]
steps = 500
prompts_per_step = 2
"""
