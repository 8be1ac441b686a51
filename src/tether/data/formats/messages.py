"""One message of a conversation, in the spellings of data sets and of providers' APIs.

- OpenAI's chat: https://platform.openai.com/docs/api-reference/chat
- ShareGPT's `from` and `value`
- Anthropic's content blocks: https://docs.anthropic.com/en/api/messages
- Gemini's `parts`: https://ai.google.dev/api/caching#Content
- Cohere's `message`: https://docs.cohere.com/v1/reference/chat
- thoughts, as vLLM and gpt-oss write them
- flags that keep a turn out of the loss:
  https://platform.openai.com/docs/guides/supervised-fine-tuning,
  https://docs.axolotl.ai/docs/dataset-formats/conversation.html,
  https://swift.readthedocs.io/en/latest/Customization/Custom-dataset.html
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from tether.core.errors import DataError
from tether.core.types import ChatRole, Conversation, Entries, Facts, JsonValue, Message, Row
from tether.data.formats.json_rows import kind_name
from tether.data.formats.table import LISTS, word_lists
from tether.data.formats.values import (
    FALSE,
    TRUE,
    as_text,
    begins_with,
    list_in,
    missing,
    sequence,
    structure_in,
)

_SPEAKERS: tuple[ChatRole, ...] = ("user", "assistant", "system", "tool")
ROLES: dict[str, ChatRole] = {
    name: role for role in _SPEAKERS for name in word_lists("speakers")[role]
}
"""Every name that data sets give to a speaker."""
_CALLS = ("function_call", "tool_call")
"""Speakers whose words are the JSON text of calls."""
SPEAKER, _CONTENT, THOUGHTS, _FLAGS, _ASKED, _ANSWERED = (
    LISTS[name]
    for name in ["speaker", "content", "thoughts", "flags", "questions", "replies_to_questions"]
)
_SPOKEN = {**ROLES, **dict.fromkeys(_ASKED, "user"), **dict.fromkeys(_ANSWERED, "assistant")}
TEMPLATE_ARGUMENTS = "chat_template_kwargs"
"""The column of a row's arguments of the chat template, as TRL names it."""
_OF_A_TOOL = {"name", "function", "functionDeclarations", "function_declarations"}
_TOOL_TYPES = (None, "function", "custom")
_TURN_SHAPES = [
    {*shape.split()}
    for shape in (
        "role content",
        "role tool_calls",
        "from value",
        "role parts",
        "role function_call",
    )
]


class NoThought(str):
    """A text that is no thought, though it has the name of one."""

    __slots__ = ()


def is_turn(item: object) -> bool:
    """True if an object has the keys of a message. A cell with the text of such an object holds
    messages.
    """
    return isinstance(item, dict) and any(item.keys() >= shape for shape in _TURN_SHAPES)


def is_exchange(item: object) -> bool:
    """True if an object is a question with its answer, under names of the speakers or of both."""
    return isinstance(item, dict) and {_SPOKEN.get(key) for key in item} >= {"user", "assistant"}


def is_dialogue(row: Row, name: str) -> bool:
    """True if a column lists messages, questions with their answers, or texts by turns."""
    items = list_in(row, name)
    if name == "turns":  # whose texts are questions alone
        return bool(items) and all(map(is_turn, items))
    return bool(items) and (
        all(isinstance(item, str) for item in items)
        or all(is_turn(i) or is_exchange(i) for i in items)
    )


@dataclass
class _Parts:
    """The parts of one message, in their order."""

    text: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    results: list[Message] = field(default_factory=list)


def read_message(item: object, name: str) -> Conversation:
    """The turns of one message of column `name`: one, but for results of tools beside a text, and
    for a question with its answer.

    Raises:
        DataError: it has no speaker that is known, no text, or parts that are not text.
    """
    if not isinstance(item, Mapping):
        raise DataError(
            f"not a message: column {name} lists {kind_name(item)} where a role and a "
            "content belong",
        )
    spoken = _first(item, SPEAKER)
    if missing(spoken) and (both := _exchange(item, name)):
        return both
    word = str(spoken).strip().lower()
    role = ROLES.get(word)
    if role is None:
        raise DataError(f"unknown role: {spoken!r:.40} in column {name}")
    parts = _Parts()
    content = _first(item, _CONTENT)
    channel, recipient = (str(_peek(item, key) or "") for key in ("channel", "recipient"))
    if word in _CALLS:
        parts.calls += _called(content, name)
    elif role == "assistant" and recipient.startswith("functions."):
        parts.calls.append(
            _tool_call(
                {"name": item["recipient"].removeprefix("functions."), "arguments": content},
                name,
            ),
        )
        _first(item, ("channel",))
    elif role == "assistant" and channel == "analysis":
        _add(inner := _Parts(), content, name)
        _first(item, ("channel",))
        return (Message(role, "", reasoning="".join(inner.text)),)
    else:
        _add(parts, content, name)
        _first(item, ("channel",) if channel == "final" else ())
    if role == "assistant":
        calls = sequence(item["tool_calls"], name) if _peek(item, "tool_calls") else []
        parts.calls += [_tool_call(call, name) for call in calls]
        parts.calls += (
            [_tool_call(item["function_call"], name)] if _peek(item, "function_call") else []
        )
        parts.reasoning += _thought(item, parts)
    if not parts.text and not parts.calls and not parts.results:
        raise DataError(
            f"not a message: the content of a turn in column {name} is "
            f"{kind_name(content)} and not a text",
        )
    if parts.results and not (parts.text or parts.calls):
        return tuple(parts.results)
    turn = Message(
        role,
        "".join(parts.text),
        tuple(parts.calls),
        tool_schemas(item["tools"]) if tool_schemas(_peek(item, "tools")) else "",
        reasoning="".join(parts.reasoning),
        name=as_text(item["name"], name) if _peek(item, "name") else "",
        tool_call_id=as_text(item["tool_call_id"], name)
        if role == "tool" and _peek(item, "tool_call_id")
        else "",
        train=_is_trained(item, role, name),
        template=template_arguments(item),
    )
    return (*parts.results, turn)


