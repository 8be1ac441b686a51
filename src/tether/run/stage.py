"""Run of a stage: its folder is opened or continued, it is given its rows, trained, and finished
with a summary.

The second part concerns the folder of the whole run: the stages started in it, and the inputs of
its stages.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

from tether.core.budget import BUDGET, time_limit
from tether.core.errors import MissingFileError, RunError
from tether.core.locks import hold, release
from tether.core.names import file_part
from tether.core.once import once
from tether.core.protocols import showing
from tether.core.records import CHANGED
from tether.core.rundir import RunDirectory, environment, file_digest, read_json, write_json
from tether.core.stages import STAGES
from tether.core.stopping import run_of
from tether.core.types import Alarm, Comparison, Json, Sampling
from tether.cpu.memory import peak_memory
from tether.data.formats.containers import left_out
from tether.data.inspection import longer_chosen
from tether.data.sources import UNUSED_COLUMNS, Quarantine
from tether.learner.checkpoint import complete_checkpoints
from tether.learner.loop import Progress
from tether.learner.ranks import here
from tether.models.loading import LoadedModel
from tether.monitoring.doctor import Finding
from tether.monitoring.doctor_log import check_movement
from tether.run.models import open_model
from tether.run.rows import PACKAGED, DataConfig, Section, calls_functions, load_rows, named
from tether.settings.config import Config
from tether.settings.model import ModelConfig


@dataclass(frozen=True)
class Context:
    """Inputs of a stage: its folder, its model, and the results of the stages before it.

    Args:
        name: of the section in a recipe.
        model: what the stage starts from.
        scorer: the folder of the trained model that scores.
        rows: instead of those that the section's data names.
        truth: pairs whose true order is known, to rank by a reward model; unset: those among the
            held-out rows.
        round, earlier: of a recipe that repeats: the number of this round, and the folders of those
            before it.
        policy: the folder of the policy that answers to collect pairs; unset: the model.
        policies, sampling: the folders of trained policies by name, and their sampling, to compare
            them with the model.
        trained: the digests of the prompts in the rows of each stage that trains, to count those
            that an evaluation shares with them.
        quarantine: rows and prompts that the stage cannot use, for its summary.
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
    trained: Mapping[str, frozenset[str]] = field(default_factory=dict)
    progress: Progress | None = None
    quarantine: Quarantine = field(default_factory=Quarantine)

    @property
    def root(self) -> Path:
        """The folder of the whole run."""
        return self.folder.parent if self.round is None else self.folder.parent.parent

    @property
    def sampler(self) -> str:
        """The name of the model that answers; a folder of the run as seen from there, since it
        moves along.
        """
        place = Path(self.policy or self.model.source)
        return str(place.relative_to(self.root) if place.is_relative_to(self.root) else place)

    def load(self, run: RunDirectory) -> LoadedModel:
        """The model, whose digest is noted in the run."""
        loaded = open_model(self.model, seed=self.seed)
        note_machine(run, loaded)
        return loaded

    def read(
        self,
        data: DataConfig | None,
        kind: type,
        name: str = "",
        *,
        whole: bool = False,
        used: Iterable[str] = (),
    ) -> tuple[list[Any], Quarantine]:
        """Rows of a data section, and what had to be set aside; `whole` as in `load_rows`. `used`
        names more columns in use.
        """
        name = name or self.name
        quarantine = self.fresh_quarantine(name)
        rows = load_rows(named(data, name), kind, quarantine, whole=whole)
        for column in used:
            del quarantine.unused[column]
        packaged = data is not None and all(Path(path).parent == PACKAGED for path in data.paths)
        # of the rows that come with tether ids and kinds are for people
        if quarantine.unused and not packaged:
            once(
                logging.getLogger("tether.data").warning,
                UNUSED_COLUMNS,
                f"[{name}]",
                quarantine.unused_columns(),
            )
        return rows, quarantine

    def fresh_quarantine(self, name: str) -> Quarantine:
        """An empty one, with a file in the stage's folder: a stage that goes on reads all rows
        again.
        """
        path = self.folder / f"quarantine-{file_part(name)}.jsonl"
        path.unlink(missing_ok=True)
        return Quarantine(path)


def note_machine(run: RunDirectory, loaded: LoadedModel, **more: Any) -> None:
    """Write into the manifest what a stage computes with; of a stage that goes on with something
    else, the model notes what.
    """
    before, now = read_json(run.path / "manifest.json"), loaded.manifest()
    pairs = zip(_decisive(before), _decisive({**environment(), **now}), strict=True)
    if changes := [f"{new} after {old}" for old, new in pairs if old and old != new]:
        loaded.note(
            f"{run.path.name} goes on with {'; '.join(changes)}: numbers are rounded otherwise "
            "from here on, and the end is not "
            "that of a run in one go (docs/determinism.md)"
        )
    run.update_manifest(**now, **more)


