"""The one reader of run directories. Missing files give empty fields. Damaged files are skipped and
noted.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from statistics import fmean

from tether.core.errors import RunError
from tether.core.keeping import entries
from tether.core.rundir import (
    ENGINE,
    EVALUATIONS,
    ROUNDS,
    TOKENS,
    in_sequence,
    is_control,
    missing_run,
)
from tether.core.types import Facts, JsonValue, Row
from tether.core.visible import visible
from tether.settings.stages import POLICIES, STAGES
from tether.settings.synonyms import shown_name
from tether.stats import Estimate, Trend, trend

KL_KEYS = ("kl/policy_reference_k1", "reward/kl")
LONGEST_TEXT = 4000
LONGEST_NAME = 255
"""Characters of a folder's name, as many as file systems allow."""
SHOWN_PAIRS = 4
KINDS = {name: kind.makes for name, kind in STAGES.items()}
"""Result kind of each section's stage."""
OWN = ("function", "verifiable", "majority")
"""Rewards of the user's own, and the control in their place."""
ROUND = {"labels", "asked", "labels_so_far", "gold_gain", "gold_after", "kl", "alarms"}
"""Entries of a loop's summary for every round."""
SUPERVISED = tuple(
    dict.fromkeys(kind.makes for kind in STAGES.values() if kind.trains and kind.makes != "policy"),
)
"""Kinds of stages that learn from rows. Rows that a policy made of its own samples before count
too.
"""


@dataclass(frozen=True)
class SubRun:
    """One stage's run directory."""

    name: str
    metrics: Sequence[Row] = ()
    summary: Facts = field(default_factory=dict)
    samples: Sequence[Row] = ()
    config: JsonValue = None
    manifest: JsonValue = None
    alarms: Sequence[Row] = ()
    tokens: Sequence[Row] = ()
    """Numbers of single tokens of a few samples of each step."""
    evaluations: Sequence[Row] = ()
    """Figures of evaluators by moment and step, without the rows that they are the means of."""
    work: Sequence[Row] = ()
    """Working times of engine servers, by step."""
    path: Path | None = None

    def estimate(self, key: str) -> Estimate | None:
        """A number of the summary."""
        return estimate(self.summary, key)

    @property
    def section(self) -> str:
        """The recipe's section that the stage ran by, or an empty string."""
        sections = [key for key in mapping(self.config) if key in KINDS]
        return sections[0] if len(sections) == 1 else ""

    @property
    def title(self) -> str:
        """The name for people: of an arm its own, else that of its method."""
        return shown_name(self.name, self.settings)

    @property
    def settings(self) -> Row:
        """The recipe's section as the stage ran by it."""
        return mapping(self.config, self.section)

    @property
    def learning(self) -> Row:
        """The settings of the training itself. Rounds have them in a separate table."""
        return mapping(self.settings, "direct") if self.kind == "rounds" else self.settings

    @property
    def rounds(self) -> list[Row]:
        """The summaries of a stage's rounds."""
        return (
            [mapping(one) for one in listed(self.summary, "rounds")]
            if self.kind == "rounds"
            else []
        )

    @property
    def judged_by_gold(self) -> bool:
        """True if a judge that training does not see scored answers of this policy."""
        return any(key.startswith("gold") for key in self.summary) or any(
            "gold/score" in row for row in self.metrics
        )

    @property
    def kind(self) -> str:
        """The kind of result that the stage makes (`settings.stages.Makes`), or an empty string: by its
        section, its metrics or its name.
        """
        if self.section and (self.metrics or self.summary):
            return KINDS[self.section]
        keys = set[str]().union(*self.metrics)
        if "reward/proxy" in keys:
            return "policy"
        if "loss" in keys:
            return "reward" if keys & {"accuracy", "margin"} else "sft"
        return KINDS.get(self.name, "") if self.summary else ""


