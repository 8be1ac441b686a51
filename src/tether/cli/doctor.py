"""The command that examines a set-up before training, or a run after it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tether.cli.journeys import stages_of
from tether.cli.options import Overrides
from tether.core.errors import ConfigError

if TYPE_CHECKING:
    from tether.monitoring.doctor import Result


def doctor(
    subject: Annotated[str, typer.Argument(help="A recipe, before training; or the folder of a run or of one of its stages.")],
    overrides: Overrides = None,
) -> None:
    """Find faulty set-ups: a wrong or moving reference, a KL of the wrong sign, masked stop tokens ... (exit 2 on an error)."""
    from tether.pipelines.examine import examine_recipe, examine_run

    if Path(subject).is_dir():
        if overrides:
            raise ConfigError(f"{subject} is a run: its config is settled, and overrides such as {overrides[0]!r} have no effect")
        results = examine_run(Path(subject))
    else:
        results = examine_recipe(stages_of(subject, overrides or ()))
    Console().print(render(results))
    if any(getattr(r, "severity", "") == "error" for found in results.values() for r in found):
        raise SystemExit(2)


def render(results: Mapping[str, Sequence[Result]]) -> Table:
    """Findings first, each with its advice; then what is in order, and what could not be examined."""
    from tether.monitoring.doctor import Finding, Healthy

    table = Table("stage", "", "check", "what was seen", title=_verdict(results), title_justify="left", show_lines=False)
    rows = []
    for stage, found in results.items():
        for result in found:
            if isinstance(result, Finding):
                colour = "bold red" if result.severity == "error" else "yellow"
                text = f"[bold]{escape(result.message)}[/] {escape(result.evidence)}\n{escape(result.advice)}"
                rows.append((result.severity == "warning", stage, f"[{colour}]{result.severity}[/]", result.check, text))
            elif isinstance(result, Healthy):
                rows.append((2, stage, "[green]healthy[/]", result.check, escape(result.evidence)))
            else:
                rows.append((3, stage, "[dim]not told[/]", result.check, escape(result.reason)))
    for _, *cells in sorted(rows, key=lambda row: row[0]):
        table.add_row(*cells)
    return table


def _verdict(results: Mapping[str, Sequence[Result]]) -> str:
    severities = [getattr(r, "severity", None) for found in results.values() for r in found]
    errors, warnings = severities.count("error"), severities.count("warning")
    if not errors + warnings:
        return "Nothing found."
    return f"{errors} error{'s' * (errors != 1)}, {warnings} warning{'s' * (warnings != 1)}"
