"""Tables and lines of results, as all commands print them."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tether.cli.terminal.console import print_line
from tether.core.command import command_line
from tether.core.tables import table_beside

NEXT = table_beside(__file__, "next.toml")
"""By state: lines of commands, each with what it is for."""


def show_table(
    console: Console,
    title: str,
    rows: Iterable[Sequence[str]],
    columns: Sequence[str] = (),
) -> None:
    """Print a table, without columns one of names and values; nothing without rows."""
    table = Table(*columns, title=title or None, title_justify="left", show_header=bool(columns))
    for column in table.columns:
        # a long path goes on in the next line: its end says which one it is
        column.overflow = "fold"
    for row in rows:
        table.add_row(*map(escape, row))
    if table.rows:
        console.print(table)


def show_next(*states: str, **names: object) -> None:
    """Print the commands that make sense in some states, ready to be copied, by `next.toml`.

    Args:
        names: values for the names in the table.
    """
    lines = [
        (command_line(*(word.format(**names) for word in shlex.split(line))), why.format(**names))
        for state in states
        for line, why in NEXT[state].items()
    ]
    width = max((len(why) for _, why in lines), default=0)
    for line, why in lines:
        print_line(f"  {why:{width}}   {line}")


def save(path: Path | None, value: object) -> None:
    """Write everything as JSON where the user asked for it, and say so."""
    from tether.core.rundir import write_json

    if path:
        write_json(path, value)
        print_line(f"Everything: {path}")
