"""Rows out of JSON: one object a line, read line by line; an array of objects, or objects one after
the other, read at once.
"""

from __future__ import annotations

import codecs
import io
import itertools
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import IO

from tether.core.errors import DataError
from tether.core.types import JsonValue, Row

CHUNK = 1 << 16
LONGEST_LINE = 1 << 26
"""More text than this without the end of a line means that the file is damaged, not that the line
is long.
"""
DEEPEST = 100
"""Depth limit of nested lists and objects, so that code may walk over a row by recursion."""

_NAMES = {
    dict: "an object",
    list: "a list",
    str: "a text",
    bool: "true or false",
    int: "a number",
    float: "a number",
}
_DECODER = json.JSONDecoder()
_SOLID = re.compile(r"[^ \t\r\n]")
_BOM = codecs.BOM_UTF8
_TOO_DEEP = f"lists or objects nested more than {DEEPEST} deep"
_UNPAIRED = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True)
class BadRow:
    """A thing that is no row, in the place of one."""

    reason: str
    excerpt: str


Numbered = Iterator[tuple[int, Row | BadRow]]
"""Rows with the numbers of their lines."""


def rows(
    stream: io.BufferedReader,
    is_lines: bool,
    where: str,
) -> Numbered:
    """The rows of a buffered binary stream with their 1-based line or element numbers.

    Args:
        is_lines: the file says that it holds one object a line; only an array at its start can
            overrule that.
    """
    head = bytes(stream.peek(CHUNK)).removeprefix(_BOM).lstrip()
    is_array = head.startswith(b"[")
    if is_array or (not is_lines and head.startswith(b"{") and _spans_lines(head)):
        yield from _elements(stream, where, is_array)
    else:
        yield from text_lines(stream, where, _line)


def _spans_lines(head: bytes) -> bool:
    """True if the first object does not end on its first line (and the next line does not begin
    another one).
    """
    first, newline, rest = head.partition(b"\n")
    return (
        bool(newline) and not first.rstrip().endswith(b"}") and not rest.lstrip().startswith(b"{")
    )


def text_lines(
    stream: IO[bytes],
    where: str,
    read: Callable[[str], Row | BadRow],
) -> Numbered:
    """Results of `read` for the lines that hold something, with their 1-based numbers.

    `read` gets a line without the white space around it.
    """
    for number, line in enumerate(iter(lambda: stream.readline(LONGEST_LINE + 1), b""), 1):
        if len(line) > LONGEST_LINE:
            raise DataError(
                f"{where}, line {number}: longer than {LONGEST_LINE >> 20} MiB. The file is "
                "damaged, or has no lines.",
            )
        try:
            if words := line.removeprefix(_BOM if number == 1 else b"").decode("utf-8").strip():
                yield number, read(words)
        except UnicodeDecodeError as error:
            bad = error.object[error.start]
            yield (
                number,
                BadRow(
                    f"not UTF-8: byte {bad:#04x} at {error.start}; save the file as UTF-8",
                    repr(line[:200]),
                ),
            )


def _line(line: str) -> Row | BadRow:
    try:
        return _as_row(parse(line), line)
    except ValueError as error:
        return BadRow(str(error), line[:400])


def parse(words: str) -> JsonValue:
    """The value of a whole JSON text.

    Raises:
        ValueError: it is malformed or nested too deeply; the message is a quarantined row's reason.
    """
    try:
        return json.loads(words)
    except (ValueError, RecursionError) as error:
        place = f" at column {error.pos + 1}" if isinstance(error, json.JSONDecodeError) else ""
        raise ValueError(f"malformed JSON: {_complaint(error)}{place}") from None


def _complaint(error: ValueError | RecursionError) -> str:
    """The fault of a text that a decoder's error names."""
    if isinstance(error, json.JSONDecodeError):
        return error.msg
    return _TOO_DEEP if isinstance(error, RecursionError) else "a number of thousands of digits"


def kind_name(value: object) -> str:
    """The word of JSON for such a value, for messages."""
    if value is None:
        return "nothing"
    return next(
        (name for kind, name in _NAMES.items() if isinstance(value, kind)),
        f"a {type(value).__name__}",
    )


def _as_row(value: object, source: str) -> Row | BadRow:
    """The value, if it is an object."""
    return (
        value
        if isinstance(value, dict)
        else BadRow(f"not an object: a row is {kind_name(value)}", ascii(source[:400])[1:-1])
    )


def fault(value: object, depth: int = 0) -> str:
    """The reason why a value cannot be used: too deep, a text with NUL or that is no UTF-8; empty
    if it can.
    """
    if isinstance(value, str):
        if "\0" in value:
            return "NUL character: a text holds a byte 0; take it out"
        if value.isascii() or not (lone := _UNPAIRED.search(value)):
            return ""
        return (
            "not UTF-8: "
            f"{'undecodable byte' if 0xDC80 <= ord(lone[0]) <= 0xDCFF else 'half a surrogate pair'}"
        )
    if not isinstance(value, dict | list):
        return ""
    if depth == DEEPEST:
        return f"malformed JSON: {_TOO_DEEP}"
    # `dict.values` looks at a row that records its reads without reading.
    inside = itertools.chain(value, dict.values(value)) if isinstance(value, dict) else value
    return next((reason for item in inside if (reason := fault(item, depth + 1))), "")


def _elements(
    stream: IO[bytes],
    where: str,
    is_array: bool,
) -> Numbered:
    """The elements of an array, or the values of a file that holds one after the other, with their
    1-based numbers.

    The whole file is in memory meanwhile.
    """
    text = io.TextIOWrapper(
        stream,
        encoding="utf-8-sig",
        errors="surrogateescape",
        newline="",
    ).read()
    try:
        values = json.loads(text) if is_array else [*_values(text)]
    except (ValueError, RecursionError) as error:
        place = ""
        if isinstance(error, json.JSONDecodeError):
            if error.pos >= len(text.rstrip()) or error.msg.startswith("Unterminated string"):
                raise DataError(
                    f"{where} is cut off: its JSON does not end. Copy or download the file again.",
                ) from None
            place = f", line {error.lineno}"
        advice = "Mend it, or write one object a line, where a bad line harms only itself."
        raise DataError(f"{where}{place}: malformed JSON ({_complaint(error)}). {advice}") from None
    for number, value in enumerate(values, 1):
        yield number, value if isinstance(value, dict) else _as_row(value, json.dumps(value))


def _values(text: str) -> Iterator[JsonValue]:
    position = 0
    while solid := _SOLID.search(text, position):
        value, position = _DECODER.raw_decode(text, solid.start())
        yield value
