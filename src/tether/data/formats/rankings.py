"""Several responses to one prompt, with a score or a rank each; they are unfolded into all their
pairs, which are one group.

- UltraFeedback: https://huggingface.co/datasets/openbmb/UltraFeedback,
  https://arxiv.org/abs/2310.01377
- Nectar: https://huggingface.co/datasets/berkeley-nest/Nectar
- answers of Stack Exchange: https://huggingface.co/datasets/HuggingFaceH4/stack-exchange-preferences
- plain lists, also as distilabel writes them: https://distilabel.argilla.io
- OpenAI's WebGPT comparisons, two answers with a score each:
  https://huggingface.co/datasets/openai/webgpt_comparisons, https://arxiv.org/abs/2112.09332
- the same as lists of two: https://github.com/Linear95/DSP
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations

from tether.core.errors import DataError
from tether.core.types import (
    Comparison,
    Conversation,
    Demonstration,
    JsonValue,
    Prompt,
    Record,
    assistant,
    user,
)
from tether.data.formats import fields
from tether.data.formats.cells import leave_out
from tether.data.formats.conversations import MOST, PROMPTS, TURNS_BEFORE
from tether.data.formats.json_rows import Row

LISTS = ("responses", "generations", "completions", "outputs")
SCORES = ("scores", "ratings", "rating")
RANKS = ("ranks", "rank")


@dataclass(frozen=True, slots=True)
class Ranked:
    """One response; a higher `worth` is better."""

    response: Conversation
    worth: float
    model: JsonValue = None


@dataclass(frozen=True, slots=True)
class RankedResponses:
    """A prompt with its responses. `measured` says whether differences of worth mean something
    (scores, not ranks).
    """

    prompt: Conversation
    responses: list[Ranked]
    measured: bool
    num_unscored: int = 0

    def pairs(self) -> Iterator[Comparison | DataError]:
        """All pairs, the better response first; equal worth is a tie. Responses without a score are
        in none.
        """
        if self.num_unscored:
            yield fields.LeftOutError(
                f"response without a score: {self.num_unscored} of the row's are in no pair",
            )
        if not 2 <= (count := len(self.responses)) <= MOST:
            raise DataError(
                f"too {'few' if count < 2 else 'many'} responses: {count}, and a "
                f"ranking has 2 to {MOST}",
            )
        yield from fields.attempt(self._pair, combinations(self.responses, 2))

    def _pair(self, two: tuple[Ranked, Ranked]) -> Comparison:
        better, worse = two if two[0].worth >= two[1].worth else two[::-1]
        models = {"chosen_model": better.model, "rejected_model": worse.model}
        tie = better.worth == worse.worth
        margin = better.worth - worse.worth if self.measured else None
        facts = models if any(model is not None for model in models.values()) else {}
        pair = Comparison(
            self.prompt,
            better.response,
            worse.response,
            margin=margin,
            tie=tie,
            probability=0.5 if tie else 1.0,
            metadata=facts,
        )
        return fields.checked_comparison(pair)

    def best(self) -> Iterator[Demonstration]:
        """The response of the highest worth, the first one among equals."""
        if not self.responses:
            raise DataError("too few responses: the ranking is empty")
        best = max(self.responses, key=lambda ranked: ranked.worth)
        yield Demonstration(
            fields.checked_prompt(self.prompt)
            + fields.checked_response(best.response, "the response"),
        )

    def question(self) -> Iterator[Prompt]:
        yield Prompt(fields.checked_prompt(self.prompt))


def ultrafeedback(row: Row) -> RankedResponses:
    """`completions`, each with `response` and `overall_score`; a completion without a score is left
    out.
    """
    return _ranked(row, "instruction", "completions", ("response", "overall_score"), measured=True)


def nectar(row: Row) -> RankedResponses:
    """`answers`, each with `answer` and `rank`, 1 for the best; ranks are no measure, so there are
    no margins.
    """
    return _ranked(row, "prompt", "answers", ("answer", "rank"), measured=False)


def stack_exchange(row: Row) -> RankedResponses:
    """`answers`, each with `text` and `pm_score`, the logarithm of its votes: higher is better."""
    return _ranked(row, "question", "answers", ("text", "pm_score"), measured=True)


def lists_objects(column: str, *keys: str) -> Callable[[Row], bool]:
    """A test of rows: does the column list objects with these keys?"""

    def holds(row: Row) -> bool:
        items = dict.get(row, column)
        return isinstance(items, list) and any(
            isinstance(item, Mapping) and item.keys() >= {*keys} for item in items
        )

    return holds


def _ranked(
    row: Row,
    prompt: str,
    column: str,
    keys: tuple[str, str],
    *,
    measured: bool,
) -> RankedResponses:
    """The responses that a column lists as objects; one without a score is left out, one without a
    rank is an error.
    """
    (response, worth), ranked = keys, []
    items = fields.sequence(row.get(column), column)
    for item in items:
        if not isinstance(item, dict):
            raise DataError(f"not a response: {column} need {response} and {worth}")
        if not measured or fields.has(item, worth):
            value = fields.number(item.get(worth), worth) * (1.0 if measured else -1.0)
            ranked.append(
                Ranked(
                    (assistant(fields.as_text(item.get(response), response)),),
                    value,
                    item.get("model"),
                ),
            )
    return RankedResponses(
        fields.prompt_turns(row, prompt),
        ranked,
        measured,
        len(items) - len(ranked),
    )


OBJECTS = (*LISTS, "candidates", "answers")
_TEXTS = ("response", "text", "content", "answer", "completion", "output", "generation")
_WORTHS = (("score", 1.0), ("rating", 1.0), ("reward", 1.0), ("overall_score", 1.0), ("rank", -1.0))


def _keys(row: Row) -> tuple[str, str, str, float] | None:
    """The column that lists objects, their keys of text and of worth, and the sign of the worth."""
    for column in OBJECTS:
        items = dict.get(row, column)
        if isinstance(items, list) and items and all(isinstance(item, dict) for item in items):
            texts = [key for key in _TEXTS if all(key in item for item in items)]
            worths = [(key, sign) for key, sign in _WORTHS if all(key in item for item in items)]
            if texts and worths:
                return column, texts[0], *worths[0]
    return None


def are_objects(row: Row) -> bool:
    """True for a list of objects with a text and a score, or a rank, each."""
    return _keys(row) is not None


def scored_objects(row: Row) -> RankedResponses:
    """A list of objects with a text and a score (higher is better) or a rank (1 is the best)
    each.
    """
    if (keys := _keys(row)) is None:
        raise DataError("not a ranking: no list of objects with a text and a score each")
    column, text, worth, sign = keys
    prompt = next((name for name in (*PROMPTS, *TURNS_BEFORE) if fields.has(row, name)), PROMPTS[0])
    return _ranked(row, prompt, column, (text, worth), measured=sign > 0)


def lists(row: Row) -> RankedResponses:
    """Responses beside `scores` or `ratings` (higher is better) or `ranks` (1 is the best); one
    without a score is left out.
    """
    column, responses = fields.first(row, *LISTS)
    measured = fields.has(row, *SCORES)
    name, values = fields.first(row, *(SCORES if measured else RANKS))
    responses = fields.sequence(responses, column)
    values = fields.sequence(values, name)
    if len(responses) != len(values):
        raise DataError(f"uneven lists: {len(responses)} {column} but {len(values)} {name}")
    both = [
        (response, value)
        for response, value in zip(responses, values, strict=True)
        if value is not None or not measured
    ]
    sign = 1.0 if measured else -1.0
    ranked = [
        Ranked(fields.turns(one, "assistant", column), sign * fields.number(value, name))
        for one, value in both
    ]
    return RankedResponses(
        fields.prompt_turns(row, *PROMPTS, *TURNS_BEFORE),
        ranked,
        measured,
        len(responses) - len(ranked),
    )


def readers(parse: Callable[[Row], RankedResponses]) -> dict[type, fields.Reader[Record]]:
    """Readers of a ranking: all its pairs, its best response, its prompt."""

    def best(row: Row) -> Iterator[Demonstration]:
        yield from parse(row).best()
        leave_out(row, "rejected")

    def question(row: Row) -> Iterator[Prompt]:
        yield from parse(row).question()
        leave_out(row, "chosen", "rejected")

    return {Comparison: lambda row: parse(row).pairs(), Demonstration: best, Prompt: question}


def read_webgpt(row: Row) -> Iterator[Comparison | DataError]:
    """`question` (its `full_text`), `answer_0`, `answer_1`, `score_0`, `score_1`, as on the hub;
    equal scores are ties.
    """
    question = row.get("question")
    is_object = isinstance(question, Mapping)
    prompt = (
        fields.as_text(question.get("full_text"), "question.full_text")
        if is_object
        else fields.text(row, "question")
    )
    answers = [(assistant(fields.text(row, f"answer_{side}")),) for side in (0, 1)]
    scores = [fields.number(row.get(f"score_{side}"), f"score_{side}") for side in (0, 1)]
    return RankedResponses(
        (user(prompt),),
        list(map(Ranked, answers, scores)),
        measured=True,
    ).pairs()


def read_webgpt_lists(row: Row) -> Iterator[Comparison | DataError]:
    """`text`, two transcripts of ## Human: and ## Assistant:, and `score` a number for each."""
    both = fields.sequence(row.get("text"), "text")
    scores = fields.sequence(row.get("score"), "score")
    if len(both) != 2 or len(scores) != 2:
        raise DataError(f"not a pair: {len(both)} texts and {len(scores)} scores")
    (question, one), (other, two) = (
        _question_answer(fields.as_text(item, "text")) for item in both
    )
    if question != other:
        raise DataError("no shared prompt: the two texts begin with different questions")
    ranked = [
        Ranked((assistant(words),), fields.number(score, "score"))
        for words, score in zip((one, two), scores, strict=True)
    ]
    return RankedResponses((user(question),), ranked, measured=True).pairs()


def _question_answer(words: str) -> tuple[str, str]:
    before, human, rest = words.partition("## Human:")
    question, marked, answer = rest.partition("## Assistant:")
    if before.strip() or not human or not marked:
        raise DataError("not a transcript: no ## Human: and ## Assistant: in column text")
    return question.strip(), answer.strip()
