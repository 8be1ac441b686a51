"""`kill -9` at random moments of every stage, start and writing included; each run must end as one
that nobody killed.

    python -m benchmarks.kills [--kills 60] [--seed 0] [--folder FOLDER] [--smoke]

`tether run` is killed with a recipe of all stages, with one that repeats, and with one of several
reward models, in turns. Of three kills one waits for a checkpoint in the making, and of six one
comes while the program loads. All files are compared to the bit but for times; no file may be there
that an unkilled run does not leave, in the run and among temporary files.

A program is a copy of this process, which has its modules, so that a start takes no time; those
that are killed while they load start anew.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import peft  # noqa: F401  (every copy of this process has it then)
import transformers  # noqa: F401
from benchmarks.every_stage import differences, everything, loop_recipe, members_recipe, recipe

from tether.cli import main as command
from tether.core.types import Json
from tether.learner.checkpoint import complete_checkpoints, load_checkpoint

LOADING = 4.0
"""Seconds within which a program that starts anew is killed."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--folder",
        type=Path,
        help=("where the runs go; default: a temporary folder"),
    )
    parser.add_argument("--smoke", action="store_true", help="one kill of one stage: does it run?")
    asked = parser.parse_args()
    if asked.smoke:
        asked.kills = 1
    folder = asked.folder or Path(tempfile.mkdtemp(prefix="kills-"))
    folder.mkdir(parents=True, exist_ok=True)
    chance, kills, wrong, runs = random.Random(asked.seed), [], [], 0
    os.environ["TMPDIR"] = tempfile.tempdir = str(folder / "temporary")
    (folder / "temporary").mkdir(exist_ok=True)
    names = ("run",) if asked.smoke else ("run", "loop", "members")
    references = {
        name: Reference(name, folder, ("sft",) if asked.smoke else None)
        for name in dict.fromkeys(names)
    }
    while len(kills) < asked.kills:
        name = names[runs % len(names)]
        killed, differing = references[name].killed(
            f"{name}-{runs}",
            chance,
            asked.kills - len(kills),
        )
        kills, runs = kills + killed, runs + 1
        wrong += [(f"{name}-{runs - 1}", file) for file in differing]
        print(f"{len(kills)} kills, {runs} runs ended, {len(wrong)} files differ", flush=True)
    for place in (0, 1):
        print(
            "".join(
                f"{count:6} {what}\n"
                for what, count in Counter(kill[place] for kill in kills).most_common()
            ),
        )
    print(
        f"{len(kills)} kills, {runs} runs that went on to their end; files that differ from an "
        f"unkilled run's: {wrong or 'none'}",
    )
    if asked.folder is None and not wrong:
        shutil.rmtree(folder)
    raise SystemExit(bool(wrong))


