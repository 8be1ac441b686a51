"""Values as Python and numpy print them: the text that `DataFrame.to_csv` writes for lists and
objects.

Python prints single quotes, None and True; numpy prints arrays without commas, `array([...],
dtype=object)` within objects, and `np.float64(1.5)` within lists.
"""

from __future__ import annotations

import ast
import contextlib
import re
from collections.abc import Iterator

from tether.core.types import JsonValue
from tether.data.formats.json_rows import parse

_TOKEN = re.compile(
    r"""(?P<space>\s+)|(?P<text>'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")|(?P<open>[\[{(])|(?P<close>[\]})])"""
    r"""|(?P<mark>[,:=])|(?P<word>[^\s\[\](){},:='"]+)""",
    re.DOTALL,
)
_CALLS = re.compile(r"(?:np\.|numpy\.)?(?:array|str_|bool_?|float\d+|u?int\d+)")
"""Names before a parenthesis; only the value inside counts."""
_WORDS = {
    "nan": "None",
    "NaN": "None",
    "None": "None",
    "True": "True",
    "False": "False",
    "np.True_": "True",
    "np.False_": "False",
}
_NUMBER = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?")
_BRACKETS = {"(": "[", ")": "]"}
"""A tuple becomes a list."""


def cell_value(words: str) -> JsonValue:
    """The value that a cell holds as text: JSON, else what Python or numpy printed.

    Raises:
        ValueError: it is none of these, or nested too deeply; the message is a quarantined row's
            reason.
    """
    try:
        return parse(words)
    except ValueError as error:
        with contextlib.suppress(ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            return ast.literal_eval("".join(_literal(words)))
        raise error from None


def _tokens(words: str) -> Iterator[tuple[str, str]]:
    position = 0
    while position < len(words):
        token = _TOKEN.match(words, position)
        if token is None:
            raise ValueError("an open quote")
        position = token.end()
        if token.lastgroup != "space":
            yield str(token.lastgroup), token[0]


def _literal(words: str) -> Iterator[str]:
    """A printed value as a literal of Python: commas between an array's elements, no calls.

    Raises:
        ValueError: a word in it is no literal. An array that numpy cut short has such a word,
            "...".
    """
    calls: list[bool] = []  # of each open bracket: the parenthesis of a call, which is left out
    name = ""
    skipping = 0
    after_value = False
    for kind, text in _tokens(words):
        if name and text != "(":
            raise ValueError(name)
        if skipping and len(calls) == skipping and text != ")":
            continue  # `dtype=object` behind an array
        if kind == "mark":
            if text == "," and calls and calls[-1]:
                skipping = len(calls)
                continue
            after_value = False
            yield text
        elif kind == "close":
            if not calls:
                raise ValueError(text)
            is_call = calls.pop()
            skipping = 0
            after_value = True
            yield "" if is_call else _BRACKETS.get(text, text)
        elif kind == "open" and name:
            calls.append(True)
            name = ""
        elif kind == "word" and _CALLS.fullmatch(text):
            yield "," if after_value else ""
            name = text
            after_value = False
        elif after_value and not calls:
            raise ValueError("two values")
        else:
            yield "," if after_value else ""
            after_value = kind != "open"
            if kind == "open":
                calls.append(False)
            yield _word(text) if kind == "word" else _BRACKETS.get(text, text)


def _word(text: str) -> str:
    if text not in _WORDS and not _NUMBER.fullmatch(text):
        raise ValueError(text)
    return _WORDS.get(text, text)
