"""A reward is one file and one row of the table: nothing else lists the rewards."""

import json
import subprocess
import sys

import pytest

MODULE = """
from pydantic import Field

from tether.core.errors import ConfigError
from tether.core.types import Score
from tether.settings.config import Config


class VowelsConfig(Config):
    weight: float = Field(default=1.0, description="of a vowel")


class Vowels:
    name = "vowels"

    def __init__(self, weight):
        self.weight = weight

    def score(self, rollouts):
        counts = [sum(r.text.count(letter) for letter in "aeiou") for r in rollouts]
        return [Score(self.weight * count + len(r.text)) for count, r in zip(counts, rollouts)]


def make(parts):
    return Vowels(parts.settings.weight)


def check(name, section):
    if section.vowels.weight < 0:
        raise ConfigError(f"{name}.vowels.weight is below 0")
"""
HOUSE = """
import sys

from tether.settings.rewards import REWARDS, RewardKind
from vowels import VowelsConfig

REWARDS["vowels"] = RewardKind(
    help="vowels", make="vowels:make", settings=VowelsConfig, check="vowels:check"
)

from tether.cli import main

sys.argv[0] = "tether"
main()
"""
RECIPE = """
run = "run"
[model]
source = "tiny"
dtype = "float32"
[grpo]
data = { path = "prompts.txt" }
steps = 1
prompts_per_step = 3
samples_per_prompt = 4
max_new_tokens = 8
sample_rows = 12
optimizer = { learning_rate = 1e-2 }
vowels = { weight = 100.0 }
"""


@pytest.fixture
def tether(tmp_path):
    """A command in a process whose table has one row more: its exit code and its words."""
    (tmp_path / "vowels.py").write_text(MODULE)
    (tmp_path / "house.py").write_text(HOUSE)
    (tmp_path / "recipe.toml").write_text(RECIPE)
    (tmp_path / "prompts.txt").write_text("one\ntwo\nthree\n")

    def run(*words):
        command = [sys.executable, "house.py", *words]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert "Traceback" not in done.stderr, done.stderr
        return done.returncode, done.stdout + done.stderr

    return run


def test_a_new_reward_trains_a_step(tether, tmp_path):
    code, words = tether("run", "recipe.toml")
    assert code == 0, words
    lines = (tmp_path / "run" / "grpo" / "samples.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if row.get("step") == 1]
    assert len(rows) == 12
    vowels = [sum(row["response"].count(letter) for letter in "aeiou") for row in rows]
    for row, count in zip(rows, vowels, strict=True):
        assert row["proxy"] == 100 * count + len(row["response"])
    assert len({row["proxy"] for row in rows}) > 1
    settings = json.loads((tmp_path / "run" / "grpo" / "config.json").read_text())["grpo"]
    assert settings["reward_source"] == "vowels" and settings["vowels"] == {"weight": 100.0}


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("grpo.vowels.weight=-1", "grpo.vowels.weight is below 0"),
        ("grpo.vowels.wait=1", "unknown key 'grpo.vowels.wait' (known keys: weight)"),
        ("grpo.reward_source=vowel", "grpo.reward_source"),
    ],
)
def test_faults_of_a_new_reward_come_before_the_first_step(tether, tmp_path, override, named):
    code, words = tether("run", "recipe.toml", override)
    assert code == 2 and named in " ".join(words.split())
    assert not (tmp_path / "run" / "grpo").exists()
