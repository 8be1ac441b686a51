"""Arguments and options that several commands have."""

from __future__ import annotations

import inspect
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from tether.core.errors import ConfigError, DataError
from tether.core.types import Json
from tether.settings.stages import STAGES


def complete_recipe(incomplete: str) -> list[str]:
    """Packaged recipes, and the recipes and folders that begin with what is typed."""
    from tether.settings.reading import packaged_recipes

    packaged = [name for name in sorted(packaged_recipes()) if name.startswith(incomplete)]
    folders = [f"{path}/" for path in Path().glob(f"{incomplete}*/")]
    return [*packaged, *map(str, Path().glob(f"{incomplete}*.toml")), *folders]


def complete_stage(incomplete: str) -> list[str]:
    """Stages that begin with what is typed."""
    return [name for name in STAGES if name.startswith(incomplete)]


RecipeArgument = Annotated[
    str,
    typer.Argument(
        help="A recipe: a .toml file, or the name of one of `tether recipes`.",
        autocompletion=complete_recipe,
    ),
]
Words = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[STAGE | KEY=VALUE]...",
        help="Some of its stages only, such as ppo; overrides such as ppo.kl.coefficient=0.1.",
        autocompletion=complete_stage,
    ),
]
SweptWords = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[STAGE | KEY=VALUE[,VALUE]...]...",
        help="Values to combine, such as ppo.kl.coefficient=0,0.05; overrides; some stages only.",
        autocompletion=complete_stage,
    ),
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Print the jobs in their order, and run none.")
]
On = Annotated[
    str | None,
    typer.Option(
        help="Where: local; ray (this machine's cluster); ray://HOST:PORT; slurm, or "
        "slurm:nodes=2,partition=gpu."
    ),
]
BudgetMinutes = Annotated[
    float | None,
    typer.Option(
        "--budget",
        min=0.01,
        help="Minutes: training ends at a whole step, evaluated and reported, in time.",
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(help="Overrides such as ppo.kl.coefficient=0.1 or run=runs/mine."),
]
Talker = Annotated[str, typer.Argument(help="A model folder, a hub id, or a run directory.")]
Format = Annotated[str, typer.Option(help="Name of a format; auto finds out.")]
Columns = Annotated[
    str,
    typer.Option(
        help="Names of a format for the file's columns: prompt=question,chosen=good,rejected=bad."
    ),
]
Pairs = Annotated[int | None, typer.Option(min=1, help="Only the first pairs of each file.")]
Output = Annotated[
    Path | None,
    typer.Option(
        "--output",
        "-o",
        dir_okay=False,
        help="Write everything as JSON here.",
    ),
]
MaxNewTokens = Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")]
Temperature = Annotated[float, typer.Option(min=0, help="0 is greedy.")]
TopP = Annotated[
    float,
    typer.Option(
        min=0.01,
        max=1.0,
        help="Sample from the likeliest tokens of this share; 1: all.",
    ),
]
Seed = Annotated[int, typer.Option(help="Of the sampling; the same seed gives the same answers.")]
Asked = Annotated[
    str,
    typer.Argument(
        help="Who is asked: a model folder, hub id or run; with --url, the server's name of it."
    ),
]
Url = Annotated[
    str | None,
    typer.Option(help="An OpenAI-compatible server, such as http://127.0.0.1:8000/v1."),
]
KeyVariable = Annotated[
    str | None,
    typer.Option(help="Environment variable with the server's key; the key itself goes nowhere."),
]
Concurrency = Annotated[
    int | None, typer.Option(min=1, help="Requests to the server at once; default 8.")
]
ReplyTokens = Annotated[
    int | None,
    typer.Option(
        min=1, help="Longest verdict of a server's model, its thought included; default 8."
    ),
]
TimeLimit = Annotated[
    float | None,
    typer.Option(min=0.1, help="Seconds that one request to the server may take; default 120."),
]
MaxRequests = Annotated[
    int | None, typer.Option(min=0, help="Budget: requests to the server, repeated ones counted.")
]
MaxTokens = Annotated[
    int | None, typer.Option(min=0, help="Budget: tokens of prompts and replies.")
]
Cache = Annotated[
    Path | None,
    typer.Option(
        help="Where answers are kept, so none is asked for twice; default: tether's cache."
    ),
]
ReasoningTokens = Annotated[
    int,
    typer.Option(min=0, help="Tokens of the reasons before each verdict; 0: a verdict at once."),
]


@dataclass(frozen=True, kw_only=True)
class Options:
    """A group of options; each field of a child is an option with a default."""


@dataclass(frozen=True, kw_only=True)
class AskingOptions(Options):
    """The way to a model that judges: in this process, or on a server by the names of
    `JudgeServerConfig`. Unset names have the server's defaults.
    """

    reasoning_tokens: ReasoningTokens = 0
    cache: Cache = None
    url: Url = None
    key_variable: KeyVariable = None
    concurrency: Concurrency = None
    reply_tokens: ReplyTokens = None
    time_limit: TimeLimit = None
    max_requests: MaxRequests = None
    max_tokens: MaxTokens = None

    def server(self) -> Json:
        """The settings of a server that were given, by name."""
        others = ("reasoning_tokens", "cache")
        values = vars(self).items()
        return {name: value for name, value in values if name not in others and value is not None}


@dataclass(frozen=True, kw_only=True)
class SamplingOptions(Options):
    """The way in which a model samples its answers."""

    max_new_tokens: MaxNewTokens = 256
    temperature: Temperature = 0.7
    top_p: TopP = 1.0


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """A command for typer: each field of a group among its parameters is an option of its own."""
    hints = get_type_hints(command, include_extras=True)
    parameters: list[inspect.Parameter] = []
    groups: dict[str, type[Options]] = {}
    for name, parameter in inspect.signature(command).parameters.items():
        if isinstance(hints[name], type) and issubclass(hints[name], Options):
            groups[name] = hints[name]
            parameters += _single_options(hints[name])
        else:
            parameters.append(parameter.replace(annotation=hints[name]))

    def run(**given: Any) -> None:
        own = {
            name: group(**{option.name: given.pop(option.name) for option in fields(group)})
            for name, group in groups.items()
        }
        command(**given, **own)

    run.__name__, run.__doc__ = command.__name__, command.__doc__
    run.__signature__ = inspect.Signature(parameters)
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _single_options(group: type[Options]) -> Iterator[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    kind = inspect.Parameter.KEYWORD_ONLY
    for name, default in vars(group()).items():
        yield inspect.Parameter(
            name,
            kind,
            default=default,
            annotation=hints[name],
        )


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
        raise ConfigError(f"--columns names columns as name=column,name=column, not {words!r}")
    return columns or None


@contextmanager
def as_options() -> Iterator[None]:
    """Errors about rows name `--columns` instead of a recipe's `data.columns`."""
    try:
        yield
    except DataError as error:
        raise type(error)(str(error).replace("data.columns", "--columns")) from error
