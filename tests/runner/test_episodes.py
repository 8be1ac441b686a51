"""Stages that sample, with an environment in place of single answers."""

import json
import math

import pytest
from tests.runner.killed import engine_server

import tether
from tether.cli.tools.doctor import examine_recipe
from tether.core.errors import ConfigError
from tether.core.rundir import read_jsonl
from tether.settings.reading import build
from tether.settings.recipe import Recipe
from tether.watch.monitoring.doctor import Healthy, Unexamined

GUESS = '''
class Guess:
    """Say a word with the letter; each reply costs a tenth."""

    def reset(self, task):
        self.letter = task["letter"]
        self.left = 3

    async def step(self, message):
        self.left -= 1
        right = self.letter in message["content"]
        return f"no {self.letter}", 1.0 * right - 0.1, right or not self.left


class Long:
    """Long replies are worth more."""

    def reset(self, task):
        pass

    def step(self, message):
        return None, len(message["content"]) / 10, True


def double(x: int) -> int:
    """Twice a number.

    Args:
        x: the number
    """
    return 2 * x


def length(prompts, responses):
    return [len(response) / 10 for response in responses]
'''
TEMPLATE = """{%- if tools -%}{{ tools | tojson }}{%- endif -%}
{%- for m in messages -%}<|{{ m.role }}|>{{ m.content }}
{%- for c in m.tool_calls or [] -%}<tool_call>{{ c.function | tojson }}</tool_call>{%- endfor -%}
<|end|>{%- endfor -%}{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"""
OFTEN = ["<|end|>", *"abcdefghijklmnopqrstuvwxyz0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ"]
"""A random model that stops at any of these ends most of its replies."""
STAGES = ["ppo", "grpo", "reinforce", "best_of_n", "online_direct"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "guess.py").write_text(GUESS)
    (tmp_path / "template.jinja").write_text(TEMPLATE)
    rows: list[object] = [{"prompt": f"say {c}", "letter": c} for c in "aeiou"]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def recipe(stage, environment, **settings):
    return {
        "run": "run",
        "model": {
            "source": "tiny",
            "dtype": "float32",
            "chat_template": "template.jinja",
            "stop_tokens": OFTEN,
        },
        stage: {
            "data": {"path": "rows.jsonl"},
            "environment": environment,
            "steps": 3,
            "prompts_per_step": 2,
            "samples_per_prompt": 4,
            "max_new_tokens": 12,
            **settings,
        },
    }


def metrics(run):
    return list(read_jsonl(run.path / run.stage / "metrics.jsonl"))


@pytest.mark.parametrize(
    ("stage", "history"),
    [*((stage, "sampled") for stage in STAGES), ("ppo", "template"), ("online_direct", "template")],
)
def test_every_stage_that_samples_learns_from_episodes(folder, stage, history):
    environment = {"call": "guess.py:Guess", "turns": 4, "history": history}
    settings = recipe(stage, environment, sample_rows=8)
    run = tether.run(settings, progress=False)
    rows = metrics(run)
    assert len(rows) == 3
    for row in rows:
        assert math.isfinite(row["reward/proxy"]) and row["reward/failed"] == 0
        assert -0.4 < row["reward/proxy"] < 1
    samples = list(read_jsonl(run.path / stage / "samples.jsonl"))
    assert any("[user] no " in row["response"] for row in samples)
    for number, row in enumerate(rows, 1):
        own = [one for one in samples if one["step"] == number]
        for one in own:
            check_turns(one)
        answers = sum(one["response"].count("[user] no ") for one in own)
        assert len(own) == 8 and row["episode/turns"] == 1 + answers / 8
        assert row["episode/unread_calls"] == 0
        # nearly all of its replies end with letters, where the template writes <|end|>
        assert (row["episode/segments"] > 1) == (history == "template" and answers > 0)


@pytest.mark.parametrize(
    ("stage", "method"),
    [("reinforce", "rloo"), ("reinforce", "reinforce++"), ("grpo", "dr_grpo"), ("grpo", "gspo")],
)
def test_their_kin_learn_from_episodes(folder, stage, method):
    settings = recipe(stage, {"call": "guess.py:Guess", "turns": 4}, algorithm=method)
    for row in metrics(tether.run(settings, progress=False)):
        assert math.isfinite(row["loss"]) and row["reward/failed"] == 0
        assert row["episode/reward"] == pytest.approx(row["reward/proxy"])


