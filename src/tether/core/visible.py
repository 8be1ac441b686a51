"""Text of models and strangers on a terminal or a page: nothing in it may act."""

from __future__ import annotations

import re

_ACTING = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)


def visible(text: str, longest: int | None = None) -> str:
    """The text with a visible sign for every control character but line feed and tab; what is
    beyond `longest` is counted.

    Escape sequences (which can set a window's title, rewrite what stands above or, in old
    terminals, type commands), marks that turn the direction of writing around, and halves of
    surrogate pairs, which no terminal can be sent. A carriage return before a line feed goes.
    """
    shown = _ACTING.sub(_sign, text[:longest].replace("\r\n", "\n"))
    return (
        shown
        if longest is None or len(text) <= longest
        else f"{shown} … [{len(text) - longest:,} more characters]"
    )


def _sign(match: re.Match[str]) -> str:
    code = ord(match.group())
    return chr(0x2400 + code) if code < 0x20 else "␡" if code == 0x7F else "\ufffd"
