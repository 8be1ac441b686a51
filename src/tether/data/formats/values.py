"""Single values of a row: absent ones, texts, and lists and objects that a cell holds as JSON text.

A reason in a `DataError` reads "category: detail"; quarantined rows are counted by the category.
"""

from __future__ import annotations

import math

from tether.core.errors import DataError
from tether.core.types import JsonValue
from tether.data.formats.json_rows import fault, kind_name
from tether.data.formats.printed import cell_value


def missing(value: object) -> bool:
    """True if a cell holds nothing: null, or the NaN that data frames write for it."""
    return value is None or (isinstance(value, float) and math.isnan(value))


def as_text(value: object, name: str) -> str:
    """The text itself; numbers and booleans are written out."""
    if isinstance(value, str):
        return value
    if isinstance(value, bool | int) or (isinstance(value, float) and math.isfinite(value)):
        return str(value)
    raise DataError(
        f"not a text: column {name} holds {value if isinstance(value, float) else kind_name(value)}",
    )


def sequence(value: object, name: str) -> list[JsonValue]:
    """A list, also from the text of one, as CSV files carry it."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            value = json_value(value, name)
        except ValueError as error:
            raise DataError(
                f"not a list: column {name} holds a text that only begins like one ({error})",
            ) from None
    if isinstance(value, list | tuple):
        return list(value)
    raise DataError(f"not a list: column {name} holds {kind_name(value)}")


def sound(value: object, name: str) -> JsonValue:
    """The value itself. A value inside a cell's JSON text went past the check of its row, for which
    it was one text.
    """
    if reason := fault(value):
        raise DataError(f"{reason}, in the JSON text of column {name}")
    return value


def json_value(value: object, name: str) -> JsonValue:
    """The value of a text as JSON or Python writes it (`cell_value`); any other value as it is.

    Raises:
        ValueError: the text is malformed.
    """
    return sound(cell_value(value), name) if isinstance(value, str) else value
