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
from tether.core.types import Comparison, Conversation, Demonstration, Prompt, assistant, user
from tether.data.formats import fields
from tether.data.formats.format import Reader, Row

MOST = 512
"""Responses of one row; so many give 130,816 pairs."""


@dataclass(frozen=True, slots=True)
class Ranked:
    """One response; a higher `worth` is better."""

    response: str
    worth: float
    model: Any = None


@dataclass(frozen=True, slots=True)
class RankedResponses:
    """A prompt with its responses. `measured` says whether differences of worth mean something (scores, not ranks)."""

    prompt: Conversation
    responses: list[Ranked]
    measured: bool

    def pairs(self) -> Iterator[Comparison | DataError]:
        """All pairs, the better response first; equal worth is a tie."""
        if not 2 <= (count := len(self.responses)) <= MOST:
            raise DataError(f"too {'few' if count < 2 else 'many'} responses: {count}, and a ranking has 2 to {MOST}")
        yield from fields.attempt(self._pair, combinations(self.responses, 2))

    def _pair(self, two: tuple[Ranked, Ranked]) -> Comparison:
        better, worse = two if two[0].worth >= two[1].worth else two[::-1]
        models = {"chosen_model": better.model, "rejected_model": worse.model}
        tie, margin = better.worth == worse.worth, better.worth - worse.worth if self.measured else None
        sides = (assistant(better.response),), (assistant(worse.response),)
        facts = models if any(model is not None for model in models.values()) else {}
        pair = Comparison(self.prompt, *sides, margin=margin, tie=tie, probability=0.5 if tie else 1.0, metadata=facts)
        return fields.checked_comparison(pair)

    def best(self) -> Iterator[Demonstration]:
        """The response of the highest worth, the first one among equals."""
        if not self.responses:
            raise DataError("too few responses: the ranking is empty")
        yield fields.demonstration(self.prompt, max(self.responses, key=lambda ranked: ranked.worth).response)

    def question(self) -> Iterator[Prompt]:
        yield Prompt(fields.checked_prompt(self.prompt))


def ultrafeedback(row: Row) -> RankedResponses:
    """`completions`, each with `response` and `overall_score`; a completion without a score is left out."""
    ranked = _ranked(row, "completions", "response", "overall_score", 1.0)
    return RankedResponses((user(fields.text(row, "instruction")),), ranked, measured=True)


def nectar(row: Row) -> RankedResponses:
    """`answers`, each with `answer` and `rank`, 1 for the best; ranks are no measure, so there are no margins."""
    ranked = _ranked(row, "answers", "answer", "rank", -1.0)
    return RankedResponses(fields.prompt_turns(row, "prompt"), ranked, measured=False)


def _ranked(row: Row, column: str, response: str, worth: str, sign: float) -> list[Ranked]:
    """The responses that a column lists as objects; one without a score is left out, one without a rank is an error."""
    ranked = []
    for item in fields.sequence(row.get(column), column):
        if not isinstance(item, Mapping):
            raise DataError(f"not a response: {column} need {response} and {worth}")
        if sign < 0 or not fields.missing(item.get(worth)):
            value = sign * fields.number(item.get(worth), worth)
            ranked.append(Ranked(fields.as_text(item.get(response), response), value, item.get("model")))
    return ranked


def lists(row: Row) -> RankedResponses:
    """`responses` beside `scores` (higher is better) or `ranks` (1 is the best)."""
    measured = not fields.missing(row.get("scores"))
    name, sign = ("scores", 1.0) if measured else ("ranks", -1.0)
    responses, values = fields.sequence(row.get("responses"), "responses"), fields.sequence(row.get(name), name)
    if len(responses) != len(values):
        raise DataError(f"uneven lists: {len(responses)} responses but {len(values)} {name}")
    pairs = zip(responses, values, strict=True)
    ranked = [Ranked(fields.as_text(response, "responses"), sign * fields.number(value, name)) for response, value in pairs]
    return RankedResponses(fields.prompt_turns(row, "prompt", "question", "instruction"), ranked, measured)


def readers(parse: Callable[[Row], RankedResponses]) -> dict[type, Reader]:
    """Readers of a ranking: all its pairs, its best response, its prompt."""
    return {
        Comparison: lambda row: parse(row).pairs(),
        Demonstration: lambda row: parse(row).best(),
        Prompt: lambda row: parse(row).question(),
    }
