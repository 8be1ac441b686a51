"""Rows out of Arrow's tables: Parquet files, Arrow's own files, and the nulls that one schema for
all rows puts into them.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from tether.core.errors import DataError, one_line
from tether.core.types import JsonValue, Row
from tether.data.formats.json_rows import BadRow, Numbered, parse
from tether.data.formats.json_tables import no_column_twice
from tether.data.formats.messages import TEMPLATE_ARGUMENTS

if TYPE_CHECKING:
    from pyarrow import Array, DataType, RecordBatch

FREE_BYTES, MOST_GROWTH = 1 << 28, 200
"""Bytes that every file may grow to, and times its size that a larger one may: packed texts shrink to
a tenth or so, and a small file may be made to fill memories.
"""
_BATCH = 256
_UNREADABLE = OSError, UnicodeDecodeError, SystemError
"""Errors of a damaged file besides those of Arrow's own."""
_LEAST, _LARGE = 16, 1 << 16
"""Bytes that each row counts for, and bytes of texts beyond which all of them count.

A table stores equal texts once, and all rows may share a prompt of usual length.
"""
_WITH_OWN_KEYS = ("tool_calls", "tools", TEMPLATE_ARGUMENTS)
"""Columns, and keys of messages, whose objects have other keys in each row: the arguments and the
schemas of functions, and the arguments of chat templates.
"""


def check_growth(
    name: str,
    num_bytes: int,
    packed: int,
    *,
    when: str = "unpacked",
) -> None:
    """Look whether a file that is not so large has become so many bytes.

    Args:
        packed: its size, in bytes.
        when: the words for how it grows.

    Raises:
        DataError: it grows beyond all measure.
    """
    if num_bytes > FREE_BYTES and num_bytes > MOST_GROWTH * packed:
        raise DataError(
            f"{name} grows to more than {MOST_GROWTH} times its size when it is {when}: it is "
            "damaged, or made to fill memories. Save its rows as plain JSON lines if you trust it",
        )


def without_added_nulls(value: object, inside: bool = False) -> JsonValue:
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


def table_rows(
    stream: io.BufferedReader,
    suffix: str,
    where: str,
) -> Numbered:
    """The numbered rows of a Parquet or an Arrow file."""
    import pyarrow as pa

    kind, opened = ("Parquet", _parquet) if suffix == ".parquet" else ("Arrow", _arrow)
    try:
        names, batches = opened(stream, where)
        no_column_twice(names, where)
        yield from _rows(batches, where)
    except (pa.ArrowException, *_UNREADABLE) as error:
        raise DataError(
            f"{where}: not a readable {kind} file ({one_line(error)}). Copy or "
            "download the file again.",
        ) from error


def _parquet(stream: io.BufferedReader, where: str) -> tuple[list[str], Iterable[RecordBatch]]:
    import pyarrow.parquet as pq

    file = pq.ParquetFile(stream)
    groups = [
        file.metadata.row_group(n).total_byte_size for n in range(file.metadata.num_row_groups)
    ]
    check_growth(where, sum(groups), os.path.getsize(where), when="read")
    size = _at_once(max(groups, default=0))
    return file.schema_arrow.names, _sound(file.iter_batches(batch_size=size, use_threads=False))


def _arrow(stream: io.BufferedReader, _: str) -> tuple[list[str], Iterable[RecordBatch]]:
    """A stream, as `save_to_disk` of `datasets` writes them, or a file with an index."""
    import pyarrow as pa

    if bytes(stream.peek(6)[:6]) == b"ARROW1":
        file = pa.ipc.open_file(stream)
        batches: Iterable[RecordBatch] = map(file.get_batch, range(file.num_record_batches))
    else:
        file = batches = pa.ipc.open_stream(stream)
    return file.schema.names, (part for batch in _sound(batches) for part in _parts(batch))


def _sound(batches: Iterable[RecordBatch]) -> Iterator[RecordBatch]:
    """The batches, each checked first: a damaged place in one would be read outside of its memory."""
    for batch in batches:
        for column in batch.columns:
            _check(column)
        yield batch


def _check(column: Array) -> None:
    """Check the places of a column. A text that is no UTF-8 costs its own row alone, later."""
    column.view(_as_bytes(column.type)).validate(full=True)


def _as_bytes(kind: DataType) -> DataType:
    """The same type with bytes in place of texts, inside lists and objects too."""
    import pyarrow as pa

    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_as_bytes(field.type)) for field in kind])
    for is_list, made in ((pa.types.is_list, pa.list_), (pa.types.is_large_list, pa.large_list)):
        if is_list(kind):
            return made(kind.value_field.with_type(_as_bytes(kind.value_type)))
    return {pa.string(): pa.binary(), pa.large_string(): pa.large_binary()}.get(kind, kind)


def _decoder(kind: DataType) -> Callable[[JsonValue], JsonValue]:
    """A function that puts the values of JSON texts into their places in a cell; `datasets` calls
    the type `Json`.
    """
    import pyarrow as pa

    if isinstance(kind, pa.JsonType):
        return lambda words: words if words is None else parse(words)
    if pa.types.is_struct(kind):
        own = {field.name: _decoder(field.type) for field in kind}
        return lambda cell: cell and {name: own[name](inner) for name, inner in cell.items()}
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        item = _decoder(kind.value_type)
        return lambda cell: cell and [item(inner) for inner in cell]
    return lambda cell: cell


def _at_once(num_bytes: int) -> int:
    """The number of rows to read at once of a part of so many bytes.

    Each may hold the part's largest text, which a table stores once.
    """
    return min(_BATCH, max(1, 4 * FREE_BYTES // max(1, num_bytes)))


def _parts(batch: RecordBatch) -> Iterator[RecordBatch]:
    size = _at_once(batch.nbytes)
    return (batch.slice(start, size) for start in range(0, batch.num_rows, size))


def _size(value: object) -> int:
    """The characters of all texts in a row."""
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, dict):
        value = [*value.values()]
    return sum(map(_size, value)) if isinstance(value, list) else 0


def _rows(batches: Iterable[RecordBatch], where: str) -> Numbered:
    import pyarrow as pa

    number = grown = 0
    packed = os.path.getsize(where)
    for batch in batches:
        decode = _decoder(pa.struct(batch.schema))
        try:
            rows = batch.to_pylist()
        except (ValueError, OverflowError):
            rows = [_single(batch.slice(index, 1)) for index in range(batch.num_rows)]
        for number, row in enumerate(rows, number + 1):  # noqa: B020 - the count goes on
            size = 0 if isinstance(row, BadRow) else _size(row)
            grown += size if size > _LARGE else _LEAST
            check_growth(where, grown, packed, when="read")
            try:
                yield number, row if isinstance(row, BadRow) else decode(without_added_nulls(row))
            except ValueError as error:
                yield number, BadRow(str(error), repr(row)[:400])


def _single(row: JsonValue) -> Row | BadRow:
    try:
        return row.to_pylist()[0]
    except (ValueError, OverflowError) as error:
        return BadRow(f"unreadable cell: {one_line(error)}", "")
