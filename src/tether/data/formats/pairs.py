"""Comparisons: two responses with the better one first, rankings of K responses, outputs with the verdicts of judges.

`prompt`, `chosen`, `rejected`, each a text or a list of messages (https://huggingface.co/docs/trl/dataset_formats#preference);
with whole conversations and scores (https://huggingface.co/datasets/HuggingFaceH4/ultrafeedback_binarized); with ShareGPT turns
(https://github.com/hiyouga/LLaMA-Factory/blob/main/data/README.md); Anthropic's HH-RLHF, two whole transcripts
(https://github.com/anthropics/hh-rlhf, https://arxiv.org/abs/2204.05862); OpenAI's WebGPT comparisons, two answers with a score
each (https://huggingface.co/datasets/openai/webgpt_comparisons, https://arxiv.org/abs/2112.09332), and the same as lists of two
(https://github.com/Linear95/DSP).

Rankings are unfolded into pairs of one group: UltraFeedback (https://huggingface.co/datasets/openbmb/UltraFeedback, paper:
https://arxiv.org/abs/2310.01377), Nectar (https://huggingface.co/datasets/berkeley-nest/Nectar) and plain lists.

Verdicts of one or several judges on two outputs: https://github.com/tatsu-lab/alpaca_eval, https://github.com/princeton-nlp/LLMBar
(https://arxiv.org/abs/2310.07641), https://github.com/WeOpenML/PandaLM (https://arxiv.org/abs/2306.05087),
https://github.com/allenai/open-instruct. Where several rows judge one pair, possibly in both orders, they share prompt and so
`group`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

from tether.core.errors import DataError
from tether.core.types import Annotation, Comparison, Conversation, Demonstration, Prompt, assistant, user
from tether.data.formats import fields
from tether.data.formats.json_rows import Row

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
    return RankedResponses(fields.prompt_turns(row, "instruction"), ranked, measured=True)


def nectar(row: Row) -> RankedResponses:
    """`answers`, each with `answer` and `rank`, 1 for the best; ranks are no measure, so there are no margins."""
    ranked = _ranked(row, "answers", "answer", "rank", -1.0)
    return RankedResponses(fields.prompt_turns(row, "prompt"), ranked, measured=False)


def _ranked(row: Row, column: str, response: str, worth: str, sign: float) -> list[Ranked]:
    """The responses that a column lists as objects; one without a score is left out, one without a rank is an error."""
    ranked = []
    for item in fields.sequence(row.get(column), column):
        if not isinstance(item, dict):
            raise DataError(f"not a response: {column} need {response} and {worth}")
        if sign < 0 or fields.has(item, worth):
            value = sign * fields.number(item.get(worth), worth)
            ranked.append(Ranked(fields.as_text(item.get(response), response), value, item.get("model")))
    return ranked


def lists(row: Row) -> RankedResponses:
    """`responses` beside `scores` (higher is better) or `ranks` (1 is the best)."""
    measured = fields.has(row, "scores")
    name, sign = ("scores", 1.0) if measured else ("ranks", -1.0)
    responses, values = fields.sequence(row.get("responses"), "responses"), fields.sequence(row.get(name), name)
    if len(responses) != len(values):
        raise DataError(f"uneven lists: {len(responses)} responses but {len(values)} {name}")
    pairs = zip(responses, values, strict=True)
    ranked = [Ranked(fields.as_text(response, "responses"), sign * fields.number(value, name)) for response, value in pairs]
    return RankedResponses(fields.prompt_turns(row, "prompt", "question", "instruction"), ranked, measured)


def readers(parse: Callable[[Row], RankedResponses]) -> dict[type, fields.Reader]:
    """Readers of a ranking: all its pairs, its best response, its prompt."""
    return {
        Comparison: lambda row: parse(row).pairs(),
        Demonstration: lambda row: parse(row).best(),
        Prompt: lambda row: parse(row).question(),
    }


PROMPTS = ("prompt", "question", "instruction", "conversations")
_SCORES = (("score_chosen", "score_rejected"), ("chosen_score", "rejected_score"), ("chosen-rating", "rejected-rating"))
PAIR_COLUMNS = " ".join(("system margin tie probability annotations group", *PROMPTS, *(" ".join(pair) for pair in _SCORES)))
"""What `read_pair` looks at beside `chosen` and `rejected`."""


def read_pair(row: Row) -> Iterator[Comparison]:
    """`margin`, or the difference of the two scores, is kept; equal scores give no direction and so a tie.

    Optional columns: system, tie, probability, group, annotations (each `annotator`, `preference`).
    """
    prompt, chosen, rejected = _conversations(row)
    margin, equal = _margin(row)
    tie = fields.boolean(row["tie"], "tie") if fields.has(row, "tie") else equal
    probability = 0.5 if tie else 1.0
    if fields.has(row, "probability"):
        probability = fields.number(row["probability"], "probability")
    if not 0.0 <= probability <= 1.0:
        raise DataError(f"impossible probability: {probability}")
    votes = fields.sequence(row["annotations"], "annotations") if fields.has(row, "annotations") else []
    label = {"margin": margin, "tie": tie, "probability": probability, "annotations": tuple(map(_annotation, votes))}
    yield fields.checked_comparison(Comparison(prompt, chosen, rejected, group=fields.optional(row, "group"), **label))


def _conversations(row: Row) -> tuple[Conversation, Conversation, Conversation]:
    columns = [fields.first(row, side) for side in ("chosen", "rejected")]
    chosen, rejected = (fields.turns(value, "assistant", side) for side, value in columns)
    prompt = fields.prompt_turns(row, *PROMPTS)
    if not chosen or not rejected or chosen[0].role == rejected[0].role == "assistant":
        return prompt, chosen, rejected
    length = shared_prompt(chosen, rejected)
    shared = chosen[:length]
    if prompt and fields.fold(prompt[-1].content) not in {fields.fold(turn.content) for turn in shared}:
        raise DataError("prompt differs: its text is not a turn of the conversations in chosen and rejected")
    if prompt and prompt[0].role == "system" and shared[0].role != "system":
        shared = (prompt[0], *shared)
    return shared, chosen[length:], rejected[length:]


def _margin(row: Row) -> tuple[float | None, bool]:
    """The margin in the source's units, and whether equal scores make it a tie."""
    margin, equal = None, False
    if fields.has(row, "margin"):
        margin = fields.number(row["margin"], "margin")
    elif pair := next((pair for pair in _SCORES if all(fields.has(row, name) for name in pair)), ()):
        better, worse = (fields.number(row[name], name) for name in pair)
        margin, equal = better - worse, better == worse
    if margin is not None and margin < 0:
        raise DataError(f"contradictory margin: rejected is better than chosen by {-margin:g}")
    return margin, equal