def _thought(item: Facts, parts: _Parts) -> list[str]:
    """The thought in a field of its own, unless the content has one."""
    key = thought_column(item)
    return [item[key]] if key and not parts.reasoning and not thinks("".join(parts.text)) else []


def thought_column(item: Facts) -> str:
    """The key of the thought; empty if none holds a text."""
    given = {key: _peek(item, key) for key in THOUGHTS}
    texts = (key for key, own in given.items() if isinstance(own, str) and own.strip())
    return next((key for key in texts if not isinstance(given[key], NoThought)), "")


def thinks(words: str) -> bool:
    """True for a reply that has its thought within."""
    return "<think>" in words or "</think>" in words


def with_thoughts(messages: Iterable[Message]) -> Conversation:
    """The turns, a thought that is one of its own (gpt-oss's channel `analysis`) in the reply after
    it.
    """
    turns: list[Message] = []
    for turn in messages:
        before = turns[-1] if turns else turn
        if (
            turn.role == "assistant" == before.role
            and before.is_empty
            and before.reasoning
            and before is not turn
        ):
            turns[-1] = replace(
                turn,
                reasoning="\n".join(filter(None, (before.reasoning, turn.reasoning))),
            )
        else:
            turns.append(turn)
    return tuple(turns)


def _peek(item: Entries, key: str) -> JsonValue:
    """A value without reading it; None where it is missing."""
    value = dict.get(item, key) if isinstance(item, dict) else item.get(key)
    return None if missing(value) else value


def _first(item: Entries, keys: Iterable[str]) -> JsonValue:
    """The value of the first key that has one."""
    for key in keys:
        if key in item and _peek(item, key) is not None:
            return item[key]
    return None


def _exchange(item: Facts, name: str) -> Conversation:
    """A question and its answer, or one turn, under keys that name the speaker: {"user": "...",
    "assistant": "..."}.
    """
    keys = {
        key: _SPOKEN[key] for key in item if key in _SPOKEN and isinstance(_peek(item, key), str)
    }
    if not keys or len({*keys.values()}) < len(keys) or "tool" in keys.values():
        return ()
    order: tuple[ChatRole, ...] = ("system", "user", "assistant")
    return tuple(
        Message(role, item[key])
        for role in order
        for key, speaker in keys.items()
        if speaker == role
    )


def _add(
    parts: _Parts,
    content: object,
    name: str,
) -> None:
    """Sort the content of a message into its parts."""
    if isinstance(content, Mapping) and isinstance(content.get("parts"), list):
        content = content["parts"]
    if isinstance(content, str):
        parts.text.append(content)
    elif isinstance(content, list):
        for part in content:
            _add_part(parts, part, name)
        parts.text += [] if parts.calls or parts.results or parts.text else [""]
    elif content is not None:
        raise DataError(
            f"not a message: the content of a turn in column {name} is "
            f"{kind_name(content)} and not a text",
        )


def _add_part(
    parts: _Parts,
    part: object,
    name: str,
) -> None:
    if isinstance(part, str):
        parts.text.append(part)
        return
    if not isinstance(part, Mapping):
        raise DataError(f"not a text: a turn in column {name} has a part that is {kind_name(part)}")
    kind = str(part.get("type") or "")
    if kind in ("thinking", "reasoning") or part.get("thought") is True:
        inner = _Parts()
        _add(inner, _first(part, ("thinking", "reasoning", "text", "content")), name)
        parts.reasoning += inner.text
    elif kind == "tool_use":
        parts.calls.append(
            _tool_call(
                {"id": part.get("id"), "name": part.get("name"), "arguments": part.get("input")},
                name,
            ),
        )
    elif kind == "tool_result":
        inner = _Parts()
        _add(inner, part.get("content") or "", name)
        parts.results.append(
            Message(
                "tool",
                "".join(inner.text),
                tool_call_id=str(part.get("tool_use_id") or ""),
            ),
        )
    elif call := _first(part, ("functionCall", "function_call")):
        parts.calls.append(
            _tool_call(
                {"name": call.get("name"), "arguments": _first(call, ("args", "arguments")) or {}},
                name,
            ),
        )
    elif result := _first(part, ("functionResponse", "function_response")):
        parts.results.append(
            Message(
                "tool",
                json.dumps(result.get("response"), ensure_ascii=False),
                name=str(result.get("name")),
            ),
        )
    elif kind in ("", "text", "input_text", "output_text", "refusal") and isinstance(
        words := _first(part, ("text", "refusal", "content")),
        str,
    ):
        parts.text.append(words)
    else:
        what = (
            f"a part of type {kind!r:.40}"
            if kind
            else f"a part with {', '.join(part)[:60] or 'nothing in it'}"
        )
        raise DataError(
            f"not a text: a turn in column {name} has {what}, and only text is read. "
            "Leave such rows out",
        )


