"""Calls of a user's function: whatever it does, its caller gets what it returned, or one sentence
about what it did.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import functools
import inspect
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import Future
from contextvars import ContextVar
from pathlib import Path
from typing import Any, TypeVar, cast

from tether.core.errors import STOPS, RewardError, RunError, error_words
from tether.core.stopping import AGAIN, in_thread
from tether.core.types import JsonValue
from tether.core.watchdog import Watchdog
from tether.rewards.surroundings import same_threads, surroundings

T = TypeVar("T")
RUNNER: ContextVar[asyncio.Runner | None] = ContextVar("RUNNER", default=None)
"""Runs the coroutines of a call, so that connections live from one to the next; unset: each has an
event loop of its own.
"""
GRACE = 30.0
"""Seconds after the time limit until the stack of a call that holds the interpreter is shown."""


def _inner(function: Callable[..., object]) -> Callable[..., object]:
    """The innermost function of one that is decorated or partly applied."""
    inner = inspect.unwrap(function)
    return _inner(inner.func) if isinstance(inner, functools.partial) else inner


def title_of(function: Callable[..., object]) -> str:
    """A function's qualified name; of an object that can be called its class's."""
    return defined_by(_inner(function)).__qualname__.replace("<locals>.", "")


def defined_by(function: object) -> type:
    """The object whose source defines something that can be called: a function or class itself, of
    another object its class.
    """
    own = inspect.isroutine(function) or isinstance(function, type)
    return cast(type, function) if own else type(function)


def source_of(role: str, function: Callable[..., object]) -> str:
    """The words for a function in messages: "the reward function kindness (rewards.py)"."""
    file = _file_of(function)
    return f"{role} {title_of(function)}" + ("" if file is None else f" ({Path(file).name})")


def _file_of(function: Callable[..., object]) -> str | None:
    """The file of a function, of what it wraps, or of the `__call__` of an object; None of what is
    built in.
    """
    inner = _inner(function)
    with contextlib.suppress(TypeError):
        own = defined_by(inner)
        return inspect.getfile(own if own is inner else own.__call__)
    return None


def settled(returned: object) -> JsonValue:
    """The value that a function returned. A coroutine gives its result, an asynchronous generator a
    list of its items.
    """
    if inspect.isawaitable(returned):
        coroutine = _result(returned)
    elif isinstance(returned, AsyncIterator):
        coroutine = _items(returned)
    else:
        return returned
    runner = RUNNER.get()
    if runner is None or runner.get_loop().is_running():
        return asyncio.run(coroutine)
    return runner.run(coroutine)


async def _result(returned: Awaitable[object]) -> object:
    return await returned


async def _items(returned: AsyncIterator[object]) -> list[object]:
    return [item async for item in returned]


def in_time(call: Callable[[], T], seconds: float | None) -> T:
    """The result of a call in a thread of its own, which is left behind if it takes longer.

    Raises:
        TimeoutError: it does.
    """
    future = in_thread(call)
    try:
        return future.result(seconds)
    except TimeoutError:
        if future.done():  # the call itself raised it
            raise
        raise TimeoutError(f"no answer within {seconds:g} s") from None


@contextlib.contextmanager
def _shown_when_stuck(seconds: float) -> Iterator[None]:
    """A block whose stacks are written to standard error if it lasts longer, even where no thread
    of Python gets a turn.
    """
    faulthandler.dump_traceback_later(seconds, file=sys.__stderr__ or 2)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


class Guarded:
    """A user's function behind the guard that rewards and judges share.

    A call runs in a thread, so that one that hangs can be left behind. The same thread reads the
    returned value, whose items may be anything. The process's state is put back after each call
    (`surroundings`). A regular expression that backtracks holds the interpreter's lock and cannot
    be left behind. The stack of such a call is written to standard error.

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
        self.function = function
        self.source = source_of(role, function)
        self.watchdog = watchdog
        self.file = _file_of(function)
        self.time_limit = time_limit
        self.dump_after = min(dump_after, time_limit)

    def __call__(self, read: Callable[[Any, str], T], *arguments: object) -> T:
        """Call the function with these arguments, and return the value that `read` makes of its
        result.

        The second argument of `read` is the function's name for messages.

        Raises:
            RewardError: the function raised, hangs, or returned what cannot be read.
        """
        source = self.source
        outcome = Future[T]()

        def work() -> None:
            with same_threads():
                self._settle(outcome, read, arguments)

        with surroundings(source), _shown_when_stuck(self.time_limit + GRACE):
            thread = threading.Thread(target=work, daemon=True, name=source)
            thread.start()
            thread.join(self.dump_after)
            where = ""
            if thread.is_alive():
                stuck = source, self.dump_after, thread.ident or 0, self.file
                where = f", it was in {self.watchdog.late(*stuck)}"
            thread.join(self.time_limit - self.dump_after)
        if not outcome.done():
            raise RewardError(f"{source} gave no answer within {self.time_limit:g} s{where}")
        return outcome.result()

    def _settle(
        self,
        outcome: Future[T],
        read: Callable[[object, str], T],
        arguments: tuple[object, ...],
    ) -> None:
        """Make the call, and give its outcome a value, or an error of one sentence."""
        reading = ""
        try:
            returned = settled(self.function(*arguments))
            reading = f" while its {type(returned).__name__} was read"
            outcome.set_result(read(returned, self.source))
        except STOPS as stop:
            outcome.set_exception(stop)
        except BaseException as error:  # noqa: BLE001 - the user's code may raise anything, SystemExit too
            is_read = reading and isinstance(error, RewardError)
            fault = f"{self.source} raised {error_words(error)}{reading}"
            outcome.set_exception(RewardError(str(error) if is_read else fault))


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
            with surroundings(source):
                settled(function(*arguments))
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