@dataclass(frozen=True)
class Journey:
    """All that a report knows of a run: any part may be empty."""

    own: SubRun
    """The files of the run directory itself: those of the only stage, or of the whole."""
    stages: Sequence[SubRun]
    """In the order of a recipe, those too that train nothing."""
    answers: Sequence[Row]
    notes: Sequence[str]
    recipe: Row = field(default_factory=dict)
    """Recipe with the overrides of the command line."""

    @property
    def supervised(self) -> list[SubRun]:
        return [stage for stage in self.stages if stage.kind in SUPERVISED]

    @property
    def arms(self) -> list[SubRun]:
        """The policies trained online, the one that the report judges first."""
        return [stage for stage in self.stages if stage.kind == "policy"]

    @property
    def own_reward(self) -> bool:
        """True if the policies maximise a reward of the user's own and gold judges none of them.

        With gold, such a reward would be a proxy.
        """
        own = bool(self.arms) and all(arm.settings.get("reward_source") in OWN for arm in self.arms)
        return own and not any(arm.judged_by_gold for arm in self.arms)

    @property
    def trained_on(self) -> Row:
        """The number of prompts of [evaluate] that stages were trained on, as its summary has it;
        empty without any.
        """
        own = (stage.summary.get("trained_on") for stage in self.stages if stage.name == "evaluate")
        return next((mapping(one) for one in own if one), {})

    def held_out_words(self, text: str) -> str:
        """A sentence on the answers that [evaluate] judged, which are not called held-out where
        their prompts were trained on.
        """
        return re.sub(r"\b(on )?held-out ", r"\1", text) if self.trained_on else text

    @property
    def asked_for_gold(self) -> bool:
        """True if the recipe names a judge of answers."""
        judges = [mapping(arm.settings, "evaluate").get("judge") for arm in self.arms]
        return bool(self.recipe.get("evaluate")) or any(isinstance(judge, dict) for judge in judges)

    @property
    def policies(self) -> list[SubRun]:
        """All that were trained from one start: the arms first, then those that learned from
        rows.
        """
        return [
            *self.arms,
            *(stage for stage in self.stages if stage.kind in POLICIES and stage.kind != "policy"),
        ]

    @property
    def compared(self) -> list[SubRun]:
        """Of the policies those that learned from a reward, and those whose answers were judged."""
        return [stage for stage in self.policies if stage.kind == "policy" or stage.judged_by_gold]

    @property
    def judged(self) -> SubRun:
        """The policy of the verdict. An empty stage if there is none, or if its answers were not
        compared.
        """
        return next(iter(self.compared), SubRun(""))

    @property
    def main(self) -> SubRun:
        """The stage that pages measure: the judged policy, else what was trained last."""
        trained = [stage for stage in self.stages if stage.metrics]
        options = (self.judged, *self.policies, *reversed(trained))
        return next((stage for stage in options if stage.name), SubRun(""))

    def stage(self, *kinds: str) -> SubRun:
        """The first stage of these kinds; an empty one where there is none."""
        return next((stage for stage in self.stages if stage.kind in kinds), SubRun(""))


@dataclass(frozen=True)
class LoopRun:
    """A loop's rounds from its summary, the run of the last policy, and the function that judges
    answers. The function is empty if a recipe names none.
    """

    name: str
    rounds: Sequence[Row]
    last: SubRun
    notes: Sequence[str]
    judge: str = ""


def read_journey(run: Path) -> Journey:
    """Read a quickstart folder or one stage's run directory.

    Raises:
        MissingFileError: the folder does not exist.
        RunError: the folder holds nothing of tether.
    """
    if not run.is_dir():
        raise missing_run(run)
    notes: list[str] = []
    own = read_sub_run(run, notes)
    folders = set() if own.kind == "rounds" else started_stages(run)
    stages = (
        [own] if own.kind and not folders else [read_sub_run(folder, notes) for folder in folders]
    )
    journey = Journey(
        own=own,
        stages=judged_stages(stages),
        answers=answers_in(run / "evaluate", notes),
        notes=notes,
        recipe=mapping(json_of(run / "command.json", notes), "config"),
    )
    if not (any(stage.kind for stage in stages) or journey.answers):
        raise RunError(
            f"{run} holds no results of tether: neither metrics.jsonl of a stage nor folders such "
            f"as sft, reward or ppo with one. {_further_down(run)}",
        )
    return journey


def judged_stages(stages: Sequence[SubRun]) -> list[SubRun]:
    """Stages in the order of a recipe, each with what [evaluate] says of it."""
    compared = next(
        (mapping(stage.summary, "policies") for stage in stages if stage.kind == "verdict"),
        {},
    )
    whole = [
        replace(
            stage,
            summary={
                **stage.summary,
                **(mapping(compared, stage.name) or _judged_in_training(stage.summary)),
            },
        )
        for stage in stages
    ]
    return sorted(whole, key=turn)


def _judged_in_training(summary: Facts) -> Row:
    """The figures of a judge other than the reward during training, also under the names of [evaluate]."""
    block = mapping(summary, "test") or mapping(summary, "gold")
    figures = {**block, **mapping(block, "score")}
    return {**block, **{f"gold_{name}": figures[name] for name in figures}}


def answers_in(folder: Path, notes: list[str]) -> list[Row]:
    """The answers that an [evaluate] in this folder judged."""
    return list(_jsonl(folder / "answers.jsonl", notes))


