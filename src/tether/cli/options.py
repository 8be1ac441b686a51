"""Arguments and options that several commands have."""

from __future__ import annotations

import inspect
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, get_type_hints

import typer
from typer.models import OptionInfo

from tether.core.errors import ConfigError, DataError, MissingFileError
from tether.core.types import Json
from tether.settings.stages import STAGES

if TYPE_CHECKING:
    from tether.people.annotation.store import Store


def output_option(text: str) -> OptionInfo:
    """The option of a file that a command writes."""
    return typer.Option("--output", "-o", dir_okay=False, help=text)


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
        help="A recipe: a .toml file, or a name from `tether recipes`.",
        autocompletion=complete_recipe,
    ),
]
RecipeOrModel = Annotated[
    str,
    typer.Argument(
        metavar="RECIPE | MODEL",
        help="A recipe: a .toml file, or a name from `tether recipes`. Or a model and then its "
        "rows: a hub id, a folder, tiny (a random model), or a run.",
        autocompletion=complete_recipe,
    ),
]
RowsAndKeys = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[ROWS | KEY=VALUE]...",
        help="For a model: a file of rows, or a data set of the hub. Overrides such as "
        "ppo.kl.coefficient=0.1.",
    ),
]
Reward = Annotated[
    str | None,
    typer.Option(
        help="Of methods that sample answers, what scores them: FILE:FUNCTION, a run with a reward "
        "model, a classifier, or random.",
    ),
]
RunFolder = Annotated[str | None, typer.Option("--run", help="The run directory, as run=PATH.")]
WrittenRecipe = Annotated[
    Path | None,
    typer.Option("--recipe", help="Write the recipe of MODEL and ROWS here, and do not train."),
]
Words = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[STAGE | KEY=VALUE]...",
        help="Stages to run, such as ppo (default: all), and overrides such as "
        "ppo.kl.coefficient=0.1.",
        autocompletion=complete_stage,
    ),
]
DryRun = Annotated[
    bool,
    typer.Option("--dry-run", help="Print the jobs in their order without running them."),
]
BudgetMinutes = Annotated[
    float | None,
    typer.Option(
        "--budget",
        min=0.01,
        help="Time limit in minutes. Training ends early enough for evaluation and "
        "report, after a whole step.",
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(help="Overrides such as ppo.kl.coefficient=0.1 or run=runs/mine."),
]
Talker = Annotated[str, typer.Argument(help="A model folder, a hub id, or a run directory.")]
StoreArgument = Annotated[
    str,
    typer.Argument(help="A preference store: a file, or a PostgreSQL URL."),
]
Round = Annotated[str | None, typer.Option("--round", help="Name of a batch of tasks.")]
Host = Annotated[
    str,
    typer.Option(
        help="Address to listen on. With another address than "
        "127.0.0.1, other machines can reach the server.",
    ),
]
TrustedHost = Annotated[
    str,
    typer.Option(help="Address to listen on, in a trusted network only."),
]
Port = Annotated[
    int,
    typer.Option(min=0, max=65535, help="Port to listen on; 0 means any free port."),
]
Format = Annotated[str, typer.Option(help="Name of the format; auto detects the format.")]
Columns = Annotated[
    str,
    typer.Option(
        help="Columns of the file for the names of the format: "
        "prompt=question,chosen=good,rejected=bad.",
    ),
]
Strict = Annotated[
    bool,
    typer.Option("--strict", help="Exit with code 2 if a row is unusable."),
]
PublicAddress = Annotated[
    str,
    typer.Option(help="Public address of the server, such as https://judge.example.org."),
]
Rows = Annotated[int | None, typer.Option(min=1, help="Read only this many rows of each file.")]
Pairs = Annotated[int | None, typer.Option(min=1, help="Read only this many pairs of each file.")]
Output = Annotated[
    Path | None,
    output_option("Write all results to this file, as JSON."),
]
MaxNewTokens = Annotated[int, typer.Option(min=1, help="Maximum length of an answer, in tokens.")]
Temperature = Annotated[
    float,
    typer.Option(min=0, help="Sampling temperature; 0 is greedy decoding."),
]
TopP = Annotated[
    float,
    typer.Option(
        min=0.01,
        max=1.0,
        help="Sample from the likeliest tokens with this total probability; 1 means all tokens.",
    ),
]
Seed = Annotated[
    int,
    typer.Option(help="Random seed of sampling. The same seed gives the same answers."),
]
Asked = Annotated[
    str,
    typer.Argument(
        help="The model to use: a model folder, hub id or run. With --url: its name on the server.",
    ),
]


@dataclass(frozen=True, kw_only=True)
class Options:
    """A group of options; each field of a child is an option with a default."""


@dataclass(frozen=True, kw_only=True)
class AskingOptions(Options):
    """The way to a model that judges: in this process, or on a server by the names of
    `JudgeServerConfig`. Unset names have the server's defaults.
    """

    reasoning_tokens: Annotated[
        int,
        typer.Option(
            min=0,
            help="Maximum number of reasoning tokens before each verdict; 0 means no reasoning.",
        ),
    ] = 0
    cache: Annotated[
        Path | None,
        typer.Option(help="Cache file of the model's answers; default: in tether's cache folder."),
    ] = None
    url: Annotated[
        str | None,
        typer.Option(help="An OpenAI-compatible server, such as http://127.0.0.1:8000/v1."),
    ] = None
    key_variable: Annotated[
        str | None,
        typer.Option(
            help="Environment variable with the API key of the server. tether does not store the key.",
        ),
    ] = None
    concurrency: Annotated[
        int | None,
        typer.Option(min=1, help="Simultaneous requests to the server; default 8."),
    ] = None
    reply_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Maximum length of a server's reply in tokens, including its reasoning; default 8.",
        ),
    ] = None
    time_limit: Annotated[
        float | None,
        typer.Option(min=0.1, help="Timeout of a request to the server, in seconds; default 120."),
    ] = None
    max_requests: Annotated[
        int | None,
        typer.Option(min=0, help="Maximum number of requests to the server, including retries."),
    ] = None
    max_tokens: Annotated[
        int | None,
        typer.Option(min=0, help="Maximum number of tokens, prompts and replies together."),
    ] = None

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
