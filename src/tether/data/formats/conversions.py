"""Records of one kind from records of another: what is kept of them, and what has no place."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from dataclasses import fields as dataclass_fields
from typing import Any

from tether.core.types import (
    Comparison,
    Conversation,
    Demonstration,
    Feedback,
    Problem,
    Prompt,
    Record,
    StepLabels,
)
from tether.data.formats.fields import LeftOutError, demonstration


def prompt_of(record: Record) -> Conversation:
    """The turns before the response; of a demonstration, those before its last assistant turn."""
    if isinstance(record, Prompt):
        return record.messages
    if isinstance(record, Demonstration):
        last = max(
            (i for i, turn in enumerate(record.messages) if turn.role == "assistant"),
            default=len(record.messages),
        )
        return record.messages[:last]
    return record.prompt


def _judge_both(record: Comparison) -> Iterable[Feedback]:
    """The likelier side is desirable, whatever the source called it."""
    if record.metadata.get("both_bad"):
        return Feedback(record.prompt, record.chosen, False), Feedback(
            record.prompt,
            record.rejected,
            False,
        )
    if record.tie:
        raise LeftOutError("tie: neither response is better, so neither is desirable")
    likelier = record if record.probability >= 0.5 else record.swap()
    return Feedback(record.prompt, likelier.chosen, True), Feedback(
        record.prompt,
        likelier.rejected,
        False,
    )


def _imitate_better(record: Comparison) -> Iterable[Demonstration]:
    """The likelier side; the first one of a tie, unless both are bad."""
    if record.metadata.get("both_bad"):
        raise LeftOutError("undesirable response: both are bad, and demonstrations are imitated")
    return (
        Demonstration(
            record.prompt + (record.chosen if record.probability >= 0.5 else record.rejected),
        ),
    )


def _imitate(record: Feedback) -> Iterable[Demonstration]:
    if not record.desirable:
        raise LeftOutError(
            "undesirable response: its label is false, and demonstrations are imitated",
        )
    return (Demonstration(record.prompt + record.response),)


@dataclass(frozen=True)
class Conversion:
    """From a native kind to the kind asked for. `loses`: the fields of the native record that have
    no place in the other.
    """

    make: Callable[..., Iterable[Any]]
    loses: tuple[str, ...] = ()

    def lost(self, record: Record) -> Iterator[str]:
        """Names of the lost fields of a record that differ from their defaults."""
        defaults = {field.name: field.default for field in dataclass_fields(record)}
        for name in self.loses:
            # which is then what the demonstration says
            bare = name == "answer" and isinstance(record, Problem) and not record.solution
            if getattr(record, name) != defaults[name] and not bare:
                yield "last reply" if name == "messages" else name


def _question(*loses: str) -> Conversion:
    return Conversion(lambda record: (Prompt(prompt_of(record)),), loses)


_VOTES = ("margin", "tie", "probability", "annotations")
CONVERSIONS: dict[tuple[type, type], Conversion] = {
    (Comparison, Demonstration): Conversion(_imitate_better, ("rejected", *_VOTES)),
    (Comparison, Feedback): Conversion(_judge_both, ("margin", "probability", "annotations")),
    (Feedback, Demonstration): Conversion(_imitate),
    (Problem, Demonstration): Conversion(
        lambda record: (demonstration(record.prompt, record.solution or record.answer),),
        ("answer",),
    ),
    (Problem, Prompt): Conversion(
        lambda record: (Prompt(record.prompt, metadata={"answer": record.answer}),),
        ("solution",),
    ),
    (Demonstration, Prompt): _question("messages"),
    (Comparison, Prompt): _question("chosen", "rejected", *_VOTES),
    (Feedback, Prompt): _question("response", "desirable"),
    (StepLabels, Prompt): _question("steps", "labels"),
}
"""A tie becomes a demonstration of its first side. It gives no feedback. A problem becomes a
demonstration of its solution, or of its bare answer.
"""
