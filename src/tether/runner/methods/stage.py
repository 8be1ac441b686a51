"""Run of a stage: its folder is opened or continued, its rows are read, it trains, and ends with a
summary.
"""

from __future__ import annotations

import contextlib
import importlib
from dataclasses import replace
from itertools import islice

from tether.core.budget import time_limit
from tether.core.errors import RunError
from tether.core.keeping import remove, remove_left
from tether.core.locks import hold, release
from tether.core.protocols import showing
from tether.core.records import CHANGED
from tether.core.rundir import RunDirectory, file_digest, read_if_there, read_json
from tether.core.types import Alarm, Comparison, Json
from tether.data.formats.containers import left_out
from tether.data.inspection import longer_chosen
from tether.data.sources import Quarantine
from tether.models.cpu.memory import free_memory, peak_memory
from tether.runner.assembly.data.rows import fresh_quarantine, rows_of
from tether.runner.assembly.job import AnyJob
from tether.settings.section import Section
from tether.stages.learner.checkpoint import complete_checkpoints
from tether.stages.learner.ranks import ALONE, Ranks
from tether.watch.monitoring.doctor import Finding
from tether.watch.monitoring.doctor_log import check_movement


def run_stage(job: AnyJob, ranks: Ranks = ALONE) -> Json:
    """Run what is left of a stage; returns its summary, which a finished one already has.

    Raises:
        ConfigError: the section names no data, and rows are missing.
        DataError: no row can be used.
    """
    original = ranks.once(lambda: _opened(job))
    if original.complete:
        return original.summary()
    try:
        return _trained(job, original, ranks)
    finally:
        release(job.folder)
        free_memory()


def open_part(part: AnyJob, **manifest: object) -> RunDirectory:
    """The folder of a part that differs from its whole by a number, or as a student."""
    return RunDirectory.open(part.folder, part.config, **manifest)


def _trained(job: AnyJob, original: RunDirectory, ranks: Ranks) -> Json:
    """Train in a stage's folder, or in a rank's copy of it, and finish it."""
    with ranks.workplace(job.folder, original.path):
        run = RunDirectory(job.folder)
        section = job.settings
        rows = job.rows
        quarantine = fresh_quarantine(job)
        if rows is None and section.kind is not None:
            rows, quarantine = rows_of(job, section.data, section.kind)
        job = replace(job, quarantine=quarantine)
        if rows is not None:
            run.update_manifest(rows=len(rows))
        with showing(job.progress):
            summary = importlib.import_module(job.kind.method).train(job, rows, run, ranks)
        if rows and isinstance(rows[0], Comparison) and (longer := longer_chosen(rows)):
            summary["longer_chosen"] = longer.as_dict()
        if section.data is not None and (others := left_out(section.data.paths)):
            summary["files_left_out"] = dict(islice(others.items(), 100))
        return _finished(run, section, {**summary, **time_limit().summary()}, quarantine)


def _opened(job: AnyJob) -> RunDirectory:
    """The folder of a stage, which no other run works in from here on.

    Raises:
        RunError: it was begun on other rows. An evaluation knows its answers by their prompts.
    """
    sources = filter(None, (job.settings.data, *job.settings.others()))
    files = file_digest(
        [path for data in sources for path in data.paths if not path.startswith("hub:")],
    )
    before = read_if_there(job.folder / "manifest.json").get("data", {})
    run = RunDirectory.open(job.folder, job.config, data=files)
    changed = [file for file in files if before.get(file, files[file]) != files[file]]
    if changed and run.begun and not run.complete and job.kind.makes != "verdict":
        raise RunError(
            f"{changed[0]} has changed since {run.path} was begun. Put it back, or choose another run "
            "directory with run=PATH",
        )
    if run.complete:
        _tidy(run)
    else:
        hold(job.folder)
    return run


def _tidy(run: RunDirectory) -> None:
    """Remove what a process that was killed right after its summary had still to remove."""
    # another process may have finished the stage this moment, or the folder is only readable
    with contextlib.suppress(RunError, OSError):
        drop_checkpoint(run)
        remove_left(run.path, "summary.json")
        if (run.path / ".lock").exists():
            hold(run.path)
            release(run.path)


def _finished(run: RunDirectory, section: Section, summary: Json, quarantine: Quarantine) -> Json:
    """Write the summary, with what the detectors noticed and whether anything moved at all."""
    steps = run.metrics()
    alarms = run.alarms()
    if not {alarm["detector"] for alarm in alarms} & {"kl_stuck", "unmoved"}:
        still = check_movement(steps, section.learning.model_dump(mode="json"), summary)
        noticed = []
        if isinstance(still, Finding):
            noticed.append(
                Alarm(
                    detector="unmoved",
                    step=steps[-1]["step"],
                    value=1.0,
                    threshold=1.0,
                    message=f"{still.message.rstrip('.')}: {still.evidence}",
                    advice=still.advice,
                ),
            )
        # an empty file shows that the detectors ran
        run.alarm(noticed)
    if steps:
        summary["alarms"] = run.alarms()
    summary["quarantine"] = quarantine.summary()
    if quarantine.unused:
        summary["columns_not_used"] = dict(quarantine.unused)
    if changed := read_json(run.path / "manifest.json").get(CHANGED):
        summary[CHANGED] = changed
    if skipped := len(list((run.path / "skipped").glob("step-*.json"))):
        summary["steps_left_out"] = skipped
    summary |= peak_memory()
    run.finish(summary)
    drop_checkpoint(run)
    return summary


def drop_checkpoint(run: RunDirectory) -> None:
    """Delete the checkpoint of a finished run, unless several were kept."""
    if len(complete_checkpoints(run.path / "checkpoints")) < 2:
        remove(run.path / "checkpoints")
