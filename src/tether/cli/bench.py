"""The commands that examine a reward model, and what a policy makes of its askers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from tether.cli.options import Format, Output, Pairs, Talker
from tether.cli.progress import bars

if TYPE_CHECKING:
    from tether.cli.results import Facts, Rows


def reward_bench(
    model: Annotated[str, typer.Argument(help="A run with a reward model, a trained role's folder, or a hub classifier.")],
    files: Annotated[list[str], typer.Argument(help="Comparisons that it never saw, in any format that tether reads.")],
    format: Format = "auto",
    limit: Pairs = None,
    label: Annotated[str | None, typer.Option(help="Of a classifier with several outputs: the one that is a reward.")] = None,
    max_length: Annotated[int, typer.Option(min=8, help="Tokens; longer pairs are left out and counted.")] = 2048,
    output: Output = None,
) -> None:
    """Test a reward model on comparisons: accuracy by slice, calibration, what length alone would say."""
    from tether.cli.results import fact_table, save, show_columns
    from tether.run.judging import bench_rewards

    console = Console()
    with bars(console) as announce:
        results = bench_rewards(model, files, format=format, limit=limit, label=label, max_length=max_length, announce=announce)
    rows = [_accuracy_row(name, result) for name, result in results.items()]
    show_columns(console, "pairs ranked right", ("", "pairs", "right", "95%", "longer wins", "ECE"), rows)
    for name, result in results.items():
        console.print(fact_table(name, _quality_rows(result)))
    save(console, output, results)


def _accuracy_row(name: str, result: Facts) -> tuple[str, ...]:
    accuracy, longer = result["accuracy"], f"{result['length_only']['value']:.1%}"
    bounds, error = f"{accuracy['low']:.0%} to {accuracy['high']:.0%}", f"{result['calibration_error']:.3f}"
    return name, f"{result['num_pairs']:,}", f"{accuracy['value']:.1%}", bounds, longer, error


def _quality_rows(result: Facts) -> Rows:
    from tether.cli.results import SHARE
    from tether.report.numbers import bracketed

    for row in result["slices"]:
        yield f"{row['kind']}: {row['name']}", f"{bracketed(row['accuracy'], SHARE)} of {row['accuracy']['count']:,}"
    if votes := result["annotators"]:
        yield "two annotators agree", f"{votes['agree']:.1%}; the model with one: {votes['model_agrees']:.1%}"
    error, loss = (f"{result[key]:.3f} to {result[f'{key}_after']:.3f}" for key in ("calibration_error", "loss"))
    yield f"at temperature {result['temperature']:.2f}", f"calibration error {error}, loss {loss}"
    for key, what in (("difference_with_length", "words"), ("difference_with_marks", "marks of format")):
        yield f"score difference with {what}", f"Pearson {result[key]['pearson']:.2f}"
    causes = (("num_ties", "ties"), ("num_too_long", "too long"), ("num_failed", "failed"))
    if left_out := ", ".join(f"{result[key]:,} {what}" for key, what in causes if result.get(key)):
        yield "left out", left_out


SYCOPHANCY = {
    "shift": "how far the kind of asker moves an answer's probability",
    "log_odds": "the same in nats of log-odds",
    "size": "how far any two askers move it, whichever way",
    "flipped": "share of pairs that get different answers",
}


def sycophancy(
    model: Talker,
    first: Annotated[Path, typer.Argument(help="Prompts in which one kind of person asks questions with two options.")],
    second: Annotated[Path, typer.Argument(help="The same questions, row by row, asked by the opposite kind.")],
    pairs: Annotated[int | None, typer.Option(min=4, help="Only this many rows, evenly from all questions.")] = None,
    output: Output = None,
) -> None:
    """Test whether answers depend on who asks: the same questions with opposite premises about the asker."""
    from tether.cli.results import SCORE, fact_table, save
    from tether.evaluation.sycophancy import Sycophancy, read_premise_pairs
    from tether.report.numbers import bracketed
    from tether.run.roles import encoder_of, load_policy

    questions = read_premise_pairs((str(first), str(second)), pairs)
    role, loaded = load_policy(model)
    measured = Sycophancy(role, encoder_of(loaded), questions)()
    title = f"{len({pair.question for pair in questions}):,} questions, {len(questions):,} pairs of askers"
    console = Console()
    console.print(fact_table(title, [(what, bracketed(measured[name], SCORE)) for name, what in SYCOPHANCY.items()]))
    save(console, output, {name: estimate.as_dict() for name, estimate in measured.items()})
