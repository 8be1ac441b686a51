"""Rows of a data set that is a user's own object, read behind the guard of reward functions."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from tether.core.errors import DataError, RewardError
from tether.core.watchdog import Watchdog
from tether.rewards.calling import Guarded

_TOGETHER, _ENOUGH = 256, 1.0
"""Rows that one call of the guard reads at most, and seconds after which it reads no more."""


class GuardedRows:
    """A data set's `__len__`, `__iter__` and `__getitem__` behind the guard of reward functions.

    A call may take `time_limit` seconds. Its changes in the process are undone afterwards.

    Args:
        name: of the argument that gave the data set, for messages.

    Raises:
        DataError: from each call: the data set raised, or hangs.
    """

    def __init__(self, dataset: Any, name: str, time_limit: float = 60.0) -> None:
        self.dataset, self.name, self.time_limit = dataset, name, time_limit

    def _call(self, function: Any, *arguments: Any) -> Any:
        guarded = Guarded(
            function,
            f"the {self.name}",
            Watchdog(None),
            time_limit=self.time_limit,
            dump_after=self.time_limit / 2,
        )
        try:
            return guarded(lambda returned, _: returned, *arguments)
        except RewardError as error:
            raise DataError(str(error)) from error

    def __len__(self) -> int:
        def length() -> int:
            return len(self.dataset or ())

        return self._call(_named(length, self.dataset, "__len__"))

    def __getitems__(self, places: Sequence[int]) -> list[Any]:
        """The rows at these places, in one call; PyTorch's loader asks so."""

        def rows() -> list[Any]:
            at_once = hasattr(self.dataset, "__getitems__")
            taken = self.dataset.__getitems__(places) if at_once else map(self._row, places)
            return [_plain(row) for row in taken]

        return self._call(_named(rows, self.dataset, "__getitem__"))

    def _row(self, place: int) -> Any:
        return self.dataset[place]

    def __iter__(self) -> Iterator[Any]:
        rows: list[Iterator[Any]] = []

        def some() -> tuple[list[Any], bool]:
            if not rows:
                rows.append(iter(self.dataset))
            taken, end = [], time.monotonic() + _ENOUGH
            while len(taken) < _TOGETHER and time.monotonic() < end:
                try:
                    taken.append(_plain(next(rows[0])))
                except StopIteration:
                    return taken, False
            return taken, True

        more = True
        while more:
            method = "__iter__" if hasattr(type(self.dataset), "__iter__") else "__getitem__"
            taken, more = self._call(_named(some, self.dataset, method))
            yield from taken


def guarded(dataset: Iterable[object], name: str) -> Iterable[Any]:
    """The data set behind the guard; lists and tuples of plain rows as they are."""
    if type(dataset) in (list, tuple) and all(type(row) is dict for row in dataset):
        return dataset
    return GuardedRows(dataset, name)


def _plain(row: Any) -> Any:
    """A row as a dictionary: columns that are made when they are asked for are made here."""
    return dict(row) if isinstance(row, Mapping) and type(row) is not dict else row


def _named(function: Any, dataset: Any, method: str) -> Any:
    """The function as messages name it: the data set's method, in its file."""
    kind = type(dataset)
    function.__qualname__ = f"{kind.__qualname__}.{method}"
    if hasattr(kind, method):
        function.__wrapped__ = getattr(kind, method)
    return function
