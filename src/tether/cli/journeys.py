"""Commands that train."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from typer import Exit

from tether.cli.recipes import write_recipe
from tether.cli.terminal.bars import FINISHED, bars, starting
from tether.cli.terminal.console import Terminal, print_line, show_table
from tether.core.command import command_line
from tether.core.errors import ConfigError, RunError, memory_error
from tether.core.rundir import stage_folder
from tether.settings.reading import as_toml, is_override, packaged_recipes
from tether.settings.stages import STAGES, method_stage
from tether.settings.synonyms import METHODS

if TYPE_CHECKING:
    from tether.settings.recipe import BaseRecipe

ARMS = {
    "beta0": "arms.beta0.ppo.kl={mode='fixed', coefficient=0.0}",
    "random": "arms.random.ppo.reward_source=random",
}
"""Comparisons for the quickstart's policy: no KL penalty, and a random reward."""


def quickstart(
    overrides: list[str] | None = None,
    arms: str = "ppo",
    budget: float | None = None,
    smoke: bool = False,
) -> None:
    """The whole pipeline on a small model: SFT, preferences, reward model, PPO, report. The same
    command resumes an interrupted run.
    """
    chosen = [arm for arm in arms.replace(",", " ").split() if arm != "ppo"]
    if unknown := [arm for arm in chosen if arm not in ARMS]:
        raise ConfigError(f"no arm is called {unknown[0]!r}. Choose from: ppo, {', '.join(ARMS)}")
    if smoke:
        print_line(
            "The smoke test uses a tiny random model. It shows only that all "
            "stages run on this machine.",
        )
    _run(
        "smoke" if smoke else "quickstart",
        [*(ARMS[arm] for arm in chosen), *_timed(overrides, budget)],
    )


def _timed(overrides: Sequence[str] | None, budget: float | None) -> list[str]:
    """The overrides, and that of --budget."""
    return [*(overrides or ()), *([] if budget is None else [f"budget={budget:g}"])]


def method_command(name: str) -> Callable[..., None]:
    """The command of a method: of a recipe it runs one section; of a model and rows it makes the
    recipe, as the function of that name does in Python.
    """
    section = method_stage(name)[0].name

    def command(
        model: str,
        words: list[str] | None = None,
        *,
        reward: str | None = None,
        teacher: str | None = None,
        run: str | None = None,
        recipe: Path | None = None,
        budget: float | None = None,
        dry_run: bool = False,
    ) -> None:
        options = ("run", run), (f"{section}.teacher", teacher)
        given = _timed(words, budget) + [f"{key}={value}" for key, value in options if value]
        rows = [word for word in given if not is_override(word)]
        if model.endswith(".toml") or model in packaged_recipes() or not rows:
            if idle := [key for key, value in (("reward", reward), ("recipe", recipe)) if value]:
                raise ConfigError(
                    f"--{idle[0]} belongs to a model and its rows: `tether {name} MODEL ROWS`. "
                    f"Change {model} itself",
                )
            _run(model, [section, *given], name if name in METHODS else "", dry_run=dry_run)
            return
        began = time.monotonic()
        folders = [word for word in given if word.startswith("run=")]
        with starting():
            from tether.runner.assembly.data.sources import check_sources
            from tether.runner.call import recipe_of

            config = recipe_of(
                name,
                model,
                rows[0] if len(rows) == 1 else rows,
                reward,
                run=folders[-1].removeprefix("run=") if folders else None,
                overrides=[word for word in given if word not in (*rows, *folders)],
                where=f"tether {name}",
            )
            check_sources(config)
        if recipe is None:
            print_line(f"# --recipe FILE writes this recipe\n{as_toml(config)}")
        else:
            write_recipe(recipe, as_toml(config), section)
            if not dry_run:
                return
        _begin(
            config,
            [section],
            [name, model, *given, *(["--reward", reward] if reward else [])],
            began,
            dry_run=dry_run,
        )

    return command


def run(
    recipe: str,
    words: list[str] | None = None,
    on: str | None = None,
    budget: float | None = None,
    dry_run: bool = False,
) -> None:
    """Run all stages of a recipe in order, or the named ones. The same command resumes an
    interrupted run.
    """
    given = [*_timed(words, budget), *([f"on={on}"] if on else [])]
    _run(recipe, given, dry_run=dry_run)


