"""A run of which every flush, rename and removal is noted, and the disks that a loss of power after
any of them may leave: `python -m tests.runner.power FOLDER [ext4]`.

With `ext4`, the run writes to a file system of its own, whose image is copied at every eighth change.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from tests.disks import EVERY, Disk, Disks, disks, put
from tests.every_stage import differences, everything, recipe
from tests.runner.killed import in_a_copy

from tether.cli.tools.export import export_model
from tether.runner.run import run_recipe
from tether.settings.reading import build
from tether.settings.recipe import Recipe

RESUMED, STEPS = 8, 20


def values_of(folder: Path) -> dict[str, Any]:
    """[sft] and [grpo] in a few steps, each with a checkpoint."""
    values = recipe(folder, folder / "disk" / "run")
    values["sft"] |= {"data": values["sft"]["data"] | {"limit": 6}}
    values["grpo"] |= {"steps": 4, "keep_checkpoints": 1}
    return {key: values[key] for key in ("run", "model", "sft", "grpo")}


def stop_at(
    step: int,
    stage: str,
) -> Callable[[str], Callable[[int, int, Mapping[str, Any]], None]]:
    """The progress of a run that somebody interrupts."""

    def progress(title: str) -> Callable[[int, int, Mapping[str, Any]], None]:
        def show(done: int, total: int, metrics: Mapping[str, Any]) -> None:
            if title == stage and done == step and metrics:
                raise KeyboardInterrupt

        return show

    return progress


def work(values: Mapping[str, Any]) -> None:
    """The rest of the run, and its exports."""
    run_recipe(build(Recipe, values))
    for stage, adapter in (("sft", False), ("grpo", True)):
        place = Path(values["run"]) / "exported" / stage
        if not place.exists():
            export_model(str(Path(values["run"]) / stage), place, adapter=adapter)


def recorded(values: Mapping[str, Any], root: Path, image: Path | None = None) -> Disks:
    """The run, interrupted once."""
    noted = Disks(root, image=image)
    noted.watch()
    try:
        run_recipe(build(Recipe, values), progress=stop_at(2, "grpo"))
    except KeyboardInterrupt:
        noted.note("the interrupt")
    else:
        raise AssertionError("nobody interrupted the run")
    work(values)
    noted.note("the end")
    noted.rest()
    return noted


def faults(noted: Disks, whole: Disk) -> Iterator[str]:
    """What a disk says is finished, or an earlier one did, and lacks."""
    rng = random.Random(0)
    promised: set[str] = set()
    for number, moment in enumerate(noted.moments):
        for kind, disk in disks(noted, moment, rng):
            where = f"{number} {moment.change} ({kind}): "
            yield from (where + fault for fault in lacking(disk, whole))
            said = finished(disk)
            yield from (f"{where}{name} is gone" for name in sorted(promised - said))
            if kind == "flushed":
                now = said
        promised |= now


def finished(disk: Disk) -> set[str]:
    """What a disk says is finished: stages, models, exports, and steps up to that of a checkpoint."""
    said: set[str] = set()
    for name in visible(disk):
        folder, _, record = name.rpartition("/")
        stage, _, step = folder.partition("/checkpoints/step-")
        if record in ("summary.json", "role.json"):
            said.add(name)
        if folder.startswith("run/exported/"):
            said.add("/".join(folder.split("/")[:3]))
        if record in ("summary.json", "COMPLETE"):
            said |= {f"{stage}, step {number}" for number in range(int(step or STEPS) + 1)}
    return said


def visible(disk: Disk) -> list[str]:
    return [name for name in disk if "/." not in name]


def lacking(disk: Disk, whole: Disk) -> Iterator[str]:
    """Files that are missing or other than they should be, beside a record that names them."""
    for name in visible(disk):
        folder, _, record = name.rpartition("/")
        if record in ("summary.json", "role.json") or folder.startswith("run/exported/"):
            for other in whole:
                if other.startswith(f"{folder}/") and disk.get(other) != whole[other]:
                    yield f"{other}, which {name} says is there"
        if record == "COMPLETE":
            if not disk[name].startswith(b"{"):
                yield f"{name}, which is not whole"
                continue
            for file, facts in json.loads(disk[name])["files"].items():
                text = disk.get(f"{folder}/{file}", b"")
                if hashlib.sha256(text).hexdigest() != facts["sha256"]:
                    yield f"{folder}/{file}, which COMPLETE says is there"
            stage, _, step = folder.partition("/checkpoints/step-")
            rows = disk.get(f"{stage}/metrics.jsonl", b"").split(b"\n")[:-1]
            if not {json.loads(row)["step"] for row in rows} >= {*range(1, int(step) + 1)}:
                yield f"{stage}/metrics.jsonl up to the checkpoint of step {step}"


@contextlib.contextmanager
def mounted(image: Path, root: Path) -> Iterator[None]:
    """A file system that writes nothing before it must."""
    lazy = "loop,commit=600,noauto_da_alloc"
    subprocess.run(["mount", "-o", lazy, image, root], check=True, capture_output=True)
    try:
        yield
    finally:
        subprocess.run(["umount", root], check=True)


def content_of(root: Path) -> Disk:
    return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}


def cut_images(folder: Path) -> None:
    """The run on a file system of its own, and what the copies of its image lack."""
    root, image = folder / "disk", folder / "image"
    root.mkdir()
    subprocess.run(["truncate", "-s", "64M", image], check=True)
    subprocess.run(["mkfs.ext4", "-q", image], check=True)
    if subprocess.run(["mount", "-o", "loop", image, root], check=False).returncode:
        raise SystemExit("no image can be mounted here")
    subprocess.run(["umount", root], check=True)
    with mounted(image, root):
        noted = recorded(values_of(folder), root, image)
        whole = content_of(root)
        for handle in noted.held:
            os.close(handle)
    found, promised = [], set[str]()
    for number, moment in enumerate(noted.moments):
        if number % EVERY == 0:
            with mounted(folder / f"{number}.image", root):
                disk = content_of(root)
            lost = [f"{name} is gone" for name in sorted(promised - finished(disk))]
            found += [f"{number} {fault}" for fault in (*lacking(disk, whole), *lost)]
        promised |= finished(next(disks(noted, moment, random.Random(0)))[1])
    facts = {"images": 1 + (len(noted.moments) - 1) // EVERY, "faults": found}
    (folder / "facts.json").write_text(json.dumps(facts, indent=1), encoding="utf-8")


def main(folder: Path) -> None:
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    torch.set_num_threads(1)
    if sys.argv[2:] == ["ext4"]:
        cut_images(folder)
        return
    root = folder / "disk"
    root.mkdir()
    values = values_of(folder)
    noted = recorded(values, root)
    run = Path(values["run"])
    whole = content_of(root)
    found = [*faults(noted, whole)]
    as_it_ended = everything(run)
    resumed = []
    rng = random.Random(1)
    for place in range(RESUMED):
        moment = noted.moments[(place + 1) * len(noted.moments) // (RESUMED + 1)]
        kind, disk = [*disks(noted, moment, rng)][place % 3]
        put(disk, root)
        code = in_a_copy(lambda: work(values))
        other = differences(as_it_ended, everything(run)) if code == 0 else [f"exit {code}"]
        resumed.append([moment.change, kind, other])
    changes = [moment.change for moment in noted.moments]
    facts = {"changes": changes, "faults": found, "resumed": resumed}
    (folder / "facts.json").write_text(json.dumps(facts, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
