"""Requests to a training in another process: a file in its run directory, taken at a step's end."""

from __future__ import annotations

import contextlib
import os
from enum import StrEnum
from pathlib import Path


class Request(StrEnum):
    """The name of the file of each request."""

    STOP = "stop.request"
    CHECKPOINT = "checkpoint.request"


def leave_request(folder: Path, request: Request) -> None:
    """Ask the training in this run directory; a request that waits there already is the same.

    Raises:
        OSError: the folder has gone, or cannot be written to.
    """
    with contextlib.suppress(FileExistsError):
        os.close(os.open(folder / request, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))


def take_request(folder: Path, request: Request) -> bool:
    """True if this request was left in the run directory, where it is no longer."""
    try:
        os.unlink(folder / request)
    except OSError:
        return False
    return True
