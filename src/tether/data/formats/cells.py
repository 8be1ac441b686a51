"""A row that records which of its cells a reader read: the rest is known, and can be named."""

from __future__ import annotations

from collections.abc import Iterator

from tether.core.types import Entries, Json, JsonValue


class Cells(Json):
    """A row, or an object inside one, that records which of its keys were read.

    `cells[name]`, `get`, `items` and `values` read. `name in cells`, iteration over names and
    `fields.has` look without reading. Objects inside a value come back as `Cells` too, alone or in
    lists.
    """

    __slots__ = ("_left_out", "_read")

    def __init__(self, row: Entries) -> None:
        super().__init__(row)
        self._read: set[str] = set()
        self._left_out: list[str] = []

    def __getitem__(self, name: str) -> JsonValue:
        if name not in self._read:
            self[name] = super().__getitem__(name)
        return super().__getitem__(name)

    def __setitem__(
        self,
        name: str,
        value: object,
    ) -> None:
        """Put a value that was decoded from a cell's text into its place; the cell then counts as
        read.
        """
        self._read.add(name)
        super().__setitem__(name, _tracked(value))

    def __iter__(self) -> Iterator[str]:
        # With an __iter__ of its own a dict is copied through __getitem__, so that copies read as
        # well.
        return super().__iter__()

    def get(
        self,
        name: str,
        default: object = None,
    ) -> JsonValue:
        return self[name] if name in self else default  # noqa: SIM401

    def values(self) -> list[JsonValue]:
        return [self[name] for name in self]

    def items(self) -> list[tuple[str, JsonValue]]:
        return [(name, self[name]) for name in self]

    def leave_out(self, name: str) -> None:
        """Name a part of a value that was read and is not used."""
        self._left_out.append(name)

    def unread(self) -> Json:
        """The unread keys with their values; those of an object inside as `outer.inner`. Nulls are
        left out.
        """
        own = {
            name: value
            for name, value in super().items()
            if name and name not in self._read and value is not None
        }
        inside = [
            (name, super(Cells, self).__getitem__(name)) for name in self if name in self._read
        ]
        objects = ((name, value.unread()) for name, value in inside if isinstance(value, Cells))
        return own | {
            f"{name}.{key}": value for name, keys in objects for key, value in keys.items()
        }

    def unused(self) -> list[str]:
        """The names of all unread keys with a value, at any depth, and the names of the parts that
        were left out. A column `metadata` is no training data by its name.
        """
        names = [
            name
            for name, value in super().items()
            if name not in {*self._read, "", "metadata"} and not _is_empty(value)
        ]
        for name in self:
            if name in self._read:
                names += (_joined(name, inner) for inner in _inside(super().__getitem__(name)))
        return [*dict.fromkeys(names + self._left_out)]


def _joined(outer: str, inner: str) -> str:
    """`replies.text` of `replies` is `replies.text`: trees have a name for each key, not for each
    depth.
    """
    return inner if inner.partition(".")[0] == outer else f"{outer}.{inner}"


def _inside(value: object) -> list[str]:
    if isinstance(value, Cells):
        return value.unused()
    return [name for item in value for name in _inside(item)] if isinstance(value, list) else []


def _is_empty(value: object) -> bool:
    """True if leaving a value out loses nothing: null, NaN, an empty text or an empty list."""
    return value is None or value != value or (isinstance(value, str | list | dict) and not value)


def _tracked(value: object) -> JsonValue:
    if isinstance(value, Cells):
        return value
    if isinstance(value, dict):
        return Cells(value)
    return [_tracked(item) for item in value] if isinstance(value, list | tuple) else value


def without_cells(value: object) -> JsonValue:
    """The value with plain objects in place of `Cells`, which were all used then."""
    if isinstance(value, dict):
        return {name: without_cells(inner) for name, inner in value.items()}
    return [without_cells(item) for item in value] if isinstance(value, list) else value


def leave_out(row: Entries, *names: str) -> None:
    """Name parts of a row that a reader read and did not use, where the row records such things."""
    if isinstance(row, Cells):
        for name in names:
            row.leave_out(name)
