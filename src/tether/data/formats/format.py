"""What a format is: a name, a way to recognise its rows and a way to read them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from tether.core.types import Comparison, Demonstration, Feedback, Problem, Prompt, StepLabels

Row = dict[str, Any]
Reader = Callable[[Row], Iterable[Any]]
"""A row -> its records. A `DataError` that is raised condemns the row, one that is yielded only that part of it."""

KINDS: dict[type, tuple[str, str]] = {
    Prompt: ("prompts", "Prompts need a question to answer, for example a column prompt, question, instruction or messages."),
    Demonstration: ("demonstrations", "Demonstrations need a response, for example columns prompt, response or messages."),
    Comparison: ("preferences", "Preferences need two responses per prompt, for example columns prompt, chosen, rejected."),
    Feedback: ("feedback", "Feedback needs a response and a verdict, for example columns prompt, completion, label."),
    StepLabels: ("step labels", "Step labels need steps and a verdict for each, for example columns prompt, steps, labels."),
    Problem: ("problems", "Problems need a question and a checkable answer, for example columns question, answer."),
}
"""Each kind's name for people, and what a file needs to hold it."""


@dataclass(frozen=True, slots=True)
class Format:
    """A published layout of rows.

    `readers` gives the records by kind; the first kind is the native one. Other kinds may follow by conversion, except
    those in `refuses`, where a conversion would mislead.
    """

    name: str
    matches: Callable[[Row], bool]
    readers: Mapping[type, Reader]
    refuses: tuple[type, ...] = ()

    @property
    def kind(self) -> type:
        return next(iter(self.readers))


def having(*names: str) -> Callable[[Row], bool]:
    """A test for rows that have all of these columns; `a|b` stands for either."""
    wanted = tuple(name.split("|") for name in names)
    return lambda row: all(any(name in row for name in choices) for choices in wanted)
