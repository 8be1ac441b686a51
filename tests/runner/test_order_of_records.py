"""What a record names is there before it, and goes after the record of what replaces it."""

import random
from types import SimpleNamespace

import pytest
import torch
from tests.disks import Disks, disks

from tether.core.rundir import RunDirectory
from tether.data.sources import Quarantine
from tether.evaluation.held_out import ANSWER_ENTROPY, ANSWER_LENGTH
from tether.evaluation.suite import MeasuredPolicy
from tether.runner.methods.stage import _finished, _opened
from tether.settings.evaluation import EvaluateConfig
from tether.settings.supervised import SFTSection
from tether.stages.heldout import HeldOut
from tether.stages.learner.checkpoint import complete_checkpoints, load_checkpoint, save_checkpoint


def weights(value):
    return {"0": torch.full((2,), value)}


def test_the_checkpoint_of_a_stage_goes_when_its_summary_is_on_the_disk(tmp_path):
    with Disks(tmp_path).noting() as seen:
        run = RunDirectory.open(tmp_path / "sft", {})
        save_checkpoint(run.path / "checkpoints", 1, weights(1.0), {})
        start = len(seen.moments)
        _finished(run, SFTSection(data={"path": "rows.jsonl"}), {}, Quarantine())
    assert not (run.path / "checkpoints").exists()
    for moment in seen.moments[start:]:
        for kind, disk in disks(seen, moment, random.Random(0)):
            saved = "sft/checkpoints/step-000001/COMPLETE"
            done = disk.get("sft/summary.json", b"")[:1] == b"{"
            assert done or disk.get(saved, b"")[:1] == b"{", (moment.change, kind)


@pytest.mark.parametrize(("saved", "left"), [((1,), []), ((1, 2), [1, 2])])
def test_a_finished_stage_loses_the_checkpoint_that_it_did_not_choose_to_keep(
    tmp_path,
    saved,
    left,
):
    """Also when it is opened again, as after a death right behind its summary."""
    section = SFTSection(data={"path": "hub:rows"})
    job = SimpleNamespace(settings=section, folder=tmp_path / "sft", config={"sft": section})
    run = RunDirectory.open(job.folder, job.config)
    run.finish({})
    for step in saved:
        save_checkpoint(run.path / "checkpoints", step, weights(1.0), {}, keep=2)
    _opened(job)
    steps = [int(path.name[5:]) for path in complete_checkpoints(run.path / "checkpoints")]
    assert steps == left


def test_the_best_weights_are_kept_before_the_row_that_calls_them_the_best(tmp_path):
    """Step 2 is the best and 4 is worse. What an interrupted run left at steps 4 and 6 goes."""
    learner = SimpleNamespace(parameters=[torch.zeros(2)])
    scores = iter([0.0, 1.0, 0.5, 2.0])
    run = RunDirectory(tmp_path)
    there = {}

    def one(*_):
        figures = {ANSWER_LENGTH: {"value": 1.0}, ANSWER_ENTROPY: {"value": 1.0}}
        return {"rows": {"score": {"0": next(scores)}}, "figures": figures}

    def hold_out(row):
        there[row["step"]] = [
            int(path.name[5:]) for path in complete_checkpoints(run.path / "best")
        ]
        RunDirectory.hold_out(run, row)

    run.hold_out = hold_out
    held = HeldOut(
        config=EvaluateConfig(keep="best"),
        suite=SimpleNamespace(due=lambda _: ("held_out",), one=one),
        answers=SimpleNamespace(groups=["0"], sampling=SimpleNamespace(temperature=1.0)),
        policy=MeasuredPolicy(None, None, None),
        run=run,
        learner=learner,
    )
    for step in (0, 2, 4):
        learner.parameters[0].fill_(float(step))
        if step == 2:
            for stale in (2, 4, 6):
                save_checkpoint(run.path / "best", stale, weights(9.0), {}, keep=9)
        held.measure(step)
    assert there == {0: [0], 2: [0, 2], 4: [0, 2]}
    tensors, _ = load_checkpoint(run.path / "best" / "step-000002")
    assert tensors["0"].tolist() == [2.0, 2.0]
    learner.put = lambda tensors: learner.parameters[0].copy_(next(iter(tensors)))
    held.restore()
    assert learner.parameters[0].tolist() == [2.0, 2.0]
    assert [path.name for path in complete_checkpoints(run.path / "best")] == ["step-000002"]
