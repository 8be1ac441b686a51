"""How a stage is run: opened or gone on with in its folder, given its rows, trained, and finished with a summary."""

from __future__ import annotations

import resource
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tether.core.config import Config
from tether.core.rundir import RunDirectory, file_digest, hold, release
from tether.core.stages import STAGES
from tether.core.types import Alarm, Comparison, Sampling
from tether.data.inspection import longer_chosen
from tether.data.sources import Quarantine
from tether.learner.loop import Progress
from tether.learner.ranks import here
from tether.models.config import ModelConfig
from tether.models.loading import LoadedModel
from tether.monitoring.doctor import Finding
from tether.monitoring.doctor_log import check_movement
from tether.run.folder import drop_checkpoint
from tether.run.models import open_model
from tether.run.rows import DataConfig, Section, load_rows, named


@dataclass(frozen=True)
class Context:
    """Where a stage stands: its folder, its model, and what it has from the stages before it.

    Args:
        name: of the section in a recipe.
        model: what the stage starts from.
        scorer: the folder of the trained model that scores.
        rows: instead of those that the section's data names.
        truth: pairs whose true order is known, to rank by a reward model; unset: those among the held-out rows.
        round, earlier: of a recipe that repeats: the number of this round, and the folders of those before it.
        policy: whoever answers to collect pairs; unset: the model.
        policies: the trained ones, by name, and how they sampled: for whoever compares them with the model.
    """

    name: str
    folder: Path
    model: ModelConfig
    seed: int
    scorer: Path | None = None
    rows: Sequence[Any] | None = None
    truth: Sequence[Comparison] | None = None
    round: int | None = None
    earlier: Sequence[Path] = ()
    policy: Path | None = None
    policies: Mapping[str, Path] = field(default_factory=dict)
    sampling: Sampling | None = None
    progress: Progress | None = None

    @property
    def root(self) -> Path:
        """The folder of the whole run."""
        return self.folder.parent if self.round is None else self.folder.parent.parent

    def load(self, run: RunDirectory) -> LoadedModel:
        """The model, whose digest is noted in the run."""
        loaded = open_model(self.model, seed=self.seed)
        run.update_manifest(**loaded.manifest())
        return loaded

    def read(self, data: DataConfig | None, kind: type, name: str = "") -> tuple[list[Any], Quarantine]:
        """Rows of a data section, and what had to be set aside."""
        name = name or self.name
        quarantine = Quarantine(self.folder / f"quarantine-{name}.jsonl")
        return load_rows(named(data, name), kind, quarantine), quarantine


def run_stage(section: Section, context: Context) -> dict[str, Any]:
    """Run what is left of a stage; returns its summary, which a finished one already has.

    Raises:
        ConfigError: the section names no data, and no rows are given.
        DataError: no row can be used.
    """
    original = here().once(lambda: _opened(section, context))
    if original.complete:
        return original.summary()
    with here().workplace(context.folder, original.path):
        run = RunDirectory(context.folder)
        rows, quarantine = context.rows, None
        if rows is None and section.kind is not None:
            rows, quarantine = context.read(section.data, section.kind)
        if rows is not None:
            run.update_manifest(rows=len(rows))
        summary = STAGES[context.name].train(section, context, rows, run)
        if rows and isinstance(rows[0], Comparison) and (longer := longer_chosen(rows)):
            summary["longer_chosen"] = longer.as_dict()
        return _finished(run, section, summary, quarantine)


def _opened(section: Section, context: Context) -> RunDirectory:
    """The folder of a stage, which no other run works in from here on."""
    local = [p for p in (section.data.paths if section.data else ()) if not p.startswith("hub:")]
    settings = {context.name: section, "model": context.model, "seed": context.seed}
    run = RunDirectory.open(context.folder, settings, data=file_digest(local))
    if not run.complete:
        hold(context.folder)
    return run


def _finished(run: RunDirectory, section: Config, summary: dict[str, Any], quarantine: Quarantine | None) -> dict[str, Any]:
    """Write the summary, with what the detectors noticed and whether anything moved at all."""
    steps, alarms = run.metrics(), run.alarms()
    if not {alarm["detector"] for alarm in alarms} & {"kl_stuck", "unmoved"}:
        still = check_movement(steps, section.model_dump(mode="json"), summary)
        findings = [still] if isinstance(still, Finding) else []
        run.alarm(Alarm("unmoved", steps[-1]["step"], 1.0, 1.0, f"{r.message} {r.evidence}", r.advice) for r in findings)
    if steps:
        summary["alarms"] = run.alarms()
    if quarantine is not None:
        summary["quarantine"] = quarantine.summary()
    if left_out := len(list((run.path / "skipped").glob("step-*.json"))):
        summary["steps_left_out"] = left_out
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    summary["peak_rss_bytes"] = peak if sys.platform == "darwin" else peak * 1024
    run.finish(summary)
    release(run.path)
    drop_checkpoint(run)
    return summary
