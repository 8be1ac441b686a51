"""A sweep is more jobs: each combination a run of its own, equal stages run once, and killed sweeps
go on to the bit.
"""

import os
import signal
import subprocess
import sys
import time

import pytest
from tests.every_stage import differences, everything
from typer.testing import CliRunner

from tether.cli import app
from tether.core.errors import ConfigError
from tether.core.rundir import read_json
from tether.runner.jobs import expand, sweep_table
from tether.settings.reading import build
from tether.settings.recipe import Recipe
from tether.settings.sweep import combinations
from tether.watch.report.gains import proxy_gain
from tether.watch.report.numbers import signed
from tether.watch.report.reading import read_sub_run

RECIPE = """
run = "run"
[model]
source = "tiny"
dtype = "float32"
[sft]
data = { path = "tether:demonstrations", limit = 32 }
batch_size = 8
[grpo]
data = { path = "tether:prompts", limit = 16 }
reward_source = "random"
steps = 2
prompts_per_step = 2
samples_per_prompt = 2
max_new_tokens = 8
[sweep]
"grpo.kl.coefficient" = [0.01, 0.05]
seed = [0, 1]
"""
BETAS = ("0.01", "0.05")
PLACES = [f"grpo.kl.coefficient={beta},seed={seed}" for beta in BETAS for seed in (0, 1)]


def values(root, **sections):
    rows = {"path": "tether:prompts", "limit": 16}
    return {
        "run": str(root),
        "model": {"source": "tiny"},
        "sft": {"data": {"path": "tether:demonstrations", "limit": 16}},
        "pairs": {"data": rows, "judge": {"call": "tether.quickstart.judges:friendly"}},
        "reward": {},
        "ppo": {"data": rows},
        **sections,
    }


def folders(root, sweep, **sections):
    jobs = expand(build(Recipe, values(root, sweep=sweep, **sections)))
    return [str(job.folder.relative_to(root)) for job in jobs], jobs


def test_only_what_depends_on_a_swept_key_runs_again(tmp_path):
    names, jobs = folders(tmp_path, {"ppo.gamma": [1.0, 0.9], "ppo.epochs": [1, 2]})
    places = [f"sweep/ppo.gamma={g},ppo.epochs={e}/ppo" for g in ("1.0", "0.9") for e in (1, 2)]
    assert names == ["sft", "pairs", "reward", *places]
    for job in jobs[3:]:
        assert job.start == tmp_path / "sft" and job.scorer == tmp_path / "reward" / "model"
    assert [job.settings.gamma for job in jobs[3:]] == [1.0, 1.0, 0.9, 0.9]
    assert [job.settings.epochs for job in jobs[3:]] == [1, 2, 1, 2]


def test_a_swept_stage_makes_every_later_one_run_again(tmp_path):
    names, jobs = folders(tmp_path, {"reward.epochs": [2, 3]})
    places = [f"sweep/reward.epochs={epochs}/" for epochs in (2, 3)]
    assert names == ["sft", "pairs", *(at + name for at in places for name in ("reward", "ppo"))]
    assert [job.scorer for job in jobs if job.name == "ppo"] == [
        tmp_path / at / "reward" / "model" for at in places
    ]


def test_the_value_of_the_recipe_itself_keeps_the_folders_of_the_run(tmp_path):
    names, _ = folders(tmp_path, {"seed": [0, 7]})
    stages = ["sft", "pairs", "reward", "ppo"]
    assert names == [*stages, *(f"sweep/seed=7/{name}" for name in stages)]


def test_the_table_of_a_sweep_names_the_folder_of_every_stage(tmp_path):
    recipe = build(Recipe, values(tmp_path, sweep={"seed": [0, 7], "ppo.gamma": [1.0, 0.9]}))
    rows = {(row["values"]["seed"], row["values"]["ppo.gamma"]): row for row in sweep_table(recipe)}
    shared = ("sft", "pairs", "reward")
    assert {key: row["stages"]["ppo"] for key, row in rows.items()} == {
        (0, 1.0): "sweep/seed=0,ppo.gamma=1.0/ppo",
        (0, 0.9): "sweep/seed=0,ppo.gamma=0.9/ppo",
        (7, 1.0): "sweep/seed=7,ppo.gamma=1.0/ppo",
        (7, 0.9): "sweep/seed=7,ppo.gamma=0.9/ppo",
    }
    for (seed, _), row in rows.items():
        place = "" if seed == 0 else "sweep/seed=7,ppo.gamma=1.0/"
        assert {name: row["stages"][name] for name in shared} == {n: place + n for n in shared}


