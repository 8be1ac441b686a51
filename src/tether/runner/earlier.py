"""The results of earlier jobs that a job starts from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tether.core.rundir import read_json
from tether.core.types import Comparison, Prompt
from tether.data.sources import Quarantine
from tether.runner.assembly.data.rows import load_rows
from tether.runner.assembly.job import AnyJob
from tether.runner.assembly.manifest import drawn_from, weights_of
from tether.runner.assembly.roles import newest_policy
from tether.runner.folder import check_base
from tether.runner.methods.pairs import comparisons_of, feedback_of
from tether.runner.prepare import scorer_folder
from tether.runner.totals import compared_in
from tether.settings.section import calls_functions


def with_earlier_results(job: AnyJob) -> AnyJob:
    """A job with what those before it have left: rows, a scorer, the policies of a comparison, and
    the policy of the round before.

    Raises:
        MissingFileError, RunError: the model that it starts from is not there, or is another one.
    """
    check_base(job)
    job = replace(
        job,
        scorer=scorer_folder(job),
        policy=newest_policy(job.earlier[-1]) if job.earlier else None,
        rows=_rows_from_pairs(job) if job.pairs and job.rows is None else job.rows,
    )
    if job.kind.makes != "verdict":
        return job
    folders = {name: job.policies.get(name, job.place / name) for name in compared_in(job)}
    finished = {
        name: folder for name, folder in folders.items() if (folder / "summary.json").is_file()
    }
    return replace(job, policies=finished)


def forget_outdated(job: AnyJob) -> None:
    """Remove the verdict on policies of which one has come since, or was trained again. The answers
    of the others stay.
    """
    policies = job.policies
    summary = job.folder / "summary.json"
    if not (policies and job.finished):
        return
    answered_by = {name: drawn_from(job.folder / name) for name in policies}
    if policies.keys() - read_json(summary)["policies"].keys() or any(
        answered_by[name] not in (None, weights_of(folder)) for name, folder in policies.items()
    ):
        summary.unlink()


def _rows_from_pairs(job: AnyJob) -> Sequence[Any]:
    """The rows that a job takes from [pairs]: comparisons of all rounds so far, verdicts on their
    sides, or its prompts.
    """
    if job.prompts is not None:
        whole = calls_functions(job.settings)
        return load_rows(job.prompts, Prompt, Quarantine(), whole=whole)
    comparisons = [row for folder in job.pairs for row in comparisons_of(folder)]
    return comparisons if job.settings.kind is Comparison else feedback_of(comparisons)
