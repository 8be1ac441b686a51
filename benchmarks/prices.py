"""`python -m benchmarks.prices [NAME ...]`: the price of recipes beside the time that they took.

A name is a recipe of `tether new`; each runs in a process of its own, in a folder of its own. Of
each stage are measured the seconds that were expected before the work, those that were expected
after its first step, and those that it took. The whole counts from the end of the first stage's
first step. `--smoke` takes a random model and a few rows. `--processor-time` counts the seconds that
one thread computes in place of those on the wall, the planner's own measurements included: a price
can be checked so beside other programs. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tether.core.pace import Expected, Forecast

RECIPES = (
    "sft",
    "reward",
    "process",
    "direct",
    "kto",
    "pairs",
    "ppo",
    "grpo",
    "reinforce",
    "best_of_n",
    "online_direct",
    "rounds",
)
WITHIN = {"before": 2.0, "after_first_step": 1.3}
"""Factors between a price and the time taken, at most."""


class Stage:
    """The bar of a stage: notes its price, its first step and its end."""

    def __init__(self, watch: Watch, name: str) -> None:
        self.watch, self.name = watch, name
        expected = watch.expected.get(name.partition(" ")[0])
        self.forecast = Forecast(watch.clock(), expected)
        self.begun = time.monotonic()
        self.before = expected.seconds if expected else math.nan
        self.after_first_step: float | None = None
        self.ended = self.forecast.begun

    def doing(self, what: str, done: int = 0, total: int = 0) -> None:
        """See `tether.core.protocols.doing`."""
        self.forecast.part(self.watch.clock(), done, total)

    def __call__(self, done: int, total: int, metrics: Mapping[str, Any]) -> None:
        now, step = self.watch.clock(), metrics.get("time/step")
        if step is not None:  # on the wall
            step *= (now - self.forecast.begun) / (time.monotonic() - self.begun)
        self.forecast.step(now, done, total, step)
        if self.after_first_step is None:
            self.after_first_step = self.forecast.whole(now)
            self.watch.first_step(self)

    def row(self) -> dict[str, Any]:
        """The times of this stage, in seconds."""
        return {
            "before": self.before,
            "after_first_step": self.after_first_step,
            "took": self.ended - self.forecast.begun,
        }


class Watch:
    """Speaks `core.protocols.Announcer`, and keeps what each stage was expected to take."""

    shows = True

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.expected: Mapping[str, Expected] = {}
        self.stages: list[Stage] = []
        self.start = clock()
        self.whole: float | None = None

    def __call__(self, phase: str) -> Stage:
        self.end()
        self.stages.append(Stage(self, phase))
        return self.stages[-1]

    def price(self, lines: Sequence[str], expected: Mapping[str, Expected]) -> None:
        """See Announcer."""
        self.expected, self.start = expected, self.clock()
        self.stages.clear()

    def note(self, line: str) -> None:
        """See Announcer."""

    def first_step(self, stage: Stage) -> None:
        """Note the time of the whole, as it is known after the first step of all."""
        if self.whole is None and stage.after_first_step is not None:
            names = list(self.expected)
            later = names[names.index(stage.name) + 1 :] if stage.name in names else []
            rest = sum(self.expected[name].seconds for name in later)
            self.whole = stage.after_first_step + rest * max(1.0, stage.forecast.slowness)

    def end(self) -> None:
        """The stage in hand has ended."""
        if self.stages:
            self.stages[-1].ended = self.clock()

    def result(self) -> dict[str, Any]:
        """All times, of the whole and of each stage."""
        self.end()
        before = sum(one.seconds for one in self.expected.values())
        took = self.clock() - self.start
        whole = {"before": before, "after_first_step": self.whole, "took": took}
        return {"whole": whole, **{stage.name: stage.row() for stage in self.stages}}


def measure(path: str, overrides: Sequence[str], *, processor: bool) -> dict[str, Any]:
    """Run a recipe in this process."""
    from functools import partial

    from torch.utils.benchmark import Timer

    from tether.planning import devices
    from tether.runner.run import run_recipe
    from tether.settings.recipe import read_recipe

    watch = Watch(time.process_time if processor else time.monotonic)
    if processor:
        devices.Timer = partial(Timer, timer=time.process_time)
    run_recipe(read_recipe(path, overrides), None, watch)
    return watch.result()


def factor(price: float | None, took: float) -> float:
    """The ratio of price and time, whichever is larger on top."""
    if not price or not math.isfinite(price):
        return math.inf
    return max(price / took, took / price)


def run(name: str, *, smoke: bool, processor: bool) -> dict[str, Any]:
    """Run the recipe of this name in a new process and folder."""
    with tempfile.TemporaryDirectory() as folder:
        tether = [sys.executable, "-m", "tether", "new", name, "recipe.toml"]
        subprocess.run(tether, cwd=folder, check=True, capture_output=True)
        overrides = ["model.source=tiny", "model.dtype=float32"] if smoke else []
        me = [sys.executable, "-m", "benchmarks.prices", *["--processor-time"] * processor]
        me += ["--one", "recipe.toml", *overrides]
        more = {"OMP_NUM_THREADS": "1"} if processor else {}
        how = {"cwd": folder, "env": {**os.environ, **more}, "text": True}
        done = subprocess.run(me, capture_output=True, check=False, **how)
        if done.returncode:
            raise SystemExit(f"{name} failed:\n{done.stderr[-3000:]}")
        return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(RECIPES))
    parser.add_argument("--smoke", action="store_true", help="a random model")
    parser.add_argument("--processor-time", action="store_true", help="of one thread")
    parser.add_argument("--one", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        path, *overrides = options.one
        print(json.dumps(measure(path, overrides, processor=options.processor_time)))
        return
    results = {}
    print("| recipe | stage | before, s | after the first step, s | took, s | factors |")
    print("|---|---|---|---|---|---|")
    for name in options.names or (RECIPES[:1] if options.smoke else RECIPES):
        results[name] = run(name, smoke=options.smoke, processor=options.processor_time)
        for stage, row in results[name].items():
            factors = [factor(row[key], row["took"]) for key in WITHIN]
            after = row["after_first_step"] or math.nan
            print(
                f"| {name} | {stage} | {row['before']:.0f} | {after:.0f} | {row['took']:.0f} | "
                f"{factors[0]:.2f}, {factors[1]:.2f} |",
                flush=True,
            )
    print(json.dumps(results))


if __name__ == "__main__":
    main()