def sweep(
    recipe: str,
    words: list[str] | None = None,
    seeds: int | None = None,
    at_once: int = 1,
    budget: float | None = None,
    dry_run: bool = False,
) -> None:
    """Run a recipe once for each combination of the values of some keys. The same command
    resumes an interrupted sweep.
    """
    with starting():
        from tether.settings.recipe import read_recipe
        from tether.settings.sweep import sweep_overrides

        given = sweep_overrides(words or ())
        plain = read_recipe(recipe, [word for word in given if "=" in word])
        timed = [name for name in plain.policies if name in STAGES]
        if budget is not None and not timed:
            raise ConfigError(
                f"--budget limits the training of each policy, and {recipe} trains "
                "none. Give a stage its own budget, such as reward.budget=5",
            )
        extra = [f"{name}.budget={budget:g}" for name in timed] if budget is not None else []
        if at_once > 1 and (plain.on != "local" or plain.learner.ranks > 1):
            raise ConfigError(
                "--at-once runs each job in one process on this machine. Remove "
                "--at-once, or remove learner.ranks and on from the recipe",
            )
        if seeds is not None:
            extra.append(f"seed={','.join(str(plain.seed + n) for n in range(seeds))}")
        given = sweep_overrides([*(words or ()), *extra])
        if plain.sweep is None and not any(word.startswith("sweep.") for word in given):
            raise ConfigError(
                f"no key has several values, and {recipe} has no [sweep]. Give values "
                "with commas between them, such as ppo.kl.coefficient=0,0.05, or --seeds 3",
            )
    _run(recipe, given, dry_run=dry_run, at_once=at_once)


def _run(
    recipe: str,
    words: list[str],
    method: str = "",
    *,
    dry_run: bool = False,
    at_once: int = 1,
) -> None:
    began = time.monotonic()
    with starting():
        from tether.runner.assembly.data.sources import check_sources
        from tether.settings.recipe import read_recipe

        names = [word for word in words if "=" not in word]
        overrides = [word for word in words if "=" in word]
        config = read_recipe(recipe, overrides)
        if method:
            config = read_recipe(recipe, [*overrides, *_what_makes(method, config, recipe)])
        if not (chosen := names or config.stages):
            raise ConfigError(
                f"{recipe} has no section of a stage, so there is nothing to do. "
                "Add one, such as [sft].",
            )
        check_sources(config)
    given = ["run", recipe, *names, *overrides]
    _begin(config, chosen, given, began, dry_run=dry_run, at_once=at_once)


def _begin(
    config: BaseRecipe,
    chosen: list[str],
    given: Sequence[str],
    began: float,
    *,
    dry_run: bool = False,
    at_once: int = 1,
) -> None:
    """Run stages here, or where the recipe says; `given` are the words of the command."""
    if dry_run:
        from tether.runner.prepare import prepare

        prepare(config, chosen)
        show_jobs(config, chosen)
        return
    if config.on in ("local", "ray"):
        _stages(config, chosen, began, given, at_once)
        return
    from tether.runner.assembly.launching import submit

    command = [
        str(Path(word).resolve()) if word.endswith(".toml") and not is_override(word) else word
        for word in given
        if not word.startswith("on=")
    ]
    place = Path(config.run)
    raise Exit(
        submit(
            config.on,
            place,
            config.learner.ranks,
            config.model.device,
            command,
        ),
    )


def show_jobs(config: BaseRecipe, chosen: Sequence[str] | None = None) -> None:
    """Print the jobs of a recipe and their parts, in the order in which they end."""
    from tether.runner.jobs import combination_folder, expand, job_row, with_parts
    from tether.settings.sweep import swept
    from tether.watch.report.numbers import SENTENCES

    root = Path(config.run)
    jobs = with_parts(expand(config, chosen))
    tables: dict[Path, list[tuple[str, ...]]] = {}
    for job in jobs:
        state = "finished" if job.finished else ""
        rows = tables.setdefault(combination_folder(job, root), [])
        rows.append((*job_row(job, root), state))
    columns = ("job", "needs", "rows", "folder", "state")
    print_line(f"{len(jobs)} jobs in {root}")
    if [len(v) for k, v in swept(config.sweep or {}).items() if k.endswith("seed")] == [2]:
        print_line(f"{SENTENCES['sweep']['few-seeds']}.")
    for folder, rows in tables.items():
        title = "" if folder == root else str(folder.relative_to(root))
        show_table(rows, columns, title)


