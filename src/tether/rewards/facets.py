"""The parts of a process's state that a user's function may change, and that a run depends on."""

from __future__ import annotations

import builtins
import decimal
import gc
import json
import locale
import logging
import math
import operator
import os
import random
import resource
import signal
import socket
import sys
import threading
import time
import warnings

# a user's function may replace those of `builtins`
from builtins import KeyError, all, map, zip  # noqa: UP029
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, Generic, NamedTuple, TextIO, TypeVar

import numpy as np
import torch

_STREAMS = ("stdin", "stdout", "stderr")


State = TypeVar("State")
_Decimal = tuple[int, str, int, int, int, int, dict[type[decimal.DecimalException], bool]]
"""Precision, rounding, least and largest exponent, capitals, clamp; the traps that are set."""
_NumpyDraws = tuple[str, bytes, int, int, float]
_Streams = tuple[tuple[TextIO | None, bool], ...]
"""Each stream, and whether it is closed."""
_Filters = tuple[list[tuple[object, ...]], Callable[..., None]]
_Log = tuple[int, dict[str, tuple[bool, int, bool, tuple[logging.Handler, ...]]]]
"""The level below which nothing is logged; by logger: disabled, level, propagates, handlers."""
_Handlers = dict[int, Callable[[int, FrameType | None], object] | int | None]
_Timers = tuple[float | None, float, bool, bool]
"""Moment of the alarm, its interval, and which of the timers of processor time run."""
_Interpreter = tuple[int, float, int]
"""Limit of recursion, seconds between switches of threads, most digits of an integer."""


class Facet(NamedTuple, Generic[State]):
    """A part of the process's state.

    `keeps`: the function finds at its next call what it left; otherwise its change is only put
    back.
    """

    name: str
    read: Callable[[], State]
    write: Callable[[State], object]
    keeps: bool = True
    same: Callable[[State, State], bool] = operator.eq


class Switches(NamedTuple):
    """Torch's kernels and precision."""

    precision: str
    cudnn: tuple[bool, bool, bool]
    """Enabled, benchmark, deterministic."""
    attention: tuple[bool, bool, bool]
    """Flash, memory-efficient, plain."""
    anomaly: bool
    autocast: bool
    onednn: bool


class Names(NamedTuple):
    """Names of a module that a run depends on, and what gives their values."""

    module: str
    space: dict[str, object]
    names: tuple[str, ...]
    read: Callable[[Mapping[str, object]], tuple[object, ...]]


def _names_of(module: ModuleType) -> Names:
    """All public functions, classes and modules of a module, and the environment variables."""
    names = tuple(
        name
        for name, value in vars(module).items()
        if (not name.startswith("_") or name == "__import__")
        and (callable(value) or isinstance(value, ModuleType | os._Environ))
    )
    return Names(module.__name__, vars(module), names, operator.itemgetter(*names))


NAMES = tuple(
    _names_of(one) for one in (builtins, os, os.path, time, json, random, threading, signal, math)
)


def values_of_names() -> list[tuple[object, ...]]:
    """The values of all NAMES now."""
    return [one.read(one.space) for one in NAMES]


def put_names_back(before: Sequence[tuple[object, ...]]) -> list[str]:
    """Give the NAMES these values again; returns those that had others, such as `os.kill`.

    Nothing in here depends on a name that may have been replaced.
    """
    changed: list[str] = []
    for one, values in zip(NAMES, before, strict=True):
        try:
            if all(map(operator.is_, one.read(one.space), values)):
                continue
        except KeyError:
            pass
        for name, value in zip(one.names, values, strict=True):
            if name not in one.space or one.space[name] is not value:
                one.space[name] = value
                changed.append(f"{one.module}.{name}")
    return changed


def _device() -> torch.device | None:
    device = torch.get_default_device()
    return None if device.type == "cpu" else device


def _deterministic() -> tuple[bool, bool]:
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )


def _switches() -> Switches:
    cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
    return Switches(
        torch.get_float32_matmul_precision(),
        (cudnn.enabled, cudnn.benchmark, cudnn.deterministic),
        (cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled()),
        torch.is_anomaly_enabled(),
        torch.is_autocast_enabled("cpu"),
        bool(torch.backends.mkldnn.enabled),
    )


