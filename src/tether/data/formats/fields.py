"""From the values of a row to checked core values: texts, turns, labels, comparisons.

A reason in a `DataError` reads "category: detail"; quarantined rows are counted by the category.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import count
from typing import TypeVar

from tether.core.errors import DataError
from tether.core.types import (
    ChatRole,
    Comparison,
    Conversation,
    Demonstration,
    Feedback,
    Json,
    JsonValue,
    Message,
    Row,
    assistant,
)
from tether.data.formats.cells import leave_out
from tether.data.formats.messages import is_turn, read_message, tool_schemas, with_thoughts
from tether.data.formats.table import LISTS
from tether.data.formats.values import (
    FALSE,
    TRUE,
    as_text,
    begins_with,
    cell_value,
    missing,
    sequence,
    sound,
    structure_in,
)

T = TypeVar("T")
Item = TypeVar("Item")
Reader = Callable[[Row], Iterable[T | DataError]]
RowReader = Callable[[Row], T | Iterable[T | DataError]]
"""A row -> its records, or its single record. A `DataError` that is raised condemns the row, one that is yielded only
that part of it.
"""


class LeftOutError(DataError):
    """A sound row, or part of one, that has no place among the records of this kind. It is counted.
    Strict reading accepts it.
    """


# Only a blank line before the speaker begins a turn: people also write "Human:" within one.
_SPEAKER = re.compile(r"\n\n(Human|Assistant):")
_MESSAGES = re.compile(r"""[\s\ufeff]*(\[\s*)?\{\s*['"](role|content|from|value)['"]\s*:""")


def unfolded(rest: Json) -> Json:
    """Unread columns, as metadata: a column `metadata` is unfolded into them, unless names meet."""
    inner = rest.get("metadata")
    if not isinstance(inner, Mapping) or inner.keys() & rest.keys():
        return rest
    return {**inner, **{name: value for name, value in rest.items() if name != "metadata"}}


def has(row: Row, *names: str) -> bool:
    """True if one of these columns holds something. Looking does not count as reading."""
    return any(not missing(dict.get(row, name)) for name in names)


def first(row: Row, *names: str) -> tuple[str, JsonValue]:
    """The first of these columns that holds something, and what it holds.

    Raises:
        DataError: none of them does.
    """
    for name in names:
        if has(row, name):
            return name, row[name]
    raise DataError(f"missing text: nothing in column {' or '.join(names)}")


def text(row: Row, *names: str) -> str:
    """The text in the first of these columns that holds something; numbers and booleans are written
    out.
    """
    name, value = first(row, *names)
    return as_text(value, name)


def optional(row: Row, *names: str) -> str:
    """The same, or the empty text where none of them holds anything."""
    return text(row, *names) if has(row, *names) else ""


def number(value: JsonValue, name: str) -> float:
    """A finite number, also from the text of one."""
    try:
        result = float(value)
    except (TypeError, ValueError, OverflowError):
        result = math.nan
    if not math.isfinite(result):
        raise DataError(f"not a number: column {name} holds {value!r:.40}")
    return result


def cell_numbers(rows: Iterable[Row], name: str) -> set[float]:
    """The different numbers in a column, also in texts; other cells are passed over."""
    given: set[float] = set()
    for row in rows:
        with contextlib.suppress(DataError):
            given.add(number(row.get(name), name))
    return given


def boolean(value: object, name: str) -> bool:
    """A verdict, written as a boolean, as 0 or 1, or as a word for them."""
    word = str(value).strip().lower()
    if word not in TRUE | FALSE:
        raise DataError(
            f"unreadable label: column {name} holds {value!r:.40}, neither true nor false",
        )
    return word in TRUE


def texts(row: Row, name: str) -> tuple[str, ...]:
    """The texts that a column lists."""
    return tuple(as_text(item, name) for item in sequence(row.get(name), name))


def turns(
    value: object,
    speaker: ChatRole,
    name: str,
) -> Conversation:
    """A text as one turn of `speaker`; a message or a list of them (also as JSON text) as
    `read_message` reads them.

    Empty system turns are dropped.
    """
    value = from_text(value, name)
    if isinstance(value, Mapping):
        value = [value]
    if isinstance(value, list | tuple):
        messages = (message for item in sound(value, name) for message in read_message(item, name))
        return with_thoughts(m for m in messages if m.role != "system" or m.content.strip())
    return (Message(speaker, as_text(value, name)),)


def from_text(value: object, name: str) -> JsonValue:
    """Messages that a cell, or each item of its list, carries as JSON or as Python prints them; any
    other value as it is.

    Raises:
        DataError: the text begins as messages do, and cannot be read.
    """
    if isinstance(value, list) and any(isinstance(item, str) for item in value):
        items = [from_text(item, name) for item in value]
        return items if all(isinstance(item, dict) for item in items) else value
    if not (isinstance(value, str) and begins_with(value, "[", "{")):
        return value
    begins = _MESSAGES.match(value) and (
        name in ("messages", "conversations")
        or (begins_with(value, "[") and value.rstrip().endswith("]"))
    )
    try:
        decoded = cell_value(value)
    except ValueError as error:
        if begins:
            raise DataError(
                f"not a list: column {name} holds a text that only begins like messages ({error})",
            ) from None
        return value
    items = decoded if isinstance(decoded, list) else [decoded]
    return decoded if begins or (items and all(map(is_turn, items))) else value


def fold(words: str) -> str:
    """A text without the differences that do not matter: case and white space."""
    return " ".join(words.lower().split())


def prompt_digest(messages: Conversation) -> str:
    """The name of a prompt: equal for prompts that differ in case and white space only."""
    return f"{short_hash(*(fold(m.content) for m in messages)):016x}"


def short_hash(*words: str) -> int:
    """A number of 64 bits for these words."""
    return int.from_bytes(
        hashlib.blake2b("\x1f".join(words).encode(), digest_size=8).digest(),
        "big",
    )


def checked_prompt(messages: Conversation) -> Conversation:
    """The prompt itself, if it can be answered."""
    if not messages:
        raise DataError("empty prompt: no turn before the response")
    if messages[-1].role == "assistant":
        raise DataError("prompt ends on an assistant turn: nothing is left to answer")
    if messages[-1].role == "system":
        raise DataError("prompt without a question: it ends on a system turn")
    if not messages[-1].content.strip():
        raise DataError("empty prompt: its last turn holds no text")
    return messages


def checked_response(messages: Conversation, name: str) -> Conversation:
    """The response itself, if it ends on an assistant turn that says something."""
    if not messages:
        raise DataError(f"empty response: {name} has no turn after the prompt")
    if messages[-1].role != "assistant":
        raise DataError(f"response ends on a {messages[-1].role} turn: in {name}")
    if messages[-1].is_empty:
        raise DataError(f"empty response: {name} holds no text")
    return messages


SYSTEM = LISTS["system"]
"""Names of a column with the system prompt."""
_QUESTIONS = ("question", "query", "problem")
_ABOVE = {"inputs": ("definition",), **dict.fromkeys(_QUESTIONS, ("instruction",))}
_PASSAGES = ("passage", "article")
_LETTERED = re.compile(r"\A\s*\(?[A-Z][).:]\s*")
_PLACEHOLDERS = {"noinput", "n/a", "none", ""}


def system_turn(row: Row) -> Conversation:
    """The system prompt of a row as a turn, where a column holds one; also as Anthropic's blocks
    and Gemini's parts.
    """
    name = next((name for name in SYSTEM if filled(row, name)), "")
    if not name:
        return ()
    value = row[name]
    if isinstance(value, list) or (isinstance(value, Mapping) and "parts" in value):
        return read_message({"role": "system", "content": value}, name)
    return (Message("system", as_text(value, name)),)


def prompt_turns(row: Row, *names: str) -> Conversation:
    """The prompt of a row: the first of these columns that is filled, with the columns that belong
    to a prompt beside it.

    A text is a question. `system` (or another name of it) and the turns of `history` and `context`
    come before it, and `instruction` above a `question`. Texts in `input` and `context` come below
    it after a blank line, as Alpaca has them. Messages, and a transcript that waits for the
    assistant, are read as they are. Without any of these columns there is no prompt.
    """
    if not has(row, *names):
        return ()
    name = next((name for name in names if filled(row, name)), "") or first(row, *names)[0]
    value = row[name]
    if is_transcript(value) and value.rstrip().endswith("\n\nAssistant:"):
        return system_turn(row) + split_transcript(value)[:-1]
    if not isinstance(from_text(value, name), str | int | float):
        messages = turns_at(row, name, "user")
        return (
            messages if messages and messages[0].role == "system" else system_turn(row) + messages
        )
    return system_turn(row) + earlier_turns(row, name) + _question(row, name)


def _question(row: Row, name: str) -> Conversation:
    words = text(row, name)
    for above in _ABOVE.get(name, ()):
        if filled(row, above) and fold(str(dict.get(row, above))) not in fold(words):
            words = f"{text(row, above)}\n\n{words}"
    passages = [
        column
        for column in _PASSAGES
        if name in _QUESTIONS and isinstance(dict.get(row, column), str)
    ]
    for beside in ("input", "context", *passages):
        if beside != name and filled(row, beside) and not _is_messages(dict.get(row, beside)):
            words = with_input(words, text(row, beside))
    for listed in ("choices", "options") if name in _QUESTIONS else ():
        if (
            filled(row, listed)
            and _is_prose(dict.get(row, listed))
            and fold(str(dict.get(row, listed))) not in fold(words)
        ):
            words = f"{words}\n{text(row, listed)}"
    choices = options(row) if name in _QUESTIONS else []
    if choices and not all(fold(choice) in fold(words) for _, choice in choices):
        words = "\n".join([words, *(f"{letter}. {choice}" for letter, choice in choices)])
    return (Message("user", words),)


def options(row: Row) -> list[tuple[str, str]]:
    """The options of a question with their letters: `choices` or `options`, a list of texts, or
    texts beside their labels.
    """
    given = ((name, dict.get(row, name)) for name in ("choices", "options") if filled(row, name))
    name = next((n for n, v in given if not (_is_prose(v) or isinstance(v, int | float))), "")
    value = structure_in(row[name]) if name else []
    if not isinstance(value, Mapping):
        letters = map(chr, count(ord("A")))
        texts = (_LETTERED.sub("", as_text(choice, name)) for choice in sequence(value, name))
        return list(zip(letters, texts, strict=False))
    if not {"text", "label"} <= value.keys():
        pairs = [(letter, choice) for letter, choice in value.items() if not missing(choice)]
    else:
        labels, choices = (sequence(value[key], name) for key in ("label", "text"))
        if len(labels) != len(choices):
            raise DataError(
                f"uneven lists: {len(labels)} labels but {len(choices)} texts in column {name}",
            )
        pairs = zip(labels, choices, strict=True)
    return [(as_text(label, name), as_text(choice, name)) for label, choice in pairs]


def with_input(instruction: str, words: str) -> str:
    """Instruction, blank line, input; an input that only says there is none counts as empty."""
    word = "".join(words.lower().split()).strip("<>[]().")
    if word in _PLACEHOLDERS:
        return instruction
    return f"{instruction}\n\n{words}" if instruction.strip() else words


def earlier_turns(row: Row, name: str = "") -> Conversation:
    """The turns of `history` (pairs of question and answer, or messages) and of a `context` of
    messages; not of column `name`.
    """
    earlier: Conversation = ()
    if name != "history" and filled(row, "history") and not _is_prose(dict.get(row, "history")):
        for item in sequence(row["history"], "history"):
            earlier += _exchange(item)
    if name != "context" and _is_messages(dict.get(row, "context")):
        earlier += turns_at(row, "context", "user")
    return earlier


def _exchange(item: object) -> Conversation:
    if isinstance(item, Mapping):
        return read_message(item, "history")
    if not isinstance(item, list | tuple) or len(item) != 2:
        raise DataError("unreadable history: each entry needs a question and an answer")
    return Message("user", as_text(item[0], "history")), assistant(as_text(item[1], "history"))


def filled(row: Row, name: str) -> bool:
    """True if a column holds more than white space and brackets; looking does not count as
    reading.
    """
    value = dict.get(row, name)
    return not missing(value) and (
        bool(value.strip()) if isinstance(value, str) else value not in ([], {}, ())
    )


def _is_messages(value: object) -> bool:
    """True for a list of messages, and for the JSON text of one."""
    value = from_text(value, "")
    return isinstance(value, list | tuple) and bool(value) and all(map(is_turn, value))


def _is_prose(value: object) -> bool:
    """True for a text that is no list or object of JSON."""
    return isinstance(structure_in(value), str)


def row_tools(row: Row) -> str:
    """The schemas in the column `tools` or `functions`, as `Message.tools` holds them; other
    contents are not read.
    """
    for name in ("tools", "functions"):
        if tool_schemas(dict.get(row, name)):
            return tool_schemas(row[name])
    return ""


def turns_at(
    row: Row,
    name: str,
    speaker: ChatRole,
) -> Conversation:
    """`turns` of a cell. The messages that its JSON text holds replace it, so that their keys are
    recorded as well.
    """
    _, value = first(row, name)
    if (decoded := from_text(value, name)) is not value:
        row[name] = decoded
    return turns(row[name], speaker, name)


def is_transcript(value: object) -> bool:
    return isinstance(value, str) and re.match(r"\s*(Human|Assistant):", value) is not None


def split_transcript(transcript: str) -> Conversation:
    """A transcript -> its turns, without the white space around each."""
    before, *parts = _SPEAKER.split("\n\n" + transcript.lstrip())
    if before.strip() or not parts:
        raise DataError("not a transcript: it does not begin with a Human or an Assistant turn")
    spoken = zip(parts[::2], parts[1::2], strict=True)
    return tuple(
        Message("user" if speaker == "Human" else "assistant", words.strip())
        for speaker, words in spoken
    )


def attempt(make: Callable[[Item], T], items: Iterable[Item]) -> Iterator[T | DataError]:
    """One record for each item, or the reason why there is none: the other parts of a row stay
    good.
    """
    for item in items:
        try:
            yield make(item)
        except DataError as error:
            yield error


def up_to_reply(messages: Conversation, row: Row) -> Demonstration:
    """The turns up to the last one of the assistant; those after it are left out.

    Raises:
        DataError: the assistant has none.
    """
    last = max((n for n, turn in enumerate(messages) if turn.role == "assistant"), default=-1)
    if last < 0:
        raise DataError("no assistant turn: the conversation demonstrates nothing")
    if last < len(messages) - 1:
        leave_out(row, "turns after the last reply")
    return Demonstration(messages[: last + 1])


def until_reply(messages: Conversation, row: Row) -> Conversation:
    """The turns that wait for a reply; the reply at their end is left out."""
    if messages and messages[-1].role == "assistant":
        leave_out(row, "last reply")
        messages = messages[:-1]
    return messages


def demonstration(prompt: Conversation, response: str) -> Demonstration:
    return Demonstration(
        checked_prompt(prompt) + checked_response((assistant(response),), "the response"),
    )


def feedback(
    prompt: Conversation,
    response: Conversation,
    desirable: bool,
) -> Feedback:
    return Feedback(
        checked_prompt(prompt),
        checked_response(response, "the response"),
        desirable,
    )


def checked_comparison(pair: Comparison) -> Comparison:
    """The comparison itself, if its prompt can be answered and its sides say different things.

    Its group is the prompt's digest unless the source names one.

    Raises:
        DataError: the prompt or a response is empty, a response does not end on an assistant turn,
            or both are equal and one is preferred. (Equal responses that tie are kept.)
    """
    checked_prompt(pair.prompt)
    if pair.chosen == pair.rejected and not pair.tie:
        raise DataError("equal responses: chosen and rejected are the same")
    checked_response(pair.chosen, "chosen")
    checked_response(pair.rejected, "rejected")
    return pair if pair.group else replace(pair, group=prompt_digest(pair.prompt))
