"""Single responses with a verdict: good or bad.

KTO: `messages` + `label`, or `prompt`, `completion`, `label`
(https://huggingface.co/docs/trl/dataset_formats#unpaired-preference,
https://github.com/hiyouga/LLaMA-Factory/blob/main/data/README.md,
https://arxiv.org/abs/2402.01306); thumbs of users; safety
(https://huggingface.co/datasets/PKU-Alignment/BeaverTails).
TruthfulQA: InstructGPT's answers with the scores of two judges
(https://github.com/openai/following-instructions-human-feedback, https://arxiv.org/abs/2203.02155).

A number on a scale is no verdict: nothing says which numbers are good.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tether.core.errors import DataError
from tether.core.types import Feedback, Row, assistant, user
from tether.data.formats.conversations import PROMPTS, TURNS_BEFORE, conversation
from tether.data.formats.fields import (
    boolean,
    cell_numbers,
    feedback,
    first,
    has,
    number,
    prompt_turns,
    text,
    turns,
)
from tether.data.formats.table import LISTS

LABELS = LISTS["labels"]
"""Columns of a verdict on one response."""
RESPONSES = LISTS["judged"]
_GOOD, _BAD = (frozenset(LISTS[words]) for words in ("good", "bad"))


def is_good(value: object, name: str) -> bool:
    """True for a good response: a boolean, 0 or 1, or a word such as good, thumbs_up or
    accepted.
    """
    word = (
        "".join(str(value).lower().split()).replace("_", "").replace("-", "")
        if isinstance(value, str)
        else ""
    )
    if word in _GOOD | _BAD:
        return word in _GOOD
    return boolean(value, name)


def _label(row: Row) -> str | None:
    """The column of the verdict: the first that can be one, else the first that holds something."""
    given = [name for name in LABELS if has(row, name)]
    return next(
        (name for name in given if _is_verdict(dict.get(row, name), name)),
        given[0] if given else None,
    )


def _is_verdict(value: object, name: str) -> bool:
    try:
        is_good(value, name)
    except DataError:
        return False
    return True


def has_verdict(row: Row) -> bool:
    """True if a column of a verdict holds one, or nothing at all."""
    name = _label(row)
    return name is None or _is_verdict(dict.get(row, name), name)


def scaled(rows: Sequence[Row]) -> str:
    """The reason why labels are no verdicts: a number among them that is neither 0 nor 1."""
    for name in dict.fromkeys(filter(None, map(_label, rows))):
        if points := sorted(cell_numbers(rows, name) - {0, 1}):
            return (
                f"column {name} holds {points[0]:g}, so it is a scale and no verdict. Write true "
                "for the responses that are good "
                f"enough and false for the others, into {name} or another column, and name that "
                "one by data.columns: "
                f'{{ label = "..." }}'
            )
    return ""


def read_feedback(row: Row) -> Feedback:
    """The last assistant turn is the response that the label judges."""
    name = _label(row)
    if name is None:
        raise DataError("unreadable label: nothing in column label")
    desirable = is_good(row[name], name)
    if has(row, "messages", "conversations", "conversation"):
        messages = conversation(row)
        prompt = messages[:-1]
        response = messages[-1:]
    else:
        prompt = prompt_turns(row, *PROMPTS, *TURNS_BEFORE)
        column, value = first(row, *RESPONSES)
        response = turns(value, "assistant", column)
    return feedback(prompt, response, desirable)


def read_truthful_qa(row: Row) -> Feedback:
    """An answer is desirable if both judges, `true` and `info`, give it at least one half. Refusing
    every statement is true but undesirable. Both scores stay in the metadata.
    """
    scores = {name: number(row.get(name), name) for name in ("true", "info")}
    answer = (assistant(text(row, "answer")),)
    question = (user(text(row, "question")),)
    return replace(
        feedback(
            question,
            answer,
            min(scores.values()) >= 0.5,
        ),
        metadata=scores,
    )