class Reference:
    """A command, and what it leaves when nobody kills it; of a recipe with these `stages` alone, if
    they are named.
    """

    def __init__(self, name: str, folder: Path, stages: tuple[str, ...] | None = None) -> None:
        self.folder, self.run = folder, folder / name / "run"
        self.run.parent.mkdir(parents=True, exist_ok=True)
        make: dict[str, Callable[[], Json]] = {
            "run": lambda: recipe(self.run.parent, self.run),
            "loop": lambda: loop_recipe(self.run),
            "members": lambda: members_recipe(self.run.parent, self.run),
        }
        values = make[name]()
        values = {key: values[key] for key in ("run", "model", *stages)} if stages else values
        self.path = self.run.parent / "recipe.toml"
        self.path.write_text(
            "".join(f"{key} = {toml(value)}\n" for key, value in values.items()),
            encoding="utf-8",
        )
        began = time.monotonic()
        process = self.start()
        self._wait_for_work(process)
        self.first = time.monotonic() - began
        if process.wait():
            raise SystemExit(f"{self.path} does not run: see {self.log}")
        self.seconds = time.monotonic() - began
        self.left = self.remains()
        print(
            f"{name}: {self.seconds:.0f} s undisturbed, the first file after {self.first:.1f} s",
            flush=True,
        )

    @property
    def log(self) -> Path:
        return self.run.parent / "log.txt"

    def remains(self) -> Json:
        """All files of the run, and temporary ones."""
        return {**everything(self.run), **everything(self.folder / "temporary")}

    def start(self, *, anew: bool = False) -> Program:
        words = ["tether", "run", str(self.path)]
        with self.log.open("ab") as log:
            if anew:
                return subprocess.Popen([sys.executable, "-m", *words], stdout=log, stderr=log)
            return Copy(words, log)

    def killed(
        self,
        name: str,
        chance: random.Random,
        most: int,
    ) -> tuple[list[tuple[str, str]], list[str]]:
        """One run with up to `most` kills: (when, in which stage) of each, and the files in which
        it differs at its end.
        """
        shutil.rmtree(self.run)
        kills: list[tuple[str, str]] = []
        while True:
            loading = len(kills) % 6 == 4
            process, writing = self.start(anew=loading), len(kills) % 3 == 1 and len(kills) < most
            if not loading:
                self._wait_for_work(process)
            moment = time.monotonic() + chance.random() * (
                LOADING if loading else (self.seconds - self.first) / 2
            )
            if len(kills) == most:
                moment = float("inf")
            seen = ""
            while process.poll() is None and time.monotonic() < moment + 60 * writing and not seen:
                # After the moment, the next checkpoint in the making.
                seen = self._being_written() if writing and time.monotonic() > moment else ""
                time.sleep(0.0002 if writing else 0.002)
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
                process.wait()
                when = (
                    "while writing a checkpoint"
                    if seen
                    else "while the program loads"
                    if loading
                    else "at any moment"
                )
                kills.append((when, f"{self.run.parent.name}: {self._stage()}"))
                self._check_checkpoints()
            elif process.returncode:
                raise SystemExit(f"{name} does not go on after {len(kills)} kills: see {self.log}")
            else:
                return kills, differences(self.left, self.remains())

    def _wait_for_work(self, process: Program) -> None:
        """Until the command has read its recipe, which takes as long as the machine is busy."""
        note, before = self.run / "command.json", time.time()
        while process.poll() is None and not (note.is_file() and note.stat().st_mtime >= before):
            time.sleep(0.005)

    def _being_written(self) -> str:
        """The checkpoint in the making, if there is one: looked for where stages keep theirs, to be
        quick.
        """
        for pattern in ("*/checkpoints/.step-*.partial/*", "*/*/checkpoints/.step-*.partial/*"):
            if found := next(self.run.glob(pattern), None):
                return found.name
        return ""

    def _stage(self) -> str:
        """The stage whose folder was written to last."""
        inside = [p for p in self.run.glob("*/**/*") if p.is_file()]
        if not inside:
            return "before the first"
        folder, *rest = max(inside, key=lambda p: p.stat().st_mtime).relative_to(self.run).parts
        return rest[0] if folder.startswith("round-") and len(rest) > 1 else folder

    def _check_checkpoints(self) -> None:
        """What counts as a checkpoint is whole."""
        for folder in self.run.glob("**/checkpoints"):
            for path in complete_checkpoints(folder):
                load_checkpoint(path)


class Copy:
    """`tether` in a copy of this process, with the part of Popen's interface that is used here."""

    def __init__(self, words: list[str], log: IO[bytes]) -> None:
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
            sys.argv = words
            code = 1
            try:
                command()
            except SystemExit as end:
                code = int(end.code or 0)
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self) -> int:
        if self.returncode is None:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)


Program = subprocess.Popen[bytes] | Copy


def toml(value: Any) -> str:
    if isinstance(value, dict):
        return (
            "{"
            + ", ".join(f"{json.dumps(key)} = {toml(item)}" for key, item in value.items())
            + "}"
        )
    return json.dumps(value)


if __name__ == "__main__":
    main()
