"""The jobs of a start: expanded, continued and checked, once. Methods read the job alone."""

from __future__ import annotations

import json
import logging
import pkgutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from pydantic import ValidationError

from tether.core.rundir import MAY_CHANGE, RunDirectory, read_json
from tether.core.types import Facts, Sampling
from tether.models.loading import check_model
from tether.runner.assembly.checks import check_inputs, check_section, check_test_judge
from tether.runner.assembly.data.rows import check_data
from tether.runner.assembly.job import AnyJob
from tether.runner.assembly.models import check_libraries
from tether.runner.assembly.roles import trained_scorer
from tether.runner.by_device import by_device
from tether.runner.jobs import by_run, expand, variants
from tether.runner.methods.overlaps import overlap_of
from tether.settings.config import ConfigT, layered
from tether.settings.model import ModelConfig
from tether.settings.pairs import PairsSection
from tether.settings.policy import SampledConfig
from tether.settings.recipe import BaseRecipe
from tether.settings.rounds import RoundsSection

SAMPLERS = SampledConfig, RoundsSection, PairsSection
"""Settings of the stages that sample."""
_LOG = logging.getLogger(__name__)


def prepare(
    recipe: BaseRecipe,
    stages: Sequence[str] | None = None,
    *,
    only: Path | None = None,
    starting: bool = True,
) -> list[AnyJob]:
    """The jobs of the named stages, in their order. Sizes that the recipe leaves open fit the
    device, stages that have begun keep their settings, and faults are found before the first job
    begins. Nothing is written.

    Args:
        only: the folder of the one job to run; who gives it has checked the whole.
        starting: False to plan beside an old run: its folder may hold another one.

    Raises:
        TetherError: a stage cannot run.
    """
    if only is None:
        for variant in variants(recipe):
            check_inputs(variant)
            check_model(variant.model)
    recipe = by_device(recipe, list(recipe.stages if stages is None else stages))
    whole = {job.folder: job for job in continued(expand(recipe))}
    jobs = [whole[job.folder] for job in expand(recipe, stages)]
    if only is not None:
        return [job for job in jobs if job.folder == only]
    bases = {Path(variant.run): variant.model for variant in variants(recipe)}
    for job in jobs:
        if starting:
            _check_folder(job)
        if job.round in (None, 1) and not (job.round is None and job.finished):
            scorer = whole.get(scorer_folder(job).parent)
            _check(job, bases.get(job.root, recipe.model), scorer)
            if starting and job.kind.makes == "verdict" and (sentence := overlap_of(job)):
                logging.getLogger("tether.data").warning("%s", sentence)
    return jobs


def continued(jobs: Iterable[AnyJob]) -> Iterator[AnyJob]:
    """The jobs on the settings with which their stages began; of rounds, the last one's. The log
    names those that differ from the recipe's.
    """
    for own in by_run(jobs):
        began = {
            job.name: (job, read_json(job.folder / "config.json")) for job in own if _begun(job)
        }
        bases = [config.get("model", {}) for job, config in began.values() if job.start is None]
        settings = {
            name: kept(job.settings, config.get(job.stage, {}))
            for name, (job, config) in began.items()
        }
        for job in own:
            now = replace(
                job,
                model=kept(job.model, bases[0]) if bases else job.model,
                settings=settings.get(job.name, job.settings),
                others={name: settings.get(name, other) for name, other in job.others.items()},
            )
            if _begun(job) and not job.finished and (words := "; ".join(_differences(job, now))):
                _LOG.warning("%s continues with the settings of its start: %s", job.title, words)
            yield replace(now, sampling=_sampling(now))


def kept(config: ConfigT, began: Facts) -> ConfigT:
    """The settings of a start under those that the recipe names."""
    below = {key: value for key, value in began.items() if key not in MAY_CHANGE}
    try:
        return type(config).model_validate(layered(below, config.model_dump(exclude_unset=True)))
    except ValidationError:
        return config  # RunDirectory.open names what no longer is allowed, with other differences


def _begun(job: AnyJob) -> bool:
    return RunDirectory(job.folder).begun and (job.folder / "config.json").is_file()


def _differences(job: AnyJob, now: AnyJob) -> Iterator[str]:
    tables = (job.stage, job.settings, now.settings), ("model", job.model, now.model)
    for table, plain, settings in tables:
        values = json.loads(plain.model_dump_json())
        for key, value in json.loads(settings.model_dump_json()).items():
            if value != values[key]:
                yield f"{table}.{key} = {json.dumps(value)} (now {json.dumps(values[key])})"


def _sampling(job: AnyJob) -> Sampling | None:
    """The sampling of the first of the other stages that samples."""
    others = (job.others.get(name) for name in (*job.policies, "pairs"))
    samplers = (other for other in others if isinstance(other, SAMPLERS))
    return next((sampler.sampling for sampler in samplers), None)


def _check_folder(job: AnyJob) -> None:
    """Check that a stage that has begun goes on with the same settings."""
    # its model comes from a training that has not ended
    if job.start is not None and not (job.start / "summary.json").is_file():
        return
    if _begun(job):
        RunDirectory.open(job.folder, job.config)


def _check(job: AnyJob, base: ModelConfig, scorer: AnyJob | None) -> None:
    """Look for the faults of a job before the first job begins.

    Args:
        base: the recipe's model, whose shapes are known before a stage is trained on it.
        scorer: the job that trains the model by which this one's answers are scored.
    """
    name = job.name
    section = job.settings
    check_libraries(base, name, section)
    if not job.pairs:
        check_data(name, section)
    check_section(name, section, base)
    if job.kind.check:
        pkgutil.resolve_name(job.kind.check)(job, base)
    trained = scorer and scorer.settings
    check_test_judge(name, section, trained, scorer_folder(job).parent / "test" / "model")


def scorer_folder(job: AnyJob) -> Path:
    """Folder of the model that scores a job's answers. Without such a model, the test model of
    evaluate.judge = "test" may still lie beside it.
    """
    path = job.scorer or job.place / "reward" / "model"
    return trained_scorer(str(path)) or path
