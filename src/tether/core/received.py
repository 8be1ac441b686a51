"""JSON from programs that may be hostile: servers, clients, and processes that run what a model
wrote.

The parser is pydantic's. It refuses a nesting of more than 200 levels, numbers of more than 4,300
digits, and text that is no UTF-8.
"""

from __future__ import annotations

from typing import Annotated, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from tether.core.errors import one_line

T = TypeVar("T")
Count = Annotated[int, Field(ge=0, lt=2**53)]
"""A number of things, such as tokens."""


class Received(BaseModel):
    """A part of a message. Fields that it does not name are left unread. Numbers are finite, and
    neither a truth value nor a text is one.
    """

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False, frozen=True)


def received(content: bytes | str, shape: TypeAdapter[T]) -> T:
    """The value of a message that has this shape.

    Raises:
        ValueError: it has another one, or is no JSON.
    """
    try:
        return shape.validate_json(content, strict=True)
    except ValidationError as error:
        raise ValueError(one_line(error)) from None
