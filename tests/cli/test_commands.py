"""The command line as a stranger meets it: exit codes, one clear message, never a traceback."""

import io
import itertools
import json
import os
import platform
import re
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, chdir, redirect_stderr, redirect_stdout
from importlib import metadata
from pathlib import Path
from unittest import mock

import pytest
import torch
from typer.main import get_command

from tether import __version__
from tether.cli import PANELS, app, main
from tether.cli.options import complete_recipe, complete_stage
from tether.core.glossary import meanings
from tether.models.loading import pick_dtype
from tether.people.annotation.answers import read_answers
from tether.runner.planning.plan import SHAPES
from tether.settings.recipe import read_recipe
from tether.settings.synonyms import METHODS


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
    return subprocess.CompletedProcess(
        arguments,
        left.value.code or 0,
        out.getvalue(),
        errors.getvalue(),
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
    rows = [
        {"prompt": f"question {n}", "chosen": f"good answer {n}", "rejected": f"bad {n}"}
        for n in range(20)
    ]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    (tmp_path / "demos.jsonl").write_text(
        "".join(json.dumps({"prompt": r["prompt"], "response": r["chosen"]}) + "\n" for r in rows),
    )
    (tmp_path / "prompts.txt").write_text("".join(r["prompt"] + "\n" for r in rows))
    return tmp_path


def test_grpo_runs_and_its_result_can_be_talked_to(project):
    recipe = (
        RECIPE.replace("[ppo]", "[grpo]").replace('"tiny"', '"tiny"') + "samples_per_prompt = 2\n"
    )
    (project / "recipe.toml").write_text(recipe)
    done = tether("run", "recipe.toml", cwd=project)
    assert done.returncode == 0, done.stderr
    summary = json.loads((project / "run" / "grpo" / "summary.json").read_text())
    assert summary["steps"] == 2 and summary["first_ratio_deviation"] == 0.0
    assert 'id="stage-grpo"' in (project / "run" / "report.html").read_text()
    told = tether("report", "run/grpo", cwd=project)
    assert told.stdout.strip() == "run/report.html#stage-grpo"
    answer = tether("generate", "run", "-p", "hello", "--max-new-tokens", "4", cwd=project)
    assert answer.returncode == 0, answer.stderr


def test_plan_says_what_is_needed_and_what_to_switch_on(project):
    fits = tether("plan", "recipe.toml", cwd=project)
    assert fits.returncode == 0, fits.stderr
    assert "The recipe fits" in fits.stdout and "rollout" in fits.stdout
    (project / "sft.toml").write_text(RECIPE[: RECIPE.index("[reward]")])
    arguments = ["sft.toml", "--shape", "llama-2-7b", "model.dtype=bfloat16", "sft.lora={}"]
    large = tether("plan", *arguments, "--gpu-memory", "80", cwd=project)
    assert large.returncode == 0 and "6.74 billion parameters" in large.stdout, large.stdout
    four_layers = {**SHAPES["llama-2-7b"], "num_hidden_layers": 4, "model_type": "llama"}
    (project / "config.json").write_text(json.dumps(four_layers))
    arguments[2] = "config.json"
    small = tether("plan", *arguments, "--gpu-memory", "2", cwd=project)
    assert (
        small.returncode == 1
        and "does not fit" in small.stdout
        and "model.recompute=true" in small.stdout
    )
    assert not (project / "run").exists()
    unknown = tether("plan", "recipe.toml", "--shape", "llama-9", cwd=project)
    assert unknown.returncode == 2 and "llama-2-7b" in unknown.stderr
    smoke = tether("plan", "smoke", "--gpu-memory", "80", cwd=project)
    assert smoke.returncode == 0, smoke.stderr


def test_a_recipe_runs_through_and_its_result_can_be_talked_to(project):
    done = tether("run", "recipe.toml", cwd=project)
    assert done.returncode == 0, done.stderr
    for stage in ("sft", "reward", "ppo"):
        assert (
            json.loads((project / "run" / stage / "summary.json").read_text())["peak_rss_bytes"] > 0
        )
        assert f'id="stage-{stage}"' in (project / "run" / "report.html").read_text()
    assert "Report: run/report.html" in done.stdout and not list(
        (project / "run").glob("*/report.html"),
    )
    answers = tether(
        "generate",
        "run",
        "-p",
        "hello",
        "-p",
        "again",
        "--samples",
        "2",
        "--max-new-tokens",
        "6",
        "-o",
        "out.jsonl",
        cwd=project,
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
    assert (
        set(found["gold_by_temperature"]) == {"1", "0.7", "0.5", "0"}
        and found["over_best_decoding"]["win_rate"]["count"] > 0
    )
    words = " ".join(done.stdout.split())
    assert "its best temperature" in words and "KL per response" in words
    headlines = {
        "better": (": better than the start model",),
        "sharper": (": a lower temperature may explain",),
        "undecided": (": not shown to be", ": a higher score", ": a lower score"),
        "worse": (": worse than",),
    }
    assert any(headline in words for headline in headlines[found["verdict"]])


def test_stages_one_by_one_need_their_predecessors(project):
    early = tether("reward", "recipe.toml", cwd=project)
    assert (
        early.returncode == 2 and "run it first" in early.stderr and "Traceback" not in early.stderr
    )
    assert tether("sft", "recipe.toml", cwd=project).returncode == 0
    assert tether("reward", "recipe.toml", cwd=project).returncode == 0
    asked = tether("generate", "run/reward", "-p", "hello", cwd=project)
    assert asked.returncode == 2 and "is a reward model" in " ".join(
        asked.stderr.split(),
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["sft", "nowhere.toml"], "recipe not found: nowhere.toml"),
        (["sft", "nonsense"], "no recipe named 'nonsense'"),
        (["run", "recipe.toml", "sft.epoch=2"], "unknown key 'sft.epoch' (did you mean 'epochs'?)"),
        (["run", "recipe.toml", "sft.data.path=missing.jsonl"], "data not found: missing.jsonl"),
        (
            ["run", "recipe.toml", "sft.data.path=$NO_SUCH_VARIABLE/x"],
            "environment variable is not set",
        ),
        (["run", "recipe.toml", "model.source=/no/such/model"], "has no config.json"),
        (["run", "recipe.toml", "model.source=neither-nor"], "neither an existing folder"),
        (["run", "recipe.toml", "ppo.roles=shared", "ppo.lora=false"], "needs adapters"),
        (["reward", "recipe.toml", "reward.data.path=demos.jsonl"], "not preferences"),
        (["data", "inspect", "no.jsonl"], "no.jsonl"),
        (["data", "inspect", "empty.jsonl"], "empty"),
        (["report", "folder"], "folder"),
        (["generate", "tiny"], "nothing to answer"),
        (["generate", "tiny", "Hello", "--limit", "3"], "--limit has no effect without --file"),
        (
            ["constitution", "m", "p.jsonl", "-o", "d.jsonl", "--reasoning-tokens", "9"],
            "--reasoning-tokens has no effect without --comparisons",
        ),
        (
            ["duel", "a", "--prompts", "c.jsonl", "--judge", "m"],
            "two or more different models",
        ),
        (
            ["generate", "tiny", "-p", "long " * 300, "--max-new-tokens", "100"],
            "does not fit the model's context",
        ),
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


def test_answers_to_conversations_keep_their_conversations(project):
    """Two conversations that end in the same words, answered and collected as answers to judge."""
    talks = [
        [("user", topic), ("assistant", "Yes."), ("user", "Continue.")]
        for topic in ("A poem.", "A law.")
    ]
    rows = [
        {"id": f"t{n}", "prompt": [{"role": role, "content": text} for role, text in talk]}
        for n, talk in enumerate(talks)
    ]
    (project / "talks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    asked = ("generate", "tiny", "--file", "talks.jsonl", "-o", "out.jsonl")
    done = tether(*asked, "--max-new-tokens", "4", cwd=project)
    assert done.returncode == 0, done.stderr
    answers = [*read_answers(project / "out.jsonl")]
    found = [[(turn.role, turn.content) for turn in one.prompt] for one in answers]
    assert found == talks
    for row in rows:
        row |= {"prompt": "Continue.", "response": "Well."}
    (project / "own.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    named = read_answers(project / "own.jsonl", prompts=project / "talks.jsonl")
    assert [[(turn.role, turn.content) for turn in one.prompt] for one in named] == talks


def test_the_version_names_what_a_report_of_a_fault_needs(project):
    said = tether("--version", cwd=project).stdout
    assert all(
        word in said
        for word in (
            f"tether {__version__}",
            platform.python_version(),
            f"torch {torch.__version__}",
        )
    )


def test_bad_rows_are_set_aside_and_counted(project):
    with (project / "pairs.jsonl").open("a") as file:
        file.write(json.dumps({"prompt": "same", "chosen": "equal", "rejected": "equal"}) + "\n")
        file.write(json.dumps({"prompt": "long", "chosen": "x" * 3000, "rejected": "y"}) + "\n")
        file.write("{broken\n")
    assert tether("sft", "recipe.toml", cwd=project).returncode == 0
    assert tether("reward", "recipe.toml", cwd=project).returncode == 0
    summary = json.loads((project / "run" / "reward" / "summary.json").read_text())
    assert summary["quarantine"]["count"] == 2 and sum(summary["skipped"].values()) == 1
    rows = [
        json.loads(line)
        for line in (project / "run" / "reward" / "quarantine-reward.jsonl")
        .read_text()
        .splitlines()
    ]
    assert [r["line"] for r in rows] == [21, 23]
    strict = tether(
        "reward",
        "recipe.toml",
        "run=other",
        "sft.data.strict=true",
        "reward.data.strict=true",
        cwd=project,
    )
    assert strict.returncode == 2


def test_inspect_shows_what_is_in_a_file(project):
    shown = tether("data", "inspect", "pairs.jsonl", cwd=project)
    assert shown.returncode == 0 and "20" in shown.stdout and "good answer" in shown.stdout
    with (project / "pairs.jsonl").open("a") as file:
        file.write("{broken\n")
    assert tether("data", "inspect", "pairs.jsonl", "--strict", cwd=project).returncode == 2


@pytest.fixture
def here(project, monkeypatch, capsys):
    """The command line, in this process and in the project's folder: (exit code, all that it
    wrote).
    """
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
        (
            ["dpo", "recipe.toml"],
            2,
            "`tether dpo` runs [direct] with loss = 'dpo', and recipe.toml has no such section",
        ),
        (
            ["simpo", "direct.toml"],
            2,
            "direct.toml has direct.loss = 'ipo', but `tether simpo` needs 'simpo'",
        ),
        (
            ["run", "recipe.toml", "dpo.beta=0.1"],
            2,
            "(DPO is [direct] with loss = 'dpo': write [direct] and in it loss = \"dpo\"; "
            "dpo.beta is direct.beta)",
        ),
        (["serve"], 2, "No such command 'serve'. Use `tether prefs serve`."),
        (["inspect", "pairs.jsonl"], 2, "No such command 'inspect'. Use `tether data inspect`."),
        (["plan", "smoke"], 0, "The recipe fits"),
        (["plan", "loop", "model.source=tiny"], 2, "reward.keep_states_gb"),
        (["plan", "loop", "model.source=tiny", "reward.lora.last_layers=1"], 0, "The recipe fits"),
        (["loop"], 2, "No such command 'loop'. Use `tether run loop`."),
        (
            ["run", "loop", "model.sauce=tiny"],
            2,
            "loop.toml with 'model.sauce=tiny': unknown key 'model.sauce' (did you mean",
        ),
        (
            ["quickstart", "model.sauce=tiny"],
            2,
            "quickstart.toml with 'model.sauce=tiny': unknown key 'model.sauce'",
        ),
        (
            ["quickstart", "--arms", "ppo,gamma"],
            2,
            "no arm is called 'gamma'. Choose from: ppo, beta0, random",
        ),
        (
            ["run", "model.source=tiny"],
            2,
            "'model.source=tiny' is an override, and the recipe comes before it",
        ),
    ],
)
def test_first_commands_of_a_newcomer_run_or_name_the_right_one(
    project,
    here,
    arguments,
    code,
    message,
):
    (project / "direct.toml").write_text(
        'run = "run"\n[model]\nsource = "tiny"\n[direct]\nloss = "ipo"\ndata = { path = '
        '"pairs.jsonl" }\n',
    )
    found, text = here(*arguments)
    words = " ".join(text.split())
    assert found == code and message in words and words.count("unknown key") <= 1, words


@pytest.mark.audit
def test_a_method_is_a_command_and_sets_the_loss(project):
    recipe = (
        'run = "run"\n[model]\nsource = "tiny"\ndtype = "float32"\n[direct]\ndata = { path = '
        '"pairs.jsonl" }\n'
    )
    (project / "direct.toml").write_text(recipe)
    done = tether("ipo", "direct.toml", cwd=project)
    assert done.returncode == 0, done.stderr
    assert (
        json.loads((project / "run" / "direct" / "config.json").read_text())["direct"]["loss"]
        == "ipo"
    )


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
def test_data_of_every_stage_is_looked_at_before_the_first_is_trained(
    project,
    here,
    overrides,
    message,
):
    (project / "empty.jsonl").touch()
    code, text = here("run", "recipe.toml", "model.source=nowhere/at-all", *overrides)
    assert code == 2 and message in " ".join(text.split()), text
    assert "nowhere" not in text and not (project / "run" / "sft").exists()
    assert not list(project.glob("run/**/quarantine*"))


@pytest.mark.audit
@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "number", "stage"),
    [
        (["quickstart", "--smoke", "ppo.steps=500"], signal.SIGINT, "ppo"),
        (["run", "rounds.toml"], signal.SIGINT, "round-01/ppo"),
        (
            ["quickstart", "--smoke", "--arms", "random", "arms.random.ppo.steps=500"],
            signal.SIGTERM,
            "ppo-random",
        ),
    ],
)
def test_one_interrupt_one_advice(project, command, number, stage):
    (project / "rounds.toml").write_text(ROUNDS)
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
    form = (
        rf"tether: stopped after step \d+ of 500 of {stage}, which is saved\. To continue: "
        r"tether resume run"
    )
    assert re.fullmatch(form, lines[0]), lines
    assert errors.count("tether resume") == 1 and errors.rstrip().endswith(lines[0])


