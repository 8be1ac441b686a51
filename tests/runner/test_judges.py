"""A second reward model, of labels that the first one never sees, as the judge of a policy."""

import json

import pytest
from tests.runner.test_ensemble import WORDS, recipe

from tether.core.errors import ConfigError
from tether.core.rundir import read_json, read_jsonl
from tether.core.types import Score
from tether.runner.methods import sampling as online
from tether.runner.run import run_recipe

JUDGED = {"evaluate": {"every": 1, "prompts": 4, "judge": "test"}}


def test_the_test_model_learns_from_other_prompts_and_judges(tmp_path):
    made = recipe(tmp_path, {"test_share": 0.5, "heldout_fraction": 0.0}, grpo=JUDGED)
    found = run_recipe(made, ("reward", "grpo"))
    ours, other = found["reward"], found["reward"]["test_model"]
    assert (
        ours["num_prompts"] + other["num_prompts"] == len(WORDS)
        and min(ours["num_prompts"], other["num_prompts"]) > 0
    )
    assert (tmp_path / "run/reward/test/model/role.json").is_file()
    rows = [
        row
        for row in read_jsonl(tmp_path / "run/grpo/heldout.jsonl")
        if not row.keys() & {"temperature", "best_of"}
    ]
    assert [row["name"] for row in rows] == ["test"] * 3 and {"score", "proxy"} <= set(
        rows[0]["scores"],
    )
    assert rows[0]["scores"]["score"] != rows[0]["scores"]["proxy"]
    metrics = list(read_jsonl(tmp_path / "run/grpo/metrics.jsonl"))
    assert {"test/score", "test/proxy"} <= set(metrics[-1]) and "test" in found["grpo"]
    assert json.dumps(read_json(tmp_path / "run/grpo/summary.json")["test"])


def test_it_is_the_test_model_that_is_asked(tmp_path, monkeypatch):
    class Lengths:
        def score(self, rollouts):
            return [Score(float(len(r.text))) for r in rollouts]

    asked = []
    monkeypatch.setattr(
        online,
        "learned_reward",
        lambda folder, model, **_: asked.append(folder) or Lengths(),
    )
    run_recipe(
        recipe(tmp_path, {"test_share": 0.5, "heldout_fraction": 0.0}, grpo=JUDGED),
        ("reward", "grpo"),
    )
    assert asked == [tmp_path / "run/reward/test/model"]
    rows = list(read_jsonl(tmp_path / "run/grpo/heldout.jsonl"))
    assert all(value == int(value) for row in rows for value in row["scores"]["score"])


def test_a_judge_that_was_never_trained_is_asked_for(tmp_path):
    with pytest.raises(ConfigError, match=r"reward\.test_share above 0"):
        run_recipe(recipe(tmp_path, {}, grpo=JUDGED), ("reward", "grpo"))
    assert not (tmp_path / "run" / "reward").exists()
