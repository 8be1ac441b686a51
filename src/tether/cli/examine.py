"""The commands that examine: data, a recipe or a run, a reward model, a policy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Table

from tether.cli.options import (
    Columns,
    Format,
    Output,
    Overrides,
    Pairs,
    RecipeArgument,
    Rows,
    Strict,
    Talker,
    Words,
    as_options,
    columns_of,
    output_option,
)
from tether.cli.terminal.bars import bars, starting
from tether.cli.terminal.console import Terminal, print_line
from tether.cli.terminal.tables import save, show_table
from tether.core.amounts import plural
from tether.core.errors import ConfigError, DataError
from tether.core.types import Facts

if TYPE_CHECKING:
    from tether.watch.monitoring.doctor import Result

COLOURS = {"error": "bold red", "warning": "yellow", "healthy": "green", "unknown": "dim"}
"""By kind of result, in the order of the table."""
FAULTS = ("error", "warning")


def inspect(
    path: Annotated[str, typer.Argument(help="A file, a folder, or hub:owner/name:split.")],
    format: Format = "auto",
    columns: Columns = "",
    limit: Rows = None,
    strict: Strict = False,
    model: Annotated[
        str,
        typer.Option(help="Show what this model's chat template does with the rows."),
    ] = "",
) -> None:
    """Show the content of a file: format, counts, lengths, length bias, duplicates, bad rows,
    examples.
    """
    from tether.data.inspection import inspect_data, inspection_tables

    with as_options():
        inspection = inspect_data(path, format=format, limit=limit, columns=columns_of(columns))
    Terminal().print(inspection_tables(inspection))
    if model:
        from tether.runner.assembly.roles import encoder_at_hand
        from tether.settings.model import ModelConfig

        chat = encoder_at_hand(ModelConfig(source=model)).chat
        print_line(
            f"The chat template of {model} {'keeps' if chat.keeps_thoughts else 'drops'} the "
            f"reasoning of earlier turns; its arguments: {', '.join(sorted(chat.arguments)) or 'none'}",
        )
    if strict and (bad := inspection.quarantine.count):
        raise DataError(
            f"{path}: {bad} rows cannot be used, and --strict was given. The table "
            "above lists the reasons.",
        )


def info() -> None:
    """Report how tether uses this machine: device, dtype, threads, kernels, sandbox."""
    from tether.cli.tools.machine import machine_facts

    show_table(Terminal(), "this machine", machine_facts())


def report(
    directories: Annotated[
        list[Path],
        typer.Argument(metavar="RUN...", help="Run directories. One page shows all of them."),
    ],
    output: Annotated[
        Path | None,
        output_option(
            "File to write; default: report.html in the run. For several runs: "
            "comparison.html in the first.",
        ),
    ] = None,
) -> None:
    """Write one page with the curves, numbers and answers of a run, or with the curves and verdicts
    of several.
    """
    from tether.core.rundir import SWEEP
    from tether.watch.report.about import anchor
    from tether.watch.report.overlay import write_overlay
    from tether.watch.report.page import whole_run, write_report

    if len(directories) > 1:
        print_line(str(write_overlay(directories, output)))
        return
    (directory,) = directories
    page = write_report(directory, output)
    root = whole_run(directory)
    whole = root == directory or (root / SWEEP).is_file()
    print_line(str(page) if whole else f"{page}#{anchor(directory.name)}")


def doctor(
    subject: Annotated[
        str,
        typer.Argument(
            help="A recipe, before training; or the folder of a run or of one of its stages.",
        ),
    ],
    overrides: Overrides = None,
    everything: Annotated[
        bool,
        typer.Option("--all", help="Also list healthy checks, and checks that could not be made."),
    ] = False,
) -> None:
    """Find faults of a recipe or a run: encodings that differ, answers that never end, a failing
    reward ... If there is an error, the exit code is 2.
    """
    with starting():
        from tether.cli.tools.doctor import examine_recipe
        from tether.cli.tools.doctor_run import examine_run
        from tether.settings.recipe import read_recipe
        from tether.watch.monitoring.doctor import Finding

    is_run = Path(subject).is_dir()
    if is_run and overrides:
        raise ConfigError(
            f"{subject} is a run with a fixed recipe, so overrides such as "
            f"{overrides[0]!r} have no effect. Remove them",
        )
    with Terminal(stderr=True).status("examining: loading a model and sampling a few answers"):
        results = (
            examine_run(Path(subject))
            if is_run
            else examine_recipe(read_recipe(subject, overrides or ()))
        )
    table = findings_table(results, everything)
    Terminal().print(table if table.rows else str(table.title))
    if any(
        isinstance(result, Finding) and result.severity == "error"
        for stage in results.values()
        for result in stage
    ):
        raise SystemExit(2)


def findings_table(results: Mapping[str, Sequence[Result]], everything: bool = True) -> Table:
    """The verdict as title, findings with their advice, and with `everything` what is healthy or
    could not be examined.
    """
    from tether.watch.monitoring.doctor import Finding, Healthy

    rows = []
    for stage, of_stage in results.items():
        for result in of_stage:
            if isinstance(result, Finding):
                kind = result.severity
                text = (
                    f"[bold]{escape(result.message)}[/] "
                    f"{escape(result.evidence)}\n{escape(result.advice)}"
                )
            elif isinstance(result, Healthy):
                kind = "healthy"
                text = escape(result.evidence)
            else:
                kind = "unknown"
                text = escape(result.reason)
            rows.append((kind, stage, result.check, text))
    counts = Counter(kind for kind, *_ in rows)
    title = "No faults found."
    if any(counts[kind] for kind in FAULTS):
        title = ", ".join(plural(counts[kind], kind) for kind in FAULTS)
    if not everything:
        title += (
            f" {counts['healthy']} checks are healthy, {counts['unknown']} could "
            "not be made (--all lists them)."
        )
        rows = [row for row in rows if row[0] in FAULTS]
    table = Table(
        "stage",
        "verdict",
        "check",
        "what was seen",
        title=title,
        title_justify="left",
    )
    for kind, stage, check, text in sorted(rows, key=lambda row: list(COLOURS).index(row[0])):
        table.add_row(stage, f"[{COLOURS[kind]}]{kind}[/]", check, text)
    return table


def prove_recipe(
    recipe: RecipeArgument,
    words: Words = None,
    keep: Annotated[
        Path | None,
        typer.Option(help="Keep both runs in this folder, instead of a temporary folder."),
    ] = None,
) -> None:
    """Run a stage twice, once interrupted, and compare weights and records bit for bit. If they
    differ, the exit code is 1.
    """
    from tether.cli.tools.prove import CUTS, prove
    from tether.core.keeping import temporary_folder
    from tether.settings.recipe import read_recipe

    chosen = [word for word in words or [] if "=" not in word]
    config = read_recipe(recipe, [word for word in words or [] if "=" in word])
    with temporary_folder("tether-prove") as temporary:
        rows = prove(config, keep or temporary, chosen)
    title = f"{sum(CUTS)} steps without a stop, compared with {'+'.join(map(str, CUTS))} steps"
    cells = [
        (
            row.stage,
            row.what,
            f"{row.count:,}",
            f"no: {row.difference}" if row.difference else "yes",
        )
        for row in rows
    ]
    show_table(Terminal(), title, cells, ("stage", "compared", "values", "the same"))
    raise typer.Exit(int(any(row.difference for row in rows)))


def reward_bench(
    model: Annotated[
        str,
        typer.Argument(
            help="A run with a reward model, a trained role's folder, or a hub classifier.",
        ),
    ],
    files: Annotated[
        list[str],
        typer.Argument(
            help="Comparisons that the model was not trained on, in any format that tether reads.",
        ),
    ],
    format: Format = "auto",
    limit: Pairs = None,
    label: Annotated[
        str | None,
        typer.Option(
            help="For a classifier with several outputs: the name of the output that is the reward.",
        ),
    ] = None,
    max_length: Annotated[
        int,
        typer.Option(
            min=8,
            help="Maximum length in tokens. Longer pairs are left out and counted.",
        ),
    ] = 2048,
    output: Output = None,
) -> None:
    """Test a reward model on comparisons: accuracy by slice, calibration, and the accuracy of
    length alone.
    """
    from tether.cli.tools.reward_bench import bench_rewards
    from tether.watch.report.doubts import length_warning
    from tether.watch.report.numbers import listing

    console = Terminal()
    with bars(console) as announce:
        results = bench_rewards(
            model,
            files,
            format=format,
            limit=limit,
            label=label,
            max_length=max_length,
            announce=announce,
        )
    for name, result in results.items():
        slices = {f"{row['kind']}: {row['name']}": row["accuracy"] for row in result["slices"]}
        show_table(console, name, listing({**result, **slices}))
        print_line(_seen(result))
        if point := length_warning("bench", name, result):
            print_line(point)
    save(output, results)


def _seen(result: Facts) -> str:
    """Note on the share of a reward model's figures that are of prompts from its training."""
    seen = result["seen_in_training"]
    count = result["num_pairs"]
    if seen is None:
        return (
            "The prompts that this model was trained on are not known. Compare the "
            "rows with the training data yourself."
        )
    if not seen:
        return "The model was trained on none of these prompts."
    return (
        f"{seen:,} pairs have prompts that the model was trained on. The "
        "figures of these pairs do not hold for new prompts. "
        f"accuracy_on_new_prompts is the accuracy on the other pairs ({count:,} pairs "
        "have a better side)."
    )


