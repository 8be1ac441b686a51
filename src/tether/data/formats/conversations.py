"""Demonstrations and prompts: whole conversations, prompt and response, instructions, prompts alone.

OpenAI's `messages` and ShareGPT's `conversations` (https://platform.openai.com/docs/guides/supervised-fine-tuning,
https://github.com/lm-sys/FastChat/blob/main/docs/training.md); prompt and response
(https://huggingface.co/docs/trl/dataset_formats#prompt-completion); Alpaca, Dolly, self-instruct and AlpacaEval's instructions
(https://github.com/tatsu-lab/stanford_alpaca, https://huggingface.co/datasets/databricks/databricks-dolly-15k,
https://github.com/yizhongw/self-instruct, https://github.com/tatsu-lab/alpaca_eval); MT-bench
(https://github.com/lm-sys/FastChat/tree/main/fastchat/llm_judge, https://arxiv.org/abs/2306.05685).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from tether.core.errors import DataError
from tether.core.types import Conversation, Demonstration, Prompt, assistant, user
from tether.data.formats import fields
from tether.data.formats.json_rows import Row

RESPONSES = ("response", "completion", "output", "answer")
_PROMPTS = ("prompt", "question", "query")
_PLACEHOLDERS = {"noinput", "n/a", "none", ""}


def conversation(row: Row) -> Conversation:
    """All turns of a row, with its system text first where that is a column of its own."""
    name, value = fields.first(row, "messages", "conversations")
    messages = fields.turns(value, "user", name)
    messages = messages if messages and messages[0].role == "system" else fields.system_turn(row) + messages
    tools = fields.tool_schemas(row.get("tools"))
    return (replace(messages[0], tools=tools), *messages[1:]) if tools and messages else messages


def read_conversation(row: Row) -> Iterator[Demonstration]:
    """Turns after the last assistant turn are left out: nothing is learned from them."""
    demonstration = fields.up_to_reply(conversation(row))
    fields.checked_response(demonstration.messages, "the last assistant turn")
    if len(demonstration.messages) == 1:
        raise DataError("empty prompt: the conversation is a single assistant turn")
    yield demonstration


def read_opening(row: Row) -> Iterator[Prompt]:
    """The conversation up to its last assistant turn if it ends on one, else all of it."""
    messages = conversation(row)
    yield Prompt(fields.checked_prompt(messages[:-1] if messages and messages[-1].role == "assistant" else messages))


def read_prompt_response(row: Row) -> Iterator[Demonstration]:
    prompt = fields.checked_prompt(fields.prompt_turns(row, *_PROMPTS))
    name, value = fields.first(row, *RESPONSES)
    response = fields.checked_response(fields.turns(value, "assistant", name), "the response")
    yield Demonstration(prompt + response, metadata=fields.others(row, RESPONSES, name))


def prompt_reader(*columns: str) -> fields.Reader:
    """A reader of the first of these columns that holds something."""

    def read(row: Row) -> Iterator[Prompt]:
        name = next((name for name in columns if not fields.missing(row.get(name))), columns[0])
        yield Prompt(fields.checked_prompt(fields.prompt_turns(row, name)), metadata=fields.others(row, columns, name))

    return read


def read_turns(row: Row) -> Iterator[Prompt]:
    """MT-bench: the first of `turns`; the later ones wait in the metadata as `later_turns`."""
    questions = fields.texts(row, "turns")
    if not questions:
        raise DataError("empty prompt: turns is an empty list")
    yield Prompt(fields.checked_prompt((user(questions[0]),)), metadata={"later_turns": questions[1:]})


def instruction_prompt(instruction: str, context: str) -> Conversation:
    """Instruction, blank line, input; an input that only says there is none counts as empty."""
    word = "".join(context.lower().split()).strip("<>[]().")
    whole = instruction if word in _PLACEHOLDERS else f"{instruction}\n\n{context}"
    return (user(whole if instruction.strip() else context if word else ""),)


def read_instruction(row: Row) -> Iterator[Demonstration]:
    """Alpaca's `instruction`, `input`, `output` or Dolly's `instruction`, `context`, `response`; `history` and `system`
    as LLaMA-Factory writes them."""
    question = instruction_prompt(fields.text(row, "instruction"), fields.optional(row, "input", "context"))
    yield fields.demonstration(fields.system_turn(row) + _history(row) + question, fields.text(row, "output", "response"))


def _history(row: Row) -> Conversation:
    earlier: Conversation = ()
    for pair in fields.sequence(row.get("history") or [], "history"):
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise DataError("unreadable history: each entry needs a question and an answer")
        earlier += (user(fields.as_text(pair[0], "history")), assistant(fields.as_text(pair[1], "history")))
    return earlier


def read_self_instruct(row: Row) -> Iterator[Demonstration | DataError]:
    """One demonstration for each of the task's instances."""
    instances = fields.sequence(row.get("instances"), "instances")
    if not instances:
        raise DataError("empty response: the task has no instances")

    def one(instance: Any) -> Demonstration:
        if not isinstance(instance, dict):
            raise DataError("not an instance: instances need input and output")
        prompt = instruction_prompt(fields.text(row, "instruction"), fields.as_text(instance.get("input") or "", "input"))
        return fields.demonstration(prompt, fields.text(instance, "output"))

    yield from fields.attempt(one, instances)
