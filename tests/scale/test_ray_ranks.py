"""Ranks that Ray places: the run of ranks on this machine, also when the actor of one is killed."""

import os
import signal

import psutil
import pytest
from tests.stages.learner.ranked import assert_same, trained

from tether.core.rundir import read_jsonl
from tether.runner.run import run_recipe
from tether.settings.reading import build
from tether.settings.recipe import Recipe


@pytest.fixture(scope="module")
def values(tmp_path_factory):
    rows = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    rows.write_text(
        "".join(
            (f'{{"prompt": "question {n}", "response": "answer {n} {n}"}}\n') for n in range(24)
        ),
    )
    section = {
        "data": {"path": str(rows)},
        "batch_size": 4,
        "epochs": 2,
        "rows_per_micro_batch": 1,
        "row_tokens": 32,
    }
    learning = {
        "checkpoint_every": 1,
        "optimizer": {"learning_rate": 5e-3, "epsilon": 1e-3},
        "lora": {"rank": 4},
    }
    return {"model": {"source": "tiny", "dtype": "float32"}, "sft": {**section, **learning}}


def placed():
    """The processes of rank 1, wherever they run on this machine."""
    alive = [
        process for process in psutil.process_iter() if process.status() != psutil.STATUS_ZOMBIE
    ]
    ranks = [
        process for process in alive if "tether.runner.ranks.worker" in " ".join(process.cmdline())
    ]
    return [process for process in ranks if process.environ()["RANK"] == "1"]


@pytest.mark.slow
@pytest.mark.parametrize("restarts", [0, 1])
def test_ranks_that_ray_places_make_what_ranks_here_make(cluster, values, tmp_path, restarts):
    trained(values, tmp_path / "here", ["sft"], 2)
    killed = []

    def bar(done, *_):
        if restarts and done == 3 and not killed:
            killed.append(placed()[0].pid)
            os.kill(killed[0], signal.SIGKILL)

    learner = {"ranks": 2, "restarts": restarts}
    recipe = build(
        Recipe,
        {**values, "learner": learner, "on": "ray", "run": str(tmp_path / "ray")},
    )
    run_recipe(recipe, ["sft"], lambda phase: bar)
    assert_same(tmp_path / "here" / "sft", tmp_path / "ray" / "sft")
    log = [row["kind"] for row in read_jsonl(tmp_path / "ray" / "ranks.jsonl")] if restarts else []
    assert (
        log == ["killed", "training"] * restarts
        and (tmp_path / "ray" / "ranks" / "1.log").is_file()
    )
    assert not placed()
