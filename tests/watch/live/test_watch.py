"""`tether watch` beside a program that writes a run directory, and how a run's end is seen."""

import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tether.cli.terminal.console import Terminal
from tether.cli.watch import _screen
from tether.core.amounts import sparkline
from tether.core.errors import MissingFileError, RunError
from tether.core.requests import Request, leave_request, take_request
from tether.core.rundir import RunDirectory, write_json
from tether.core.stopping import Interrupted, Stopping
from tether.watch.live.condition import Condition, condition
from tether.watch.live.followed import FollowedRun

WRITING = Path(__file__).with_name("writing.py")


def writing(root, steps, pause):
    """The program, once its first step is written."""
    words = [sys.executable, str(WRITING), str(root), str(steps), str(pause)]
    program = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    assert program.stdout is not None and program.stdout.readline() == "1\n"
    return program


def watching(run, **more):
    words = [sys.executable, "-m", "tether", "watch", str(run)]
    return subprocess.run(words, capture_output=True, text=True, timeout=120, check=False, **more)


def test_without_a_terminal_each_new_step_is_a_line_until_the_run_has_ended(tmp_path):
    program = writing(tmp_path / "run", 12, 0.7)
    shown = watching(tmp_path / "run" / "ppo")
    assert program.wait(20) == 0 and shown.returncode == 0
    *lines, last = shown.stdout.splitlines()
    steps = [int(text.split()[1].partition("/")[0]) for text in lines]
    assert steps == list(range(steps[0], 13)) and len(steps) > 3
    assert all(text.split()[1].endswith("/12") for text in lines)
    assert "reward +1.20" in lines[-1] and "left" in shown.stdout
    assert last == f"{tmp_path / 'run'}: ended. All of its stages are finished."


def test_of_an_ended_run_the_stage_that_wrote_last_is_shown(tmp_path):
    """Its folder need not be the last one, and its number of steps is its own."""
    write_json(tmp_path / "command.json", {"command": "run", "stages": ["sft", "ppo"]})
    for name, steps, start in (("sft", 4, 100.0), ("ppo", 8, 200.0)):
        run = RunDirectory.open(tmp_path / name, {name: {"steps": steps}})
        run.finish({"steps": steps})
        rows = [{"step": n + 1, "time": start + n, "loss": 0.5} for n in range(steps)]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / name / "metrics.jsonl").write_text(text)
    (tmp_path / "ppo" / "alarms.jsonl").write_text('{"step": 8, "detector": "kl"}\n')
    first, last = watching(tmp_path).stdout.splitlines()
    assert first.split("  ")[:3] == ["ppo", "8/8", "1 alarm"]
    assert "ended" in last


