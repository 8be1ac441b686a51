"""Tables of columns, and JSON files whose rows are inside of one object: {"data": [...]}, {"train": [...]}, columns, what
`DataFrame.to_json` writes.
"""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import Mapping, Sequence

from tether.core.errors import DataError
from tether.core.once import once
from tether.core.types import Entries, Facts, JsonValue, Row
from tether.data.formats.folders import SPLIT_OF
from tether.data.formats.json_rows import BadRow, Numbered

_WRAPPERS = ("data", "rows", "examples", "records", "items", "samples")
_OF_A_ROW = {
    "prompt",
    "question",
    "instruction",
    "problem",
    "query",
    "messages",
    "conversations",
    "chosen",
}
_LOG = logging.getLogger("tether.data")


def unwrapped(
    rows: Numbered,
    where: str,
) -> Numbered:
    """The rows of a JSON file; of one that holds a single object with rows inside, these rows.

    Raises:
        DataError: the object holds several splits, or columns of different lengths.
    """
    first = list(itertools.islice(rows, 2))
    if (
        len(first) == 1
        and isinstance(first[0][1], dict)
        and (inner := _inside(first[0][1], where)) is not None
    ):
        for number, row in enumerate(inner, 1):
            yield (
                number,
                row
                if isinstance(row, dict)
                else BadRow("not an object: a row is a list or a single value", f"{row!r:.200}"),
            )
        return
    yield from itertools.chain(first, rows)


def _inside(whole: Row, where: str) -> list[JsonValue] | None:
    """The rows inside of an object; None if the object is a row itself."""
    lists = [
        name
        for name, value in whole.items()
        if isinstance(value, list) and value and all(isinstance(v, dict) for v in value)
    ]
    splits = [name for name in lists if name.lower() in SPLIT_OF]
    if len(splits) > 1 and len(splits) == len(whole):
        raise DataError(
            f"{where} holds several splits: {', '.join(splits)}. Save one of them in "
            "a file of its own.",
        )
    if len(splits) == len(whole) == 1:
        return whole[splits[0]]
    if len(lists) == 1 and lists[0] in _WRAPPERS and not whole.keys() & _OF_A_ROW:
        if beside := [name for name in whole if name not in lists]:
            once(
                _LOG.warning,
                "%s: the rows are read from %r; left out beside it: %s",
                where,
                lists[0],
                ", ".join(beside),
            )
        return whole[lists[0]]
    return _of_frame(whole) or _of_columns(whole, where)


def _of_frame(whole: Row) -> list[Row] | None:
    """The rows of `DataFrame.to_json(orient="split")`, or of its usual orient: {"prompt": {"0":
    "a", "1": "b"}}.
    """
    names = whole.get("columns")
    cells = whole.get("data")
    if (
        isinstance(names, list)
        and isinstance(cells, list)
        and all(isinstance(row, list) for row in cells)
    ):
        return [dict(zip(map(str, names), row, strict=False)) for row in cells]
    columns = list(whole.values())
    if not columns or not all(
        isinstance(column, dict) and column and all(map(str.isdigit, column)) for column in columns
    ):
        return None
    return [
        {name: column.get(place) for name, column in whole.items()}
        for place in dict.fromkeys(itertools.chain(*columns))
    ]


def _of_columns(whole: Entries, where: str) -> list[Row] | None:
    try:
        return rows_of_columns(whole)
    except DataError as error:
        raise DataError(f"{where}: {error}") from None


def no_column_twice(names: Sequence[str], where: str) -> Sequence[str]:
    """The names of a table's columns.

    Raises:
        DataError: two columns have one name.
    """
    if twice := next((name for name, count in Counter(names).items() if name and count > 1), ""):
        raise DataError(
            f"{where}: column {twice:.40} stands twice. Rename or remove one of the two.",
        )
    return names


def rows_of_columns(table: Facts) -> list[Row] | None:
    """The rows of {"prompt": ["a", "b"], "answer": ["1", "2"]}; None if it is no table of columns.

    An object whose values are lists is one row if a list holds the turns of a conversation.
    Otherwise it is a table.

    Raises:
        DataError: the columns differ in their lengths.
    """
    columns = list(table.values())
    if (
        not columns
        or not all(isinstance(column, list) for column in columns)
        or any(
            column
            and all(isinstance(one, Mapping) and ("role" in one or "from" in one) for one in column)
            for column in columns
        )
    ):
        return None
    if len({len(column) for column in columns}) > 1:
        lengths = ", ".join(f"{name} has {len(column)}" for name, column in table.items())
        raise DataError(
            f"columns of one table differ in their lengths: {lengths}. Give each as many values",
        )
    return [dict(zip(table, cells, strict=True)) for cells in zip(*columns, strict=True)]
