"""Comparisons: two responses with the better one first.

- `prompt`, `chosen`, `rejected`, each a text or a list of messages:
  https://huggingface.co/docs/trl/dataset_formats#preference
- the same with whole conversations and scores:
  https://huggingface.co/datasets/HuggingFaceH4/ultrafeedback_binarized
- the same with ShareGPT turns: https://github.com/hiyouga/LLaMA-Factory/blob/main/data/README.md
- the same under other names (`NAMES`), for example OpenAI's `preferred_output`:
  https://platform.openai.com/docs/guides/direct-preference-optimization
- a conversation with the response that was rejected:
  https://swift.readthedocs.io/en/latest/Customization/Custom-dataset.html
- Anthropic's HH-RLHF, two whole transcripts: https://github.com/anthropics/hh-rlhf,
  https://arxiv.org/abs/2204.05862
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import TypedDict

from tether.core.errors import DataError
from tether.core.types import Annotation, Comparison, Conversation, JsonValue
from tether.data.formats import fields
from tether.data.formats.conversations import PROMPTS, TURNS_BEFORE, conversation
from tether.data.formats.json_rows import Row

_NAMES = """
full_chosen full_rejected
chosen rejected
chosen_response rejected_response
preferred_output non_preferred_output
preferred_response dispreferred_response
preferred_response non_preferred_response
preferred_response rejected_response
preferred_completion dispreferred_completion
preferred dispreferred
preferred non_preferred
preferred rejected
accepted_response rejected_response
accepted rejected
response_j response_k
response_chosen response_rejected
chosen_completion rejected_completion
chosen_answer rejected_answer
chosen_output rejected_output
chosen_messages rejected_messages
good_response bad_response
better_response worse_response
better worse
winning_response losing_response
win lose
y_w y_l
"""
NAMES = tuple((good, bad) for good, bad in map(str.split, _NAMES.strip().splitlines()))
"""Columns of the better and of the worse response."""
_SCORE_NAMES = """
score_chosen score_rejected
chosen_score rejected_score
chosen-rating rejected-rating
chosen_rating rejected_rating
rating_chosen rating_rejected
chosen_avg_rating rejected_avg_rating
chosen_reward rejected_reward
reward_chosen reward_rejected
"""
_SCORES = tuple((good, bad) for good, bad in map(str.split, _SCORE_NAMES.strip().splitlines()))
PAIR_COLUMNS = " ".join(
    (
        "system margin tie probability annotations group status generations rating",
        *PROMPTS,
        *(" ".join(pair) for pair in _SCORES),
    ),
)
"""Columns that `read_pair` reads beside `chosen` and `rejected`."""


def named_pair(row: Row) -> tuple[str, str] | None:
    """The names of the columns of the better and of the worse response, if a row has two that hold
    texts or turns.
    """
    for pair in NAMES:
        values = [dict.get(row, name) for name in pair]
        if all(name in row for name in pair) and not all(
            isinstance(value, bool) for value in values
        ):
            return pair
    return None


def read_pair(row: Row) -> Iterator[Comparison | DataError]:
    """`margin`, or the difference of the two scores, is kept; equal scores give no direction and so
    a tie.

    Optional columns: system, tie, probability, group, annotations (each `annotator`, `preference`).
    Lists of several texts give a pair of each chosen with each rejected one.
    """
    names = named_pair(row) or ("chosen", "rejected")
    sides = [_alternatives(*fields.first(row, name)) for name in names]
    _refuse_places(row, names)
    label = _label(row, names)
    prompt = _prompt(row)

    def one(both: tuple[object, ...]) -> Comparison:
        turns = [_side(value, name) for value, name in zip(both, names, strict=True)]
        are_replies = all(side and side[0].role == "assistant" for side in turns)
        before = prompt or (
            fields.prompt_turns(row, *TURNS_BEFORE) if are_replies else fields.system_turn(row)
        )
        return fields.checked_comparison(Comparison(*_parted(before, turns[0], turns[1]), **label))

    pairs = list(product(*sides))
    yield from (fields.attempt(one, pairs) if len(pairs) > 1 else [one(pairs[0])])


def _side(value: JsonValue, name: str) -> Conversation:
    """A response; the turns of a whole transcript that begins with Human:."""
    is_whole = isinstance(value, str) and fields.is_transcript(value) and "\n\nAssistant:" in value
    return fields.split_transcript(value) if is_whole else fields.turns(value, "assistant", name)


def _refuse_places(row: Row, names: tuple[str, str]) -> None:
    """Refuse whole numbers beside a list of answers: they may be places in the list, counted from 0
    or from 1.
    """
    lists = [
        name
        for name in ("responses", "completions", "generations", "candidates", "outputs", "answers")
        if name in row
    ]
    if lists and all(
        isinstance(value := dict.get(row, name), int) and not isinstance(value, bool)
        for name in names
    ):
        one, other = names
        raise DataError(
            f"ambiguous verdict: {one} and {other} may be places in {lists[0]}. Write the texts "
            f"into {one} and {other}",
        )


def _alternatives(name: str, value: JsonValue) -> list[JsonValue]:
    """The texts of a list of them; anything else is one response."""
    several = isinstance(value, list) and value and all(isinstance(item, str) for item in value)
    return value if several else [value]


def _prompt(row: Row) -> Conversation:
    """The prompt's own column, also OpenAI's `input` of messages and tools."""
    given = dict.get(row, "input")
    is_object = isinstance(given, dict) and "messages" in given
    if not is_object or fields.has(row, *(name for name in PROMPTS if name != "input")):
        return fields.prompt_turns(row, *PROMPTS)
    given = row["input"]
    messages = fields.turns_at(given, "messages", "user")
    tools = fields.row_tools(given)
    return (replace(messages[0], tools=tools), *messages[1:]) if tools and messages else messages


class _Label(TypedDict):
    margin: float | None
    tie: bool
    probability: float
    annotations: tuple[Annotation, ...]
    group: str


def _label(row: Row, names: tuple[str, str]) -> _Label:
    margin, equal = _margin(row, names)
    tie = fields.boolean(row["tie"], "tie") if fields.has(row, "tie") else equal or _said_tie(row)
    probability = 0.5 if tie else 1.0
    if fields.has(row, "probability"):
        probability = fields.number(row["probability"], "probability")
    if not 0.0 <= probability <= 1.0:
        raise DataError(f"impossible probability: {probability}")
    votes = (
        fields.sequence(row["annotations"], "annotations") if fields.has(row, "annotations") else []
    )
    annotations = tuple(map(_annotation, votes))
    group = fields.optional(row, "group")
    return {
        "margin": margin,
        "tie": tie,
        "probability": probability,
        "annotations": annotations,
        "group": group,
    }


def _said_tie(row: Row) -> bool:
    """distilabel's `status`: unchanged, swapped or tie."""
    return dict.get(row, "status") in ("unchanged", "swapped", "tie") and row["status"] == "tie"