def test_one_stage_of_a_sweep_depends_on_what_the_others_share(tmp_path):
    recipe = build(Recipe, values(tmp_path, sweep={"ppo.gamma": [1.0, 0.9]}))
    whole = {job.folder: job for job in expand(recipe)}
    alone = expand(recipe, ["ppo"])
    assert [job.name for job in alone] == ["ppo", "ppo"]
    assert all(whole[job.folder].start == job.start == tmp_path / "sft" for job in alone)
    with pytest.raises(ConfigError, match="no \\[dpo\\] section"):
        expand(recipe, ["dpo"])


@pytest.mark.parametrize(
    ("sweep", "message"),
    [
        ({"ppo.gama": [1.0]}, "unknown key 'ppo.gama'.*gamma"),
        ({"ppo.gamma": [1.0, 3.0]}, "key 'ppo.gamma'"),
        ({"kto.beta": [0.1]}, "kto"),
        ({"ppo.gamma": 1.0}, "a list of values"),
        ({"ppo.gamma": []}, "a list of values"),
        ({"ppo.gamma": [1.0, 0.9, 1.0]}, "the value 1.0 twice"),
        ({"run": ["a", "b"]}, "belongs to the whole run"),
        ({"learner.ranks": [1, 2]}, "belongs to the whole run"),
        ({}, "names no key"),
        ({"seed": [*range(10_001)]}, "more than 10,000 combinations"),
        ({"seed": [*range(101)], "ppo.steps": [*range(1, 101)]}, "more than 10,000 combinations"),
    ],
)
def test_a_sweep_that_cannot_be_run_is_refused_in_one_sentence(tmp_path, sweep, message):
    with pytest.raises(ConfigError, match=message):
        folders(tmp_path, sweep)


def test_values_that_differ_in_their_quotes_alone_have_folders_of_their_own():
    """A number and its text, and texts in which a comma looks like the next key."""
    names = [name for name, _ in combinations({"a": [1, "1", True, "true"]})]
    assert names[0] == "a=1" and names[2] == "a=true" and len({*names}) == 4
    table = {"a": ["x", "x,b=y"], "b": ["y", "y,b=y"]}
    names = [name for name, _ in combinations(table)]
    assert names[0] == "a=x,b=y" and len({*names}) == 4
    assert not any("/" in name or len(name) > 100 for name in names)


def test_a_budget_of_the_whole_run_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="give a stage its budget"):
        folders(tmp_path, {"seed": [0, 1]}, budget=3)


def test_a_table_of_tables_is_the_same_sweep(tmp_path):
    dotted, _ = folders(tmp_path, {"ppo.gamma": [1.0, 0.9]})
    assert folders(tmp_path, {"ppo": {"gamma": [1.0, 0.9]}})[0] == dotted


def started(folder):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tether", "run", "recipe.toml"]
    return subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )


def killed_at(folder, file):
    """Start the sweep, and kill it as soon as `file` has a line."""
    with started(folder) as process:
        path = folder / "run" / file
        end = time.monotonic() + 200
        while not (path.is_file() and path.stat().st_size):
            assert process.poll() is None and time.monotonic() < end, process.stderr.read()
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)


def test_a_sweep_of_two_keys_and_two_seeds_killed_twice_goes_on_to_the_bit(tmp_path):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    for folder in (whole, broken):
        folder.mkdir()
        (folder / "recipe.toml").write_text(RECIPE)
    with started(whole) as process:
        assert process.wait(250) == 0, process.stderr.read()
    killed_at(broken, f"sweep/{PLACES[0]}/grpo/metrics.jsonl")
    killed_at(broken, f"sweep/{PLACES[3]}/grpo/metrics.jsonl")
    assert not (broken / "run" / "sweep" / PLACES[3] / "grpo" / "summary.json").exists()
    with started(broken) as process:
        assert process.wait(250) == 0, process.stderr.read()
    for place in PLACES:
        assert read_json(broken / "run" / "sweep" / place / "grpo" / "summary.json")["steps"] == 2
    assert differences(everything(whole), everything(broken)) == []
    again = CliRunner().invoke(app, ["run", str(whole / "recipe.toml"), f"run={whole / 'run'}"])
    words = " ".join(again.output.split())
    page = (whole / "run" / "report.html").read_text()
    assert "<h1>Sweep over grpo.kl.coefficient</h1>" in page and "report.html" in words
    assert again.exit_code == 0 and "nothing to do" in words
    assert "Folders of the combinations" in words and "tether chat" not in words
    runs = [read_sub_run(whole / "run" / "sweep" / place / "grpo", []) for place in PLACES[:2]]
    gains = [proxy_gain(policy).value for policy in runs]
    assert f" │ 2 │ {signed(sum(gains) / 2)} " in words
