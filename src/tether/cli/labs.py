"""Commands for the labs: exercises that run for some seconds, each with a page."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from tether.cli.terminal.console import Terminal, print_line
from tether.cli.terminal.tables import show_table
from tether.core.errors import ConfigError

LABS = Path(__file__).resolve().parent.parent / "api" / "labs"
"""The folder `labs` of a clone, and its copy in an installed package."""


def _labs() -> list[Path]:
    return sorted(LABS.glob("[0-9][0-9]_*.py"))


def _stated(path: Path, what: str) -> str:
    """A line of a lab's first cell, such as its chapter."""
    cell = path.read_text(encoding="utf-8").split("# %%\n")[0]
    match = re.search(rf"^# \*\*{what}:\*\* (.*)$", cell, flags=re.MULTILINE)
    return match[1].rstrip(".") if match else ""


def _complete_lab(incomplete: str) -> list[str]:
    return [path.stem for path in _labs() if path.stem.startswith(incomplete)]


def _lab(name: str) -> Path:
    """The lab of a number, a name or the beginning of either."""
    number, _, rest = name.replace("-", "_").removesuffix(".py").partition("_")
    padded = f"{number.lstrip('0').zfill(2)}_{rest}"
    wanted = padded if number.isdecimal() else name.replace("-", "_")
    matching = [
        path for path in _labs() if path.stem.startswith(wanted) or path.stem[3:].startswith(wanted)
    ]
    if len(matching) != 1:
        names = ", ".join(path.stem for path in matching or _labs())
        raise ConfigError(f"{len(matching)} labs are called {name!r}. Give one of {names}, or all")
    return matching[0]


def lab(
    name: Annotated[
        str | None,
        typer.Argument(help="A lab's number or name, or all.", autocompletion=_complete_lab),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, max=(1 << 32) - 1, help="Random seed.")] = 0,
) -> None:
    """List the labs, or run one. A lab compares its numbers with expected ranges and writes a page with
    plots.
    """
    if name is None:
        rows = [(path.stem, _stated(path, "Chapter"), _stated(path, "Time")) for path in _labs()]
        show_table(Terminal(), "labs of tether", rows, ("lab", "chapter", "time"))
        print_line(
            "Run one: tether lab 1    Run all: tether lab all    Read them: docs/guides/labs.md",
        )
        return
    chosen = _labs() if name == "all" else [_lab(name)]
    Path("runs", "labs").mkdir(parents=True, exist_ok=True)
    results = [(path.stem, *_run(path, seed)) for path in chosen]
    if name == "all":
        rows = [(stem, f"{seconds:.0f} s", result) for stem, seconds, result in results]
        show_table(Terminal(), "all labs", rows, ("lab", "time", "numbers"))
    if any(result != "inside" for *_, result in results):
        raise typer.Exit(1)


def _run(path: Path, seed: int) -> tuple[float, str]:
    """Run a lab in a process of its own: its seconds, and the verdict on its numbers."""
    started = time.perf_counter()
    environment = {**os.environ, "TETHER_LAB_SEED": str(seed)}
    finished = subprocess.run([sys.executable, str(path)], env=environment, check=False)
    result = "inside" if finished.returncode == 0 else "OUTSIDE THEIR RANGES"
    return time.perf_counter() - started, result
