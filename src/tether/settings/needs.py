"""Conditions on other keys of its table under which a key has an effect, and their one checker."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from pydantic import BaseModel

from tether.core.types import JsonValue

_PART = re.compile(r"(?P<absent>not )?(?P<path>[a-z_.]+)(?: (?P<sign>=|!=|>) (?P<value>.+))?")


@dataclass(frozen=True)
class Needs:
    """A condition of a field, as a part of its annotation: `Annotated[float, Needs("critic")]`.

    A field that was set to something needs the condition. One that is off by default may be set to
    what it is.

    Args:
        condition: alternatives, joined by " or ": `critic`, `not offload`, `epochs > 1`,
            `kl.place = 'loss'`, `surrogate = 'clip' or 'sequence'`.
        because: the rest of the message after the key; `{config.KEY}` is another key's value.
        value: the only value that needs the condition, set or not; None: every one.
    """

    condition: str
    because: str = ""
    value: JsonValue = None

    @property
    def words(self) -> str:
        """The condition for the reference of keys."""
        subject = "" if self.value is None else f"{_text(self.value)} "
        alone = self.condition.removeprefix("not ")
        needs = "needs" if alone == self.condition else "goes without"
        return f"{subject}{needs} `{alone}`"

    def fault(self, config: BaseModel, name: str, key: str) -> str:
        """The message about field `name`, called `key`; empty if there is no fault."""
        value = getattr(config, name)
        default = type(config).model_fields[name].default
        if self.value is None:
            concerned = name in config.model_fields_set and bool(value or default)
            subject = key
            because = "has no effect without {condition}"
        else:
            concerned = value == self.value
            because = "needs {condition}"
            subject = f"{key} = {_text(value)}"
        if not concerned or self.holds(config):
            return ""
        because = (self.because or because).format(config=config, condition=self.condition)
        return f"{subject} {because}"

    def holds(self, config: BaseModel) -> bool:
        """True if one of the alternatives is true of the table."""
        return any(
            _compare(_at(config, path), absent, sign, text)
            for path, absent, sign, text in self._parts()
        )

    def _parts(self) -> Iterator[tuple[str, bool, str, str]]:
        """Path, negation, sign and value of each alternative; a bare value belongs to the key of
        the one before.
        """
        path = ""
        absent = False
        sign = ""
        for part in self.condition.split(" or "):
            text = part
            if match := _PART.fullmatch(part):
                path = match["path"]
                absent = match["absent"] is not None
                sign = match["sign"] or ""
                text = match["value"] or ""
            yield path, absent, sign, text


def needs_of(metadata: Iterable[object]) -> Iterator[Needs]:
    """The conditions of a field."""
    return (note for note in metadata if isinstance(note, Needs))


def unmet(config: BaseModel, table: str) -> Iterator[str]:
    """A sentence for each key of a table whose condition does not hold.

    Args:
        table: the name of the table, as it begins a key in messages: "kl."
    """
    for name, field in type(config).model_fields.items():
        for needs in needs_of(field.metadata):
            if fault := needs.fault(config, name, f"{table}{name}"):
                yield fault


def _compare(value: object, absent: bool, sign: str, text: str) -> bool:
    if not sign:
        return bool(value) != absent
    other = json.loads(text.replace("'", '"'))
    return value > other if sign == ">" else (value == other) == (sign == "=")


def _at(config: BaseModel, path: str) -> object:
    """The value at a dotted path; None where a table on the way is unset."""
    value: object = config
    for name in path.split("."):
        value = None if value is None else getattr(value, name)
    return value


def _text(value: object) -> str:
    return json.dumps(value) if isinstance(value, bool) else repr(value)
