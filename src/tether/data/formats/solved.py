"""Problems with a checkable answer in the layouts of reinforcement learning, and questions with
options.

verl's rows (https://verl.readthedocs.io/en/latest/preparation/prepare_data.html), DAPO
(https://arxiv.org/abs/2503.14476), RLVR
(https://huggingface.co/datasets/allenai/RLVR-GSM-MATH-IF-Mixed-Constraints), OpenAI's reinforcement
fine-tuning (https://platform.openai.com/docs/guides/reinforcement-fine-tuning), SVAMP
(https://arxiv.org/abs/2103.07191); options as in MMLU (https://huggingface.co/datasets/cais/mmlu),
ARC (https://huggingface.co/datasets/allenai/ai2_arc), AQuA
(https://github.com/google-deepmind/AQuA), MedMCQA
(https://huggingface.co/datasets/openlifescienceai/medmcqa).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from tether.core.errors import DataError
from tether.core.types import JsonValue, Problem, user
from tether.data.formats import fields, nested
from tether.data.formats.cells import leave_out
from tether.data.formats.conversations import conversation, first_answer
from tether.data.formats.json_rows import Row, parse
from tether.data.formats.values import as_text

ANSWERS = (
    "ground_truth",
    "reference_answer",
    "expected_answer",
    "final_answer",
    "gold_answer",
    "answer",
)
"""Columns of a checkable answer, the narrow ones before the wide one."""
CORRECT = ("answerKey", "answer_index", "answer_idx", "correct", "cop", "answer", "label")
_LETTERS = ("opa", "opb", "opc", "opd")
_UNKNOWN = {"proof", "notfound", "not found", "n/a", "unknown"}
_LONGEST = 60


def final_answer(value: object, name: str) -> str:
    """The text of an answer that can be compared; a list of one, also as JSON text, is its item.

    Raises:
        DataError: it is empty, no answer at all, or so long that no reply will ever equal it.
    """
    if isinstance(value, str) and value.lstrip().startswith("["):
        with contextlib.suppress(ValueError):
            value = _only(parse(value)) or value
    value = _only(value) or value
    answer = as_text(value, name).strip()
    if not answer:
        raise DataError(f"no final answer: column {name} is empty")
    if answer.lower() in _UNKNOWN:
        raise DataError(f"no final answer: column {name} says {answer!r}")
    if answer[0] not in "[{" and "\n" not in answer and len(answer.split()) > _LONGEST:
        raise DataError(
            f"no final answer: column {name} holds {len(answer.split())} words, and a checkable "
            "answer is short. Put it into a column of its own",
        )
    return answer


def _only(value: JsonValue) -> str:
    """The text of a list's single item; empty for any other value."""
    is_single = (
        isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | int | float)
    )
    return as_text(value[0], "answer") if is_single else ""


def read_reward_model(row: Row) -> Iterator[Problem]:
    """verl's `reward_model` with its `ground_truth`."""
    prompt = fields.checked_prompt(fields.prompt_turns(row, "prompt", "question", "problem"))
    yield Problem(
        prompt,
        final_answer(
            nested.inner(row, "reward_model").get("ground_truth"),
            "reward_model.ground_truth",
        ),
    )


def has_ground_truth(row: Row) -> bool:
    """True if `reward_model` is an object with the answer."""
    return fields.has(nested.object_in(row, "reward_model"), "ground_truth")


def read_answered_messages(row: Row) -> Iterator[Problem]:
    """`messages` beside an answer; a reply at their end is left out.

    Raises:
        DataError: the answer is a constraint, which no comparison checks.
    """
    messages = conversation(row)
    if messages and messages[-1].role == "assistant":
        leave_out(row, "last reply")
        messages = messages[:-1]
    name, value = fields.first(row, *ANSWERS)
    if isinstance(value, str) and '"func_name"' in value:
        raise DataError(
            f"a constraint in place of an answer: column {name} names a function that "
            "checks; give a reward of yours",
        )
    yield Problem(
        fields.checked_prompt(messages),
        final_answer(value, name),
        fields.optional(row, "solution"),
    )


def asks(row: Row) -> bool:
    """True if the last of `messages` waits for a reply and the row has an answer: it is a problem
    and demonstrates nothing.
    """
    messages = nested.list_in(row, "messages") if fields.has(row, *ANSWERS) else []
    last = messages[-1] if messages else None
    return isinstance(last, dict) and str(last.get("role") or last.get("from")).lower() in (
        "user",
        "human",
    )


def read_choice(row: Row) -> Iterator[Problem]:
    """A question with lettered options; the answer is the letter of the right one, whether the row
    names it by letter or place.

    Raises:
        DataError: the row has no right option, as in a hidden test split.
    """
    choices = fields.options(row) or _separate(row)
    prompt = fields.prompt_turns(row, "question", "problem", "query", "prompt")
    if not fields.has(row, "choices", "options"):
        lines = [prompt[-1].content, *(f"{letter}. {choice}" for letter, choice in choices)]
        prompt = (*prompt[:-1], user("\n".join(lines)))
    name, value = fields.first(row, *CORRECT)
    yield Problem(
        fields.checked_prompt(prompt),
        _letter(value, name, choices),
        fields.optional(row, "rationale", "explanation", "exp"),
    )


def _separate(row: Row) -> list[tuple[str, str]]:
    """MedMCQA's four columns of options."""
    return [("ABCD"[place], fields.text(row, name)) for place, name in enumerate(_LETTERS)]


def has_choices(row: Row) -> bool:
    """True if a question has options, in a list or in columns of their own."""
    value = next((row[name] for name in ("choices", "options") if fields.has(row, name)), None)
    return bool(isinstance(value, dict) or nested.list_in({"": value}, "")) or all(
        name in row for name in _LETTERS
    )


def _letter(value: object, name: str, choices: list[tuple[str, str]]) -> str:
    """The letter of the right option, from a letter, a place that counts from 0, or the option's
    own text.
    """
    letters = [letter for letter, _ in choices]
    if isinstance(value, int) and not isinstance(value, bool):
        if 0 <= value < len(letters):
            return letters[value]
        raise DataError(
            f"no right option: {name} is {value}, and {len(letters)} options count from 0",
        )
    word = as_text(value, name).strip()
    if word in letters:
        return word
    same = [letter for letter, choice in choices if choice.strip() == word]
    if len(same) == 1:
        return same[0]
    raise DataError(
        f"no right option: {name} is {word[:40]!r}, neither a letter nor the text of one option",
    )


def read_span(row: Row) -> Iterator[Problem]:
    """SQuAD: a question about a text, and the first of its answers."""
    yield Problem(
        fields.checked_prompt(fields.prompt_turns(row, "question")),
        final_answer(first_answer(row), "answers.text"),
    )


def read_svamp(row: Row) -> Iterator[Problem]:
    """A story in `Body` and a question about it; whole numbers lose their `.0`."""
    question = f"{fields.text(row, 'Body').strip()} {fields.text(row, 'Question').strip()}"
    yield Problem(
        fields.checked_prompt((user(question),)),
        final_answer(row.get("Answer"), "Answer").removesuffix(".0"),
    )
