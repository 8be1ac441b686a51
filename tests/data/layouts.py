"""Published layouts of comparisons and of single verdicts, each with a row made up here and the
right reading of it.

In preference_layouts.jsonl `read` is the right reading: the prompt, the good and the bad answer (as
texts, or as roles and texts), and more where it counts: `sides` without an order, tie, both_bad,
margin, probability, votes, tools; `demonstration` where that is something else than the good
answer, `answer` of a problem. `refused` is a part of the sentence that refuses the row for its own
kind.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import tether.core.types as types


class Layout(NamedTuple):
    name: str
    kind: type
    row: dict[str, Any]
    read: dict[str, Any] | None
    refused: str


def _layout(line: str) -> Layout:
    parts = json.loads(line)
    return Layout(
        parts["name"],
        getattr(types, parts["kind"]),
        parts["row"],
        parts.get("read"),
        parts.get("refused", ""),
    )


TABLE = Path(__file__).with_name("preference_layouts.jsonl")
LAYOUTS = [_layout(line) for line in TABLE.read_text(encoding="utf-8").splitlines()]


def told(value: Any, role: str) -> list[tuple[str, str]]:
    """Roles and texts; a text alone is one turn of `role`."""
    return [(role, value)] if isinstance(value, str) else [(one, words) for one, words in value]
