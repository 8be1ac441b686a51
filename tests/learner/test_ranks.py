"""Two processes train what one would have trained; where one dies or hangs, both begin again, or the other says so and ends."""

import json
import signal
import subprocess
import sys
import time

import psutil
import pytest
import torch
from benchmarks.every_stage import recipe
from safetensors.torch import load_file

from tether.core.config import build
from tether.core.errors import ConfigError, DataError
from tether.core.stopping import Interrupted
from tether.learner.ranks import LostRankError, Ranks
from tether.run.recipe import Recipe, run_recipe

STAGES = ["sft", "reward", "process", "direct", "kto", "ppo", "grpo"]


@pytest.fixture(scope="module")
def values(tmp_path_factory):
    """A recipe of all these stages, without dropout and with several micro-batches in every update."""
    values = recipe(tmp_path_factory.mktemp("rows"), "")
    values = {name: values[name] for name in ("model", *STAGES)}
    for name in STAGES:
        # A large epsilon: without it AdamW makes whole steps of the rounding of gradients that are nearly 0.
        optimizer = {"learning_rate": 5e-3, "epsilon": 1e-3}
        values[name] |= {"checkpoint_every": 1, "micro_batch_tokens": 48, "optimizer": optimizer}
        for key in ("lora", "head_dropout", "ema_decay"):  # the last leaves factors that are the same but for rotations
            values[name].pop(key, None)
    del values["sft"]["micro_batch_tokens"]
    values["sft"] |= {"batch_size": 6, "epochs": 3, "rows_per_micro_batch": 1, "row_tokens": 24}
    for name, prompts in (("reward", 3), ("direct", 6), ("kto", 6)):
        values[name] |= {"prompts_per_update": prompts, "epochs": 3}
    values["process"] |= {"solutions_per_update": 4, "epochs": 2}
    values["ppo"] |= {"evaluate": {"every": 2, "prompts": 4, "keep": "best", "best_of": [2], "temperatures": [0.0]}}
    values["grpo"] |= {"verifiable": {"kind": "exact", "format_pattern": "^[^a-m]*$"}, "samples_per_prompt": 4}
    return values


def trained(values, root, stages, ranks=1, progress=None, **learner):
    """Run these stages in `root`."""
    settings = {"learner": {"ranks": ranks, "restarts": 0, **learner}} if ranks > 1 else {}
    run_recipe(build(Recipe, {**values, **settings, "run": str(root)}), stages, progress)


@pytest.fixture(scope="module")
def ready(values, tmp_path_factory):
    """What one process makes of the stages on which those that sample stand."""
    root = tmp_path_factory.mktemp("ready")
    trained(values, root, ["sft", "reward"])
    return root


def standing_on(ready, root):
    """The folder of a run that has these stages behind it."""
    root.mkdir(exist_ok=True)
    for stage in ("sft", "reward"):
        (root / stage).symlink_to(ready / stage)
    return root


@pytest.fixture(scope="module")
def alone(values, ready, tmp_path_factory):
    """What one process makes of all stages."""
    root = standing_on(ready, tmp_path_factory.mktemp("alone"))
    trained(values, root, [stage for stage in STAGES if stage not in ("sft", "reward")])
    return root


def records(folder):
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    noise = ("time", "memory/", "engine/", "policy/engine_gap", "policy/first_ratio_deviation")
    rows = [{k: v for k, v in row.items() if not k.startswith(noise) and "per_second" not in k} for row in rows]
    rows[0].pop("accuracy", None)  # of a policy that is its own reference: which side rounds higher
    return rows


def assert_same(one, other):
    """The same steps and the same weights, to the rounding of sums in float32."""
    rows = records(one)
    assert len(rows) >= 5
    for row, again in zip(rows, records(other), strict=True):
        assert row == pytest.approx(again, rel=2e-3, abs=2e-4)
    for path in one.rglob("*.safetensors"):
        if not {"checkpoints", "engine"} & {*path.parts}:
            weights, others = load_file(path), load_file(other / path.relative_to(one))
            assert weights.keys() == others.keys()
            for name, tensor in weights.items():
                torch.testing.assert_close(tensor, others[name], rtol=1e-3, atol=2e-4)


def others():
    """The processes of other ranks, or of all where this one only watches, in their order."""
    children = [child for child in psutil.Process().children() if "tether.run.ranks" in " ".join(child.cmdline())]
    return sorted(children, key=lambda child: int(child.environ()["RANK"]))


def at_step(step, act, rank=0):
    """A progress bar that acts on the rank at that place of `others`, after so many steps, once."""
    acted = []

    def bar(done, *_):
        if done == step and others() and not acted:
            acted.append(done)
            act(others()[rank])

    return lambda phase: bar


def test_two_ranks_make_what_one_makes(values, alone, tmp_path):
    trained(values, tmp_path, STAGES, ranks=2)
    for stage in STAGES:
        assert_same(alone / stage, tmp_path / stage)
    assert not others()
    assert {p.name for p in tmp_path.iterdir()} == {*STAGES}


def test_steps_of_two_ranks_and_of_one_make_six(values, alone, tmp_path):
    standing_on(alone, tmp_path)
    with pytest.raises(LostRankError, match=r"rank 1 of 2 has ended: exit code -9"):
        trained(values, tmp_path, ["ppo"], 2, at_step(2, lambda other: other.kill()))
    with pytest.raises(Interrupted, match="stopped after step 4"):  # one alone is told, and both stop
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


