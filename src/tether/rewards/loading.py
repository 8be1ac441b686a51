"""Functions by their names: of a module, of a file, or handed over by a Python program."""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib
import importlib.util
import inspect
import sys
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType

from tether.core.errors import STOPS, ConfigError, MissingFileError, error_words
from tether.core.secrets import redact
from tether.core.watchdog import Watchdog
from tether.rewards.calling import defined_by, title_of
from tether.rewards.forms import Function, plain
from tether.rewards.surroundings import surroundings
from tether.settings.rewards import GIVEN, Shape

_GIVEN: dict[str, Callable[..., object]] = {}
QUICK_IMPORT = 5.0
"""A sixth of the seconds after which a warning says where an import is."""


def register(function: Callable[..., object]) -> str:
    """The name by which a recipe of this process knows a function; its digest keeps a run from
    going on with another.
    """
    name = f"{GIVEN}{title_of(function)}@{_digest(function)}"
    _GIVEN[name] = function
    return name


def _digest(function: object) -> str:
    """A short hash of what a function does: its code without comments and layout, and the plain
    values that it closes over.
    """
    if isinstance(function, functools.partial):
        return _hash(
            _digest(function.func),
            repr(function.args),
            repr(sorted(function.keywords.items())),
        )
    code = defined_by(function)
    values = {
        k: v for k, v in _state(function).items() if isinstance(v, str | int | float | tuple | None)
    }
    try:
        text = ast.dump(ast.parse(textwrap.dedent(inspect.getsource(code))))
    except (OSError, TypeError, SyntaxError, ValueError):
        # typed into a prompt, built in, or a lambda amid a call
        compiled = code.__code__ if inspect.isfunction(code) else None
        text = (
            repr(code)
            if compiled is None
            else repr((compiled.co_code, compiled.co_names, compiled.co_consts))
        )
    return _hash(text, repr(sorted(values.items())))


def _state(function: object) -> Mapping[str, object]:
    """The variables that a function closes over, or those of an object that can be called."""
    if inspect.isfunction(function):
        try:
            return inspect.getclosurevars(function).nonlocals
        except ValueError:  # a variable that has no value yet
            return {}
    return (
        {} if inspect.isroutine(function) or not hasattr(function, "__dict__") else vars(function)
    )


def _hash(*words: str) -> str:
    """Runs are held to it: it must stay as it is."""
    return hashlib.sha256("\0".join(words).encode()).hexdigest()[:12]


def load_function(call: str, completions: Shape = "texts", key: str = "function.call") -> Function:
    """The function that a recipe names, whatever form it is written in, as (prompts, responses) ->
    values; see `load_object`.
    """
    return plain(load_object(call, key), completions)


def load_object(call: str, key: str) -> Callable[..., object]:
    """The function or class that a recipe names.

    Args:
        key: of the recipe, for messages.

    Raises:
        ConfigError: the name does not lead to something that can be called, or its module cannot be
            imported.
        MissingFileError: its file does not exist.
    """
    if call.startswith(GIVEN):
        if call not in _GIVEN:
            raise ConfigError(
                f"{key} = {call!r} was handed over by a Python program: run that "
                "program again to go on",
            )
        return _GIVEN[call]
    place, _, name = call.rpartition(":")
    if not place or not name:
        raise ConfigError(
            f"{key} = {call!r} names no function. Write module:name, or path/to/file.py:name",
        )
    if place.endswith(".py") and not Path(place).expanduser().is_file():
        raise MissingFileError(
            f"{key} = {call!r}: the file is not there: {Path(place).expanduser()}",
        )
    try:
        module = _imported(place)
        function = getattr(module, name) if hasattr(module, name) else None
    except STOPS:
        raise
    except BaseException as error:
        # whatever the user's module does when it is imported: sys.exit() too
        raise ConfigError(
            f"{key} = {call!r}: {place} cannot be imported: {redact(error_words(error))}",
        ) from error
    if not callable(function):
        raise ConfigError(f"{key} = {call!r}: {place} has no function {name!r}")
    return function


def _imported(place: str) -> ModuleType:
    """The module of a dotted name or in a file. A warning says where the import is when it takes
    long.
    """
    source = f"import of {place}"
    with surroundings(source), Watchdog(None, least=QUICK_IMPORT).step(source):
        if not place.endswith(".py"):
            return importlib.import_module(place)
        path = Path(place).expanduser().resolve()
        return _module(path, path.stat().st_mtime_ns)


@functools.cache
def _module(path: Path, modified: int) -> ModuleType:
    """The module in a file, executed again where the file has changed since."""
    spec = importlib.util.spec_from_file_location(str(path), path)
    assert spec is not None and spec.loader is not None
    # by a name that no other module has; dataclasses look it up
    sys.modules[str(path)] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
