"""`python -m benchmarks.chaos [--steps 100] [--every 20]`: the processes of a run are killed while it
trains, and the run goes on.

GRPO on the tiny model with two ranks, two engine servers and two servers of a reward function. Every
so many seconds one of these six processes gets SIGKILL, whatever it does. The run is compared with
one that nobody disturbs: steps and samples that are missing (`lost`) or there twice (`twice`), and
samples, numbers of a step and files of weights that differ (`differs`, times and the rounding of
servers apart). `recovery_s` is the time until that server works again, or the ranks have made a step
again. The last line is JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import statistics
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from tether.core.rundir import read_jsonl
from tether.runner.run import run_recipe
from tether.settings.reading import build
from tether.settings.recipe import BaseRecipe, Recipe

PROMPTS, SAMPLES = 8, 4
WORDS = {
    "rank": "tether.runner.ranks.worker",
    "engine": "tether engine",
    "reward": "tether rewards",
}
"""Words of its command line by the kind of a process."""
REWARD = """
def vowels(prompts, responses):
    return [float(sum(letter in "aeiou" for letter in response)) for response in responses]
"""
NOISE = ("time", "memory/", "engine/", "policy/engine_gap")
"""Numbers of a step that may differ; the last by the requests that a server decodes together."""


class Kill(NamedTuple):
    kind: str
    time: float


def recipe(folder: Path, name: str, steps: int) -> BaseRecipe:
    prompts = folder / "prompts.jsonl"
    rows = ({"prompt": f"What do you think of the number {n}?"} for n in range(64))
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "own.py").write_text(REWARD)
    section = {
        "data": {"path": str(prompts)},
        "steps": steps,
        "prompts_per_step": PROMPTS,
        "samples_per_prompt": SAMPLES,
        "max_new_tokens": 24,
        "sample_rows": PROMPTS * SAMPLES,
        "checkpoint_every": 3,
        "reward_source": "function",
        "function": {"call": f"{folder}/own.py:vowels"},
        "reward_servers": {"servers": 2, "restarts": 1000},
        "engine": {"kind": "served", "servers": 2, "restarts": 1000},
    }
    values = {
        "run": str(folder / name),
        "model": {"source": "tiny", "dtype": "float32"},
        "learner": {"ranks": 2, "restarts": 1000},
        "grpo": section,
    }
    return build(Recipe, values)


def alive(kind: str) -> list[psutil.Process]:
    """The processes of this kind below this one."""
    processes = []
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it is just ending
            processes += [child] * (WORDS[kind] in " ".join(child.cmdline()))
    return sorted(processes, key=lambda process: process.pid)


def kill_some(
    every: float,
    most: int | None,
    steps: list[int],
    ended: threading.Event,
    kills: list[Kill],
) -> None:
    """Every so many seconds from the first step on, kill a process of a kind drawn at random."""
    draw = random.Random(0)
    while len(kills) != most and not ended.wait(every if steps[-1] else 0.5):
        kind = draw.choice([*WORDS])
        if steps[-1] and (processes := alive(kind)):
            with contextlib.suppress(psutil.Error):
                draw.choice(processes).kill()
                kills.append(Kill(kind, time.time()))


def disturbed(wild: BaseRecipe, every: float, most: int | None) -> tuple[list[Kill], int]:
    """The kills during the run, and how many steps were made, repeated ones included."""
    steps, ended, kills = [0], threading.Event(), list[Kill]()
    hand = threading.Thread(target=kill_some, args=(every, most, steps, ended, kills))
    hand.start()
    try:
        run_recipe(wild, progress=lambda _: lambda done, *_: steps.append(done))
    finally:
        ended.set()
        hand.join()
    return kills, len(steps) - 1


class Left(NamedTuple):
    """What a run leaves: its samples, the numbers and the count of each step, and its weights."""

    samples: Counter[tuple[int, str, str]]
    numbers: dict[int, dict[str, Any]]
    rows: Counter[int]
    weights: dict[str, bytes]


def left_by(stage: Path) -> Left:
    rows = [*read_jsonl(stage / "metrics.jsonl")]
    samples = read_jsonl(stage / "samples.jsonl")
    weights = (stage / "policy").rglob("*.safetensors")
    return Left(
        samples=Counter((row["step"], row["prompt"], row["response"]) for row in samples),
        numbers={row["step"]: exact(row) for row in rows},
        rows=Counter(row["step"] for row in rows),
        weights={str(path.relative_to(stage)): path.read_bytes() for path in weights},
    )


def exact(row: dict[str, Any]) -> dict[str, Any]:
    """The numbers of a step that no disturbance may change."""
    return {k: v for k, v in row.items() if not k.startswith(NOISE) and "per_second" not in k}


def compared(calm: Left, wild: Left) -> dict[str, int]:
    sizes = Counter[int]()
    for (step, _, _), count in wild.samples.items():
        sizes[step] += count
    whole = PROMPTS * SAMPLES
    other = [step for step in calm.numbers if calm.numbers[step] != wild.numbers.get(step)]
    return {
        "steps": len(calm.rows),
        "samples": calm.samples.total(),
        "lost": len(calm.rows.keys() - wild.rows.keys())
        + sum(sizes[step] < whole for step in calm.rows),
        "twice": sum(count > 1 for count in wild.rows.values())
        + sum(sizes[step] > whole for step in calm.rows),
        "differs": (calm.samples - wild.samples).total()
        + len(other)
        + sum(weights != wild.weights.get(name) for name, weights in calm.weights.items()),
    }


def recovery(kill: Kill, run: Path) -> float | None:
    """Seconds until the ranks train again, or until the server that is started next works."""
    if kill.kind == "rank":
        log = read_jsonl(run / "ranks.jsonl")
        times = [row["time"] for row in log if row["kind"] == "training"]
    else:
        changes = read_jsonl(run / "grpo" / kill.kind / "fleet.jsonl")
        later = [row for row in changes if row["time"] > kill.time]
        name = next((row["server"] for row in later if row["why"] == "started"), None)
        again = [row for row in later if row["server"] == name and row["after"] == "healthy"]
        times = [row["time"] for row in again]
    return min((moment - kill.time for moment in times if moment > kill.time), default=None)


def measured(folder: Path, steps: int, every: float, most: int | None) -> dict[str, Any]:
    """Both runs, and how they differ."""
    wild, calm = (recipe(folder, name, steps) for name in ("wild", "calm"))
    start = time.monotonic()
    kills, made = disturbed(wild, every, most)
    seconds = time.monotonic() - start
    run_recipe(calm)
    same = compared(left_by(folder / "calm" / "grpo"), left_by(folder / "wild" / "grpo"))
    waits = [recovery(kill, folder / "wild") for kill in kills]
    again = [wait for wait in waits if wait is not None]
    return {
        "kills": len(kills),
        "of_kind": dict(Counter(kill.kind for kill in kills)),
        "seconds": round(seconds, 1),
        "made_again": made - same["steps"],
        **same,
        "not_recovered": len(kills) - len(again),
        "recovery_s": {"median": statistics.median(again), "max": max(again)} if again else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.chaos", description=__doc__)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--every", type=float, default=20.0, help="seconds between two kills")
    parser.add_argument("--smoke", action="store_true", help="one kill in eight steps")
    asked = parser.parse_args()
    small = (8, 0.2, 1) if asked.smoke else (asked.steps, asked.every, None)
    with tempfile.TemporaryDirectory() as folder:
        result = measured(Path(folder), *small)
    print(f"{result['kills']} kills: {result['lost']} lost, {result['twice']} twice")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