def _annotation(item: Any) -> Annotation:
    if not isinstance(item, dict) or not {"annotator", "preference"} <= item.keys():
        raise DataError("not an annotation: annotations need annotator and preference")
    lean = fields.number(item["preference"], "preference")
    if not -1.0 <= lean <= 1.0:
        raise DataError(f"impossible preference: {lean:g} of an annotator, not between -1 and 1")
    return Annotation(fields.as_text(item["annotator"], "annotator"), lean)


def read_transcripts(row: Row) -> Iterator[Comparison]:
    """The prompt is the longest shared opening that ends on a Human turn; what follows are the two continuations.

    Pairs that branch before the last reply are kept with all their turns, as long as both end on an Assistant turn.
    """
    chosen, rejected = (fields.split_transcript(fields.text(row, side)) for side in ("chosen", "rejected"))
    length = shared_prompt(chosen, rejected)
    yield fields.checked_comparison(Comparison(chosen[:length], chosen[length:], rejected[length:]))


def shared_prompt(chosen: Conversation, rejected: Conversation) -> int:
    """The length of the longest shared opening that ends before an answer.

    Raises:
        DataError: both are the same, or they share no opening.
    """
    if chosen == rejected:
        raise DataError("equal responses: chosen and rejected are the same")
    shared = next((n for n, (one, other) in enumerate(zip(chosen, rejected, strict=False)) if one != other), None)
    length = min(len(chosen), len(rejected)) if shared is None else shared
    while length and chosen[length - 1].role not in ("user", "tool"):
        length -= 1
    if not length:
        raise DataError("no shared prompt: chosen and rejected differ from the first turn on")
    return length


def read_webgpt(row: Row) -> Iterator[Comparison | DataError]:
    """`question` (its `full_text`), `answer_0`, `answer_1`, `score_0`, `score_1`, as on the hub; equal scores are ties."""
    question = row.get("question")
    is_object = isinstance(question, Mapping)
    prompt = fields.as_text(question.get("full_text"), "question.full_text") if is_object else fields.text(row, "question")
    ranked = [Ranked(fields.text(row, f"answer_{n}"), fields.number(row.get(f"score_{n}"), f"score_{n}")) for n in (0, 1)]
    return RankedResponses((user(prompt),), ranked, measured=True).pairs()


def read_webgpt_lists(row: Row) -> Iterator[Comparison | DataError]:
    """`text` holds both conversations after "## Human:" and "## Assistant:", `score` a number for each."""
    both, scores = fields.sequence(row.get("text"), "text"), fields.sequence(row.get("score"), "score")
    if len(both) != 2 or len(scores) != 2:
        raise DataError(f"not a pair: {len(both)} texts and {len(scores)} scores")
    (question, one), (other, two) = (_question_answer(fields.as_text(item, "text")) for item in both)
    if question != other:
        raise DataError("no shared prompt: the two texts begin with different questions")
    ranked = [Ranked(answer, fields.number(score, "score")) for answer, score in zip((one, two), scores, strict=True)]
    return RankedResponses((user(question),), ranked, measured=True).pairs()


def _question_answer(words: str) -> tuple[str, str]:
    before, human, rest = words.partition("## Human:")
    question, marked, answer = rest.partition("## Assistant:")
    if before.strip() or not human or not marked:
        raise DataError("not a transcript: no ## Human: and ## Assistant: in column text")
    return question.strip(), answer.strip()


