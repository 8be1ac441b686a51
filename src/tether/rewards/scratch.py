"""The folder in which a checked program may write, bounded by the kernel where the kernel allows
it.

First line: a tmpfs of a fixed size and number of files
(https://docs.kernel.org/filesystems/tmpfs.html). It is mounted over the folder in a mount namespace
of the program's own process (https://man7.org/linux/man-pages/man7/mount_namespaces.7.html). A file
that is removed and still held counts there. Mounting needs root or a user namespace.

Second line, where the first is impossible: the parent measures the folder and the removed files
that the process holds.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import resource
import stat
import sys
from pathlib import Path

from tether.rewards.guard import limit

FILES, THREADS = 1024, 512
"""Files and threads that a program may have at a time."""
_NEW_MOUNTS = 0x20000
_NEW_USER = 0x10000000
_USERS = 0x70000000
"""First of the user ids that no system hands out; a program has the one of its process's number."""
# MS_PRIVATE, of all below; MS_NOSUID, MS_NODEV, MS_NOEXEC
_PRIVATE = 1 << 18 | 1 << 14
_HARMLESS = 1 << 1 | 1 << 2 | 1 << 3
_MEMORY = "VmRSS", "VmSwap", "VmPTE"
"""Memory of a process: pages, those that were swapped out, and the tables of pages, which no limit
of the kernel bounds.
"""


def confine(folder: str, num_bytes: int) -> bool:
    """Mount a tmpfs of `num_bytes` and `FILES` files over `folder`, for this process alone, and
    limit its threads; True if there is the mount.

    The trap: the process must have one thread.
    """
    if sys.platform != "linux":
        return False
    library = ctypes.CDLL(None, use_errno=True)
    own_users = library.unshare(_NEW_MOUNTS) != 0
    if own_users and not _with_own_users(library):
        return False
    if library.mount(None, b"/", None, _PRIVATE, None) != 0:
        return False
    options = f"size={num_bytes},nr_inodes={FILES + 1},mode=700".encode()
    if library.mount(b"tmpfs", os.fsencode(folder), b"tmpfs", _HARMLESS, options) != 0:
        return False
    if own_users or _as_another_user():
        _limit_threads()
    return True


def _as_another_user() -> bool:
    """Take a user id that no other process has as the real one, by which the kernel counts threads.
    The effective one stays, by which files are reached.
    """
    try:
        os.setresuid(_USERS + os.getpid(), -1, -1)
    except OSError:
        return False
    return True


def _limit_threads() -> None:
    """Limit the threads of this process, whose user or namespace has no others."""
    release = [int(number) for number in re.findall(r"[0-9]+", os.uname().release)[:2]]
    # older kernels count the threads of a user in all namespaces
    if release >= [5, 14]:
        limit(resource.RLIMIT_NPROC, THREADS, for_good=True)


def _with_own_users(library: ctypes.CDLL) -> bool:
    """Mounts and users of this process's own, where it stays who it is; for those who may not
    mount.
    """
    user = os.geteuid()
    group = os.getegid()
    if library.unshare(_NEW_MOUNTS | _NEW_USER) != 0:
        return False
    try:
        Path("/proc/self/setgroups").write_text("deny", encoding="ascii")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1", encoding="ascii")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1", encoding="ascii")
    except OSError:
        return False
    return True


def excess(process: int, folder: str, *, num_bytes: int, file_bytes: int, memory: int) -> str:
    """The bound that a process exceeds, as a phrase; empty where there is none.

    Args:
        num_bytes: of all files together, `file_bytes` of a single one; both in bytes.
        memory: with its tables of pages, in bytes; a number below 0 is no limit.
    """
    state = _state(process)
    if 0 <= memory < sum(state.get(name, 0) for name in _MEMORY) << 10:
        return f"more than {memory >> 20} MB of memory"
    if state.get("Threads", 0) > THREADS:
        return f"more than {THREADS} threads"
    if _is_mounted(process, folder):
        return ""  # the kernel bounds it
    count = 0
    total = _held(process, file_bytes)
    for entry in os.scandir(folder):
        with contextlib.suppress(FileNotFoundError):  # gone in between
            count += 1
            status = entry.stat(follow_symlinks=False)
            total += max(status.st_size, status.st_blocks * 512)
    if count > FILES:
        return f"more than {FILES:,} files"
    return f"more than {num_bytes >> 20} MB of files" if total > num_bytes else ""


def _is_mounted(process: int, folder: str) -> bool:
    """True if the process sees another file system in its folder than this one does."""
    try:
        return os.stat(f"/proc/{process}/root{folder}").st_dev != os.stat(folder).st_dev
    except OSError:
        return False


def _state(process: int) -> dict[str, int]:
    """The numbers of a process's state, memory in KB; none where the system has no /proc."""
    try:
        lines = (
            Path(f"/proc/{process}/status")
            .read_text(encoding="utf-8", errors="replace")
            .splitlines()
        )
    except OSError:
        return {}
    fields = (line.replace(":", " ", 1).split() for line in lines)
    return {
        words[0]: int(words[1]) for words in fields if len(words) in (2, 3) and words[1].isdecimal()
    }


def _held(process: int, file_bytes: int) -> int:
    """Bytes of removed files that a process has open, and at most those that it has mapped itself:
    it was forked from this one, and began with its maps.
    """
    open_files: dict[tuple[int, int], int] = {}
    with contextlib.suppress(OSError):
        for name in os.listdir(f"/proc/{process}/fd"):
            with contextlib.suppress(OSError):
                status = os.stat(f"/proc/{process}/fd/{name}")
                if stat.S_ISREG(status.st_mode) and status.st_nlink == 0:
                    open_files[os.minor(status.st_dev), status.st_ino] = status.st_blocks * 512
    mapped = _removed_and_mapped(process) - open_files.keys()
    if mapped:
        mapped -= _removed_and_mapped(os.getpid())
    return sum(open_files.values()) + file_bytes * len(mapped)


def _removed_and_mapped(process: int) -> set[tuple[int, int]]:
    """Removed files that a process has mapped, by device and inode."""
    mapped: set[tuple[int, int]] = set()
    with contextlib.suppress(OSError):
        for line in (
            Path(f"/proc/{process}/maps").read_text(encoding="utf-8", errors="replace").splitlines()
        ):
            fields = line.split(maxsplit=5)
            # memory, which RLIMIT_AS bounds
            if line.endswith("(deleted)") and not fields[-1].startswith(("/dev/zero", "/SYSV")):
                mapped.add((int(fields[3].partition(":")[2], 16), int(fields[4])))
    return mapped
