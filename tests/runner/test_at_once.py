"""Jobs of a sweep at once: no more than asked, none before what it depends on, and the same bytes
as in turn.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
from tests.every_stage import differences, everything
from tests.runner.test_sweep import BETAS, PLACES, RECIPE, values

from tether.core.errors import ConfigError, RunError
from tether.core.stopping import Interrupted
from tether.runner import at_once
from tether.runner.jobs import expand
from tether.runner.launch import Launch
from tether.runner.planning.devices import Device
from tether.settings.reading import build
from tether.settings.recipe import Recipe

SWEEP = {"ppo.gamma": [1.0, 0.9, 0.8]}


@pytest.fixture
def root(tmp_path, monkeypatch):
    monkeypatch.setattr(at_once, "MEMBER", "tests.runner.pretend_member")
    monkeypatch.setenv("PRETEND", str(tmp_path))
    return tmp_path


def run(root, number, sweep=SWEEP):
    recipe = build(Recipe, values(root, sweep=sweep))
    launch = Launch(
        recipe=recipe,
        names=recipe.stages,
        jobs=expand(recipe),
        progress=None,
        clock=time.monotonic,
        began=time.monotonic(),
        at_once=number,
    )
    return at_once.run_at_once(launch)


def events(root):
    rows = [json.loads(line) for line in (root / "events").read_text().splitlines()]
    return [(what, folder) for what, folder, _ in sorted(rows, key=lambda row: row[2])]


@pytest.mark.parametrize("number", [1, 2, 3])
def test_as_many_jobs_run_at_once_and_none_before_what_it_needs(root, number):
    results = run(root, number)
    policies = [f"sweep/ppo.gamma={gamma}/ppo" for gamma in (1.0, 0.9, 0.8)]
    assert [*results] == ["sft", "pairs", "reward", *policies]
    assert results["sft"] == {"name": "sft"}
    log = events(root)
    running, most, done = set(), 0, set()
    needs = {"reward": {"pairs", "sft"}} | {policy: {"sft", "reward"} for policy in policies}
    for what, folder in log:
        if what == "began":
            assert needs.get(folder, set()) <= done
            running.add(folder)
        else:
            running.remove(folder)
            done.add(folder)
        most = max(most, len(running))
    assert most == number and len(done) == 6


def test_rounds_wait_for_the_rounds_before(root):
    recipe = build(Recipe, values(root, repeat=2, sweep={"ppo.gamma": [1.0, 0.9]}))
    jobs = expand(recipe)
    second = [job for job in jobs if job.round == 2]
    first = [job for job in jobs if job.round == 1]
    assert second and first
    assert at_once._next([*second, *first], []) in first


def test_a_job_that_fails_ends_the_others_and_is_named_with_its_last_words(root, monkeypatch):
    monkeypatch.setenv("FAILS", "gamma=0.9/ppo")
    monkeypatch.setenv("AFTER", '["began", "sweep/ppo.gamma=1.0/ppo"')
    monkeypatch.setenv("SECONDS", "3")
    with pytest.raises(RunError, match=r"gamma=0\.9/ppo has failed: the reward of this job"):
        run(root, 2, {"ppo.gamma": [1.0, 0.9, 0.8, 0.7]})
    log = events(root)
    assert ("saved", "sweep/ppo.gamma=1.0/ppo") in log
    assert not any(
        folder.startswith(("sweep/ppo.gamma=0.8", "sweep/ppo.gamma=0.7")) for _, folder in log
    )


def test_a_signal_lets_every_job_save_and_starts_no_other(root, monkeypatch):
    monkeypatch.setenv("SECONDS", "30")

    def interrupt():
        while not (root / "events").exists():
            time.sleep(0.05)
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(Interrupted) as end:
        run(root, 2)
    assert end.value.exit_code == 130
    assert {what for what, _ in events(root)} == {"began", "saved"}


def test_more_memory_than_there_is_is_refused(tmp_path, monkeypatch):
    recipe = build(Recipe, values(tmp_path, sweep=SWEEP))

    def machine(memory):
        how = {"products": 1e12, "bandwidth": 1e11, "gpu": False}
        monkeypatch.setattr(
            at_once,
            "machine_for",
            lambda _: Device(name="planted", memory=memory, **how),
        )

    machine(1e6)
    with pytest.raises(ConfigError, match="--at-once 2"):
        at_once.job_slots(recipe, ["ppo"], 2)
    machine(1e12)
    assert len(at_once.job_slots(recipe, ["ppo"], 2)) == 2


def test_each_gpu_has_one_job(tmp_path, monkeypatch):
    recipe = build(Recipe, values(tmp_path, sweep=SWEEP))
    monkeypatch.setattr(at_once, "pick_device", lambda _: torch.device("cuda"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,5,7")
    places = at_once.job_slots(recipe, ["ppo"], 2)
    assert [place["CUDA_VISIBLE_DEVICES"] for place in places.values()] == ["2", "5"]
    with pytest.raises(ConfigError, match=r"4 GPUs.* has 3"):
        at_once.job_slots(recipe, ["ppo"], 4)


@pytest.mark.slow
def test_a_sweep_at_once_has_the_bytes_of_one_in_turn(tmp_path):
    turn, together = tmp_path / "turn", tmp_path / "together"
    for folder, more in ((turn, []), (together, ["--at-once", "2"])):
        folder.mkdir()
        (folder / "recipe.toml").write_text(RECIPE.partition("[sweep]")[0])
        command = [sys.executable, "-m", "tether", "sweep", "recipe.toml", "--seeds", "2"]
        command += [f"grpo.kl.coefficient={','.join(BETAS)}", *more]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            command,
            cwd=folder,
            env=environment,
            capture_output=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
    assert all((together / "run/sweep" / place / "grpo/summary.json").exists() for place in PLACES)
    made = {name: at for name, at in everything(together).items() if not name.endswith(".log")}
    assert differences(everything(turn), made) == []
