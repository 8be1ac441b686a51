"""Lists and objects inside cells, also where a cell holds them as text; some functions look, others
read.
"""

from __future__ import annotations

import contextlib

from tether.core.errors import DataError
from tether.core.types import JsonValue
from tether.data.formats.json_rows import Row, kind_name
from tether.data.formats.messages import is_exchange, is_turn
from tether.data.formats.printed import cell_value


def _decoded(row: Row, name: str, bracket: str) -> JsonValue:
    """The value of a cell without reading it; the list or object of a text that begins with this
    bracket.
    """
    value = dict.get(row, name)
    if isinstance(value, str) and value.lstrip().startswith(bracket):
        with contextlib.suppress(ValueError):
            return cell_value(value)
    return value


def list_in(row: Row, name: str) -> list[JsonValue]:
    """The list that a cell holds; empty for any other value. Looking does not count as reading."""
    value = _decoded(row, name, "[")
    return list(value) if isinstance(value, list | tuple) else []


def object_in(row: Row, name: str) -> Row:
    """The object that a cell holds; empty for any other value. Looking does not count as
    reading.
    """
    value = _decoded(row, name, "{")
    return value if isinstance(value, dict) else {}


def listed_in(row: Row, name: str) -> list[JsonValue]:
    """The list of a cell, read; a list in a text replaces that text. Empty for any other value."""
    if items := list_in(row, name):
        if isinstance(dict.get(row, name), str):
            row[name] = items
        return list(row[name])
    return []


def inner(row: Row, name: str) -> Row:
    """The object of a cell, read; an object in a text replaces that text.

    Raises:
        DataError: the cell holds something else.
    """
    if not (within := object_in(row, name)):
        raise DataError(f"not an object: column {name} holds {kind_name(row.get(name))}")
    if isinstance(dict.get(row, name), str):
        row[name] = within
    return row[name]


def is_dialogue(row: Row, name: str) -> bool:
    """True if a column lists messages, questions with their answers, or texts by turns."""
    items = list_in(row, name)
    if name == "turns":  # whose texts are questions alone
        return bool(items) and all(map(is_turn, items))
    return bool(items) and (
        all(isinstance(item, str) for item in items)
        or all(is_turn(i) or is_exchange(i) for i in items)
    )