ROUNDS = """
run = "run"
repeat = 2
[model]
source = "tiny"
dtype = "float32"
[pairs]
data = { path = "tether:prompts", limit = 8 }
samples_per_prompt = 2
max_new_tokens = 8
judge = { call = "tether.quickstart.judges:letters" }
[reward]
prompts_per_update = 4
heldout_fraction = 0.25
[ppo]
steps = 500
prompts_per_step = 2
max_new_tokens = 8
"""


BEGINNINGS = """
sft dpo ipo orpo simpo kto rm reward prm orm ppo grpo dapo rloo reinforce raft online-dpo rounds spin pairs
"""


@pytest.mark.parametrize("method", BEGINNINGS.split())
def test_a_new_recipe_is_one_and_overwrites_nothing(method, here, project):
    code, text = here("new", method)
    assert code == 0 and f"tether run {method.replace('-', '_')}.toml" in text
    path = project / f"{method.replace('-', '_')}.toml"
    recipe = read_recipe(str(path))
    section, key, value = METHODS.get(method.replace("-", "_"), ("", "", ""))
    assert recipe.run == f"runs/{path.stem}" and (
        not key or getattr(recipe.section(section), key) == value
    )
    assert all(section is not None for section in map(recipe.section, recipe.stages))
    path.write_text("mine")
    code, text = here("new", method)
    assert code == 2 and "exists already" in text and path.read_text() == "mine"


