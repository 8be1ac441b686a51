"""The terminal of a program: it shows texts of data, models, templates and rewards as plain text.

Everything that tether's commands print goes through `Terminal` or `print_line`, an error's sentence
through `print_error`, and what is logged through the handler of `log_to_terminal`.
"""

from __future__ import annotations

import logging
import shlex
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.console import Console, ConsoleOptions, RenderableType
from rich.markup import escape
from rich.segment import Segment
from rich.table import Table

from tether.core.command import command_line
from tether.core.secrets import redact
from tether.core.tables import table_beside
from tether.core.visible import visible

NEXT = table_beside(__file__, "next.toml")
"""By state: lines of commands, each with what it is for."""


class Terminal(Console):
    """rich's console, on which control characters of texts are shown as signs. Its own colours and
    movements still act.
    """

    def render(
        self,
        renderable: RenderableType,
        options: ConsoleOptions | None = None,
    ) -> Iterable[Segment]:
        """See rich."""
        for segment in super().render(renderable, options):
            text, style, control = segment
            yield (
                segment if control or text.isprintable() else Segment(visible(text), style, control)
            )


class _ToStandardError(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        print(visible(redact(record.getMessage())), file=sys.stderr)


def log_to_terminal() -> None:
    """Write warnings and errors of tether's log to standard error, as their messages are, secrets
    left out.
    """
    log = logging.getLogger("tether")
    if not any(isinstance(handler, _ToStandardError) for handler in log.handlers):
        log.addHandler(_ToStandardError(logging.WARNING))


def print_line(text: str, *, err: bool = False) -> None:
    """Write a line to standard output, or to standard error."""
    print(visible(text), file=sys.stderr if err else sys.stdout)


def print_error(message: str) -> None:
    """Write an error's sentence to standard error, secrets left out."""
    print(f"tether: {visible(redact(message))}", file=sys.stderr)


def show_table(
    rows: Iterable[Sequence[str]],
    columns: Sequence[str] = (),
    title: str = "",
    console: Console | None = None,
) -> None:
    """Print a table, without columns one of names and values; nothing without rows."""
    table = Table(*columns, title=title or None, title_justify="left", show_header=bool(columns))
    for column in table.columns:
        # a long path goes on in the next line: its end says which one it is
        column.overflow = "fold"
    for row in rows:
        table.add_row(*map(escape, row))
    if table.rows:
        (console or Terminal()).print(table)


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
