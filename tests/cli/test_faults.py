"""What befalls a command from outside: signals, files in the way, memory that is not there."""

import json
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tests.every_stage import differences, recipe, results

from tether.cli import main
from tether.core import stopping
from tether.core.errors import memory_error
from tether.runner.run import run_recipe
from tether.settings.reading import build
from tether.settings.recipe import Recipe
from tether.settings.stages import STAGES
from tether.stages.sft import SFT

COMMAND = [sys.executable, "-m", "tether"]


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A recipe of SFT and a policy, and the run that nobody disturbed."""
    folder = tmp_path_factory.mktemp("faults")
    values = {
        k: v
        for k, v in recipe(folder, folder / "whole").items()
        if k in ("model", "sft", "best_of_n")
    }
    values["best_of_n"]["checkpoint_every"] = 100
    run_recipe(build(Recipe, {**values, "run": str(folder / "whole")}), ["sft", "best_of_n"])
    path = folder / "recipe.toml"
    path.write_text("".join(f"{key} = {toml(value)}\n" for key, value in values.items()))
    return path


def toml(value):
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {toml(item)}" for key, item in value.items()) + "}"
    return json.dumps(value)


@pytest.fixture
def tether(monkeypatch, capsys):
    """The command line, in this process: (exit code, what went to standard error)."""
    before = signal.getsignal(signal.SIGTERM)

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["tether", *map(str, arguments)])
        try:
            main()
            code = 0
        except SystemExit as stop:
            code = stop.code
        return code, capsys.readouterr().err

    yield call
    signal.signal(signal.SIGTERM, before)


def test_a_command_leaves_the_process_of_its_caller_alone(tether, monkeypatch):
    """Threads of a user's function that do not end are the program's to leave behind."""
    end = threading.Event()
    thread = threading.Thread(target=end.wait)
    thread.start()
    stopping.LEFT_BEHIND.add(thread)
    monkeypatch.setattr(stopping, "PATIENCE", 3600.0)
    timers = threading.active_count()
    assert tether("nonsense")[0] == 2
    assert threading.active_count() == timers
    end.set()
    thread.join()


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGTERM, 143), pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow)],
)
def test_a_signal_lets_the_step_end_and_resume_goes_on(written, tmp_path, tether, number, code):
    run = tmp_path / "run"
    process = subprocess.Popen(
        [*COMMAND, "run", written, f"run={run}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    metrics = run / "best_of_n" / "metrics.jsonl"
    while not (metrics.is_file() and metrics.read_text().count("\n")) and process.poll() is None:
        time.sleep(0.005)
    process.send_signal(number)
    told, _ = process.communicate()
    assert process.returncode == code, told
    assert "finishes this step" in told and "Traceback" not in told
    _, last = " ".join(told.split()).split("tether: ")  # once
    assert re.fullmatch(
        r"stopped after step \d+ of \d+ of best_of_n, which is saved. To "
        rf"continue: tether resume {run}",
        last,
    )
    assert tether("resume", run / "best_of_n") == (0, "")
    assert differences(results(written.parent / "whole"), results(run)) == []


@pytest.mark.slow
def test_a_run_that_was_moved_goes_on_where_it_lies_now(written, tmp_path, tether):
    """With the model that was fine-tuned at the old place, which is at the new one now."""
    assert tether("run", written, f"run={tmp_path}/a") == (0, "")
    (tmp_path / "a").rename(tmp_path / "b")
    (tmp_path / "b" / "best_of_n" / "summary.json").unlink()
    assert tether("resume", tmp_path / "b") == (0, "")
    assert (
        not (tmp_path / "a").exists() and (tmp_path / "b" / "best_of_n" / "summary.json").is_file()
    )
    for command in (("run", written, f"run={tmp_path}/b"), ("resume", tmp_path / "b")):
        code, told = tether(*command, "best_of_n.seed=9")
        assert code == 2 and re.search(
            r"^tether: .*best_of_n\.seed was 0 and is now 9.*Choose "
            r"another run",
            told,
        )
        assert tether("resume", tmp_path / "b") == (0, "")  # the mistake has left no trace


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["resume", "nowhere"], r"run directory not found: nowhere"),
        (["resume", "/proc"], r"/proc is not in a run directory that a command of tether made"),
        (
            ["run", "{recipe}", "run={file}"],
            r"{file} cannot be a run directory: .* is no folder. Choose",
        ),
        (["run", "{recipe}", "run=/proc/none"], r"/proc/none"),
    ],
)
def test_an_obstacle_on_the_disk_is_one_message(written, tmp_path, tether, arguments, message):
    (tmp_path / "file").write_text("x")
    names = {"recipe": written, "file": tmp_path / "file"}
    code, told = tether(*(a.format(**names) for a in arguments))
    assert code == 2 and told.startswith("tether: ") and re.search(message.format(**names), told)


def test_an_allocator_that_says_no_is_recognised():
    for ask in (lambda: torch.empty(10**17), lambda: np.empty(10**17), lambda: bytearray(10**17)):
        with pytest.raises((RuntimeError, MemoryError)) as failed:
            ask()
        assert memory_error(failed.value)
    assert (
        memory_error(RuntimeError("shapes do not fit")) is None
        and memory_error(KeyError("out of memory")) is None
    )


@pytest.mark.slow
def test_every_stage_is_told_of(tmp_path, tether):
    """Whatever its summary holds, each stage ends with a table, and the run with one page that has
    them all.
    """
    values = recipe(tmp_path, tmp_path / "run")
    path = tmp_path / "recipe.toml"
    path.write_text("".join(f"{key} = {toml(value)}\n" for key, value in values.items()))
    assert tether("run", path) == (0, "")
    page = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    trained = [
        name
        for name, kind in STAGES.items()
        if name in values and kind.makes not in ("rounds", "verdict")
    ]
    assert trained and all(f'id="stage-{name}"' in page for name in trained)
    assert not list((tmp_path / "run").glob("*/report.html"))


def test_out_of_memory_says_what_to_lower(written, tmp_path, tether, monkeypatch):
    """The allocator's own error, from the middle of a stage; the planner's advice is of the stage
    that was asked for.
    """
    monkeypatch.setattr(SFT, "update", lambda *_: torch.empty(10**17))
    code, told = tether("sft", written, f"run={tmp_path}/run")
    assert code == 2 and re.search(
        r"out of memory: .*can't allocate memory.*a peak of .* GB\. "
        r"Changes that lower the peak: ",
        told,
    )
    assert "model.recompute=true" in told and "best_of_n" not in told


def test_two_processes_do_not_train_in_one_folder(written, tmp_path, tether):
    """The one that has it goes on; when it is gone, killed even, the folder is free."""
    holder = (
        "import sys, pathlib; from tether.core.locks import hold; "
        "hold(pathlib.Path(sys.argv[1])); print(flush=True); input()"
    )
    (tmp_path / "run").mkdir()
    other = subprocess.Popen(
        [sys.executable, "-c", holder, tmp_path / "run"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    other.stdout.readline()
    code, told = tether("sft", written, f"run={tmp_path}/run")
    assert code == 2 and f"process {other.pid} is at work in {tmp_path}/run" in told
    other.kill()
    other.communicate()
    assert tether("sft", written, f"run={tmp_path}/run") == (0, "")


def test_a_mistake_leaves_the_note_of_what_was_started_alone(written, tmp_path, tether):
    assert tether("sft", written, f"run={tmp_path}/run") == (0, "")
    note = (tmp_path / "run" / "command.json").read_text()
    for mistake in ("seed=9", "sft.epochs=7", 'model.source="elsewhere"'):
        assert tether("run", written, f"run={tmp_path}/run", mistake)[0] == 2
        assert (tmp_path / "run" / "command.json").read_text() == note
    (tmp_path / "run" / "sft" / "summary.json").unlink()
    assert tether("best-of-n", written, f"run={tmp_path}/run")[0] == 2  # SFT is not finished
    code, told = tether("resume", tmp_path / "run")
    assert code == 0 and "holds 6 steps" in told and "begins anew" in told
    assert (tmp_path / "run" / "best_of_n" / "summary.json").is_file()


def test_another_sft_model_beneath_a_finished_stage_is_noticed(written, tmp_path, tether):
    assert tether("run", written, f"run={tmp_path}/run") == (0, "")
    shutil.rmtree(tmp_path / "run" / "sft")
    code, told = tether("run", written, f"run={tmp_path}/run", "sft.optimizer.learning_rate=2e-2")
    assert code == 2 and "trained on another SFT" in told
    # the same while it is half done
    (tmp_path / "run" / "best_of_n" / "summary.json").unlink()
    code, told = tether("run", written, f"run={tmp_path}/run", "sft.optimizer.learning_rate=2e-2")
    assert code == 2 and "trained on another SFT" in told
    shutil.rmtree(tmp_path / "run" / "best_of_n")
    assert tether("run", written, f"run={tmp_path}/run", "sft.optimizer.learning_rate=2e-2") == (
        0,
        "",
    )


def test_a_recipe_of_nothing_has_nothing_to_do(tmp_path, tether):
    (tmp_path / "empty.toml").write_text('run = "x"\nmodel = {source = "tiny"}\n')
    code, message = tether("run", tmp_path / "empty.toml")
    assert code == 2 and "nothing to do" in message


def test_a_command_that_finds_a_difference_says_so_by_its_exit_code(tether, monkeypatch):
    from tether.cli.tools import prove

    found = SimpleNamespace(stage="ppo", what="weights", count=3, difference="step 2: 0.5 and 0.25")
    monkeypatch.setattr(prove, "prove", lambda *_: [found])
    assert tether("prove", "smoke")[0] == 1
    found.difference = ""
    assert tether("prove", "smoke")[0] == 0
