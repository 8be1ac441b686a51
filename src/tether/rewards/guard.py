"""The rights that a checking process gives up for good before it touches a model's text: files,
processes, the network.

On Linux the kernel holds the guard, without root and without a container. The process gives up all
capabilities. Landlock limits files (https://docs.kernel.org/userspace-api/landlock.html). A seccomp
filter limits processes, signals, sockets and the metadata of files
(https://docs.kernel.org/userspace-api/seccomp_filter.html). An audit hook replaces guards that the
kernel does not offer. Python code can get around it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import resource
import signal
import struct
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tether.core.tables import table_beside
from tether.rewards import bpf

READABLE = (
    "/usr/lib",
    "/usr/lib64",
    "/lib",
    "/lib64",
    "/usr/share/zoneinfo",
    "/etc/localtime",
    "/etc/ld.so.cache",
)
# none that gives memory: pages of /dev/zero that are shared stay when they are not mapped any more
DEVICES = ("/dev/null", "/dev/urandom")
MEBIBYTE = 1 << 20
OPEN_FILES = 64

_CALLS: dict[str, dict[str, list[int]]] = table_beside(__file__, "syscalls.toml")
_REFUSED = _CALLS["refused"]
_JUDGED = _CALLS["judged"]
_MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
_FILES = (1 << 13) - 1  # Landlock's rights as they were first; later ones are added by its version
_READ = 1 << 2 | 1 << 3
_WRITE = 1 << 1 | 1 << 2 | 1 << 3 | 1 << 5 | 1 << 8 | 1 << 14
_ARGUMENTS = {"first": 16, "second": 24, "third": 32}  # where a filter finds them, in bytes
# the last call that syscalls.toml knows (file_setattr of Linux 6.17); newer ones do not exist for a
# program
_NEWEST = 469
_THREAD = 0x10000 | 0x400 | 0x200  # CLONE_THREAD, with the open files and the folders of the others
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


class Guards(NamedTuple):
    """Flags of the guards that the kernel holds. An audit hook replaces missing `files` and
    `processes`, measurements from outside a missing `space`.

    - files: the files that may be read and written (Landlock)
    - processes: processes, signals, sockets (seccomp)
    - space: the size and number of the files that a program writes (a tmpfs of its own, see
      rewards.scratch)
    """

    files: bool
    processes: bool
    space: bool = False


def restrict(scratch: str | None = None) -> Guards:
    """Give up, in this thread and what it starts, everything but computing; there is no way back.

    Args:
        scratch: the one folder in which plain files (no folders, no links) may be written; without
            one there are no new threads either.

    The trap: what is imported later must lie among the installed packages, and other threads of the
    process keep their files.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    files = processes = False
    if sys.platform == "linux" and sys.byteorder == "little":
        library = ctypes.CDLL(None, use_errno=True)
        library.syscall.restype = ctypes.c_long
        # PR_SET_NO_NEW_PRIVS, without which neither is to be had
        alone = library.prctl(38, 1, 0, 0, 0) == 0
        # PR_SET_THP_DISABLE: a large page is held whole while a part of it is mapped
        library.prctl(41, 1, 0, 0, 0)
        files = alone and _landlock(library, scratch)
        processes = (
            alone
            and platform.machine() in _MACHINES
            and _seccomp(library, threads=scratch is not None)
        )
    if not (files and processes):
        if not processes:
            limit(resource.RLIMIT_NPROC, 0, for_good=True)
        sys.addaudithook(_fence(Guards(files, processes), scratch))
    return Guards(files, processes)


def end_first() -> None:
    """Make the kernel end this process and its children first if memory runs out, before others of
    the machine.
    """
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")


