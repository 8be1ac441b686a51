"""The command that estimates memory and time of a recipe."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from tether.cli.journeys import show_jobs
from tether.cli.options import Overrides, RecipeArgument
from tether.cli.terminal.bars import starting
from tether.cli.terminal.console import Terminal, print_line
from tether.cli.terminal.tables import show_table

if TYPE_CHECKING:
    from rich.console import Console

    from tether.runner.planning.phases import Phase, StagePlan
    from tether.runner.planning.plan import Plan
    from tether.settings.recipe import BaseRecipe


def plan(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    gpu_memory: Annotated[
        float | None,
        typer.Option(
            "--gpu-memory",
            min=1,
            help="Memory of the GPU in GB; default: the memory of its model.",
        ),
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(help="Plan for a GPU: a100, h100, l40s, rtx4090 ...; default: this machine."),
    ] = None,
    shape: Annotated[
        str | None,
        typer.Option(
            help="Plan for another model: a well-known shape such as llama-2-7b, or a config.json.",
        ),
    ] = None,
    prompt_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Length of the prompts in tokens; default: the lengths in the data.",
        ),
    ] = None,
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
    console = Terminal()
    show_jobs(console, config)
    device = (
        devices.machine_for(config.model.device)
        if gpu_memory is None and gpu is None
        else devices.gpu(gpu_memory, gpu)
    )
    sizes = row_sizes(config, config.stages, prompt_tokens, encoded=True)
    usual = prompt_tokens or 128
    if device.gpu:
        config = sized(config, config.stages, device, sizes, shape=shape, prompt_tokens=usual)
    made = planner.plan(config, device, shape=shape, prompt_tokens=usual, sizes=sizes)
    _show_plan(console, config, made)
    _print_verdict(made)
    if not made.fits:
        raise SystemExit(1)


def _show_plan(console: Console, config: BaseRecipe, made: Plan) -> None:
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
        console,
        title,
        rows,
        ("stage", "learning\nrate", "phase", "GB", "most of it", "s/update"),
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
