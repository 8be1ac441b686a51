"""OpenAI's WebGPT comparisons: two answers, each with a score; equal scores are ties.

https://huggingface.co/datasets/openai/webgpt_comparisons (paper: https://arxiv.org/abs/2112.09332), and the same as
lists of two (`text`, `score`) in https://github.com/Linear95/DSP
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from tether.core.errors import DataError
from tether.core.types import Comparison, Conversation, Message
from tether.data.formats.fields import as_text, comparison, leftover, number, sequence, text
from tether.data.formats.format import Format, Row, having

_HUMAN, _ASSISTANT = "## Human:", "## Assistant:"


def scored(
    prompt: Conversation, answers: tuple[str, str], scores: tuple[float, float], metadata: dict[str, object]
) -> Comparison:
    """The margin is the difference of the scores."""
    if scores[1] > scores[0]:
        answers, scores = (answers[1], answers[0]), (scores[1], scores[0])
    chosen, rejected = ((Message("assistant", answer),) for answer in answers)
    margin = scores[0] - scores[1]
    return comparison(prompt, chosen, rejected, tie=margin == 0, margin=margin, metadata=metadata)


def read_lists(row: Row) -> Iterator[Comparison]:
    """`text` holds both conversations after "## Human:" and "## Assistant:", `score` a number for each."""
    both, scores = sequence(row.get("text"), "text"), sequence(row.get("score"), "score")
    if len(both) != 2 or len(scores) != 2:
        raise DataError(f"not a pair: {len(both)} texts and {len(scores)} scores")
    (question, first), (other, second) = (_split(as_text(item, "text")) for item in both)
    if question != other:
        raise DataError("no shared prompt: the two texts begin with different questions")
    values = (number(scores[0], "score"), number(scores[1], "score"))
    yield scored((Message("user", question),), (first, second), values, leftover(row, ("id", "text", "score")))


def _split(words: str) -> tuple[str, str]:
    before, human, rest = words.partition(_HUMAN)
    question, assistant, answer = rest.partition(_ASSISTANT)
    if before.strip() or not human or not assistant:
        raise DataError(f"not a transcript: no {_HUMAN} and {_ASSISTANT} in column text")
    return question.strip(), answer.strip()


def read_hub_row(row: Row) -> Iterator[Comparison]:
    """`question` (its `full_text`), `answer_0`, `answer_1`, `score_0`, `score_1`, as on the hub."""
    question = row.get("question")
    prompt = as_text(question.get("full_text"), "question.full_text") if isinstance(question, Mapping) else text(row, "question")
    values = (number(row.get("score_0"), "score_0"), number(row.get("score_1"), "score_1"))
    used = ("id", "question", "answer_0", "answer_1", "score_0", "score_1", "quotes_0", "quotes_1", "tokens_0", "tokens_1")
    answers = (text(row, "answer_0"), text(row, "answer_1"))
    yield scored((Message("user", prompt),), answers, values, leftover(row, used))


FORMATS = (
    Format("webgpt", having("question", "answer_0", "answer_1", "score_0", "score_1"), {Comparison: read_hub_row}),
    Format("webgpt_lists", having("text", "score"), {Comparison: read_lists}),
)
