"""Conversions from one kind of record to another, and the prompt inside each kind."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
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


def _judge_both(record: Comparison) -> Iterable[Feedback]:
    """The likelier side is desirable, whatever the source called it."""
    if record.tie:
        return ()
    likelier = record if record.probability >= 0.5 else record.swap()
    return Feedback(record.prompt, likelier.chosen, True), Feedback(record.prompt, likelier.rejected, False)


def _imitate_solution(record: Problem) -> Iterable[Demonstration]:
    if not record.solution:
        raise DataError("empty response: the problem has no worked solution")
    return (demonstration(record.prompt, record.solution),)


CONVERSIONS: dict[tuple[type, type], Callable[[Any], Iterable[Any]]] = {
    (Comparison, Demonstration): lambda record: (Demonstration(record.prompt + record.chosen),),
    (Comparison, Feedback): _judge_both,
    (Feedback, Demonstration): lambda record: (Demonstration(record.prompt + record.response),) if record.desirable else (),
    (Problem, Demonstration): _imitate_solution,
    (Problem, Prompt): lambda record: (Prompt(record.prompt, metadata={"answer": record.answer}),),
    **{(k, Prompt): lambda record: (Prompt(prompt_of(record)),) for k in (Demonstration, Comparison, Feedback, StepLabels)},
}
"""From a native kind to the kind asked for. A tie becomes a demonstration of its first side, but no feedback."""


def reader_for(layout: Format, kind: type) -> Reader | None:
    """The reader that gives `kind` from rows of this format, natively or by conversion; None if there is no way.

    What the format does not use becomes metadata of its records, beside what they bring along.
    """
    native = layout.readers.get(kind)
    convert = CONVERSIONS.get((layout.kind, kind)) if native is None else lambda record: (record,)
    if convert is None or kind in layout.refuses:
        return None
    parse = native or layout.readers[layout.kind]

    def read(row: Row) -> Iterator[Any]:
        unused = layout.metadata(row)
        for record in parse(row):
            if isinstance(record, DataError):
                yield record
            else:
                metadata = {**unused, **record.metadata}
                yield from (replace(other, metadata={**metadata, **other.metadata}) for other in convert(record))

    return read
