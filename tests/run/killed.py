"""A program whose runs die, as `kill -9` would end them, right before they change a file or folder:
`python -m tests.run.killed RECIPE FOLDER`.

Every start dies at the first change of a kind that no earlier start died at: one start after
another, the run in FOLDER/run is killed at all of them. A run of the same place that dies nowhere
comes first, and FOLDER/whole.json has the digests of its files.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from benchmarks.every_stage import everything, loop_recipe, members_recipe, recipe

from tether.core.locks import hold, release
from tether.runner.run import run_recipe
from tether.settings.reading import build
from tether.settings.recipe import Recipe

RECIPES: Mapping[str, Callable[[Path, Path], dict[str, Any]]] = {
    "stages": recipe,
    "loop": lambda folder, run: loop_recipe(run),
    "members": members_recipe,
}
DEAD = 9
CHANGES = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "shutil.rmtree")
UNFINISHED = re.compile(r"/\.[^/]+\.[a-z0-9_]{8}$")
"""Temporary files: nothing depends on one before it takes its name."""


def change(event: str, arguments: tuple[Any, ...], root: str) -> str | None:
    """The kind of change below `root` that an audit event of Python announces; None: no change."""
    if event not in CHANGES or isinstance(arguments[0], int):
        return None
    place = os.fspath(arguments[event == "os.rename"])
    if event == "open" and not arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
        return None
    if UNFINISHED.search(place):
        return None
    # a tree is removed entry by entry, each by its name alone
    if not place.startswith(root) and (os.sep in place or event in ("open", "os.rename")):
        return None
    return f"{event} {re.sub('[0-9]{6}', 'N', place.removeprefix(root))}"


def die_at_changes(root: Path, deaths: Path) -> None:
    """From now on this process ends at the first change that is not yet in the file `deaths`, and
    adds it there.
    """
    before = set(deaths.read_text(encoding="utf-8").splitlines())

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        now = change(event, arguments, str(root))
        if now is not None and now not in before:
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
    finally:
        sys.stderr.flush()
        os._exit(code)


def main(name: str, folder: Path) -> None:
    torch.set_num_threads(1)
    deaths, modules = folder / "deaths.txt", folder / "modules.txt"
    deaths.touch()
    root = folder / "run"
    values = RECIPES[name](folder, root)

    def once() -> None:
        run_recipe(build(Recipe, values))
        (folder / "whole.json").write_text(json.dumps(everything(root)), encoding="utf-8")
        shutil.rmtree(root)
        modules.write_text("\n".join(sys.modules), encoding="utf-8")

    def again() -> None:
        die_at_changes(root, deaths)
        root.mkdir(exist_ok=True)
        # as a command does, which removes what an earlier one had begun to write
        hold(root)
        run_recipe(build(Recipe, values))
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
    main(sys.argv[1], Path(sys.argv[2]))