def _parted(
    prompt: Conversation,
    chosen: Conversation,
    rejected: Conversation,
) -> tuple[Conversation, Conversation, Conversation]:
    """The prompt and the two continuations, also of two whole conversations that begin alike."""
    if not chosen or not rejected or chosen[0].role == rejected[0].role == "assistant":
        return prompt, chosen, rejected
    length = shared_prompt(chosen, rejected)
    shared = chosen[:length]
    words = {fields.fold(turn.content) for turn in shared}
    if prompt and prompt[-1].role != "system" and fields.fold(prompt[-1].content) not in words:
        raise DataError(
            "prompt differs: its text is not a turn of the conversations in chosen and rejected",
        )
    if prompt and prompt[0].role == "system" and shared[0].role != "system":
        shared = (prompt[0], *shared)
    return shared, chosen[length:], rejected[length:]


def _margin(row: Row, names: tuple[str, str]) -> tuple[float | None, bool]:
    """The margin in the source's units, and whether equal scores make it a tie."""
    margin = None
    equal = False
    if fields.has(row, "margin"):
        margin = fields.number(row["margin"], "margin")
    elif scores := _scores(row, names):
        margin = scores[0] - scores[1]
        equal = scores[0] == scores[1]
    if margin is not None and margin < 0:
        raise DataError(f"contradictory margin: rejected is better than chosen by {-margin:g}")
    return margin, equal


