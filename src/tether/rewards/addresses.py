"""The addresses that a checking process may map, so that its tables of pages stay small.

RLIMIT_AS counts pages. The kernel has no limit for the tables of pages. A page that lies alone
takes three pages of the machine: itself and two tables. So a worker reserves all addresses but a
window, for its whole life. A reservation takes no memory. The filter of rewards.guard refuses every
call that would change one. A window of W bytes has tables of W / 512 bytes at most.
"""

from __future__ import annotations

import ctypes
import resource
import sys
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from tether.rewards import bpf

_UNIT = 20
"""Bits of the unit in which a filter compares, a MiB."""
_SPARE = 2
"""Units that the filter's rounding adds to a range."""
_LARGEST = 1 << 56
"""Bytes of the first reservation that is tried."""
_RESERVED = 0x4022  # private, no file, no reserve of swap
_HERE = 0x100000  # nowhere but there
_FAILED = ctypes.c_void_p(-1).value


class Window(NamedTuple):
    """The addresses from `low` to `high`, in MiB, and the bytes that are reserved around them."""

    low: int
    high: int
    reserved: int


_windows: list[Window] = []


def window() -> Window | None:
    """The window of this process; None where all addresses are free."""
    return _windows[-1] if _windows else None


def memory_limit() -> int:
    """The bytes that this process may map beyond what is reserved; below 0 without a limit."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    return limit if limit < 0 or not _windows else limit - _windows[-1].reserved


def enclose(memory: int) -> int:
    """Reserve all addresses but those in use and a window of twice `memory` bytes below them.

    Returns the number of reserved bytes; RLIMIT_AS counts each. It is 0 where reserving is
    impossible: on other systems, or after an earlier hard limit of address space. A stack without a
    limit gives 0, too, because it reverses the order of addresses.

    The trap: the heap ends where it ends now, and the stack where its limit says.
    """
    if (
        sys.platform != "linux"
        or resource.getrlimit(resource.RLIMIT_AS)[1] >= 0
        or resource.getrlimit(resource.RLIMIT_STACK)[0] < 0
    ):
        return 0
    library = ctypes.CDLL(None)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *(3 * [ctypes.c_int]), ctypes.c_long]
    library.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]

    def take(size: int, at: int = 0) -> int | None:
        place = library.mmap(at, size, 0, _RESERVED | (_HERE if at else 0), -1, 0)
        return None if place == _FAILED else place

    size = 2 * memory + (512 << 20)
    place = take(size)
    spans, stack = _spans()
    libraries = [span for span in spans if place is not None and place + size <= span[0] < stack[0]]
    if place is None or not libraries:
        library.munmap(place, size)
        return 0
    used = [(place, place + size), *libraries]
    gaps = [_below(stack), *((a[1], b[0] - a[1]) for a, b in pairwise(used))]
    free = [
        (place, size),
        *((at, gap) for at, gap in gaps if gap > 0 and take(gap, at) is not None),
    ]
    reserved, part = -(_SPARE + 1 << _UNIT), _LARGEST
    while part >= resource.getpagesize():
        while take(part) is not None:
            reserved += part
        part >>= 1
    for start, length in free:
        library.munmap(start, length)
    _windows.append(
        Window((place >> _UNIT) + 1, (libraries[-1][1] >> _UNIT) + _SPARE + 1, reserved),
    )
    return reserved


_Span = tuple[int, int]
"""The first address of a mapping, and the first behind it."""


def _spans() -> tuple[list[_Span], _Span]:
    """All mappings of this process, in their order, and its stack."""
    spans, stack = [], (0, 0)
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        start, end = (int(part, 16) for part in line.split()[0].split("-"))
        spans.append((start, end))
        stack = (start, end) if line.endswith("[stack]") else stack
    return spans, stack


def _below(stack: _Span) -> _Span:
    """The place and length of what a stack may still take, but for the MiB below it, which the
    kernel leaves free itself.
    """
    most = resource.getrlimit(resource.RLIMIT_STACK)[0]
    lowest = (stack[1] - most) // 65536 * 65536
    return lowest, max(0, stack[0] - (1 << 20) - lowest)


def rules(numbers: Mapping[str, int]) -> Iterator[bpf.Step]:
    """Steps of a filter, after the call's number was loaded. They refuse shared memory without a
    file, and calls that change addresses outside of the window.

    Memory that is shared stays as long as a page of it is mapped, and only that page counts.
    """
    own = window()
    flags, advice = 40, 32  # where these arguments of a call lie
    inside = [] if own is None else [*_inside(own)]
    kernels_choice = (
        []
        if own is None
        else [
            (bpf.LOAD, 0, 0, 16),
            (bpf.EQUAL, 0, 3, 0),
            (bpf.LOAD, 0, 0, 20),
            (bpf.EQUAL, 0, 1, 0),
            bpf.ALLOW,
        ]
    )
    shared = [
        (bpf.LOAD, 0, 0, flags),
        (bpf.ONLY_BITS, 0, 0, 0x21),
        (bpf.EQUAL, 0, 1, 0x21),
        bpf.REFUSE,
    ]
    moved = [(bpf.LOAD, 0, 0, flags), (bpf.ABOVE, 0, 1, 1), bpf.REFUSE]
    # what is newer may fill tables of pages (guards of Linux 6.13)
    advised = [(bpf.LOAD, 0, 0, advice), (bpf.AT_LEAST, 1, 0, 100), bpf.ALLOW]
    judged = {"mmap": [*shared, *kernels_choice], "mremap": moved, "madvise": advised}
    for name in ("mmap", "munmap", "mprotect", "pkey_mprotect", "mremap", "madvise"):
        steps = [*judged.get(name, []), *inside, bpf.ALLOW]
        yield bpf.EQUAL, 0, len(steps), numbers[name]
        yield from steps


def _inside(own: Window) -> Iterator[bpf.Step]:
    """Steps that go on if the range of a call, its first two arguments, is in the window. Else they
    refuse the call; in MiB, rounded up.
    """

    def mebibytes(argument: int) -> Iterator[bpf.Step]:
        yield from ((bpf.LOAD, 0, 0, argument + 4), (bpf.ABOVE, 0, 1, 0xFFFF), bpf.REFUSE)
        yield from ((bpf.LOAD, 0, 0, argument), (bpf.DOWN, 0, 0, _UNIT), (bpf.KEEP, 0, 0, 0))
        yield from (
            (bpf.LOAD, 0, 0, argument + 4),
            (bpf.UP, 0, 0, 32 - _UNIT),
            (bpf.EITHER, 0, 0, 0),
        )

    yield from mebibytes(16)
    yield from ((bpf.AT_LEAST, 1, 0, own.low), bpf.REFUSE, (bpf.STORE, 0, 0, 0))
    yield from mebibytes(24)
    yield from (
        (bpf.RECALL, 0, 0, 0),
        (bpf.ADD, 0, 0, 0),
        (bpf.AT_LEAST, 0, 1, own.high - 1),
        bpf.REFUSE,
    )
