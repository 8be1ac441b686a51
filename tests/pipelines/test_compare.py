"""Methods side by side on the tiny model: every arm from the same ground, each in its own process, and started again for free."""

import json
import signal
import subprocess
import sys
import time
import tomllib

import pytest

from tether.core.config import build, packaged_recipe
from tether.core.errors import ConfigError
from tether.pipelines import compare
from tether.pipelines.compare import Compare, CompareConfig, table

ONLINE = {"steps": 2, "prompts_per_step": 4, "samples_per_prompt": 2, "optimizer": {"learning_rate": 1e-2}}
DIRECT = {"prompts_per_update": 4, "heldout_fraction": 0.0, "optimizer": {"learning_rate": 1e-2}}
VALUES = {
    "judge": "letters",
    "max_prompts": 8,
    "seeds": [1],
    "max_new_tokens": 8,
    "model": {"source": "tiny", "dtype": "float32"},
    "sft": {"epochs": 1, "batch_size": 8, "row_tokens": 256, "optimizer": {"learning_rate": 1e-3}},
    "pairs": {"samples_per_prompt": 2, "temperature": 1.0},
    "reward": {"prompts_per_update": 4, "heldout_fraction": 0.25, "optimizer": {"learning_rate": 1e-3}},
    "arms": {
        "ppo": {"ppo": ONLINE},
        "rloo": {"reinforce": {"algorithm": "rloo", **ONLINE}},
        "rejection": {"best_of_n": ONLINE},
        "online": {"online_direct": ONLINE},
        "dpo": {"direct": DIRECT},
        "kto": {"kto": DIRECT},
        "whole": {"direct": {"lora": False, **DIRECT}},
    },
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    root = tmp_path_factory.mktemp("compare") / "run"
    config = build(CompareConfig, {"run": str(root), **VALUES})
    return config, root, Compare(config).run()


def test_every_arm_learns_from_the_same_ground(finished):
    _, root, summary = finished
    assert set(summary["arms"]) == set(VALUES["arms"])
    bases = {json.loads((root / f"seed-1/arms/{a}/manifest.json").read_text())["model"]["digest"] for a in VALUES["arms"]}
    assert len(bases) == 1
    for arm in summary["arms"].values():
        row = arm["1"]
        assert row["gold_gain"]["value"] == pytest.approx(row["gold_after"] - row["gold_before"])
        assert row["kl"]["value"] != 0.0 and row["peak_rss_bytes"] > 1e8 and row["seconds"] > 0
    assert len({arm["1"]["gold_before"] for arm in summary["arms"].values()}) == 1
    answers = [json.loads((root / f"seed-1/arms/{a}/answers.json").read_text())["texts"] for a in ("sft", *VALUES["arms"])]
    assert len({tuple(texts) for texts in answers}) == len(answers)


def test_it_starts_again_for_free_and_takes_up_a_new_arm(finished, monkeypatch):
    config, root, summary = finished
    monkeypatch.setattr(compare, "run_stage", None)
    monkeypatch.setattr(Compare, "_in_a_process", None)
    assert Compare(config).run() == summary
    assert (root / "compare.md").read_text() == table(summary)
    fewer = build(CompareConfig, {"run": str(root), **VALUES, "arms": {"dpo": VALUES["arms"]["dpo"]}})
    assert Compare(fewer).run()["arms"]["dpo"] == summary["arms"]["dpo"]


def test_the_table_has_a_line_an_arm_and_seed_and_a_mean(finished):
    summary = finished[2]
    lines = table(summary).splitlines()
    assert len(lines) == 2 + 7 and all(line.count("|") == 11 for line in lines)
    row = summary["arms"]["dpo"]["1"]
    other = {**row, "gold_gain": {**row["gold_gain"], "value": row["gold_gain"]["value"] + 2.0}, "peak_rss_bytes": 9e9}
    *_, mean = table({"arms": {"dpo": {"0": row, "1": other}}}).splitlines()
    assert f"**{row['gold_gain']['value'] + 1.0:+.2f}**" in mean and "| 9.00 |" in mean


def test_an_arm_that_fails_says_so(tmp_path, capfd):
    values = {
        **VALUES,
        "arms": {"ppo": {"ppo": {**ONLINE, "optimizer": {"learning_rate": 1e18, "max_skipped": 0}}}},
        "seeds": [0],
    }
    with pytest.raises(Exception, match="the arm 'ppo' of seed 0 ended with exit code"):
        Compare(build(CompareConfig, {"run": str(tmp_path / "run"), **values})).run()
    assert "tether: " in capfd.readouterr().err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"arms": {"x": {"ppo": {"max_new_tokens": 9}}}}, "set max_new_tokens for all at once"),
        ({"arms": {"x": {}}}, "needs exactly one section"),
        ({"arms": {"x": {"sft": {}}}}, "needs exactly one section that makes a policy"),
        ({"arms": {"x": {"ppo": {"stepz": 3}}}}, "did you mean 'steps'"),
        ({"seed": 3}, "seed has no effect here"),
    ],
)
def test_wrong_arms_are_one_clear_message(tmp_path, change, message):
    with pytest.raises(ConfigError, match=message):
        build(CompareConfig, {"run": str(tmp_path), **VALUES, **change})


def test_the_packaged_recipe_is_whole():
    config = build(CompareConfig, tomllib.loads(packaged_recipe("compare").read_text()))
    stages = [config.arm(name, 0)[0] for name in config.arms]
    assert stages == ["ppo", "grpo", "reinforce", "best_of_n", "direct", "kto", "direct"]
    online = [section for name in config.arms for stage, section in [config.arm(name, 0)] if hasattr(section, "steps")]
    assert {s.steps * s.prompts_per_step * s.samples_per_prompt for s in online} == {768}


@pytest.mark.slow
def test_a_signal_ends_the_arm_in_hand_after_its_step(tmp_path):
    """The child is stopped by its parent, once, saves, and leaves nothing running; the same command goes on."""
    arm = {"ppo": {**ONLINE, "steps": 30, "checkpoint_every": 100}}
    values = {**VALUES, "run": str(tmp_path / "run"), "arms": {"ppo": arm}}
    program = (
        "import json, sys; from tether.core.config import build; from tether.pipelines.compare import *;"
        "Compare(build(CompareConfig, json.loads(sys.argv[1]))).run()"
    )
    parent = subprocess.Popen([sys.executable, "-c", program, json.dumps(values)], stderr=subprocess.PIPE, text=True)
    metrics = tmp_path / "run/seed-1/arms/ppo/metrics.jsonl"
    while not metrics.is_file() and parent.poll() is None:
        time.sleep(0.05)
    parent.send_signal(signal.SIGINT)
    _, told = parent.communicate()
    assert parent.returncode != 0 and "which is saved" in told
    (saved,) = metrics.parent.glob("checkpoints/step-*")
    made = int(saved.name.removeprefix("step-"))
    assert 1 <= made < 30
    Compare(build(CompareConfig, values)).run()
    assert [json.loads(line)["step"] for line in metrics.read_text().splitlines()] == list(range(1, 31))
