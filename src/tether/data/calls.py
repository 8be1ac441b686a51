"""The calls in a sampled reply, read by transformers' response templates.

A response template says how a family of models writes thoughts and calls
(https://huggingface.co/docs/transformers/main/en/chat_response_parsing). Which one fits is proven, not
guessed: what the chat template writes for a reply with a call must be read as that call.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress

from tether.core.errors import DataError
from tether.core.tables import table_beside
from tether.core.thoughts import opened_by
from tether.core.types import Ids, Json, JsonValue, Message, Rollout, user
from tether.data.chat import ChatEncoder

_TABLE: Json = table_beside(__file__, "calls.toml")
_TOOLS = _TABLE["tools"]
BEGINNING = 64
"""Tokens before a reply that hold the beginning of its turn."""
OPENING = 16
"""Characters of a prompt that begin a reply, where a template writes no more behind the question."""
_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"


class Calls:
    """Reads the calls of replies.

    Args:
        tools: the JSON text of the schemas of the functions that may be called; their types decide
            what an argument is read as.

    Raises:
        DataError: the chat template leaves out tools, or no response template reads its calls.
    """

    def __init__(self, encoder: ChatEncoder, tools: str) -> None:
        self.encoder = encoder
        self.tools = tools
        question = Message("user", "a", tools=_TOOLS)
        try:
            encoder.prompt((question,))
        except DataError as error:
            raise DataError(
                f"{error}. For models of the ChatML family, chatml-tools is one",
            ) from None
        reply = Message("assistant", "", tool_calls=(_TABLE["call"],))
        probe = encoder.chat.reply((question,), reply)
        fitting = (one for one in _templates(encoder) if _reads(encoder, one, *probe))
        template = next(fitting, None)
        if template is None:
            raise DataError(
                f"the calls of this chat template, such as {probe[1][:80]!r}, cannot be read: the "
                "tokenizer has no response_template that reads them. Set one in "
                "tokenizer_config.json, or model.chat_template to a template with calls in "
                "<tool_call> marks",
            )
        self.template = template

    def read(self, prompt: Ids, reply: Ids, number: int) -> Message:
        """A sampled reply as a message.

        Args:
            prompt: the ids before it; the last BEGINNING are read.
            number: of the calls before it in the episode; calls get ids by their number.

        Raises:
            DataError: a call cannot be read, or lacks a name or arguments; a sentence for the
                model.
        """
        before, text = (
            self.encoder.tokenizer.decode([*ids], skip_special_tokens=False)
            for ids in (prompt[-BEGINNING:], reply)
        )
        row = _parsed(self.encoder, self.template, before, text, self.tools)
        calls = [
            {"id": _name(place), "type": "function", "function": _function(call)}
            for place, call in enumerate(row.get("tool_calls") or (), number)
        ]
        return Message(
            "assistant",
            str(row.get("content") or ""),
            tool_calls=tuple(map(json.dumps, calls)),
            reasoning=str(row.get("reasoning_content") or row.get("thinking") or ""),
        )

    def called(self, rollout: Rollout) -> bool:
        """True if a sampled reply has calls, and all of them can be read."""
        with suppress(DataError):
            return bool(self.read(rollout.prompt_ids, rollout.response_ids, 0).tool_calls)
        return False


def _function(call: JsonValue) -> Json:
    """The name and the arguments of a call.

    Raises:
        DataError: it lacks one of them.
    """
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise DataError("a call needs the name of a function and its arguments")
    if not isinstance(function.get("arguments"), dict):
        raise DataError(f"the call of {function['name']} has no object of arguments")
    return {key: function[key] for key in ("name", "arguments")}


def _templates(encoder: ChatEncoder) -> Iterator[Json]:
    if own := encoder.tokenizer.response_template:
        yield own
    content = {
        "content": "text",
        "close_pattern": encoder.chat.stop.pattern,
        "repeats": True,
        "join": "",
    }
    for calls in _TABLE["writings"]:
        several = {**calls, "repeats": True}
        fields = {"reasoning_content": _TABLE["thought"], "tool_calls": several, "content": content}
        yield {
            "defaults": {"role": "assistant"},
            "start_anchor": _generation_prompt(encoder),
            "fields": fields,
        }


def _generation_prompt(encoder: ChatEncoder) -> str:
    """The end of a prompt that begins a reply, without the mark of a thought."""
    before, after = (
        encoder.chat.render((user("a"),), waiting=waiting) for waiting in (False, True)
    )
    begun = after.removeprefix(before) if after.startswith(before) else after[-OPENING:]
    opening = opened_by(begun)
    return (begun.rpartition(opening)[0] if opening else begun) or begun


def _reads(encoder: ChatEncoder, template: Json, before: str, text: str) -> bool:
    """True if the template reads the probe's call from what the chat template writes for it."""
    try:
        row = _parsed(encoder, template, before, text, _TOOLS)
    except DataError:
        return False
    functions = [call.get("function") for call in row.get("tool_calls") or ()]
    return (
        functions == [json.loads(_TABLE["call"])["function"]]
        and not str(row.get("content") or "").strip()
    )


def _parsed(encoder: ChatEncoder, template: Json, before: str, text: str, tools: str) -> Json:
    """A reply as a message in OpenAI's format.

    Raises:
        DataError: the template cannot read it.
    """
    try:
        return encoder.tokenizer.parse_response(
            text,
            template,
            prefix=before,
            tools=json.loads(tools),
        )
    except Exception as error:  # noqa: BLE001  (what a model wrote may break any parser)
        fault = str(error).partition("\n")[0]
        raise DataError(f"the reply has a call that cannot be read: {fault:.200}") from None


def _name(number: int) -> str:
    """The id of a call: nine letters or digits, as Mistral's templates want it."""
    digits = ""
    for _ in range(5):
        number, place = divmod(number, len(_DIGITS))
        digits = _DIGITS[place] + digits
    return f"call{digits}"
