"""What it brings to sample while the learner learns, what it costs, and whether a kill loses
anything.

    python -m benchmarks.overlap [--seeds 5] [--steps 60] [--kills 20] [--json] [--smoke]

GRPO on the tiny model with one engine server, for 0, 1 and 2 updates of staleness: samples a second
after the first steps, the reward of the last ten steps, how old samples were. Then the run with
staleness 2 is killed at random moments and started again, until it ends; every sample is counted by
step and prompt, against the run in one process that nobody killed. Servers give log-probabilities
to rounding, so after enough updates a token differs; `alike` is the median step until then.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tether.core.rundir import read_jsonl, write_json

BOUNDS = 0, 1, 2
BEGINNING = 5
"""Steps that are not timed."""
LAST = 10
"""Steps whose reward counts."""


def settings(folder: Path, seed: int, bound: int, steps: int, *, served: bool) -> list[str]:
    """The words after `tether run`."""
    engine = ['grpo.engine={kind="served"}'] if served else []
    values = {"seed": seed, "grpo.seed": seed, "grpo.steps": steps, "grpo.max_staleness": bound}
    return [
        str(folder.parent / "recipe.toml"),
        f'run="{folder}"',
        *engine,
        *(f"{key}={value}" for key, value in values.items()),
    ]


RECIPE = """
run = "run"
[model]
source = "tiny"
dtype = "float32"
[grpo]
data = { path = "tether:prompts" }
function = { call = "tether.quickstart.judges:letters" }
importance = "truncate"
prompts_per_step = 8
samples_per_prompt = 8
max_new_tokens = 32
checkpoint_every = 10
sample_rows = 64
optimizer = { learning_rate = 3e-3 }
"""


def started(words: list[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "tether", "run", *words],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def measured(
    folder: Path,
    seeds: int,
    steps: int,
    bounds: Sequence[int],
) -> dict[int, dict[str, Any]]:
    """By bound: samples a second and the reward at the end, each with half its 95% interval over
    the seeds, and the ages.
    """
    found: dict[int, dict[str, Any]] = {}
    for bound in bounds:
        speeds, rewards, ages = [], [], Counter[float]()
        for seed in range(seeds):
            run = folder / f"{bound}-{seed}"
            if started(settings(run, seed, bound, steps, served=True)).wait():
                raise SystemExit(f"{run} ended with an error")
            rows = list(read_jsonl(run / "grpo" / "metrics.jsonl"))
            seconds = rows[-1]["time"] - rows[min(BEGINNING, len(rows) - 2)]["time"]
            speeds.append(64 * (len(rows) - 1 - min(BEGINNING, len(rows) - 2)) / seconds)
            rewards.append(statistics.fmean(row["reward/proxy"] for row in rows[-LAST:]))
            ages.update(row.get("policy/staleness", 0.0) for row in rows)
        found[bound] = {
            "samples_per_s": spread(speeds),
            "reward": spread(rewards),
            "ages": dict(sorted(ages.items())),
        }
    return found


def spread(values: list[float]) -> list[float | None]:
    """The mean, and half the 95% interval of it by Student's t."""
    from scipy.stats import t

    if len(values) < 2:
        return [values[0], None]
    half = t.ppf(0.975, len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    return [round(statistics.fmean(values), 4), round(float(half), 4)]


def killed(folder: Path, kills: int, steps: int) -> dict[str, Any]:
    """A run with staleness 2 that is killed so often while it learns; new runs where one ends
    before.
    """
    whole, chance, runs = folder / "whole", random.Random(0), 0
    at, alike = list[int](), list[int]()
    lost = twice = 0
    if started(settings(whole, 0, 2, steps, served=False)).wait():
        raise SystemExit(f"{whole} ended with an error")
    times = [row["time"] for row in read_jsonl(whole / "grpo" / "metrics.jsonl")]
    while len(at) < kills:
        run, runs = folder / f"killed-{runs}", runs + 1
        while (process := started(settings(run, 0, 2, steps, served=True))).poll() is None:
            learns(run, process)
            time.sleep(chance.uniform(0, times[-1] - times[0]))
            if process.poll() is not None or len(at) == kills:
                break
            process.kill()
            process.wait()
            at.append(logged(run)[0])
        if process.wait():
            raise SystemExit(f"{run} ended with an error")
        ours, theirs = texts(run), texts(whole)
        mine, yours = (
            Counter((step, prompt) for step, prompt, *_ in rows) for rows in (ours, theirs)
        )
        lost, twice = lost + (yours - mine).total(), twice + (mine - yours).total()
        alike.append(next((a[0] for a, b in zip(ours, theirs, strict=False) if a != b), steps))
    counts = {
        "kills": len(at),
        "after_step": at,
        "runs": runs,
        "samples": len(texts(whole)),
        "lost": lost,
        "twice": twice,
    }
    return {**counts, "alike": statistics.median(alike)}


def logged(run: Path) -> tuple[int, int]:
    """The number of steps in a run's log, and when it was written, by the file system."""
    path = run / "grpo" / "metrics.jsonl"
    return (
        (len(path.read_bytes().splitlines()), path.stat().st_mtime_ns) if path.is_file() else (0, 0)
    )


def learns(run: Path, process: subprocess.Popen[bytes]) -> None:
    """Wait until it has logged a step, or has ended."""
    before = logged(run)
    while process.poll() is None and logged(run) == before:
        time.sleep(0.05)


def texts(run: Path) -> list[Any]:
    """What was sampled and learned from, in order."""
    kept = ("step", "prompt", "response", "proxy")
    return [[row[key] for key in kept] for row in read_jsonl(run / "grpo" / "samples.jsonl")]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.overlap",
        description=(__doc__ or "").splitlines()[0],
    )
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument(
        "--smoke",
        action="store_true",
        help=("three steps of one seed with staleness 2, no kill"),
    )
    asked = parser.parse_args()
    if asked.smoke:
        asked.seeds, asked.steps, asked.kills = 1, 3, 0
    with tempfile.TemporaryDirectory() as place:
        (Path(place) / "recipe.toml").write_text(RECIPE, encoding="utf-8")
        figures: dict[str, Any] = {
            "bounds": measured(Path(place), asked.seeds, asked.steps, BOUNDS[asked.smoke * 2 :]),
        }
        if asked.kills:
            figures["killed"] = killed(Path(place), asked.kills, asked.steps)
    if asked.json:
        write_json(asked.json, figures)
    print(json.dumps(figures))
