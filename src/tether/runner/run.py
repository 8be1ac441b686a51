"""A run of a recipe: its stages one after another, each on what those before it left."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tether.build.checks import check_inputs, check_section, check_test_judge
from tether.build.context import Context
from tether.build.data.rows import check_data, load_rows
from tether.build.models import check_libraries, on_folder
from tether.build.rewards import reward_model_of
from tether.build.roles import newest_policy
from tether.core.budget import limited_by, time_limit
from tether.core.errors import MissingFileError
from tether.core.rundir import SWEEP, RunDirectory, made_folder, read_json, write_json
from tether.core.types import Comparison, Json, Prompt, Sampling
from tether.cpu.memory import free_memory
from tether.data.sources import Quarantine
from tether.learner.determinism import deterministic
from tether.learner.loop import Progress
from tether.learner.ranks import ALONE, Ranks
from tether.methods.evaluate import drawn_from, sampling_of, weights_of
from tether.methods.overlaps import trained_prompts, warn_of_overlap
from tether.methods.pairs import comparisons_of, feedback_of
from tether.methods.stage import run_stage
from tether.models.loading import check_model
from tether.planning.price import show_price
from tether.runner.at_once import job_slots, run_at_once
from tether.runner.budgets import Budgets, reopen
from tether.runner.by_device import by_device
from tether.runner.folder import check_base
from tether.runner.former import jobs_with_former_defaults, note_former, with_former_defaults
from tether.runner.jobs import Job, by_recipe, expand, sweep_table, variants
from tether.runner.ranks.restarts import watched, watches
from tether.runner.ranks.start import is_other, placement_of, together
from tether.runner.totals import compared_in, write_totals
from tether.settings.evaluation import EvaluationSection
from tether.settings.model import ModelConfig
from tether.settings.recipe import BaseRecipe
from tether.settings.section import Section, calls_functions
from tether.tracking.follow import tracking


def run_recipe(
    recipe: BaseRecipe,
    stages: Sequence[str] | None = None,
    progress: Callable[[str], Progress] | None = None,
    *,
    clock: Callable[[], float] = time.monotonic,
    began: float | None = None,
    at_once: int = 1,
    only: Path | None = None,
) -> Json:
    """Run the named stages of a recipe in order (None: all); each finds its predecessors' results
    in the run directory.

    Args:
        clock, began: the seconds of budgets, and when they began to count; unset: now.
        at_once: jobs of a sweep that run at once, each in a process of its own.
        only: the folder of the one job to run; the caller has checked and noted the whole.

    Raises:
        ConfigError: a stage that the recipe has no section for, or whose section names no data; a
            tracker is not installed.
        DataError: a stage's data is something else, by its first rows; of all stages before the
            first is trained.
    """
    root, results, began = Path(recipe.run), {}, clock() if began is None else began
    names = list(recipe.stages if stages is None else stages)
    if only is None:
        check_all(recipe, names)
        for variant in variants(recipe):
            if "evaluate" in names and not _is_finished(Path(variant.run) / "evaluate"):
                warn_of_overlap(variant)
    recipe = with_former_defaults(by_device(recipe, names))
    jobs = jobs_with_former_defaults(
        job for job in expand(recipe, names) if only in (None, job.folder)
    )
    made_folder(root)
    if recipe.sweep is not None and only is None and not is_other():
        write_json(root / SWEEP, {"combinations": sweep_table(recipe)})
    price = show_price(recipe, names, progress)
    placement_of(recipe).check()
    if watches(recipe.learner):
        return watched(recipe, names, progress)
    slots = job_slots(recipe, at_once, price) if at_once > 1 else {}
    with (
        together(recipe, names) as ranks,
        deterministic() if recipe.deterministic else contextlib.nullcontext(),
        tracking(recipe.track if ranks.first and only is None else (), root),
    ):
        if slots:
            return run_at_once(recipe, names, slots, progress)
        for own in by_recipe(jobs):
            budgets = Budgets(own, price, clock, began)
            for job in own:
                with limited_by(budgets.limit(job)):
                    results[_result_key(job, root)] = _run(job, progress, ranks)
            if ranks.first and any(job.name == "evaluate" for job in own):
                _write_totals(own)
    return results


def check_all(recipe: BaseRecipe, names: Sequence[str], *, folders: bool = True) -> None:
    """Look for the faults of all jobs before the first begins; nothing is written.

    Args:
        folders: False to plan beside an old run: its folder may hold another one.

    Raises:
        TetherError: there is one.
    """
    for variant in variants(recipe):
        check_inputs(variant)
        check_model(variant.model)
    for job in expand(recipe, names):
        if folders:
            _check_folder(job)
        if job.round in (None, 1) and not (job.round is None and _is_finished(job.folder)):
            _check(job)


def _check_folder(job: Job) -> None:
    """Check that a stage that has begun goes on with the same settings."""
    # its model comes from a training that has not ended
    if job.start is not None and not _is_finished(job.start):
        return
    if RunDirectory(job.folder).begun and (job.folder / "config.json").is_file():
        recipe = with_former_defaults(by_device(job.recipe, [job.name]))
        model = recipe.model if job.start is None else _fine_tuned(recipe, job.start.parent)
        settings = {job.kind.name: recipe.section(job.name), "model": model, "seed": job.seed}
        RunDirectory.open(job.folder, settings)


def _check(job: Job) -> None:
    """Look for the faults of a job before the first job begins."""
    recipe, name, section = job.recipe, job.name, job.settings
    check_libraries(recipe.model, name, section)
    if not job.pairs:
        check_data(name, section)
    check_section(name, section, recipe.model)
    if isinstance(section, EvaluationSection):
        sampling_of(section, _sampling(recipe))
    elsewhere = reward_model_of(section) is not None
    trained = None if elsewhere else recipe.section(section.scorer or "reward")
    check_test_judge(name, section, trained, _scorer_folder(job).parent / "test" / "model")


def _scorer_folder(job: Job) -> Path:
    """Folder of the model that scores a job's answers. Without such a model, the test model of
    evaluate.judge = "test" may still lie beside it.
    """
    return reward_model_of(job.settings) or job.scorer or job.place / "reward" / "model"


def _result_key(job: Job, root: Path) -> str:
    """The key of a job's summary: its name, with the folder of its combination in a sweep."""
    home = Path(job.recipe.run)
    if home == root or not home.is_relative_to(root / "sweep"):
        return job.name
    return f"{home.relative_to(root)}/{job.name}"


