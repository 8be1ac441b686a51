"""`kill -9` at random moments of every stage, the moments of writing included; each run must end as one that nobody killed.

    python -m benchmarks.kills [--kills 60] [--seed 0] [--folder FOLDER] [--smoke]

`tether run` is killed with a recipe of all stages and with one that repeats, in turns; every second kill waits for a
checkpoint in the making. Weights, metrics, samples, measurements and summaries are compared to the bit.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.every_stage import differences, loop_recipe, recipe, results

from tether.learner.checkpoint import complete_checkpoints, load_checkpoint


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="where the runs go; default: a temporary folder")
    parser.add_argument("--smoke", action="store_true", help="one kill of one stage: does it run?")
    asked = parser.parse_args()
    if asked.smoke:
        asked.kills = 1
    folder = asked.folder or Path(tempfile.mkdtemp(prefix="kills-"))
    folder.mkdir(parents=True, exist_ok=True)
    chance, kills, wrong, runs = random.Random(asked.seed), [], [], 0
    names = ("run", "run") if asked.smoke else ("run", "loop")
    references = {name: Reference(name, folder, ("sft",) if asked.smoke else None) for name in dict.fromkeys(names)}
    while len(kills) < asked.kills:
        name = names[runs % 3 == 2]
        killed, differing = references[name].killed(f"{name}-{runs}", chance, asked.kills - len(kills))
        kills, runs = kills + killed, runs + 1
        wrong += [(f"{name}-{runs - 1}", file) for file in differing]
        print(f"{len(kills)} kills, {runs} runs ended, {len(wrong)} files differ", flush=True)
    print(f"killed {dict(Counter(when for when, _ in kills))}, in {dict(Counter(stage for _, stage in kills))}")
    print(
        f"{len(kills)} kills, {runs} runs that went on to their end; files that differ from an unkilled run's: {wrong or 'none'}"
    )
    if asked.folder is None and not wrong:
        shutil.rmtree(folder)
    raise SystemExit(bool(wrong))


class Reference:
    """A command, and what it leaves when nobody kills it; of a recipe with these `stages` alone, if they are named."""

    def __init__(self, name: str, folder: Path, stages: tuple[str, ...] | None = None) -> None:
        self.folder, self.run = folder, folder / name / "run"
        self.run.parent.mkdir(parents=True, exist_ok=True)
        values = recipe(self.run.parent, self.run) if name == "run" else loop_recipe(self.run)
        values = {key: values[key] for key in ("run", "model", *stages)} if stages else values
        self.path = self.run.parent / "recipe.toml"
        self.path.write_text("".join(f"{key} = {toml(value)}\n" for key, value in values.items()), encoding="utf-8")
        began = time.monotonic()
        process = self.start()
        self._wait_for_work(process)
        self.first = time.monotonic() - began
        if process.wait():
            raise SystemExit(f"{self.path} does not run: see {self.log}")
        self.seconds = time.monotonic() - began
        self.left = results(self.run)
        print(f"{name}: {self.seconds:.0f} s undisturbed, the first file after {self.first:.1f} s", flush=True)

    @property
    def log(self) -> Path:
        return self.run.parent / "log.txt"

    def start(self) -> subprocess.Popen[bytes]:
        with self.log.open("ab") as log:
            return subprocess.Popen([sys.executable, "-m", "tether", "run", str(self.path)], stdout=log, stderr=log)

    def killed(self, name: str, chance: random.Random, most: int) -> tuple[list[tuple[str, str]], list[str]]:
        """One run with up to `most` kills: (when, in which stage) of each, and the files in which it differs at its end."""
        shutil.rmtree(self.run)
        kills: list[tuple[str, str]] = []
        while True:
            process, writing = self.start(), len(kills) % 2 == 1 and len(kills) < most
            self._wait_for_work(process)
            moment = time.monotonic() + chance.random() * (self.seconds - self.first) / 2
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
                kills.append(("while writing a checkpoint" if seen else "at any moment", self._stage()))
                self._check_checkpoints()
            elif process.returncode:
                raise SystemExit(f"{name} does not go on after {len(kills)} kills: see {self.log}")
            else:
                return kills, differences(self.left, results(self.run))

    def _wait_for_work(self, process: subprocess.Popen[bytes]) -> None:
        """Until the command has read its recipe, which takes as long as the machine is busy."""
        note, before = self.run / "command.json", time.time()
        while process.poll() is None and not (note.is_file() and note.stat().st_mtime >= before):
            time.sleep(0.005)

    def _being_written(self) -> str:
        """The checkpoint in the making, if there is one: looked for where stages keep theirs, to be quick."""
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


def toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)} = {toml(item)}" for key, item in value.items()) + "}"
    return json.dumps(value)


if __name__ == "__main__":
    main()
