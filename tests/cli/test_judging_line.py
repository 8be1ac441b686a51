"""The line that has answers judged, at the end of every kind of run that judged none: pasted as it
stands, it judges them.
"""

import json
import re
import shlex

import pytest
from tests.cli.test_commands import tether as command

import tether

PAIRS = [{"prompt": f"What is {i}?", "chosen": "aaa eee", "rejected": "xxx zzz"} for i in range(12)]
SAMPLING = {"max_new_tokens": 6}
STEPS = {"steps": 1, "prompts_per_step": 2, "samples_per_prompt": 2, **SAMPLING}
DEMONSTRATIONS = [{"prompt": row["prompt"], "response": row["chosen"]} for row in PAIRS]
OWN = {"function": {"call": "mine.py:vowels"}}
LINE = re.compile(r"To judge some, .*?: (t.*|python.*)$", re.M)
RECIPES = {
    "sft": {"sft": {"data": "demonstrations", "epochs": 1}},
    "ppo": {"reward": {"data": "pairs"}, "ppo": {"data": "prompts", **STEPS}},
    "grpo": {"grpo": {"data": "prompts", **OWN, **STEPS}},
    "reinforce": {"reinforce": {"data": "prompts", **OWN, **STEPS}},
    "best_of_n": {"best_of_n": {"data": "prompts", **OWN, **STEPS}},
    "online_direct": {"online_direct": {"data": "prompts", **OWN, **STEPS}},
    "direct": {"direct": {"data": "pairs", "epochs": 1}},
    "kto": {"kto": {"data": "pairs", "epochs": 1}},
    "rounds": {"rounds": {"data": "prompts", **OWN, "rounds": 1, **SAMPLING}},
}
QUICK = ("grpo",)
BOTH = {**RECIPES["sft"], **RECIPES["grpo"]}


def vowels(prompts, responses):
    return [sum(c in "aeiou" for c in r) / max(1, len(r)) for r in responses]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, rows in (("pairs", PAIRS), ("demonstrations", DEMONSTRATIONS)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "prompts.txt").write_text("".join(row["prompt"] + "\n" for row in PAIRS))
    (tmp_path / "mine.py").write_text(
        "def vowels(prompts, responses):\n    return [float(len(r)) for r in responses]\n",
    )
    return tmp_path


def recipe(folder, stages):
    files = {"prompts": "prompts.txt", "pairs": "pairs.jsonl"}
    sections = {
        stage: {**values, "data": {"path": files.get(values["data"], f"{values['data']}.jsonl")}}
        for stage, values in stages.items()
    }
    own = {"run": "run", "model": {"source": "tiny"}, **sections}
    flat = [f"{key} = {table(value)}" for key, value in own.items()]
    (folder / "mine.toml").write_text("\n".join(flat) + "\n")


def table(value):
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {table(part)}" for key, part in value.items()) + " }"
    return json.dumps(value)


def line_of(output):
    (line,) = LINE.findall(output)
    return line


def test_no_stage_says_that_there_is_no_policy_beside_one_that_is(folder):
    """After each stage of three, and after a reward model that is trained once there is a policy."""
    recipe(folder, {**RECIPES["sft"], **RECIPES["direct"], "reward": {"data": "pairs"}})
    ended = command("run", "mine.toml", "sft", "direct", cwd=folder)
    assert ended.returncode == 0, ended.stderr
    assert line_of(ended.stdout).startswith("tether evaluate")
    later = command("run", "mine.toml", "reward", cwd=folder)
    assert later.returncode == 0, later.stderr
    for said in (ended.stdout, later.stdout):
        assert "held-out" in said and "No policy was trained" not in said
        assert "[evaluate]" not in said


