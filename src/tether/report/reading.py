"""A run's files as plain values. What is missing stays empty, what is damaged is left out and noted."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from tether.core.errors import MissingFileError, RunError
from tether.core.trend import Trend, trend

Row = dict[str, Any]
KL_KEYS = ("kl/policy_reference_k1", "reward/kl")
LONGEST_TEXT = 4000
KINDS = {"sft": "sft", "reward": "reward", "process": "reward", "direct": "direct", "kto": "direct"} | dict.fromkeys(
    ("ppo", "grpo", "reinforce", "best_of_n", "online_direct"), "policy"
)
"""What the stage of a section makes."""
# C0 and C1 controls but tab and newline, and the characters that reorder a line.
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class Estimate:
    """A number with its interval, where the run has one."""

    value: float
    low: float | None = None
    high: float | None = None
    count: int | None = None

    def contains(self, point: float) -> bool:
        """Whether the interval holds `point`; without an interval nothing is excluded."""
        return self.low is None or self.high is None or self.low <= point <= self.high


@dataclass(frozen=True, slots=True)
class SubRun:
    """One stage's run directory."""

    name: str
    metrics: Sequence[Row] = ()
    summary: Mapping[str, Any] = field(default_factory=dict)
    samples: Sequence[Row] = ()
    config: Any = None
    manifest: Any = None
    alarms: Sequence[Row] = ()


@dataclass(frozen=True, slots=True)
class Journey:
    """All that a report knows: any part may be empty."""

    name: str
    summary: Mapping[str, Any]
    pairs: Mapping[str, Any]
    sft: SubRun | None
    reward: SubRun | None
    direct: SubRun | None
    others: Sequence[SubRun]
    """Supervised stages beside those three, such as a process reward model after a reward model."""
    arms: Sequence[SubRun]
    answers: Sequence[Row]
    config: Any
    manifest: Any
    notes: Sequence[str]

    @property
    def policy(self) -> SubRun | None:
        """The arm that the report judges."""
        return self.arms[0] if self.arms else None

    @property
    def stages(self) -> list[SubRun]:
        return [*self.supervised, *self.arms]

    @property
    def supervised(self) -> list[SubRun]:
        return [stage for stage in (self.sft, self.reward, self.direct, *self.others) if stage is not None]


def read_journey(run: Path) -> Journey:
    """Read a quickstart folder or one stage's run directory.

    Raises:
        MissingFileError: the folder does not exist.
        RunError: the folder holds nothing of tether.
    """
    if not run.is_dir():
        raise MissingFileError(f"run directory not found: {run}. Give the folder of a run of tether.")
    notes: list[str] = []
    own = read_sub_run(run, notes)
    folders = {path.parent for name in ("metrics.jsonl", "summary.json") for path in run.glob(f"*/{name}") if path.is_file()}
    folders = sorted(folders, key=lambda folder: (folder.name != "ppo", folder.name))
    alone = bool(stage_kind(own)) and not folders
    stages = [own] if alone else [read_sub_run(p, notes) for p in folders]
    totals = {} if alone else own.summary
    arms = [stage for stage in stages if stage_kind(stage) == "policy"]
    if not arms and mapping(totals.get("ppo")):
        arms = [SubRun("ppo")]
    placed = [_stage(stages, kind, totals) for kind in ("sft", "reward", "direct")]
    names = {stage.name for stage in placed if stage}
    journey = Journey(
        name=run.resolve().name,
        summary=totals,
        pairs=mapping(json_of(run / "pairs" / "summary.json", notes)) or mapping(totals.get("pairs")),
        sft=placed[0],
        reward=placed[1],
        direct=placed[2],
        others=[s for s in stages if s.name not in names and stage_kind(s) in ("sft", "reward", "direct")],
        arms=[_with_summary(arm, _judged(arm.name, totals)) for arm in arms],
        answers=list(_jsonl(run / "evaluation" / "answers.jsonl", notes)),
        config=own.config,
        manifest=own.manifest,
        notes=notes,
    )
    if not (journey.stages or journey.pairs or journey.answers):
        raise RunError(
            f"{run} holds no results of tether: neither metrics.jsonl of a stage nor folders such as sft, reward or ppo "
            "with one. Give the folder of a run that has taken a step."
        )
    return journey


def stage_kind(stage: SubRun) -> str:
    """`policy`, `reward`, `direct`, `sft`, or an empty string: by its section, its metrics or its name."""
    if (section := section_of(stage)) and (stage.metrics or stage.summary):
        return KINDS[section]
    keys = {key for row in stage.metrics for key in row}
    if "reward/proxy" in keys:
        return "policy"
    if "loss" in keys:
        return "reward" if keys & {"accuracy", "margin"} else "sft"
    named = "policy" if stage.name.startswith("ppo-") else KINDS.get(stage.name, "")
    return named if stage.summary else ""


def section_of(stage: SubRun) -> str:
    """The recipe's section that the stage ran by, or an empty string."""
    sections = [key for key in mapping(stage.config) if key in KINDS]
    return sections[0] if len(sections) == 1 else ""


def _stage(stages: Sequence[SubRun], kind: str, totals: Mapping[str, Any]) -> SubRun | None:
    found = [stage for stage in stages if stage_kind(stage) == kind]
    found.sort(key=lambda s: s.name != kind)
    if found:
        return _with_summary(found[0], totals.get(kind))
    return SubRun(kind, summary=mapping(totals.get(kind))) if mapping(totals.get(kind)) else None


