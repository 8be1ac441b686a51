"""Two responses to one prompt, the better one first.

`prompt`, `chosen`, `rejected`, each a text or a list of messages (https://huggingface.co/docs/trl/dataset_formats#preference);
with whole conversations and scores (https://huggingface.co/datasets/HuggingFaceH4/ultrafeedback_binarized); with ShareGPT turns
(https://github.com/hiyouga/LLaMA-Factory/blob/main/data/README.md); Anthropic's HH-RLHF, two whole transcripts
(https://github.com/anthropics/hh-rlhf, https://arxiv.org/abs/2204.05862); OpenAI's WebGPT comparisons, two answers with a score
each (https://huggingface.co/datasets/openai/webgpt_comparisons, https://arxiv.org/abs/2112.09332), and the same as lists of two
(https://github.com/Linear95/DSP).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tether.core.errors import DataError
from tether.core.types import Annotation, Comparison, Conversation, user
from tether.data.formats import fields
from tether.data.formats.format import Row
from tether.data.formats.ranking import Ranked, RankedResponses
from tether.data.formats.transcripts import split_transcript

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
    tie = equal if fields.missing(row.get("tie")) else fields.boolean(row["tie"], "tie")
    probability = 0.5 if tie else 1.0
    if not fields.missing(row.get("probability")):
        probability = fields.number(row["probability"], "probability")
    if not 0.0 <= probability <= 1.0:
        raise DataError(f"impossible probability: {probability}")
    votes = [] if fields.missing(row.get("annotations")) else fields.sequence(row["annotations"], "annotations")
    label = {"margin": margin, "tie": tie, "probability": probability, "annotations": tuple(map(_annotation, votes))}
    yield fields.checked_comparison(Comparison(prompt, chosen, rejected, group=fields.optional(row, "group"), **label))


def _conversations(row: Row) -> tuple[Conversation, Conversation, Conversation]:
    columns = [fields.first(row, side) for side in ("chosen", "rejected")]
    chosen, rejected = (fields.turns(value, "assistant", side) for side, value in columns)
    prompt = fields.prompt_turns(row, *PROMPTS)
    if not chosen or not rejected or chosen[0].role == rejected[0].role == "assistant":
        return prompt, chosen, rejected
    length = fields.shared_prompt(chosen, rejected)
    shared = chosen[:length]
    if prompt and fields.fold(prompt[-1].content) not in {fields.fold(turn.content) for turn in shared}:
        raise DataError("prompt differs: its text is not a turn of the conversations in chosen and rejected")
    if prompt and prompt[0].role == "system" and shared[0].role != "system":
        shared = (prompt[0], *shared)
    return shared, chosen[length:], rejected[length:]


def _margin(row: Row) -> tuple[float | None, bool]:
    """The margin in the source's units, and whether equal scores make it a tie."""
    pair = next((pair for pair in _SCORES if not any(fields.missing(row.get(name)) for name in pair)), ())
    scores = [fields.number(row[name], name) for name in pair]
    margin = scores[0] - scores[1] if scores else None
    equal = margin == 0
    if not fields.missing(row.get("margin")):
        margin, equal = fields.number(row["margin"], "margin"), False
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
    chosen, rejected = (split_transcript(fields.text(row, side)) for side in ("chosen", "rejected"))
    length = fields.shared_prompt(chosen, rejected)
    yield fields.checked_comparison(Comparison(chosen[:length], chosen[length:], rejected[length:]))


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
