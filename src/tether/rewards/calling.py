"""Calls of a user's function: whatever it does, its caller gets what it returned, or one sentence
about what it did.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from types import CodeType
from typing import Any, Generic, NamedTuple, TypeVar

from tether.core.errors import STOPS, RewardError, RunError, error_words
from tether.core.stopping import AGAIN
from tether.core.watchdog import Watchdog
from tether.rewards.sentinel import SENTINEL
from tether.rewards.surroundings import Surroundings

T = TypeVar("T")


def code_of(function: Callable[..., object]) -> CodeType | None:
    """The code object of a function, of what it wraps, or of the `__call__` of an object; None of
    what is built in.
    """
    inner = _inner(function)
    inner = inner if inspect.isroutine(inner) else type(inner).__call__
    inner = inner.__func__ if inspect.ismethod(inner) else inner
    return inner.__code__ if inspect.isfunction(inner) else None


def _inner(function: Callable[..., object]) -> Callable[..., object]:
    """The innermost function of one that is decorated or partly applied."""
    try:
        inner = inspect.unwrap(function)
    except Exception:  # noqa: BLE001 - an object may raise at any attribute
        return function
    return _inner(inner.func) if isinstance(inner, functools.partial) else inner


def title_of(function: Callable[..., object]) -> str:
    """A function's qualified name; of an object that can be called its class's."""
    inner = function.func if isinstance(function, functools.partial) else function
    return (inner if inspect.isroutine(inner) else type(inner)).__qualname__.replace(
        "<locals>.",
        "",
    )


def source_of(role: str, function: Callable[..., object]) -> str:
    """The words for a function in messages: "the reward function kindness (rewards.py)"."""
    file = _file_of(function)
    return f"{role} {title_of(function)}" + ("" if file is None else f" ({Path(file).name})")


def _file_of(function: Callable[..., object]) -> str | None:
    code = code_of(function)
    return None if code is None else code.co_filename


def settled(returned: object) -> object:
    """The value that a function returned. A coroutine gives its result, an asynchronous generator a
    list of its items.
    """
    if inspect.isawaitable(returned):
        return asyncio.run(_result(returned))
    return asyncio.run(_items(returned)) if isinstance(returned, AsyncIterator) else returned


async def _result(returned: Awaitable[object]) -> object:
    return await returned


async def _items(returned: AsyncIterator[object]) -> list[object]:
    return [item async for item in returned]


class _Outcome(NamedTuple, Generic[T]):
    """Outcome of a call: a value, or a sentence on a fault, or an error that stops the run."""

    value: T | None = None
    fault: str = ""
    stop: BaseException | None = None


class Guarded:
    """A user's function behind the guard that rewards and judges share.

    A call runs in a thread, so that one that hangs can be left behind. The same thread reads the
    returned value, whose items may be anything. The process's state is put back after each call
    (`Surroundings`). A call that holds the interpreter's lock for good ends the process
    (`Sentinel`).

    Args:
        role: "the reward function", "the judge".
        watchdog: writes down the stacks of calls that hang.
        time_limit: seconds a call.
        dump_after: seconds after which a call's stacks are written down, once a call; the first
            time a warning says where it is.
    """

    def __init__(
        self,
        function: Callable[..., object],
        role: str,
        watchdog: Watchdog,
        *,
        time_limit: float = 60.0,
        dump_after: float = 30.0,
    ) -> None:
        self.function, self.source, self.watchdog = function, source_of(role, function), watchdog
        self.file = _file_of(function)
        self.time_limit, self.dump_after = time_limit, min(dump_after, time_limit)

    def __call__(self, read: Callable[[Any, str], T], *arguments: object) -> T:
        """Call the function with these arguments, and return the value that `read` makes of its
        result.

        The second argument of `read` is the function's name for messages.

        Raises:
            RewardError: the function raised, hangs, or returned what cannot be read.
        """
        outcome: list[_Outcome[T]] = []
        around = Surroundings(self.source, file=self.file)
        with SENTINEL.watch(self.source, self.time_limit), around:

            def work() -> None:
                outcome.append(self._outcome(read, arguments, around))
                around.note_thread()

            thread = threading.Thread(target=work, daemon=True, name=self.source)
            thread.start()
            thread.join(self.dump_after)
            where = self._hangs(thread, around) if thread.is_alive() else ""
            thread.join(self.time_limit - self.dump_after)
        if not outcome:
            raise RewardError(f"{self.source} gave no answer within {self.time_limit:g} s{where}")
        if outcome[0].stop is not None:
            raise outcome[0].stop
        if outcome[0].fault:
            raise RewardError(outcome[0].fault)
        return outcome[0].value  # type: ignore[return-value]

    def _outcome(
        self,
        read: Callable[[object, str], T],
        arguments: tuple[object, ...],
        around: Surroundings,
    ) -> _Outcome[T]:
        reading = ""
        try:
            returned = around.run(settled, around.run(self.function, *arguments))
            reading = f" while its {type(returned).__name__} was read"
            return _Outcome(read(returned, self.source))
        except STOPS as stop:
            return _Outcome(stop=stop)
        except BaseException as error:  # noqa: BLE001 - the user's code may raise anything, SystemExit too
            if reading and isinstance(error, RewardError):
                return _Outcome(fault=str(error))
            return _Outcome(fault=f"{self.source} raised {error_words(error)}{reading}")

    def _hangs(self, thread: threading.Thread, around: Surroundings) -> str:
        """Report where the call is."""
        around.put_names_back()
        return (
            ", it was in "
            f"{self.watchdog.late(self.source, self.dump_after, thread.ident or 0, self.file)}"
        )


def in_place(function: Callable[..., object], role: str) -> Callable[..., None]:
    """A user's function that is called in this thread, such as `on_step`: the process's state is
    put back after each call.

    An exception is passed on with a note that names the function. SystemExit and its like become a
    RunError, since the program would end without a result and without a message.
    """
    source = source_of(role, function)

    @functools.wraps(function)
    def call(*arguments: object) -> None:
        try:
            with Surroundings(source) as around:
                around.run(settled, around.run(function, *arguments))
        except STOPS:
            raise
        except Exception as error:
            error.add_note(f"{source} raised this. {AGAIN.capitalize()}")
            raise
        except BaseException as error:
            raise RunError(
                f"{source} raised {error_words(error)}. Mend the function, then {AGAIN}",
            ) from error

    return call