def _with_summary(stage: SubRun, judged: Any) -> SubRun:
    """The stage with what the whole run found out about it, gold above all, on top of its own summary."""
    return replace(stage, summary={**stage.summary, **mapping(judged)})


def _judged(name: str, totals: Mapping[str, Any]) -> dict[str, Any]:
    """An arm's entry in the summary of the whole: by the folder's name, or by what follows `ppo-`."""
    arms = mapping(totals.get("arms"))
    found = [mapping(arms.get(name)), mapping(arms.get(name.removeprefix("ppo-"))), mapping(totals.get(name))]
    return next((entry for entry in found if entry), {})


def read_sub_run(path: Path, notes: list[str]) -> SubRun:
    """One stage's run directory, as far as it can be read."""
    metrics = list(_jsonl(path / "metrics.jsonl", notes))
    if metrics and not (path / "summary.json").is_file():
        notes.append(f"{path.resolve().name}/summary.json is missing: that stage is not finished.")
    return SubRun(
        name=printable(path.resolve().name, 60),
        metrics=[*_before_the_first_step(path, notes), *metrics],
        summary=mapping(json_of(path / "summary.json", notes)),
        samples=list(_jsonl(path / "samples.jsonl", notes)) if metrics else [],
        config=json_of(path / "config.json", notes),
        manifest=json_of(path / "manifest.json", notes),
        alarms=list(_jsonl(path / "alarms.jsonl", notes)),
    )


def _before_the_first_step(path: Path, notes: list[str]) -> list[Row]:
    """What was measured on held-out prompts before training, which no step's metrics hold."""
    rows = [row for row in _jsonl(path / "heldout.jsonl", notes) if row.get("step") == 0 and "temperature" not in row]
    means = {}
    for row in rows:
        for key, values in mapping(row.get("scores")).items():
            known = [found for v in (values if isinstance(values, list) else ()) if (found := number(v)) is not None]
            means[f"{printable(row.get('name'), 40)}/{key}"] = fmean(known) if known else None
    return [{"step": 0, **means}] if means else []


def json_of(path: Path, notes: list[str]) -> Any:
    """A file of JSON; None if it is not there, or damaged, which is noted."""
    try:
        return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
    except (OSError, ValueError, RecursionError) as error:
        notes.append(f"{path.parent.resolve().name}/{path.name} is damaged and was left out ({type(error).__name__}).")
        return None


def _jsonl(path: Path, notes: list[str]) -> Iterator[Row]:
    """The rows that are whole; unlike `core.rundir.read_jsonl`, a damaged line does not hide the others."""
    if not path.is_file():
        return
    damaged = 0
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                damaged += line.endswith("\n")
                continue
            if isinstance(row, dict):
                yield row
    if damaged:
        notes.append(f"{path.parent.resolve().name}/{path.name}: {damaged} damaged line(s) left out.")


def mapping(value: Any) -> dict[str, Any]:
    """`value` if it is an object of JSON, else an empty one."""
    return value if isinstance(value, dict) else {}


def number(value: Any) -> float | None:
    """`value` if it is a finite number, else None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        return None


def estimate(value: Any) -> Estimate | None:
    """A bare number or `{value, low, high, count}`; None where there is no value."""
    parts = mapping(value)
    centre = number(parts.get("value")) if parts else number(value)
    if centre is None:
        return None
    count = number(parts.get("count"))
    return Estimate(centre, number(parts.get("low")), number(parts.get("high")), None if count is None else int(count))


def series(rows: Sequence[Row], key: str) -> tuple[list[float], list[float | None]]:
    """Steps and values of one metric, in the order written: null values stay (a gap in the line), absent keys are skipped."""
    steps: list[float] = []
    values: list[float | None] = []
    for index, row in enumerate(rows):
        if key in row:
            step = number(row.get("step"))
            steps.append(float(index) if step is None else step)
            values.append(number(row[key]))
    return (steps, values) if any(value is not None for value in values) else ([], [])


def present(rows: Sequence[Row], key: str) -> list[tuple[float, float]]:
    """Steps with values of one metric, nulls left out."""
    return [(step, value) for step, value in zip(*series(rows, key), strict=True) if value is not None]


def kl_key(rows: Sequence[Row]) -> str:
    """The metric that holds the KL of this run."""
    return next((key for key in KL_KEYS if series(rows, key)[0]), KL_KEYS[0])


def moved(rows: Sequence[Row], key: str) -> Trend | None:
    """How a metric moved over the run, by the definition that the stages' summaries have; None below four values."""
    values = [value for _, value in present(rows, key)]
    return trend(values) if len(values) >= 4 else None


def ends(rows: Sequence[Row], key: str) -> tuple[float, float] | None:
    """The mean of a metric over its first and over its last steps; None below four values."""
    found = moved(rows, key)
    return found and (found.first, found.last)


def printable(value: Any, longest: int = LONGEST_TEXT) -> str:
    """Text for people: a conversation becomes lines, control characters become visible, the rest is cut and counted."""
    if isinstance(value, list):
        value = "\n".join(f"{m.get('role', '')}: {m.get('content', '')}" if isinstance(m, dict) else str(m) for m in value)
    text = "" if value is None else str(value)
    cut = text[:longest].replace("\r\n", "\n")
    shown = _UNPRINTABLE.sub(lambda one: chr(0x2400 + ord(one[0])) if one[0] < " " else "\ufffd", cut)
    return shown if len(text) <= longest else f"{shown} … [{len(text) - longest:,} more characters]"
