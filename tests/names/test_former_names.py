"""Names that a user may have written down: commands, options, keys of recipes and their values,
data formats, names in Python. `former.txt` has those of an earlier tether; each still exists.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import click
import typer

import tether
from tether import classic
from tether.api.runs import Policy, RewardModel, Run
from tether.cli import app
from tether.data.formats.registry import FORMATS, KINDS, reader_for
from tether.settings.config import Config
from tether.settings.recipe import Recipe

Names = dict[str, set[str]]


def former() -> Names:
    """By what has them (a command, a table, a format, an object), the names of an earlier tether; a
    value of a key is KEY=VALUE.
    """
    text = Path(__file__).with_name("former.txt").read_text(encoding="utf-8")
    names: Names = defaultdict(set)
    for line in text.splitlines():
        if not line.startswith("#"):
            owners, _, words = line.partition(":")
            for owner in owners.split(","):
                names[owner.strip()] |= {one for word in words.split() for one in values(word)}
    return names


def values(word: str) -> Iterator[str]:
    """A key, and each of its values."""
    key, _, choices = word.partition("=")
    yield key
    yield from (f"{key}={choice}" for choice in choices.split("|") if choice)


def commands(command: Any, path: str, names: Names) -> None:
    options = (p for p in command.params if p.param_type_name == "option")
    names[path] |= {word for option in options for word in (*option.opts, *option.secondary_opts)}
    if hasattr(command, "list_commands"):
        context = click.Context(command)
        for name in command.list_commands(context):
            commands(command.get_command(context, name), f"{path} {name}", names)


def tables(annotation: Any) -> Iterator[type[Config]]:
    if isinstance(annotation, type) and issubclass(annotation, Config):
        yield annotation
    for inner in get_args(annotation):
        yield from tables(inner)


def choices(annotation: Any) -> Iterator[str]:
    if get_origin(annotation) is Literal:
        yield from map(str, get_args(annotation))
    else:
        for inner in get_args(annotation):
            yield from choices(inner)


def keys(table: type[Config], place: str, above: tuple[type, ...], names: Names) -> None:
    for name, field in table.model_fields.items():
        names[place] |= {name, *(f"{name}={choice}" for choice in choices(field.annotation))}
        for inner in tables(field.annotation):
            if inner not in above:
                keys(inner, f"{place}.{name}", (*above, inner), names)


def now() -> Names:
    """The same of this tether."""
    names: Names = defaultdict(set)
    commands(typer.main.get_command(app), "tether", names)
    keys(Recipe, "recipe", (), names)
    for layout in FORMATS:
        names[f"format {layout.name}"] = {k.__name__ for k in KINDS if reader_for(layout, k)}
    names["import tether"] = set(dir(tether))
    names["import tether.classic"] = set(classic.__all__)
    for kind in (Run, Policy, RewardModel):
        names[f"class {kind.__name__}"] = set(dir(kind))
    for name in classic.__all__:
        kind = getattr(classic, name)
        names[f"class {name}"] = {*getattr(kind, "model_fields", ()), *dir(kind)}
    return names


def test_each_former_name_still_exists():
    today, missing = now(), []
    for owner, names in former().items():
        missing += [f"{owner}: {name}" for name in sorted(names - today.get(owner, set()))]
        missing += [] if owner in today else [owner]
    assert missing == []


def test_the_list_has_names_of_each_kind():
    names = former()
    assert (
        "--top-k" in names["tether generate"] and "kind=adamw8bit" in names["recipe.sft.optimizer"]
    )
    assert "Comparison" in names["format webgpt"] and "rloo" in names["import tether"]
    assert "init_kl_coef" in names["class PPOConfig"] and "chat" in names["class Policy"]
    assert len(names) > 180 and sum(map(len, names.values())) > 1900
