"""Rows of a data set that is a user's own object, read behind the guard of reward functions."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from torch.utils.data import Dataset

from tether.classic.config import Row
from tether.core.errors import DataError, RewardError
from tether.core.watchdog import Watchdog
from tether.rewards.calling import Guarded

T = TypeVar("T")
_TOGETHER, _ENOUGH = 256, 1.0
"""Rows that one call of the guard reads at most, and seconds after which it reads no more."""


class GuardedRows(Dataset[Row]):
    """A data set's `__len__`, `__iter__` and `__getitem__` behind the guard of reward functions.

    A call may take `time_limit` seconds. Its changes in the process are undone afterwards.

    Args:
        name: of the argument that gave the data set, for messages.

    Raises:
        DataError: from each call: the data set raised, or hangs.
    """

    def __init__(self, dataset: Any, name: str, time_limit: float = 60.0) -> None:
        self.dataset, self.name, self.time_limit = dataset, name, time_limit

    def _call(self, read: Callable[[], T], method: str) -> T:
        """The result of `read`, which messages name as a method of the data set, in its file."""
        kind = type(self.dataset)
        if hasattr(kind, method):
            functools.update_wrapper(read, getattr(kind, method), assigned=(), updated=())
        read.__qualname__ = f"{kind.__qualname__}.{method}"
        guarded = Guarded(
            read,
            f"the {self.name}",
            Watchdog(None),
            time_limit=self.time_limit,
            dump_after=self.time_limit / 2,
        )
        try:
            return guarded(lambda returned, _: returned)
        except RewardError as error:
            raise DataError(str(error)) from error

    def __len__(self) -> int:
        return self._call(lambda: len(self.dataset or ()), "__len__")

    def __getitems__(self, places: Sequence[int]) -> list[Row]:
        """The rows at these places, in one call; PyTorch's loader asks so."""

        def rows() -> list[Row]:
            dataset = self.dataset
            at_once = hasattr(dataset, "__getitems__")
            taken = dataset.__getitems__(places) if at_once else (dataset[i] for i in places)
            return [_plain(row) for row in taken]

        return self._call(rows, "__getitem__")

    def __iter__(self) -> Iterator[Row]:
        rows: list[Iterator[Row]] = []

        def some() -> tuple[list[Row], bool]:
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
            taken, more = self._call(some, method)
            yield from taken


def guarded(dataset: Iterable[Row], name: str) -> Iterable[Row]:
    """The data set behind the guard; lists and tuples of plain rows as they are."""
    if type(dataset) in (list, tuple) and all(type(row) is dict for row in dataset):
        return dataset
    return GuardedRows(dataset, name)


def _plain(row: Row) -> Row:
    """A row as a dictionary: columns that are made when they are asked for are made here."""
    return dict(row) if isinstance(row, Mapping) and type(row) is not dict else row