def test_a_killed_run_is_seen_as_crashed_within_ten_seconds(tmp_path):
    program = writing(tmp_path / "run", 10_000, 0.2)
    followed = FollowedRun(tmp_path / "run", "run")
    followed.look(1)
    assert followed.condition is Condition.RUNNING
    view = subprocess.Popen(
        [sys.executable, "-m", "tether", "watch", str(tmp_path / "run")],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert view.stdout is not None and view.stdout.readline().startswith("ppo  ")
    program.kill()
    began = time.monotonic()
    rest = view.stdout.read()
    # the program is a zombie still: nobody has waited for it
    assert time.monotonic() - began < 10 and ": crashed. " in rest and view.wait(20) == 0
    program.wait()
    followed.look(2)
    assert followed.condition is Condition.CRASHED


def test_a_run_that_ended_itself_early_is_stopped(tmp_path):
    (tmp_path / "command.json").write_text('{"stages": ["ppo"], "config": {}}')
    assert condition(tmp_path, time.time()) is Condition.STOPPED
    (tmp_path / "ppo").mkdir()
    (tmp_path / "ppo" / "summary.json").write_text("{}")
    assert condition(tmp_path, 0.0) is Condition.ENDED


def test_a_process_that_has_the_number_of_a_dead_one_is_not_the_run(tmp_path):
    (tmp_path / "command.json").write_text('{"stages": ["ppo"], "config": {}}')
    lock = tmp_path / ".lock"
    lock.write_text(f"{os.getpid()}\n")
    assert condition(tmp_path, 0.0) is Condition.RUNNING
    os.utime(lock, (1e9, 1e9))
    assert condition(tmp_path, 0.0) is Condition.CRASHED


def test_a_run_of_another_machine_is_judged_by_its_rows(tmp_path):
    (tmp_path / ".lock").write_text("1 another.example\n")
    assert condition(tmp_path, time.time() - 5) is Condition.RUNNING
    assert condition(tmp_path, time.time() - 3600) is Condition.SILENT


@pytest.mark.parametrize(
    ("place", "kind", "words"),
    [("nowhere", MissingFileError, "not found"), ("", RunError, "is not a run directory")],
)
def test_a_folder_without_a_run_is_refused(tmp_path, place, kind, words):
    from tether.cli.watch import watch

    with pytest.raises(kind, match=words):
        watch(tmp_path / place)


def test_a_run_that_is_deleted_meanwhile_ends_the_view_with_a_sentence(tmp_path):
    program = writing(tmp_path / "run", 10_000, 0.2)
    view = subprocess.Popen(
        [sys.executable, "-m", "tether", "watch", str(tmp_path / "run")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert view.stdout is not None and view.stdout.readline()
    program.kill()
    program.wait()
    os.rename(tmp_path / "run", tmp_path / "gone")
    _, problem = view.communicate(timeout=30)
    assert view.returncode in (0, 2)
    assert view.returncode == 0 or problem.endswith("run has been deleted.\n")


def test_the_view_shows_texts_that_cannot_act(tmp_path, monkeypatch):
    program = writing(tmp_path / "run", 3, 0)
    assert program.wait(20) == 0
    with (tmp_path / "run" / "ppo" / "samples.jsonl").open("a") as file:
        file.write(
            '{"step": 3, "prompt": "[bold]p[/]", "response": "\\u001b]0;owned\\u0007", "proxy": 1}\n',
        )
    with (tmp_path / "run" / "ppo" / "alarms.jsonl").open("a") as file:
        file.write('{"step": 2, "detector": "kl", "message": "the KL jumped", "advice": "look"}\n')
    followed = FollowedRun(tmp_path / "run", "run")
    followed.look(1)
    text = io.StringIO()
    Terminal(file=text, width=100).print(_screen(followed, 40))
    shown = text.getvalue()
    assert "ppo   step 3 of 3" in shown and "reward +0.30" in shown and "▁▅█" in shown
    assert "! step 2: the KL jumped" in shown and "[bold]p[/]" in shown
    assert "\x1b" not in shown and "\x07" not in shown


def test_sparkline_by_hand():
    assert sparkline([]) == "" and sparkline([2.0]) == "▁" and sparkline([0, 7, 3.5]) == "▁█▅"
    assert sparkline([0.0, 0.0, 1.0, 1.0], width=2) == "▁█"


def test_a_request_is_taken_once_and_an_old_one_not_at_all(tmp_path):
    leave_request(tmp_path, Request.STOP)
    leave_request(tmp_path, Request.STOP)
    with Stopping(tmp_path) as stopping:
        assert stopping.asked is None and not stopping.to_save
        leave_request(tmp_path, Request.CHECKPOINT)
        assert stopping.to_save and not stopping.to_save and stopping.asked is None
        leave_request(tmp_path, Request.STOP)
        assert stopping.asked is signal.SIGTERM and stopping.asked is signal.SIGTERM
        assert not take_request(tmp_path, Request.STOP)
        with pytest.raises(Interrupted, match="stopped after step 1 of 3") as stopped:
            stopping.leave(1, 3, tmp_path)
    assert stopped.value.exit_code == 143


def test_a_request_does_not_follow_a_link(tmp_path):
    (tmp_path / "stop.request").symlink_to(tmp_path / "elsewhere")
    leave_request(tmp_path, Request.STOP)
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("stage", ["sft", "grpo"])
def test_trainings_take_requests_at_the_end_of_a_step(tmp_path, stage):
    """A checkpoint is saved where none was due, and the run stops after the step in hand."""
    import tether

    run = tmp_path / "run"
    rewarded = {
        "data": {"path": "tether:prompts", "limit": 8},
        "steps": 6,
        "prompts_per_step": 2,
        "samples_per_prompt": 2,
        "max_new_tokens": 4,
        "reward_source": "function",
        "function": {"call": "tether.quickstart.judges:letters"},
    }
    shown = {"data": {"path": "tether:demonstrations", "limit": 16}, "batch_size": 2}
    section = {
        **(shown if stage == "sft" else rewarded),
        "checkpoint_every": 1000,
        "keep_checkpoints": 3,
    }

    def on_step(phase, step, metrics):
        if step in (2, 4):
            leave_request(run / stage, Request.CHECKPOINT if step == 2 else Request.STOP)

    with pytest.raises(SystemExit) as stopped:
        tether.run(
            {"run": str(run), "model": {"source": "tiny", "dtype": "float32"}, stage: section},
            on_step=on_step,
            progress=False,
        )
    assert stopped.value.code == 143
    names = sorted(path.name for path in (run / stage).glob("checkpoints/step-*"))
    assert names == ["step-000003", "step-000004"]
    assert not list((run / stage).glob("*.request"))
    assert tether.load(run / stage).path.is_dir()
