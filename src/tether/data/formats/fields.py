"""From the values of a row to checked core values: texts, turns, labels, comparisons.

A reason in a `DataError` reads "category: detail"; quarantined rows are counted by the category.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from tether.core.errors import DataError
from tether.core.types import ChatRole, Comparison, Conversation, Demonstration, Feedback, Json, Message, assistant
from tether.data.formats.json_rows import Row, fault, kind_name, parse

T = TypeVar("T")
Reader = Callable[[Row], Iterable[Any]]
"""A row -> its records. A `DataError` that is raised condemns the row, one that is yielded only that part of it."""


class LeftOutError(DataError):
    """A sound row, or part of one, that has no place among the records of this kind: counted, and no error in strict reading."""


_SPEAKERS: dict[ChatRole, str] = {
    "user": "user human prompter",
    "assistant": "assistant gpt bot chatgpt model function_call",
    "system": "system developer",
    "tool": "tool function observation",
}
ROLES: dict[str, ChatRole] = {name: role for role, names in _SPEAKERS.items() for name in names.split()}
"""Every name that data sets give to a speaker."""
# Only a blank line before the speaker begins a turn: people also write "Human:" within one.
_SPEAKER = re.compile(r"\n\n(Human|Assistant):")
_TRUE, _FALSE = {"true", "1", "1.0", "yes", "+"}, {"false", "0", "0.0", "no", "-"}
_TURN_SHAPES = ({"role", "content"}, {"role", "tool_calls"}, {"from", "value"})


def unfolded(rest: Json) -> Json:
    """Columns that nobody read, as metadata: a column `metadata` is unfolded into them."""
    inner = rest.get("metadata")
    if not isinstance(inner, Mapping):
        return rest
    return {**inner, **{name: value for name, value in rest.items() if name != "metadata"}}


def missing(value: Any) -> bool:
    """True if a cell holds nothing: null, or the NaN that data frames write for it."""
    return value is None or (isinstance(value, float) and math.isnan(value))


def has(row: Row, *names: str) -> bool:
    """True if one of these columns holds something. Looking does not count as reading."""
    return any(not missing(dict.get(row, name)) for name in names)


def first(row: Row, *names: str) -> tuple[str, Any]:
    """The first of these columns that holds something, and what it holds.

    Raises:
        DataError: none of them does.
    """
    for name in names:
        if has(row, name):
            return name, row[name]
    raise DataError(f"missing text: nothing in column {' or '.join(names)}")


def text(row: Row, *names: str) -> str:
    """The text in the first of these columns that holds something; numbers and booleans are written out."""
    name, value = first(row, *names)
    return as_text(value, name)


def optional(row: Row, *names: str) -> str:
    """The same, or the empty text where none of them holds anything."""
    return text(row, *names) if has(row, *names) else ""


def as_text(value: Any, name: str) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, bool | int) or (isinstance(value, float) and math.isfinite(value)):
        return str(value)
    raise DataError(f"not a text: column {name} holds {value if isinstance(value, float) else kind_name(value)}")


def number(value: Any, name: str) -> float:
    """A finite number, also from the text of one."""
    try:
        result = float(value)
    except (TypeError, ValueError, OverflowError):
        result = math.nan
    if not math.isfinite(result):
        raise DataError(f"not a number: column {name} holds {value!r:.40}")
    return result


def boolean(value: Any, name: str) -> bool:
    """A verdict, written as a boolean, as 0 or 1, or as a word for them."""
    word = str(value).strip().lower()
    if word not in _TRUE | _FALSE:
        raise DataError(f"unreadable label: column {name} holds {value!r:.40}, neither true nor false")
    return word in _TRUE


def sequence(value: Any, name: str) -> list[Any]:
    """A list, also from the JSON text of one, as CSV files carry it."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            value = _json_value(value, name)
        except ValueError as error:
            raise DataError(f"not a list: column {name} holds a text that only begins like one ({error})") from None
    if isinstance(value, list | tuple):
        return list(value)
    raise DataError(f"not a list: column {name} holds {kind_name(value)}")


def texts(row: Row, name: str) -> tuple[str, ...]:
    """The texts that a column lists."""
    return tuple(as_text(item, name) for item in sequence(row.get(name), name))


def turns(value: Any, speaker: ChatRole, name: str) -> Conversation:
    """A text as one turn of `speaker`; a message or a list of them (also as JSON text) as they are.

    Both spellings are read: `role`/`content` (OpenAI) and `from`/`value` (ShareGPT). Empty system turns are dropped.
    """
    value = _from_json(value)
    if isinstance(value, Mapping):
        value = [value]
    if isinstance(value, list | tuple):
        messages = tuple(_message(item, name) for item in _sound(value, name))
        return tuple(m for m in messages if m.role != "system" or m.content.strip())
    return (Message(speaker, as_text(value, name)),)


def _sound(value: Any, name: str) -> Any:
    """The value itself. What a cell's JSON text holds went past the check of its row, for which it was one text."""
    if reason := fault(value):
        raise DataError(f"{reason}, in the JSON text of column {name}")
    return value


def _from_json(value: Any) -> Any:
    """Messages that a CSV cell carries as JSON; any other text stays a text."""
    if not (isinstance(value, str) and value.startswith(('[{"', '{"'))):
        return value
    try:
        decoded = parse(value)
    except ValueError:
        return value
    items = decoded if isinstance(decoded, list) else [decoded]
    keys = [item.keys() if isinstance(item, dict) else set() for item in items]
    return decoded if keys and all(any(own >= shape for shape in _TURN_SHAPES) for own in keys) else value