def _what_makes(method: str, config: BaseRecipe, recipe: str) -> list[str]:
    """The override by which a stage becomes this method; none where it is.

    Raises:
        ConfigError: the recipe has not the method's section, or says in it that it is another.
    """
    name, key, value = METHODS[method]
    section = config.section(name)
    if section is None:
        how = f"`tether {method}` runs [{name}] with {key} = {value!r}"
        raise ConfigError(
            f"{how}, and {recipe} has no such section. Add one, with data = {{ path "
            f'= "..." }} in it.',
        )
    if (own := getattr(section, key)) == value:
        return []
    if key in section.model_fields_set:
        right = f"start it with `{command_line(name.replace('_', '-'), recipe)}`, or add {name}.{key}={value}"
        raise ConfigError(
            f"{recipe} has {name}.{key} = {own!r}, but `tether {method}` needs "
            f"{value!r}. To mend this, {right}.",
        )
    return [f"{name}.{key}={value}"]


def _stages(
    config: BaseRecipe,
    chosen: list[str],
    began: float,
    given: Sequence[str] = (),
    at_once: int = 1,
) -> None:
    """Train the chosen stages, and show what became of them and what may come next."""
    from tether.cli.terminal.price import announce_price
    from tether.cli.terminal.results import show_after, show_run, show_stage, show_sweep, to_judge
    from tether.runner.jobs import expand
    from tether.runner.methods.pairs import WaitingError
    from tether.runner.ranks.start import is_other
    from tether.runner.run import run_recipe
    from tether.runner.start import start_run

    if is_other():
        run_recipe(config, chosen)
        return
    console = Terminal()
    root = Path(config.run)
    unfinished = {job.name for job in expand(config) if not job.finished}
    left = [name for name in config.stages if config.repeat or name in unfinished]
    if {*chosen} <= {*config.stages} - {*left}:
        print_line(f"{root}: {FINISHED}")
    elif config.sweep is not None:
        show_jobs(config, chosen)
        print_line("The times below are for one combination.")
    try:
        with bars(console, names=config.titles) as announce:
            results, page = start_run(
                config,
                chosen,
                announce,
                began=began,
                at_once=at_once,
                checked=partial(announce_price, config, chosen, announce),
            )
    except WaitingError as waiting:
        print_line(str(waiting))
        return
    except (MemoryError, RuntimeError) as error:
        if (wanting := memory_error(error)) is None:
            raise
        raise RunError(f"out of memory: {wanting}. {_smaller(config, chosen)}") from error
    if config.sweep is not None:
        show_sweep(root)
        print_line(f"Folders of the combinations, each with its own report: {root / 'sweep'}")
        print_line(f"Report on all runs: {page}")
        return
    if "evaluate" in chosen:
        show_run(console, root)
    else:
        last = [name for name in chosen if config.kind(name).answers][-1:]
        for name in chosen:
            how = to_judge(root) if [name] == last else ""
            show_stage(console, stage_folder(root, name), results[name], how)
    print_line(f"Report: {page}")
    waiting = [name for name in left if name not in chosen]
    again = []
    if waiting and given[:1] == ["run"]:
        words = [word for word in given[2:] if "=" in word]
        again = ["run", given[1], waiting[0], *words]
    show_after(root, chosen, again)


def _smaller(config: BaseRecipe, chosen: list[str]) -> str:
    """Changes that would lower the peak of these stages most, by the planner."""
    from tether.runner.planning.devices import machine_for
    from tether.runner.planning.plan import plan as make

    made = make(config, machine_for(config.model.device), stages=chosen, advise=True)
    changes = "; ".join(
        f"{what} ({peak / 1e9:.2f} GB)" for what, peak in made.advice[:3] if peak < made.peak
    )
    return (
        f"The planner estimates a peak of {made.peak / 1e9:.2f} GB. Changes that lower "
        f"the peak: {changes or 'a smaller model'}. Start the same "
        "command again with one of these changes and another run "
        "directory."
    )


def resume(run: Path, overrides: list[str] | None = None, budget: float | None = None) -> None:
    """Continue a run from its last checkpoint."""
    began = time.monotonic()
    with starting():
        from tether.runner.folder import remembered
        from tether.settings.reading import build
        from tether.settings.recipe import recipe_type
        from tether.settings.sweep import idle_override

        root, started = remembered(run)
        values = {**started["config"], "run": str(root)}
        given = _timed(overrides, budget)
        config = build(recipe_type(), values, given, where=str(root / "command.json"))
        if idle := idle_override(config.sweep or {}, given):
            raise ConfigError(idle)
    _stages(config, started["stages"], began)
