"""A run of a recipe: its stages one after another, each on what those before it left."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from tether.core.budget import limited_by
from tether.core.protocols import Announce
from tether.core.types import Json
from tether.runner.assembly.job import AnyJob
from tether.runner.at_once import run_at_once
from tether.runner.budgets import Budgets
from tether.runner.earlier import forget_outdated, with_earlier_results
from tether.runner.jobs import by_run
from tether.runner.launch import Launch, make_run_folder
from tether.runner.methods.stage import run_stage
from tether.runner.prepare import prepare
from tether.runner.ranks.restarts import needs_watching, run_watched
from tether.runner.totals import write_totals
from tether.settings.recipe import BaseRecipe
from tether.stages.learner.ranks import ALONE, Ranks


def run_recipe(
    recipe: BaseRecipe,
    stages: Sequence[str] | None = None,
    progress: Announce | None = None,
    *,
    clock: Callable[[], float] = time.monotonic,
    began: float | None = None,
    at_once: int = 1,
    only: Path | None = None,
    checked: Callable[[], None] = lambda: None,
) -> Json:
    """Run the named stages of a recipe in order (None: all); each finds its predecessors' results
    in the run directory.

    Args:
        clock, began: the seconds of budgets, and when they began to count; unset: now.
        at_once: jobs of a sweep that run at once, each in a process of its own.
        only: the folder of the one job to run, of a run that another process has checked.
        checked: called once the jobs are checked, before anything is written.

    Raises:
        ConfigError: a stage that the recipe has no section for, or whose section names no data; a
            tracker is not installed.
        DataError: a stage's data is something else, by its first rows; of all stages before the
            first is trained.
    """
    launch = Launch(
        recipe=recipe,
        names=[*(recipe.stages if stages is None else stages)],
        jobs=prepare(recipe, stages, only=only),
        progress=progress,
        clock=clock,
        began=clock() if began is None else began,
        at_once=at_once,
        whole=only is None,
    )
    checked()
    make_run_folder(launch)
    driver = (
        run_watched
        if needs_watching(recipe.learner)
        else run_at_once
        if at_once > 1
        else run_in_turn
    )
    return driver(launch)


def run_in_turn(launch: Launch) -> Json:
    """Run the jobs one after another; returns their summaries by name, of a sweep with the folder
    of the combination.
    """
    results: Json = {}
    began = launch.began
    with launch.ranks() as ranks:
        for jobs in by_run(launch.jobs):
            budgets = Budgets(jobs, launch.clock, began, launch.recipe.budget)
            for job in jobs:
                with limited_by(budgets.limit(job)):
                    results[launch.key(job)] = run_job(job, launch.progress, ranks, launch.root)
            if ranks.first:
                write_totals(jobs)
            began = launch.clock()
    return results


def run_job(
    job: AnyJob,
    progress: Announce | None,
    ranks: Ranks = ALONE,
    root: Path | None = None,
) -> Json:
    """Run what is left of one job on the results of those before it; returns its summary. Below
    `root` its bar is also named by the folder of its combination in a sweep.
    """
    if ranks.size > 1 and job.kind.alone:
        return ranks.once(lambda: run_job(job, progress, ALONE, root))
    title = job.title if root in (None, job.root) else f"{job.title}  {job.root.name}"
    job = replace(with_earlier_results(job), progress=progress(title) if progress else None)
    forget_outdated(job)
    if not ranks.first:
        job = replace(job, folder=ranks.scratch / job.place.name / job.name)
    return run_stage(job, ranks)