def _message(item: Any, name: str) -> Message:
    if not isinstance(item, Mapping):
        raise DataError(f"not a message: column {name} lists {kind_name(item)} where a role and a content belong")
    spoken = item.get("role") or item.get("from")
    role = ROLES.get(str(spoken).strip().lower())
    if role is None:
        raise DataError(f"unknown role: {spoken!r:.40} in column {name}")
    content = item.get("content") if item.get("content") is not None else item.get("value")
    if isinstance(content, list):
        if not all(isinstance(part, Mapping) and isinstance(part.get("text"), str) for part in content):
            raise DataError(f"not a text: a turn in column {name} has a part that is not text")
        content = "".join(part["text"] for part in content)
    calls = sequence(item.get("tool_calls") or (), name) if role == "assistant" else ()
    content = "" if content is None and calls else content
    if not isinstance(content, str):
        raise DataError(f"not a message: the content of a turn in column {name} is {kind_name(content)} and not a text")
    return Message(role, content, tuple(_tool_call(call, name) for call in calls), tool_schemas(item.get("tools")))


def _tool_call(call: Any, name: str) -> str:
    """The JSON text of a call in OpenAI's format; its arguments, there the text of an object, become the object itself."""
    try:
        call = _json_value(call, name)
        function, own = call.get("function", call), {"id": call["id"]} if call.get("id") else {}
        called = {"name": function["name"], "arguments": _json_value(function["arguments"], name)}
    except (AttributeError, KeyError, TypeError, ValueError):
        called, own = {}, {}
    if not (called and isinstance(called["name"], str) and isinstance(called["arguments"], Mapping)):
        raise DataError(f"unreadable tool call: in column {name} one has no function with a name and arguments")
    return json.dumps({**own, "type": "function", "function": called}, ensure_ascii=False)


def _json_value(value: Any, name: str) -> Any:
    return _sound(parse(value), name) if isinstance(value, str) else value


def tool_schemas(value: Any) -> str:
    """The JSON text of a list of tools' schemas; nothing for any other value, since a column of that name may hold anything."""
    with contextlib.suppress(DataError):
        schemas = sequence(value, "tools")
        if schemas and all(isinstance(schema, Mapping) for schema in schemas):
            return json.dumps(schemas, ensure_ascii=False)
    return ""


def fold(words: str) -> str:
    """A text without the differences that do not matter: case and white space."""
    return " ".join(words.lower().split())


def prompt_digest(messages: Conversation) -> str:
    """The name of a prompt: equal for prompts that differ in case and white space only."""
    return f"{short_hash(*(fold(m.content) for m in messages)):016x}"


def short_hash(*words: str) -> int:
    """A number of 64 bits that stands for these words."""
    return int.from_bytes(hashlib.blake2b("\x1f".join(words).encode(), digest_size=8).digest(), "big")


def checked_prompt(messages: Conversation) -> Conversation:
    """The prompt itself, if somebody can answer it."""
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


def system_turn(row: Row) -> Conversation:
    """The column `system` as a turn, where it holds one."""
    value = optional(row, "system")
    return (Message("system", value),) if value.strip() else ()


def prompt_turns(row: Row, *names: str) -> Conversation:
    """The prompt of a row, whether a text, messages or a transcript that waits for the assistant; nothing without one."""
    if not has(row, *names):
        return ()
    name, value = first(row, *names)
    waits = is_transcript(value) and value.rstrip().endswith("\n\nAssistant:")
    return system_turn(row) + (split_transcript(value)[:-1] if waits else turns(value, "user", name))


def is_transcript(value: Any) -> bool:
    return isinstance(value, str) and re.match(r"\s*(Human|Assistant):", value) is not None


def split_transcript(transcript: str) -> Conversation:
    """A transcript -> its turns, without the white space around each."""
    before, *parts = _SPEAKER.split("\n\n" + transcript.lstrip())
    if before.strip() or not parts:
        raise DataError("not a transcript: it does not begin with a Human or an Assistant turn")
    spoken = zip(parts[::2], parts[1::2], strict=True)
    return tuple(Message("user" if speaker == "Human" else "assistant", words.strip()) for speaker, words in spoken)


def attempt(make: Callable[[Any], T], items: Iterable[Any]) -> Iterator[T | DataError]:
    """One record for each item, or the reason why there is none: the other parts of a row stay good."""
    for item in items:
        try:
            yield make(item)
        except DataError as error:
            yield error


def up_to_reply(messages: Conversation) -> Demonstration:
    """The turns up to the last one of the assistant.

    Raises:
        DataError: the assistant has none.
    """
    while messages and messages[-1].role != "assistant":
        messages = messages[:-1]
    if not messages:
        raise DataError("no assistant turn: the conversation demonstrates nothing")
    return Demonstration(messages)


def demonstration(prompt: Conversation, response: str) -> Demonstration:
    return Demonstration(checked_prompt(prompt) + checked_response((assistant(response),), "the response"))


def feedback(prompt: Conversation, response: Conversation, desirable: bool) -> Feedback:
    return Feedback(checked_prompt(prompt), checked_response(response, "the response"), desirable)


def checked_comparison(pair: Comparison) -> Comparison:
    """The comparison itself, if its prompt can be answered and its sides say different things.

    Its group is the prompt's digest unless the source names one.

    Raises:
        DataError: the prompt or a response is empty, a response does not end on an assistant turn, or both are equal
            and yet one is preferred. (Equal responses that tie contradict nothing and are kept.)
    """
    checked_prompt(pair.prompt)
    if pair.chosen == pair.rejected and not pair.tie:
        raise DataError("equal responses: chosen and rejected are the same")
    checked_response(pair.chosen, "chosen")
    checked_response(pair.rejected, "rejected")
    return pair if pair.group else replace(pair, group=prompt_digest(pair.prompt))
