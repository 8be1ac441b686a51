"""Commands for the labs: exercises that run for some seconds, each with a page."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from tether.cli.terminal.console import Terminal, print_line
from tether.cli.terminal.tables import show_next, show_table
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
    wanted = name.replace("-", "_").removesuffix(".py")
    number, _, rest = wanted.partition("_")
    if number.isdecimal():
        wanted = f"{number.lstrip('0').zfill(2)}_{rest}"
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
        rows = [(path.stem, _stated(path, "Question"), _stated(path, "Time")) for path in _labs()]
        console = Terminal()
        show_table(console, "labs of tether", rows, ("lab", "question", "time"))
        show_next("labs")
        return
    chosen = _labs() if name == "all" else [_lab(name)]
    Path("runs", "labs").mkdir(parents=True, exist_ok=True)
    outside = [path.stem for path in chosen if not _run(path, seed)]
    if name == "all":
        print_line(f"{len(chosen)} labs. Outside their bands: {', '.join(outside) or 'none'}")
    if outside:
        raise typer.Exit(1)


def _run(path: Path, seed: int) -> bool:
    """Run a lab in a process of its own; False where a number left its band."""
    environment = {**os.environ, "TETHER_LAB_SEED": str(seed)}
    command = [sys.executable, str(path)]
    return subprocess.run(command, env=environment, check=False).returncode == 0
