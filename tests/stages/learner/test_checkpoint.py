"""Checkpoints count only when whole, and whatever befalls the newest one leaves the one before."""

import json
import math
import shutil
import subprocess
import sys

import pytest
import torch

from tether.core.errors import RunError, TrainingError
from tether.core.keeping import MARK
from tether.stages.learner import checkpoint
from tether.stages.learner.checkpoint import (
    Checkpoints,
    complete_checkpoints,
    load_checkpoint,
    save_checkpoint,
)

TENSORS = {"master.0": torch.arange(12.0).reshape(3, 4), "step": torch.tensor(3)}


@pytest.fixture
def folder(tmp_path):
    for step in (2, 10, 1_000_000):  # which is not the order of their names
        save_checkpoint(tmp_path / "checkpoints", step, TENSORS, {"updates": step}, keep=3)
    return tmp_path / "checkpoints"


def names(folder):
    return [path.name for path in complete_checkpoints(folder)]


def test_the_newest_are_kept_and_read_back(folder):
    assert names(folder) == ["step-000002", "step-000010", "step-1000000"]
    tensors, values = Checkpoints(folder).latest()
    assert values == {"updates": 1_000_000, "step": 1_000_000} and tensors["master.0"].equal(
        TENSORS["master.0"],
    )
    save_checkpoint(folder, 1_000_001, TENSORS, {}, keep=2)
    assert names(folder) == ["step-1000000", "step-1000001"]


@pytest.mark.parametrize("background", [True, False])
def test_a_checkpoint_holds_the_values_at_the_call(tmp_path, monkeypatch, background):
    monkeypatch.setattr(checkpoint, "ROOM", 0.0 if background else math.inf)
    moving = torch.zeros(1000)
    with Checkpoints(tmp_path, keep=5) as saved:
        for step in range(5):
            saved.save(step, {"weights": moving}, {})
            moving += 1
    assert [
        float(load_checkpoint(path)[0]["weights"].mean()) for path in complete_checkpoints(tmp_path)
    ] == [0, 1, 2, 3, 4]


def test_a_save_that_fails_in_the_background_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "ROOM", 0.0)
    with (
        pytest.raises(
            TrainingError,
            match=r"step 7 .*not finite \(weights\)",
        ),
        Checkpoints(tmp_path) as saved,
    ):
        saved.save(7, {"weights": torch.tensor([1.0, float("nan")])}, {})

    def fails():
        with Checkpoints(tmp_path) as saved:
            saved.save(7, {"weights": torch.tensor([float("inf")])}, {})
            raise KeyError("own")

    with pytest.raises(KeyError, match="own"):  # which the save's failure does not hide
        fails()
    assert names(tmp_path) == [] and list(tmp_path.iterdir()) == []


STRAYS = {
    "a temporary folder": lambda f: shutil.copytree(
        f / "step-000010",
        f / f".step-2000000.abcd_123{MARK}" / "new" / "step-2000000",
    ),
    "a folder without COMPLETE": lambda f: (
        shutil.copytree(f / "step-000010", f / "step-2000000") / "COMPLETE"
    ).unlink(),
    "a name that is not a step's": lambda f: shutil.copytree(f / "step-000010", f / "step-two"),
    "a copy": lambda f: shutil.copytree(f / "step-000010", f / "step-2000000 (copy)"),
    "a file": lambda f: (f / "step-2000000").write_text("x"),
    "an empty folder": lambda f: (f / "step-2000000").mkdir(),
}


@pytest.mark.parametrize("stray", STRAYS)
def test_no_stray_is_taken_for_a_checkpoint(folder, stray):
    STRAYS[stray](folder)
    assert Checkpoints(folder).latest()[1]["updates"] == 1_000_000
    if stray == "a temporary folder":
        save_checkpoint(folder, 1_000_001, TENSORS, {})
        assert [p.name for p in folder.iterdir()] == ["step-1000001"]


def flipped(path, place):
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def complete(values):
    return lambda p: (p / "COMPLETE").write_text(
        values if isinstance(values, str) else json.dumps(values),
    )