@pytest.mark.parametrize("method", ["sft", "simpo", "kto", "ppo", "prm"])
def test_a_new_recipe_runs_as_it_is(method, here, project):
    assert here("new", method, "mine.toml")[0] == 0
    less = {
        "ppo": ("ppo.steps=1", "ppo.prompts_per_step=4", "ppo.max_new_tokens=4"),
        "sft": ("sft.data.limit=24",),
    }
    less |= {"kto": ("kto.data.limit=24",), "simpo": ("direct.data.limit=24",)}
    tiny = ("model.source=tiny", "model.fallback=", "model.dtype=float32", "run=run")
    code, text = here("run", "mine.toml", *tiny, *less.get(method, ()))
    assert code == 0, text


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("ppo.kl", ["coefficient", "0.05", "at least 0"]),
        ("grpo.kl.coefficient", ["default 0.0"]),
        ("clip-range", ["ppo.clip_range, grpo.clip_range, reinforce.clip_range", "default 0.2"]),
        ("dpo.beta", ["direct.beta"]),
        ("[sft]", ["batch_size"]),
        ("num_generations", ["did you mean 'samples_per_prompt'?"]),
        ("epsilon", ["'clip_range'", "sft.optimizer.epsilon"]),
        ("kl_penalty", ["'kl.estimator'", "rewards take k1"]),
        ("max_prompt_length", ["'max_length'", "prompts are read whole"]),
        ("DPOTrainer", ["[direct]"]),
        ("GRPOConfig", ["[grpo]"]),
        (
            "sft.temperature",
            ["no key is called 'sft.temperature': did you mean 'ppo.temperature'?"],
        ),
        ("ppo.beta", ["no key is called 'ppo.beta': did you mean 'ppo.kl.coefficient'?"]),
        ("grpo.lr", ["did you mean 'grpo.optimizer.learning_rate'?"]),
        (
            "zzz",
            ["no key or term is called 'zzz': `tether explain ppo` lists the keys of a section"],
        ),
        ("kl.coefficient", ["KL coefficient Beta", "ppo.kl.coefficient, reinforce.kl.coefficient"]),
        ("kl.coefficient", ["grpo.kl.coefficient number, at least 0; default 0.0"]),
        ("optimizer.learning_rate", ["sft.optimizer.learning_rate, reward.optimizer"]),
        ("learning_rate", ["learning rate Size of an optimizer step", "sft.optimizer.learning"]),
        ("overfiting", ["no key or term is called 'overfiting': did you mean 'overfitting'"]),
        ("kl.coef", ["ppo.kl.coefficient, reinforce.kl.coefficient"]),
        ("dpo.label_smo", ["direct.label_smoothing"]),
        ("max_len", ["sft.max_length, reward.max_length"]),
        ("max", ["no key or term is called 'max': did you mean"]),
    ],
)
def test_a_key_is_explained(key, words, here):
    code, text = here("explain", key)
    assert all(word in " ".join(text.split()) for word in words) and code == (
        2 if "no key" in text else 0
    ), text


