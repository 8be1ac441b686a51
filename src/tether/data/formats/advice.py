"""The way out for a file that does not hold the kind of row that is wanted: which column to add or
to name.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from tether.core.types import Comparison, Demonstration, Feedback, Problem, Prompt, StepLabels
from tether.data.formats import fields
from tether.data.formats.feedback import LABELS, RESPONSES, has_verdict
from tether.data.formats.json_rows import Row
from tether.data.formats.sides import two_answers

_SCALE = re.compile(
    r"(.*[_-])?(ratings?|scores?|stars?|grade|quality|rewards?|helpfulness|harmlessness|axes)",
    re.IGNORECASE,
)
_ANSWER = re.compile(
    r"(?<![a-z])(good|bad|better|worse|best|worst|winner|loser|win|lose|preferred|accepted|chosen|rejected|positive|negative"
    r"|answers?|responses?|completions?|reply|output)(?![a-z])",
)
_EXAMPLES = {
    Prompt: 'prompt = "question"',
    Demonstration: 'prompt = "question", response = "reply"',
    Comparison: 'prompt = "question", chosen = "good", rejected = "bad"',
    Feedback: 'prompt = "question", completion = "reply", label = "verdict"',
    StepLabels: 'prompt = "question", steps = "solution", labels = "verdicts"',
    Problem: 'question = "task", answer = "truth"',
}


def way_out(kind: type, row: Row) -> str:
    """One sentence, or two: the reason why these columns give no records of the kind, and the key
    that mends it.
    """
    reason = _REASONS[kind](row) if kind in _REASONS else ""
    return reason or (
        f"If columns have other names, name them by data.columns, for example {{ "
        f"{_EXAMPLES[kind]} }}."
    )


def answer_like(name: str) -> bool:
    """True if a column by its name holds answers."""
    return bool(_ANSWER.search(name.lower()))


def _named(row: Row, test: Callable[[str], object]) -> str:
    return next((name for name in row if name and test(name) and fields.has(row, name)), "")


def _has_response(name: str) -> bool:
    return name in (*RESPONSES, "messages", "conversations", "conversation") or answer_like(name)


def _no_comparison(row: Row) -> str:
    if two := two_answers(row):
        one, other = two.columns
        return (
            f"No column says which of {one} and {other} is better: add a column preference "
            f"that holds {one}, {other} or tie."
        )
    if (scale := _named(row, _SCALE.fullmatch)) and _named(row, _has_response):
        return (
            f"Column {scale} judges a single response: put all responses to a prompt into one row, "
            "with columns prompt, responses and scores."
        )
    return ""


def _no_feedback(row: Row) -> str:
    if (label := _named(row, LABELS.__contains__)) and not has_verdict(row):
        return (
            f"Column {label} holds {dict.get(row, label)!r:.40}, which is neither true nor "
            "false: write one of them."
        )
    if (scale := _named(row, _SCALE.fullmatch)) and _named(row, _has_response):
        return (
            f"Column {scale} is a scale and no verdict: add a column label, true for the "
            "responses that are good enough and false for the others."
        )
    return ""


_REASONS: dict[type, Callable[[Row], str]] = {Comparison: _no_comparison, Feedback: _no_feedback}
