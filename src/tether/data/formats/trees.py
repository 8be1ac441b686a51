"""Trees of messages from files with one message a row, as the hub has OpenAssistant's.

https://huggingface.co/datasets/OpenAssistant/oasst2
"""

from __future__ import annotations

from collections.abc import Iterator

from tether.core.types import Json
from tether.data.formats.json_rows import BadRow, Row
from tether.data.formats.values import missing

ORPHAN = (
    "orphan: the message that it answers is not among the neighbouring rows of its tree; sort the "
    "rows by message_tree_id, and keep whole trees"
)


def gather(rows: Iterator[tuple[int, Row | BadRow]]) -> Iterator[tuple[int, Row | BadRow]]:
    """Neighbouring rows of one tree as one row, `prompt` with `replies`, under the number of its
    root; any other row as it is.

    Parents may come after their children. Only one tree is in memory.
    """
    group: list[tuple[int, Row]] = []
    for number, row in rows:
        if group and (
            isinstance(row, BadRow) or not _is_message(row) or _tree(row) != _tree(group[0][1])
        ):
            yield from _linked(group)
            group = []
        if isinstance(row, BadRow) or not _is_message(row):
            yield number, row
        else:
            group.append((number, row))
    yield from _linked(group)


def _is_message(row: Row) -> bool:
    return row.keys() >= {"message_id", "parent_id", "text", "role"}


def _tree(row: Row) -> str:
    return str(row.get("message_tree_id"))


def _linked(group: list[tuple[int, Row]]) -> Iterator[tuple[int, Row | BadRow]]:
    """The tree that these rows make, and those whose parent is missing."""
    nodes: dict[str, Json] = {
        str(row["message_id"]): {**_filled(row), "replies": []} for _, row in group
    }
    roots: list[tuple[int, Row | BadRow]] = []
    for number, row in group:
        node = nodes[str(row["message_id"])]
        above = row.get("parent_id")
        if missing(above) or above == "":
            roots.append((number, {"message_tree_id": row.get("message_tree_id"), "prompt": node}))
        elif str(above) in nodes:
            nodes[str(above)]["replies"].append(node)
        else:
            roots.append((number, BadRow(ORPHAN, str(row.get("text"))[:400])))
    yield from roots


def _filled(row: Row) -> Json:
    """The keys of a message that hold something; what the tree itself says is left out."""
    structure = ("parent_id", "message_tree_id")
    return {
        name: value
        for name, value in row.items()
        if name not in structure and not missing(value) and value != ""
    }
