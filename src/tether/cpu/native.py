"""Our own C and C++, built once for the machine at hand, kept in the cache and checked before it is loaded."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from tether.core.rundir import cpuinfo
from tether.models.packaged import cache_folder


def compiled(
    source: Path, compilers: Sequence[str], flags: Sequence[str], links: Sequence[str], versions: Iterable[str] = ()
) -> ctypes.CDLL | None:
    """The shared library of one source file, built in a second or two if need be.

    Args:
        compilers: names of commands; the first that exists is taken.
        flags: of the compilation; links: of the linking, which is a command of its own: -ffast-math there would switch the whole
            process to flushing small numbers to zero.
        versions: anything else that the result depends on.

    Returns None where it cannot be had: no compiler, no place to write to, TETHER_KERNELS=0.
    """
    compiler = next(filter(None, map(shutil.which, compilers)), None)
    if compiler is None or os.name != "posix" or os.environ.get("TETHER_KERNELS") == "0":
        return None
    try:
        # What -march=native depends on: a cache folder may be shared by machines.
        machine = [line for line in cpuinfo() if line.startswith(("model name", "flags", "Features", "CPU part"))]
        inputs = [source.read_text(), compiler, *flags, *links, *versions, platform.machine(), *machine]
        folder, name = cache_folder() / "kernels", f"{source.stem}-{_digest(repr(inputs).encode())[:16]}"
        library = next(filter(is_trusted, folder.glob(f"{name}-*.so")), None)
        return ctypes.CDLL(str(library or _build(folder, name, [compiler, *flags, "-fPIC", "-c", str(source)], links)))
    except (OSError, subprocess.SubprocessError):
        return None


def _build(folder: Path, name: str, compilation: Sequence[str], links: Sequence[str]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        target, part = Path(temporary) / "library.so", str(Path(temporary) / "part.o")
        for command in ([*compilation, "-o", part], [compilation[0], "-shared", part, "-o", str(target), *links]):
            subprocess.run(command, check=True, capture_output=True, timeout=60)
        target.chmod(0o755)
        return target.replace(folder / f"{name}-{_digest(target.read_bytes())}.so")


def is_trusted(library: Path) -> bool:
    """Whether a cached library is whole and nobody else could have written it.

    Its name ends with the digest of its contents; it belongs to this user, and no other may write to it.
    """
    status = library.stat()
    return status.st_uid == os.geteuid() and not status.st_mode & 0o022 and library.stem.endswith(_digest(library.read_bytes()))


def _digest(contents: bytes) -> str:
    return hashlib.sha256(contents).hexdigest()
