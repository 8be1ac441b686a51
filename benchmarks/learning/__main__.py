"""`python -m benchmarks.learning [NAMES] [--seeds 0 1 2] [--draw]`: experiments with known
outcomes, their tables and pictures.

Results are kept in docs/results/learning/results.json; tables go to standard output and between
their marks in docs/results/learning.md. `--smoke` runs them once at sizes that mean nothing, and
keeps nothing.
"""

from __future__ import annotations

import argparse
import importlib
import json
import re
import tempfile
import time
from pathlib import Path
from typing import Any

NAMES = ("inverted_u", "variance", "arithmetic")
DOCS = Path(__file__).resolve().parents[2] / "docs" / "results"
RESULTS = DOCS / "learning" / "results.json"


SMALL: dict[str, dict[str, Any]] = {
    "inverted_u": {"demonstrations": 64, "pairs": 20, "steps": 1, "betas": (0.1,)},
    "variance": {"demonstrations": 64, "value_steps": 1, "batches": 4},
    "arithmetic": {"demonstrations": 64, "steps": 1, "long": 1, "rare": 1},
}
"""Sizes for smoke runs."""


def measure(name: str, seed: int, **sizes: Any) -> dict[str, Any]:
    experiment, start = importlib.import_module(f"benchmarks.learning.{name}"), time.process_time()
    return _rounded({**experiment.run(seed, **sizes), "cpu_seconds": time.process_time() - start})


def smoke(name: str) -> None:
    """An experiment's table and picture, which are not kept."""
    results = [measure(name, 0, **SMALL[name])]
    experiment = importlib.import_module(f"benchmarks.learning.{name}")
    print(f"\n## {name}\n\n{experiment.table(results)}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        experiment.draw(results, Path(folder) / f"{name}.svg")


def section(name: str, results: list[dict[str, Any]]) -> str:
    """What the page has between an experiment's marks."""
    experiment = importlib.import_module(f"benchmarks.learning.{name}")
    numbers = [result["seed"] for result in results]
    whole = numbers == list(range(len(numbers))) and len(numbers) > 3
    seeds = f"0 to {numbers[-1]}" if whole else ", ".join(map(str, numbers))
    seconds = sum(result["cpu_seconds"] for result in results) / len(results)
    return (
        f"{experiment.table(results)}\n\nSeeds {seeds}; mean ± standard deviation over them; "
        f"{seconds:.0f} CPU seconds a seed."
    )


def show(name: str, results: list[dict[str, Any]]) -> None:
    """Table and picture from the results alone."""
    experiment, text = (
        importlib.import_module(f"benchmarks.learning.{name}"),
        section(name, results),
    )
    print(f"\n## {name}\n\n{text}", flush=True)
    experiment.draw(results, DOCS / "learning" / f"{name}.svg")
    page = DOCS / "learning.md"
    marked = re.compile(rf"(?<=<!-- {name} -->\n).*?(?=<!-- end -->)", re.DOTALL)
    page.write_text(
        marked.sub(lambda _: f"\n{text}\n\n", page.read_text(encoding="utf-8"), count=1),
        encoding="utf-8",
    )


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, list) else value


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.learning", description=__doc__)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(NAMES)}; none: all")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument(
        "--draw",
        action="store_true",
        help=("tables and pictures of what is known, nothing is run"),
    )
    parser.add_argument(
        "--smoke",
        action="store_true",
        help=("sizes that mean nothing, nothing kept: does it run?"),
    )
    said = parser.parse_args()
    if unknown := set(said.names) - set(NAMES):
        parser.error(
            f"no experiment is called {', '.join(sorted(unknown))}; there are {', '.join(NAMES)}",
        )
    if not said.draw:
        import torch

        torch.set_num_threads(1)
    if said.smoke:
        for name in said.names or NAMES:
            smoke(name)
        return
    known = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.is_file() else {}
    for name in said.names or NAMES:
        if not said.draw:
            known[name] = [measure(name, seed) for seed in said.seeds]
            RESULTS.write_text(json.dumps(known) + "\n", encoding="utf-8")
        if name in known:
            show(name, known[name])


if __name__ == "__main__":
    main()
