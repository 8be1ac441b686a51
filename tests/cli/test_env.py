"""`tether env try`: an environment by hand, and by a model."""

import json
import re
from itertools import pairwise

import pytest
from tests.rewards import published
from typer.testing import CliRunner

from tether.cli import app
from tether.core.errors import ConfigError, DataError

SAFE = f"{published.__file__}:Safe"


def tried(*arguments, lines=""):
    result = CliRunner().invoke(app, ["env", "try", *arguments], input=lines)
    if result.exception:
        raise result.exception
    return result.output


def test_a_person_plays_with_lines_and_calls():
    lines = [json.dumps({"name": "turn", "arguments": {"number": n}}) for n in (5, 3)]
    shown = tried(SAFE, "--task", '{"code": 3}', lines="\n".join([*lines, "done", ""]))
    assert "tools: turn" in shown
    assert shown.index("tool: too high") < shown.index("tool: open") < shown.index("score: 1")


def test_the_prompt_of_a_task_may_be_messages_and_each_reward_is_shown(tmp_path):
    path = tmp_path / "game.py"
    path.write_text(
        "class Game:\n"
        "    def reset(self, task): self.turns = 0\n"
        "    def step(self, message):\n"
        "        self.turns += 1\n"
        "        return 'on', self.turns / 4, self.turns == 2\n",
    )
    task = {
        "prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "x"}],
    }
    shown = tried(f"{path}:Game", "--task", json.dumps(task), lines="a\nb\n").splitlines()
    assert shown[:2] == ["system: Be brief.", "user: x"]
    assert [line for line in shown if "reward" in line] == ["reward: 0.25", "reward: 0.5"]
    assert shown[-1] == "score: 0.75"
    with pytest.raises(DataError, match="not a list of dicts"):
        tried(f"{path}:Game", "--task", '{"prompt": 3}')


def test_an_episode_that_is_left_has_the_score_that_its_environment_gives():
    assert "score: 0" in tried(SAFE, "--task", '{"code": 3}', lines="\n")
    assert "no score" in tried(f"{published.__file__}:Bad", lines="\n")


def test_an_environment_that_fails_is_an_error_with_its_reason():
    with pytest.raises(ConfigError, match="raised RuntimeError: boom"):
        tried(f"{published.__file__}:Bad", lines="raise\n")


def test_a_task_is_a_json_object():
    with pytest.raises(ConfigError, match="--task is no JSON object"):
        tried(SAFE, "--task", "[1]")


def test_a_model_plays_and_what_it_wrote_is_told_from_what_it_read():
    shown = tried(
        f"{published.__file__}:Echoing",
        *("--model", "tiny", "--turns", "3", "--max-new-tokens", "4", "--seed", "1"),
    )
    pieces = re.findall(r"^(read|written) (\d+) ids \(([\d ]+)", shown, re.MULTILINE)
    kinds = [kind for kind, *_ in pieces]
    assert kinds[0] == "read" and "written" in kinds
    assert all(one != other for one, other in pairwise(kinds))
    assert all(len(ids.split()) == min(int(count), 12) for _, count, ids in pieces)
    assert re.search(r"ended by \w+; score: ", shown)
