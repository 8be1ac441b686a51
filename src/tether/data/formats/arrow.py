"""Rows out of Arrow's tables: Parquet files, Arrow's own files, and the nulls that one schema for
all rows puts into them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from tether.core.errors import DataError, one_line
from tether.data.formats.columns import no_column_twice
from tether.data.formats.json_rows import BadRow, Row

_BATCH = 256
_WITH_OWN_KEYS = ("tool_calls", "tools")
"""Columns, and keys of messages, whose objects have other keys in each row: the arguments and the
schemas of functions.
"""


def without_added_nulls(value: Any, inside: bool = False) -> Any:
    """A row without the nulls in its tool calls and schemas of tools.

    A table has one schema, so each call gets every argument of all functions, null where it has
    none of the name. Other objects keep their nulls.
    """
    if isinstance(value, Mapping):
        rest = {name: item for name, item in value.items() if not (inside and item is None)}
        return {
            name: without_added_nulls(item, inside or name in _WITH_OWN_KEYS)
            for name, item in rest.items()
        }
    return (
        [without_added_nulls(item, inside) for item in value]
        if isinstance(value, list | tuple)
        else value
    )


def parquet_rows(stream: Any, where: str) -> Iterator[tuple[int, Row | BadRow]]:
    """The numbered rows of a Parquet file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(stream)
        no_column_twice(file.schema_arrow.names, where)
        yield from _rows(file.iter_batches(batch_size=_BATCH, use_threads=False))
    except pa.ArrowException as error:
        raise DataError(
            f"{where}: not a readable Parquet file ({one_line(error)}). Copy or "
            "download the file again."
        ) from error


def arrow_rows(stream: Any, where: str) -> Iterator[tuple[int, Row | BadRow]]:
    """The numbered rows of an Arrow file: a stream, as `save_to_disk` of `datasets` writes them, or
    a file with an index.
    """
    import pyarrow as pa

    try:
        if bytes(stream.peek(6)[:6]) == b"ARROW1":
            file = pa.ipc.open_file(stream)
            batches: Iterable[Any] = map(file.get_batch, range(file.num_record_batches))
        else:
            file = batches = pa.ipc.open_stream(stream)
        no_column_twice(file.schema.names, where)
        yield from _rows(part for batch in batches for part in _parts(batch))
    except (pa.ArrowException, OSError) as error:
        raise DataError(
            f"{where}: not a readable Arrow file ({one_line(error)}). Copy or "
            "download the file again."
        ) from error


def _parts(batch: Any) -> Iterator[Any]:
    return (batch.slice(start, _BATCH) for start in range(0, batch.num_rows, _BATCH))


def _rows(batches: Iterable[Any]) -> Iterator[tuple[int, Row | BadRow]]:
    number = 0
    for batch in batches:
        try:
            rows = batch.to_pylist()
        except (ValueError, OverflowError):
            rows = [_single(batch.slice(index, 1)) for index in range(batch.num_rows)]
        for number, row in enumerate(rows, number + 1):  # noqa: B020 - the count goes on
            yield number, row if isinstance(row, BadRow) else without_added_nulls(row)


def _single(row: Any) -> Row | BadRow:
    try:
        return row.to_pylist()[0]
    except (ValueError, OverflowError) as error:
        return BadRow(f"unreadable cell: {one_line(error)}", "")
