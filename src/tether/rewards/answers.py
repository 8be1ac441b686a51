"""The place of an answer in a response: behind its thought, at the first mark that occurs."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial

from tether.core.thoughts import answer_start, with_opening
from tether.rewards.latex import boxed, last_number, read_number, unstyled
from tether.rewards.programs import fenced

_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_PHRASE = re.compile(
    r"(?:\banswer\s*[*_]*\s*(?:is|[:=])|^A:|^[#*][^\n]*\banswer[*_ \t]*$)[\s:*_]*(?:\\[\[(]\s*)?(\S[^\n]*)",
    re.IGNORECASE | re.MULTILINE,
)
_HASHES = re.compile(r"(?<!#)####(?!#)")


def find_answer(text: str, marks: Sequence[str]) -> str | None:
    """The answer behind the thought of a response, at the first of these marks that occurs. Of a
    mark that occurs more than once, the last counts. An unfinished thought has no answer.
    """
    if (start := answer_start(text)) is None:
        return None
    answer = text[start:]
    for mark in marks:
        if (place := _FINDERS[mark](answer)) is not None:
            return place
    if "hashes" in marks and _HASHES.search(answer):
        return boxed(answer) or _last(_HEADING, answer)  # all #### are headings
    return None


def format_part(pattern: str | None, text: str) -> dict[str, float]:
    """The part of a score for following a regular expression as a whole; nothing without one. A
    thought that the prompt opened counts as one of the response.
    """
    if pattern is None:
        return {}
    forms = {text.strip(), with_opening(text.strip())}
    return {"format": float(any(re.fullmatch(pattern, form, re.DOTALL) for form in forms))}


def _after_hashes(text: str) -> str | None:
    """The line at the last #### that is no heading of Markdown, or what is below the heading of the
    answer.
    """
    for mark in reversed(list(_HASHES.finditer(text))):
        rest = text[mark.end() :].strip()
        line, _, below = rest.partition("\n")
        if re.search(r"\banswer\b", line, re.IGNORECASE) and (
            phrase := _PHRASE.search(f"# {rest}")
        ):
            return boxed(rest) or phrase[1]
        # above other text an answer is a box, or a number that numbers no section
        is_heading = re.match(r"[a-z]|\d+[.)]\s", unstyled(line), re.IGNORECASE)
        is_number = not is_heading and read_number(line) is not None
        if line and (not below or is_number or "\\boxed" in line):
            return line
    return None


def _last(pattern: re.Pattern[str], text: str) -> str | None:
    matches = pattern.findall(text)
    return matches[-1].strip() or None if matches else None


_HEADING = re.compile(r"(?<!#)####(?!#)\s*(\S[^\n]*)")
_FINDERS: dict[str, Callable[[str], str | None]] = {
    "boxed": boxed,
    "hashes": _after_hashes,
    "phrase": partial(_last, _PHRASE),
    "tag": partial(_last, _TAG),
    "last-number": last_number,
    "fence": fenced,
    "whole": lambda text: text.strip() or None,
}
