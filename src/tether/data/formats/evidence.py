"""Meanings of columns that a row alone leaves open; all rows of a source decide them together.

- A text in `reasoning` is the thought before a reply, or a label such as "on", "off" or "high".
- A number beside the options of a question counts them from 0 or from 1, or is one of them.
"""

from __future__ import annotations

import logging
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from tether.core.errors import DataError
from tether.core.once import once
from tether.core.types import Row
from tether.data.formats.fields import options
from tether.data.formats.messages import SPEAKER, THOUGHTS, NoThought
from tether.data.formats.solved import CORRECT
from tether.data.formats.values import list_in

FEWEST = 8
"""Questions from which on numbers that may count from 0 or from 1 are refused, not only named."""
_COLUMNS = (("opa", "opb", "opc", "opd"), tuple("ABCDEFGHIJ"))
_SHORT = re.compile(r"[\w+/ -]{1,40}")
"""A text without the marks of a sentence."""
_MODES = (
    "on off yes no true false none null n a na low medium mid high xhigh minimal max auto default "
    "enable enabled disable disabled think nothink thinking non reasoning mode effort detailed "
    "short long fast slow"
)
"""Words that say whether, or how much, a model thinks."""
_LOG = logging.getLogger("tether.data")


class _Number(NamedTuple):
    """A number beside options: its column, itself, and how many options there are."""

    column: str
    value: int
    count: int


@dataclass
class Evidence:
    """All rows of a source, which are read a second time only where a row leaves something open.

    Args:
        source: its name. rows: opens them.
    """

    source: str
    rows: Callable[[], Iterable[Row]]

    def settled(self, row: Row) -> Row:
        """The row with its labels marked, and its right option counted from 0.

        Raises:
            DataError: all rows together leave it open as well.
        """
        row = _with_thoughts(row, self._marked)
        number = _number(row)
        if number is None:
            return row
        return row | {number.column: number.value - self._firsts[number.column]}

    def _marked(
        self,
        column: str,
        words: str,
    ) -> str:
        """A text that has the name of a thought, as a label if it is one."""
        if not _SHORT.fullmatch(words.strip()):
            return words
        own = self._texts[column]
        if None not in own and (
            all(map(_is_mode, own)) or max(FEWEST, 2 * len(own)) <= own.total()
        ):
            return NoThought(words)
        if None in own and _is_mode(words):
            raise DataError(
                f"ambiguous thought: column {column} holds {words!r:.40}, a label, and thoughts in "
                "other rows. Empty such cells, or rename the column",
            )
        return words

    @cached_property
    def _texts(self) -> dict[str, Counter[str | None]]:
        """The short texts of each column of thoughts; all others count as None."""
        texts: dict[str, Counter[str | None]] = defaultdict(Counter)

        def count(column: str, words: str) -> str:
            bare = words.strip().lower()
            texts[column][bare if _SHORT.fullmatch(bare) else None] += 1
            return words

        for row in self.rows():
            _with_thoughts(row, count)
        return texts

    @cached_property
    def _firsts(self) -> dict[str, int]:
        """By column the number of the first option."""
        numbers = Counter(filter(None, map(_number, self.rows())))
        return {
            column: _first(
                self.source,
                column,
                Counter({n: m for n, m in numbers.items() if n.column == column}),
            )
            for column in {number.column for number in numbers}
        }


def _first(
    source: str,
    column: str,
    numbers: Counter[_Number],
) -> int:
    starts = [
        start
        for start in (0, 1)
        if all(start <= number.value < number.count + start for number in numbers)
    ]
    if starts != [0, 1]:
        return starts[0] if starts else 0
    what = f"column {column} holds no 0 and no number of a last option, so it may count from 0 or 1"
    if numbers.total() >= FEWEST:
        raise DataError(
            f"ambiguous answer: {what}. Write the letter or the text of the right option",
        )
    once(_LOG.warning, "%s: %s; it is read as counting from 0", source, what)
    return 0


def _number(row: Row) -> _Number | None:
    """The number beside the options of a row; None if a label or the text of an option decides."""
    texts = _options(row)
    column = next((name for name in CORRECT if row.get(name) is not None), "") if texts else ""
    value = row.get(column)
    word = str(value).strip()
    if isinstance(value, bool | float) or not word.isdecimal() or len(word) > 9 or word in texts:
        return None
    return _Number(column, int(word), len(texts))


def _options(row: Row) -> list[str]:
    """The texts of the options; nothing if numbers are their labels."""
    with suppress(DataError):
        if pairs := options(row):
            return [] if any(label.isdecimal() for label, _ in pairs) else [t for _, t in pairs]
    columns = next((names for names in _COLUMNS if row.keys() >= {*names[:2]}), ())
    return list_in(row, "endings") or [str(row[n]) for n in columns if row.get(n) is not None]


def _with_thoughts(row: Row, change: Callable[[str, str], str]) -> Row:
    """The row with other texts under the names of thoughts, its own and those of turns in it."""

    def of(cells: Row, before: str) -> Row:
        given = [n for n in THOUGHTS if isinstance(cells.get(n), str) and cells[n].strip()]
        return {**cells, **{n: change(before + n, cells[n]) for n in given}} if given else cells

    turns = {
        column: [
            of(turn, f"{column}.")
            if isinstance(turn, dict) and not turn.keys().isdisjoint(SPEAKER)
            else turn
            for turn in listed
        ]
        for column, value in row.items()
        if isinstance(value, list) or (isinstance(value, str) and any(n in value for n in THOUGHTS))
        if (listed := list_in(row, column))
    }
    return of({**row, **turns}, "")


def _is_mode(words: str | None) -> bool:
    return set(re.findall(r"[^\W\d_]+", str(words).lower())) <= {*_MODES.split()}
