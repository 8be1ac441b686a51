"""Messages about settings that do not fit: the key, the reason, and the key that was meant."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_args

from pydantic import BaseModel
from pydantic_core import ErrorDetails

from tether.core.types import Entries, JsonValue
from tether.settings.stages import STAGES, making
from tether.settings.synonyms import (
    KEYS,
    METHODS,
    NOTES,
    SECTIONS,
    VALUES,
    advice,
    alike,
    did_you_mean,
)

Place = tuple[int | str, ...]
"""The keys, and the numbers in lists, down to a value."""


def explain(kind: type[BaseModel], values: object, items: Sequence[ErrorDetails]) -> list[str]:
    """One phrase for each key with a fault; the branches of a union, which pydantic reports one by
    one, are one fault.
    """
    faults: dict[Place, list[ErrorDetails]] = {}
    for item in items:
        faults.setdefault(_location(values, item), []).append(item)
    inner = [
        place
        for place in faults
        if not any(place == other[: len(place)] for other in faults if len(other) > len(place))
    ]
    return [_phrase(kind, place, faults[place], values) for place in inner]


def _location(values: JsonValue, item: ErrorDetails) -> Place:
    """The keys down to a fault, without the names that pydantic gives to the branches of a
    union.
    """
    place = []
    node = values
    parts: tuple[Any, ...] = item["loc"]
    for part in parts:
        is_key = (
            part in node
            if isinstance(node, dict)
            else isinstance(node, list) and isinstance(part, int) and part < len(node)
        )
        if is_key:
            node = node[part]
        if is_key or (item["type"] == "missing" and part is parts[-1]):
            place.append(part)
    return tuple(place)


def _phrase(
    kind: type[BaseModel],
    place: Place,
    items: Sequence[ErrorDetails],
    values: JsonValue,
) -> str:
    location = ".".join(map(str, place))
    item = items[0]
    if item["type"] == "extra_forbidden":
        return f"unknown key {location!r} ({key_hint(kind, place, values, item['input'])})"
    inside = ", ".join(_known_keys(kind, place, exact=True)[:2])
    table = {"model_type": f"a table belongs here, with keys such as {inside}"}
    reasons = (
        table.get(item["type"]) or item["msg"].removeprefix("Value error, ") for item in items
    )
    message = ", or ".join(dict.fromkeys(reasons))
    if not location:
        return message
    if item["type"] == "missing":
        return f"key {location!r} is required"
    if isinstance(item["input"], Mapping | BaseModel):
        return f"key {location!r}: {message}"
    theirs = advice(VALUES, _word(item["input"]), [str(part) for part in place])
    hint = f"; {theirs}" if theirs else ""
    return f"key {location!r}: {message} (got {item['input']!r:.80}{hint})"


def key_hint(
    kind: type[BaseModel],
    place: tuple[object, ...],
    values: Entries,
    given: object,
) -> str:
    """A guess at the key that was meant: another library's word, a key of another table, a slip of
    the fingers.
    """
    *outer, last = place
    word = _word(last)
    keys = _known_keys(kind, outer)
    if not outer and word in METHODS and METHODS[word][0] in keys:
        section, key, value = METHODS[word]
        same = [
            name
            for name in _known_keys(kind, (section,))
            if isinstance(given, Mapping) and name in given
        ]
        instead = f"; {word}.{same[0]} is {section}.{same[0]}" if same else ""
        return (
            f"{word.upper()} is [{section}] with {key} = {value!r}: write [{section}] and in "
            f'it {key} = "{value}"{instead}'
        )
    if not outer and SECTIONS.get(word) in keys:
        return f"did you mean [{SECTIONS[word]}]?"
    near = alike(str(last), keys, cutoff=0.65)
    own_note = advice(NOTES, word, [str(part) for part in outer]) if outer else ""
    if near and isinstance(given, Mapping):
        return own_note or near
    inside = {
        (str(last), *path): _meant(kind, outer, _word(path[-1]), values) for path in _leaves(given)
    }
    if lines := [
        f"{'.'.join(path)} is {' or '.join(map(repr, meant))}"
        for path, meant in inside.items()
        if meant
    ]:
        return "; ".join(lines)
    words = (word, *(_word(path[-1]) for path in inside))
    recipe = "model" in kind.model_fields
    notes = (advice(NOTES, one, [str(part) for part in outer]) for one in words if recipe)
    note = next(filter(None, notes), "")
    if meant := _around(kind, outer, word):
        return f"{did_you_mean([meant])} {note}".rstrip()
    if note:
        return note
    if meant := _meant(kind, outer, word, values):
        return did_you_mean(meant)
    deeper = [
        (*outer, table, last)
        for table in keys
        if last in _known_keys(kind, (*outer, table)) != keys
    ]
    if near := did_you_mean([".".join(map(str, path)) for path in deeper[:1]]) or near:
        return near
    many = outer and outer[0] in STAGES and len(keys) > 24
    return (
        f"`tether explain {'.'.join(map(str, outer))}` lists its keys"
        if many
        else f"known keys: {', '.join(sorted(keys))}"
    )


def _word(name: object) -> str:
    return str(name).lower().replace("-", "_")


def _leaves(value: object) -> Iterator[tuple[str, ...]]:
    """The paths to the values of a table."""
    for key, inner in value.items() if isinstance(value, Mapping) else ():
        yield from (
            ((key, *path) for path in _leaves(inner)) if isinstance(inner, Mapping) else ((key,),)
        )


def _around(kind: type[BaseModel], outer: Sequence[object], word: str) -> str:
    """The key for another library's word in this table, or in one around it; empty: none."""
    targets = [target.split(".") for target in KEYS.get(word, ())]
    for depth in range(len(outer), -1, -1):
        for target in targets:
            path = (*outer[:depth], *target)
            if (depth or target[0] not in STAGES) and _is_key(kind, path):
                return ".".join(map(str, path))
    return ""


def _meant(
    kind: type[BaseModel],
    outer: Sequence[object],
    word: str,
    values: Entries,
) -> list[str]:
    """The possible keys for a word: around here, else in the stages that the recipe has, else in
    any stage.
    """
    if around := _around(kind, outer, word):
        return [around]
    targets = [(word,), *(tuple(target.split(".")) for target in KEYS.get(word, ()))]
    stages = [
        name
        for name in (*making("direct", "policy"), *STAGES)
        if name in kind.model_fields and name not in outer
    ]
    own = [
        ".".join((n, *p))
        for n in STAGES
        if n in stages and n in values
        for p in targets
        if _is_key(kind, (n, *p))
    ]
    anywhere = (
        next((".".join((n, *p)) for n in stages if _is_key(kind, (n, *p))), "") for p in targets
    )
    return list(dict.fromkeys(own))[:3] or list(dict.fromkeys(filter(None, anywhere)))[:2]


def _is_key(kind: type[BaseModel], path: Sequence[object]) -> bool:
    return path[-1] in _known_keys(kind, path[:-1], exact=True)


def _known_keys(
    kind: type[BaseModel],
    location: Sequence[object],
    *,
    exact: bool = False,
) -> list[str]:
    kinds = [kind]
    # what is no field is a place in a list or a name in a table, whose kind stays the same
    for part in map(str, location):
        inside = [
            inner
            for k in kinds
            if part in k.model_fields
            for inner in models_of(k.model_fields[part].annotation)
        ]
        kinds = inside if exact else inside or kinds
    return list(dict.fromkeys(name for k in kinds for name in k.model_fields))


def models_of(annotation: object) -> list[type[BaseModel]]:
    """The tables that a key of this type may hold."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for inner in get_args(annotation) for model in models_of(inner)]