@pytest.mark.parametrize(
    "name",
    [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in RECIPES],
)
def test_after_a_recipe_the_line_judges(folder, name):
    recipe(folder, RECIPES[name])
    ended = command("run", "mine.toml", cwd=folder)
    assert ended.returncode == 0, ended.stderr
    words = shlex.split(line_of(ended.stdout))
    assert words[0] == "tether"
    pasted = command(*words[1:], cwd=folder)
    assert pasted.returncode == 0, pasted.stderr
    if name == "sft":
        assert re.search(r"\b50\b", pasted.stdout) and not (folder / "run/evaluate").exists()
        return
    judged = json.loads((folder / "run/evaluate/summary.json").read_text())
    assert judged["num_prompts"] == 50 and not LINE.search(pasted.stdout)
    called = json.loads((folder / "run/evaluate/manifest.json").read_text())["judge"]["name"]
    assert "vowels" in called if "function" in str(RECIPES[name]) else "tiny" in called


def test_where_a_policy_is_still_to_come_the_line_is_of_what_is_there(folder):
    """`tether run mine.toml sft` of a recipe that goes on: nothing of PPO can be judged yet."""
    recipe(folder, BOTH)
    ended = command("run", "mine.toml", "sft", cwd=folder)
    assert line_of(ended.stdout).startswith("tether duel run tiny --prompts")


@pytest.mark.slow
def test_resumed_without_its_recipe_the_line_is_the_same(folder):
    recipe(folder, RECIPES["grpo"])
    line = line_of(command("run", "mine.toml", cwd=folder).stdout)
    assert line_of(command("resume", "run", cwd=folder).stdout) == line


def test_a_judge_of_the_recipe_does_not_hinder_the_line(folder):
    recipe(folder, RECIPES["direct"])
    judged = 'evaluate = { data = { path = "prompts.txt" }, judge = { call = "mine.py:vowels" } }'
    with (folder / "mine.toml").open("a") as file:
        file.write(judged + "\n")
    ended = command("dpo", "mine.toml", cwd=folder)
    words = shlex.split(line_of(ended.stdout))
    pasted = command(*words[1:], cwd=folder)
    assert pasted.returncode == 0, pasted.stderr


CALLS = {
    "function": lambda: tether.grpo("tiny", "prompts.txt", vowels, run="run", **STEPS),
    "dpo": lambda: tether.dpo("tiny", "pairs.jsonl", epochs=1, run="run"),
    "lambda": lambda: tether.grpo(
        "tiny",
        "prompts.txt",
        lambda prompts, responses: [1.0] * len(responses),
        run="run",
        **STEPS,
    ),
}


@pytest.mark.parametrize(
    "name",
    ["function", *(pytest.param(n, marks=pytest.mark.slow) for n in ("dpo", "lambda"))],
)
def test_after_a_call_of_python_the_line_judges(folder, capsys, name):
    CALLS[name]()
    line = line_of(capsys.readouterr().out)
    run = eval(line, {"tether": tether, "vowels": vowels})  # noqa: S307
    assert run.path.name == "run" and run.stages[-1] == "evaluate"
    assert not LINE.search(capsys.readouterr().out)
    assert ("judge=vowels" in line) == (name == "function")


def test_episodes_are_judged_by_their_environment_on_tasks_of_your_own(folder):
    (folder / "game.py").write_text(
        "class Game:\n"
        "    def reset(self, task): self.word = task['word']\n"
        "    def step(self, message): return None, float(self.word in message['content']), True\n",
    )
    tasks = [{"prompt": f"Say {word}", "word": word} for word in "abcdefgh"]
    for name in ("tasks", "HELD_OUT"):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(t) + "\n" for t in tasks))
    environment = {"reward_source": "environment", "environment": {"call": "game.py:Game"}}
    recipe(folder, {"grpo": {"data": "tasks", **environment, **STEPS}})
    ended = command("run", "mine.toml", cwd=folder)
    assert ended.returncode == 0, ended.stderr
    line = line_of(ended.stdout)
    assert line == "tether evaluate run HELD_OUT.jsonl evaluate.judge=environment"
    judged = command(*shlex.split(line)[1:], cwd=folder)
    assert judged.returncode == 0, judged.stderr
    summary = json.loads((folder / "run" / "evaluate" / "summary.json").read_text())
    assert summary["num_prompts"] == len(tasks)
