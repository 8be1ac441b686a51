"""Rows in memory as plain values of JSON: out of lists, generators, dicts of columns, frames,
tables and data sets.
"""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import enum
import inspect
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

from tether.core.errors import STOPS, ConfigError, DataError, TetherError, error_words
from tether.core.types import Demonstration, Entries, Json, JsonValue, Problem, Prompt
from tether.data.formats.arrow import without_added_nulls
from tether.data.formats.json_tables import no_column_twice, rows_of_columns
from tether.rewards.surroundings import surroundings

_NOTHING = ("NAType", "NaTType")
"""Types of what pandas writes where nothing is."""
_AS_TEXT = (datetime.date, datetime.time, datetime.timedelta, decimal.Decimal, uuid.UUID, PurePath)


def rows_in(given: object, name: str) -> list[Json]:
    """The rows of a container, as plain values of JSON.

    Args:
        given: a list, tuple, generator or data set of rows; a dict of lists; a `datasets.Dataset`;
            a table of pandas, polars or pyarrow. A row is a text, a list of messages, a dict of
            columns, a named tuple or a record of `tether.core.types`.
        name: of the argument, for messages.

    Raises:
        ConfigError: it is no container of rows, or a row or a cell in it is nothing of the kind.
    """
    rows: list[Json] = []
    try:
        with surroundings(_source(given, name)):
            rows.extend(_rows(given, name))
    except DataError as error:
        raise ConfigError(f"{name}: {error}") from None
    except (TetherError, *STOPS):
        raise
    except BaseException as error:  # whatever the user's generator or data set does
        raise ConfigError(
            f"{_source(given, name)} raised {error_words(error)} after {len(rows)} rows",
        ) from error
    if not rows:
        raise ConfigError(f"{name} holds no row")
    return rows


def _source(given: object, name: str) -> str:
    """The words for what gives the rows: of a generator its function and file."""
    if inspect.isgenerator(given):
        return (
            f"{name}: the generator {given.__qualname__} ({Path(given.gi_code.co_filename).name})"
        )
    return f"{name}: the {type(given).__name__}"


def _rows(given: object, name: str) -> Iterator[Json]:
    if isinstance(given, Mapping):
        yield from _of_dict(given, name)
        return
    if (table := _table(given, name)) is not None:
        for number, row in enumerate(table):
            yield without_added_nulls(_filled(jsonable(dict(row), f"{name}[{number}]")))
        return
    for number, row in enumerate(_items(given, name)):
        yield _row(row, f"{name}[{number}]")


def _of_dict(given: Mapping[object, object], name: str) -> Iterable[Json]:
    """The rows of a dict of columns.

    Raises:
        ConfigError: it holds several data sets, or one row.
    """
    methods = ("column_names", "iterrows", "iter_rows")  # of data sets and frames
    if splits := [
        str(key) for key, value in given.items() if any(hasattr(value, name) for name in methods)
    ]:
        raise ConfigError(
            f"{name} is a {type(given).__name__} with the splits {', '.join(splits)}: give one of "
            f"them, {name}[{splits[0]!r}]",
        )
    columns = {str(key): jsonable(value, f"{name}[{key!r}]") for key, value in given.items()}
    rows = rows_of_columns(columns) if columns else []
    if rows is None:
        raise ConfigError(
            f"{name} is a dict with the keys {', '.join(columns):.200}: give a list of such rows, "
            "a dict of columns (all its values are lists), or the keys of a data table with path",
        )
    return rows


def _table(given: Any, name: str) -> Iterable[Entries] | None:
    """The rows of a frame or a table as dicts; None if it is something else."""
    if hasattr(given, "iterrows"):  # pandas; an index with a name is a column
        frame = (
            given.reset_index() if any(label is not None for label in given.index.names) else given
        )
        if frame.columns.nlevels > 1:
            raise ConfigError(
                f"{name} has columns of several levels: give it one level, as "
                "frame.columns = [...] does",
            )
        no_column_twice([str(column) for column in frame.columns], name)
        return ({str(key): value for key, value in row.items()} for row in frame.to_dict("records"))
    if hasattr(given, "iter_rows"):  # polars
        return given.iter_rows(named=True)
    # pyarrow
    if (hasattr(given, "to_pylist") or hasattr(given, "read_all")) and hasattr(given, "schema"):
        no_column_twice(given.schema.names, name)
        return (given if hasattr(given, "to_pylist") else given.read_all()).to_pylist()
    # datasets
    return given if hasattr(given, "column_names") and hasattr(given, "features") else None


