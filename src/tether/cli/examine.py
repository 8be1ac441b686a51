"""The commands that examine: data, a recipe before it runs, a run, a reward model, a policy."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.markup import escape
from rich.table import Table
from typer import Exit

from tether.cli.journeys import show_jobs
from tether.cli.options import as_options, columns_of
from tether.cli.terminal.bars import bars, starting
from tether.cli.terminal.console import Terminal, print_line, save, show_table
from tether.core.amounts import plural
from tether.core.errors import ConfigError, DataError
from tether.core.types import Facts

if TYPE_CHECKING:
    from tether.runner.planning.phases import Phase, StagePlan
    from tether.runner.planning.plan import Plan
    from tether.settings.recipe import BaseRecipe
    from tether.watch.monitoring.doctor import Result

COLOURS = {"error": "bold red", "warning": "yellow", "healthy": "green", "unknown": "dim"}
"""By kind of result, in the order of the table."""
FAULTS = ("error", "warning")


def inspect(
    path: str,
    format: str = "auto",
    columns: str = "",
    limit: int | None = None,
    strict: bool = False,
    model: str = "",
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

    show_table(machine_facts(), title="this machine")


def report(directories: list[Path], output: Path | None = None) -> None:
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


def doctor(subject: str, overrides: list[str] | None = None, everything: bool = False) -> None:
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


def prove_recipe(recipe: str, words: list[str] | None = None, keep: Path | None = None) -> None:
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
    show_table(cells, ("stage", "compared", "values", "the same"), title)
    raise Exit(int(any(row.difference for row in rows)))


def reward_bench(
    model: str,
    files: list[str],
    format: str = "auto",
    limit: int | None = None,
    label: str | None = None,
    max_length: int = 2048,
    output: Path | None = None,
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
        show_table(listing({**result, **slices}), title=name)
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
    model: str,
    first: Path | None = None,
    second: Path | None = None,
    pairs: int | None = None,
    output: Path | None = None,
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
    show_table(listing({what: measured[name] for name, what in SYCOPHANCY.items()}), title=title)
    left_out = {"left_out": bad.summary()} if bad.count else {}
    save(
        output,
        {**{name: estimate.as_dict() for name, estimate in measured.items()}, **left_out},
    )


def plan(
    recipe: str,
    overrides: list[str] | None = None,
    gpu_memory: float | None = None,
    gpu: str | None = None,
    shape: str | None = None,
    prompt_tokens: int | None = None,
) -> None:
    """Estimate the memory and time of a recipe. If the recipe does not fit, list changes that help
    (exit code 1).
    """
    with starting():
        from tether.runner.assembly.data.sources import check_sources
        from tether.runner.by_device import sized
        from tether.runner.planning import devices
        from tether.runner.planning import plan as planner
        from tether.runner.planning.sizes import row_sizes
        from tether.runner.prepare import prepare
        from tether.settings.recipe import read_recipe

        config = read_recipe(recipe, overrides or ())
        check_sources(config)
        if (gpu or gpu_memory or shape) is None and config.on == "local":
            prepare(config, starting=False)
    show_jobs(config)
    device = (
        devices.machine_for(config.model.device)
        if gpu_memory is None and gpu is None
        else devices.gpu(gpu_memory, gpu)
    )
    sizes = row_sizes(config, config.stages, prompt_tokens, encode=math.inf)
    usual = prompt_tokens or 128
    if device.gpu:
        config = sized(config, config.stages, device, sizes, shape=shape, prompt_tokens=usual)
    made = planner.plan(config, device, shape=shape, prompt_tokens=usual, sizes=sizes)
    _show_plan(config, made)
    _print_verdict(made)
    if not made.fits:
        raise SystemExit(1)


def _show_plan(config: BaseRecipe, made: Plan) -> None:
    """Show memory and seconds of each phase, and the time of the whole recipe."""
    from tether.cli.terminal.price import price_lines
    from tether.runner.jobs import expand
    from tether.runner.methods.overlaps import overlap_of
    from tether.runner.planning import devices

    device = made.device
    unit, word = (1e9, "billion") if made.parameters >= 1e8 else (1e6, "million")
    title = f"{made.parameters / unit:,.2f} {word} parameters on {device.name}"
    rows = [_phase_row(stage, phase) for stage in made.stages for phase in stage.phases]
    show_table(
        rows,
        ("stage", "learning\nrate", "phase", "GB", "most of it", "s/update"),
        title,
    )
    for line in price_lines(config, made):
        print_line(line)
    for job in expand(config):
        if job.kind.makes == "verdict" and job.round in (None, 1) and (shared := overlap_of(job)):
            print_line(shared)
    if device.gpu:
        shares = (
            f"{devices.EFFICIENCY} of the peak speed and {devices.DECODING_EFFICIENCY} "
            "of the bandwidth in the data sheet"
        )
        print_line(f"Times on a GPU are estimates. They assume {shares}, and the host of an H100.")


def _phase_row(stage: StagePlan, phase: Phase) -> tuple[str, ...]:
    """The cells of a phase in the table of a plan."""
    shares = ((size, name) for name, size in phase.bytes.items() if size >= 5e6)
    largest = sorted(shares, reverse=True)[:2]
    return (
        stage.name,
        "" if stage.learning_rate is None else f"{stage.learning_rate:g}",
        "log-probs" if phase.name == "evaluate" else phase.name,
        f"{phase.total / 1e9:.2f}{' peak' if phase.total == stage.peak else ''}",
        ", ".join(f"{name} {size / 1e9:.2f}" for size, name in largest),
        f"{phase.seconds:,.2g}" if phase.seconds < 10 else f"{phase.seconds:,.0f}",
    )


def _print_verdict(made: Plan) -> None:
    """Print that the plan fits the device's memory, or the changes that would help."""
    memory = made.device.memory
    if made.fits:
        print_line(f"The recipe fits: {made.peak / 1e9:.1f} GB of {memory / 1e9:.0f}.")
        return
    print_line(
        f"The recipe does not fit: {made.peak / 1e9:.1f} GB are needed, "
        f"{memory / 1e9:.0f} are available. Each of these "
        "changes lowers the peak:",
    )
    for change, peak in made.advice:
        verdict = "fits" if peak <= memory else "not enough by itself"
        print_line(f"  {change}: {peak / 1e9:.1f} GB, {verdict}")