@pytest.mark.parametrize("key", ["batch_size", "PPO", "lora", "beta", "epochs"])
def test_the_meaning_of_a_word_comes_before_the_keys_of_its_name(key, here):
    _, text = here("explain", key)
    lines = text.splitlines()
    meaning = next(iter(meanings(key).items()))
    assert lines[0] == meaning[0] and " ".join(text.split()).startswith(" ".join(meaning))
    assert any(re.match(r"\w+\.\w+|ppo|lora", line) for line in lines[2:])


def test_a_name_that_leads_to_the_same_key_is_no_translation(here):
    _, text = here("explain", "learning_rate")
    assert "other libraries" not in text and "did you mean" not in text
    _, text = here("explain", "beta")
    assert "did you mean 'kl.coefficient'?" in " ".join(text.split())


def test_several_words_of_the_report_need_no_quotes(here):
    code, text = here("explain", "gold", "win", "rate")
    assert code == 0 and "Ties count half" in " ".join(text.split())


def test_without_torch_one_line_names_the_package(monkeypatch, capsys):
    missing = ModuleNotFoundError("No module named 'torch'", name="torch")

    def fails(**_):
        raise missing

    monkeypatch.setattr("tether.cli.app", fails)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2 and "pip install torch" in capsys.readouterr().err


