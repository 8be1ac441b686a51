"""`tether evaluate`: the [evaluate] section of a recipe, or a suite of evaluators on a model."""

from __future__ import annotations

from typing import Annotated

import typer

from tether.cli.journeys import method_command
from tether.cli.options import BudgetMinutes, Output, Rows
from tether.cli.terminal.bars import starting
from tether.cli.terminal.console import Terminal, print_line
from tether.cli.terminal.tables import save, show_table
from tether.core.errors import ConfigError


def evaluate(
    subject: Annotated[
        str,
        typer.Argument(
            metavar="RECIPE | RUN | MODEL",
            help="A recipe, or a run and then its prompts. With --suite: a model folder, a hub "
            "id, or a run.",
        ),
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[PROMPTS | KEY=VALUE]...",
            help="Prompts for a run, and overrides such as evaluate.judge.call=FILE:FUNCTION.",
        ),
    ] = None,
    budget: BudgetMinutes = None,
    suite: Annotated[
        str | None,
        typer.Option(help="Evaluators to run: all, tax, manner, or names separated by commas."),
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(help="Another model, to compare with on the same rows."),
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(help="NAME=PATH: the file of an evaluator; may be repeated."),
    ] = None,
    tasks: Annotated[
        str | None,
        typer.Option(help="Tasks of lm-eval separated by commas, for --suite lm_eval."),
    ] = None,
    limit: Rows = None,
    output: Output = None,
) -> None:
    """Run the [evaluate] section of a recipe, or measure a model with evaluators."""
    if suite is None:
        options = {
            "against": against,
            "data": data,
            "tasks": tasks,
            "limit": limit,
            "output": output,
        }
        if idle := [name for name, value in options.items() if value]:
            raise ConfigError(f"--{idle[0]} has no effect without --suite. Add --suite all")
        method_command("evaluate")(model=subject, words=overrides, budget=budget)
        return
    if overrides or budget is not None:
        raise ConfigError(
            f"{overrides[0] if overrides else '--budget'} changes a recipe, but --suite "
            "measures a model. Remove one of the two",
        )
    names = (tasks or "").replace(",", " ").split()
    files = [*(data or ()), *(f"lm_eval={task}" for task in names)]
    with starting():
        from tether.runner.assembly.evaluation.suites import evaluate_model
        from tether.watch.report.numbers import bracketed

    with Terminal(stderr=True).status("measuring"):
        report = evaluate_model(subject, suite, against=against, data=files, limit=limit)
    cells = []
    for record in report["evaluators"]:
        for figure, fields in record["figures"].items():
            row = [record["evaluator"], figure, bracketed(fields), f"{fields['count']:,}"]
            change = report["changes"].get(record["evaluator"], {}).get(figure)
            if change is not None:
                row += [bracketed(change["difference"]), "yes" if change["paired"] else "no"]
            cells.append(row)
    columns = ["evaluator", "figure", "value [95% interval]", "n"]
    columns += [f"difference from {against}", "same rows"] if against is not None else []
    show_table(Terminal(), subject, cells, columns)
    for name, rows in report["left_out"].items():
        print_line(f"{name}: {rows['count']} rows are left out: {', '.join(rows['reasons'])}")
    save(output, report)
