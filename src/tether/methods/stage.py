"""Run of a stage: its folder is opened or continued, its rows are read, it trains, and ends with a
summary.
"""

from __future__ import annotations

import contextlib
import importlib
import shutil
from collections.abc import Callable
from dataclasses import replace
from itertools import islice

from tether.build.context import Context
from tether.core.budget import BUDGET, time_limit
from tether.core.errors import RunError
from tether.core.locks import hold, release
from tether.core.protocols import showing
from tether.core.records import CHANGED
from tether.core.rundir import FORMER_DEFAULTS, RunDirectory, file_digest, read_json
from tether.core.types import Alarm, Comparison, Json
from tether.cpu.memory import free_memory, peak_memory
from tether.data.formats.containers import left_out
from tether.data.inspection import longer_chosen
from tether.data.sources import Quarantine
from tether.learner.checkpoint import complete_checkpoints
from tether.monitoring.doctor import Finding
from tether.monitoring.doctor_log import check_movement
from tether.settings.parts import StagePart
from tether.settings.section import Section, calls_functions
from tether.settings.stages import STAGES, StageKind


def method_of(kind: StageKind) -> Callable[..., Json]:
    """(section, context, rows, run directory) -> summary, with the result saved."""
    return importlib.import_module(kind.method).train


def run_stage(section: Section, context: Context) -> Json:
    """Run what is left of a stage; returns its summary, which a finished one already has.

    Raises:
        ConfigError: the section names no data, and rows are missing.
        DataError: no row can be used.
    """
    original = context.ranks.once(lambda: _opened(section, context))
    if original.complete:
        return original.summary()
    try:
        return _trained(section, context, original)
    finally:
        release(context.folder)


def run_part(part: StagePart, context: Context) -> Json:
    """Run a part as a stage of its own in the folder of its whole; returns its summary.

    Args:
        context: of the whole, with the rows and the progress of the part.
    """
    summary = run_stage(part.settings, replace(context, folder=context.folder / part.name))
    free_memory()
    return summary


def open_part(part: StagePart, context: Context, **manifest: object) -> RunDirectory:
    """The folder of a part that differs from its whole by a number, or as a student."""
    whole = {context.name: part.settings, "model": context.model, "seed": context.seed}
    return RunDirectory.open(context.folder / part.name, {**whole, **part.noted}, **manifest)


def _trained(section: Section, context: Context, original: RunDirectory) -> Json:
    """Train in a stage's folder, or in a rank's copy of it, and finish it."""
    with context.ranks.workplace(context.folder, original.path):
        run = RunDirectory(context.folder)
        rows = context.rows
        quarantine = context.fresh_quarantine(context.name)
        if rows is None and section.kind is not None:
            used = section.further_columns
            whole = calls_functions(section)
            rows, quarantine = context.read(section.data, section.kind, whole=whole, used=used)
        context = replace(context, quarantine=quarantine)
        if rows is not None:
            run.update_manifest(rows=len(rows))
        with showing(context.progress):
            summary = method_of(STAGES[context.name])(section, context, rows, run)
        if rows and isinstance(rows[0], Comparison) and (longer := longer_chosen(rows)):
            summary["longer_chosen"] = longer.as_dict()
        if section.data is not None and (others := left_out(section.data.paths)):
            summary["files_left_out"] = dict(islice(others.items(), 100))
        return _finished(run, section, {**summary, **time_limit().summary()}, quarantine)


def _opened(section: Section, context: Context) -> RunDirectory:
    """The folder of a stage, which no other run works in from here on."""
    local = [p for p in (section.data.paths if section.data else ()) if not p.startswith("hub:")]
    settings = {context.name: section, "model": context.model, "seed": context.seed}
    run = RunDirectory.open(context.folder, settings, data=file_digest(local))
    if run.complete:
        _tidy(run)
    else:
        hold(context.folder)
    return run


def _tidy(run: RunDirectory) -> None:
    """Remove what a process that was killed right after its summary had still to remove."""
    drop_checkpoint(run)
    if (run.path / ".lock").exists():
        # another process may have finished the stage this moment, or the folder is only readable
        with contextlib.suppress(RunError, OSError):
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
            alarm = Alarm(
                detector="unmoved",
                step=steps[-1]["step"],
                value=1.0,
                threshold=1.0,
                message=f"{still.message.rstrip('.')}: {still.evidence}",
                advice=still.advice,
            )
            noticed.append(alarm)
        # an empty file shows that the detectors ran
        run.alarm(noticed)
    if steps:
        summary["alarms"] = run.alarms()
    summary["quarantine"] = quarantine.summary()
    if quarantine.unused:
        summary["columns_not_used"] = dict(quarantine.unused)
    manifest = read_json(run.path / "manifest.json")
    summary |= {name: manifest[name] for name in (CHANGED, FORMER_DEFAULTS) if manifest.get(name)}
    if skipped := len(list((run.path / "skipped").glob("step-*.json"))):
        summary["steps_left_out"] = skipped
    summary |= peak_memory()
    run.finish(summary)
    drop_checkpoint(run)
    return summary


def drop_checkpoint(run: RunDirectory) -> None:
    """Delete the checkpoint of a finished run, unless a budget ended it or several were kept."""
    if len(complete_checkpoints(run.path / "checkpoints")) < 2 and BUDGET not in run.summary():
        shutil.rmtree(run.path / "checkpoints", ignore_errors=True)