def _decisive(noted: Mapping[str, Any]) -> list[str]:
    """The part of a manifest that decides how numbers are rounded, in words; empty ones where it
    says nothing.
    """
    model, threads, kernels = noted.get("model"), noted.get("threads"), noted.get("cpu_kernels")
    own = [name for name in kernels or () if name != "allocator"]  # which rounds nothing
    return [
        f"torch {noted.get('packages', {}).get('torch')}",
        f"{noted.get('processor')}",
        f"{threads} thread{'s' * (threads != 1)}" if threads else "",
        f"{model['dtype']} on {model['device']}" if model else "",
        ""
        if kernels is None
        else f"CPU kernels for {' and '.join(own)}"
        if own
        else "no CPU kernels",
    ]


def run_stage(section: Section, context: Context) -> dict[str, Any]:
    """Run what is left of a stage; returns its summary, which a finished one already has.

    Raises:
        ConfigError: the section names no data, and no rows are given.
        DataError: no row can be used.
    """
    original = here().once(lambda: _opened(section, context))
    if original.complete:
        return original.summary()
    try:
        return _trained(section, context, original)
    finally:
        release(context.folder)


def _trained(section: Section, context: Context, original: RunDirectory) -> Json:
    """Train in a stage's folder, or in a rank's copy of it, and finish it."""
    with here().workplace(context.folder, original.path):
        run = RunDirectory(context.folder)
        rows, quarantine = context.rows, context.fresh_quarantine(context.name)
        if rows is None and section.kind is not None:
            used, whole = section.further_columns, calls_functions(section)
            rows, quarantine = context.read(section.data, section.kind, whole=whole, used=used)
        context = replace(context, quarantine=quarantine)
        if rows is not None:
            run.update_manifest(rows=len(rows))
        with showing(context.progress):
            summary = STAGES[context.name].train(section, context, rows, run)
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


def _finished(
    run: RunDirectory, section: Section, summary: dict[str, Any], quarantine: Quarantine
) -> dict[str, Any]:
    """Write the summary, with what the detectors noticed and whether anything moved at all."""
    steps, alarms = run.metrics(), run.alarms()
    if not {alarm["detector"] for alarm in alarms} & {"kl_stuck", "unmoved"}:
        still = check_movement(steps, section.learning.model_dump(mode="json"), summary)
        findings = [still] if isinstance(still, Finding) else []
        words = [(f"{r.message.rstrip('.')}: {r.evidence}", r.advice) for r in findings]
        run.alarm(
            Alarm("unmoved", steps[-1]["step"], 1.0, 1.0, message, advice)
            for message, advice in words
        )
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


def remember(root: Path, recipe: Config, stages: Sequence[str]) -> None:
    """Note in `root` what was started there, for `tether resume`.

    From here on no other process works in `root`, until `release`. What contradicts a run that has
    begun there is not noted: the run will say what differs, and the note stays right.
    """
    root.mkdir(parents=True, exist_ok=True)
    hold(root)
    path, settings = root / "command.json", recipe.model_dump(mode="json", exclude_unset=True)
    before = read_json(path) if path.is_file() else {"stages": (), "config": settings}
    begun = [name for name in before["stages"] if (root / name / "config.json").is_file()]
    fixed = ("model", "seed", *begun) if begun else ()
    if all(_lasting(before["config"].get(name)) == _lasting(settings.get(name)) for name in fixed):
        write_json(
            path,
            {
                "command": "stages",
                "stages": [*dict.fromkeys((*begun, *stages))],
                "config": settings,
            },
        )


def _lasting(settings: Any) -> Any:
    """The settings of a section that stay from start to start."""
    return (
        {key: value for key, value in settings.items() if key != BUDGET}
        if isinstance(settings, dict)
        else settings
    )


def remembered(place: Path) -> tuple[Path, dict[str, Any]]:
    """The run directory that `place` is or lies in, and what was started there.

    Raises:
        RunError: nothing was, by tether's command line.
    """
    if not place.exists():
        raise MissingFileError(f"{place} does not exist. Give the folder of a run")
    if (root := run_of(place)) is not None:
        return root, read_json(root / "command.json")
    raise RunError(
        f"{place} is not in a run directory that a command of tether made. Give such a folder; a "
        "run that your own code opened "
        "goes on when that code runs again."
    )


def round_folder(root: Path, number: int | None) -> Path:
    """Folder of a round's stages; without rounds, the run's own folder."""
    return root if number is None else root / f"round-{number:02d}"


def check_base(root: Path, folder: Path) -> None:
    """A stage that has begun, or sampled answers, stands on the SFT model that is there now.

    Raises:
        RunError: it was trained on one that is gone.
    """
    start, own = (place / "manifest.json" for place in (root / "sft", folder))
    run = RunDirectory(folder)
    if (run.begun or run.answered) and start.is_file() and own.is_file():
        made = read_json(start).get("result", {}).get("digest")
        stood_on = read_json(own).get("model", {}).get("digest")
        if made and stood_on and made != stood_on:
            raise RunError(
                f"{folder} was trained on another SFT model than the one that is in "
                f"{root / 'sft'} now. Delete "
                f"{folder} to train it again, and every stage that stands on it."
            )


def drop_checkpoint(run: RunDirectory) -> None:
    """The one of a finished run has had its day, unless time ended it; several were asked for."""
    if len(complete_checkpoints(run.path / "checkpoints")) < 2 and BUDGET not in run.summary():
        shutil.rmtree(run.path / "checkpoints", ignore_errors=True)
