"""The state of the process that a user's code may change, put back afterwards, so that the run
computes the same numbers as without it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from tether.core.stopping import LEFT_BEHIND

_LOG = logging.getLogger("tether.rewards")


def _draws() -> list[torch.Tensor]:
    on_cards = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return [torch.get_rng_state(), *on_cards]


def _set_draws(states: list[torch.Tensor]) -> None:
    torch.set_rng_state(states[0])
    if states[1:]:
        torch.cuda.set_rng_state_all(states[1:])


def _set_signals(handlers: Mapping[int, Any]) -> None:
    """Only the main thread may, and only there a function can have changed any."""
    for number, handler in handlers.items():
        if handler is not None and signal.getsignal(number) is not handler:
            signal.signal(number, handler)


def _folder() -> str:
    with contextlib.suppress(FileNotFoundError):  # it was removed
        return os.getcwd()
    return "."


_State = tuple[Callable[[], Any], Callable[[Any], object]]
_KEPT: tuple[_State, ...] = (
    (_draws, _set_draws),
    (np.random.get_state, np.random.set_state),
    (random.getstate, random.setstate),
    (torch.get_default_dtype, torch.set_default_dtype),
)
"""The user's code finds these as it left them: its random numbers go on from call to call."""
_RUNS: tuple[_State, ...] = (
    (torch.is_grad_enabled, torch.set_grad_enabled),
    (_folder, os.chdir),
    (lambda: {n: signal.getsignal(n) for n in signal.valid_signals()}, _set_signals),
    (
        lambda: {name: vars(sys)[name] for name in ("stdin", "stdout", "stderr")},
        sys.__dict__.update,
    ),
)
_LEFT: list[object] = []
"""The values of `_KEPT` at the end of the last block; empty before the first."""


@contextlib.contextmanager
def same_threads() -> Iterator[None]:
    """A block after which torch has this thread's number of threads, and so has each new thread."""
    before = torch.get_num_threads()
    try:
        yield
    finally:
        if torch.get_num_threads() != before:
            torch.set_num_threads(before)


@contextlib.contextmanager
def surroundings(source: str) -> Iterator[None]:
    """A block in which a user's code runs; afterwards the state listed above is the run's again.

    Args:
        source: the name of the thread of the code; other threads that begin within the block do not
            keep the program at its end.
    """
    threads = set(threading.enumerate())
    before = [read() for read, _ in (*_KEPT, *_RUNS)]
    for (_, write), value in zip(_KEPT, _LEFT, strict=False):
        write(value)
    try:
        with same_threads():
            yield
    finally:
        new = set(threading.enumerate()) - threads
        LEFT_BEHIND.update(thread for thread in new if thread.name != source)
        _LEFT[:] = [read() for read, _ in _KEPT]
        for (_, write), value in zip((*_KEPT, *_RUNS), before, strict=True):
            try:
                write(value)
            except (OSError, ValueError) as error:  # such as a working directory that was removed
                _LOG.warning("%s: the run's own state cannot be put back: %s", source, error)