def _switch(values: Switches) -> None:
    torch.set_float32_matmul_precision(values.precision)
    cudnn: Any = torch.backends.cudnn
    cuda = torch.backends.cuda
    cudnn.enabled, cudnn.benchmark, cudnn.deterministic = values.cudnn
    cuda.enable_flash_sdp(values.attention[0])
    cuda.enable_mem_efficient_sdp(values.attention[1])
    cuda.enable_math_sdp(values.attention[2])
    torch.autograd.set_detect_anomaly(values.anomaly)
    torch.set_autocast_enabled("cpu", values.autocast)
    torch.backends.mkldnn.set_flags(_enabled=values.onednn)


def _draws() -> list[torch.Tensor]:
    return [
        torch.get_rng_state(),
        *(torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []),
    ]


def _set_draws(states: list[torch.Tensor]) -> None:
    torch.set_rng_state(states[0])
    if states[1:]:
        torch.cuda.set_rng_state_all(states[1:])


def _draws_of_numpy() -> _NumpyDraws:
    state: Any = np.random.get_state(legacy=True)
    return (state[0], state[1].tobytes(), *state[2:])


def _set_draws_of_numpy(state: _NumpyDraws) -> None:
    np.random.set_state((state[0], np.frombuffer(state[1], dtype=np.uint32), *state[2:]))


def _umask() -> int:
    """Read from the kernel where it says: to set the mask for reading would reach files that others
    write just then.
    """
    status = Path("/proc/self/status")
    for line in status.read_text(encoding="utf-8").splitlines() if status.exists() else ():
        if line.startswith("Umask:"):
            return int(line.split()[1], 8)
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def _set_environment(values: Mapping[str, str]) -> None:
    for name in os.environ.keys() - values.keys():
        del os.environ[name]
    os.environ.update(
        {name: value for name, value in values.items() if os.environ.get(name) != value},
    )


def _decimal() -> _Decimal:
    now = decimal.getcontext()
    limits = (now.Emin, now.Emax, now.capitals, now.clamp)
    return (now.prec, now.rounding, *limits, dict(now.traps))


def _set_decimal(values: _Decimal) -> None:
    traps = [kind for kind, on in values[-1].items() if on]
    decimal.setcontext(decimal.Context(*values[:6], traps=traps))


def _streams() -> _Streams:
    """Standard input, output and error, each with its state: open, or closed."""
    streams = (sys.stdin, sys.stdout, sys.stderr)
    return tuple((stream, stream is not None and stream.closed) for stream in streams)


def _set_streams(values: _Streams) -> None:
    """Put streams back; one that was closed since is opened anew on its descriptor, which Python's
    own streams leave open.
    """
    for number, (name, (stream, was_closed)) in enumerate(zip(_STREAMS, values, strict=True)):
        if stream is not None and stream.closed and not was_closed:
            mode = "w" if number else "r"
            stream = open(  # noqa: SIM115
                number,
                mode,
                encoding="utf-8",
                errors="backslashreplace",
                closefd=False,
                buffering=1,
            )
        setattr(sys, name, stream)


def _same_streams(one: _Streams, other: _Streams) -> bool:
    return all(a is b and closed == shut for (a, closed), (b, shut) in zip(one, other, strict=True))


def _filters() -> _Filters:
    return list(warnings.filters), warnings.showwarning


def _set_filters(values: _Filters) -> None:
    filters: Any = warnings.filters
    filters[:], warnings.showwarning = values


def _garbage() -> tuple[bool, tuple[int, ...]]:
    return gc.isenabled(), gc.get_threshold()


def _set_garbage(values: tuple[bool, tuple[int, ...]]) -> None:
    (gc.enable if values[0] else gc.disable)()
    gc.set_threshold(*values[1])


def _loggers() -> list[logging.Logger]:
    there = logging.root.manager.loggerDict
    return [
        log
        for name, log in sorted(there.items())
        if isinstance(log, logging.Logger) and name.split(".")[0] == "tether"
    ]


def _log() -> _Log:
    return logging.root.manager.disable, {
        log.name: (log.disabled, log.level, log.propagate, tuple(log.handlers))
        for log in _loggers()
    }


def _set_log(values: _Log) -> None:
    logging.disable(values[0])
    for log in _loggers():
        if log.name in values[1]:
            log.disabled, level, log.propagate, handlers = values[1][log.name]
            log.setLevel(level)
            log.handlers[:] = handlers


def _signals() -> _Handlers:
    return {number: signal.getsignal(number) for number in signal.valid_signals()}


def _set_signals(handlers: _Handlers) -> None:
    """Only the main thread may, and only there a function can have changed any."""
    for number, handler in handlers.items():
        if handler is not None and signal.getsignal(number) is not handler:
            signal.signal(number, handler)


