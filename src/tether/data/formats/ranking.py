"""Rankings of K responses to one prompt, unfolded into pairs of one group: UltraFeedback, Nectar and plain lists.

https://huggingface.co/datasets/openbmb/UltraFeedback (paper: https://arxiv.org/abs/2310.01377),
https://huggingface.co/datasets/berkeley-nest/Nectar
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from tether.core.errors import DataError
from tether.core.types import Comparison, Conversation, Demonstration, Feedback, Message, Prompt
from tether.data.formats.fields import (
    as_text,
    checked_prompt,
    comparison,
    demonstration,
    leftover,
    missing,
    number,
    sequence,
    text,
)
from tether.data.formats.format import Format, Reader, Row, having
from tether.data.formats.preference import prompt_turns

MOST = 512
"""Responses of one row; so many give 130,816 pairs."""


@dataclass(frozen=True, slots=True)
class _Ranked:
    """One response; a higher `worth` is better."""

    response: str
    worth: float
    model: Any = None


@dataclass(frozen=True, slots=True)
class Ranking:
    """A prompt with its responses. `measured` says whether differences of worth mean something (scores, not ranks)."""

    prompt: Conversation
    responses: list[_Ranked]
    measured: bool
    metadata: Mapping[str, Any]


def pairs(ranking: Ranking) -> Iterator[Comparison | DataError]:
    """All pairs, the better response first; equal worth is a tie."""
    if not 2 <= (count := len(ranking.responses)) <= MOST:
        raise DataError(f"too {'few' if count < 2 else 'many'} responses: {count}, and a ranking has 2 to {MOST}")
    for one, other in combinations(ranking.responses, 2):
        better, worse = (other, one) if other.worth > one.worth else (one, other)
        metadata = dict(ranking.metadata)
        if better.model is not None or worse.model is not None:
            metadata |= {"chosen_model": better.model, "rejected_model": worse.model}
        try:
            yield comparison(
                ranking.prompt,
                (Message("assistant", better.response),),
                (Message("assistant", worse.response),),
                tie=better.worth == worse.worth,
                margin=better.worth - worse.worth if ranking.measured else None,
                metadata=metadata,
            )
        except DataError as error:
            yield error


def best(ranking: Ranking) -> Iterator[Demonstration]:
    """The response of the highest worth, the first one among equals."""
    if not ranking.responses:
        raise DataError("too few responses: the ranking is empty")
    top = max(ranking.responses, key=lambda ranked: ranked.worth)
    yield demonstration(ranking.prompt, top.response, ranking.metadata)


def asked(ranking: Ranking) -> Iterator[Prompt]:
    yield Prompt(checked_prompt(ranking.prompt), metadata=ranking.metadata)


def ultrafeedback(row: Row) -> Ranking:
    """`completions`, each with `response` and `overall_score`; a completion without a score is left out."""
    ranked = []
    for item in sequence(row.get("completions"), "completions"):
        if not isinstance(item, Mapping):
            raise DataError("not a completion: completions need response and overall_score")
        if not missing(item.get("overall_score")):
            worth = number(item["overall_score"], "overall_score")
            ranked.append(_Ranked(as_text(item.get("response"), "response"), worth, item.get("model")))
    used = ("id", "instruction", "completions", "models", "correct_answers", "incorrect_answers")
    return Ranking((Message("user", text(row, "instruction")),), ranked, True, leftover(row, used))


def nectar(row: Row) -> Ranking:
    """`answers`, each with `answer` and `rank`, 1 for the best; ranks are no measure, so there are no margins."""
    ranked = []
    for item in sequence(row.get("answers"), "answers"):
        if not isinstance(item, Mapping):
            raise DataError("not an answer: answers need answer and rank")
        ranked.append(_Ranked(as_text(item.get("answer"), "answer"), -number(item.get("rank"), "rank"), item.get("model")))
    return Ranking(prompt_turns(row, "prompt"), ranked, False, leftover(row, ("id", "prompt", "answers", "num_responses")))


def lists(row: Row) -> Ranking:
    """`responses` beside `scores` (higher is better) or `ranks` (1 is the best)."""
    measured = not missing(row.get("scores"))
    name = "scores" if measured else "ranks"
    responses, values = sequence(row.get("responses"), "responses"), sequence(row.get(name), name)
    if len(responses) != len(values):
        raise DataError(f"uneven lists: {len(responses)} responses but {len(values)} {name}")
    sign = 1.0 if measured else -1.0
    ranked = [
        _Ranked(as_text(response, "responses"), sign * number(value, name))
        for response, value in zip(responses, values, strict=True)
    ]
    used = ("id", "system", "prompt", "question", "instruction", "responses", "scores", "ranks")
    return Ranking(prompt_turns(row, "prompt", "question", "instruction"), ranked, measured, leftover(row, used))


def _readers(parse: Callable[[Row], Ranking]) -> dict[type, Reader]:
    return {
        Comparison: lambda row: pairs(parse(row)),
        Demonstration: lambda row: best(parse(row)),
        Prompt: lambda row: asked(parse(row)),
    }


# The middle of a ranking is chosen in one pair and rejected in the next: as single verdicts these would contradict.
FORMATS = (
    Format("ultrafeedback", having("instruction", "completions"), _readers(ultrafeedback), refuses=(Feedback,)),
    Format("nectar", having("prompt", "answers"), _readers(nectar), refuses=(Feedback,)),
    Format("ranking", having("prompt|question|instruction", "responses", "scores|ranks"), _readers(lists), refuses=(Feedback,)),
)
