"""Every beginning of a recipe, run to its end on the tiny model, through every command; and the
commands that were printed.
"""

import json
import re
import shlex

import pytest
from tests.cli.test_commands import tether
from tests.runner.test_episodes import TEMPLATE
from tests.settings.test_packaged_recipes import ASKED_FOR

import tether as front
from tether.cli.recipes import BEGINNINGS
from tether.settings.reading import packaged_recipes
from tether.settings.section import PACKAGED
from tether.settings.stages import STAGES
from tether.settings.synonyms import METHODS

COMPARISONS = str(PACKAGED / "comparisons.jsonl")
TINY = ["model.source=tiny", "model.fallback=", "model.dtype=float32"]
"""In place of the model that a recipe names."""
SHORT = {
    "sft": ["sft.data.limit=24"],
    "pairs": ["pairs.data.limit=16", "pairs.prompts=8", "pairs.max_new_tokens=8"],
    "reward": ["reward.data.limit=24"],
    "process": ["process.data.limit=24"],
    "direct": ["direct.data.limit=24"],
    "kto": ["kto.data.limit=24"],
    "rounds": ["rounds.data.limit=8", "rounds.max_new_tokens=8", "rounds.rounds=2"],
    **{
        name: [
            f"{name}.{key}"
            for key in ("data.limit=16", "steps=2", "prompts_per_step=4", "max_new_tokens=8")
        ]
        for name in ("ppo", "grpo", "reinforce", "distill", "best_of_n", "online_direct")
    },
}
"""What makes a section of a beginning short."""
GOLD, LETTERS = "tether.quickstart.judges:gold", "tether.quickstart.judges:letters"
QUICK = ("spin", "rounds")
"""Those that run with the quick tests; the others are slow."""


def printed(text):
    """The commands that an output says to give next, which end its lines."""
    lines = (re.match(r"\s+(?:\S.*\s{2,})?(tether .*)$", line) for line in text.splitlines())
    return [shlex.split(line[1])[1:] for line in lines if line]


def fitting(command):
    """A printed command with what a reader fills in: files of comparisons."""
    return [COMPARISONS if word == "FILES" else word for word in command]


def follow(commands, folder):
    """The exit code and the errors of every printed command; `tether chat` gets one question."""
    done = {}
    for command in commands:
        stdin = "Hello.\n\n" if command[0] == "chat" else ""
        result = tether(*fitting(command), cwd=folder, stdin=stdin)
        done[shlex.join(command)] = (result.returncode, result.stderr)
    return done


def beginnings():
    for name in sorted({*(path.stem for path in BEGINNINGS.glob("*.toml")), *METHODS}):
        yield pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow])


def examined(run, folder):
    """Report, doctor, load and export of a run; what answers, answers."""
    page = tether("report", run, cwd=folder)
    assert page.returncode == 0, page.stderr
    found = tether("doctor", run, "--all", cwd=folder)
    assert found.returncode in (0, 2) and not found.stderr, found.stderr
    loaded = front.load(folder / run)
    assert loaded.stages and json.loads(json.dumps(loaded.summary))
    made = {name for name in loaded.stages if STAGES[name].trains}
    if made:
        assert loaded.metrics()
        assert tether("export", run, f"{run}-exported", cwd=folder).returncode == 0
    if any(STAGES[name].answers for name in made):
        answered = tether("generate", run, "-p", "Hello.", "--max-new-tokens", "4", cwd=folder)
        assert answered.returncode == 0, answered.stderr
        assert isinstance(loaded.policy.generate("Hello.", max_new_tokens=4), str)
    return loaded, (folder / run / "report.html").read_text()