def test_recipes_are_listed_and_printed(here):
    code, text = here("recipes")
    assert code == 0 and all(
        name in text for name in ("hh-helpful", "quickstart", "sums", "tether new")
    )
    assert here("recipes", "smoke")[1].startswith(
        "# The quickstart's stages on a tiny random model",
    )


def test_help_is_in_panels_and_h_is_understood_everywhere(here):
    code, text = here("-h")
    places = [
        text.index(f"─ {panel} ─")
        for panel in ("Train", "Data", "Preferences", "Judge", "Look", "Run", "Research")
    ]
    assert code == 0 and places == sorted(places)
    for command in (["run"], ["prefs", "invite"], ["data", "inspect"], ["simpo"]):
        code, text = here(*command, "-h")
        assert code == 0 and "Usage" in text and "<bool>" not in text
    visible = {name for name, command in get_command(app).commands.items() if not command.hidden}
    assert visible == set(" ".join(PANELS.values()).split())


@pytest.mark.parametrize("command", [[], ["prefs"], ["data"]])
def test_lists_of_commands_break_lines_where_the_panel_ends(here, monkeypatch, command):
    """The first word of a line would not have fitted at the end of the line before it."""
    monkeypatch.setenv("COLUMNS", "80")
    _, _, commands = here(*command, "-h")[1].rpartition("Options ─")
    cells = [line[2:78] for line in commands.splitlines() if line.startswith("│")]
    cells = cells[next(n for n, cell in enumerate(cells) if "Show this message" in cell) + 1 :]
    assert cells
    for before, after in itertools.pairwise(cells):
        if after.startswith(" "):
            assert len(f"{before.rstrip()} {after.split()[0]}") > 76, (before, after)