def check_turns(row):
    """The turns of a record against its text, and their rewards against the rules of Guess."""
    turns = row["turns"]
    if len(turns) > 1:
        lines = (f"[{turn['role']}] {turn['content']}" for turn in turns)
        assert row["response"] == "\n".join(lines)
    assert [turn["role"] for turn in turns] == ["assistant", "user"] * (len(turns) // 2) + [
        "assistant",
    ]
    letter = row["prompt"].removeprefix("say ")
    rewards = [float(letter in turn["content"]) - 0.1 for turn in turns[::2]]
    assert [turn["reward"] for turn in turns[::2]] == pytest.approx(rewards)
    assert row["proxy"] == pytest.approx(sum(rewards)) and "reason" not in row


def test_rewards_of_single_turns_reach_their_tokens(folder):
    settings = recipe("ppo", {"call": "guess.py:Guess"}, step_rewards=True, baseline="none")
    rows = metrics(tether.run(settings, progress=False))
    assert all(math.isfinite(row["reward/shaped"]) for row in rows)


def test_functions_are_tools_from_python(folder):
    def half(x: int) -> float:
        """Half of a number.

        Args:
            x: the number
        """
        return x / 2

    run = tether.grpo(
        {**recipe("grpo", {})["model"], "stop_tokens": ["<|end|>"]},
        "rows.jsonl",
        lambda prompts, responses: [len(response) / 10 for response in responses],
        tools=[half],
        environment={"turns": 3, "time_limit": 5},
        steps=1,
        prompts_per_step=1,
        samples_per_prompt=2,
        max_new_tokens=8,
        run=folder / "tools",
        progress=False,
    )
    (row,) = metrics(run)
    assert row["reward/failed"] == 0
    config = json.loads((run.path / "grpo" / "config.json").read_text())
    environment = config["grpo"]["environment"]
    assert "half" in environment["tools"][0]
    assert (environment["turns"], environment["time_limit"]) == (3, 5)


@pytest.mark.parametrize("way", ["tools", "opening"])
def test_a_teacher_reads_the_tools_and_the_opening_of_an_environment(folder, way):
    """A function that gives what it is given changes nothing, so that it reads what the policy reads:
    the start is no distance away from itself before the first update.
    """
    (folder / "same.py").write_text(
        "import json\n\n\n"
        "def same(prompt):\n"
        "    with open('noted.jsonl', 'a') as file:\n"
        "        file.write(json.dumps([[m.role, m.content, m.tools] for m in prompt.messages]) + '\\n')\n"
        "    return prompt.messages\n\n\n"
        "class Opens:\n"
        "    def reset(self, task):\n"
        "        return 'Hint: ' + task['letter']\n\n"
        "    def step(self, message):\n"
        "        return None, 1.0, True\n",
    )
    environment = {
        "tools": {"tools": ["guess.py:double"], "turns": 2},
        "opening": {"call": "same.py:Opens"},
    }[way]
    settings = recipe(
        "distill",
        environment,
        teacher={"model": "start", "call": "same.py:same"},
        steps=1,
        **({"function": {"call": "guess.py:length"}} if way == "tools" else {}),
    )
    settings["model"]["stop_tokens"] = ["<|end|>"]
    (row,) = metrics(tether.run(settings, progress=False))
    assert abs(row["teacher/divergence"]) < 1e-4
    *_, last = read_jsonl("noted.jsonl")
    assert ("double" in last[0][2]) if way == "tools" else last[-1][1].startswith("Hint: ")


def test_a_class_from_python_keeps_its_limits_and_is_not_given_up_for_tools(folder):
    class Pays:
        def reset(self, task):
            pass

        def step(self, message):
            return "go on", 0.25, False

    given = {
        "run": folder / "pays",
        "steps": 1,
        "prompts_per_step": 1,
        "samples_per_prompt": 2,
        "max_new_tokens": 8,
        "progress": False,
    }
    model = {**recipe("grpo", {})["model"], "stop_tokens": ["<|end|>"]}
    environment = {"call": Pays, "turns": 1}

    def one(prompts, responses):
        return [1.0] * len(responses)

    run = tether.grpo(model, "rows.jsonl", one, environment=environment, **given)
    (row,) = metrics(run)
    assert (row["episode/turns"], row["episode/reward"], row["reward/proxy"]) == (1, 0.25, 1)

    def rollout_reward_fn(outcome):
        return outcome.env_reward + len(outcome.completion)

    given["run"] = folder / "trl"
    run = tether.grpo(model, "rows.jsonl", rollout_reward_fn, environment=environment, **given)
    assert metrics(run)[0]["reward/proxy"] == 1.25
    for both in (environment, Pays):
        with pytest.raises(ConfigError, match="give one of both"):
            tether.grpo(model, "rows.jsonl", one, environment=both, tools=[one], **given)


