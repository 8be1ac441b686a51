"""Two processes train what one would have trained; where one dies or hangs, both begin again, or
the other says so and ends.
"""

import itertools
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest
from tests.stages.learner.ranked import (
    STAGES,
    assert_same,
    at_step,
    others,
    records,
    standing_on,
    trained,
)

from tether.core.errors import ConfigError, DataError, RunError
from tether.core.stopping import Interrupted
from tether.runner.ranks.restarts import Bars, Group, Teller
from tether.runner.ranks.start import PlacedRank
from tether.settings.reading import build
from tether.settings.recipe import Recipe
from tether.stages.learner.ranks import LostRankError, Ranks


@pytest.fixture(scope="module")
def together(values, tmp_path_factory):
    """What two ranks make of all stages, undisturbed."""
    root = tmp_path_factory.mktemp("together")
    trained(values, root, STAGES, 2)
    return root


def test_two_ranks_make_what_one_makes(alone, together):
    for stage in STAGES:
        assert_same(alone / stage, together / stage)
    assert not others()
    assert {p.name for p in together.iterdir()} == {*STAGES}


def test_steps_of_two_ranks_and_of_one_make_six(values, alone, tmp_path):
    standing_on(alone, tmp_path)
    with pytest.raises(LostRankError, match=r"rank 1 of 2.*-9"):
        trained(values, tmp_path, ["ppo"], 2, at_step(2, lambda other: other.kill()))
    # one alone is told, and both stop together
    with pytest.raises(Interrupted, match=r"step [34] of 6"):
        trained(values, tmp_path, ["ppo"], 2, at_step(3, lambda other: other.terminate()))
    assert not others()
    trained(values, tmp_path, ["ppo"])
    assert_same(alone / "ppo", tmp_path / "ppo")


def as_bits(folder):
    """Every number that a stage left, but for the times."""
    files = [path for path in folder.rglob("*.safetensors") if "checkpoints" not in path.parts]
    return records(folder), {str(path.relative_to(folder)): path.read_bytes() for path in files}


def log_of(root):
    return [json.loads(line) for line in (root / "ranks.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("rank", "stage"),
    [
        (1, "sft"),
        pytest.param(0, "ppo", marks=pytest.mark.slow),
        pytest.param(1, "ppo", marks=pytest.mark.slow),
    ],
)
def test_ranks_come_back_and_end_with_the_same_bits(values, together, tmp_path, rank, stage):
    if stage == "ppo":
        standing_on(together, tmp_path)
    trained(values, tmp_path, [stage], 2, at_step(3, lambda other: other.kill(), rank), restarts=1)
    assert as_bits(tmp_path / stage) == as_bits(together / stage)
    lost, again = log_of(tmp_path)
    assert (lost["kind"], lost["rank"], lost["why"]) == (
        "killed",
        rank,
        f"rank {rank} of 2 has ended: SIGKILL",
    )
    assert again["kind"] == "training" and again["step"] in (3, 4) and not others()


@pytest.mark.slow
def test_ranks_that_get_no_further_are_given_up(values, tmp_path):
    def bar(title):
        return lambda done, *_: done == 2 and others()[1].kill()  # in every start

    with pytest.raises(
        LostRankError,
        match=r"rank 1 of 2.*SIGKILL.* 1 times",
    ):
        trained(
            {**values, "sft": {**values["sft"], "checkpoint_every": 50}},
            tmp_path,
            ["sft"],
            2,
            bar,
            restarts=1,
        )
    assert [row["kind"] for row in log_of(tmp_path)] == [
        "killed",
        "training",
        "killed",
    ] and not others()


@pytest.mark.slow
def test_an_error_of_a_rank_ends_the_run_without_restarts(values, tmp_path):
    values = {**values, "sft": {**values["sft"], "data": {"path": str(tmp_path / "rows.jsonl")}}}
    (tmp_path / "rows.jsonl").write_text(
        json.dumps({"prompt": "a " * 5000, "response": "b"}) + "\n",
    )
    with pytest.raises(DataError):
        trained(values, tmp_path / "run", ["sft"], 2, restarts=3)
    assert not (tmp_path / "run" / "ranks.jsonl").exists() and not others()


@pytest.mark.slow
def test_whoever_watches_passes_a_signal_on(values, tmp_path):
    # many steps are left when the signal arrives
    values = {**values, "sft": {**values["sft"], "epochs": 100}}
    with pytest.raises(Interrupted, match="is saved") as stop:
        trained(
            values,
            tmp_path,
            ["sft"],
            2,
            at_step(1, lambda _: signal.raise_signal(signal.SIGINT)),
            restarts=3,
        )
    assert stop.value.exit_code == 130 and not others()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "max_staleness"),
    [("ppo", 0), ("grpo", 0), ("grpo", 1)],
)
def test_two_ranks_with_a_server_make_what_one_makes(values, ready, tmp_path, stage, max_staleness):
    late = (
        {"max_staleness": 1, "importance": "truncate", "filter_groups": False}
        if max_staleness
        else {}
    )
    section = {**values[stage], **late, "engine": {"kind": "served"}, "sample_rows": 1000}
    samples = []
    for ranks in (1, 2):
        root = standing_on(ready, tmp_path / str(ranks))
        trained({**values, stage: section}, root, [stage], ranks)
        samples.append(
            [
                json.loads(line)
                for line in (root / stage / "samples.jsonl").read_text().splitlines()
            ],
        )
    one, two = (
        [(row["step"], row["prompt"], row["response"], row["stop"]) for row in rows]
        for rows in samples
    )
    assert one == two and len(one) > 20
    assert_same(tmp_path / "1" / stage, tmp_path / "2" / stage)