def _items(given: Any, name: str) -> Iterable[object]:
    """The rows of anything else that holds some.

    Raises:
        ConfigError: it holds none, or in no order.
    """
    if hasattr(given, "collate_fn") and hasattr(given, "dataset"):
        raise ConfigError(
            f"{name} is a {type(given).__name__}, which gives batches: hand over "
            f"its data set, {name}.dataset",
        )
    if hasattr(given, "collect_schema") or hasattr(given, "collect"):
        raise ConfigError(
            f"{name} is a {type(given).__name__}, which is not computed yet: give {name}.collect()",
        )
    if isinstance(given, set | frozenset):
        raise ConfigError(f"{name} is a {type(given).__name__}, which has no order: give a list")
    if isinstance(given, Iterable) and not isinstance(given, bytes | bytearray):
        return given
    if (
        hasattr(given, "__getitem__")
        and hasattr(given, "__len__")
        and not isinstance(given, bytes | bytearray)
    ):
        return (given[place] for place in range(len(given)))  # torch's data sets with a length
    called = ". It is a function: hand over what it returns" if callable(given) else ""
    raise ConfigError(
        f"{name} is a {type(given).__name__}: give a file, a hub data set, or rows{called}",
    )


def _row(row: Any, where: str) -> Json:
    if hasattr(row, "as_py"):  # a value of pyarrow
        row = row.as_py()
    if isinstance(row, str):
        return {"prompt": str(row)}
    if isinstance(row, Mapping):
        return jsonable(row, where)
    # columns that came with it are metadata of the written row
    if isinstance(row, Prompt | Problem | Demonstration) and row.row:
        row = dataclasses.replace(row, row={}, metadata={**row.row, **row.metadata})
    if dataclasses.is_dataclass(row) and not isinstance(row, type):
        return jsonable(dataclasses.asdict(row, dict_factory=_with_content), where)
    if (fields := _fields_of(row)) is not None:
        return jsonable(fields(), where)
    # an array of messages
    turns: Any = row.tolist() if not isinstance(row, type) and hasattr(row, "tolist") else row
    if (
        isinstance(turns, Sequence)
        and turns
        and all(isinstance(turn, Mapping) and "role" in turn for turn in turns)
    ):
        return {"messages": [jsonable(turn, where) for turn in turns]}
    raise ConfigError(
        f"{where} is {row!r:.60}: a row is a text, a list of messages ({{'role': …, 'content': "
        "…}), a dict of columns, or a record of tether.core.types",
    )


def _fields_of(row: object) -> Callable[[], Entries] | None:
    """The method of a named tuple or of a pydantic model that gives its fields as a dict."""
    return next(
        (getattr(row, name) for name in ("_asdict", "model_dump") if hasattr(type(row), name)),
        None,
    )


def _with_content(values: Iterable[tuple[str, object]]) -> Json:
    """Fields that differ from their default value, and every text of a turn."""
    return {
        name: value
        for name, value in values
        if name == "content"
        or (value not in (None, "", (), {}) and (name, value) != ("train", True))
    }


def _filled(row: Json) -> Json:
    """The row of a frame with null in place of NaN, which frames write where nothing is."""
    return {name: None if value != value else value for name, value in row.items()}


def jsonable(value: object, where: str) -> JsonValue:
    """A value as JSON has it: of numpy, torch and pandas what Python has for it, dates and paths as
    texts.

    Raises:
        ConfigError: it is an image, a function or another object without such a form.
    """
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value).__name__ in _NOTHING:
        return None
    if isinstance(value, enum.Enum):
        return jsonable(value.value, where)
    if isinstance(value, str | int | float):  # numpy's float64 and str_
        return next(kind(value) for kind in (str, int, float) if isinstance(value, kind))
    if isinstance(value, Mapping):
        return {str(key): jsonable(inner, f"{where}[{key!r}]") for key, inner in value.items()}
    if isinstance(value, _AS_TEXT):
        return value.isoformat() if isinstance(value, datetime.date | datetime.time) else str(value)
    if (fields := _fields_of(value)) is not None:
        return jsonable(fields(), where)
    if isinstance(value, list | tuple):
        return [jsonable(inner, f"{where}[{place}]") for place, inner in enumerate(value)]
    for method in ("tolist", "to_list", "as_py"):  # numpy and torch; pandas and polars; pyarrow
        if hasattr(value, method):
            return jsonable(getattr(value, method)(), where)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return jsonable(dataclasses.asdict(value), where)
    raise ConfigError(
        f"{where} holds a {type(value).__name__}: a cell is a text, a number, true or false, a "
        "list or a dict. Take it out",
    )