def test_a_run_that_was_interrupted_plays_the_same_episodes(folder):
    environment = {"call": "guess.py:Guess"}
    whole = tether.run({**recipe("grpo", environment), "run": "whole"}, progress=False)

    def stop(step, metrics):
        raise KeyboardInterrupt

    with pytest.raises(BaseException):  # noqa: B017, PT011  (of Ctrl-C)
        tether.run(recipe("grpo", environment), on_step=stop, progress=False)
    run = tether.run(recipe("grpo", environment), progress=False)
    one, other = (
        [row["response"] for row in read_jsonl(r.path / "grpo" / "samples.jsonl")]
        for r in (whole, run)
    )
    assert one == other


def test_a_server_plays_the_episodes_that_this_process_plays(folder, monkeypatch):
    """The server decodes each conversation alone, as a group of one does here."""
    monkeypatch.setenv("TETHER_SERVER_TOKEN", "a token of the run")
    address = engine_server(folder)
    environment = {"call": "guess.py:Guess", "turns": 3}
    sizes = {"prompts_per_step": 1, "samples_per_prompt": 2, "steps": 2}
    engine = {"kind": "served", "addresses": [address]}
    runs = [
        tether.run(
            {**recipe("grpo", environment, **sizes, **settings), "run": name},
            progress=False,
        )
        for name, settings in (("here", {}), ("served", {"engine": engine}))
    ]
    here, served = (list(read_jsonl(run.path / "grpo" / "samples.jsonl")) for run in runs)
    assert [row["response"] for row in here] == [row["response"] for row in served]
    assert any(len(row["response"]) > 20 for row in here)


@pytest.mark.parametrize(
    ("environment", "further", "words"),
    [
        ({}, {}, "give one of both"),
        ({"call": "guess.py:Guess", "tools": ["guess.py:double"]}, {}, "give one of both"),
        ({"call": "guess.py:Missing"}, {}, "no function 'Missing'"),
        ({"call": "missing.py:Guess"}, {}, "the file is not there"),
        ({"tools": ["guess.py:length"]}, {"function": {"call": "guess.py:length"}}, "docstring"),
        ({"tools": ["guess.py:double"]}, {}, "give no reward"),
        ({"call": "guess.py:Guess"}, {"max_staleness": 1}, "max_staleness"),
    ],
)
def test_what_cannot_be_played_is_refused_before_the_first_step(
    folder,
    environment,
    further,
    words,
):
    with pytest.raises(tether.TetherError, match=words):
        tether.run(recipe("grpo", environment, **further), progress=False)
    assert not (folder / "run" / "grpo" / "metrics.jsonl").exists()


def test_a_model_whose_template_has_no_tools_is_told_of_one_that_has(folder):
    settings = recipe("grpo", {"tools": ["guess.py:double"]}, function={"call": "guess.py:length"})
    settings["model"]["chat_template"] = None
    with pytest.raises(tether.TetherError, match="chatml-tools"):
        tether.run(settings, progress=False)


def test_the_doctor_compares_no_empty_answers_where_an_environment_scores(folder):
    values = recipe("grpo", {"call": "guess.py:Long"})
    values["model"].pop("stop_tokens")
    made = build(Recipe, values)
    results = {one.check: one for one in examine_recipe(made)["grpo"]}
    assert isinstance(results["scores"], Healthy)
    assert isinstance(results["empty or endless answers"], Unexamined)


@pytest.mark.parametrize("source", ["environment", "teacher"])
def test_a_reward_that_no_key_of_the_stage_gives_is_refused(folder, source):
    rounds = {"data": {"path": "rows.jsonl"}, "reward_source": source}
    with pytest.raises(ConfigError, match=f"needs a table named {source}"):
        build(Recipe, {"model": {"source": "tiny"}, "rounds": rounds})
