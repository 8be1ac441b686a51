"""The command that examines a set-up before training, or a run after it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tether.cli.options import Overrides
from tether.cli.progress import starting
from tether.core.errors import ConfigError

if TYPE_CHECKING:
    from tether.monitoring.doctor import Result


def doctor(
    subject: Annotated[str, typer.Argument(help="A recipe, before training; or the folder of a run or of one of its stages.")],
    overrides: Overrides = None,
    everything: Annotated[bool, typer.Option("--all", help="List what is healthy, and what could not be examined, too.")] = False,
) -> None:
    """Find faults of a recipe or a run: encodings that differ, answers that never end, a failing reward ... (exit 2)."""
    with starting():
        from tether.monitoring.doctor import Finding
        from tether.run.doctor import examine_recipe, examine_run
        from tether.run.recipe import read_recipe

    is_run = Path(subject).is_dir()
    if is_run and overrides:
        raise ConfigError(f"{subject} is a run: its config is settled, and overrides such as {overrides[0]!r} have no effect")
    with Console(stderr=True).status("examining: a model is loaded and asked for a few answers"):
        results = examine_run(Path(subject)) if is_run else examine_recipe(read_recipe(subject, overrides or ()))
    table = findings_table(results, everything)
    Console().print(table if table.rows else str(table.title))
    if any(isinstance(result, Finding) and result.severity == "error" for stage in results.values() for result in stage):
        raise SystemExit(2)


def findings_table(results: Mapping[str, Sequence[Result]], everything: bool = True) -> Table:
    """The verdict as title, findings with their advice, and with `everything` what is healthy or could not be examined."""
    from tether.monitoring.doctor import Finding, Healthy

    rows = []
    for stage, result in ((stage, result) for stage, of_stage in results.items() for result in of_stage):
        if isinstance(result, Finding):
            kind, text = result.severity, f"[bold]{escape(result.message)}[/] {escape(result.evidence)}\n{escape(result.advice)}"
        elif isinstance(result, Healthy):
            kind, text = "healthy", escape(result.evidence)
        else:
            kind, text = "unknown", escape(result.reason)
        rows.append((kind, stage, result.check, text))
    kinds = [kind for kind, *_ in rows]
    counts = [f"{kinds.count(kind)} {kind}{'s' * (kinds.count(kind) != 1)}" for kind in ("error", "warning")]
    title = ", ".join(counts) if {"error", "warning"} & set(kinds) else "Nothing found."
    if not everything:
        title += f" {kinds.count('healthy')} checks are healthy, {kinds.count('unknown')} could not be made (--all lists them)."
        rows = [row for row in rows if row[0] in ("error", "warning")]
    table = Table("stage", "verdict", "check", "what was seen", title=title, title_justify="left", show_lines=False)
    for kind, stage, check, text in sorted(rows, key=lambda row: list(COLOURS).index(row[0])):
        table.add_row(stage, f"[{COLOURS[kind]}]{kind}[/]", check, text)
    return table


COLOURS = {"error": "bold red", "warning": "yellow", "healthy": "green", "unknown": "dim"}
"""By kind of result, in the order of the table."""