DAMAGE = {
    "a tensor's bit": (
        lambda p: flipped(p / "state.safetensors", -1),
        "state.safetensors is not what was written",
    ),
    "a header's bit": (
        lambda p: flipped(p / "state.safetensors", 20),
        "state.safetensors is not what was written",
    ),
    "truncated": (
        lambda p: (p / "state.safetensors").write_bytes(b"\x08" + bytes(9)),
        "is not what was written",
    ),
    "no tensors": (lambda p: (p / "state.safetensors").unlink(), "No such file.*state.safetensors"),
    "no values": (lambda p: (p / "state.json").unlink(), "No such file.*state.json"),
    "other values": (
        lambda p: (p / "state.json").write_text('{"updates": 3}'),
        "state.json is not what was written",
    ),
    "empty COMPLETE": (complete(""), "COMPLETE is damaged"),
    "not JSON": (complete("yes"), "COMPLETE is damaged"),
    "no format": (complete({"files": {}}), "'format'"),
    "no files": (complete({"format": 1}), "'files'"),
    "a file unlisted": (complete({"format": 1, "files": {}}), "'state.safetensors'"),
    "a list": (complete([]), "list indices"),
    "format of another kind": (complete({"format": "one", "files": {}}), "not supported"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_named_with_what_to_do(folder, damage):
    spoil, message = DAMAGE[damage]
    spoil(folder / "step-1000000")
    with pytest.raises(
        RunError,
        match=(
            rf"(?s)step-1000000 is damaged \(.*{message}.*delete that folder to go on "
            r"from step-000010"
        ),
    ):
        Checkpoints(folder).latest()
    shutil.rmtree(folder / "step-1000000")
    assert Checkpoints(folder).latest()[1]["updates"] == 10


def test_a_newer_format_is_not_damage(folder):
    complete({"format": 3, "shards": []})(folder / "step-1000000")
    with pytest.raises(RunError, match=r"format 3.* up to 2"):
        Checkpoints(folder).latest()


def test_the_only_one_damaged(tmp_path):
    (save_checkpoint(tmp_path, 4, TENSORS, {}) / "state.json").write_text("{")
    with pytest.raises(RunError, match="delete that folder"):
        Checkpoints(tmp_path).latest()


@pytest.fixture
def small_disk(tmp_path):
    """A file system of two megabytes."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "none", disk]
    if (
        not sys.platform.startswith("linux")
        or subprocess.run(mount, check=False, capture_output=True).returncode
    ):
        pytest.skip("a file system of its own needs Linux and the right to mount one")
    yield disk
    subprocess.run(["umount", "--lazy", disk], check=True)


def test_a_disk_that_fills_up_while_saving(small_disk):
    """What was saved stays, nothing half-written does, the message says what is needed, and with
    space it goes on.
    """
    fits = {"weights": torch.ones(100_000)}  # 0.4 MB
    save_checkpoint(small_disk / "checkpoints", 1, fits, {"updates": 1})
    (small_disk / "other").write_bytes(bytes(1_400_000))
    with pytest.raises(
        RunError,
        match=r"step 2 .*0\.4 MB.*step-000001 is whole",
    ):
        save_checkpoint(small_disk / "checkpoints", 2, fits, {"updates": 2})
    assert [p.name for p in (small_disk / "checkpoints").iterdir()] == ["step-000001"]
    assert Checkpoints(small_disk / "checkpoints").latest()[0]["weights"].sum() == 100_000
    (small_disk / "other").unlink()
    save_checkpoint(small_disk / "checkpoints", 2, fits, {"updates": 2})
    assert names(small_disk / "checkpoints") == ["step-000002"]


def test_a_folder_without_its_record_gives_way_to_the_checkpoint_of_its_name(tmp_path):
    (tmp_path / "step-000001").mkdir()
    (tmp_path / "step-000001" / "state.json").write_text("{")
    checkpoint = save_checkpoint(tmp_path, 1, {"w": torch.ones(2)}, {"seed": 3})
    assert load_checkpoint(checkpoint)[1] == {"seed": 3, "step": 1}
