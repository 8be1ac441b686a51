"""The loop around supervised updates: what it leaves out, what it goes back on, and where it stops
when asked to.
"""

import json
import os
import signal
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tether.core.errors import TrainingError
from tether.core.rundir import RunDirectory
from tether.core.stopping import Interrupted
from tether.data.prepare import Split
from tether.settings.learner import OptimizerConfig, SupervisedConfig
from tether.stages import supervised
from tether.stages.learner.ranks import ALONE
from tether.stages.supervised import SupervisedLoop, Update

TARGETS = [float(n % 5) for n in range(30)]


def trained(
    folder,
    targets=TARGETS,
    progress=None,
    drawn=None,
    optimizer=(),
    plan=None,
    held=(),
    **config,
):
    """A weight that is pulled towards one target an update; the weight, and the run."""
    weight = nn.Parameter(torch.zeros(3))
    plan = [[i] for i in range(len(targets))] if plan is None else plan
    settings = {
        "learning_rate": 0.05,
        "schedule": "constant",
        "warmup_fraction": 0.0,
        **dict(optimizer),
    }

    def loss(target):
        if drawn is not None:
            drawn.append(torch.rand(()).item())
        return ((weight - target) ** 2).mean() + 1.0, torch.zeros(0)

    role = SimpleNamespace(parameters=lambda: [weight], adapter=None, train_mode=lambda on: None)
    objective = SimpleNamespace(
        role=role,
        dropout=False,
        ranks=ALONE,
        update=lambda rows: Update(rows, loss),
    )
    run = RunDirectory.open(folder, {})
    saving = SupervisedConfig(
        **{"checkpoint_every": 4, "optimizer": OptimizerConfig(**settings), **config},
    )
    SupervisedLoop(
        objective=objective,
        split=Split(targets, held, {}),
        plan=plan,
        config=saving,
        run=run,
        progress=progress,
    ).train()
    return weight.detach().clone(), run


def test_rows_whose_loss_is_not_finite_are_left_out_and_kept_for_a_replay(tmp_path):
    targets = [float("nan") if n in (7, 11) else t for n, t in enumerate(TARGETS)]
    weight, run = trained(tmp_path, targets)
    assert torch.isfinite(weight).all()
    assert [row["step"] for row in run.metrics()] == [n for n in range(1, 31) if n not in (8, 12)]
    (first, second) = (
        json.loads(path.read_text()) for path in sorted((tmp_path / "skipped").iterdir())
    )
    assert (first["step"], second["step"]) == (8, 12) and first["reason"] == (
        "the loss of update 7 is nan"
    )
    assert first["rows"] == [None]  # JSON's word for NaN


def test_an_evaluation_at_an_update_that_is_left_out_is_logged(tmp_path, monkeypatch):
    measured = iter(range(100))
    monkeypatch.setattr(supervised, "headline", lambda *_: {"eval_loss": 9.0 - next(measured)})
    targets = [float("nan") if n == 7 else t for n, t in enumerate(TARGETS)]

    def killed(done, *_):
        if done == 10:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        trained(tmp_path, targets, held=(1.0,), evaluate_every=4, progress=killed)
    _, run = trained(tmp_path, targets, held=(1.0,), evaluate_every=4)
    rows = {row["step"]: row for row in run.metrics()}
    assert [step for step, row in rows.items() if "eval_loss" in row] == [*range(4, 29, 4), 30]
    assert "loss" not in rows[8] and rows[8]["eval_loss"] == 8.0
    assert len(rows) == 30


def test_too_many_of_them_end_the_training_with_a_checkpoint_to_go_on_from(tmp_path):
    targets = [float("nan") if n % 2 else t for n, t in enumerate(TARGETS)]
    with pytest.raises(
        TrainingError,
        match="update 7 is nan; 3",
    ):
        trained(tmp_path, targets)
    assert len(list((tmp_path / "skipped").iterdir())) == 4
    with pytest.raises(TrainingError, match=r"no update .*update 1"):
        trained(tmp_path / "all", [float("nan")] * 2)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_after_the_update_in_hand(tmp_path, number):
    whole, _ = trained(tmp_path / "whole")

    def signalled(done, *_):
        if done == 6:
            os.kill(os.getpid(), number)

    with pytest.raises(
        Interrupted,
        match=r"step [67] of 30.*same command",
    ):
        trained(tmp_path / "cut", progress=signalled)
    seen = []
    again, run = trained(tmp_path / "cut", progress=lambda done, *_: seen.append(done))
    assert (
        again.equal(whole)
        and seen[0] in (7, 8)
        and [row["step"] for row in run.metrics()] == list(range(1, 31))
    )


def test_random_numbers_of_an_update_depend_on_its_number_alone(tmp_path):
    whole, cut, other = [], [], []
    torch.manual_seed(5)
    before = torch.get_rng_state()
    trained(tmp_path / "whole", drawn=whole)
    assert torch.get_rng_state().equal(before)  # nobody else's numbers change

    def killed(done, *_):
        if done == 10:
            raise KeyError("killed")

    with pytest.raises(KeyError):
        trained(tmp_path / "cut", progress=killed, drawn=cut)
    torch.manual_seed(17)
    trained(tmp_path / "cut", drawn=cut)
    assert cut == whole[:10] + whole[8:]
    trained(tmp_path / "other", drawn=other, seed=1)
    assert len(set(whole)) == 30 and not set(whole) & set(other)