@pytest.mark.parametrize("method", beginnings())
def test_a_beginning_runs_to_its_end_and_so_do_the_commands_that_it_prints(method, tmp_path):
    begun = tether("new", method, cwd=tmp_path)
    assert begun.returncode == 0
    recipe = (tmp_path / f"{method}.toml").read_text().replace(GOLD, LETTERS)
    (tmp_path / f"{method}.toml").write_text(recipe)
    names = [name for name in STAGES if f"[{name}]" in recipe]
    short = [
        word
        for name in names
        for word in SHORT[name]
        if not (name == "reward" and "[pairs]" in recipe)
    ]
    if method == "spin":
        assert names == ["rounds"]
    hints = [command for command in printed(begun.stdout) if command[0] != "run"]
    assert {command[0] for command in hints} == {"plan", "explain"}
    done = tether("run", f"{method}.toml", *TINY, *short, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    hints += printed(done.stdout)
    codes = follow(hints, tmp_path)
    # a tiny model on few rows may well be found at fault by the doctor, which then says so in its
    # table
    assert all(
        code == 0 or (name.startswith("doctor") and not said)
        for name, (code, said) in codes.items()
    ), codes
    run = re.search(r'^run = "(.*)"', recipe, re.MULTILINE)[1]
    loaded, page = examined(run, tmp_path)
    assert loaded.stages == names
    if any(STAGES[name].trains_policy for name in names):
        assert "No policy was trained" not in page and "Before a policy is trained" not in page
    again = tether("resume", run, cwd=tmp_path)
    assert again.returncode == 0 and "nothing to do" in again.stdout, again.stderr


def test_every_stage_has_a_beginning_and_is_made_short():
    texts = "".join(path.read_text() for path in BEGINNINGS.glob("*.toml"))
    assert [name for name in STAGES if f"[{name}]" not in texts] == ["evaluate"]
    assert {*SHORT, "evaluate"} == {*STAGES}


PACKAGED_SHORT = {
    "smoke": [],
    "quickstart": ["sft.data.limit=16", "pairs.prompts=8", "pairs.max_new_tokens=8", "ppo.steps=2", "ppo.max_new_tokens=8",
                   "ppo.prompts_per_step=4", "ppo.evaluate.every=1", "ppo.evaluate.prompts=8", "evaluate.data.limit=8",
                   "evaluate.max_new_tokens=8", "evaluate.temperatures=[0.5]"],
    "loop": ["repeat=2", "reward.lora.last_layers=1",
             "sft.data.limit=16", "pairs.prompts=8", "pairs.labels=8", "pairs.max_new_tokens=8", "ppo.steps=2",
             "ppo.max_new_tokens=8", "ppo.prompts_per_step=4", "evaluate.data.limit=8", "evaluate.max_new_tokens=8",
             "evaluate.temperatures=[0.5]"],
    "sums": ["grpo.steps=2", "grpo.prompts_per_step=4", "grpo.max_new_tokens=8", "grpo.task.size=64",
             "grpo.evaluate.prompts=8", "grpo.evaluate.every=2"],
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(PACKAGED_SHORT))
def test_a_packaged_recipe_runs_to_its_end_and_so_do_the_commands_that_it_prints(name, tmp_path):
    if name == "sums":
        pytest.importorskip("reasoning_gym")
    (tmp_path / "mine.toml").write_text(
        tether("recipes", name, cwd=tmp_path).stdout.replace(GOLD, LETTERS),
    )
    done = tether("run", "mine.toml", *TINY, *PACKAGED_SHORT[name], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    codes = follow(printed(done.stdout), tmp_path)
    assert codes and all(
        code == 0 or (key.startswith("doctor") and not said) for key, (code, said) in codes.items()
    ), codes
    examined(f"runs/{name}", tmp_path)


def test_every_packaged_recipe_is_run_or_planned(tmp_path, tether_data):
    (tmp_path / "template.jinja").write_text(TEMPLATE)
    for name in sorted({*packaged_recipes()} - {*PACKAGED_SHORT, *ASKED_FOR}):
        words = [name, "model.source=tiny", "model.fallback="]
        if {"chatml-tools", "tools"} & {
            *re.findall(r"[\w-]+", packaged_recipes()[name].read_text()),
        }:
            # the template of tiny has no calls
            words += ["model.chat_template=template.jinja", 'model.stop_tokens=["<|end|>"]']
        if name == "student":
            words += ["distill.teacher=tiny"]  # in place of a run that is not there
        planned = tether("plan", *words, cwd=tmp_path)
        assert planned.returncode == 0, planned.stderr


JUDGED = """
run = "runs/judged"
[model]
source = "tiny"
dtype = "float32"
[direct]
data = { path = "tether:comparisons", limit = 16 }
[rounds]
data = { path = "tether:demonstrations", limit = 8 }
method = "spin"
rounds = 1
max_new_tokens = 8
[evaluate]
data = { path = "tether:heldout", limit = 12 }
judge = { call = "tether.quickstart.judges:letters" }
max_new_tokens = 8
temperature = 1.0
temperatures = []
"""


def test_policies_that_learned_from_rows_and_in_rounds_are_judged_like_others(tmp_path):
    (tmp_path / "judged.toml").write_text(JUDGED)
    done = tether("run", "judged.toml", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (
        "A good ranking of pairs does not show" not in done.stdout
        and "Wins against the start model's answers" in done.stdout
    )
    rows = [row.split() for row in done.stdout.splitlines() if row.startswith("│ ")]
    assert {row[1] for row in rows} >= {"dpo", "spin"} and "direct" not in {row[1] for row in rows}
    loaded, page = examined("runs/judged", tmp_path)
    assert loaded.stages == ["direct", "rounds", "evaluate"]
    assert (
        "judged by tether.quickstart.judges:letters" in page
        and "A good ranking of pairs does not show" not in page
        and "same held-out prompts" in page
    )
    again = tether("report", "runs/judged", "runs/judged/rounds", "-o", "both.html", cwd=tmp_path)
    assert again.returncode == 0 and (tmp_path / "both.html").is_file()
    refused = tether("prove", "judged.toml", "rounds", cwd=tmp_path)
    assert (
        refused.returncode == 2
        and "stage 'rounds'" in refused.stderr
        and "it has: direct" in refused.stderr
    )
