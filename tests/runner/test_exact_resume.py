"""A run that is killed anywhere and started again ends as if nothing had happened: to the bit,
weights and records alike.
"""

import itertools
import shutil

import pytest
import torch
from tests.every_stage import differences, loop_recipe, recipe, results
from tests.runner.journeys import Killed, dying_after

from tether.core.rundir import read_json
from tether.runner.run import run_recipe
from tether.settings.reading import build
from tether.settings.recipe import Recipe
from tether.settings.stages import STAGES


@pytest.fixture(scope="module")
def ground(tmp_path_factory):
    """The rows, and a run with the stages on which others stand, each in one go."""
    folder = tmp_path_factory.mktemp("ground")
    values = recipe(folder, folder / "run")
    run_recipe(build(Recipe, values), ["sft", "reward", "process"])
    return folder, values


def stood_on(ground, root, stage):
    """A recipe of the same stages in another run directory, which has those that come before."""
    folder, values, *overrides = ground
    for name in {"sft", "reward", "process"} - {stage}:
        shutil.copytree(folder / "run" / name, root / name)
    return build(Recipe, {**values, "run": str(root)}, overrides)


STEPPING = [name for name, kind in STAGES.items() if kind.makes not in ("pairs", "verdict")]


@pytest.mark.parametrize(
    ("stage", "every"),
    [
        *((stage, 1) for stage in STEPPING),
        ("ppo", 2),
        *(pytest.param(s, 2, marks=pytest.mark.slow) for s in ("reward", "rounds")),
    ],
)
def test_two_steps_one_and_three_are_six(ground, tmp_path, stage, every):
    """With a checkpoint every second step the third is made twice, and is there once."""
    key = "rounds.direct" if stage == "rounds" else stage
    given = (*ground, f"{key}.checkpoint_every={every}")
    run_recipe(stood_on(given, tmp_path / "whole", stage), [stage])
    cut, calls = stood_on(given, tmp_path / "cut", stage), 0
    for lives in (2, 1):
        with pytest.raises(Killed):
            run_recipe(cut, [stage], dying_after(lives))
        calls += lives
    run_recipe(cut, [stage])
    whole, again = (results(tmp_path / name / stage) for name in ("whole", "cut"))
    assert differences(whole, again) == []
    steps = [
        row["step"]
        for name, rows in again.items()
        if name.endswith("metrics.jsonl")
        for row in rows
    ]
    assert calls == 3 and len(steps) >= 6 and any(name.endswith(".safetensors") for name in again)


@pytest.mark.parametrize("stage", ["sft", "rounds", "ppo"])
def test_a_stage_that_goes_on_with_another_number_of_threads_notes_so(ground, tmp_path, stage):
    """In its summary, with both numbers; one that goes on with the same number notes nothing."""
    for threads in (2, 1):
        torch.set_num_threads(2)
        run = stood_on(ground, tmp_path / str(threads), stage)
        with pytest.raises(Killed):
            run_recipe(run, [stage], dying_after(2))
        torch.set_num_threads(threads)
        run_recipe(run, [stage])
        files = sorted((tmp_path / str(threads) / stage).rglob("summary.json"))
        notes = [note for file in files for note in read_json(file).get("notes", ())]
        assert len(notes) == (threads == 1)
        assert all(
            ("goes on with 1 thread after 2 threads: numbers are rounded otherwise") in note
            for note in notes
        )


@pytest.mark.slow
def test_rounds_that_are_killed_in_every_phase(tmp_path):
    run_recipe(build(Recipe, loop_recipe(tmp_path / "whole")))
    for deaths in itertools.count():
        try:
            run_recipe(
                build(Recipe, loop_recipe(tmp_path / "cut")),
                progress=dying_after(2 + deaths),
            )
            break
        except Killed:  # later each time: answers are given again from the first on
            continue
    assert deaths > 5
    assert differences(results(tmp_path / "whole"), results(tmp_path / "cut")) == []
