"""What every stage of a journey begins and ends with: its folder, its rows, its summary."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from tether.assemble import DataConfig, load_rows
from tether.core.config import Config, parts
from tether.core.errors import ConfigError, MissingFileError, RunError
from tether.core.rundir import RunDirectory, file_digest, hold, read_json, release, write_json
from tether.core.stopping import run_of
from tether.core.types import Alarm, Comparison, Demonstration, Feedback, Problem, Prompt, StepLabels
from tether.data.sources import Quarantine, look
from tether.learner.checkpoint import complete_checkpoints
from tether.learner.config import OptimizerConfig
from tether.models.config import ModelConfig
from tether.monitoring.doctor import Finding
from tether.monitoring.stillness import moved
from tether.pipelines.measured import peak_rss_bytes

ConfigT = TypeVar("ConfigT", bound=Config)


def open_stage(
    folder: Path, name: str, section: ConfigT, model: ModelConfig, seed: int
) -> tuple[ConfigT, RunDirectory, dict[str, Any] | None]:
    """Its section as the stage was begun with, its run directory, and its summary if it is complete."""
    data: DataConfig | None = getattr(section, "data", None)
    local = [p for p in (data.paths if data else ()) if not p.startswith("hub:")]
    section = as_begun(section, folder, name)
    run = RunDirectory.open(folder, {name: section, "model": model, "seed": seed}, data=file_digest(local))
    if run.complete:
        return section, run, run.summary()
    hold(folder)
    return section, run, None


def as_begun(config: ConfigT, folder: Path, name: str = "") -> ConfigT:
    """The same settings, with the learning rates that a run in `folder` began with where nobody names any.

    Those are defaults, which may be others in the tether that began it.
    """
    path = folder / "config.json"
    if not (path.is_file() and RunDirectory(folder).begun):
        return config
    before = read_json(path)
    return _with_rates(config, before.get(name) if name else before)


def _with_rates(config: ConfigT, before: Any) -> ConfigT:
    if not isinstance(before, dict):
        return config
    inner = {name: value for name, value in parts(config).items() if isinstance(value, Config)}
    changes: dict[str, Any] = {name: _with_rates(value, before.get(name)) for name, value in inner.items()}
    changes = {name: value for name, value in changes.items() if value is not inner[name]}
    if isinstance(config, OptimizerConfig) and "learning_rate" not in config.model_fields_set and before.get("learning_rate"):
        changes["learning_rate"] = before["learning_rate"]
    return config.model_copy(update=changes) if changes else config


GROWING = {"run", "arms", "seeds", "proxies", "loop"}
"""What of a study may change from one start to the next."""


def remember(root: Path, command: str, config: Config, stages: Sequence[str] = ()) -> None:
    """Note in `root` what was started there, for `tether resume`.

    From here on no other process works in `root`. What contradicts a run that has begun there is not noted: the run will say what
    differs, and the note stays right.
    """
    root.mkdir(parents=True, exist_ok=True)
    hold(root)
    path, settings = root / "command.json", config.model_dump(mode="json", exclude_unset=True)
    before = read_json(path) if path.is_file() else {"command": command, "config": settings}
    begun = [name for name in before.get("stages", ()) if (root / name / "config.json").is_file()]
    fixed = ("model", "seed", *begun) if begun else () if stages else set(settings) - GROWING
    same = all(before["config"].get(name) == settings.get(name) for name in fixed)
    if same and before["command"] == command:
        write_json(path, {"command": command, "stages": [*dict.fromkeys((*begun, *stages))], "config": settings})


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
        f"{place} is not in a run directory that a command of tether made. Give such a folder; a run that your own code opened "
        "goes on when that code runs again."
    )


def rows_of(
    given: Sequence[Any] | None, data: DataConfig | None, kind: type, run: RunDirectory, name: str
) -> tuple[Sequence[Any], Quarantine | None]:
    """What was given, or the rows of its data and what had to be set aside."""
    if given is not None:
        return given, None
    data = named(data, name)
    quarantine = Quarantine(run.path / f"quarantine-{name}.jsonl")
    return load_rows(data, kind, quarantine), quarantine


def named(data: DataConfig | None, name: str) -> DataConfig:
    """A section's data; ConfigError where it names none."""
    if data is None:
        raise ConfigError(f"the [{name}] section names no data: set {name}.data.path")
    return data


def check_data(name: str, section: Any) -> None:
    """A few rows of all that a stage will read, as what it will read them; nothing is kept.

    Raises:
        ConfigError: it needs data and names none.
        DataError: a file holds something else.
    """
    online = Problem if getattr(section, "verifiable", None) is not None else Prompt
    kinds = {"sft": Demonstration, "reward": Comparison, "process": StepLabels, "direct": Comparison, "kto": Feedback}
    kind = Demonstration if getattr(section, "method", "") == "spin" else kinds.get(name, online)
    more = getattr(getattr(section, "evaluate", None), "data", None)
    others = [*getattr(section, "test", {}).values(), *([more] if isinstance(more, DataConfig) else ())]
    if objectives := getattr(section, "objectives", None) if name == "reward" else None:
        own = list(objectives.values())
    else:
        own = [] if getattr(section, "task", None) is not None else [named(section.data, name)]
    for data in (*own, *others):
        look(data.paths, kind, format=data.format, strict=data.strict)


def finish_stage(run: RunDirectory, section: Config, summary: dict[str, Any], quarantine: Quarantine | None) -> dict[str, Any]:
    """Write the summary, with what the detectors noticed and whether anything moved at all."""
    steps, alarms = run.metrics(), run.alarms()
    if not {alarm["detector"] for alarm in alarms} & {"kl_stuck", "unmoved"}:
        still = [r for r in moved(steps, section.model_dump(mode="json"), summary) if isinstance(r, Finding)]
        run.alarm(Alarm("unmoved", steps[-1]["step"], 1.0, 1.0, f"{r.message} {r.evidence}", r.advice) for r in still)
    summary["alarms"] = run.alarms()
    if quarantine is not None:
        summary["quarantine"] = quarantine.summary()
    if left_out := len(list((run.path / "skipped").glob("step-*.json"))):
        summary["steps_left_out"] = left_out
    summary["peak_rss_bytes"] = peak_rss_bytes()
    run.finish(summary)
    release(run.path)
    drop_checkpoint(run)
    return summary


def drop_checkpoint(run: RunDirectory) -> None:
    """The one of a finished run has had its day; several were asked for."""
    if len(complete_checkpoints(run.path / "checkpoints")) < 2:
        shutil.rmtree(run.path / "checkpoints", ignore_errors=True)
