"""Methods side by side on the tiny model: every arm from the same ground, and started again for
free.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from studies.compare import compare, methods_of, table

from studies import compare as study
from tether.core.errors import ConfigError, TrainingError
from tether.core.rundir import read_json, read_jsonl, write_json
from tether.runner.run import run_recipe
from tether.settings.recipe import read_recipe

STUDIES = Path(study.__file__).parent
AS_A_USER = {**os.environ, "PYTHONPATH": str(STUDIES.parent)}
"""The environment of one who runs a study from any folder."""
SMOKE = str(STUDIES / "compare-smoke.toml")
ONLINE = (
    "steps=2, prompts_per_step=4, samples_per_prompt=2, max_new_tokens=8, "
    "optimizer={learning_rate=1e-2}"
)
DIRECT = "prompts_per_update=4, heldout_fraction=0.0, optimizer={learning_rate=1e-2}"
ARMS = (
    f"arms.rloo={{reinforce={{algorithm='rloo', {ONLINE}}}}}",
    f"arms.rejection={{best_of_n={{{ONLINE}}}}}",
    f"arms.online={{online_direct={{{ONLINE}}}}}",
    f"arms.kto={{kto={{{DIRECT}}}}}",
    f"arms.whole={{direct={{lora=false, {DIRECT}}}}}",
)
NAMES = {"dpo", "whole", "kto", "ppo", "rloo", "rejection", "online"}


def here(*words):
    """`tether run` in this process."""
    assert words[0] == "run"
    recipe, overrides = words[1], [word for word in words if "=" in word]
    run_recipe(read_recipe(recipe, overrides), [word for word in words[2:] if "=" not in word])


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    root = tmp_path_factory.mktemp("compare") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(study, "_tether", here)
        return root, compare(SMOKE, [f"run={root}", *ARMS], [1])


def test_every_arm_learns_from_the_same_ground(finished):
    root, summary = finished
    assert set(summary["arms"]) == NAMES
    stages = methods_of(read_recipe(SMOKE, ARMS))
    assert (
        len(
            {
                read_json(root / "seed-1" / stage / "manifest.json")["model"]["digest"]
                for stage in stages
            },
        )
        == 1
    )
    for arm in summary["arms"].values():
        row = arm["1"]
        assert row["gold_gain"]["value"] == pytest.approx(row["gold_after"] - row["gold_before"])
        assert row["kl"]["value"] != 0.0 and row["peak_rss_bytes"] > 1e8 and row["seconds"] > 0
    assert len({arm["1"]["gold_before"] for arm in summary["arms"].values()}) == 1
    answers = [
        read_json(root / "seed-1/evaluate" / stage / "answers.json")["texts"]
        for stage in ("before", *stages)
    ]
    assert len({tuple(texts) for texts in answers}) == len(answers)
    seeds = {
        read_json(root / "seed-1" / stage / "config.json")[stage.partition("-")[0]]["seed"]
        for stage in stages
    }
    assert seeds == {1}


def test_it_starts_again_for_free(finished, monkeypatch):
    root, summary = finished
    monkeypatch.setattr(study, "_tether", None)
    assert (
        compare(SMOKE, [f"run={root}", *ARMS], [1]) == summary == read_json(root / "summary.json")
    )
    assert (root / "compare.md").read_text() == table(summary["arms"])
    fewer = compare(SMOKE, [f"run={root}"], [1])
    assert fewer["arms"] == {name: summary["arms"][name] for name in ("dpo", "ppo")}


def test_it_takes_up_a_new_arm(finished, monkeypatch, tmp_path):
    original, summary = finished
    root = tmp_path / "run"
    shutil.copytree(original, root)
    for folder in ("kto-kto", "evaluate/kto-kto"):
        shutil.rmtree(root / "seed-1" / folder)
    path = root / "seed-1/evaluate/summary.json"
    verdict = read_json(path)
    del verdict["policies"]["kto-kto"]
    write_json(path, verdict)
    calls = []
    monkeypatch.setattr(study, "_tether", lambda *words: calls.append(words[2]) or here(*words))
    again = compare(SMOKE, [f"run={root}", *ARMS], [1])
    assert calls == ["kto-kto", "evaluate"]
    costs = ("seconds", "peak_rss_bytes")
    rows = [
        {key: value for key, value in s["arms"]["kto"]["1"].items() if key not in costs}
        for s in (again, summary)
    ]
    assert rows[0] == rows[1] and again["arms"]["dpo"] == summary["arms"]["dpo"]


def test_the_table_has_a_line_an_arm_and_seed_and_a_mean(finished):
    arms = finished[1]["arms"]
    lines = table(arms).splitlines()
    assert len(lines) == 2 + 7 and all(line.count("|") == 11 for line in lines)
    row = arms["dpo"]["1"]
    other = {
        **row,
        "gold_gain": {**row["gold_gain"], "value": row["gold_gain"]["value"] + 2.0},
        "peak_rss_bytes": 9e9,
    }
    *_, mean = table({"dpo": {"0": row, "1": other}}).splitlines()
    assert f"**{row['gold_gain']['value'] + 1.0:+.2f}**" in mean and "| 9.00 |" in mean


@pytest.mark.slow
def test_a_process_that_fails_says_so(tmp_path, capfd):
    with pytest.raises(TrainingError, match="ended with exit code 2; its own message stands above"):
        compare(SMOKE, [f"run={tmp_path / 'run'}", "model.source=nowhere/at-all"], [0])
    assert "tether: " in capfd.readouterr().err


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["arms.x={}"], "needs exactly one section"),
        (["arms.x.sft={}"], "needs exactly one section that makes a policy"),
        (["arms.x.ppo.stepz=3"], "did you mean 'steps'"),
        (["repeat=2"], "repeat trains one policy a round"),
        ([f"ppo={{{ONLINE}}}"], "an arm is called as another method is"),
    ],
)
def test_wrong_arms_are_one_clear_message(tmp_path, overrides, message):
    with pytest.raises(ConfigError, match=message):
        compare(SMOKE, [f"run={tmp_path / 'run'}", *overrides], [0])
    assert not (tmp_path / "run").exists()


def test_a_comparison_needs_a_judge():
    with pytest.raises(ConfigError, match=r"and \[evaluate\] with their judge"):
        methods_of(read_recipe("sums"))


def test_the_recipe_is_whole():
    config = read_recipe(str(STUDIES / "compare.toml"))
    assert set(methods_of(config).values()) == {
        "ppo",
        "grpo",
        "rloo",
        "rejection",
        "dpo",
        "kto",
        "simpo",
    }
    online = [
        config.section(name) for name in config.policies if config.kind(name).makes == "policy"
    ]
    assert {s.steps * s.prompts_per_step * s.samples_per_prompt for s in online} == {768}
    assert {(s.max_new_tokens, s.temperature) for s in (*online, config.section("evaluate"))} == {
        (48, 0.7),
    }


OWN = """
run = "run"
[model]
source = "tiny"
[pairs]
data = { path = "questions.txt" }
samples_per_prompt = 2
max_new_tokens = 8
judge = { call = "short.py:short" }
[arms.dpo.direct]
[arms.ipo.direct]
loss = "ipo"
[evaluate]
data = { path = "others.txt" }
judge = { call = "short.py:short" }
"""


@pytest.mark.slow
def test_ones_own_prompts_judge_and_model(tmp_path):
    """As a program, every arm in a process of its own."""
    (tmp_path / "own.toml").write_text(OWN)
    (tmp_path / "questions.txt").write_text("".join(f"What is {i} and {i}?\n" for i in range(8)))
    (tmp_path / "others.txt").write_text("".join(f"What comes after {i}?\n" for i in range(4)))
    (tmp_path / "short.py").write_text(
        "def short(prompts, responses):\n    return [-len(r) for r in responses]\n",
    )
    command = [sys.executable, "-m", "studies.compare", "own.toml", "--seeds", "0"]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=AS_A_USER,
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith((tmp_path / "run" / "compare.md").read_text())
    arms = read_json(tmp_path / "run" / "summary.json")["arms"]
    assert set(arms) == {"dpo", "ipo"} and arms["dpo"]["0"]["gold_before"] < 0
    assert {row["prompt"] for row in read_jsonl(tmp_path / "run/seed-0/pairs/answers.jsonl")} >= {
        "What is 0 and 0?",
    }


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_arm_in_hand_after_its_step(tmp_path, number):
    """The child is stopped by its parent, once, saves, and leaves nothing running; the same command
    goes on.
    """
    words = [
        "arms.ppo.ppo.steps=30",
        "arms.ppo.ppo.checkpoint_every=100",
        f"run={tmp_path / 'run'}",
        "--smoke",
        "--seeds",
        "1",
    ]
    command = [sys.executable, "-m", "studies.compare", *words]
    parent = subprocess.Popen(
        command,
        env=AS_A_USER,
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    metrics = tmp_path / "run/seed-1/ppo-ppo/metrics.jsonl"
    while not metrics.is_file() and parent.poll() is None:
        time.sleep(0.02)
    parent.send_signal(number)
    _, errors = parent.communicate()
    assert parent.returncode == 128 + number and errors.count("which is saved") == 1, errors
    (saved,) = metrics.parent.glob("checkpoints/step-*")
    assert 1 <= int(saved.name.removeprefix("step-")) < 30
    subprocess.run(command, env=AS_A_USER, check=True, stdout=subprocess.DEVNULL)
    assert [json.loads(line)["step"] for line in metrics.read_text().splitlines()] == list(
        range(1, 31),
    )
