"""Whole conversations: OpenAI's `messages` and ShareGPT's `conversations`; and plain prompt/response rows.

https://platform.openai.com/docs/guides/supervised-fine-tuning,
https://github.com/lm-sys/FastChat/blob/main/docs/training.md,
https://huggingface.co/docs/trl/dataset_formats#prompt-completion
"""

from __future__ import annotations

from collections.abc import Iterator

from tether.core.errors import DataError
from tether.core.types import Conversation, Demonstration, Prompt
from tether.data.formats.fields import checked_prompt, checked_response, leftover, missing, system_turn, turns
from tether.data.formats.format import Format, Row, having
from tether.data.formats.preference import prompt_turns

RESPONSES = ("response", "completion", "output", "answer")
_PROMPTS = ("prompt", "question", "query")


def conversation(row: Row) -> Conversation:
    """All turns of a row, with its system text first where that is a column of its own."""
    name = "conversations" if missing(row.get("messages")) else "messages"
    if missing(row.get(name)):
        raise DataError("missing text: nothing in column messages or conversations")
    messages = turns(row[name], "user", name)
    return messages if messages and messages[0].role == "system" else system_turn(row) + messages


def read_demonstration(row: Row) -> Iterator[Demonstration]:
    """Turns after the last assistant turn are left out: nothing is learned from them."""
    messages = conversation(row)
    while messages and messages[-1].role != "assistant":
        messages = messages[:-1]
    if not messages:
        raise DataError("no assistant turn: the conversation demonstrates nothing")
    checked_response(messages, "the last assistant turn")
    if messages[0].role == "assistant" and len(messages) == 1:
        raise DataError("empty prompt: the conversation is a single assistant turn")
    yield Demonstration(messages, metadata=_rest(row))


def read_prompt(row: Row) -> Iterator[Prompt]:
    """The conversation up to its last assistant turn if it ends on one, else all of it."""
    messages = conversation(row)
    if messages and messages[-1].role == "assistant":
        messages = messages[:-1]
    yield Prompt(checked_prompt(messages), metadata=_rest(row))


def _rest(row: Row) -> dict[str, object]:
    return leftover(row, ("id", "system", "messages", "conversations"))


def read_prompt_response(row: Row) -> Iterator[Demonstration]:
    prompt = checked_prompt(prompt_turns(row, *_PROMPTS))
    name = next((name for name in RESPONSES if not missing(row.get(name))), None)
    if name is None:
        raise DataError("missing text: nothing in column response")
    response = checked_response(turns(row[name], "assistant", name), "the response")
    yield Demonstration(prompt + response, metadata=leftover(row, ("id", "system", *_PROMPTS, name)))


FORMATS = (
    Format("messages", having("messages"), {Demonstration: read_demonstration, Prompt: read_prompt}),
    Format("sharegpt", having("conversations"), {Demonstration: read_demonstration, Prompt: read_prompt}),
    Format(
        "prompt_response", having("prompt|question|query", "response|completion|output"), {Demonstration: read_prompt_response}
    ),
)
