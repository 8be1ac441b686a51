"""Prompts alone: plain columns, lines of text, MT-bench, model-written evaluations, HumanEval.

https://github.com/lm-sys/FastChat/tree/main/fastchat/llm_judge (https://arxiv.org/abs/2306.05685),
https://github.com/anthropics/evals (https://arxiv.org/abs/2212.09251), https://github.com/openai/human-eval
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tether.core.errors import DataError
from tether.core.types import Message, Prompt
from tether.data.formats.fields import as_text, checked_prompt, leftover, missing, sequence
from tether.data.formats.format import Format, Reader, Row, having
from tether.data.formats.preference import prompt_turns

_PLAIN = ("prompt", "question", "instruction", "problem", "query")


def read_turns(row: Row) -> Iterator[Prompt]:
    """MT-bench: the first of `turns`; the later ones wait in the metadata as `later_turns`."""
    turns = [as_text(turn, "turns") for turn in sequence(row.get("turns"), "turns")]
    if not turns:
        raise DataError("empty prompt: turns is an empty list")
    metadata = {**leftover(row, ("id", "question_id", "turns")), "later_turns": tuple(turns[1:])}
    yield Prompt(checked_prompt((Message("user", turns[0]),)), metadata=metadata)


def reader(*columns: str) -> Reader:
    """A reader of the first of these columns that holds something, with all others as metadata."""

    def read_prompt(row: Row) -> Iterator[Prompt]:
        name = next((name for name in columns if not missing(row.get(name))), columns[0])
        yield Prompt(checked_prompt(prompt_turns(row, name)), metadata=leftover(row, ("id", "system", "task_id", name)))

    return read_prompt


def _only(*names: str) -> Callable[[Row], bool]:
    return lambda row: any(name in row for name in names)


FORMATS = (
    Format("mt_bench", having("turns"), {Prompt: read_turns}),
    Format("human_eval", having("prompt", "entry_point", "test"), {Prompt: reader("prompt")}),
    Format("model_written_evals", having("question", "answer_matching_behavior"), {Prompt: reader("question")}),
    Format("sycophancy", having("prompt", "corrects", "incorrects"), {Prompt: reader("prompt")}),
    Format("prompts", _only(*_PLAIN), {Prompt: reader(*_PLAIN)}),
)
