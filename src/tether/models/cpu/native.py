"""Our own C and C++, built once for the machine at hand, kept in the cache and checked before it is
loaded.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import logging
import os
import platform
import shutil
import stat
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from tether.core.errors import ConfigError, one_line
from tether.core.keeping import temporary_folder, unfinished_folder
from tether.core.once import once
from tether.core.rundir import cpuinfo
from tether.models.packaged import cache_folder

PATIENCE = 600
"""Seconds a compiler may take: many, for without kernels numbers are rounded otherwise. A busy
machine decides nothing.
"""
_NOT_KEPT = (
    "CPU kernels cannot be kept in the cache (%s). They are built for this process alone. If "
    "TETHER_CACHE is a folder of yours, they are built once."
)
_NOT_BUILT = "CPU kernels of %s cannot be built (%s). Operations of torch replace them."
_LOG = logging.getLogger(__name__)


def compiled(
    source: Path,
    compilers: Sequence[str],
    flags: Sequence[str],
    links: Sequence[str],
    versions: Iterable[str] = (),
) -> ctypes.CDLL | None:
    """The shared library of one source file, built in a second or two if need be.

    Args:
        compilers: names of commands; the first that exists is taken.
        flags: of the compilation.
        links: of the linking, which is a command of its own. If -ffast-math were among them, the
            whole process would flush small numbers to zero.
        versions: anything else that the result depends on.

    Where the cache takes no file, the library is built for this process alone, in a temporary
    folder.

    Returns None where it cannot be had: no compiler, a compiler that fails, TETHER_KERNELS=0. The
    log has the reason.
    """
    compiler = next(filter(None, map(shutil.which, compilers)), None)
    if compiler is None or os.name != "posix" or os.environ.get("TETHER_KERNELS") == "0":
        return None
    try:
        # What -march=native depends on: a cache folder may be shared by machines.
        machine = [
            line
            for line in cpuinfo()
            if line.startswith(("model name", "flags", "Features", "CPU part"))
        ]
        inputs = [
            source.read_text(),
            compiler,
            *flags,
            *links,
            *versions,
            platform.machine(),
            *machine,
        ]
        name = f"{source.stem}-{_digest(repr(inputs).encode())[:16]}"
        compilation = [compiler, *flags, "-fPIC", "-c", str(source)]
        try:
            return _kept(cache_folder() / "kernels", name, compilation, links)
        except (OSError, ConfigError) as error:
            once(_LOG.warning, _NOT_KEPT, one_line(error))
            with temporary_folder("tether-kernels") as folder:
                return _kept(folder, name, compilation, links)
    except (OSError, subprocess.SubprocessError) as error:
        once(_LOG.warning, _NOT_BUILT, source.name, f"{_reason(error):.300}")
        return None


def _reason(error: Exception) -> str:
    """The compiler's own words, where it has some."""
    if isinstance(error, subprocess.CalledProcessError) and error.stderr:
        return " ".join(error.stderr.decode(errors="replace").split())
    return one_line(error)


def _kept(
    folder: Path,
    name: str,
    compilation: Sequence[str],
    links: Sequence[str],
) -> ctypes.CDLL | None:
    """The library of that name in a folder, built there if need be.

    Raises:
        OSError: the folder belongs to another user or takes no file.
        subprocess.SubprocessError: the compiler failed.
    """
    with _own_folder(folder) as place:
        for file in sorted(os.listdir(place)):
            if file.startswith(f"{name}-") and (library := _loaded(place, file)) is not None:
                return library
        return _loaded(place, _build(folder, name, compilation, links))


@contextlib.contextmanager
def _own_folder(folder: Path) -> Iterator[int]:
    """A descriptor of a folder that belongs to this user, who alone may write to it; it is made if
    necessary.

    All that follows goes through the descriptor, so that a folder put in its place later is not
    looked at.

    Raises:
        OSError: it belongs to another user.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder = folder.resolve()
    place = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        status = os.fstat(place)
        if status.st_uid != os.geteuid():
            raise PermissionError(f"{folder} belongs to another user")
        if status.st_mode & 0o022:
            os.fchmod(place, status.st_mode & 0o755)
        yield place
    finally:
        os.close(place)


def _loaded(place: int, file: str) -> ctypes.CDLL | None:
    """The library of that name in an opened folder; None unless it is whole and only this user
    could have written it.

    The file is opened once, so the checked file is the loaded one, even if another file gets its
    name.
    """
    opened = os.open(file, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=place)
    library = None
    try:
        if is_trusted(opened, file):
            by_descriptor = Path(f"/proc/self/fd/{opened}")
            library = (
                ctypes.CDLL(str(by_descriptor))
                if by_descriptor.exists()
                else _loaded_copy(opened, file)
            )
    finally:
        if library is None:  # else it stays open: the loader knows the library by this number
            os.close(opened)
    return library


def _loaded_copy(opened: int, file: str) -> ctypes.CDLL:
    """The library from a private copy, where it cannot be loaded by its descriptor."""
    with temporary_folder("tether-kernel") as private:
        copy = private / file
        copy.write_bytes(_contents(opened))
        return ctypes.CDLL(str(copy))


def _build(folder: Path, name: str, compilation: Sequence[str], links: Sequence[str]) -> str:
    """Compile and link a source file; gives the name of the library in the folder."""
    with unfinished_folder(folder / name) as temporary:
        target = temporary / "library.so"
        part = str(temporary / "part.o")
        for command in (
            [*compilation, "-o", part],
            [compilation[0], "-shared", part, "-o", str(target), *links],
        ):
            subprocess.run(command, check=True, capture_output=True, timeout=PATIENCE)
        target.chmod(0o755)
        return target.replace(folder / f"{name}-{_digest(target.read_bytes())}.so").name


def is_trusted(opened: int, file: str) -> bool:
    """True if an opened library is whole and only this user could have written it.

    Its name ends with the digest of its contents. It is a plain file that only this user owns and
    may write to.
    """
    status = os.fstat(opened)
    is_own = (
        stat.S_ISREG(status.st_mode)
        and status.st_uid == os.geteuid()
        and not status.st_mode & 0o022
    )
    return is_own and Path(file).stem.endswith(f"-{_digest(_contents(opened))}")


def _contents(opened: int) -> bytes:
    """All that an opened file holds."""
    return os.pread(opened, os.fstat(opened).st_size, 0)


def _digest(contents: bytes) -> str:
    return hashlib.sha256(contents).hexdigest()