# The scale of open-instruct's human evaluation: how far the vote leans to a, half a point of the scale being a half.
_SCALE = {"a-is-better": 1.0, "a-is-slightly-better": 0.5, "tie": 0.0, "b-is-slightly-better": -0.5, "b-is-better": -1.0}
_ANNOTATOR = re.compile(r"annotator_?(\d{1,9})")
_LEANS = {0.0: 0.0, 1.0: 1.0, 2.0: -1.0}


def _preference(row: Row) -> object:
    """The verdict; a judge that failed left null, which is none."""
    if not fields.has(row, "preference"):
        raise DataError("no verdict: preference is null")
    return row["preference"]


def judged(
    prompt: Conversation,
    sides: tuple[str, str],
    votes: Mapping[str, float],
    *,
    probability: float | None = None,
    margin: float | None = None,
    models: Sequence[Any] = (),
) -> Comparison:
    """Two responses and the votes on them by annotator, each from +1 (the first is better) over 0 (a tie) to -1.

    More than half of the votes decide which side is `chosen`; without that it is a tie. `probability` is that of the
    first side, by default its share of the votes with ties halved; `margin` is how much better it is, `models` wrote the sides.
    """
    won, lost = sum(lean > 0 for lean in votes.values()), sum(lean < 0 for lean in votes.values())
    share = probability if probability is not None else 0.5 + (won - lost) / (2 * len(votes))
    swapped, tie = lost > won, 2 * max(won, lost) <= len(votes)
    chosen, rejected = ((assistant(side),) for side in sides)
    annotations = tuple(Annotation(name, lean) for name, lean in votes.items())
    pair = Comparison(prompt, chosen, rejected, margin=margin, tie=tie, probability=share, annotations=annotations)
    names = zip(("chosen_model", "rejected_model"), models[::-1] if swapped else models, strict=False)
    facts = dict(names, chosen_position=2 if swapped else 1)
    return fields.checked_comparison(replace(pair.swap() if swapped else pair, metadata=facts))


def read_alpaca_eval(row: Row) -> Iterator[Comparison]:
    """`preference` is 1 or 2 for the better output, 0 or 1.5 for a tie, between for a judge's probability of output 2."""
    preference = fields.number(_preference(row), "preference")
    if preference != 0 and not 1 <= preference <= 2:
        raise DataError(f"unreadable verdict: preference {preference:g} is neither 0 nor between 1 and 2")
    probability = 0.5 if preference == 0 else 2.0 - preference
    yield judged(
        fields.prompt_turns(row, "instruction"),
        (fields.text(row, "output_1"), fields.text(row, "output_2")),
        {str(row.get("annotator") or "judge"): 2.0 * probability - 1.0},
        probability=probability,
        models=(row.get("generator_1"), row.get("generator_2")),
    )


def read_llmbar(row: Row) -> Iterator[Comparison]:
    """`label` names the better output, 1 or 2; the data set has no ties and no names of annotators."""
    label = fields.number(row.get("label"), "label")
    if label not in (1, 2):
        raise DataError(f"unreadable verdict: label {label:g} is neither 1 nor 2")
    sides = (fields.text(row, "output_1"), fields.text(row, "output_2"))
    yield judged((user(fields.text(row, "input")),), sides, {"benchmark": _LEANS[label]})


def read_pandalm(row: Row) -> Iterator[Comparison]:
    """`annotator1` to `annotatorN` say 1 or 2 for the better response, 0 for a tie; nulls did not vote."""
    names = sorted((name for name in row if _ANNOTATOR.fullmatch(name)), key=lambda name: int(_ANNOTATOR.sub(r"\1", name)))
    verdicts = {name: fields.number(row[name], name) for name in names if fields.has(row, name)}
    for name, verdict in verdicts.items():
        if verdict not in _LEANS:
            raise DataError(f"unreadable verdict: {name} says {verdict:g}, not 0, 1 or 2")
    if not verdicts:
        raise DataError("no verdict: no annotator voted")
    models = str(row.get("cmp_key") or "").split("_")
    yield judged(
        fields.prompt_turns(row, "instruction"),
        (fields.text(row, "response1"), fields.text(row, "response2")),
        {name: _LEANS[verdict] for name, verdict in verdicts.items()},
        models=models if len(models) == 2 else (),
    )


def read_open_instruct(row: Row) -> Iterator[Comparison]:
    """`preference` is one of five points from a-is-better to b-is-better; the margin counts points, 2, 1 or 0."""
    point = str(_preference(row)).strip().lower()
    if point not in _SCALE:
        raise DataError(f"unreadable verdict: preference {row['preference']!r:.40} is not a point of the scale")
    lean = _SCALE[point]
    yield judged(
        (user(fields.text(row, "prompt")),),
        (fields.text(row, "completion_a"), fields.text(row, "completion_b")),
        {str(row.get("evaluator") or "annotator"): lean},
        margin=2.0 * lean,
        models=(row.get("model_a"), row.get("model_b")),
    )
