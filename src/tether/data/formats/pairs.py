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

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import TypeVar

from tether.core.errors import DataError
from tether.core.types import Annotation, Comparison, Conversation, JsonValue, Row
from tether.data.formats import fields
from tether.data.formats.cells import without_cells
from tether.data.formats.conversations import PROMPTS, TURNS_BEFORE, conversation
from tether.data.formats.fields import (
    as_text,
    attempt,
    boolean,
    checked_comparison,
    first,
    fold,
    has,
    is_transcript,
    number,
    optional,
    prompt_turns,
    row_tools,
    sequence,
    split_transcript,
    system_turn,
    text,
    turns_at,
)
from tether.data.formats.table import LISTS

T = TypeVar("T")
NAMES, _SCORES = (
    [(good, bad) for good, _, bad in (pair.partition("/") for pair in LISTS[name])]
    for name in ("better_and_worse", "scores_of_both")
)
"""Columns of the better and of the worse response, and of their scores."""
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
    sides = [_alternatives(*first(row, name)) for name in names]
    _refuse_places(row, names)
    label = _label(row, names)
    prompt = _prompt(row)

    def one(both: tuple[object, ...]) -> Comparison:
        turns = [_side(value, name) for value, name in zip(both, names, strict=True)]
        are_replies = all(side and side[0].role == "assistant" for side in turns)
        before = prompt or (prompt_turns(row, *TURNS_BEFORE) if are_replies else system_turn(row))
        return _labelled(label, before, turns[0], turns[1])

    yield from _each(one, list(product(*sides)))


def _each(make: Callable[[T], Comparison], items: Sequence[T]) -> Iterator[Comparison | DataError]:
    """A comparison for each item. An error of a single one is one of the row."""
    return attempt(make, items) if len(items) > 1 else iter([make(items[0])])


def _labelled(label: Comparison, *turns: Conversation) -> Comparison:
    """A label with the prompt and the two sides, also of two whole conversations."""
    prompt, chosen, rejected = split_sides(*turns)
    return checked_comparison(
        replace(label, prompt=prompt, chosen=chosen, rejected=rejected),
    )


def _side(value: JsonValue, name: str) -> Conversation:
    """A response; the turns of a whole transcript that begins with Human:."""
    is_whole = isinstance(value, str) and is_transcript(value) and "\n\nAssistant:" in value
    return split_transcript(value) if is_whole else fields.turns(value, "assistant", name)


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
    if not is_object or has(row, *(name for name in PROMPTS if name != "input")):
        return prompt_turns(row, *PROMPTS)
    given = row["input"]
    messages = turns_at(given, "messages", "user")
    tools = row_tools(given)
    return (replace(messages[0], tools=tools), *messages[1:]) if tools and messages else messages


def _label(row: Row, names: tuple[str, str]) -> Comparison:
    """The verdict of a row on its sides, as a comparison without their texts."""
    margin, tie = _margin(row, names)
    if has(row, "tie"):
        tie = boolean(row["tie"], "tie")
    # that of distilabel
    elif not tie and dict.get(row, "status") in ("unchanged", "swapped", "tie"):
        tie = row["status"] == "tie"
    probability = 0.5 if tie else 1.0
    if has(row, "probability"):
        probability = number(row["probability"], "probability")
    if not 0.0 <= probability <= 1.0:
        raise DataError(f"impossible probability: {probability}")
    name = "annotations"
    votes = sequence(row[name], name) if has(row, name) else ()
    return Comparison(
        (),
        (),
        (),
        group=optional(row, "group"),
        margin=margin,
        tie=tie,
        probability=probability,
        annotations=tuple(map(_annotation, votes)),
    )


def split_sides(
    prompt: Conversation,
    chosen: Conversation,
    rejected: Conversation,
) -> tuple[Conversation, Conversation, Conversation]:
    """The prompt and the two continuations, also of two whole conversations that begin alike."""
    if not chosen or not rejected or chosen[0].role == rejected[0].role == "assistant":
        return prompt, chosen, rejected
    length = shared_prompt(chosen, rejected)
    shared = chosen[:length]
    words = {fold(turn.content) for turn in shared}
    if prompt and prompt[-1].role != "system" and fold(prompt[-1].content) not in words:
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
    if has(row, "margin"):
        margin = number(row["margin"], "margin")
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
    if pair := next((pair for pair in _SCORES if all(has(row, name) for name in pair)), ()):
        return [number(row[name], name) for name in pair]
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
            [number(row["rating"][place], "rating") for place in order]
            if None not in rated and len({*order}) == 2
            else []
        )
    return []


def _annotation(item: object) -> Annotation:
    if not isinstance(item, dict) or not {"annotator", "preference"} <= item.keys():
        raise DataError("not an annotation: annotations need annotator and preference")
    lean = number(item["preference"], "preference")
    if "choice" in item:  # a vote of tether's own export: all of it was read
        without_cells(item)
    if not -1.0 <= lean <= 1.0:
        raise DataError(f"impossible preference: {lean:g} of an annotator, not between -1 and 1")
    return Annotation(as_text(item["annotator"], "annotator"), lean)


def are_transcripts(row: Row) -> bool:
    """True for two whole transcripts without a prompt beside them."""
    return "prompt" not in row and all(is_transcript(row[name]) for name in ("chosen", "rejected"))


def read_transcripts(row: Row) -> Comparison:
    """The prompt is the longest shared opening that ends on a Human turn; what follows are the two
    continuations.

    Pairs that branch before the last reply are kept with all their turns, as long as both end on an
    Assistant turn.
    """
    chosen, rejected = (split_transcript(text(row, side)) for side in ("chosen", "rejected"))
    length = shared_prompt(chosen, rejected)
    prompt = system_turn(row) + chosen[:length]
    return checked_comparison(Comparison(prompt, chosen[length:], rejected[length:]))


def shared_prompt(chosen: Conversation, rejected: Conversation) -> int:
    """The length of the longest shared opening that ends before an answer.

    Raises:
        DataError: they share no opening.
    """
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
    return not has(
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
    if has(row, "messages", "conversations"):
        whole = conversation(row)
    else:
        name, value = first(row, "response", "output", "completion")
        whole = (*prompt_turns(row, *PROMPTS), *fields.turns(value, "assistant", name))
    label = _label(row, ("", ""))
    name, value = first(row, "rejected_messages", "rejected_response")

    def one(other: object) -> Comparison:
        rejected = fields.turns(other, "assistant", name)
        if not rejected or rejected[0].role == "assistant":
            pair = replace(
                label,
                prompt=whole[:-1],
                chosen=whole[-1:],
                rejected=rejected,
            )
            return checked_comparison(pair)
        if whole and whole[0].role == "system" and rejected[0].role != "system":
            rejected = (whole[0], *rejected)
        if whole:
            opening = replace(rejected[0], tools=rejected[0].tools or whole[0].tools)
            rejected = (opening, *rejected[1:])
        return _labelled(label, (), whole, rejected)

    yield from _each(one, _alternatives(name, value))
