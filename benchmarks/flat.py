"""Whether a long run grows: resident memory and seconds a step over several hundred PPO steps of
the tiny model.

    python -m benchmarks.flat [--steps 300]

The policy hardly learns, so that every step has the same to do. The first fifth, in which
allocators and caches fill, is left out.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.every_stage import recipe

from tether.core.rundir import read_jsonl
from tether.runner.run import run_recipe
from tether.settings.reading import build
from tether.settings.recipe import Recipe


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--steps", type=int, default=300)
    steps = parser.parse_args().steps
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        values = recipe(folder, folder / "run")
        values["ppo"] |= {
            "steps": steps,
            "prompts_per_step": 6,
            "max_new_tokens": 24,
            "checkpoint_every": 5,
        }
        values["ppo"]["optimizer"] = {"learning_rate": 1e-9}
        values["ppo"]["evaluate"] = {"every": 10, "prompts": 4, "keep": "best"}
        run_recipe(build(Recipe, values), ["sft", "reward", "ppo"])
        rows = list(read_jsonl(folder / "run" / "ppo" / "metrics.jsonl"))
        for row, before in zip(rows[:0:-1], rows[-2::-1], strict=True):
            row["time/wall"] = row["time"] - before["time"]
        del rows[: steps // 5]
    measured = (
        ("resident memory", "memory/rss_bytes", 1e6),
        ("time of a step", "time/step", 1e-3),
        ("from step to step, saves, alarms and measurements included", "time/wall", 1e-3),
        ("tokens of a response", "response/length", 1.0),
    )
    for what, key, unit in measured:
        said = [row[key] / unit for row in rows]
        slope, error = theil_sen(said)
        ends = statistics.median(said[:50]), statistics.median(said[-50:])
        name = "MB" if unit > 1 else "ms" if unit < 1 else ""
        change = (
            f"{ends[0]:.1f} {name} at first, {ends[1]:.1f} at last ({ends[1] / ends[0] - 1:+.1%})"
        )
        print(f"{what}: {change}; a step adds {slope:+.4f} +- {error:.4f}")


def theil_sen(values: list[float], num_resamples: int = 200) -> tuple[float, float]:
    """The median slope between all pairs of points, which outliers do not move, and its standard
    error by blocks of ten.
    """
    heights = np.asarray(values)

    def slope(places: Any) -> float:
        first, second = np.triu_indices(len(places), 1)
        far = places[second] != places[first]
        return float(
            np.median(
                ((heights[places[second]] - heights[places[first]])[far])
                / (places[second] - places[first])[far],
            ),
        )

    generator, blocks = np.random.default_rng(0), np.arange(len(values) // 10 * 10).reshape(-1, 10)
    drawn = [
        slope(np.sort(blocks[generator.integers(len(blocks), size=len(blocks))].ravel()))
        for _ in range(num_resamples)
    ]
    return slope(np.arange(len(values))), float(np.std(drawn))


if __name__ == "__main__":
    main()
