"""Reference of a recipe's keys: every key of the config classes with its type, default and
description.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, get_args, get_origin, get_type_hints

from pydantic import BaseModel, BeforeValidator, ValidationError

from tether.settings.messages import models_of
from tether.settings.needs import needs_of

BOUNDS = {"Ge": "at least", "Gt": "above", "Le": "at most", "Lt": "below"}
NAMES = {
    int: "whole number",
    float: "number",
    str: "text",
    bool: "true or false",
    dict: "table",
    type(None): "",
}


@dataclass(frozen=True, kw_only=True)
class Key:
    """A key of a recipe in words; `table` is the class of the table that holds it."""

    path: tuple[str, ...]
    type: str
    default: str
    description: str
    table: type[BaseModel]

    @property
    def name(self) -> str:
        return ".".join(self.path)

    @property
    def meaning(self) -> str:
        """Type, default and description in one line."""
        default = (
            self.default if self.default == "required" else f"default {self.default or 'unset'}"
        )
        return "; ".join(filter(None, (self.type, default, self.description)))


def keys_of(
    kind: type[BaseModel],
    made: object = None,
    above: tuple[str, ...] = (),
) -> Iterator[Key]:
    """Every key of a table and of the tables in it, with the default that holds where nothing else
    is said.

    Args:
        made: the table as it is by default, within another.
    """
    if not isinstance(made, kind):
        try:
            made = kind.model_validate({})
        except ValidationError:
            made = None
    for name, field in kind.model_fields.items():
        default = (
            field.get_default(call_default_factory=True) if made is None else getattr(made, name)
        )
        words = ", ".join(
            filter(
                None,
                (_type(given_type(field.annotation, field.metadata)), *_bounds(field.metadata)),
            ),
        )
        shown = "required" if field.is_required() else _value(default)
        needs = dict.fromkeys(condition.words for condition in needs_of(field.metadata))
        description = "; ".join(filter(None, (field.description, *needs)))
        yield Key(
            path=(*above, name),
            type=words,
            default=shown,
            description=description,
            table=kind,
        )
        for table in models_of(field.annotation):
            yield from keys_of(table, default, (*above, name))


def _value(default: object) -> str:
    if default is None or isinstance(default, BaseModel):
        return "" if default is None else "its defaults"
    return json.dumps(default, default=str, ensure_ascii=False)


def _bounds(metadata: Iterable[object]) -> Iterator[str]:
    for bound in metadata:
        if words := BOUNDS.get(name := type(bound).__name__):
            yield f"{words} {getattr(bound, name.lower()):g}"


def given_type(annotation: object, notes: Iterable[object]) -> object:
    """The type of what a recipe may say: a validator that comes before that of `annotation` may
    take more, and its own signature says so.
    """
    wider = [get_type_hints(note.func) for note in notes if isinstance(note, BeforeValidator)]
    return next((kind for hints in wider for kind in hints.values()), annotation)


def _type(annotation: object) -> str:
    """A type in plain words."""
    if isinstance(annotation, type):
        return (
            "table"
            if issubclass(annotation, BaseModel)
            else NAMES.get(annotation, annotation.__name__)
        )
    inner = get_args(annotation)
    if get_origin(annotation) is Literal:
        return " | ".join(map(json.dumps, inner))
    if hasattr(annotation, "__metadata__"):
        return _type(given_type(inner[0], inner[1:]))
    if get_origin(annotation) in (tuple, Sequence):
        return f"list of {_type(inner[0])}s".replace('"s', '"')
    if get_origin(annotation) is dict:
        return "table"
    return " | ".join(dict.fromkeys(filter(None, map(_type, inner))))
