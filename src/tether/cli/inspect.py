"""The commands that look at what is there: data before training, a run afterwards."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tether.cli.options import Format


def report(
    directory: Annotated[Path, typer.Argument(help="A run directory.")],
    output: Annotated[Path | None, typer.Option("--output", "-o", help="The page; default: report.html in the run.")] = None,
) -> None:
    """Write one page with the curves, numbers and answers of a run."""
    from tether.report.about import anchor
    from tether.report.page import whole_run, write_report

    page = write_report(directory, output)
    typer.echo(str(page) if whole_run(directory) == directory else f"{page}#{anchor(directory.name)}")


def inspect_data(
    path: Annotated[str, typer.Argument(help="A file, a folder, or hub:owner/name:split.")],
    format: Format = "auto",
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first rows.")] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 2 if any row had to be set aside.")] = False,
) -> None:
    """Say what a file holds: format, counts, lengths, length bias, duplicates, bad rows, examples."""
    from rich.console import Console

    from tether.core.errors import DataError
    from tether.data.inspection import inspect_data, inspection_tables

    inspection = inspect_data(path, format=format, limit=limit)
    Console().print(inspection_tables(inspection))
    if strict and inspection.quarantined:
        raise DataError(f"{path}: {inspection.quarantined} rows cannot be used, and --strict was given. The reasons stand above.")
