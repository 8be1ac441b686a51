"""What one kind can become when another is asked for, and the prompt inside each kind."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from tether.core.errors import DataError
from tether.core.types import Comparison, Conversation, Demonstration, Feedback, Problem, Prompt, StepLabels
from tether.data.formats.fields import demonstration
from tether.data.formats.format import Format, Reader, Row

Record = Prompt | Demonstration | Comparison | Feedback | StepLabels | Problem


def prompt_of(record: Record) -> Conversation:
    """The turns before the response; of a demonstration, those before its last assistant turn."""
    if isinstance(record, Prompt):
        return record.messages
    if isinstance(record, Demonstration):
        last = max((i for i, turn in enumerate(record.messages) if turn.role == "assistant"), default=len(record.messages))
        return record.messages[:last]
    return record.prompt


def _ask(record: Any) -> Iterable[Prompt]:
    return (Prompt(prompt_of(record), id=record.id, metadata=record.metadata),)


def _imitate_chosen(record: Comparison) -> Iterable[Demonstration]:
    return (Demonstration(record.prompt + record.chosen, id=record.id, metadata=record.metadata),)


def _judge_both(record: Comparison) -> Iterable[Feedback]:
    """The likelier side is desirable, whatever the source called it."""
    if record.tie:
        return ()
    likelier = record if record.probability >= 0.5 else record.swap()
    return tuple(
        Feedback(record.prompt, side, desirable, id=record.id, metadata=record.metadata)
        for side, desirable in ((likelier.chosen, True), (likelier.rejected, False))
    )


def _imitate_desirable(record: Feedback) -> Iterable[Demonstration]:
    if not record.desirable:
        return ()
    return (Demonstration(record.prompt + record.response, id=record.id, metadata=record.metadata),)


def _imitate_solution(record: Problem) -> Iterable[Demonstration]:
    if not record.solution:
        raise DataError("empty response: the problem has no worked solution")
    return (replace(demonstration(record.prompt, record.solution, record.metadata), id=record.id),)


CONVERSIONS: dict[tuple[type, type], Callable[[Any], Iterable[Any]]] = {
    (Comparison, Demonstration): _imitate_chosen,
    (Comparison, Feedback): _judge_both,
    (Feedback, Demonstration): _imitate_desirable,
    (Problem, Demonstration): _imitate_solution,
    **{(kind, Prompt): _ask for kind in (Demonstration, Comparison, Feedback, StepLabels, Problem)},
}
"""From a native kind to the kind asked for. A tie becomes a demonstration of its first side, but no feedback."""


def reader_for(layout: Format, kind: type) -> Reader | None:
    """The reader that gives `kind` from rows of this format, natively or by conversion; None if there is no way."""
    if kind in layout.readers:
        return layout.readers[kind]
    convert = CONVERSIONS.get((layout.kind, kind))
    if convert is None or kind in layout.refuses:
        return None
    native = layout.readers[layout.kind]

    def read(row: Row) -> Iterable[Any]:
        for record in native(row):
            if isinstance(record, DataError):
                yield record
            else:
                yield from convert(record)

    return read
