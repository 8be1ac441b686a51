"""A run touches no file of the user's, neither beside its own nor behind a link."""

import os
from functools import partial
from types import SimpleNamespace

import pytest
from tests.every_stage import recipe
from tests.runner.power import stop_at

from tether.core.errors import ConfigError, RunError, TetherError
from tether.core.keeping import MARK, own_file
from tether.core.locks import hold, release
from tether.core.requests import Request, leave_request
from tether.core.watchdog import dump_stacks
from tether.runner.ranks.start import PlacedRank
from tether.runner.run import run_recipe
from tether.runner.start import start_run
from tether.scale.clusters.slurm import submit_job
from tether.scale.servers.launch import end_group, start_bound
from tether.settings.reading import build
from tether.settings.recipe import Recipe

USERS = (
    ".env.template",
    ".env.defaults",
    ".env.abcd1234",
    ".gitignore",
    "notes/.plan.md.original",
    ".git/.index.abcd1234",
    ".git/objects/.tmp_obj_abcdefgh",
    ".vscode/.settings.json.backup00",
    "data/.rows.jsonl.12345678",
    ".command.json.k3_x90ab",
    ".report.html.original",
    ".step-000001.partial/state.json",
    "sft/.env.defaults",
    "sft/.summary.json.abcd_123",
    "sft/.adapter.original.partial/weights",
    "checkpoints/.step-000009.partial/notes",
    "policy/adapter/notes.txt",
    f"notes.{MARK.strip('.')}",
)


@pytest.fixture
def stages(tmp_path):
    """A short [sft] whose run folder is the working directory."""
    values = recipe(tmp_path, tmp_path)
    sft = values["sft"] | {"data": values["sft"]["data"] | {"limit": 4}}
    return {"run": ".", "model": values["model"], "sft": sft}


