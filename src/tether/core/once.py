"""Messages that are logged once a process."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache


@cache
def once(log: Callable[..., None], message: str, *values: object) -> None:
    """Call a logger's method with a message, unless it was called with the same one and the same
    values before.
    """
    log(message, *values)
