"""A format of rows: a name, the columns of its rows and a way to read them."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from tether.core.types import Comparison, Demonstration, Feedback, Json, Problem, Prompt, StepLabels

Row = Json
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
    """A published layout of rows, one line of `registry.FORMATS`.

    `columns` are those that a row must have: `a|b` stands for either, and `+a` only marks the format. `readers` give the records
    by kind; the first kind is the native one. Other kinds may follow by conversion, except those in `refuses`, where a conversion
    would mislead. Columns that are neither in `columns` (without a +) nor in `uses` (regular expressions) become metadata.
    `holds` is a further test, of what stands in the columns.
    """

    name: str
    columns: str
    readers: Mapping[type, Reader]
    uses: str = ""
    holds: Callable[[Row], bool] | None = None
    refuses: tuple[type, ...] = ()

    @property
    def kind(self) -> type:
        return next(iter(self.readers))

    def matches(self, row: Row) -> bool:
        """True if a row has this layout."""
        wanted = (column.removeprefix("+").split("|") for column in self.columns.split())
        return all(any(name in row for name in choices) for choices in wanted) and (self.holds is None or self.holds(row))

    def metadata(self, row: Row) -> Json:
        """The columns that no reader uses, for reports."""
        names = [column for column in self.columns.split() if column[0] != "+"]
        return leftover(row, re.compile("|".join([*names, *self.uses.split(), "id"])).fullmatch)


def leftover(row: Row, used: Callable[[str], Any]) -> Json:
    """The columns that are not used; a column `metadata` is unfolded into them."""
    rest = {key: value for key, value in row.items() if key and value is not None and not used(key)}
    inner = rest.get("metadata")
    if isinstance(inner, Mapping):
        del rest["metadata"]
        rest = {**inner, **rest}
    return rest


def others(row: Row, names: Collection[str], used: str) -> Json:
    """Columns that could have been read in place of the one that was."""
    return {name: row[name] for name in names if name != used and row.get(name) is not None}