def test_the_shell_completes_recipes_and_stages(monkeypatch, project):
    monkeypatch.chdir(project)
    assert complete_recipe("sm") == ["smoke"] and complete_recipe("rec") == ["recipe.toml"]
    assert complete_stage("r") == ["reward", "reinforce", "rounds"]
    asked = {
        **os.environ,
        "_TETHER_COMPLETE": "complete_bash",
        "COMP_WORDS": "tether run quick",
        "COMP_CWORD": "2",
    }
    program = str(Path(sys.executable).with_name("tether"))
    assert subprocess.run(
        [program],
        env=asked,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split() == ["quickstart"]


def test_the_end_of_a_command_says_which_are_useful_next(project, here):
    code, text = here("run", "recipe.toml", "sft", "run=other")
    assert (
        code == 0 and "run recipe.toml reward run=other" in text and "tether chat other" in text
    ), text
    code, text = here("reward", "recipe.toml", "run=other")
    assert (
        code == 0
        and "tether reward-bench other FILES" in text
        and "run recipe.toml ppo run=other" in text
    ), text
    assert "tether chat" not in text
    (project / "alone.toml").write_text(RECIPE[: RECIPE.index("[ppo]")])
    code, text = here("run", "alone.toml", "reward", "run=other")
    assert code == 0 and "tether new ppo" in text and 'reward_model = "other"' in text
    code, text = here("run", "recipe.toml", "ppo", "run=other")
    for command in (
        "chat other",
        "generate other -p '",
        "report other",
        "export other other-export",
    ):
        assert f"tether {command}" in text
    shown = here("generate", "other", "-p", "hello", "--samples", "2", "--max-new-tokens", "4")[1]
    assert re.search(r"^1$", shown, re.M) and re.search(r"^2$", shown, re.M)


def test_a_plan_counts_the_whole_run_and_knows_kinds_of_gpu(project, here):
    code, text = here("plan", "recipe.toml")
    words = " ".join(text.split())
    assert code == 0 and re.search(
        r"sft: .* about .* reward: .* about .* ppo: .* All 3 stages: "
        r"about ",
        words,
    )
    assert "│ log-probs │" in text  # in one piece at 80 columns
    code, text = here("plan", "recipe.toml", "--gpu", "RTX-4090")
    assert code == 0 and "rtx4090, 24 GB" in text
    assert "GPU of 16 GB" in " ".join(
        here("plan", "recipe.toml", "--gpu-memory", "16")[1].split(),
    )
    code, text = here("plan", "recipe.toml", "--gpu", "gtx")
    assert code == 2 and "--gpu gtx" in text and "a10, a100" in text


def test_a_folder_with_an_unknown_file_is_inspected_all_the_same(project, here):
    (project / "data").mkdir()
    (project / "data" / "a.jsonl").write_text(
        '{"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": '
        '"hi"}, {"role": "assistant", "content": "yo"}], "label": true, "extra": 1}\n{bad\n',
    )
    (project / "data" / "b.jsonl").write_text('{"x": 1}\n')
    (project / "data" / "c.jsonl").write_text('{"prompt": "hi"}\n')
    code, text = here("data", "inspect", "data")
    words = " ".join(re.sub(r"[│┃]", " ", text).split())
    assert code == 0, text
    for part in (
        "no known format has the columns x",
        "holds prompts",
        "system: Be brief.",
        "user: hi",
        "label desirable",
        "extra",
        "line 2",
        "Use it in [kto]",
        'path = ["data/a.jsonl"]',
        "words, not tokens",
    ):
        assert part in words, (part, text)


def test_versions_need_no_installation(project, monkeypatch):
    """As from a folder of source: of tether and peft no installer has noted a version."""
    version = metadata.version

    def noted(name):
        if name in ("tether-rlhf", "peft"):
            raise metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(metadata, "version", noted)
    monkeypatch.setenv("COLUMNS", "400")
    for command in ("info", "--version"):
        ended = tether(command, cwd=project)
        assert ended.returncode == 0, ended.stderr
        assert __version__ in ended.stdout and f"torch {torch.__version__}" in ended.stdout
        assert "peft" not in ended.stdout


def test_info_reports_what_is_in_force_here(tmp_path, monkeypatch):
    monkeypatch.setenv("TETHER_SERVER_TOKEN", "a secret")
    monkeypatch.setenv("COLUMNS", "400")
    ended = tether("info", cwd=tmp_path)
    output = re.sub(" +", " ", ended.stdout)
    assert ended.returncode == 0 and "a secret" not in output
    assert (
        f"torch {torch.__version__}" in output
        and (f"{torch.get_num_threads()} of {os.cpu_count()} cores") in output
    )
    for subject in (
        "processor",
        "memory",
        "device",
        "own kernels",
        "threads",
        "sandbox",
        "extras",
        "settings",
    ):
        assert subject in output
    expected = "float32" if pick_dtype("auto") == torch.float32 else "bfloat16"
    assert f"model.dtype = 'auto' │ {expected}" in output
