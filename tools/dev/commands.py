"""The manual's page of commands: each with its arguments and options, read from the parser itself."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import typer
from tools.dev.tables import markdown

from tether.cli import PANEL_OF, PANELS, app

HEAD = """# Commands: every option

`tether --help` lists the commands, and `tether COMMAND --help` prints what this page says of one.
`tether --version` prints the versions of tether, Python, torch and transformers.
`tether --install-completion` lets the shell complete commands, recipes and stages.

A command whose options are those of another names it. An empty default means that the option is unset.
Exit codes: 0 done, 1 a fault of tether or a proof that failed, 2 a mistake that the message explains, 130 and 143 interrupted.
"""
COLUMNS = ("argument or option", "type", "default", "what it is")
TYPES = {"str": "text", "path": "path", "file": "file", "int": "integer", "float": "number"}
"""Names of types for readers, by the word of the parser."""


def page() -> str:
    """Every command, by panel."""
    program = typer.main.get_command(app)
    parts, tables = [HEAD], {}
    for panel in PANELS:
        parts.append(f"## {panel}\n")
        for name, command in _commands(program, "tether"):
            if PANEL_OF.get(name.split()[1]) == panel and not command.hidden:
                parts.append(_section(name, command, tables))
    parts.append("## Presets\n\nA stage with one key set. Their options are those of the stage.\n")
    hidden = [(name, one) for name, one in _commands(program, "tether") if one.hidden]
    parts += [f"- `{name}`: {_plain(one.help)}" for name, one in hidden]
    return "\n".join(parts) + "\n"


def _commands(group: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Every command with the words that call it, in the order of `--help`."""
    for name in sorted(group.commands, key=[*PANEL_OF, *group.commands].index):
        command = group.commands[name]
        if hasattr(command, "commands"):
            yield from _commands(command, f"{path} {name}")
        else:
            yield f"{path} {name}", command


def _section(name: str, command: Any, tables: dict[tuple[tuple[str, ...], ...], str]) -> str:
    """A command: its text, its usage, and its table unless another one has the same."""
    context = command.context_class(command, info_name=name)
    rows = tuple(
        _row(one, record) for one in command.params if (record := one.get_help_record(context))
    )
    usage = " ".join(
        [name, *(_word(one) for one in command.params if one.param_type_name != "option")],
    )
    parts = [f"### {name}\n", f"{_plain(command.help)}\n", f"```text\n{usage}\n```\n"]
    if not rows:
        return "\n".join([*parts, "It has no options.\n"])
    if (same := tables.setdefault(rows, name)) != name:
        anchor = same.replace(" ", "-")
        return "\n".join([*parts, f"Arguments and options: those of [`{same}`](#{anchor}).\n"])
    return "\n".join([*parts, markdown(COLUMNS, rows)])


def _word(argument: Any) -> str:
    """An argument as a usage shows it: `RECIPE`, `[KEY=VALUE]...`."""
    word = argument.metavar or argument.name.upper()
    if argument.required:
        return word + "..." * (argument.nargs != 1 and not word.endswith("..."))
    inner = word if word.startswith("[") else f"[{word}]"
    return inner + "..." * (argument.nargs != 1 and not inner.endswith("..."))


def _row(one: Any, record: tuple[str, str]) -> tuple[str, ...]:
    """Name, type, default and meaning, from the line of `--help`."""
    written, _, kind = record[0].partition(" <")
    names = written.split(", ") if one.param_type_name == "option" else [_word(one)]
    meaning, _, extra = record[1].partition("  [")
    facts = extra.removesuffix("]").split("; ")
    default = next((fact.removeprefix("default: ") for fact in facts if "default: " in fact), "")
    named = [f"`{name}`" for name in sorted(names, key=len, reverse=True)]
    given = "required" if "required" in facts else f"`{default}`" if default else ""
    return ", ".join(named), _type(kind.removesuffix(">"), names, facts), given, _plain(meaning)


def _type(kind: str, names: list[str], facts: list[str]) -> str:
    """The type in words, with its bounds."""
    if not kind:
        return "text" if " " in names[0].partition(" / ")[0] else "switch"
    inner = kind.removeprefix("list[").removesuffix("]").removesuffix(" range").lower()
    several = ", several" if kind.startswith("list[") else ""
    return TYPES.get(inner, inner) + several + next(filter(None, map(_bounds, facts)), "")


def _bounds(fact: str) -> str:
    """Bounds of a number in words: of `1<=x<=5` they are from 1 to 5."""
    if both := re.fullmatch(r"([\d.]+)<=x<=([\d.]+)", fact):
        return f" from {both[1]} to {both[2]}"
    if least := re.fullmatch(r"x>=([\d.]+)", fact):
        return f", at least {least[1]}"
    return ""


def _plain(text: str | None) -> str:
    """A help text in one line, without the marks of the terminal."""
    return " ".join((text or "").replace("\\[", "[").split())
