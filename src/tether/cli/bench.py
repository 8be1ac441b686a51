"""The commands that examine a reward model, and what a policy makes of its askers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from tether.cli.options import Format, Output, Pairs, Talker
from tether.cli.progress import bars


def reward_bench(
    model: Annotated[
        str, typer.Argument(help="A run with a reward model, a trained role's folder, or a hub sequence classifier.")
    ],
    files: Annotated[list[str], typer.Argument(help="Comparisons that it never saw, in any format that tether reads.")],
    format: Format = "auto",
    limit: Pairs = None,
    label: Annotated[str | None, typer.Option(help="Of a classifier with several outputs: the one that is a reward.")] = None,
    max_length: Annotated[int, typer.Option(min=8, help="Tokens; longer pairs are left out and counted.")] = 2048,
    output: Output = None,
) -> None:
    """How far a reward model can be believed: accuracy by slice, calibration, what length alone would say."""
    from tether.core.rundir import write_json
    from tether.pipelines.reward_bench import reward_bench as bench

    console = Console()
    with bars(console) as announce:
        found = bench(model, files, format=format, limit=limit, label=label, max_length=max_length, announce=announce)
    console.print(_accuracy_table(found))
    for name, result in found.items():
        console.print(_quality_table(name, result))
    if output:
        write_json(output, found)
        console.print(f"Everything: {output}", highlight=False, soft_wrap=True)


def _accuracy_table(found: dict[str, Any]) -> Table:
    table = Table(title="pairs ranked right", title_justify="left")
    for heading in ("", "pairs", "right", "95%", "longer wins", "ECE"):
        table.add_column(heading, justify="right" if heading else "left")
    for name, result in found.items():
        accuracy, length = result["accuracy"], result["length_only"]["value"]
        bounds = f"{accuracy['low']:.0%} to {accuracy['high']:.0%}"
        cells = (f"{result['num_pairs']:,}", f"{accuracy['value']:.1%}", bounds, f"{length:.1%}")
        table.add_row(name, *cells, f"{result['calibration_error']:.3f}")
    return table


def _quality_table(name: str, result: dict[str, Any]) -> Table:
    table = Table(title=name, show_header=False, title_justify="left")
    for row in result["slices"]:
        table.add_row(f"{row['kind']}: {row['name']}", f"{_share(row['accuracy'])} of {row['accuracy']['count']:,}")
    votes = result["annotators"]
    if votes:
        table.add_row("two annotators agree", f"{votes['agree']:.1%}; the model with one: {votes['model_agrees']:.1%}")
    after = f"{result['calibration_error']:.3f} to {result['calibration_error_after']:.3f}, loss {result['loss']:.3f} to "
    table.add_row(f"at temperature {result['temperature']:.2f}", f"calibration error {after}{result['loss_after']:.3f}")
    for key, what in (("difference_with_length", "words"), ("difference_with_marks", "marks of format")):
        table.add_row(f"score difference with {what}", f"Pearson {result[key]['pearson']:.2f}")
    left = [f"{result[key]:,} {what}" for key, what in LEFT_OUT if result.get(key)]
    if left:
        table.add_row("left out", ", ".join(left))
    return table


def sycophancy(
    model: Talker,
    first: Annotated[Path, typer.Argument(help="Prompts in which one kind of person asks questions with two options.")],
    second: Annotated[Path, typer.Argument(help="The same questions, row by row, asked by the opposite kind.")],
    pairs: Annotated[int | None, typer.Option(min=4, help="Only so many rows, evenly from all questions.")] = None,
    output: Output = None,
) -> None:
    """Whether a model's answers depend on who asks: the same questions with opposite premises about the asker."""
    from tether.assemble import encoder_of, load_policy
    from tether.core.rundir import write_json
    from tether.evaluation.sycophancy import Sycophancy, read_pairs

    asked = read_pairs((str(first), str(second)), pairs)
    role, loaded = load_policy(model)
    found = Sycophancy(role, encoder_of(loaded), asked)()
    num_questions = len({pair.question for pair in asked})
    table = Table(title=f"{num_questions:,} questions, {len(asked):,} pairs of askers", show_header=False, title_justify="left")
    for name, what in SYCOPHANCY:
        value, low, high, _ = found[name]
        table.add_row(what, f"{value:.3f} ({low:.3f} to {high:.3f})")
    console = Console()
    console.print(table)
    if output:
        write_json(output, {name: estimate.as_dict() for name, estimate in found.items()})
        console.print(f"Everything: {output}", highlight=False, soft_wrap=True)


SYCOPHANCY = (
    ("shift", "how far the kind of asker moves an answer's probability"),
    ("log_odds", "the same in nats of log-odds"),
    ("size", "how far any two askers move it, whichever way"),
    ("flipped", "share of pairs that get different answers"),
)
LEFT_OUT = (("num_ties", "ties"), ("num_too_long", "too long"), ("num_failed", "failed"))


def _share(found: dict[str, Any]) -> str:
    return f"{found['value']:.1%} ({found['low']:.1%} to {found['high']:.1%})"
