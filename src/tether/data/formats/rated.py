"""Solutions whose steps people or programs rated, in published layouts.

- PRM800K, as OpenAI wrote it, and with a rating in every step:
  https://github.com/openai/prm800k, https://arxiv.org/abs/2305.20050
- Math-Shepherd, whose steps end on a mark:
  https://huggingface.co/datasets/peiyi9979/Math-Shepherd, https://arxiv.org/abs/2312.08935
- ProcessBench, which names the first wrong step:
  https://huggingface.co/datasets/Qwen/ProcessBench, https://arxiv.org/abs/2412.06559
- PRMBench, which names all wrong steps: https://github.com/ssmisya/PRMBench,
  https://arxiv.org/abs/2501.03124
- plain rows: https://huggingface.co/docs/trl/dataset_formats#stepwise-supervision
- steps as turns of a conversation, each answered by + or -:
  https://huggingface.co/datasets/RLHFlow/Mistral-PRM-Data
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from tether.core.errors import DataError
from tether.core.types import Conversation, JsonValue, Row, StepLabels, user
from tether.data.formats import fields
from tether.data.formats.conversations import conversation
from tether.data.formats.fields import (
    LeftOutError,
    boolean,
    has,
    number,
    optional,
    prompt_turns,
    text,
    texts,
)
from tether.data.formats.json_rows import kind_name
from tether.data.formats.values import inner, list_in, missing, object_in, sequence

MARK = "ки"
"""The token at the end of each step of Math-Shepherd."""
_TEXTS = ("text", "step", "content")
_RATINGS = ("rating", "label", "is_correct", "correct")
_RATED: dict[float, bool | None] = {1.0: True, 0.0: None, -1.0: False}
_FIRST = re.compile(r"(?<!\S)(?=Step 1\s*[:.])")


def with_labels(
    prompt: Conversation,
    steps: Iterable[str],
    labels: Iterable[bool | None],
    group: str = "",
    **facts: object,
) -> StepLabels:
    """The solution, if it has steps and a label for each."""
    solution = StepLabels(
        prompt,
        tuple(steps),
        tuple(labels),
        group=group,
        metadata=facts,
    )
    counts = len(solution.steps), len(solution.labels)
    if not solution.steps:
        raise DataError("no steps: the solution is empty")
    if counts[0] != counts[1]:
        raise DataError(f"uneven lists: {counts[0]} steps but {counts[1]} labels")
    return solution


def read_prm800k(row: Row) -> StepLabels:
    """The steps that the labeller went on with, and the first completion where there was none.
    Ratings 1, 0 and -1 are right, unjudged and wrong; as numbers they are the metadata `ratings`. A
    step that the labeller wrote counts as right.

    Raises:
        LeftOutError: the labeller gave the problem up as a bad one.
    """
    label = inner(row, "label")
    if label.get("finish_reason") == "bad_problem":
        raise LeftOutError("bad problem: its labeller gave it up")
    judged = [_followed(step) for step in sequence(label.get("steps"), "label.steps")]
    ratings = [None if missing(rating) else number(rating, "rating") for _, rating in judged]
    if object_in(row, "question"):
        problem = text(inner(row, "question"), "problem")
    else:
        problem = text(row, "question")
    steps = (step for step, _ in judged)
    return with_labels((user(problem),), steps, map(_rated, ratings), ratings=ratings)


def _followed(step: object) -> tuple[str, JsonValue]:
    """The text and the rating of the completion that the next step goes on from."""
    if not isinstance(step, dict):
        raise DataError("not a step: label.steps need completions")
    place = step.get("chosen_completion")
    if missing(place) and isinstance(dict.get(step, "human_completion"), dict):
        return text(step["human_completion"], "text"), 1
    completions = sequence(step.get("completions") or [], "label.steps.completions")
    place = 0 if missing(place) else int(number(place, "chosen_completion"))
    if not 0 <= place < len(completions) or not isinstance(completions[place], dict):
        raise DataError(
            f"not a step: chosen_completion is {place}, and there are "
            f"{len(completions)} completions",
        )
    return text(completions[place], "text"), completions[place].get("rating")


def _rated(rating: float | None) -> bool | None:
    if rating is not None and rating not in _RATED:
        raise DataError(f"unreadable rating: {rating:g}; ratings are 1, 0 and -1")
    return None if rating is None else _RATED[rating]


def is_prm800k(row: Row) -> bool:
    """Recognise a label with steps beside a question: an object with the problem, or the problem
    itself.
    """
    question = object_in(row, "question")
    label = object_in(row, "label")
    asked = "problem" in question if question else isinstance(row["question"], str)
    return asked and bool(label) and "steps" in label


def read_rated_steps(row: Row) -> StepLabels:
    """Steps that are objects with a text and a rating (1, 0, -1: right, unjudged, wrong) or a
    verdict (true, false).
    """
    prompt = prompt_turns(row, "prompt", "question", "problem", "instruction")
    steps = []
    ratings = []
    labels = []
    for step in sequence(row.get("steps"), "steps"):
        if not isinstance(step, dict):
            raise DataError(f"not a step: column steps holds {kind_name(step)}")
        name = next((name for name in _RATINGS if has(step, name)), "")
        label = step[name] if name else None
        steps.append(text(step, *_TEXTS))
        ratings.append(label)
        if name == "rating" and not isinstance(label, bool):
            label = _rated(number(label, name))
        labels.append(None if label is None else boolean(label, name))
    return with_labels(prompt, steps, labels, ratings=ratings)


def has_first_error(row: Row) -> bool:
    """True unless there is a label for each step."""
    return not isinstance(row["label"], list)


def has_rated_steps(row: Row) -> bool:
    steps = list_in(row, "steps")
    return bool(steps) and all(isinstance(step, dict) and has(step, *_TEXTS) for step in steps)


def read_first_error(row: Row) -> StepLabels:
    """`label` is the place of the first wrong step, counted from 0, or -1 where all are right.
    Steps after it are unjudged.
    """
    steps = texts(row, "steps")
    first = _place(row.get("label"), "label", range(-1, len(steps)), len(steps))
    judged = [True] * first + [False] if first >= 0 else [True] * len(steps)
    labels = (*judged, *[None] * (len(steps) - len(judged)))
    return with_labels(
        prompt_turns(row, "problem", "question", "prompt"),
        steps,
        labels,
    )


def _place(
    value: JsonValue,
    name: str,
    places: range,
    count: int,
) -> int:
    """The place of a wrong step; one outside the solution belongs to another text."""
    place = number(value, name)
    if place not in places:
        raise DataError(
            f"error step out of range: {name} {place:g} of a solution of {count} steps",
        )
    return int(place)


def read_marked_steps(row: Row) -> StepLabels:
    """Math-Shepherd: `input` with a mark after each step, and `label` with + or - in its place.

    Raises:
        DataError: both differ in more than the marks.
    """
    *pieces, _ = text(row, "input").split(MARK)
    pattern = "".join(re.escape(piece) + "([+-])" for piece in pieces)
    signs = re.match(pattern, text(row, "label"))
    if not signs:
        raise DataError("uneven marks: label is not the text of input with + or - at its marks")
    question, first = _parted("".join(pieces[:1]))
    steps = (first, *(piece.strip() for piece in pieces[1:]))
    return with_labels(
        (user(question),),
        steps,
        (sign == "+" for sign in signs.groups()),
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


def read_answered_steps(row: Row) -> StepLabels:
    """Turns of a user that are steps, the first one behind the question, each answered by + or
    -.
    """
    messages = conversation(row)
    questions = [turn.content for turn in messages if turn.role == "user"]
    signs = [turn.content.strip() == "+" for turn in messages if turn.role == "assistant"]
    if not questions:
        raise DataError("no steps: the conversation has no turn of a user")
    question, first = _parted(questions[0])
    steps = (first, *(step.strip() for step in questions[1:]))
    return with_labels((user(question),), steps, signs)


def has_answered_steps(row: Row) -> bool:
    """True if all that the assistant says is + or -."""
    name = "messages" if "messages" in row else "conversations"
    turns = [turn for turn in list_in(row, name) if isinstance(turn, dict)]
    replies = [str(turn.get("content") or turn.get("value")).strip() for turn in turns[1::2]]
    return bool(replies) and all(reply in ("+", "-") for reply in replies)


def read_prmbench(row: Row) -> StepLabels:
    """The modified question and solution; `error_steps` are 1-based and all other steps are right.
    The group is the problem that was modified, so all its variants are on one side of a split.

    Raises:
        DataError: an error step is outside the solution, so the annotation belongs to another
            text.
    """
    steps = texts(row, "modified_process")
    places = range(1, len(steps) + 1)
    errors = {
        _place(step, "error_steps", places, len(steps))
        for step in fields.sequence(row.get("error_steps"), "error_steps")
    }
    question = (user(text(row, "modified_question", "question")),)
    original = optional(row, "question")
    facts = {"question": original} if original else {}
    labels = (place not in errors for place in places)
    return with_labels(question, steps, labels, original, **facts)


def read_steps(row: Row) -> StepLabels:
    """`steps` or `completions` with `labels`: booleans, 0/1, +/- or null for a step without a
    judgment.
    """
    steps = texts(row, "steps" if has(row, "steps") else "completions")
    labels = (
        None if missing(label) else _verdict(label)
        for label in sequence(row.get("labels"), "labels")
    )
    return with_labels(
        prompt_turns(row, "prompt", "question", "problem"),
        steps,
        labels,
    )


def _verdict(label: object) -> bool:
    """A step's label; numbers that are no verdict have a column of their own.

    Raises:
        DataError: it is none; the message says so, and the way out.
    """
    try:
        value = number(label, "labels")
    except DataError:
        value = 0.0  # a word
    if value not in (0.0, 1.0):
        kind = "a probability" if 0 < value < 1 else "a rating"
        raise DataError(
            f"unreadable label: labels holds {value:g}, {kind} and no verdict. Put such numbers "
            "into a column of their own and name it by label_column (ratings -1, 0, 1 with "
            "classes = 3). In labels write true or false, or null for an unjudged step",
        )
    return boolean(label, "labels")
