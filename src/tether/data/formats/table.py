"""The tables of formats.toml: layouts of rows, and the lists of names that they and readers share."""

from __future__ import annotations

from typing import NamedTuple

import tether.core.types as types
from tether.core.tables import table_beside
from tether.core.types import Json


class Kind(NamedTuple):
    """A kind of record for people: its name, what a file needs to hold it, names of columns for it,
    and the sections of a recipe that learn from it.
    """

    name: str
    needs: str
    example: str
    read_by: str


TABLES: Json = table_beside(__file__, "formats.toml")
KINDS: dict[type, Kind] = {
    getattr(types, name): Kind(*(own[key] for key in Kind._fields))
    for name, own in TABLES["kinds"].items()
}


def word_lists(table: str) -> dict[str, tuple[str, ...]]:
    """The rows of a table of words."""
    return {name: tuple(str(row).split()) for name, row in TABLES[table].items()}


LISTS = word_lists("lists")
"""Names of columns, and words of verdicts."""
