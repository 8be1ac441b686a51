"""Records that are cut between two starts are named when the run goes on; a run that was only
killed says nothing.
"""

import json
import logging

import pytest
from tests.every_stage import recipe
from tests.runner.journeys import Killed, dying_after

from tether.runner.run import run_recipe
from tether.settings.reading import build
from tether.settings.recipe import Recipe


@pytest.fixture
def killed(tmp_path):
    """A run of one stage without the others, killed after four of its steps."""

    def start(stage):
        values = recipe(tmp_path, tmp_path / "run")
        section = values[stage] | ({"reward_source": "random"} if stage == "reinforce" else {})
        built = build(Recipe, {"run": values["run"], "model": values["model"], stage: section})
        with pytest.raises(Killed):
            run_recipe(built, [stage], dying_after(4))
        return built, tmp_path / "run" / stage

    return start


def half(path):
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[: len(lines) // 2]))


def without_the_first(path):
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[1:]))


def in_the_middle_of_a_line(path):
    path.write_bytes(path.read_bytes()[:-40])


def edited(path):
    first, *rest = path.read_text().splitlines(keepends=True)
    path.write_text("".join([json.dumps({**json.loads(first), "loss": 0.5}) + "\n", *rest]))


HURT = [half, without_the_first, in_the_middle_of_a_line, edited, lambda path: path.unlink()]


@pytest.mark.parametrize("hurt", HURT, ids=["half", "a row", "half a row", "a number", "all"])
@pytest.mark.parametrize(
    ("stage", "name"),
    [("sft", "metrics"), ("reinforce", "metrics"), ("reinforce", "samples")],
)
def test_a_cut_record_is_named_with_its_step_and_in_the_summary(killed, caplog, stage, name, hurt):
    built, folder = killed(stage)
    hurt(folder / f"{name}.jsonl")
    summary = run_recipe(built, [stage])[stage]
    (fault,) = summary["records_changed"]
    assert fault in caplog.text and f"{name}.jsonl has " in fault and "step 4 was saved" in fault
    if hurt is half and name == "metrics":
        assert "2 of the 4" in fault


@pytest.mark.parametrize("stage", ["sft", "reinforce"])
def test_a_run_that_was_only_killed_says_nothing(killed, caplog, stage):
    built, _ = killed(stage)
    with pytest.raises(Killed):
        run_recipe(built, [stage], dying_after(1))
    summary = run_recipe(built, [stage])[stage]
    assert "records_changed" not in summary and not [
        r for r in caplog.records if r.levelno >= logging.WARNING
    ]


@pytest.mark.parametrize("stage", ["sft", "reinforce"])
def test_steps_without_a_checkpoint_are_made_again_and_that_is_said(killed, caplog, stage):
    import shutil

    built, folder = killed(stage)
    shutil.rmtree(folder / "checkpoints")
    run_recipe(built, [stage])
    assert f"{folder} holds 4 steps and no checkpoint: the training begins anew" in caplog.text
    assert [
        json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()
    ] == [1, 2, 3, 4, 5, 6]