SYCOPHANCY = {
    "shift": "change of an answer's probability with the kind of asker",
    "log_odds": "the same change in log-odds, in nats",
    "size": "size of the change between two askers, in either direction",
    "flipped": "share of pairs that get different answers",
}


def sycophancy(
    model: Talker,
    first: Annotated[
        Path | None,
        typer.Argument(
            help="Prompts in which one kind of person asks questions with "
            "two options; default: the prompts that come with tether.",
        ),
    ] = None,
    second: Annotated[
        Path | None,
        typer.Argument(help="The same questions, row by row, from the opposite kind of person."),
    ] = None,
    pairs: Annotated[
        int | None,
        typer.Option(min=4, help="Use only this many rows, evenly from all questions."),
    ] = None,
    output: Output = None,
) -> None:
    """Test whether answers depend on who asks: the same questions with opposite premises about the
    asker.
    """
    from tether.data.sources import Quarantine
    from tether.evaluation.suite import MeasuredPolicy
    from tether.evaluation.sycophancy import Sycophancy, read_premise_pairs
    from tether.runner.assembly.data.prompts import usable_premises
    from tether.runner.assembly.roles import encoder_of, load_policy, local_engine
    from tether.settings.evaluation import premise_files
    from tether.watch.report.numbers import listing

    if first is not None and second is None:
        raise ConfigError(
            "one file is not enough. Give two files with matching rows, or none for the "
            "pairs that come with tether",
        )
    files = premise_files() if first is None else (str(first), str(second))
    bad = Quarantine()
    read_premise_pairs(files, pairs)  # faults of the files come before the model is loaded
    role, loaded = load_policy(model)
    encoder = encoder_of(loaded)
    questions = usable_premises(files, pairs, encoder, bad, "sycophancy")
    policy = MeasuredPolicy(role, encoder, local_engine(role, loaded))
    measured = Sycophancy(questions)(policy, 0)
    title = (
        f"{len({pair.question for pair in questions}):,} questions, {len(questions):,} pairs "
        "of askers"
    )
    console = Terminal()
    show_table(console, title, listing({what: measured[name] for name, what in SYCOPHANCY.items()}))
    left_out = {"left_out": bad.summary()} if bad.count else {}
    save(
        output,
        {**{name: estimate.as_dict() for name, estimate in measured.items()}, **left_out},
    )
