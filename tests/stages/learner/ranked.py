"""Runs of several ranks, and what they leave, for the tests of ranks."""

import json

import psutil
import pytest
import torch
from safetensors.torch import load_file

from tether.runner.run import run_recipe
from tether.settings.reading import build
from tether.settings.recipe import Recipe

STAGES = ["sft", "reward", "process", "direct", "kto", "ppo", "grpo"]


def trained(values, root, stages, ranks=1, progress=None, **learner):
    """Run these stages in `root`."""
    settings = {"learner": {"ranks": ranks, "restarts": 0, **learner}} if ranks > 1 else {}
    run_recipe(build(Recipe, {**values, **settings, "run": str(root)}), stages, progress)


def standing_on(ready, root):
    """The folder of a run that has these stages behind it."""
    root.mkdir(exist_ok=True)
    for stage in ("sft", "reward"):
        (root / stage).symlink_to(ready / stage)
    return root


def records(folder):
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    noise = ("time", "memory/", "engine/", "policy/engine_gap", "policy/first_ratio_deviation")
    rows = [
        {k: v for k, v in row.items() if not k.startswith(noise) and "per_second" not in k}
        for row in rows
    ]
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
    alive = [
        child for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE
    ]
    children = [
        child for child in alive if "tether.runner.ranks.worker" in " ".join(child.cmdline())
    ]
    return sorted(children, key=lambda child: int(child.environ()["RANK"]))


def at_step(step, act, rank=0):
    """A progress bar that acts on the rank at that place of `others`, after so many steps, once."""
    acted = []

    def bar(done, *_):
        if done == step and others() and not acted:
            acted.append(done)
            act(others()[rank])

    return lambda phase: bar
