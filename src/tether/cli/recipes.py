"""Commands about recipes: which come with tether, a new one to begin with, and what a key means."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from tether.cli.options import complete_recipe
from tether.core.errors import ConfigError
from tether.core.glossary import CLOSE, EVERY, METRICS, meanings, near
from tether.settings.stages import STAGES
from tether.settings.synonyms import (
    KEYS,
    METHODS,
    NOTES,
    SECTIONS,
    VALUES,
    advice,
    alike,
    did_you_mean,
    trainers_section,
)
from tether.terminal.bars import starting
from tether.terminal.console import Terminal, print_line
from tether.terminal.tables import show_table

BEGINNINGS = Path(__file__).resolve().parent.parent / "recipes" / "new"
"""A small recipe of each method."""
METHOD_NAMES = [*METHODS, *SECTIONS, *STAGES]


def list_recipes(
    name: Annotated[
        str | None,
        typer.Argument(help="Name of the recipe to print.", autocompletion=complete_recipe),
    ] = None,
) -> None:
    """List the recipes that come with tether, or print one."""
    from tether.settings.reading import packaged_recipe, packaged_recipes

    if name is not None:
        typer.echo(packaged_recipe(name).read_text(encoding="utf-8"), nl=False)
        return
    heads = {title: _head(path) for title, path in sorted(packaged_recipes().items())}
    show_table(Terminal(), "recipes that come with tether", heads.items())
    print_line("Print one: tether recipes NAME    Run it: tether run NAME")
    print_line(
        "Begin your own: tether new "
        f"{' | '.join(sorted({*METHODS, *(path.stem for path in BEGINNINGS.glob('*.toml'))}))}",
    )


def _head(path: Path) -> str:
    """The first comment of a recipe, up to the end of its sentence."""
    lines = [
        line.removeprefix("# ")
        for line in path.read_text(encoding="utf-8").split("\nrun =")[0].splitlines()
    ]
    return " ".join(lines).partition(". ")[0].rstrip(".")


def _complete_method(incomplete: str) -> list[str]:
    return [name for name in METHOD_NAMES if name.startswith(incomplete)]


def new(
    method: Annotated[
        str,
        typer.Argument(
            help="sft, dpo, kto, reward, ppo, grpo, rloo, prm ...",
            autocompletion=_complete_method,
        ),
    ],
    file: Annotated[
        Path | None,
        typer.Argument(help="File to write; default: METHOD.toml in this folder."),
    ] = None,
) -> None:
    """Write a small recipe for a method. The recipe runs without changes. Then replace its data."""
    word = method.lower().replace("-", "_")
    section, key, value = METHODS.get(word, (SECTIONS.get(word, word), "", ""))
    source = next(
        (path for name in (word, section) if (path := BEGINNINGS / f"{name}.toml").is_file()),
        None,
    )
    if source is None:
        near = alike(word, METHOD_NAMES, cutoff=0.6)
        names = ", ".join(sorted(path.stem for path in BEGINNINGS.glob("*.toml")))
        raise ConfigError(
            f"no method is called {method!r}{f' ({near})' if near else ''}. There are "
            f"recipes for {names}",
        )
    text = re.sub(
        rf'^{key} = "\w+"',
        f'{key} = "{value}"',
        source.read_text(encoding="utf-8"),
        flags=re.MULTILINE,
    )
    path = file or Path(f"{word}.toml")
    try:
        with path.open("x", encoding="utf-8") as written:
            written.write(text.replace(f'"runs/{source.stem}"', f'"runs/{word}"'))
    except FileExistsError:
        raise ConfigError(
            f"{path} exists already and stays unchanged. Name another file: tether new "
            f"{method} FILE",
        ) from None
    print_line(
        f"{path} is written. The recipe runs without changes. Then replace its data by your own.",
    )
    print_line(f"  tether plan {path}      estimate memory and time")
    print_line(f"  tether run {path}       train")
    print_line(
        f"  tether explain {section}{' ' * max(1, len(str(path)) - len(section) + 2)}every "
        "key of its section",
    )


def explain_key(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="KEY",
            help="A section, a key such as ppo.kl or clip_range, a metric, or a term of "
            "the report.",
        ),
    ],
) -> None:
    """Explain a key of a recipe, a metric, or a term of the report."""
    from tether.settings.messages import key_hint
    from tether.settings.reference import keys_of

    with starting():
        from tether.settings.recipe import recipe_type

    key = " ".join(words)
    parts = _sections(key)
    keys = list(keys_of(recipe_type()))
    exact = [one for one in keys if list(one.path) == parts] or [
        one for one in keys if one.path[-1] == parts[-1]
    ]
    defined = meanings(key)
    inside = len(parts) > 1 and any(one.path[0] == parts[0] for one in keys)
    if not inside and (theirs := _translation(key, values=not exact and not defined)):
        _show_words({**defined, f"{key} in other libraries": theirs})
        if not exact or len(parts) > 1:
            return
        defined = {}
    if not exact or (len(parts) > 1 and list(exact[0].path) != parts):
        if not defined and not alike(key, {one.path[-1] for one in keys}, cutoff=CLOSE):
            defined = {name: EVERY[name] for name in near(key, most=1)}
        if defined and not inside:
            _show_words(defined)
            return
        hint = (
            key_hint(recipe_type(), tuple(parts), {}, None)
            if inside
            else _alike(key, {one.path[-1] for one in keys})
        )
        raise ConfigError(f"no key is called {key!r}: {hint}")
    _show_words(defined)
    console = Terminal(highlight=False)
    for meaning in dict.fromkeys(one.meaning for one in exact):
        same = [one for one in exact if one.meaning == meaning]
        names = ", ".join(one.name for one in same[:4])
        console.print(f"[bold]{names}[/]{f' and {len(same) - 4} more' if len(same) > 4 else ''}")
        console.print(f"  {meaning}", markup=False)
        within = [one for one in keys if one.path[:-1] == same[0].path]
        rows = [(one.path[-1], one.type, one.default, one.description) for one in within]
        show_table(console, "", rows, ("key", "type", "default", "what it is"))


def _show_words(words: Mapping[str, str]) -> None:
    """A metric or a word of the report, and its meaning."""
    console = Terminal(highlight=False)
    for name, meaning in words.items():
        console.print(f"[bold]{name}[/]{' (a metric)' if name in METRICS else ''}")
        console.print(f"  {meaning}", markup=False)


def _sections(key: str) -> list[str]:
    """The parts of a key, each by its name here."""
    parts = key.replace("-", "_").strip("[]").split(".")
    return [METHODS[part][0] if part in METHODS else SECTIONS.get(part, part) for part in parts]


def _translation(key: str, *, values: bool) -> str:
    """Keys here for another library's word, and the advice for it; empty: none has the word.

    Args:
        values: the word may be a value of a key.
    """
    word = key.rpartition(".")[2].replace("-", "_").lower()
    texts = VALUES.get(word, {}) if values else {}
    return " ".join(
        filter(
            None,
            (
                did_you_mean(KEYS.get(word, ())),
                advice(NOTES, word),
                trainers_section(word),
                "; ".join(f"as {key}: {text}" for key, text in texts.items()),
            ),
        ),
    )


def _alike(key: str, names: set[str]) -> str:
    """Suggestion for an unknown word: keys that are written alike."""
    word = key.rpartition(".")[2].replace("-", "_").lower()
    return alike(word, names, most=3, cutoff=0.6) or (
        "`tether explain ppo` lists the keys of a section, docs/reference/recipes.md all of them"
    )