def _is_trained(
    item: Entries,
    role: ChatRole,
    name: str,
) -> bool:
    """False if a flag keeps the turn out of the loss. Only the assistant's turns are ever trained,
    so flags of others are not read unless they say the same.
    """
    trained = True
    for key in filter(item.__contains__, _FLAGS):
        word = str(_peek(item, key)).strip().lower()
        if _peek(item, key) is None or (role != "assistant" and word not in FALSE):
            continue
        if word not in TRUE | FALSE:
            raise DataError(
                f"unreadable flag: {key} of a turn in column {name} is "
                f"{item[key]!r:.40}; it must be 0 or 1",
            )
        trained &= bool(item[key]) and word in TRUE
    if role == "assistant" and _peek(item, "mask") is not None:
        raise DataError(
            f"ambiguous flag: mask of a turn in column {name}; write train: false "
            "where nothing is to be learned",
        )
    if role == "assistant" and (_peek(item, "train_detail") or _peek(item, "training_detail")):
        raise DataError(
            f"parts of a turn: train_detail in column {name} is not supported; write "
            "train: true or false",
        )
    return trained or role != "assistant"


def _called(content: object, name: str) -> list[str]:
    """The calls in the JSON text of one or of a list of them."""
    calls = structure_in(content)
    return [_tool_call(call, name) for call in (calls if isinstance(calls, list) else [calls])]


def _tool_call(call: JsonValue, name: str) -> str:
    """The JSON text of a call in OpenAI's format; its arguments, there the text of an object,
    become the object itself.
    """
    try:
        call = structure_in(call)
        function = structure_in(call.get("function", call))
        call.get("type")
        own = {"id": call["id"]} if call.get("id") else {}
        arguments = function["arguments"] if "arguments" in function else function["parameters"]
        called = {"name": function["name"], "arguments": structure_in(arguments)}
    except (AttributeError, KeyError, TypeError):
        called = {}
        own = {}
    if not (
        called and isinstance(called["name"], str) and isinstance(called["arguments"], Mapping)
    ):
        raise DataError(
            f"unreadable tool call: in column {name} one has no function with a name and arguments",
        )
    return json.dumps({**own, "type": "function", "function": called}, ensure_ascii=False)


def template_arguments(row: Entries) -> str:
    """The JSON text of a row's arguments of the chat template; empty where it has none.

    Raises:
        DataError: they are no object.
    """
    given = structure_in(row.get(TEMPLATE_ARGUMENTS))
    if missing(given) or not given:
        return ""
    if not isinstance(given, Mapping):
        raise DataError(f"{TEMPLATE_ARGUMENTS} is {kind_name(given)} and not an object")
    return json.dumps(given)


def tool_schemas(value: object) -> str:
    """The JSON text of a list of tools' schemas; nothing for any other value, since a column of
    that name may hold anything.

    A schema without its envelope gets one, as chat templates expect. Anthropic's `input_schema` and
    Gemini's `functionDeclarations` are read as well.
    """
    listed = structure_in(value)
    if isinstance(listed, Mapping):
        listed = [] if _OF_A_TOOL.isdisjoint(listed) else [listed]
    schemas = [structure_in(item) for item in listed] if isinstance(listed, list) else [listed]
    if any(begins_with(schema, "{", "[{") for schema in schemas):
        raise DataError("unreadable tools: a text only begins like a schema, and is no JSON")
    if not schemas or not all(isinstance(schema, Mapping) for schema in schemas):
        return ""
    inner = [
        structure_in(s.get("functionDeclarations") or s.get("function_declarations")) or [s]
        for s in schemas
    ]
    return json.dumps(
        [_enveloped(structure_in(schema)) for some in inner for schema in some],
        ensure_ascii=False,
    )


def _enveloped(schema: Row) -> Row:
    if isinstance(function := structure_in(schema.get("function")), dict):
        return {**schema, "function": _with_parameters(function)}
    if not isinstance(schema.get("name"), str) or schema.get("type") not in _TOOL_TYPES:
        return schema
    function = {key: value for key, value in schema.items() if key != "type"}
    return {"type": "function", "function": _with_parameters(function)}


def _with_parameters(function: Row) -> Row:
    """The function with its schema under `parameters`, as an object."""
    own = {key: value for key, value in function.items() if key != "input_schema"}
    schema = function.get("input_schema", own.get("parameters"))
    return own if schema is None else own | {"parameters": structure_in(schema)}
