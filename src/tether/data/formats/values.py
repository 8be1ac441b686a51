"""Single values of a row: absent ones, texts, and lists and objects, also where a cell holds them as
text; some functions look, others read.

A text may be JSON, or what `DataFrame.to_csv` writes for lists and objects: Python prints single
quotes, None and True; numpy prints arrays without commas, `array([...], dtype=object)` within
objects, and `np.float64(1.5)` within lists.

A reason in a `DataError` reads "category: detail"; quarantined rows are counted by the category.
"""

from __future__ import annotations

import ast
import contextlib
import json
import math
import re

from tether.core.errors import DataError
from tether.core.types import JsonValue, Row
from tether.data.formats.json_rows import fault, kind_name, parse

_TOKEN = re.compile(
    r"""\s+|(?P<text>'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")|(?P<rest>,\s*dtype=[^\s()]+)"""
    r"""|(?P<call>(?:np\.|numpy\.)?(?:array|str_|bool_?|float\d+|u?int\d+)\()|(?P<open>[\[{(])"""
    r"""|(?P<close>[\]})])|(?P<mark>[,:])|(?P<word>[^\s\[\](){},:='"]+)|(?P<bad>.)""",
    re.DOTALL,
)
"""Of a call only the value inside counts, without the type of an array."""
_WORDS = {"nan": "None", "NaN": "None", "np.True_": "True", "np.False_": "False"}
_BLANK = re.compile(r"\A[\s\ufeff]+")


def begins_with(value: object, *brackets: str) -> bool:
    """True for a text that begins with one of these, behind white space and a mark of byte order."""
    return isinstance(value, str) and _BLANK.sub("", value, 1).startswith(brackets)


def structure_in(value: object) -> JsonValue:
    """The list or object that a cell holds as text; any other value as it is."""
    if isinstance(value, str) and begins_with(value, "[", "{"):
        with contextlib.suppress(ValueError):
            inner = cell_value(value)
            return inner if isinstance(inner, list | dict) and not fault(inner) else value
    return value


def cell_value(words: str) -> JsonValue:
    """The value that a cell holds as text: JSON, else what Python or numpy printed.

    Raises:
        ValueError: it is none of these, or nested too deeply; the message is a quarantined row's
            reason.
    """
    words = _BLANK.sub("", words, 1)
    try:
        return parse(words)
    except ValueError as error:
        with contextlib.suppress(
            ValueError,
            SyntaxError,
            TypeError,
            MemoryError,
            RecursionError,
        ):
            value = ast.literal_eval(_literal(words))
            if words.startswith("(") or not isinstance(value, tuple):
                return json.loads(json.dumps(value))  # tuples become lists
        raise error from None


def _literal(words: str) -> str:
    """A printed value as a literal of Python: commas between an array's elements, no calls.

    Raises:
        ValueError: it has an open quote.
    """
    pieces = []
    after_value = False
    for token in _TOKEN.finditer(words):
        kind = token.lastgroup
        if kind == "bad":
            raise ValueError(token[0])
        if kind in (None, "rest"):
            continue
        if after_value and kind not in ("close", "mark"):
            pieces.append(",")
        after_value = kind in ("text", "word", "close")
        pieces.append("(" if kind == "call" else _WORDS.get(token[0], token[0]))
    return "".join(pieces)


TRUE = frozenset({"true", "1", "1.0", "yes", "+"})
FALSE = frozenset({"false", "0", "0.0", "no", "-"})
"""Words of verdicts and flags."""


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
    if begins_with(value, "["):
        try:
            value = sound(cell_value(str(value)), name)
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


def list_in(row: Row, name: str) -> list[JsonValue]:
    """The list that a cell holds; empty for any other value. Looking does not count as reading."""
    value = structure_in(dict.get(row, name))
    return list(value) if isinstance(value, list | tuple) else []


def object_in(row: Row, name: str) -> Row:
    """The object that a cell holds; empty for any other value. Looking does not count as
    reading.
    """
    value = structure_in(dict.get(row, name))
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