def _write_totals(jobs: Sequence[Job]) -> None:
    """The summary of a whole run, where all of its policies lie in its own folder."""
    recipe = jobs[0].recipe
    folders = [folder for job in jobs for folder in job.policies.values()]
    if all(folder.is_relative_to(recipe.run) for folder in folders):
        write_totals(recipe)


def _sampling(recipe: BaseRecipe) -> Sampling | None:
    """The sampling of the first stage that samples."""
    samplers = (recipe.section(n) for n in (*recipe.policies, "pairs"))
    return next((section.sampling for section in samplers if hasattr(section, "sampling")), None)


def _run(job: Job, progress: Callable[[str], Progress] | None, ranks: Ranks) -> Json:
    """One job."""
    if ranks.size > 1 and job.kind.alone:
        return ranks.once(lambda: _run(job, progress, ALONE))
    if job.start is not None:
        check_base(job.start.parent, job.folder)
    context = context_of(job, progress(job.title) if progress else None, ranks)
    if ranks.first:
        note_former(job)
    verdict = job.folder / "summary.json"
    if context.policies and verdict.is_file() and _has_changed(context, read_json(verdict)):
        verdict.unlink()  # all are compared again, by the answers that still hold
    if verdict.is_file() and ranks.first:
        reopen(RunDirectory(job.folder), job.settings, time_limit())
    if not ranks.first:
        context = replace(context, folder=ranks.desk / job.place.name / job.name)
    summary = run_stage(job.settings, context)
    free_memory()
    return summary


def context_of(job: Job, progress: Progress | None = None, ranks: Ranks = ALONE) -> Context:
    """Inputs of a job's stage: its model, its rows and its scorer, as the run's files have them."""
    recipe, settings, place = job.recipe, job.settings, job.place
    context = Context(
        name=job.kind.name,
        folder=job.folder,
        model=recipe.model if job.start is None else _fine_tuned(recipe, job.start.parent),
        seed=job.seed,
        scorer=_scorer_folder(job),
        progress=progress,
        round=job.round,
        earlier=job.earlier,
        policy=newest_policy(job.earlier[-1]) if job.earlier else None,
        rows=_collected(recipe, settings, job.pairs) if job.pairs else None,
        placement=placement_of(recipe, ranks.size),
        ranks=ranks,
    )
    if job.name != "evaluate":
        return context
    folders = {name: job.policies.get(name, place / name) for name in compared_in(recipe, place)}
    return replace(
        context,
        policies={name: folder for name, folder in folders.items() if _is_finished(folder)},
        sampling=_sampling(recipe),
        trained=trained_prompts(recipe),
    )


def _is_finished(folder: Path) -> bool:
    return (folder / "summary.json").is_file()


def _has_changed(context: Context, verdict: Json) -> bool:
    """True if a policy has come since a verdict, or was trained again since it answered."""
    if context.policies.keys() - verdict["policies"].keys():
        return True
    drawn = {name: drawn_from(context.folder / name) for name in context.policies}
    return any(
        drawn[name] not in (None, weights_of(folder)) for name, folder in context.policies.items()
    )


def _collected(recipe: BaseRecipe, section: Section, pairs: Sequence[Path]) -> Sequence[Any]:
    """The rows that a stage takes from [pairs]: comparisons of all rounds so far, verdicts on their
    sides, or its prompts.
    """
    if section.kind is Prompt:
        return load_rows(
            recipe.section("pairs").data,
            Prompt,
            Quarantine(),
            whole=calls_functions(section),
        )
    comparisons = [row for folder in pairs for row in comparisons_of(folder)]
    return comparisons if section.kind is Comparison else feedback_of(comparisons)


def stage_model(recipe: BaseRecipe, root: Path) -> ModelConfig:
    """Model from which the stages after SFT start: the SFT model if the recipe makes one, the base
    model otherwise.
    """
    return recipe.model if recipe.section("sft") is None else _fine_tuned(recipe, root)


def _fine_tuned(recipe: BaseRecipe, root: Path) -> ModelConfig:
    if not (root / "sft" / "summary.json").is_file():
        raise MissingFileError(
            f"{root / 'sft'} has no finished SFT stage; run it first (tether sft RECIPE).",
        )
    return after_sft(recipe.model, root)


def after_sft(model: ModelConfig, root: Path) -> ModelConfig:
    """The same settings on the fine-tuned folder, which carries its own template.

    Raises:
        MissingFileError: the stage is finished, and its model is gone.
    """
    if (root / "sft" / "summary.json").is_file() and not (
        root / "sft" / "model" / "config.json"
    ).is_file():
        raise MissingFileError(
            f"{root / 'sft' / 'model'}, from which everything in {root} starts, is gone or "
            "incomplete. Put it back, or begin in another run folder",
        )
    return on_folder(model, root / "sft" / "model")
