"""The parameters of commands: typer's arguments and options, by the table options.toml."""

from __future__ import annotations

import inspect
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, get_origin, get_type_hints

from typer import Argument, Option

from tether.core.errors import ConfigError, DataError, MissingFileError
from tether.core.tables import table_beside
from tether.core.types import Json
from tether.settings.stages import STAGES

if TYPE_CHECKING:
    from tether.people.annotation.store import Store


def complete_recipe(incomplete: str) -> list[str]:
    """Packaged recipes, and the recipes and folders that begin with what is typed."""
    from tether.settings.reading import packaged_recipes

    packaged = [name for name in sorted(packaged_recipes()) if name.startswith(incomplete)]
    folders = [f"{path}/" for path in Path().glob(f"{incomplete}*/")]
    return [*packaged, *map(str, Path().glob(f"{incomplete}*.toml")), *folders]


def complete_stage(incomplete: str) -> list[str]:
    """Stages that begin with what is typed."""
    return [name for name in STAGES if name.startswith(incomplete)]


@dataclass(frozen=True, kw_only=True)
class Options:
    """A group of options; each field of a child is an option with a default."""


@dataclass(frozen=True, kw_only=True)
class AskingOptions(Options):
    """The way to a model that judges: in this process, or on a server by the names of
    `JudgeServerConfig`. Unset names have the server's defaults.
    """

    reasoning_tokens: int = 0
    cache: Path | None = None
    url: str | None = None
    key_variable: str | None = None
    concurrency: int | None = None
    reply_tokens: int | None = None
    time_limit: float | None = None
    max_requests: int | None = None
    max_tokens: int | None = None

    def server(self) -> Json:
        """The settings of a server that were given, by name."""
        others = ("reasoning_tokens", "cache")
        values = vars(self).items()
        return {name: value for name, value in values if name not in others and value is not None}


@dataclass(frozen=True, kw_only=True)
class SamplingOptions(Options):
    """The way in which a model samples its answers."""

    max_new_tokens: int = 256
    temperature: float = 0.7
    top_p: float = 1.0


ROWS: dict[str, Json] = table_beside(__file__, "options.toml")
"""By command or group of options: what each parameter is for, with its limits."""
COMPLETIONS = {"recipe": complete_recipe, "stage": complete_stage}


def described(owner: str, name: str, kind: object) -> object:
    """The type of a parameter, with its row of the table for typer."""
    entry = ROWS.get(owner, {}).get(name) or ROWS["common"].get(name)
    if entry is None or get_origin(kind) is Annotated:
        return kind
    row: Json = {"help": entry} if isinstance(entry, str) else dict(entry)
    if "complete" in row:
        row["autocompletion"] = COMPLETIONS[row.pop("complete")]
    if "argument" in row:
        row["help"] = row.pop("argument")
        return Annotated[kind, Argument(**row)]
    flag = f"--{name.replace('_', '-')}" if kind is bool else ""  # without its opposite
    return Annotated[kind, Option(*row.pop("flags", flag).split(), **row)]


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """A command for typer: its parameters by the table, and each field of a group among them as an
    option of its own.
    """
    hints = get_type_hints(command, include_extras=True)
    parameters: list[inspect.Parameter] = []
    groups: dict[str, type[Options]] = {}
    for name, parameter in inspect.signature(command).parameters.items():
        kind = hints[name]
        if isinstance(kind, type) and issubclass(kind, Options):
            groups[name] = kind
            parameters += _single_options(kind)
        else:
            kind = described(command.__name__, name, kind)
            parameters.append(parameter.replace(annotation=kind))

    def run(**given: object) -> None:
        own = {
            name: group(**{option.name: given.pop(option.name) for option in fields(group)})
            for name, group in groups.items()
        }
        command(**given, **own)

    run.__name__ = command.__name__
    run.__doc__ = command.__doc__
    run.__signature__ = inspect.Signature(parameters)
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _single_options(group: type[Options]) -> Iterator[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    kind = inspect.Parameter.KEYWORD_ONLY
    for name, default in vars(group()).items():
        annotation = described(group.__name__, name, hints[name])
        yield inspect.Parameter(name, kind, default=default, annotation=annotation)


def columns_of(words: str) -> dict[str, str] | None:
    """The names in the option `--columns`: name=column,name=column, or an inline table as recipes
    have them.

    Raises:
        ConfigError: it is neither.
    """
    try:
        if words.lstrip().startswith("{"):
            given = tomllib.loads(f"columns = {words}")["columns"]
        else:
            given = dict(part.split("=", 1) for part in words.split(",") if part.strip())
    except ValueError:
        given = {"": ""}
    columns = {
        name.strip(): column.strip() if isinstance(column, str) else ""
        for name, column in given.items()
    }
    if not all(name and column for name, column in columns.items()):
        raise ConfigError(f"--columns has the form name=column,name=column, not {words!r}")
    return columns or None


@contextmanager
def as_options() -> Iterator[None]:
    """Errors about rows name `--columns` instead of a recipe's `data.columns`."""
    try:
        yield
    except DataError as error:
        raise type(error)(str(error).replace("data.columns", "--columns")) from error


def opened(where: str, *, new: bool = False, round: str | None = None) -> Store:
    """The store there, with this round; MissingFileError where there is none and it shall not be
    made.
    """
    from tether.people.annotation.store import Store

    if not new and "://" not in where and not Path(where).is_file():
        raise MissingFileError(
            f"there is no preference store at {where}. `tether prefs import` creates a store",
        )
    store = Store(where)
    store.check_round(round)
    return store