def test_a_run_in_the_users_own_folder_leaves_every_other_file_there(stages, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in USERS:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    with pytest.raises(KeyboardInterrupt):
        start_run(build(Recipe, stages), ["sft"], stop_at(1, "sft"), began=0.0)
    start_run(build(Recipe, stages), ["sft"], lambda title: lambda *_: None, began=0.0)
    assert (tmp_path / "sft" / "summary.json").is_file()
    kept = {name: (tmp_path / name).read_text() for name in USERS if (tmp_path / name).is_file()}
    assert kept == {name: name for name in USERS}


@pytest.mark.parametrize(
    "name",
    ["command.json", "report.html", "trace.json", "summary.json", "sweep.json", ".lock"],
)
def test_a_file_of_the_user_is_not_overwritten_by_one_of_the_run(
    stages,
    tmp_path,
    monkeypatch,
    name,
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).write_text('{"mine": 1}')
    with pytest.raises(RunError, match=name):
        start_run(build(Recipe, stages), ["sft"], lambda title: lambda *_: None, began=0.0)
    assert (tmp_path / name).read_text() == '{"mine": 1}' and not (tmp_path / "sft").exists()


@pytest.mark.parametrize("name", ["config.json", "manifest.json", "summary.json", "notes.txt"])
def test_a_folder_of_the_user_with_the_name_of_a_stage_is_refused(
    stages,
    tmp_path,
    monkeypatch,
    name,
):
    """A model that somebody saved as `sft` has a config.json, too."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sft").mkdir()
    (tmp_path / "sft" / name).write_text('{"model_type": "llama"}')
    with pytest.raises(RunError, match="not a run directory"):
        run_recipe(build(Recipe, stages))
    assert [path.name for path in (tmp_path / "sft").iterdir()] == [name]
    assert (tmp_path / "sft" / name).read_text() == '{"model_type": "llama"}'


LINKS = (
    *("command.json", "report.html", "trace.json", ".lock"),
    *("sft/.lock", "sft/config.json", "sft/manifest.json", "sft/metrics.jsonl"),
    *("sft/summary.json", "sft/alarms.jsonl", "sft/quarantine-sft.jsonl", "sft/model"),
    *("sft/checkpoints/step-000002", "sft/checkpoints/step-000001/COMPLETE"),
)


@pytest.mark.parametrize("name", LINKS)
@pytest.mark.parametrize("folder", [False, True])
def test_no_write_follows_a_link(stages, tmp_path, monkeypatch, name, folder):
    """A begun run in which a link has taken the place of one of its files goes on, or is refused."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        start_run(build(Recipe, stages), ["sft"], stop_at(1, "sft"), began=0.0)
    place, outside = tmp_path / name, tmp_path / "outside"
    before = place.read_bytes() if place.is_file() else b""
    if place.is_file():
        place.unlink()
    (outside / "model").mkdir(parents=True)
    file = outside / "precious"
    for path in (file, outside / "model" / "config.json", outside / "COMPLETE"):
        path.write_bytes(before)
    place.symlink_to(outside if folder else file)
    try:
        start_run(build(Recipe, stages), ["sft"], lambda title: lambda *_: None, began=0.0)
    except (TetherError, IsADirectoryError):
        pass
    finally:
        release(tmp_path)
    for path in (file, outside / "model" / "config.json", outside / "COMPLETE"):
        assert path.read_bytes() == before
    assert len([*outside.rglob("*")]) == 4


def logged(path):
    end_group(start_bound(["true"], {}, path))


@pytest.mark.parametrize(
    "write",
    [
        lambda path: own_file(path).close(),
        lambda path: dump_stacks(path, "late"),
        logged,
        lambda path: hold(path.parent),
    ],
)
@pytest.mark.parametrize("outside", ["a file", "nothing", "a folder"])
def test_a_link_is_refused_where_a_file_is_added_to(tmp_path, write, outside):
    target = tmp_path / "outside"
    {"a file": lambda: target.write_text("precious"), "a folder": target.mkdir, "nothing": list}[
        outside
    ]()
    path = tmp_path / "run" / ".lock"
    path.parent.mkdir()
    path.symlink_to(target)
    with pytest.raises(RunError, match="is a link or a folder"):
        write(path)
    assert path.is_symlink()
    assert not target.is_file() or target.read_text() == "precious"
    assert target.exists() == (outside != "nothing")


def test_a_lock_of_another_program_is_neither_emptied_nor_removed(tmp_path):
    (tmp_path / ".lock").write_text("another program's")
    os.link(tmp_path / ".lock", tmp_path / "the same file")
    with pytest.raises(RunError, match=r"\.lock is no file of tether's"):
        hold(tmp_path)
    release(tmp_path)
    assert (tmp_path / "the same file").read_text() == (tmp_path / ".lock").read_text()
    assert (tmp_path / ".lock").read_text() == "another program's"


def test_a_request_through_a_link_makes_no_file(tmp_path):
    (tmp_path / Request.STOP).symlink_to(tmp_path / "outside")
    leave_request(tmp_path, Request.STOP)
    assert not (tmp_path / "outside").exists()


def test_a_script_and_a_log_of_the_user_are_refused_and_stay(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    script, log = tmp_path / "slurm.sh", tmp_path / "ranks" / "1.log"
    log.parent.mkdir()
    for file in (script, log):
        file.write_text("#!/bin/bash\nsrun mine\n")
    starter = SimpleNamespace(place=lambda _: None, start=lambda *_: None, ended=lambda _: 0)
    start = partial(PlacedRank, starter, "rank-1", [], {}, log)
    with pytest.raises(RunError, match=r"slurm\.sh is no file of tether's"):
        submit_job(tmp_path, ["run"], "", 1)
    with pytest.raises(RunError, match=r"1\.log is no file of tether's"):
        start()
    assert {file.read_text() for file in (script, log)} == {"#!/bin/bash\nsrun mine\n"}
    for file in (script, log):
        file.unlink()
    for _ in range(2):  # its own it writes again
        with pytest.raises(ConfigError, match="sbatch is not on"):
            submit_job(tmp_path, ["run"], "", 1)
        rank = start()
        with log.open("a") as output:
            output.write("the last line\n")
        assert list(rank.stdout) == [b"the last line\n"]