def _scores(row: Row, names: tuple[str, str]) -> list[float]:
    """The scores of the two sides; distilabel lists them as `rating`, in the order of its
    `generations`.
    """
    if pair := next((pair for pair in _SCORES if all(fields.has(row, name) for name in pair)), ()):
        return [fields.number(row[name], name) for name in pair]
    drawn, rated = (dict.get(row, name) for name in ("generations", "rating"))
    sides = [dict.get(row, name) for name in names]
    if (
        isinstance(drawn, list)
        and isinstance(rated, list)
        and len(drawn) == len(rated) == 2
        and all(s in drawn for s in sides)
    ):
        order = [drawn.index(side) for side in sides]
        return (
            [fields.number(row["rating"][place], "rating") for place in order]
            if None not in rated and len({*order}) == 2
            else []
        )
    return []


def _annotation(item: object) -> Annotation:
    if not isinstance(item, dict) or not {"annotator", "preference"} <= item.keys():
        raise DataError("not an annotation: annotations need annotator and preference")
    lean = fields.number(item["preference"], "preference")
    if not -1.0 <= lean <= 1.0:
        raise DataError(f"impossible preference: {lean:g} of an annotator, not between -1 and 1")
    return Annotation(fields.as_text(item["annotator"], "annotator"), lean)


def read_transcripts(row: Row) -> Iterator[Comparison]:
    """The prompt is the longest shared opening that ends on a Human turn; what follows are the two
    continuations.

    Pairs that branch before the last reply are kept with all their turns, as long as both end on an
    Assistant turn.
    """
    chosen, rejected = (
        fields.split_transcript(fields.text(row, side)) for side in ("chosen", "rejected")
    )
    length = shared_prompt(chosen, rejected)
    prompt = fields.system_turn(row) + chosen[:length]
    yield fields.checked_comparison(Comparison(prompt, chosen[length:], rejected[length:]))


def shared_prompt(chosen: Conversation, rejected: Conversation) -> int:
    """The length of the longest shared opening that ends before an answer.

    Raises:
        DataError: both are the same, or they share no opening.
    """
    if chosen == rejected:
        raise DataError("equal responses: chosen and rejected are the same")
    shared = next(
        (n for n, (one, other) in enumerate(zip(chosen, rejected, strict=False)) if one != other),
        None,
    )
    length = min(len(chosen), len(rejected)) if shared is None else shared
    while length and chosen[length - 1].role not in ("user", "tool"):
        length -= 1
    if not length:
        raise DataError("no shared prompt: chosen and rejected differ from the first turn on")
    return length


def is_rejected_beside(row: Row) -> bool:
    """True for a conversation, or a query with its response, beside a response that was
    rejected.
    """
    return not fields.has(
        row,
        "chosen",
        "chosen_response",
        "preferred_response",
        "accepted_response",
    )


def read_beside(row: Row) -> Iterator[Comparison | DataError]:
    """The last reply is chosen; `rejected_response` (one or several) or the end of
    `rejected_messages` is rejected.
    """
    if fields.has(row, "messages", "conversations"):
        whole = conversation(row)
    else:
        name, value = fields.first(row, "response", "output", "completion")
        whole = (*fields.prompt_turns(row, *PROMPTS), *fields.turns(value, "assistant", name))
    label = _label(row, ("", ""))
    prompt = whole[:-1]
    name, value = fields.first(row, "rejected_messages", "rejected_response")

    def one(other: object) -> Comparison:
        rejected = fields.turns(other, "assistant", name)
        if not rejected or rejected[0].role == "assistant":
            return fields.checked_comparison(Comparison(prompt, whole[-1:], rejected, **label))
        if whole and whole[0].role == "system" and rejected[0].role != "system":
            rejected = (whole[0], *rejected)
        rejected = (
            (replace(rejected[0], tools=rejected[0].tools or whole[0].tools), *rejected[1:])
            if whole
            else rejected
        )
        return fields.checked_comparison(Comparison(*_parted((), whole, rejected), **label))

    others = _alternatives(name, value)
    yield from (fields.attempt(one, others) if len(others) > 1 else [one(others[0])])