def end_with(parent: int) -> None:
    """Have the kernel end this process when the thread that forked it, of the process `parent`,
    ends.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)


def limit(kind: int, amount: int, *, for_good: bool = False) -> None:
    """Set a limit of this process, as far as the hard one allows; `for_good`, it cannot be raised
    again.
    """
    hard = resource.getrlimit(kind)[1]
    soft = amount if hard == resource.RLIM_INFINITY else min(amount, hard)
    resource.setrlimit(kind, (soft, soft if for_good else hard))


def _readable() -> Iterator[str]:
    """The interpreter, its libraries and the installed packages: no private files."""
    yield from READABLE
    paths = sysconfig.get_paths()
    yield from (paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib"))
    yield from (os.path.join(prefix, "lib") for prefix in (sys.prefix, sys.base_prefix))


def _landlock(library: ctypes.CDLL, scratch: str | None) -> bool:
    """True if files are out of reach from here on. It takes Landlock's version 3 (Linux 6.2), the
    first that knows truncation.
    """
    version = library.syscall(444, None, ctypes.c_size_t(0), 1)
    if version < 3:
        return False
    handled = _FILES | 1 << 13 | 1 << 14 | (1 << 15 if version >= 5 else 0)
    # TCP; abstract sockets and signals
    network = 3 if version >= 4 else 0
    scope = 3 if version >= 6 else 0
    attributes = struct.pack("QQQ", handled, network, scope)[
        : 8 if version < 4 else 16 if version < 6 else 24
    ]
    rules = library.syscall(444, attributes, ctypes.c_size_t(len(attributes)), 0)
    if rules < 0:
        return False
    try:
        granted = [(path, _READ) for path in _readable()] + [(path, _WRITE) for path in DEVICES]
        for path, rights in granted + ([(scratch, _WRITE)] if scratch else []):
            _grant(library, rules, path, rights)
        return library.syscall(446, rules, 0) == 0
    finally:
        os.close(rules)


def _grant(library: ctypes.CDLL, rules: int, path: str, rights: int) -> None:
    try:
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return
    if not os.path.isdir(path):
        rights &= 1 << 1 | 1 << 2 | 1 << 14
    library.syscall(445, rules, 1, struct.pack("=Qi", rights, place), 0)
    os.close(place)


def _seccomp(library: ctypes.CDLL, *, threads: bool) -> bool:
    """True if the kernel refuses processes, signals to others and sockets from here on, in every
    thread.
    """
    column, machine = _MACHINES[platform.machine()]
    filtered = b"".join(
        struct.pack("HBBI", *step) for step in _filter(column, machine, threads=threads)
    )
    buffer = ctypes.create_string_buffer(filtered)
    program = struct.pack("HxxxxxxQ", len(filtered) // 8, ctypes.addressof(buffer))
    # A capability would undo much of this, and root starts with all of them.
    if library.syscall(_JUDGED["capset"][column], struct.pack("Ii", 0x20080522, 0), bytes(24)) != 0:
        return False
    # SECCOMP_SET_MODE_FILTER, of all threads
    return library.syscall(_JUDGED["seccomp"][column], 1, 1, program) == 0


def _filter(column: int, machine: int, *, threads: bool) -> Iterator[bpf.Step]:
    """The steps of the filter."""
    number: Callable[[str], int] = lambda name: _JUDGED[name][column]  # noqa: E731

    def only(name: str, *steps: bpf.Step) -> Iterator[bpf.Step]:
        """Of this call only where the steps go past a refusal."""
        yield bpf.EQUAL, 0, len(steps) + 2, number(name)
        yield from steps
        yield bpf.REFUSE
        yield bpf.ALLOW

    def where(name: str, **arguments: Iterable[int]) -> Iterator[bpf.Step]:
        """Of this call only with such arguments."""
        steps: list[bpf.Step] = []
        for argument, allowed in arguments.items():
            values = tuple(allowed)
            steps.append((bpf.LOAD, 0, 0, _ARGUMENTS[argument]))
            steps += (
                (bpf.EQUAL, len(values) - place, 0, value) for place, value in enumerate(values)
            )
            steps.append(bpf.REFUSE)
        yield from only(name, *steps[:-1])

    yield bpf.LOAD, 0, 0, 4
    yield bpf.EQUAL, 1, 0, machine
    yield bpf.KILL
    yield bpf.LOAD, 0, 0, 0
    if column == 0:  # the other way to call an x86-64 kernel, with numbers of its own
        yield bpf.AT_LEAST, 0, 1, 0x40000000
        yield bpf.KILL
    yield bpf.AT_LEAST, 0, 1, _NEWEST + 1
    yield bpf.UNKNOWN
    for denied in (
        number for numbers in _REFUSED.values() for number in numbers[column : column + 1]
    ):
        yield bpf.EQUAL, 0, 1, denied
        yield bpf.REFUSE
    # its flags lie in memory, where a filter cannot look; libraries fall back to clone
    yield bpf.EQUAL, 0, 1, number("clone3")
    yield bpf.UNKNOWN
    yield from only(
        "clone",
        (bpf.LOAD, 0, 0, _ARGUMENTS["first"]),
        (bpf.ONLY_BITS, 0, 0, _THREAD),
        (bpf.EQUAL, int(threads), 0, _THREAD),
    )
    own = os.getpid()
    yield from where("kill", first=(own,))
    yield from where("tgkill", first=(own,))
    yield from where("prlimit64", first=(0, own))
    # streams: a datagram may go to any address
    yield from where("socketpair", first=(1,), second=(1, 0x801, 0x80001, 0x80801))
    # not into a table of open files of its own, which has limits of its own
    yield from where("close_range", third=(0, 4))
    # names and questions
    yield from where("prctl", first=(2, 3, 15, 16, 21, 23, 30, 38, 39, 0x53564D41))
    # None that sends signals to an owner, enlarges a pipe, or makes a lease.
    yield from where("fcntl", second=(0, 1, 2, 3, 4, 5, 6, 7, 1030, 1032, 1033, 1034))
    # shared memory without a file stays as long as a page of it is mapped, and only that page counts
    yield from only(
        "mmap",
        (bpf.LOAD, 0, 0, 40),
        (bpf.ONLY_BITS, 0, 0, 0x21),
        (bpf.EQUAL, 0, 1, 0x21),
    )
    # newer advice may fill tables of pages (guards of Linux 6.13)
    yield from only(
        "madvise",
        (bpf.LOAD, 0, 0, _ARGUMENTS["third"]),
        (bpf.AT_LEAST, 0, 1, 100),
    )
    # of terminals only what asks
    yield from where("ioctl", second=(0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451))
    yield bpf.ALLOW


_STARTING = (
    *("os.fork", "os.kill", "os.exec", "os.posix_spawn", "os.spawn", "os.system", "pty."),
    *("socket.", "subprocess.", "signal.pthread_kill"),
)
"""Audit events of processes, signals and sockets."""


def _fence(guards: Guards, scratch: str | None) -> Callable[[str, tuple[object, ...]], None]:
    """An audit hook in place of the guards that the kernel does not hold."""
    inside = None if scratch is None else os.path.realpath(scratch) + os.sep
    files = () if guards.files else ("open", "os.", "shutil.")
    refused = (*files, *(() if guards.processes else _STARTING), "ctypes.")
    harmless = ("os.listdir", "os.scandir", "os.walk", "os.fwalk")

    def writes_inside(event: str, arguments: tuple[object, ...]) -> bool:
        if (
            inside is None
            or event not in ("open", "os.remove")
            or not isinstance(arguments[0], (str, bytes))
        ):
            return False
        return os.path.realpath(os.fsdecode(arguments[0])).startswith(inside)

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if not event.startswith(refused) or event in harmless:
            return
        if (event == "open" and not (arguments[2] or 0) & _WRITING) or writes_inside(
            event,
            arguments,
        ):
            return
        raise PermissionError(f"a check may not do this: {event}")

    return hook
