"""Files that are whole or as they were."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def whole_file(path: str | Path) -> Iterator[Path]:
    """A temporary file beside `path` that is flushed and takes its name at the end; on any error `path` is as it was."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    temporary = Path(name)
    try:
        yield temporary
        temporary.chmod(0o644)
        os.fsync(handle)
        os.replace(temporary, path)
    finally:
        os.close(handle)
        temporary.unlink(missing_ok=True)
