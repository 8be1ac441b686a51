"""Comparisons and demonstrations as JSON lines that `data.sources.read` gives back."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tether.core.files import whole_file
from tether.core.types import Comparison, Conversation, Demonstration, Message


def turn_rows(conversation: Conversation) -> list[dict[str, str]]:
    """A conversation as plain JSON values."""
    return [{"role": turn.role, "content": turn.content} for turn in conversation]


def turns_of(rows: Sequence[Mapping[str, str]]) -> Conversation:
    """The conversation that `turn_rows` was given."""
    return tuple(Message(row["role"], row["content"]) for row in rows)  # type: ignore[arg-type]


def as_row(record: Comparison | Demonstration) -> dict[str, Any]:
    """A row of the formats `preference` or `messages`, as plain JSON values; empty fields are left out."""
    more: dict[str, Any] = {"id": record.id, "metadata": dict(record.metadata)}
    if isinstance(record, Demonstration):
        row: dict[str, Any] = {"messages": turn_rows(record.messages)}
    else:
        row = {name: turn_rows(getattr(record, name)) for name in ("prompt", "chosen", "rejected")}
        row |= {"probability": record.probability, "tie": record.tie}
        votes = [{"annotator": vote.annotator, "preference": vote.preference} for vote in record.annotations]
        more |= {"margin": record.margin, "group": record.group, "annotations": votes}
    return {**row, **{name: value for name, value in more.items() if value not in (None, "", [], {})}}


def write_rows(path: str | Path, records: Iterable[Comparison | Demonstration]) -> None:
    """All of them, or the file as it was before."""
    with whole_file(path) as temporary, temporary.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(as_row(record), ensure_ascii=False, default=str) + "\n" for record in records)
