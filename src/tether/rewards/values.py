"""Values of Python programs in a form that travels as JSON and is equal where they are."""

from __future__ import annotations

import contextlib
import json
import math
import sys
from decimal import Decimal
from fractions import Fraction
from typing import Any

from pydantic import TypeAdapter

from tether.core.received import received
from tether.core.types import JsonValue

_NESTED = TypeAdapter(tuple[tuple[tuple[JsonValue]]])


def as_json(value: object) -> JsonValue:
    """A Python value as its comparable JSON, where a reply can hold it, which has it in three
    lists.

    Raises:
        ValueError: it is nested too deeply, or no text of UTF-8.
    """
    return received(json.dumps([[[comparable(value)]]]), _NESTED)[0][0][0]


def comparable(value: Any) -> JsonValue:
    """A Python value as JSON that is equal exactly where the values are: lists, tuples, sets and
    mappings stay apart.
    """
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, (numpy.number, numpy.bool_)):
        # item() of a long double is one again
        return comparable(float(value) if isinstance(value, numpy.floating) else value.item())
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, (int, float)):
        return (
            value
            if not isinstance(value, float) or math.isfinite(value)
            else ["float", repr(value)]
        )
    if type(value) in (Fraction, Decimal):
        for kind in (int, float):
            with contextlib.suppress(ValueError, OverflowError):
                if value == kind(value):
                    return comparable(kind(value))
    for kind in (list, tuple):
        if isinstance(value, kind):
            return [kind.__name__, *map(comparable, value)]
    if isinstance(value, _SETS):
        return ["set", *sorted(map(comparable, value), key=_place)]
    if isinstance(value, dict):
        return [
            "dict",
            *sorted(([comparable(k), comparable(v)] for k, v in value.items()), key=_place),
        ]
    value = bytes(value) if type(value) is bytearray else value
    return [type(value).__name__, repr(value)]


_SETS = set, frozenset, type({}.keys()), type({}.items())


def _place(value: object) -> str:
    """A text by which sets are ordered: the same for equal values, such as 1, 1.0 and True."""
    if isinstance(value, list):
        return f"[{','.join(map(_place, value))}]"
    return json.dumps(int(value) if isinstance(value, float | bool) and value % 1 == 0 else value)
