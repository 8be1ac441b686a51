"""Solutions with a label for every step: PRMBench, and plain rows as TRL takes them for process reward models.

https://github.com/ssmisya/PRMBench (paper: https://arxiv.org/abs/2501.03124),
https://huggingface.co/docs/trl/dataset_formats#stepwise-supervision
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tether.core.errors import DataError
from tether.core.types import Message, StepLabels
from tether.data.formats.fields import as_text, boolean, checked_prompt, leftover, missing, number, optional, sequence, text
from tether.data.formats.format import Format, Row, having
from tether.data.formats.preference import prompt_turns

_PRMBENCH = (
    "modified_question",
    "modified_process",
    "error_steps",
    "original_process",
    "original_response",
    "modified_steps",
)


def read_prmbench(row: Row) -> Iterator[StepLabels]:
    """The modified question and solution; `error_steps` are 1-based and all other steps are right. The group is the problem that
    was modified, so that its variants never stand on both sides of a split.

    Raises:
        DataError: an error step lies outside the solution, so the annotation belongs to another text.
    """
    steps = tuple(as_text(step, "modified_process") for step in sequence(row.get("modified_process"), "modified_process"))
    errors = {number(step, "error_steps") for step in sequence(row.get("error_steps"), "error_steps")}
    outside = sorted(step for step in errors if step != int(step) or not 1 <= step <= len(steps))
    if outside:
        raise DataError(f"error step out of range: step {outside[0]:g} of a solution of {len(steps)} steps")
    yield _labelled(
        (Message("user", text(row, "modified_question", "question")),),
        steps,
        tuple(position not in errors for position in range(1, len(steps) + 1)),
        leftover(row, _PRMBENCH),
        group=optional(row, "question"),
    )


def read_plain(row: Row) -> Iterator[StepLabels]:
    """`steps` or `completions` beside `labels`: booleans, 0/1, +/- or null for a step that nobody judged."""
    name = "completions" if missing(row.get("steps")) else "steps"
    steps = tuple(as_text(step, name) for step in sequence(row.get(name), name))
    labels = tuple(None if missing(label) else _verdict(label) for label in sequence(row.get("labels"), "labels"))
    prompt = prompt_turns(row, "prompt", "question", "problem")
    used = ("id", "system", "prompt", "question", "problem", "steps", "completions", "labels")
    yield _labelled(prompt, steps, labels, leftover(row, used))


def _verdict(label: Any) -> bool:
    if str(label).strip() in ("-1", "-1.0"):
        raise DataError("unreadable label: -1 among labels; write false for a wrong step and null for an unjudged one")
    return boolean(label, "labels")


def _labelled(prompt: Any, steps: tuple[str, ...], labels: tuple[bool | None, ...], metadata: Any, group: str = "") -> StepLabels:
    if not steps:
        raise DataError("no steps: the solution is empty")
    if len(steps) != len(labels):
        raise DataError(f"uneven lists: {len(steps)} steps but {len(labels)} labels")
    return StepLabels(checked_prompt(prompt), steps, labels, group=group, metadata=metadata)


FORMATS = (
    Format("prmbench", having("modified_process", "error_steps"), {StepLabels: read_prmbench}),
    Format("steps", having("prompt|question|problem", "steps|completions", "labels"), {StepLabels: read_plain}),
)
