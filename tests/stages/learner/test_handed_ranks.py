"""A run hands its ranks to every stage, and a stage to everything that it builds: nothing that
trains falls back to the ranks of a process alone.
"""

import contextlib

import pytest
import torch
from tests.every_stage import members_recipe, recipe
from tests.stages.learner.ranked import trained
from torch import nn

from tether.runner import launch as runner
from tether.settings.learner import OptimizerConfig
from tether.stages.learner.checkpoint import Checkpoints
from tether.stages.learner.local import LocalLearner
from tether.stages.learner.ranks import ALONE, FirstEngine, Ranks, shared

METHODS = ("once", "agreed", "gather", "map", "measure", "in_step", "spread", "share", "workplace")
"""All that a stage asks of its ranks."""


@pytest.fixture
def handed(monkeypatch):
    """Ranks that a run hands out, while those of a process alone refuse every question."""

    def refuse(*_, **__):
        raise AssertionError("a part of a stage trains alone")

    ranks = Ranks()
    for method in METHODS:
        monkeypatch.setattr(ALONE, method, refuse)
    monkeypatch.setattr(runner, "together", lambda *_: contextlib.nullcontext(ranks))
    return ranks


@pytest.mark.parametrize(
    "stages",
    [
        ["sft"],
        pytest.param(["sft", "process", "direct", "kto"], marks=pytest.mark.slow),
        pytest.param(["sft", "reward", "ppo", "online_direct"], marks=pytest.mark.slow),
        pytest.param(["sft", "grpo", "best_of_n"], marks=pytest.mark.slow),
        pytest.param(["sft", "reward", "rounds"], marks=pytest.mark.slow),
    ],
    ids=" ".join,
)
def test_every_stage_trains_with_the_ranks_of_its_run(tmp_path, handed, stages):
    trained(recipe(tmp_path, tmp_path / "run"), tmp_path / "run", stages)
    assert all((tmp_path / "run" / stage / "summary.json").is_file() for stage in stages)


@pytest.mark.slow
def test_every_member_trains_with_the_ranks_of_its_run(tmp_path, handed):
    values = members_recipe(tmp_path, tmp_path / "run")
    trained(values, tmp_path / "run", [name for name in ("sft", "reward") if name in values])
    assert (tmp_path / "run" / "reward" / "summary.json").is_file()


def test_a_process_without_handed_ranks_trains_alone(tmp_path):
    weight = nn.Parameter(torch.zeros(2))
    assert LocalLearner([weight], OptimizerConfig(learning_rate=0.1), 1).ranks is ALONE
    assert Checkpoints(tmp_path).ranks is ALONE


@pytest.fixture
def two(monkeypatch):
    """The first of two ranks, of which the other is never started."""
    monkeypatch.setattr(Ranks, "_give_signs", lambda ranks: None)
    return Ranks(size=2)


def test_a_collective_within_work_of_the_first_rank_is_refused(two, monkeypatch):
    """The other rank waits for the result: a collective would never end."""
    with pytest.raises(RuntimeError, match="within `once`"):
        two.once(lambda: two.gather(1))
    monkeypatch.setattr(two, "together", lambda collective: None)
    assert two.once(lambda: 7) == 7
    assert len(two.gather(1)) == 2


def test_an_engine_for_several_ranks_has_those_that_it_was_handed(two):
    class Engine:
        policy_version = 3

    engine = Engine()
    assert shared(engine, Ranks()) is engine
    both = shared(engine, two)
    assert (both.engine, both.ranks, both.policy_version) == (engine, two, 3)
    assert FirstEngine(engine, list, two).ranks is two