@pytest.fixture(scope="module")
def together(values, ready, tmp_path_factory):
    """What two ranks make of PPO, undisturbed."""
    root = standing_on(ready, tmp_path_factory.mktemp("together"))
    trained(values, root, ["ppo"], 2)
    return root


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_come_back_and_end_with_the_same_bits(values, ready, together, tmp_path, rank):
    standing_on(ready, tmp_path)
    trained(values, tmp_path, ["ppo"], 2, at_step(3, lambda other: other.kill(), rank), restarts=1)
    assert as_bits(tmp_path / "ppo") == as_bits(together / "ppo")
    lost, again = log_of(tmp_path)
    assert (lost["kind"], lost["rank"], lost["why"]) == ("killed", rank, f"rank {rank} of 2 has ended: SIGKILL")
    assert again["kind"] == "training" and again["step"] in (3, 4) and not others()


def test_ranks_that_get_no_further_are_given_up(values, tmp_path):
    def bar(title):
        return lambda done, *_: done == 2 and others()[1].kill()  # in every start

    with pytest.raises(LostRankError, match=r"rank 1 of 2 has ended: SIGKILL\. The ranks began again 1 times and got no further"):
        trained({**values, "sft": {**values["sft"], "checkpoint_every": 50}}, tmp_path, ["sft"], 2, bar, restarts=1)
    assert [row["kind"] for row in log_of(tmp_path)] == ["killed", "training", "killed"] and not others()


def test_what_a_rank_ends_with_by_itself_ends_the_run(values, tmp_path):
    values = {**values, "sft": {**values["sft"], "data": {"path": str(tmp_path / "rows.jsonl")}}}
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "a " * 5000, "response": "b"}) + "\n")
    with pytest.raises(DataError):
        trained(values, tmp_path / "run", ["sft"], 2, restarts=3)
    assert not (tmp_path / "run" / "ranks.jsonl").exists() and not others()


def test_whoever_watches_passes_a_signal_on(values, tmp_path):
    with pytest.raises(Interrupted, match=r"stopped after step [2-5] of .*, which is saved") as stop:
        trained(values, tmp_path, ["sft"], 2, at_step(1, lambda _: signal.raise_signal(signal.SIGINT)), restarts=3)
    assert stop.value.exit_code == 130 and not others()


@pytest.mark.parametrize(("stage", "max_staleness"), [("ppo", 0), ("grpo", 0), ("grpo", 1)])
def test_two_ranks_with_a_server_make_what_one_makes(values, ready, tmp_path, stage, max_staleness):
    late = {"max_staleness": 1, "importance": "truncate", "filter_groups": False} if max_staleness else {}
    section = {**values[stage], **late, "engine": {"kind": "served"}, "sample_rows": 1000}
    samples = []
    for ranks in (1, 2):
        root = standing_on(ready, tmp_path / str(ranks))
        trained({**values, stage: section}, root, [stage], ranks)
        samples.append([json.loads(line) for line in (root / stage / "samples.jsonl").read_text().splitlines()])
    one, two = ([(row["step"], row["prompt"], row["response"], row["stop"]) for row in rows] for rows in samples)
    assert one == two and len(one) > 20
    assert_same(tmp_path / "1" / stage, tmp_path / "2" / stage)


def test_a_rank_that_hangs_is_named_within_the_timeout(values, tmp_path):
    started = []

    def stop(other):
        started.append(time.monotonic())
        other.suspend()

    with pytest.raises(LostRankError, match="rank 1 of 2 has given no sign of life for 5 s"):
        trained(values, tmp_path, ["sft"], 2, at_step(2, stop), timeout=5)
    assert time.monotonic() - started[0] < 30 and not others()
    assert not (tmp_path / "sft" / "summary.json").is_file()
    trained(values, tmp_path, ["sft"], 2, at_step(4, stop, 1), timeout=5, restarts=1)
    assert [row["kind"] for row in log_of(tmp_path)] == ["hung", "training"] and not others()


def test_torchrun_starts_the_ranks(values, alone, tmp_path):
    path, run = tmp_path / "recipe.toml", tmp_path / "run"
    tables = {"model": values["model"], "learner": {"ranks": 2}, "sft": values["sft"]}
    for name in ("data", "optimizer"):
        tables[f"sft.{name}"] = values["sft"][name]
    tables["sft"] = {key: value for key, value in values["sft"].items() if f"sft.{key}" not in tables}
    lines = [f"run = '{run}'"]
    for table, keys in tables.items():
        lines += [f"[{table}]", *(f"{key} = {json.dumps(value)}" for key, value in keys.items())]
    path.write_text("\n".join(lines))
    started = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "tether", "run"]
    done = subprocess.run([*started, str(path)], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert_same(alone / "sft", run / "sft")
    assert (run / "report.html").is_file() and done.stdout.count("report.html") == 1  # one of them speaks


def test_numbers_that_cannot_be(values, tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match=r"learner\.ranks"):
        build(Recipe, {**values, "run": str(tmp_path), "learner": {"ranks": 0}})
    for key in ("timeout", "restarts"):
        with pytest.raises(ConfigError, match=f"{key} has no effect on one rank"):
            build(Recipe, {**values, "run": str(tmp_path), "learner": {key: 9}})
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(ConfigError, match=r"torchrun has started 3 processes and learner\.ranks is 2"):
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
