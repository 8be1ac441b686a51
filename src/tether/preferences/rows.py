"""Comparisons and demonstrations as JSON lines that `data.sources.read` gives back."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tether.core.types import Comparison, Conversation, Demonstration


def as_row(record: Comparison | Demonstration) -> dict[str, Any]:
    """A row of the formats `preference` or `messages`, as plain JSON values; empty fields are left out."""
    more: dict[str, Any] = {"id": record.id, "metadata": dict(record.metadata)}
    if isinstance(record, Demonstration):
        row = {"messages": _turns(record.messages)}
    else:
        row = {name: _turns(getattr(record, name)) for name in ("prompt", "chosen", "rejected")}
        row |= {"probability": record.probability, "tie": record.tie}
        votes = [{"annotator": vote.annotator, "preference": vote.preference} for vote in record.annotations]
        more |= {"margin": record.margin, "group": record.group, "annotations": votes}
    return {**row, **{name: value for name, value in more.items() if value not in (None, "", [], {})}}


def write_rows(path: str | Path, records: Iterable[Comparison | Demonstration]) -> None:
    """All of them, or the file as it was before."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.writelines(json.dumps(as_row(record), ensure_ascii=False, default=str) + "\n" for record in records)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _turns(conversation: Conversation) -> list[dict[str, str]]:
    return [{"role": turn.role, "content": turn.content} for turn in conversation]
