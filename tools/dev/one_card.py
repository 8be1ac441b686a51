"""`python -m tools.dev.one_card`: which stages of which models one GPU with 24 GB holds, by the
planner; writes the table of docs/guides/machines.md.

The recipes are those of `tether new`, with the planner's usual lengths and the smallest passes. `--smoke` counts one cell
and writes nothing.
"""

from __future__ import annotations

import argparse
import re
from importlib.resources import files
from pathlib import Path

from tether.runner.planning import devices, plan
from tether.settings.recipe import read_recipe

PAGE = Path(__file__).resolve().parents[2] / "docs" / "guides" / "machines.md"
SHAPES = ("qwen2.5-1.5b", "llama-3.2-3b", "llama-3.1-8b")
STAGES = ("sft", "reward", "direct", "grpo", "ppo")
SETTINGS = {"bfloat16": (), "4 bits": ("model.quantize=nf4",)}


def cell(stage: str, shape: str, overrides: tuple[str, ...] = ()) -> str:
    """Gigabytes at the peak; in parentheses where the card has less."""
    recipe = read_recipe(str(files("tether.recipes") / "new" / f"{stage}.toml"), list(overrides))
    card = devices.gpu(24, "rtx4090")
    made = plan.plan(recipe, card, shape=shape, stages=(stage,))
    size = f"{made.peak / 1e9:.1f}"
    return size if made.fits else f"({size})"


def table() -> str:
    """Every shape and setting, a row each."""
    lines = [f"| model | base in | {' | '.join(STAGES)} |", "|---" * (2 + len(STAGES)) + "|"]
    for shape in SHAPES:
        for name, overrides in SETTINGS.items():
            cells = [cell(stage, shape, overrides) for stage in STAGES]
            lines.append(f"| {shape} | {name} | {' | '.join(cells)} |")
            print(lines[-1], flush=True)
    return "\n".join(lines)


def main() -> None:
    """Count every cell and write the table, or with --smoke count one."""
    parser = argparse.ArgumentParser(prog="python -m tools.dev.one_card", description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="one cell, nothing written")
    if parser.parse_args().smoke:
        print(cell("sft", SHAPES[0]))
        return
    text = PAGE.read_text(encoding="utf-8")
    marked = re.compile(r"(?<=<!-- table -->\n).*?(?=<!-- end -->)", re.S)
    PAGE.write_text(marked.sub(lambda _: f"\n{table()}\n\n", text), encoding="utf-8")


if __name__ == "__main__":
    main()
