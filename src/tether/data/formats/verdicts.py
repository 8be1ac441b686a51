"""Single responses with a verdict, and solutions with a verdict on every step.

KTO: `messages` + `label`, or `prompt`, `completion`, `label` (https://huggingface.co/docs/trl/dataset_formats#unpaired-preference,
https://github.com/hiyouga/LLaMA-Factory/blob/main/data/README.md, https://arxiv.org/abs/2402.01306).
TruthfulQA: InstructGPT's answers with the scores of two judges
(https://github.com/openai/following-instructions-human-feedback, https://arxiv.org/abs/2203.02155).
Steps: PRMBench (https://github.com/ssmisya/PRMBench, https://arxiv.org/abs/2501.03124) and plain rows
(https://huggingface.co/docs/trl/dataset_formats#stepwise-supervision).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from tether.core.errors import DataError
from tether.core.types import Conversation, Feedback, StepLabels, assistant, user
from tether.data.formats import fields
from tether.data.formats.conversations import conversation
from tether.data.formats.json_rows import Row

_LABELS = ("label", "kto_tag")
KTO_COLUMNS = " ".join((*_LABELS, "system messages conversations prompt question completion response"))


def read_feedback(row: Row) -> Iterator[Feedback]:
    """The last assistant turn is the response that `label` judges."""
    if all(fields.missing(row.get(name)) for name in _LABELS):
        raise DataError("unreadable label: nothing in column label")
    name, label = fields.first(row, *_LABELS)
    desirable = fields.boolean(label, name)
    if fields.missing(row.get("messages")) and fields.missing(row.get("conversations")):
        prompt = fields.prompt_turns(row, "prompt", "question")
        column, value = fields.first(row, "completion" if fields.missing(row.get("response")) else "response")
        response = fields.turns(value, "assistant", column)
    else:
        messages = conversation(row)
        prompt, response = messages[:-1], messages[-1:]
    yield fields.feedback(prompt, response, desirable)


def read_truthful_qa(row: Row) -> Iterator[Feedback]:
    """An answer is desirable if both judges, `true` and `info`, give it at least one half: refusing to say anything is
    true but not desirable. Both scores stay in the metadata."""
    scores = {name: fields.number(row.get(name), name) for name in ("true", "info")}
    answer, question = (assistant(fields.text(row, "answer")),), (user(fields.text(row, "question")),)
    yield replace(fields.feedback(question, answer, min(scores.values()) >= 0.5), metadata=scores)


def read_prmbench(row: Row) -> Iterator[StepLabels]:
    """The modified question and solution; `error_steps` are 1-based and all other steps are right. The group is the problem that
    was modified, so that its variants never stand on both sides of a split.

    Raises:
        DataError: an error step lies outside the solution, so the annotation belongs to another text.
    """
    steps = fields.texts(row, "modified_process")
    errors = {fields.number(step, "error_steps") for step in fields.sequence(row.get("error_steps"), "error_steps")}
    outside = sorted(step for step in errors if step != int(step) or not 1 <= step <= len(steps))
    if outside:
        raise DataError(f"error step out of range: step {outside[0]:g} of a solution of {len(steps)} steps")
    labels = tuple(position not in errors for position in range(1, len(steps) + 1))
    question = (user(fields.text(row, "modified_question", "question")),)
    yield _labelled(question, steps, labels, group=fields.optional(row, "question"))


def read_steps(row: Row) -> Iterator[StepLabels]:
    """`steps` or `completions` beside `labels`: booleans, 0/1, +/- or null for a step that nobody judged."""
    steps = fields.texts(row, "completions" if fields.missing(row.get("steps")) else "steps")
    labels = tuple(None if fields.missing(label) else _verdict(label) for label in fields.sequence(row.get("labels"), "labels"))
    yield _labelled(fields.prompt_turns(row, "prompt", "question", "problem"), steps, labels)


def _verdict(label: Any) -> bool:
    if str(label).strip() in ("-1", "-1.0"):
        raise DataError("unreadable label: -1 among labels; write false for a wrong step and null for an unjudged one")
    return fields.boolean(label, "labels")


def _labelled(prompt: Conversation, steps: tuple[str, ...], labels: tuple[bool | None, ...], group: str = "") -> StepLabels:
    if not steps:
        raise DataError("no steps: the solution is empty")
    if len(steps) != len(labels):
        raise DataError(f"uneven lists: {len(steps)} steps but {len(labels)} labels")
    return StepLabels(fields.checked_prompt(prompt), steps, labels, group=group)
