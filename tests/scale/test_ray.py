"""Ray as a launcher, on a cluster of this machine's loopback: programs, their ends, and a run whose
engine servers it places.
"""

import contextlib
import os
import signal
import sys
import time

import pytest

from tether.core.errors import ConfigError
from tether.core.rundir import read_jsonl
from tether.runner.run import run_recipe
from tether.scale.clusters import ray as scale
from tether.settings.reading import build
from tether.settings.recipe import Recipe

ray = scale.ray


@pytest.fixture
def launcher(cluster):
    made = scale.RayLauncher(None, "test", {"a": {"CPU": 0.5}, "b": {"CPU": 0.5}}, 60)
    yield made
    made.close()


def end_of(launcher, name, seconds=60):
    start = time.monotonic()
    while (status := launcher.ended(name)) is None:
        assert time.monotonic() - start < seconds
        time.sleep(0.05)
    return status


def test_a_program_runs_with_its_words_and_ends_with_its_status(launcher, tmp_path):
    host, port = launcher.place("a")
    assert host == scale.LOOPBACK and 1024 < port < 65536 and launcher.ended("a") is None
    words = "import os, sys; print(os.environ['GIVEN'], sys.argv[1], flush=True); sys.exit(7)"
    launcher.start(
        "a",
        [sys.executable, "-c", words, "an argument"],
        {"GIVEN": "one"},
        tmp_path / "logs" / "a.log",
    )
    assert end_of(launcher, "a") == 7
    assert (tmp_path / "logs" / "a.log").read_text() == "one an argument\n"


def test_a_lost_actor_takes_its_program_along_and_may_start_it_again(launcher, tmp_path):
    sleep = [
        sys.executable,
        "-c",
        "import os, time; print(os.getpid(), flush=True); time.sleep(600)",
    ]
    log = tmp_path / "a.log"
    launcher.place("a")
    launcher.start("a", sleep, {}, log)
    actor = ray.get(launcher.hosts["a"].__ray_call__.remote(lambda host: os.getpid()))
    while not log.read_text():
        time.sleep(0.05)
    program = int(log.read_text())
    os.kill(actor, signal.SIGKILL)
    assert end_of(launcher, "a") == scale.LOST
    ends = time.monotonic() + 10
    while os.path.exists(f"/proc/{program}") and time.monotonic() < ends:
        time.sleep(0.05)
    assert not os.path.exists(f"/proc/{program}")
    start = time.monotonic()
    # Ray starts the actor anew; until then there is no machine, which is an OSError
    while time.monotonic() < start + 120:
        with contextlib.suppress(OSError):
            launcher.place("a")
            launcher.start("a", sleep, {}, log)
            break
    assert launcher.ended("a") is None
    launcher.stop("a")
    assert launcher.ended("a") is None, "nobody asks for the end of what was stopped"


def test_memory_is_reserved_and_runs_of_one_name_stand_side_by_side(cluster):
    needs = {"a": {"CPU": 0.5, "memory": 1e6}}
    with (
        contextlib.closing(scale.RayLauncher(None, "ppo", needs, 60)) as first,
        contextlib.closing(scale.RayLauncher(None, "ppo", needs, 60)) as second,
    ):
        first.place("a")
        second.place("a")
    with pytest.raises(ConfigError, match=r"a needs 0\.5 CPU, 1e\+06 GB"):
        scale.RayLauncher(None, "ppo", {"a": {"CPU": 0.5, "memory": 1e15}}, 60)


def test_a_run_elsewhere_passes_on_all_of_its_output_once(launcher, tmp_path, monkeypatch):
    words = "import sys; sys.stdout.write('x' * 3_000_000 + 'the end')"
    monkeypatch.setattr(scale, "STARTS", (sys.executable, "-c", words))
    for number in range(2):
        got = bytearray()
        assert scale._run_once(launcher, [], tmp_path / f"{number}.log", got.extend, "a") == 0
        assert len(got) == 3_000_007 and got.endswith(b"the end")


def test_a_machine_that_does_not_come_is_a_lost_one(launcher, tmp_path, monkeypatch):
    def late(name):
        raise OSError("Ray has no machine for a now")

    monkeypatch.setattr(launcher, "place", late)
    got = bytearray()
    assert scale._run_once(launcher, [], tmp_path / "a.log", got.extend, "a") == scale.LOST
    assert b"no machine" in got


def test_resources_that_a_cluster_lacks_are_named_at_once(cluster):
    start = time.monotonic()
    with pytest.raises(
        ConfigError,
        match=r"server-0 needs 8 GPU.*2 CPU",
    ):
        scale.RayLauncher(None, "test", {"server-0": {"GPU": 8.0}}, 600)
    with pytest.raises(ConfigError, match=r"4 CPU.*cluster has 2"):
        scale.RayLauncher(None, "test", {"server-0": {"CPU": 2.0}, "server-1": {"CPU": 2.0}}, 600)
    assert time.monotonic() - start < 30


@pytest.mark.parametrize(
    ("needs", "nodes", "words"),
    [
        (
            {"a": {"GPU": 2}},
            [{"GPU": 1, "CPU": 8}, {"GPU": 1}],
            "a needs 2 GPU, and the largest machine of the cluster has 8 CPU, 1 GPU",
        ),
        ({"a": {"GPU": 1}, "b": {"GPU": 1}}, [{"GPU": 1}], "together 2 GPU, and the cluster has 1"),
        ({"a": {"tpu": 1}}, [{"GPU": 1}], "a needs 1 tpu"),
        (
            {"a": {"GPU": 1}},
            [],
            "a needs 1 GPU, and the largest machine of the cluster has nothing",
        ),
    ],
)
def test_too_little_is_named(needs, nodes, words):
    with pytest.raises(ConfigError, match=words):
        scale.check_fits(needs, nodes)


def test_enough_passes():
    scale.check_fits(
        {"a": {"GPU": 1}, "b": {"GPU": 1, "CPU": 2}},
        [{"GPU": 1}, {"GPU": 1, "CPU": 4}],
    )


@pytest.mark.timeout(600)
def test_servers_that_ray_places_give_the_run_of_one_process(cluster, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(f'{{"prompt": "What is {n}?"}}\n' for n in range(8)))
    section = {
        "data": {"path": str(prompts)},
        "reward_source": "random",
        "steps": 3,
        "prompts_per_step": 4,
        "samples_per_prompt": 2,
    }
    texts, losses = [], []
    for on, engine in (
        ("local", {}),
        ("ray", {"kind": "served", "servers": 2, "resources": {"CPU": 0.5}}),
    ):
        values = {
            "run": str(tmp_path / on),
            "on": on,
            "model": {"source": "tiny", "dtype": "float32"},
        }
        run_recipe(
            build(Recipe, {**values, "grpo": {**section, "max_new_tokens": 8, "engine": engine}}),
        )
        texts.append(
            [
                (row["step"], row["response"])
                for row in read_jsonl(tmp_path / on / "grpo" / "samples.jsonl")
            ],
        )
        losses.append([row["loss"] for row in read_jsonl(tmp_path / on / "grpo" / "metrics.jsonl")])
    assert texts[0] == texts[1] and texts[0]
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)
