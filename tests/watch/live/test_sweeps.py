"""A sweep on the dashboard: each combination is a run, in the condition that its stages have."""

import os
import socket

from tests.watch.report.synthetic_sweep import KEY, write_sweep

from tether.watch.live.board import Board
from tether.watch.live.condition import Condition, condition


def states(folder):
    board = Board(folder)
    board.look()
    return {run.name: (run.condition, len(run.stages)) for run in board.runs.values()}


def test_combinations_are_followed_and_end_with_their_stages(tmp_path):
    root = write_sweep(tmp_path / "run", {KEY: [0.01, 0.2]})
    names = [f"run/sweep/{KEY}={beta}" for beta in (0.01, 0.2)]
    assert states(tmp_path) == {
        "run": (Condition.ENDED, 1),
        **dict.fromkeys(names, (Condition.ENDED, 1)),
    }
    (root / "sweep" / f"{KEY}=0.2" / "ppo" / "summary.json").unlink()
    assert {name: state for name, (state, _) in states(tmp_path).items()} == {
        "run": Condition.STOPPED,
        names[0]: Condition.ENDED,
        names[1]: Condition.STOPPED,
    }
    (root / ".lock").write_text(f"{os.getpid()} {socket.gethostname()}")
    assert condition(root / "sweep" / f"{KEY}=0.2", 0.0) is Condition.RUNNING
    assert condition(root / "sweep" / f"{KEY}=0.01", 0.0) is Condition.ENDED


def test_a_table_that_is_no_table_is_no_harm(tmp_path):
    root = write_sweep(tmp_path / "run", {KEY: [0.01, 0.2]})
    for text in ("[]", '{"combinations": [3, {"stages": 7}]}', "{"):
        (root / "sweep.json").write_text(text)
        assert states(tmp_path)["run"][0] is Condition.STOPPED
