"""Ctrl-C and SIGTERM: the step in hand is finished and saved; a second one stops at once."""

from __future__ import annotations

import atexit
import gc
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextvars import copy_context
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import ClassVar, NoReturn, TypeVar
from weakref import WeakSet

from tether.core.command import command_line
from tether.core.requests import Request, take_request

T = TypeVar("T")
AGAIN = "start the same command again to continue from the last saved state."
SIGNALS = (signal.SIGINT, signal.SIGTERM)
Handler = Callable[[int, FrameType | None], object] | int | signal.Handlers | None
"""Everything that may handle a signal."""


LEFT_BEHIND: WeakSet[threading.Thread] = WeakSet()
"""Threads that users' functions started and did not end: Python waits for them at the end of a
program.
"""
PATIENCE = 10.0
"""Seconds that a program waits for them."""


class Interrupted(BaseException):
    """A request to stop; the message says what is saved and how to continue.

    As with KeyboardInterrupt, no `except Exception` on the way catches it.
    """

    def __init__(self, message: str, signal_number: int = signal.SIGINT) -> None:
        super().__init__(message)
        self.exit_code = 128 + signal_number


class Stopping:
    """Within this block the first signal is only noted in `asked`. The caller checks it between
    steps.

    Python delivers signals to the main thread alone, so in any other the block changes nothing.

    Args:
        place: the run directory in which another program may leave a request to stop, or to save;
            requests from before the block do not count.

    Raises:
            Interrupted: a signal came before, and its exception was lost because nothing can be
                raised there (a finalizer, a C callback).
    """

    came: ClassVar[signal.Signals | None] = None
    """The signal that has ended the program before any block was open."""

    def __init__(self, place: Path | None = None) -> None:
        self.place = place
        self._asked: signal.Signals | None = None
        self._before: dict[signal.Signals, Handler] = {}

    @property
    def asked(self) -> signal.Signals | None:
        """The signal that came, or SIGTERM where a request to stop was left; None: go on."""
        if self._asked is None and self._requested(Request.STOP):
            self._note(signal.SIGTERM, None)
        return self._asked

    @property
    def to_save(self) -> bool:
        """True once for each request to save a checkpoint now."""
        return self._requested(Request.CHECKPOINT)

    def _requested(self, request: Request) -> bool:
        return self.place is not None and take_request(self.place, request)

    def __enter__(self) -> Stopping:
        if Stopping.came:
            raise ended_by(Stopping.came)
        for request in Request:
            self._requested(request)
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)

    def _note(self, number: int, _: FrameType | None) -> None:
        if self._asked is not None:
            raise Interrupted("stopped at once. Everything that was saved before stays.", number)
        self._asked = signal.Signals(number)
        logging.getLogger(__name__).warning(
            "%s: tether finishes this step and saves it. A second signal stops at once.",
            self._asked.name,
        )

    def leave(
        self,
        step: int,
        total: int,
        place: Path,
        by: signal.Signals | None = None,
    ) -> NoReturn:
        """End the training after `step`, which has just been saved in `place`; `by`: the request
        that another rank received, if any.
        """
        by = by or self._asked
        assert by is not None
        stage = ""
        how = f"The checkpoint is in {place}. Start the same command again to continue."
        if root := run_of(place):
            stage = f" of {place.relative_to(root)}" if place != root else ""
            how = f"To continue: {command_line('resume', root)}"
        raise Interrupted(f"stopped after step {step} of {total}{stage}, which is saved. {how}", by)


def run_of(place: Path) -> Path | None:
    """The run directory that contains `place`: the folder in which a command of tether has noted
    its start.
    """
    return next(
        (folder for folder in (place, *place.parents)[:6] if (folder / "command.json").is_file()),
        None,
    )


def begin_program() -> None:
    """From now on SIGTERM and Ctrl-C end this program with `Interrupted`, so that what it opened is
    closed.

    Garbage is sought seldom: libraries leave half a million objects that stay. To search them,
    while they load and at the end, is a third of a start.
    """

    def stop(number: int, _: FrameType | None) -> NoReturn:
        Stopping.came = signal.Signals(number)
        raise ended_by(Stopping.came)

    Stopping.came = None
    for number in SIGNALS:
        # as a shell sets it for what it starts in the background
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, stop)
    if not isinstance(sys.unraisablehook, _SendAgain):
        sys.unraisablehook = _SendAgain(sys.unraisablehook)
    gc.set_threshold(10_000, 10, 10)
    atexit.register(gc.freeze)


def ended_by(number: signal.Signals) -> Interrupted:
    """The exception with which a signal ends a program."""
    return Interrupted(
        f"{'terminated' if number == signal.SIGTERM else 'interrupted'}; {AGAIN}",
        number,
    )


@dataclass
class _SendAgain:
    """Hook for a signal's exception that came where nothing can be raised: sends the signal again a
    moment later.
    """

    before: Callable[[sys.UnraisableHookArgs], object]

    def __call__(self, lost: sys.UnraisableHookArgs) -> None:
        if not (Stopping.came and issubclass(lost.exc_type, Interrupted)):
            self.before(lost)
            return
        again = threading.Timer(0.05, os.kill, (os.getpid(), Stopping.came))
        again.daemon = True
        again.start()


def in_thread(call: Callable[[], T], name: str | None = None) -> Future[T]:
    """Run a call in a thread of its own, and return the future of its result.

    The end of the program does not wait for this thread. The call has the caller's context.
    """
    future = Future[T]()
    context = copy_context()

    def give() -> None:
        try:
            future.set_result(context.run(call))
        except BaseException as error:  # noqa: BLE001 - the user's code may raise anything
            future.set_exception(error)

    threading.Thread(target=give, daemon=True, name=name).start()
    return future


def end_in_time(code: int) -> None:
    """See to it that this program, which is about to end with an exit code, does not wait for
    threads that never end.
    """

    def leave() -> None:
        names = ", ".join(sorted(thread.name for thread in LEFT_BEHIND if thread.is_alive()))
        logging.getLogger(__name__).warning(
            "the program ends without threads of a user's function that do not end: %s",
            names,
        )
        sys.stdout.flush()
        os._exit(code)

    if any(thread.is_alive() for thread in LEFT_BEHIND):
        timer = threading.Timer(PATIENCE, leave)
        timer.daemon = True
        timer.start()
