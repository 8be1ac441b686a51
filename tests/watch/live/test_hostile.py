"""Run folders that somebody else wrote: each is shown or named, and hides no other run."""

import io
import json
import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest
from pydantic_core import to_json

from tether.cli.terminal.console import Terminal
from tether.cli.watch import _line, _screen
from tether.core.amounts import sparkline
from tether.core.lines import CHUNK, FAR, Lines
from tether.watch.live.board import Board
from tether.watch.live.followed import FollowedRun, cell_text

CHARTS = Path(__file__).parents[3] / "src" / "tether" / "watch" / "live" / "pages" / "charts.js"


def rows(path, values):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{json.dumps(value)}\n" for value in values))


def begun(folder, stages=("grpo",)):
    """A run with three steps, a second apart."""
    now = time.time()
    own = [{"step": s, "time": now - 3 + s, "reward/proxy": 0.5} for s in (1, 2, 3)]
    rows(folder / "grpo" / "metrics.jsonl", own)
    (folder / "command.json").write_text(json.dumps({"stages": stages, "config": {}}))


def lock_of_no_number(folder):
    (folder / ".lock").write_text("²")


def stages_without_end(folder):
    begun(folder, ["x" * 5000])


def sweep_without_end(folder):
    table = {"combinations": [{"stages": {"grpo": "x" * 5000}}]}
    (folder / "sweep.json").write_text(json.dumps(table))


def as_many_steps_as_a_float_has(folder):
    (folder / ".lock").write_text(str(os.getpid()))
    (folder / "grpo" / "manifest.json").write_text('{"steps": 1.7e308}')


def more_steps_than_a_float_has(folder):
    as_many_steps_as_a_float_has(folder)
    now = time.time()
    own = [{"step": -1.7e308, "time": now - 9 + 3 * s} for s in (1, 2, 3)]
    rows(folder / "grpo" / "metrics.jsonl", own)


def values_that_overflow(folder):
    own = [{"step": s, "reward/proxy": 1.7e308 * (-1) ** (s // 2)} for s in range(100)]
    rows(folder / "grpo" / "metrics.jsonl", own)


def a_hole_of_a_terabyte(folder):
    with (folder / "grpo" / "samples.jsonl").open("ab") as file:
        file.truncate(1 << 40)


def a_stage_whose_name_is_no_text(folder):
    stage = os.fsdecode(os.fsencode(folder) + b"/\xff\x1b[2J")
    rows(Path(stage) / "metrics.jsonl", [{"step": 1, "time": 2.0, "reward/proxy": 1.0}])


MADE = (
    a_stage_whose_name_is_no_text,
    lock_of_no_number,
    stages_without_end,
    sweep_without_end,
    as_many_steps_as_a_float_has,
    more_steps_than_a_float_has,
    values_that_overflow,
    a_hole_of_a_terabyte,
)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("make", MADE, ids=lambda make: make.__name__)
def test_a_folder_with_anything_in_it_is_shown_beside_the_others(tmp_path, make):
    for name in ("good", "odd"):
        begun(tmp_path / name)
    make(tmp_path / "odd")
    board = Board(tmp_path)
    for _ in range(2):
        board.look()
    _, shown = board.overview("reward/proxy", 0)
    assert (
        shown is not None
        and to_json(shown)
        and {run["name"] for run in shown["runs"].values()} == {"good", "odd"}
    )
    assert [run.fault for run in board.runs.values()] == ["", ""]
    assert all(to_json(board.run(key, 0)[1]) for key in board.runs)
    followed = FollowedRun(tmp_path / "odd", "odd")
    followed.look(1)
    text = io.StringIO()
    Terminal(file=text, width=100).print(_screen(followed, 40))
    assert "step" in text.getvalue()
    assert all(_line(followed, stage, row) for stage, row in followed.fresh)


def test_a_run_that_cannot_be_read_is_named_and_the_others_go_on(tmp_path, monkeypatch):
    for name in ("good", "odd"):
        begun(tmp_path / name)
    looks = FollowedRun.look

    def look(run, tick):
        if run.folder.name == "odd":
            raise ZeroDivisionError("\x1b[2Jno")
        return looks(run, tick)

    monkeypatch.setattr(FollowedRun, "look", look)
    board = Board(tmp_path)
    board.look()
    keys = {run.name: key for key, run in board.runs.items()}
    rows(tmp_path / "good" / "grpo" / "metrics.jsonl", [{"step": s} for s in range(1, 9)])
    board.look()
    good, odd = (board.run(keys[name], 0)[1] or {} for name in ("good", "odd"))
    assert good["step"] == 8 and good["notes"] == []
    assert odd["notes"] == ["This run cannot be read: ZeroDivisionError: ␛[2Jno"]
    monkeypatch.setattr(FollowedRun, "look", looks)
    board.look()
    assert (board.run(keys["odd"], 0)[1] or {})["notes"] == []


def test_a_line_that_is_too_long_is_one_line_however_it_is_written(tmp_path):
    path = tmp_path / "samples.jsonl"
    lines = Lines(path)
    part = b"x" * (CHUNK + 5)
    with path.open("ab", buffering=0) as file:
        for text in (part, part, b'\n{"step": 1}\n', part * (FAR + 2)):
            file.write(text)
            if text != b'\n{"step": 1}\n':
                assert lines.read() == []
            else:
                assert lines.read() == [{"step": 1}]
        file.write(b'\n{"step": 2}\n')
    read = [row for _ in range(4) for row in lines.read()]
    assert read == [{"step": 2}] and lines.left_out == 2


def test_turns_that_are_none_are_shown_as_far_as_they_go():
    turn = {"role": "\x1b]0;o", "content": 3, "tool_calls": [3, {}, {"function": 1}], "reward": "x"}
    shown = cell_text({"turns": [turn, None, "text", {"role": "tool", "tool_calls": 1}]})["turns"]
    assert [one["role"] for one in shown] == ["␛]0;o", "", "", "tool"]
    assert shown[0]["texts"] == ["", "3"] and len(shown[0]["calls"]) == 3
    assert {one["reward"] for one in shown} == {None}
    assert cell_text({"turns": {"role": "user"}}) == {"turns": []}


def test_a_small_curve_of_values_at_the_end_of_float64_is_drawn():
    assert sparkline([-1.7e308, 1.7e308]) == "▁█"
    assert sparkline([1.7e308] * 100) == "▁" * 40


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_marks_of_an_axis_end_where_numbers_have_no_successor():
    text = CHARTS.read_text(encoding="utf-8")
    source = text[text.index("const ticks =") : text.index("const bounds =")]
    asked = "[ticks(1e17, 1e17 + 16, 8).length, ticks(0, 10, 5), ticks(-1e308, 1e308, 5).length]"
    words = ["node", "-e", f"{source} console.log(JSON.stringify({asked}))"]
    done = subprocess.run(words, capture_output=True, text=True, check=True, timeout=20)
    few, marks, _ = json.loads(done.stdout)
    assert few <= 20 and marks == [0, 2, 4, 6, 8, 10]
