"""Solutions whose steps people or programs rated, in published layouts.

- PRM800K, as OpenAI wrote it, and with a rating in every step:
  https://github.com/openai/prm800k, https://arxiv.org/abs/2305.20050
- Math-Shepherd, whose steps end on a mark:
  https://huggingface.co/datasets/peiyi9979/Math-Shepherd, https://arxiv.org/abs/2312.08935
- ProcessBench, which names the first wrong step:
  https://huggingface.co/datasets/Qwen/ProcessBench, https://arxiv.org/abs/2412.06559
- steps as turns of a conversation, each answered by + or -:
  https://huggingface.co/datasets/RLHFlow/Mistral-PRM-Data
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from tether.core.errors import DataError
from tether.core.types import Conversation, JsonValue, StepLabels, user
from tether.data.formats import fields, nested
from tether.data.formats.conversations import conversation
from tether.data.formats.fields import LeftOutError
from tether.data.formats.json_rows import Row, kind_name
from tether.data.formats.values import missing, sequence

MARK = "ки"
"""The token at the end of each step of Math-Shepherd."""
_TEXTS = ("text", "step", "content")
_RATINGS = ("rating", "label", "is_correct", "correct")
_RATED: dict[float, bool | None] = {1.0: True, 0.0: None, -1.0: False}
_FIRST = re.compile(r"(?<!\S)(?=Step 1\s*[:.])")


def with_labels(
    prompt: Conversation,
    steps: tuple[str, ...],
    labels: tuple[bool | None, ...],
    group: str = "",
) -> StepLabels:
    """The solution, if it has steps and a label for each."""
    if not steps:
        raise DataError("no steps: the solution is empty")
    if len(steps) != len(labels):
        raise DataError(f"uneven lists: {len(steps)} steps but {len(labels)} labels")
    return StepLabels(fields.checked_prompt(prompt), steps, labels, group=group)


def read_prm800k(row: Row) -> Iterator[StepLabels]:
    """The steps that the labeller went on with, and the first completion where there was none.
    Ratings 1, 0 and -1 are right, unjudged and wrong; as numbers they are the metadata `ratings`. A
    step that the labeller wrote counts as right.

    Raises:
        LeftOutError: the labeller gave the problem up as a bad one.
    """
    label = nested.inner(row, "label")
    if label.get("finish_reason") == "bad_problem":
        raise LeftOutError("bad problem: its labeller gave it up")
    judged = [_followed(step) for step in sequence(label.get("steps"), "label.steps")]
    ratings = [None if missing(rating) else fields.number(rating, "rating") for _, rating in judged]
    holds_object = bool(nested.object_in(row, "question"))
    problem = (
        fields.text(nested.inner(row, "question"), "problem")
        if holds_object
        else fields.text(row, "question")
    )
    question = (user(problem),)
    solution = with_labels(question, tuple(step for step, _ in judged), tuple(map(_rated, ratings)))
    yield replace(solution, metadata={"ratings": ratings})


def _followed(step: object) -> tuple[str, JsonValue]:
    """The text and the rating of the completion that the next step goes on from."""
    if not isinstance(step, dict):
        raise DataError("not a step: label.steps need completions")
    place = step.get("chosen_completion")
    if missing(place) and isinstance(dict.get(step, "human_completion"), dict):
        return fields.text(step["human_completion"], "text"), 1
    completions = sequence(step.get("completions") or [], "label.steps.completions")
    place = 0 if missing(place) else int(fields.number(place, "chosen_completion"))
    if not 0 <= place < len(completions) or not isinstance(completions[place], dict):
        raise DataError(
            f"not a step: chosen_completion is {place}, and there are "
            f"{len(completions)} completions",
        )
    return fields.text(completions[place], "text"), completions[place].get("rating")


def _rated(rating: float | None) -> bool | None:
    if rating is not None and rating not in _RATED:
        raise DataError(f"unreadable rating: {rating:g}; ratings are 1, 0 and -1")
    return None if rating is None else _RATED[rating]


def is_prm800k(row: Row) -> bool:
    """Recognise a label with steps beside a question: an object with the problem, or the problem
    itself.
    """
    question = nested.object_in(row, "question")
    label = nested.object_in(row, "label")
    asked = "problem" in question if question else isinstance(row["question"], str)
    return asked and bool(label) and "steps" in label


def read_rated_steps(row: Row) -> Iterator[StepLabels]:
    """Steps that are objects with a text and a rating (1, 0, -1: right, unjudged, wrong) or a
    verdict (true, false).
    """
    prompt = fields.prompt_turns(row, "prompt", "question", "problem", "instruction")
    steps = []
    ratings = []
    labels = []
    for step in sequence(row.get("steps"), "steps"):
        if not isinstance(step, dict):
            raise DataError(f"not a step: column steps holds {kind_name(step)}")
        name, value = fields.first(step, *_RATINGS) if fields.has(step, *_RATINGS) else ("", None)
        steps.append(fields.text(step, *_TEXTS))
        ratings.append(value)
        is_rating = name == "rating" and not isinstance(value, bool)
        labels.append(
            _rated(fields.number(value, name))
            if is_rating
            else None
            if value is None
            else fields.boolean(value, name),
        )
    yield replace(with_labels(prompt, tuple(steps), tuple(labels)), metadata={"ratings": ratings})


def has_rated_steps(row: Row) -> bool:
    steps = nested.list_in(row, "steps")
    return bool(steps) and all(
        isinstance(step, dict) and fields.has(step, *_TEXTS) for step in steps
    )


def read_first_error(row: Row) -> Iterator[StepLabels]:
    """`label` is the place of the first wrong step, counted from 0, or -1 where all are right.
    Steps after it are unjudged.
    """
    steps = fields.texts(row, "steps")
    first = fields.number(row.get("label"), "label")
    if first != int(first) or not -1 <= first < len(steps):
        raise DataError(
            f"error step out of range: label {first:g} of a solution of {len(steps)} steps",
        )
    wrong = len(steps) if first == -1 else int(first)
    labels = tuple(
        True if place < wrong else False if place == wrong else None for place in range(len(steps))
    )
    yield with_labels(fields.prompt_turns(row, "problem", "question", "prompt"), steps, labels)


def read_marked_steps(row: Row) -> Iterator[StepLabels]:
    """Math-Shepherd: `input` with a mark after each step, and `label` with + or - in its place.

    Raises:
        DataError: both differ in more than the marks.
    """
    pieces = fields.text(row, "input").split(MARK)
    marked = fields.text(row, "label")
    signs = []
    position = 0
    for piece in pieces[:-1]:
        end = position + len(piece)
        if marked[position:end] != piece or marked[end : end + 1] not in ("+", "-"):
            raise DataError("uneven marks: label is not the text of input with + or - at its marks")
        signs.append(marked[end] == "+")
        position = end + 1
    question, first = _parted(pieces[0])
    yield with_labels(
        (user(question),),
        (first, *(piece.strip() for piece in pieces[1:-1])),
        tuple(signs),
    )


def _parted(words: str) -> tuple[str, str]:
    """The question, and the first step behind it."""
    parts = _FIRST.split(words, maxsplit=1)
    if len(parts) != 2 or not parts[0].strip():
        raise DataError(
            'no first step: the text before the first mark needs a question and then "Step 1:"',
        )
    return parts[0].strip(), parts[1].strip()


def has_marks(row: Row) -> bool:
    return isinstance(row["input"], str) and MARK in row["input"] and isinstance(row["label"], str)


def read_answered_steps(row: Row) -> Iterator[StepLabels]:
    """Turns of a user that are steps, the first one behind the question, each answered by + or
    -.
    """
    messages = conversation(row)
    questions = [turn.content for turn in messages if turn.role == "user"]
    signs = [turn.content.strip() == "+" for turn in messages if turn.role == "assistant"]
    if not questions:
        raise DataError("no steps: the conversation has no turn of a user")
    question, first = _parted(questions[0])
    yield with_labels(
        (user(question),),
        (first, *(step.strip() for step in questions[1:])),
        tuple(signs),
    )


def has_answered_steps(row: Row) -> bool:
    """True if all that the assistant says is + or -."""
    name = "messages" if "messages" in row else "conversations"
    turns = [turn for turn in nested.list_in(row, name) if isinstance(turn, dict)]
    replies = [str(turn.get("content") or turn.get("value")).strip() for turn in turns[1::2]]
    return bool(replies) and all(reply in ("+", "-") for reply in replies)
