"""Commands about recipes, which come with tether, a new one, what a key means, and for the labs:
exercises that run for some seconds, each with a page.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Annotated

from typer import Argument, Exit, echo

from tether.cli.terminal.bars import starting
from tether.cli.terminal.console import Terminal, print_line, show_next, show_table
from tether.core.errors import ConfigError
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

PACKAGE = Path(__file__).resolve().parent.parent
BEGINNINGS = PACKAGE / "settings" / "recipes" / "new"
"""A small recipe of each method."""
LABS = PACKAGE / "api" / "labs"
"""The folder `labs` of a clone, and its copy in an installed package."""
METHOD_NAMES = [*METHODS, *SECTIONS, *STAGES]


def list_recipes(name: str | None = None) -> None:
    """List the recipes that come with tether, or print one."""
    from tether.settings.reading import packaged_recipe, packaged_recipes

    if name is not None:
        echo(packaged_recipe(name).read_text(encoding="utf-8"), nl=False)
        return
    heads = {title: _head(path) for title, path in sorted(packaged_recipes().items())}
    show_table(heads.items(), title="recipes that come with tether")
    methods = sorted({*METHODS, *(path.stem for path in BEGINNINGS.glob("*.toml"))})
    show_next("recipes", methods=", ".join(methods))


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
        Argument(
            help="sft, dpo, kto, reward, ppo, grpo, rloo, prm ...",
            autocompletion=_complete_method,
        ),
    ],
    file: Path | None = None,
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
    text = text.replace(f'"runs/{source.stem}"', f'"runs/{word}"')
    write_recipe(file or Path(f"{word}.toml"), text, section)
    print_line("The recipe runs without changes. Then replace its data by your own.")


def write_recipe(path: Path, text: str, section: str) -> None:
    """Write a new recipe, and print what may be done with it.

    Raises:
        ConfigError: the file exists.
    """
    try:
        with path.open("x", encoding="utf-8") as written:
            written.write(text)
    except FileExistsError:
        raise ConfigError(
            f"{path} exists already and stays unchanged. Name another file for the recipe",
        ) from None
    print_line(f"{path} is written.")
    show_next("recipe", path=path, section=section)


def explain_key(words: list[str]) -> None:
    """Explain a key of a recipe, a metric, or a term of the field or of the report. A key's name
    may be cut where no other begins so.
    """
    from tether.core.glossary import METRICS, meanings, near
    from tether.settings.messages import key_hint
    from tether.settings.reference import keys_of

    with starting():
        from tether.settings.recipe import recipe_type

    key = " ".join(words)
    parts = _sections(key)
    keys = list(keys_of(recipe_type()))
    defined = meanings(key)
    *outer, last = parts
    begun = [
        one
        for one in keys
        if list(one.path[-len(parts) : -1]) == outer and one.path[-1].startswith(last)
    ]
    cut = not defined and len({one.path[-1] for one in begun}) == 1
    meant = [one for one in keys if list(one.path) == parts] or [
        one for one in begun if cut or one.path[-1] == last
    ]
    inside = len(parts) > 1 and any(one.path[0] == parts[0] for one in keys)
    if not inside and (theirs := _translation(key, values=not meant and not defined)):
        defined[f"{key} in other libraries"] = theirs
    if not meant and not defined:
        hint = (
            key_hint(recipe_type(), tuple(parts), {}, None)
            if inside
            else did_you_mean(near(key, (one.path[-1] for one in keys)))
            or "`tether explain ppo` lists the keys of a section"
        )
        raise ConfigError(f"no {'key' if inside else 'key or term'} is called {key!r}: {hint}")
    console = Terminal(highlight=False)
    for name, meaning in defined.items():
        console.print(f"[bold]{name}[/]{' (a metric)' if name in METRICS else ''}")
        console.print(f"  {meaning}", markup=False)
    for meaning in dict.fromkeys(one.meaning for one in meant):
        same = [one for one in meant if one.meaning == meaning]
        names = ", ".join(one.name for one in same[:4])
        console.print(f"[bold]{names}[/]{f' and {len(same) - 4} more' if len(same) > 4 else ''}")
        console.print(f"  {meaning}", markup=False)
        within = [one for one in keys if one.path[:-1] == same[0].path]
        rows = [(one.path[-1], one.type, one.default, one.description) for one in within]
        show_table(rows, ("key", "type", "default", "what it is"))


def _sections(key: str) -> list[str]:
    """The parts of a key, each by its name here."""
    parts = key.lower().replace("-", "_").strip("[]").split(".")
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
                did_you_mean(
                    [name for name in KEYS.get(word, ()) if name.rpartition(".")[2] != word],
                ),
                advice(NOTES, word),
                trainers_section(word),
                "; ".join(f"as {key}: {text}" for key, text in texts.items()),
            ),
        ),
    )


def _labs() -> list[Path]:
    return sorted(LABS.glob("[0-9][0-9]_*.py"))


def _stated(path: Path, what: str) -> str:
    """A line of a lab's first cell, such as its chapter."""
    cell = path.read_text(encoding="utf-8").split("# %%\n")[0]
    match = re.search(rf"^# \*\*{what}:\*\* (.*)$", cell, flags=re.MULTILINE)
    return match[1].rstrip(".") if match else ""


def _complete_lab(incomplete: str) -> list[str]:
    return [path.stem for path in _labs() if path.stem.startswith(incomplete)]


def _lab(name: str) -> Path:
    """The lab of a number, a name or the beginning of either."""
    wanted = name.replace("-", "_").removesuffix(".py")
    number, _, rest = wanted.partition("_")
    if number.isdecimal():
        wanted = f"{number.lstrip('0').zfill(2)}_{rest}"
    matching = [
        path for path in _labs() if path.stem.startswith(wanted) or path.stem[3:].startswith(wanted)
    ]
    if len(matching) != 1:
        names = ", ".join(path.stem for path in matching or _labs())
        raise ConfigError(f"{len(matching)} labs are called {name!r}. Give one of {names}, or all")
    return matching[0]


def lab(
    name: Annotated[
        str | None,
        Argument(help="A lab's number or name, or all.", autocompletion=_complete_lab),
    ] = None,
    seed: int = 0,
) -> None:
    """List the labs, or run one. A lab compares its numbers with expected ranges and writes a page with
    plots.
    """
    if name is None:
        rows = [(path.stem, _stated(path, "Question"), _stated(path, "Time")) for path in _labs()]
        show_table(rows, ("lab", "question", "time"), "labs of tether")
        show_next("labs")
        return
    chosen = _labs() if name == "all" else [_lab(name)]
    Path("runs", "labs").mkdir(parents=True, exist_ok=True)
    outside = [path.stem for path in chosen if not _run(path, seed)]
    if name == "all":
        print_line(f"{len(chosen)} labs. Outside their bands: {', '.join(outside) or 'none'}")
    if outside:
        raise Exit(1)


def _run(path: Path, seed: int) -> bool:
    """Run a lab in a process of its own; False where a number left its band."""
    environment = {**os.environ, "TETHER_LAB_SEED": str(seed)}
    command = [sys.executable, str(path)]
    return subprocess.run(command, env=environment, check=False).returncode == 0
