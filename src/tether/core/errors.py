"""Errors that a user can cause and mend: each message says what, where and what to do.

Every child also inherits the standard exception that a caller would expect, so code that does not
know tether can still catch them. A plain `AssertionError` is a bug of ours.
"""

import importlib.util
import re

from tether.core.stopping import Interrupted

STOPS = (KeyboardInterrupt, Interrupted)
"""Errors that stop the run on request. Handlers of errors from a user's code must raise these
again.
"""


class TetherError(Exception):
    """The root of all errors that are the user's to mend; the command line exits with 2 for
    these.
    """


class ConfigError(TetherError, ValueError):
    """A recipe, an override or a combination of settings is wrong."""


class DataError(TetherError, ValueError):
    """A data file or a row of it cannot be used."""


class MissingFileError(TetherError, FileNotFoundError):
    """A path that a recipe or a command names does not exist."""


class ModelError(TetherError, ValueError):
    """A model or tokenizer cannot be loaded or does not fit its role."""


class RunError(TetherError, RuntimeError):
    """A run directory or a checkpoint is incomplete, damaged or belongs to another recipe."""


class TrainingError(TetherError, ArithmeticError):
    """Training met a number that is not finite, or cannot go on."""


class RewardError(TrainingError):
    """The reward source fails too often; nothing was learned from the step in which that was
    noticed.
    """


LONGEST = 300


def one_line(error: BaseException) -> str:
    """An error of other code in one line, shortened at the end. Its class, if it has no text or
    fails to give it.
    """
    try:
        text = " ".join(str(error)[: 4 * LONGEST].split()) or type(error).__name__
    except STOPS:
        raise
    except BaseException:  # noqa: BLE001 - an error of a user's own class may do anything
        return type(error).__name__
    text = f"the key {text} is missing" if isinstance(error, KeyError) else text
    return (text if len(text) <= LONGEST else f"{text[:LONGEST]} …").rstrip(".! ")


def error_words(error: BaseException) -> str:
    """An error as its class and its text in one line: "ValueError: no"."""
    kind = type(error).__name__
    text = one_line(error)
    return kind if text == kind else f"{kind}: {text}"


def memory_error(error: BaseException) -> str | None:
    """The first line of an error that says memory ran out, else None: Python's own, or that of
    torch's CPU or GPU allocator.
    """
    of_torch = isinstance(error, RuntimeError) and re.search(
        r"DefaultCPUAllocator: can't "
        r"allocate|out of memory",
        str(error),
    )
    if isinstance(error, MemoryError) or of_torch:
        return (str(error).splitlines() or ["no more is there"])[0]
    return None


def database_fault(error: BaseException) -> str | None:
    """The words of SQLite, of an error of its own or within that of the library above it, else
    None.
    """
    cause = error.orig if hasattr(error, "orig") else error  # type: ignore[attr-defined]
    return (
        str(cause)
        if type(cause).__module__ == "sqlite3" and type(cause).__name__ == "OperationalError"
        else None
    )


def require(package: str, what: str, extra: str) -> None:
    """Check that a package of one of tether's extras, which `what` needs, is installed. The check
    does not load the package.

    Raises:
        ConfigError: it is not.
    """
    if importlib.util.find_spec(package.replace("-", "_")) is None:
        raise ConfigError(
            f"{what} needs {package}, which is not installed: pip install 'tether-rlhf[{extra}]'",
        )
