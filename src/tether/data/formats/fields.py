"""From the values of a row to checked core values: texts, turns, labels, comparisons.

A reason in a `DataError` reads "category: detail"; quarantined rows are counted by the category.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from tether.core.errors import DataError
from tether.core.types import Annotation, ChatRole, Comparison, Conversation, Demonstration, Feedback, Message
from tether.data.formats.format import Row
from tether.data.formats.json_rows import fault, kind_name, parse

ROLES: dict[str, ChatRole] = {
    "user": "user",
    "human": "user",
    "prompter": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "bot": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "system": "system",
    "developer": "system",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
}


def missing(value: Any) -> bool:
    """Whether a cell holds nothing: null, or the NaN that data frames write for it."""
    return value is None or (isinstance(value, float) and math.isnan(value))


def text(row: Row, *names: str) -> str:
    """The text in the first of these columns that holds something; numbers and booleans are written out."""
    for name in names:
        if not missing(row.get(name)):
            return as_text(row[name], name)
    raise DataError(f"missing text: nothing in column {' or '.join(names)}")


def optional(row: Row, *names: str) -> str:
    """The same, or the empty text where none of them holds anything."""
    return "" if all(missing(row.get(name)) for name in names) else text(row, *names)


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
        raise DataError(f"not a number: column {name} holds {value!r:.40}") from None
    if not math.isfinite(result):
        raise DataError(f"not a number: column {name} holds {value!r:.40}")
    return result


def boolean(value: Any, name: str) -> bool:
    """A verdict, written as a boolean, as 0 or 1, or as a word for them."""
    if isinstance(value, bool):
        return value
    word = str(value).strip().lower()
    if word in {"true", "1", "1.0", "yes", "+"}:
        return True
    if word in {"false", "0", "0.0", "no", "-"}:
        return False
    raise DataError(f"unreadable label: column {name} holds {value!r:.40}, neither true nor false")


def sequence(value: Any, name: str) -> list[Any]:
    """A list, also from the JSON text of one, as CSV files carry it."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            value = _sound(parse(value), name)
        except ValueError as error:
            raise DataError(f"not a list: column {name} holds a text that only begins like one ({error})") from None
    if isinstance(value, list | tuple):
        return list(value)
    raise DataError(f"not a list: column {name} holds {kind_name(value)}")


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
    spoken = all(
        isinstance(item, dict) and ({"role", "content"} <= item.keys() or {"from", "value"} <= item.keys()) for item in items
    )
    return decoded if spoken and items else value


def _message(item: Any, name: str) -> Message:
    if not isinstance(item, Mapping):
        raise DataError(f"not a message: column {name} lists {kind_name(item)} where a role and a content belong")
    spoken = item.get("role") or item.get("from")
    role = ROLES.get(str(spoken).strip().lower())
    if role is None:
        raise DataError(f"unknown role: {spoken!r:.40} in column {name}")
    content = item.get("content") if item.get("content") is not None else item.get("value")
    if isinstance(content, list):
        content = "".join(_text_part(part, name) for part in content)
    if not isinstance(content, str):
        raise DataError(f"not a message: the content of a turn in column {name} is {kind_name(content)} and not a text")
    return Message(role, content)


def _text_part(part: Any, name: str) -> str:
    if isinstance(part, Mapping) and isinstance(part.get("text"), str):
        return part["text"]
    raise DataError(f"not a text: a turn in column {name} has a part that is not text")


def leftover(row: Row, used: Collection[str]) -> dict[str, Any]:
    """What the format did not use, for reports; a column `metadata` is unfolded into it."""
    rest = {key: value for key, value in row.items() if key and key not in used and value is not None}
    inner = rest.get("metadata")
    if isinstance(inner, Mapping):
        del rest["metadata"]
        rest = {**inner, **rest}
    return rest


def fold(words: str) -> str:
    """A text without the differences that do not matter: case and white space."""
    return " ".join(words.lower().split())


def digest(messages: Conversation) -> str:
    """The name of a prompt: equal for prompts that differ in case and white space only."""
    return hashlib.blake2b("\x1f".join(fold(m.content) for m in messages).encode(), digest_size=8).hexdigest()


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
    if not messages[-1].content.strip():
        raise DataError(f"empty response: {name} holds no text")
    return messages


def system_turn(row: Row) -> Conversation:
    """The column `system` as a turn, where it holds one."""
    value = optional(row, "system")
    return (Message("system", value),) if value.strip() else ()


def demonstration(prompt: Conversation, response: str, metadata: Mapping[str, Any]) -> Demonstration:
    answer = checked_response((Message("assistant", response),), "the response")
    return Demonstration(checked_prompt(prompt) + answer, metadata=metadata)


def feedback(prompt: Conversation, response: Conversation, desirable: bool, metadata: Mapping[str, Any]) -> Feedback:
    return Feedback(checked_prompt(prompt), checked_response(response, "the response"), desirable, metadata=metadata)


def comparison(
    prompt: Conversation,
    chosen: Conversation,
    rejected: Conversation,
    *,
    tie: bool = False,
    margin: float | None = None,
    probability: float | None = None,
    annotations: Sequence[Annotation] = (),
    group: str = "",
    metadata: Mapping[str, Any] | None = None,
) -> Comparison:
    """A checked comparison; its group is the prompt's digest unless the source names one.

    Raises:
        DataError: the prompt or a response is empty, a response does not end on an assistant turn, or both are equal
            and yet one is preferred. (Equal responses that tie contradict nothing and are kept.)
    """
    checked_prompt(prompt)
    if chosen == rejected and not tie:
        raise DataError("equal responses: chosen and rejected are the same")
    return Comparison(
        prompt=prompt,
        chosen=checked_response(chosen, "chosen"),
        rejected=checked_response(rejected, "rejected"),
        group=group or digest(prompt),
        margin=margin,
        tie=tie,
        probability=probability if probability is not None else (0.5 if tie else 1.0),
        annotations=tuple(annotations),
        metadata=metadata or {},
    )


def judged(
    prompt: Conversation,
    sides: tuple[str, str],
    votes: Sequence[tuple[str, float]],
    *,
    probability: float | None = None,
    margin: float | None = None,
    models: tuple[Any, Any] | None = None,
    metadata: Mapping[str, Any] | None = None,
) -> Comparison:
    """Two responses and the votes on them, each from +1 (the first is better) over 0 (a tie) to -1.

    More than half of the votes decide which side is `chosen`; without that it is a tie. `probability` is that of the
    first side, by default its share of the votes with ties halved. `margin` is taken as it is.
    """
    first, second = sum(lean > 0 for _, lean in votes), sum(lean < 0 for _, lean in votes)
    share = probability if probability is not None else 0.5 + (first - second) / (2 * len(votes))
    swapped = second > first
    ordered = [(Message("assistant", side),) for side in (reversed(sides) if swapped else sides)]
    facts = dict(metadata or {})
    if models is not None:
        facts["chosen_model"], facts["rejected_model"] = reversed(models) if swapped else models
    facts["chosen_position"] = 2 if swapped else 1
    return comparison(
        prompt,
        ordered[0],
        ordered[1],
        tie=2 * max(first, second) <= len(votes),
        margin=margin,
        probability=1.0 - share if swapped else share,
        annotations=[Annotation(name, -lean if swapped else lean) for name, lean in votes],
        metadata=facts,
    )
