"""A run directory that can neither be found nor made is refused before any work, with advice, in every
command that trains or examines a recipe; so is a run that is none, in those that read one.
"""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from tether.cli import app
from tether.core.errors import RunError, TetherError
from tether.core.rundir import check_folder, made_folder
from tether.runner.run import run_recipe
from tether.settings.recipe import read_recipe

RECIPE = """
[model]
source = "tiny"
[sft]
data = { path = "rows.jsonl" }
epochs = 1
[grpo]
data = { path = "rows.jsonl" }
steps = 1
prompts_per_step = 2
samples_per_prompt = 2
max_new_tokens = 4
reward_source = "random"
"""
MAKING = [
    *(["run", "r.toml"], ["run", "r.toml", "--dry-run"], ["run", "r.toml", "grpo"]),
    *(["sft", "r.toml"], ["grpo", "r.toml"]),
    *(["sweep", "r.toml", "sft.epochs=1,2"], ["sweep", "r.toml", "sft.epochs=1,2", "--dry-run"]),
    *(["plan", "r.toml"], ["doctor", "r.toml"], ["prove", "r.toml"], ["quickstart"]),
    ["quickstart", "--smoke"],
]
READING = [
    *(["resume", "{}"], ["watch", "{}"], ["report", "{}"], ["report", "{}", "other"]),
    *(["export", "{}", "out"], ["chat", "{}"], ["dashboard", "{}"]),
    ["evaluate", "{}", "--suite", "manner"],
]


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "r.toml").write_text(RECIPE)
    rows = "".join(f'{{"prompt": "p{n}", "completion": "c{n}"}}\n' for n in range(8))
    (tmp_path / "rows.jsonl").write_text(rows)
    (tmp_path / "file").write_text("mine")
    (tmp_path / "empty").mkdir()
    (tmp_path / "dangling").symlink_to("nowhere")
    return tmp_path


def refusal(words):
    """The sentence with which a command ends."""
    with pytest.raises(TetherError) as caught:
        CliRunner().invoke(app, words, catch_exceptions=False, standalone_mode=False)
    return str(caught.value)


@pytest.mark.parametrize("run", ["file", "file/inside", "dangling", "x" * 300])
@pytest.mark.parametrize("words", MAKING, ids=" ".join)
def test_a_run_that_cannot_be_made_is_refused_before_any_work(place, words, run):
    before = {path: path.lstat().st_mtime_ns for path in place.rglob("*")}
    said = refusal([*words, f"run={run}"])
    assert said.startswith(f"{run} cannot be a run directory: ")
    assert said.endswith(". Choose another path with run=PATH.")
    assert {path: path.lstat().st_mtime_ns for path in place.rglob("*")} == before


def test_the_same_from_python(place):
    with pytest.raises(RunError, match=r"file cannot be a run directory: file is no folder\. Choo"):
        run_recipe(read_recipe("r.toml", ["run=file"]))
    assert (place / "file").read_text() == "mine"


@pytest.mark.parametrize("run", ["file", "empty", "missing", "file/inside", "dangling"])
@pytest.mark.parametrize("words", READING, ids=" ".join)
def test_a_folder_without_a_run_is_refused_with_advice(words, run):
    if words[0] == "dashboard" and run == "empty":
        return  # an empty folder may get runs
    said = refusal([word.format(run) for word in words])
    assert run in said and any(
        advice in said for advice in ("Give ", "delete", "hub id", "name each run")
    ), said


def test_a_folder_is_made_with_those_above_it_and_may_be_there(place):
    assert made_folder(place / "a" / "b").is_dir() and made_folder(place / "a" / "b").is_dir()
    check_folder(place / "a" / "b" / "c" / "d")
    assert not (place / "a" / "b" / "c").exists()
