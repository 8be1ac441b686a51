"""Tables of pages that programs write."""

from __future__ import annotations

from collections.abc import Iterable


def markdown(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table of Markdown; borders inside a cell are escaped. A row needs a first and a last cell."""
    rows = [tuple(row) for row in rows]
    if lacking := [row for row in rows if not (row[0] and row[-1])]:
        raise ValueError(f"{lacking[0]} lacks its name or its meaning")
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(tuple(head))]
    lines += [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in rows]
    return "\n".join(lines) + "\n"
