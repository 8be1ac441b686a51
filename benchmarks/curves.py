"""`python -m benchmarks.curves RUN`: the curves of a finished comparison (studies/compare.py),
drawn into docs/methods.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from benchmarks.learning.picture import COLOURS, band, figure

from tether.core.rundir import read_json, read_jsonl

DOCS = Path(__file__).resolve().parents[1] / "docs" / "methods"
PANELS = {
    "sampled": (
        ("ppo", "grpo", "rloo", "rejection"),
        (
            ("reward/proxy", "proxy reward of the step's samples"),
            ("kl/policy_reference_k1", "KL from the reference, nats"),
        ),
        1,
    ),
    "direct_methods": (
        ("dpo", "kto", "simpo"),
        (("accuracy", "training pairs or verdicts ranked right"), ("grad_norm", "gradient norm")),
        10,
    ),
}


def curve(run: Path, seed: int, arm: str, key: str, width: int) -> list[float]:
    """One metric of an arm, averaged over so many steps up to each."""
    values = [
        row[key]
        for row in read_jsonl(run / f"seed-{seed}" / "arms" / arm / "metrics.jsonl")
        if row.get(key) is not None
    ]
    return [
        sum(values[max(0, i + 1 - width) : i + 1]) / min(i + 1, width) for i in range(len(values))
    ]


def draw(
    run: Path,
    picture: Path,
    arms: tuple[str, ...],
    panels: Any,
    width: int,
    seeds: list[int],
) -> None:
    with figure(picture, len(panels)) as axes:
        for axis, (key, title) in zip(axes, panels, strict=True):
            for arm, colour in zip(arms, COLOURS, strict=False):
                curves = [curve(run, seed, arm, key, width) for seed in seeds]
                if all(curves):
                    band(axis, list(range(1, len(curves[0]) + 1)), curves, colour, arm)
            axis.set_xlabel("step" if width == 1 else f"update (mean of up to {width})")
            axis.set_title(title)
        axes[0].legend()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.curves", description=__doc__)
    parser.add_argument("run", type=Path, help="the folder of a finished comparison")
    parser.add_argument("--output", type=Path, default=DOCS, help="the folder of the pictures")
    options = parser.parse_args()
    run = options.run
    seeds = [int(seed) for seed in read_json(run / "summary.json")["seeds"]]
    for name, (arms, panels, width) in PANELS.items():
        draw(run, options.output / f"{name}.svg", arms, panels, width, seeds)


if __name__ == "__main__":
    main()
