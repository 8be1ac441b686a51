"""Rows out of JSON: one object a line, an array of objects, or objects one after the other, never a whole file at once."""

from __future__ import annotations

import codecs
import itertools
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, Any

from tether.core.errors import DataError
from tether.data.formats.format import Row

CHUNK = 1 << 16
LONGEST_ELEMENT = 1 << 26
"""More text than this without the end of an element or line means that the file is damaged, not that the element is long."""
DEEPEST = 100
"""Lists and objects inside one another; whoever walks over a row may do so by recursion."""

_NAMES = {dict: "an object", list: "a list", str: "a text", bool: "true or false", int: "a number", float: "a number"}
_SPACE = " \t\r\n"
_BOM = codecs.BOM_UTF8
_TOO_DEEP = f"malformed JSON: lists or objects nested more than {DEEPEST} deep"
_UNPAIRED = re.compile("[\ud800-\udfff]")


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
        for number, line in text_lines(stream, where):
            yield number, line if isinstance(line, BadRow) else _line(line)


def _spans_lines(head: bytes) -> bool:
    """Whether the first object does not end on its first line (and the next line does not begin another one)."""
    first, newline, rest = head.partition(b"\n")
    if not newline or rest.lstrip().startswith(b"{"):
        return False
    try:
        json.loads(first)
    except (ValueError, RecursionError):
        return not first.rstrip().endswith(b"}")
    return False


def text_lines(stream: IO[bytes], where: str) -> Iterator[tuple[int, str | BadRow]]:
    """The lines that hold something, with their 1-based numbers, decoded and without the white space around them."""
    for number in itertools.count(1):
        line = stream.readline(LONGEST_ELEMENT + 1)
        if not line:
            return
        if len(line) > LONGEST_ELEMENT:
            raise DataError(
                f"{where}, line {number}: longer than {LONGEST_ELEMENT >> 20} MiB. The file is damaged, or has no lines."
            )
        try:
            if words := line.removeprefix(_BOM if number == 1 else b"").decode("utf-8").strip():
                yield number, words
        except UnicodeDecodeError as error:
            bad = error.object[error.start]
            yield number, BadRow(f"not UTF-8: byte {bad:#04x} at {error.start}; save the file as UTF-8", repr(line[:200]))


def _line(line: str) -> Row | BadRow:
    try:
        return as_row(parse(line), line)
    except ValueError as error:
        return BadRow(str(error), line[:400])


def parse(words: str) -> Any:
    """The value of a whole JSON text.

    Raises:
        ValueError: it is malformed or nested too deeply; the message is a quarantined row's reason.
    """
    try:
        return json.loads(words)
    except json.JSONDecodeError as error:
        raise ValueError(f"malformed JSON: {error.msg} at column {error.pos + 1}") from None
    except ValueError:
        raise ValueError("malformed JSON: a number of thousands of digits") from None
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None


def kind_name(value: Any) -> str:
    """What JSON calls such a value, for messages."""
    return "nothing" if value is None else _NAMES.get(type(value), f"a {type(value).__name__}")


def as_row(value: Any, source: str) -> Row | BadRow:
    """The value, if it is an object."""
    return value if isinstance(value, dict) else BadRow(f"not an object: a row is {kind_name(value)}", ascii(source[:400])[1:-1])


def fault(value: Any) -> str:
    """Why a value cannot be used, wherever it came from: too deep, a text with NUL or that is no UTF-8; empty if it can."""
    level = [value]
    for _ in range(DEEPEST + 1):
        for words in level:
            if isinstance(words, str) and "\0" in words:
                return "NUL character: a text holds a byte 0; take it out"
            if isinstance(words, str) and not words.isascii() and (lone := _UNPAIRED.search(words)):
                undecoded = 0xDC80 <= ord(lone[0]) <= 0xDCFF
                return f"not UTF-8: {'undecodable byte' if undecoded else 'half a surrogate pair'}"
        inside = [
            (*outer, *outer.values()) if isinstance(outer, dict) else outer for outer in level if isinstance(outer, dict | list)
        ]
        if not inside:
            return ""
        level = list(itertools.chain.from_iterable(inside))
    return _TOO_DEEP


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
                raise self._malformed(error.msg) from None
            except ValueError:
                raise self._malformed("a number of thousands of digits") from None
            except RecursionError:
                raise self._malformed(f"lists or objects nested more than {DEEPEST} deep") from None
            if end == len(self._text) and not isinstance(value, dict | list) and self._refill():
                continue
            source = self._text[self._position : end]
            self._position = end
            return self._index, as_row(value, source)

    def _malformed(self, what: str) -> DataError:
        return DataError(
            f"{self._where}, element {self._index}: malformed JSON ({what}). What follows in the array cannot be "
            "told apart; mend the element, or write one object a line, where a bad line harms only itself."
        )

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
