"""Text of models and of untrusted sources, made harmless for a terminal or a page."""

from __future__ import annotations

import re

_ACTING = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]",
)


def visible(text: str, longest: int | None = None) -> str:
    """The text with a visible sign for every control character but line feed and tab. Characters
    beyond `longest` are counted.

    Signs replace escape sequences, which can set a window's title, rewrite earlier lines or, in old
    terminals, type commands. They also replace marks that reverse the direction of writing, and
    halves of surrogate pairs. A carriage return before a line feed is removed.
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
