"""InstructGPT's answers to TruthfulQA, with the scores of the truthfulness and informativeness judges.

https://github.com/openai/following-instructions-human-feedback (paper: https://arxiv.org/abs/2203.02155)
"""

from __future__ import annotations

from collections.abc import Iterator

from tether.core.types import Feedback, Message
from tether.data.formats.fields import feedback, leftover, number, text
from tether.data.formats.format import Format, Row, having


def read_answer(row: Row) -> Iterator[Feedback]:
    """An answer is desirable if both judges, `true` and `info`, give it at least one half: refusing to say anything is
    true but not desirable. Both scores stay in the metadata."""
    scores = {name: number(row.get(name), name) for name in ("true", "info")}
    metadata = leftover(row, ("id", "question", "answer")) | scores
    response = (Message("assistant", text(row, "answer")),)
    yield feedback((Message("user", text(row, "question")),), response, min(scores.values()) >= 0.5, metadata)


FORMATS = (Format("truthful_qa", having("question", "answer", "true", "info"), {Feedback: read_answer}),)