def _further_down(run: Path) -> str:
    """Advice for a folder without a run: the runs inside it, if there are any."""
    inside = [
        str(path.parent)
        for depth in ("*/*", "*/*/*")
        for path in entries(run, f"{depth}/metrics.jsonl")
    ]
    if not inside:
        return "Give the folder of a run that has taken a step."
    return (
        "Give the folder of a run, such as "
        f"{inside[0]}{f' ({len(inside)} lie in this one)' if len(inside) > 1 else ''}."
    )


def started_stages(run: Path) -> set[Path]:
    """The stages in a run that have taken a step; of a recipe that repeats those of its last
    round.
    """
    rounds = entries(run, ROUNDS)
    return {
        home / path.relative_to(home).parts[0]
        for home in (run, *rounds[-1:])
        for inside in ("metrics.jsonl", "summary.json", f"{ROUNDS}/metrics.jsonl")
        for path in entries(home, f"*/{inside}")
    } - {*rounds}


def read_loop(run: Path) -> LoopRun | None:
    """The loop in a run directory; None if something else, or nothing finished, is there."""
    notes: list[str] = []
    summary = mapping(json_of(run / "summary.json", notes))
    rounds = listed(summary, "rounds")
    if (
        not rounds
        or "policy" not in summary
        or not all(mapping(one).keys() >= ROUND for one in rounds)
    ):
        return None
    last = read_sub_run((run / summary["policy"]).parent, notes)
    recipe = run / "command.json"
    config = mapping(json_of(recipe, notes)) if recipe.is_file() else {}
    evaluate = mapping(config, "config", "evaluate")
    judge = printable(mapping(evaluate, "judge").get("call") or "", 60)
    return LoopRun(run.resolve().name, rounds, last, notes, judge)


def turn(stage: SubRun) -> tuple[int, str]:
    """For ordering: when a recipe runs a stage."""
    names = (stage.section, stage.name.partition("-")[0])
    order = list(STAGES)
    return next((order.index(name) for name in names if name in order), len(order)), stage.name


def read_sub_run(path: Path, notes: list[str]) -> SubRun:
    """One stage's run directory, as far as it can be read."""
    rounds = entries(path, f"{ROUNDS}/metrics.jsonl")
    metrics = [*_jsonl(path / "metrics.jsonl", notes)] or in_sequence(
        [[*_jsonl(file, notes)] for file in rounds],
    )
    name = path.resolve().name
    if metrics and not (path / "summary.json").is_file():
        notes.append(f"{name}/summary.json is missing: that stage is not finished.")
    summary = mapping(json_of(path / "summary.json", notes))
    return SubRun(
        name=printable(name, LONGEST_NAME),
        metrics=[*_before_the_first_step(path, summary, notes), *metrics],
        summary=summary,
        samples=[*_jsonl(path / "samples.jsonl", notes), *_sampled_pairs(rounds, notes)]
        if metrics
        else [],
        config=json_of(path / "config.json", notes),
        manifest=json_of(path / "manifest.json", notes),
        alarms=list(_jsonl(path / "alarms.jsonl", notes)),
        tokens=list(_jsonl(path / TOKENS, notes)),
        evaluations=[
            {**row, "rows": None, "groups": None} for row in _jsonl(path / EVALUATIONS, notes)
        ],
        work=list(_jsonl(path / ENGINE / "work.jsonl", notes)),
        path=path,
    )


def _sampled_pairs(rounds: Sequence[Path], notes: list[str]) -> Iterator[Row]:
    """The first pairs of each round, as samples of a step are."""
    for number, file in enumerate(rounds, 1):
        for row in islice(_jsonl(file.with_name("pairs.jsonl"), notes), SHOWN_PAIRS):
            texts = {name: _alone(row.get(name)) for name in ("prompt", "chosen", "rejected")}
            yield {"step": number, "response": texts["chosen"], **texts}


def _alone(turns: JsonValue) -> str:
    """Turns for people; of a single one its text without the role."""
    return printable(
        turns[0].get("content")
        if len(listed(turns)) == 1 and isinstance(turns[0], dict)
        else turns,
    )


def _before_the_first_step(path: Path, summary: Facts, notes: list[str]) -> list[Row]:
    """The row of step 0: measurements on held-out prompts or rows before training, which the metrics
    of no step hold.
    """
    rows = [
        row
        for row in _jsonl(path / "heldout.jsonl", notes)
        if row.get("step") == 0 and not is_control(row)
    ]
    before = "eval_loss_before"
    means: Row = {"eval_loss": summary[before]} if before in summary else {}
    for row in rows:
        for key, values in mapping(row, "scores").items():
            scores = [score for value in listed(values) if (score := finite(value)) is not None]
            means[f"{printable(row.get('name'), 40)}/{key}"] = fmean(scores) if scores else None
    return [{"step": 0, **means}] if means else []


