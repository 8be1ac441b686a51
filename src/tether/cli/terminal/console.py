"""The terminal of a program: it shows texts of data, models, templates and rewards as plain text.

Everything that tether's commands print goes through `Terminal` or `print_line`, an error's sentence
through `print_error`, and what is logged through the handler of `log_to_terminal`.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from tether.core.secrets import redact
from tether.core.visible import visible


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
