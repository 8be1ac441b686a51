"""What the writer of files promises holds on every disk that a loss of power may leave."""

import json
import random
import threading
import time

import pytest
import torch
from tests.disks import Disks, disks

from tether.core.keeping import (
    added_to,
    durable,
    entries,
    make_folder,
    own_file,
    remove,
    write_whole,
)
from tether.core.records import note_records
from tether.core.rundir import RunDirectory
from tether.stages.learner.checkpoint import save_checkpoint

CHANCES = 12


def after(seen):
    """Of every moment, the disks that it may leave, without tether's unfinished folders."""
    for moment in seen.moments:
        for seed in range(CHANCES):
            for kind, disk in disks(seen, moment, random.Random(seed)):
                visible = {name: text for name, text in disk.items() if "/." not in f"/{name}"}
                yield moment.change, kind, visible


def last(seen):
    """The disks that the last moment may leave."""
    seen.moments[:-1] = []
    return [disk for _, _, disk in after(seen)]


def test_a_file_is_on_the_disk_whole_or_as_it_was_at_every_moment(tmp_path):
    with Disks(tmp_path).noting() as seen:
        write_whole(tmp_path / "out", b"before")
        start = len(seen.moments)
        write_whole(tmp_path / "out", b"and after")
    seen.moments[:start] = []
    assert {disk["out"] for *_, disk in after(seen)} == {b"before", b"and after"}
    assert {disk["out"] for disk in last(seen)} == {b"and after"}


def test_a_folder_is_on_the_disk_whole_or_as_it_was_or_away_at_every_moment(tmp_path):
    """There is a moment without it, where it takes the place of another of its name."""
    with Disks(tmp_path).noting() as seen:
        for text in (b"before", b"after"):
            with durable(tmp_path / "out", over=True) as folder:
                (folder / "in").mkdir(parents=True)
                (folder / "one").write_bytes(text)
                (folder / "in" / "two").write_bytes(text)
            seen.note(text.decode())
    whole = [
        {"out/": b"", "out/in/": b"", "out/in/two": t, "out/one": t} for t in (b"before", b"after")
    ]
    assert all(disk in ({}, *whole) for *_, disk in after(seen))
    assert all(disk == whole[0] for change, _, disk in after(seen) if change == "before")
    assert all(disk == whole[1] for disk in last(seen))


def test_files_that_join_a_folder_are_whole_or_as_they_were_and_others_stay(tmp_path):
    root = tmp_path / "disk"
    root.mkdir()
    with Disks(root).noting() as seen:
        write_whole(root / "new" / "model" / "mine", b"mine")
        for text in (b"before", b"after"):
            with added_to(root / "new" / "model") as folder:
                (folder / "in").mkdir(parents=True)
                (folder / "in" / "one").write_bytes(text)
                (folder / "two").write_bytes(text)
                assert folder.name == "model"
            seen.note(text.decode())
    names = {"new/", "new/model/", "new/model/in/"}
    for change, _, disk in after(seen):
        content = {name: disk[name] for name in disk.keys() - names}
        assert set(content.values()) <= {b"mine", b"before", b"after"}
        if change in ("before", "after"):
            text = change.encode()
            assert content == {
                "new/model/mine": b"mine",
                "new/model/in/one": text,
                "new/model/two": text,
            }


def test_what_is_removed_is_away_or_whole(tmp_path):
    whole = {"out/": b"", "out/one": b"1", "out/two": b"2"}
    with Disks(tmp_path).noting() as seen:
        with durable(tmp_path / "out") as folder:
            folder.mkdir()
            (folder / "one").write_bytes(b"1")
            (folder / "two").write_bytes(b"2")
        start = len(seen.moments)
        remove(tmp_path / "out")
        seen.note("removed")
    seen.moments[:start] = []
    assert all(disk in ({}, whole) for *_, disk in after(seen))
    assert all(disk == {} for disk in last(seen))


@pytest.mark.parametrize("make", [make_folder, lambda path: own_file(path / "log").close()])
def test_names_of_new_folders_are_on_the_disk(tmp_path, make):
    with Disks(tmp_path).noting() as seen:
        make(tmp_path / "a" / "b" / "c")
        seen.note("made")
    assert all({"a/", "a/b/", "a/b/c/"} <= {*disk} for disk in last(seen))


def test_rows_that_a_checkpoint_notes_are_on_the_disk(tmp_path):
    with Disks(tmp_path).noting() as seen:
        run = RunDirectory(tmp_path / "run")
        run.log({"reward": 1.0}, 1)
        notes = note_records(run)
        seen.note("noted")
    rows = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    assert notes["metrics.jsonl"]["bytes"] == len(rows)
    assert all(disk.get("run/metrics.jsonl") == rows for disk in last(seen))


def test_a_summary_is_on_no_disk_before_the_rows_of_its_run(tmp_path):
    with Disks(tmp_path).noting() as seen:
        run = RunDirectory(tmp_path / "run")
        run.log({"reward": 1.0}, 1)
        run.finish({"steps": 1})
    rows = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    finished = [disk for *_, disk in after(seen) if "run/summary.json" in disk]
    assert all(disk["run/metrics.jsonl"] == rows for disk in finished)
    assert all("run/summary.json" in disk for disk in last(seen))


def test_an_older_checkpoint_goes_when_a_newer_one_is_on_the_disk(tmp_path):
    with Disks(tmp_path).noting() as seen:
        save_checkpoint(tmp_path, 1, {"w": torch.ones(2)}, {})
        start = len(seen.moments)
        save_checkpoint(tmp_path, 2, {"w": torch.ones(2)}, {})
    seen.moments[:start] = []
    files = ("COMPLETE", "state.json", "state.safetensors")
    for *_, disk in after(seen):
        steps = [name for name in disk if name.endswith("COMPLETE")]
        assert steps
        for name in steps:
            folder = name.rpartition("/")[0]
            for file, facts in json.loads(disk[name])["files"].items():
                assert len(disk.get(f"{folder}/{file}", b"")) == facts["bytes"]
    assert all(
        {*disk} == {"step-000002/", *(f"step-000002/{n}" for n in files)} for disk in last(seen)
    )


def test_a_folder_is_read_while_its_files_are_written(tmp_path):
    """Unfinished folders come and go beside what is read."""
    wanted, ended = tmp_path / "sft" / "manifest.json", threading.Event()
    write_whole(wanted, b"{}")

    def write():
        while not ended.is_set():
            write_whole(wanted, b"{}")

    writer = threading.Thread(target=write)
    writer.start()
    try:
        until = time.monotonic() + 2
        while time.monotonic() < until:
            assert entries(tmp_path, "**/manifest.json") == [wanted]
            assert entries(tmp_path, "*/*/*") == []
    finally:
        ended.set()
        writer.join()