def json_of(path: Path, notes: list[str]) -> JsonValue:
    """A file of JSON; None if it is not there, or damaged, which is noted."""
    try:
        return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
    except (OSError, ValueError, RecursionError) as error:
        notes.append(
            f"{path.parent.resolve().name}/{path.name} is damaged and was left out "
            f"({type(error).__name__}).",
        )
        return None


def _jsonl(path: Path, notes: list[str]) -> Iterator[Row]:
    """The rows that are whole; unlike `core.rundir.read_jsonl`, a damaged line does not hide the
    others.
    """
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
            else:
                damaged += 1
    if damaged:
        notes.append(
            f"{path.parent.resolve().name}/{path.name}: {damaged} damaged line(s) left out.",
        )


def inside(value: object, path: Sequence[str]) -> JsonValue:
    """The part of an object of JSON at this path; None where nothing is."""
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def mapping(value: object, *path: str) -> Row:
    """`value`, or its part at this path, if that is an object of JSON, else an empty one."""
    part = inside(value, path)
    return part if isinstance(part, dict) else {}


def listed(value: object, *path: str) -> list[JsonValue]:
    """`value`, or its part at this path, if that is an array of JSON, else an empty one."""
    part = inside(value, path)
    return part if isinstance(part, list) else []


def finite(value: object, *path: str) -> float | None:
    """`value`, or its part at this path, if that is a finite number, else None."""
    number = inside(value, path)
    if not isinstance(number, int | float) or isinstance(number, bool):
        return None
    return float(number) if abs(number) <= sys.float_info.max else None


def estimate(value: object, *path: str) -> Estimate | None:
    """An estimate from a bare number or from `{value, low, high, count}`, at this path in `value`;
    None where there is no value.

    Bounds that were not recorded are NaN, as `Estimate.as_dict` writes NaN as null; a count that
    was not recorded is 0, and a reason empty.
    """
    value = inside(value, path)
    if isinstance(value, Estimate):
        return value
    parts = value if isinstance(value, dict) else {"value": value}
    centre, low, high, count = (finite(parts, name) for name in ("value", "low", "high", "count"))
    if centre is None:
        return None
    low, high = (math.nan if bound is None else bound for bound in (low, high))
    return Estimate(centre, low, high, int(count or 0), printable(parts.get("reason"), 200))


def series(rows: Sequence[Row], key: str) -> list[tuple[float, float | None]]:
    """Steps with values of one metric, as written: null values stay (a gap in the line), absent
    keys are skipped.
    """
    numbered = ((index, row.get("step"), row[key]) for index, row in enumerate(rows) if key in row)
    points = [
        (float(index) if (at := finite(step)) is None else at, finite(value))
        for index, step, value in numbered
    ]
    return points if any(value is not None for _, value in points) else []


def present(rows: Sequence[Row], key: str) -> list[tuple[float, float]]:
    """Steps with values of one metric, nulls left out."""
    return [(step, value) for step, value in series(rows, key) if value is not None]


def trend_of(rows: Sequence[Row], *keys: str) -> Trend | None:
    """The movement of the first of these metrics that the run has, as stages' summaries have it;
    None below four values.
    """
    values = next(
        (values for key in keys if (values := [value for _, value in present(rows, key)])),
        [],
    )
    return trend(values) if len(values) >= 4 else None


def printable(value: object, longest: int = LONGEST_TEXT) -> str:
    """Text for people: a conversation becomes lines, control characters become visible, the rest is
    cut and counted.
    """
    if isinstance(value, list):
        value = "\n".join(
            f"{m.get('role', '')}: {m.get('content', '')}" if isinstance(m, dict) else str(m)
            for m in value
        )
    return visible("" if value is None else str(value), longest)


def turn_texts(value: object) -> list[Row]:
    """The turns of an episode for people: the role, what is said, the calls, the reward."""
    return [
        {
            "role": printable(turn.get("role"), 60),
            "name": printable(turn.get("name"), 60),
            "texts": [printable(turn.get(name)) for name in ("reasoning_content", "content")],
            "calls": [
                printable(f"{function.get('name')}({json.dumps(function.get('arguments'))})")
                for call in listed(turn.get("tool_calls"))
                for function in [mapping(mapping(call).get("function"))]
            ],
            "reward": finite(turn.get("reward")),
        }
        for turn in map(mapping, listed(value))
    ]
