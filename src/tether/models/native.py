"""Our own C and C++, built once for the machine at hand and kept in the cache."""

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

from tether.models.packaged import cache_folder


def build(
    source: Path, compilers: Sequence[str], flags: Sequence[str], links: Sequence[str | Path], known: Iterable[str] = ()
) -> ctypes.CDLL | None:
    """The shared library of one source file, built in a second or two if need be.

    Args:
        compilers: by name, the first that is there is taken.
        flags: of the compilation; links: of the linking, which is a command of its own: -ffast-math there would switch the whole
            process to flushing small numbers to zero.
        known: what else the result depends on.

    Returns None where it cannot be had: no compiler, no place to write to, TETHER_KERNELS=0.
    """
    compiler = next(filter(None, map(shutil.which, compilers)), None)
    if compiler is None or os.name != "posix" or os.environ.get("TETHER_KERNELS") == "0":
        return None
    try:
        told = [source.read_text(), compiler, *flags, *map(str, links), *known, platform.machine(), _processor()]
        digest = hashlib.sha256("\n".join(told).encode()).hexdigest()[:16]
        built = cache_folder() / "kernels" / f"{source.stem}-{digest}.so"
        if not built.is_file():
            built.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=built.parent) as folder:
                target = Path(folder) / built.name
                compiled = str(target.with_suffix(".o"))
                for command in (
                    [compiler, *flags, "-fPIC", "-c", str(source), "-o", compiled],
                    [compiler, "-shared", compiled, "-o", str(target), *map(str, links)],
                ):
                    subprocess.run(command, check=True, capture_output=True, timeout=60)
                os.replace(target, built)
        return ctypes.CDLL(str(built))
    except (OSError, subprocess.SubprocessError):
        return None


def _processor() -> str:
    """What `-march=native` depends on: a cache folder may be shared by machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return "".join(line for line in lines[:40] if line.startswith(("model name", "flags", "Features", "CPU part")))
    except OSError:
        return platform.processor()