def _timers() -> _Timers:
    """The moment at which the alarm rings, if any, and its interval; and which of the timers of
    processor time run.
    """
    left, interval = signal.getitimer(signal.ITIMER_REAL)
    rings = time.monotonic() + left if left else None
    return (
        rings,
        interval,
        signal.getitimer(signal.ITIMER_VIRTUAL)[0] > 0,
        signal.getitimer(signal.ITIMER_PROF)[0] > 0,
    )


def _set_timers(values: _Timers) -> None:
    """Set the alarm as it was, and end the timers that did not run: their signals would end the
    run.
    """
    rings, interval, virtual, profiling = values
    signal.setitimer(
        signal.ITIMER_REAL,
        0 if rings is None else max(0.001, rings - time.monotonic()),
        interval,
    )
    for kind, ran in ((signal.ITIMER_VIRTUAL, virtual), (signal.ITIMER_PROF, profiling)):
        if not ran:
            signal.setitimer(kind, 0)


def _same_timers(one: _Timers, other: _Timers) -> bool:
    rings, rang = one[0], other[0]
    alike = rings is rang if rings is None or rang is None else abs(rings - rang) < 0.5
    return alike and one[1:] == other[1:]


def _interpreter() -> _Interpreter:
    return sys.getrecursionlimit(), sys.getswitchinterval(), sys.get_int_max_str_digits()


def _set_interpreter(values: _Interpreter) -> None:
    sys.setrecursionlimit(values[0])
    sys.setswitchinterval(values[1])
    sys.set_int_max_str_digits(values[2])


_KINDS = [getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")]


def _limits() -> dict[int, tuple[int, int]]:
    return {kind: resource.getrlimit(kind) for kind in _KINDS}


def _set_limits(values: Mapping[int, tuple[int, int]]) -> None:
    """Set limits as far as the hard ones allow, which root alone can raise again."""
    for kind, both in values.items():
        highest = resource.getrlimit(kind)[1]
        if highest != both[1]:
            resource.setrlimit(kind, (highest, highest))
    for kind, both in values.items():
        resource.setrlimit(kind, both)


def _same_tensors(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


THREADS = "torch's number of threads"
STREAMS = "standard input, output or error"
FILTERS, FOLDER = "the filters of warnings", "the working directory"
FACETS: tuple[Facet[Any], ...] = (
    Facet("torch's default dtype", torch.get_default_dtype, torch.set_default_dtype),
    Facet("torch's default device", _device, torch.set_default_device, keeps=False),
    Facet(THREADS, torch.get_num_threads, torch.set_num_threads),
    Facet(
        "torch's recording of gradients",
        torch.is_grad_enabled,
        torch.set_grad_enabled,
        keeps=False,
    ),
    Facet(
        "torch's deterministic algorithms",
        _deterministic,
        lambda on: torch.use_deterministic_algorithms(on[0], warn_only=on[1]),
    ),
    Facet("torch's kernels and precision", _switches, _switch),
    Facet("torch's random numbers", _draws, _set_draws, same=_same_tensors),
    Facet("numpy's random numbers", _draws_of_numpy, _set_draws_of_numpy),
    Facet("Python's random numbers", random.getstate, random.setstate),
    Facet(FOLDER, os.getcwd, os.chdir, keeps=False),
    Facet("the umask", _umask, os.umask, keeps=False),
    Facet("environment variables", os.environ.copy, _set_environment),
    Facet(
        "the locale",
        lambda: locale.setlocale(locale.LC_ALL),
        lambda name: locale.setlocale(locale.LC_ALL, name),
    ),
    Facet("the decimal context", _decimal, _set_decimal, keeps=False),
    Facet("numpy's errors", np.geterr, lambda errors: np.seterr(**errors), keeps=False),
    Facet(STREAMS, _streams, _set_streams, keeps=False, same=_same_streams),
    Facet(FILTERS, _filters, _set_filters),
    Facet("garbage collection", _garbage, _set_garbage),
    Facet("the log of tether", _log, _set_log, keeps=False),
    Facet("handlers of signals", _signals, _set_signals, keeps=False),
    Facet("timers of signals", _timers, _set_timers, keeps=False, same=_same_timers),
    Facet("limits of the interpreter", _interpreter, _set_interpreter),
    Facet("limits of the process", _limits, _set_limits, keeps=False),
    Facet("the time limit of sockets", socket.getdefaulttimeout, socket.setdefaulttimeout),
)