@pytest.mark.slow
def test_a_rank_that_hangs_is_named_within_the_timeout(values, tmp_path):
    started = []

    def stop(other):
        started.append(time.monotonic())
        other.suspend()

    with pytest.raises(LostRankError, match=r"rank 1 .*life for 5 s"):
        trained(values, tmp_path, ["sft"], 2, at_step(2, stop), timeout=5)
    assert time.monotonic() - started[0] < 30 and not others()
    assert not (tmp_path / "sft" / "summary.json").is_file()
    trained(values, tmp_path / "again", ["sft"], 2, at_step(2, stop, 1), timeout=5, restarts=1)
    assert [row["kind"] for row in log_of(tmp_path / "again")] == [
        "hung",
        "training",
    ] and not others()


@pytest.mark.slow
def test_torchrun_starts_the_ranks(values, alone, tmp_path):
    path, run = tmp_path / "recipe.toml", tmp_path / "run"
    tables = {"model": values["model"], "learner": {"ranks": 2}, "sft": values["sft"]}
    for name in ("data", "optimizer"):
        tables[f"sft.{name}"] = values["sft"][name]
    tables["sft"] = {
        key: value for key, value in values["sft"].items() if f"sft.{key}" not in tables
    }
    lines = [f"run = '{run}'"]
    for table, keys in tables.items():
        lines += [f"[{table}]", *(f"{key} = {json.dumps(value)}" for key, value in keys.items())]
    path.write_text("\n".join(lines))
    started = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "-m",
        "tether",
        "run",
    ]
    done = subprocess.run(
        [*started, str(path)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert_same(alone / "sft", run / "sft")
    # one of them speaks
    assert (run / "report.html").is_file() and done.stdout.count("report.html") == 1


def test_numbers_that_cannot_be(values, tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match=r"learner\.ranks"):
        build(Recipe, {**values, "run": str(tmp_path), "learner": {"ranks": 0}})
    for key in ("timeout", "restarts"):
        with pytest.raises(ConfigError, match=f"{key} has no effect on one rank"):
            build(Recipe, {**values, "run": str(tmp_path), "learner": {key: 9}})
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(
        ConfigError,
        match=r"3 processes.*learner\.ranks is 2",
    ):
        trained(values, tmp_path, ["sft"], ranks=2)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="torchrun has --max-restarts"):
        trained(values, tmp_path, ["sft"], ranks=2, restarts=1)


def test_shares_are_of_nearly_equal_size_and_make_the_whole(monkeypatch):
    monkeypatch.setattr(Ranks, "_give_signs", lambda ranks: None)
    sizes = [9, 1, 1, 1, 8, 1, 1, 7]
    shares = [Ranks(rank=rank, size=3).share(sizes) for rank in range(3)]
    assert sorted(place for share in shares for place in share) == list(range(8))
    assert sorted(sum(sizes[place] for place in share) for share in shares) == [9, 10, 10]
    assert Ranks().share(sizes) == list(range(8))


def test_a_signal_is_passed_on_while_steps_come_faster_than_anybody_waits_for_them(tmp_path):
    group, told = object.__new__(Group), threading.Event()
    group.hears, tells = multiprocessing.Pipe(duplex=False)
    group.children = [
        SimpleNamespace(poll=lambda: 0 if told.is_set() else None, terminate=told.set),
    ]

    def train():
        steps = itertools.takewhile(lambda _: not told.wait(0.01), range(500))
        for step in steps:
            tells.send(("step", "sft", step, 500, {}))
        tells.send(("end", {"steps": step}))
        told.set()
        tells.close()

    threading.Thread(target=train).start()
    assert (
        group.watch(Bars(None, tmp_path / "log"), SimpleNamespace(asked=signal.SIGINT))["steps"]
        < 50
    )


def test_a_hangup_is_no_lost_machine():
    group = object.__new__(Group)
    placed = object.__new__(PlacedRank)
    ends = {}
    for child in (SimpleNamespace(), placed):
        group.children, group.words, group.end = [SimpleNamespace(), child], ["", ""], None
        group._verdict([0, -signal.SIGHUP], SimpleNamespace(asked=None))
        ends[type(child)] = group.why
    assert ends[SimpleNamespace] == "rank 1 of 2 has ended: SIGHUP"
    assert ends[PlacedRank] == "rank 1 of 2 has ended: its machine is gone"


class OddlyMadeError(Exception):
    """An error that pickle cannot make again: its words are not its arguments."""

    def __init__(self, one, other):
        super().__init__(f"{one} and {other}")


def test_an_error_that_cannot_cross_to_the_process_that_watches_goes_as_its_words():
    hears, tells = multiprocessing.Pipe(duplex=False)
    teller, held = Teller(os.dup(tells.fileno())), KeyError("held")
    held.work = lambda: None
    for error in (OddlyMadeError("this", "that"), held, ConfigError("wrong")):
        teller.tell_end(error)
    ends = [hears.recv()[1] for _ in range(3)]
    assert [type(end) for end in ends] == [RunError, RunError, ConfigError]
    assert [str(end) for end in ends] == [
        "OddlyMadeError: this and that",
        "KeyError: 'held'",
        "wrong",
    ]
