"""Rows out of JSON: one object a line, an array of objects, or objects one after the other, never a whole file at once."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, Any

from tether.core.errors import DataError
from tether.data.formats.format import Row

CHUNK = 1 << 16
LONGEST_ELEMENT = 1 << 26
"""More text than this without the end of an element means that the file is damaged, not that the element is long."""

_SPACE = " \t\r\n"
_BOM = codecs.BOM_UTF8


@dataclass(frozen=True, slots=True)
class BadRow:
    """What stands where a row should be."""

    reason: str
    excerpt: str


def rows(stream: Any, is_lines: bool, where: str) -> Iterator[tuple[int, Row | BadRow]]:
    """The rows of a buffered binary stream with their 1-based line or element numbers.

    Args:
        is_lines: the file says that it holds one object a line; only an array at its start can overrule that.
    """
    head = bytes(stream.peek(CHUNK)).removeprefix(_BOM).lstrip()
    if head.startswith(b"["):
        yield from _Elements(stream, where).array()
    elif not is_lines and head.startswith(b"{") and _spans_lines(head):
        yield from _Elements(stream, where).sequence()
    else:
        yield from _lines(stream)


def _spans_lines(head: bytes) -> bool:
    """Whether the first object does not end on its first line (and the next line does not begin another one)."""
    first, newline, rest = head.partition(b"\n")
    if not newline or rest.lstrip().startswith(b"{"):
        return False
    try:
        json.loads(first)
    except ValueError:
        return not first.rstrip().endswith(b"}")
    return False


def _lines(stream: IO[bytes]) -> Iterator[tuple[int, Row | BadRow]]:
    for number, line in enumerate(stream, 1):
        if number == 1:
            line = line.removeprefix(_BOM)
        if not line.strip():
            continue
        try:
            yield number, _line(line.decode("utf-8").strip())
        except UnicodeDecodeError as error:
            yield number, BadRow(f"not UTF-8: byte {line[error.start]:#04x} at {error.start}", repr(line[:200]))


def _line(line: str) -> Row | BadRow:
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        return BadRow(f"malformed JSON: {error.msg} at column {error.pos + 1}", line[:400])
    except (ValueError, RecursionError) as error:
        return BadRow(f"malformed JSON: {error}", line[:400])
    return as_row(value, line)


def as_row(value: Any, source: str) -> Row | BadRow:
    """The value, if it is an object whose texts can be written as UTF-8 again."""
    if not isinstance(value, dict):
        return BadRow(f"not an object: a row is a {type(value).__name__}", source[:400])
    if "\\ud" in source or "\\uD" in source or not source.isascii():
        try:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError as error:
            lone = error.object[error.start]
            kind = "not UTF-8: undecodable byte" if "\udc80" <= lone <= "\udcff" else "not UTF-8: half a surrogate pair"
            return BadRow(kind, source[:400].encode("utf-8", "backslashreplace").decode())
    return value


class _Elements:
    """A window that moves over the text and decodes one element after the other."""

    def __init__(self, stream: IO[bytes], where: str) -> None:
        self._stream = stream
        self._where = where
        self._decode = codecs.getincrementaldecoder("utf-8-sig")("surrogateescape").decode
        self._decoder = json.JSONDecoder()
        self._text = ""
        self._position = 0
        self._ended = False
        self._index = 0

    def array(self) -> Iterator[tuple[int, Row | BadRow]]:
        self._next_character()
        self._position += 1
        while (character := self._next_character()) != "]":
            if character == ",":
                self._position += 1
            elif not character:
                raise DataError(f"{self._where} is cut off: its JSON array does not end. Copy or download the file again.")
            else:
                yield self._element()
        self._position += 1
        if rest := self._next_character():
            raise DataError(
                f"{self._where}: {rest!r} follows the end of the JSON array; a file holds one array, or one object a line."
            )

    def sequence(self) -> Iterator[tuple[int, Row | BadRow]]:
        while self._next_character():
            yield self._element()

    def _element(self) -> tuple[int, Row | BadRow]:
        self._index += 1
        while True:
            try:
                value, end = self._decoder.raw_decode(self._text, self._position)
            except json.JSONDecodeError as error:
                if self._may_continue(error) and self._refill():
                    continue
                raise DataError(
                    f"{self._where}, element {self._index}: malformed JSON ({error.msg}). What follows in the array cannot be "
                    "told apart; mend the element, or write one object a line, where a bad line harms only itself."
                ) from None
            except (ValueError, RecursionError) as error:
                raise DataError(f"{self._where}, element {self._index}: malformed JSON ({error}).") from None
            if end == len(self._text) and not isinstance(value, dict | list) and self._refill():
                continue
            source = self._text[self._position : end]
            self._position = end
            return self._index, as_row(value, source)

    def _may_continue(self, error: json.JSONDecodeError) -> bool:
        """Whether the error is only that the window ends here."""
        if len(self._text) - self._position > LONGEST_ELEMENT:
            return False
        return error.msg.startswith("Unterminated string") or error.pos >= len(self._text) - 16

    def _next_character(self) -> str:
        """The next character that is not white space; empty at the end of the file."""
        while True:
            while self._position < len(self._text):
                if self._text[self._position] not in _SPACE:
                    return self._text[self._position]
                self._position += 1
            if not self._refill():
                return ""

    def _refill(self) -> bool:
        """More text in the window, at least as much as is left in it, so that long elements cost linear time."""
        if self._ended:
            return False
        self._text = self._text[self._position :]
        self._position = 0
        chunk = self._stream.read(max(CHUNK, len(self._text)))
        self._ended = not chunk
        self._text += self._decode(chunk, self._ended)
        return True
