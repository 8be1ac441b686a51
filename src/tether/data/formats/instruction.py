"""Instructions with an optional input and one output: Alpaca, Dolly, self-instruct, the AlpacaEval instruction files.

https://github.com/tatsu-lab/stanford_alpaca, https://huggingface.co/datasets/databricks/databricks-dolly-15k,
https://github.com/yizhongw/self-instruct, https://github.com/tatsu-lab/alpaca_eval
"""

from __future__ import annotations

from collections.abc import Iterator

from tether.core.errors import DataError
from tether.core.types import Conversation, Demonstration, Message
from tether.data.formats.fields import as_text, demonstration, leftover, optional, sequence, system_turn, text
from tether.data.formats.format import Format, Row, having

_PLACEHOLDERS = {"noinput", "n/a", "none", ""}


def instruction_prompt(instruction: str, context: str) -> Conversation:
    """Instruction, blank line, input; an input that only says there is none counts as empty."""
    word = "".join(context.lower().split()).strip("<>[]().")
    whole = instruction if word in _PLACEHOLDERS else f"{instruction}\n\n{context}"
    return (Message("user", whole if instruction.strip() else context if word else ""),)


def read_instruction(row: Row) -> Iterator[Demonstration]:
    """Alpaca's `instruction`, `input`, `output` or Dolly's `instruction`, `context`, `response`; `history` and `system`
    as LLaMA-Factory writes them."""
    asked = instruction_prompt(text(row, "instruction"), optional(row, "input", "context"))
    prompt = system_turn(row) + _history(row) + asked
    used = ("id", "system", "history", "instruction", "input", "context", "output", "response")
    yield demonstration(prompt, text(row, "output", "response"), leftover(row, used))


def _history(row: Row) -> Conversation:
    earlier: list[Message] = []
    for pair in sequence(row.get("history") or [], "history"):
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise DataError("unreadable history: each entry needs a question and an answer")
        earlier += [Message("user", as_text(pair[0], "history")), Message("assistant", as_text(pair[1], "history"))]
    return tuple(earlier)


def read_self_instruct(row: Row) -> Iterator[Demonstration | DataError]:
    """One demonstration for each of the task's instances."""
    instances = sequence(row.get("instances"), "instances")
    if not instances:
        raise DataError("empty response: the task has no instances")
    metadata = leftover(row, ("id", "instruction", "instances"))
    for instance in instances:
        try:
            prompt = instruction_prompt(text(row, "instruction"), as_text(instance.get("input") or "", "input"))
            yield demonstration(prompt, text(instance, "output"), metadata)
        except DataError as error:
            yield error
        except AttributeError:
            yield DataError("not an instance: instances need input and output")


FORMATS = (
    Format("self_instruct", having("instruction", "instances"), {Demonstration: read_self_instruct}),
    Format("alpaca_eval_instructions", having("instruction", "output", "generator"), {Demonstration: read_instruction}),
    Format("dolly", having("instruction", "context", "response"), {Demonstration: read_instruction}),
    Format("alpaca", having("instruction", "output|response"), {Demonstration: read_instruction}),
)
