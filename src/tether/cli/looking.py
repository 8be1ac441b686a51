"""The commands that look at what is there: data before training, a run afterwards."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tether.cli.options import Format


def report(
    directory: Annotated[Path, typer.Argument(help="A run directory.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Where to write the page; default: report.html in the run.")
    ] = None,
) -> None:
    """One self-contained page from a run directory."""
    from tether.report.page import write_report

    typer.echo(str(write_report(directory, output)))


def inspect(
    path: Annotated[str, typer.Argument(help="A file, a folder, or hub:owner/name:split.")],
    format: Format = "auto",
    limit: Annotated[int | None, typer.Option(min=1, help="Read only the first so many rows.")] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 2 if any row had to be set aside.")] = False,
) -> None:
    """Format, counts, lengths, length bias of chosen against rejected, duplicates, examples."""
    from rich.console import Console

    from tether.core.errors import DataError
    from tether.data.inspection import inspect, render

    found = inspect(path, format=format, limit=limit)
    Console().print(render(found))
    if strict and found.quarantined:
        raise DataError(f"{path}: {found.quarantined} rows cannot be used, and --strict was given. The reasons stand above.")
