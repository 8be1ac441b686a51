"""A program whose runs die, as `kill -9` would end them, right before they change a file or folder:
`python -m tests.runner.killed RECIPE FOLDER [KILLS]`.

A run of the same place that dies nowhere comes first: FOLDER/changes.txt has its kinds of changes
in their order, and FOLDER/whole.json the digests of its files. KILLS of the kinds, in equal
distances, are then chosen (0: all). Every start dies at the first change of a chosen kind that no
earlier start died at, and at changes that only a start after a death makes, as many again at most.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from tests.every_stage import (
    SENT,
    arms_recipe,
    everything,
    loop_recipe,
    measured_recipe,
    members_recipe,
    recipe,
    served_recipe,
    sweep_recipe,
)
from tests.rewards import published

from tether.cli.tools.export import export_model
from tether.core.keeping import MARK
from tether.core.locks import hold, release
from tether.runner.run import run_recipe
from tether.scale.servers.http import TOKEN, new_token
from tether.scale.servers.launch import free_port, start_bound
from tether.settings.reading import build
from tether.settings.recipe import Recipe


def shortened(*names: str) -> Callable[[Path, Path], dict[str, Any]]:
    """The recipe with these of its stages alone, two steps or one epoch each."""

    def make(folder: Path, run: Path) -> dict[str, Any]:
        values = recipe(folder, run)
        short = {"steps": 2, "epochs": 1}
        stages = {
            name: {**values[name], **{key: short[key] for key in short if key in values[name]}}
            for name in names
        }
        return {"run": values["run"], "model": values["model"], **stages}

    return make


def episodes_recipe(folder: Path, run: Path) -> dict[str, Any]:
    """Episodes of several turns, whose environments have processes of their own."""
    values = shortened("ppo", "grpo")(folder, run)
    del values["grpo"]["verifiable"]
    played = {
        "reward_source": "environment",
        "environment": {"call": f"{published.__file__}:Letters", "turns": 3, "processes": True},
    }
    for name in ("ppo", "grpo"):
        values[name] |= played
    return values


RECIPES: Mapping[str, Callable[[Path, Path], dict[str, Any]]] = {
    "rows": shortened("sft", "reward", "process", "direct", "kto"),
    "samples": shortened("sft", "reward", "ppo", "grpo", "reinforce"),
    "pairs": shortened("sft", "reward", "best_of_n", "online_direct", "rounds"),
    "loop": lambda folder, run: loop_recipe(run),
    "members": members_recipe,
    "sweep": sweep_recipe,
    "arms": arms_recipe,
    "exported": measured_recipe,
    "taught": shortened("distill"),
    "episodes": episodes_recipe,
    "served": lambda folder, run: served_recipe(folder, run, engine_server(folder)),
}
DEAD, KILLS = 9, 16
CHANGES = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "shutil.rmtree")
DRAWN = re.compile(rf"[0-9]{{6}}|(?<=\.)[a-z0-9_]{{8}}(?={MARK})|{SENT.pattern}")
"""Parts of names that differ from start to start: numbers of steps, names of unfinished folders and
of weights for servers.
"""


def change(event: str, arguments: tuple[Any, ...], root: str) -> str | None:
    """The kind of change below `root` that an audit event of Python announces; None: no change."""
    if event not in CHANGES or isinstance(arguments[0], int):
        return None
    place = os.fspath(arguments[event == "os.rename"])
    if event == "open" and not arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
        return None
    # a tree is removed entry by entry, each by its name alone
    if not place.startswith(root) and (os.sep in place or event in ("open", "os.rename")):
        return None
    return f"{event} {DRAWN.sub('N', place.removeprefix(root))}"


def note_changes(root: Path, changes: Path) -> None:
    """From now on each kind of change is added to the file `changes` when it comes first."""
    seen: set[str] = set()

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        now = change(event, arguments, str(root))
        if now is not None and now not in seen:
            seen.add(now)
            with changes.open("a", encoding="utf-8") as file:
                file.write(f"{now}\n")

    sys.addaudithook(hook)


def chosen_of(changes: list[str], kills: int) -> list[str]:
    """As many of the changes, in equal distances; all where there are fewer, or `kills` is 0."""
    count = min(kills, len(changes)) or len(changes)
    return [changes[place * len(changes) // count] for place in range(count)]


def die_at_changes(root: Path, folder: Path, kills: int) -> None:
    """From now on this process ends at the first change that is chosen, or new after a death, and
    not yet in the file `deaths.txt`, and adds it there.
    """
    deaths = folder / "deaths.txt"
    changes, before = (
        (folder / name).read_text(encoding="utf-8").splitlines()
        for name in ("changes.txt", "deaths.txt")
    )
    chosen = {*chosen_of(changes, kills)} - {*before}
    usual = {*changes, *before}
    more = kills == 0 or len({*before} - {*changes}) < kills

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        now = change(event, arguments, str(root))
        if now is not None and (now in chosen or (more and now not in usual)):
            with deaths.open("a", encoding="utf-8") as file:
                file.write(f"{now}\n")
            os._exit(DEAD)

    sys.addaudithook(hook)


def in_a_copy(work: Callable[[], object]) -> int:
    """The exit code of a copy of this process that does the work."""
    if child := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    code = 1
    try:
        work()
        code = 0
    except BaseException:  # noqa: BLE001 - the copy ends here, whatever it raised
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def engine_server(folder: Path) -> str:
    """The address of `tether engine`, which decodes each prompt alone and ends with this process;
    every start of the run finds the same one, which asks for the token of the environment.
    """
    port = free_port("127.0.0.1")
    what = ["--model", "tiny", "--dtype", "float32", "--alone", "--port", str(port)]
    start_bound([sys.executable, "-m", "tether", "engine", *what], {}, folder / "engine_server.txt")
    return f"http://127.0.0.1:{port}"


def export(root: Path) -> None:
    """Export the policy, its adapter and the reward model of a run, each unless it is there."""
    for source, name in (("ppo", "policy"), ("ppo", "adapter"), ("reward", "reward")):
        if not (root / "exported" / name).exists():
            where = root / "exported" / name
            export_model(str(root / source), where, adapter=name == "adapter")


def main(name: str, folder: Path, kills: int) -> None:
    torch.set_num_threads(1)
    os.environ[TOKEN] = new_token()
    tempfile.tempdir = str(folder / "temporary")
    (folder / "temporary").mkdir(exist_ok=True)
    deaths, modules = folder / "deaths.txt", folder / "modules.txt"
    deaths.touch()
    root = folder / "run"
    values = RECIPES[name](folder, root)

    def work() -> None:
        run_recipe(build(Recipe, values))
        if name == "exported":
            export(root)

    def once() -> None:
        note_changes(root, folder / "changes.txt")
        work()
        changes = (folder / "changes.txt").read_text(encoding="utf-8")
        (folder / "whole.json").write_text(json.dumps(everything(root)), encoding="utf-8")
        shutil.rmtree(root)
        (folder / "changes.txt").write_text(changes, encoding="utf-8")
        modules.write_text("\n".join(sys.modules), encoding="utf-8")

    def again() -> None:
        die_at_changes(root, folder, kills)
        root.mkdir(exist_ok=True)
        # as a command does
        hold(root)
        work()
        release(root)

    if in_a_copy(once):
        raise SystemExit("the run that is not killed fails")
    for module in modules.read_text(encoding="utf-8").splitlines():
        # every copy has them then, so that a start takes no time
        if module.startswith(("tether.", "torch.", "transformers.", "peft.")):
            importlib.import_module(module)
    while code := in_a_copy(again):
        if code != DEAD:
            last = deaths.read_text(encoding="utf-8").splitlines()[-1:]
            raise SystemExit(f"the run does not go on after it died before {last}")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else KILLS)
