"""A list of evaluators before, along and after training, each compared with the start."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NotRequired, TypedDict

from tether.core.errors import ConfigError
from tether.core.protocols import Engine, Evaluator, now_doing
from tether.core.rundir import EVALUATIONS, append_jsonl, read_jsonl
from tether.data.chat import ChatEncoder
from tether.evaluation.winrate import gain
from tether.models.trunk import Role
from tether.stats import TOO_FEW, Estimate, EstimateFields, without_interval

Moment = Literal["before", "along", "after"]
MOMENTS: tuple[Moment, ...] = ("before", "along", "after")
Rows = Mapping[str, Mapping[str, float | None]]
"""By figure: a value for each row's id; None where measuring the row failed."""


@dataclass(frozen=True)
class MeasuredPolicy:
    """A policy as evaluators use it: its role gives log-probabilities, its engine answers.

    One object is one state of the weights: evaluators share answers that one of them drew.
    """

    role: Role
    encoder: ChatEncoder
    engine: Engine


PolicyEvaluator = Evaluator[MeasuredPolicy, Estimate]


class Figures(dict[str, Estimate]):
    """Estimates by name; with `rows`, what each figure is the mean of, so that two policies are
    compared row by row.

    Args:
        groups: by a row's id the prompt that it belongs to, where several rows have one prompt.
    """

    def __init__(
        self,
        estimates: Mapping[str, Estimate],
        rows: Rows | None = None,
        groups: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(estimates)
        self.rows: Rows = rows or {}
        self.groups = dict(groups or {})


def row_names(names: Sequence[str]) -> list[str]:
    """The names themselves; numbered (`a.0`, `a.1`) if one of them names several rows."""
    if len(set(names)) == len(names):
        return list(names)
    seen: Counter[str] = Counter()
    numbered = []
    for name in names:
        numbered.append(f"{name}.{seen[name]}")
        seen[name] += 1
    return numbered


def by_row(ids: Sequence[str], columns: Mapping[str, Sequence[float | None]]) -> Rows:
    """The values of each figure under the names of their rows, none of which is lost."""
    names = row_names(ids)
    return {figure: dict(zip(names, column, strict=True)) for figure, column in columns.items()}


class FigureChange(TypedDict):
    """Distance of a figure above that of the start; `paired` where the same rows were compared."""

    difference: EstimateFields
    paired: bool


class Record(TypedDict):
    """A line of evaluations.jsonl: what one evaluator measured at one moment.

    `policy` names it where a stage compares several.
    """

    evaluator: str
    moment: Moment
    step: int
    figures: dict[str, EstimateFields]
    rows: dict[str, dict[str, float | None]]
    groups: NotRequired[dict[str, str]]
    policy: NotRequired[str]
    change: NotRequired[dict[str, FigureChange]]


class Suite:
    """Runs evaluators on a policy and compares each measure with that of the start.

    Args:
        folder: of evaluations.jsonl. A resumed run does not repeat measures in that file. None:
            nothing is written.
        moments: by an evaluator's name the moments at which it is run; unset: all.

    Raises:
        ConfigError: two evaluators have one name.
    """

    def __init__(
        self,
        evaluators: Sequence[PolicyEvaluator],
        folder: Path | None = None,
        *,
        moments: Mapping[str, Collection[Moment]] | None = None,
    ) -> None:
        names = [evaluator.name for evaluator in evaluators]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ConfigError(f"two evaluators are called {twice!r}. Name each once")
        self.evaluators = dict(zip(names, evaluators, strict=True))
        self.moments = moments or {}
        self.file = None if folder is None else folder / EVALUATIONS
        self._unwritten: list[Record] = []

    @property
    def records(self) -> list[Record]:
        """All measures so far. The file is read anew: a training that goes on cuts it."""
        if self.file is None:
            return self._unwritten
        # lines that `as_record` wrote
        return [Record(**line) for line in read_jsonl(self.file)]

    def due(self, moment: Moment) -> list[str]:
        """The names of the evaluators that are run at a moment."""
        return [name for name in self.evaluators if moment in self.moments.get(name, MOMENTS)]

    def measure(self, policy: MeasuredPolicy, step: int, moment: Moment) -> list[Record]:
        """Measures by all evaluators that are due at a moment; those at "before" are of the start,
        with which all later ones are compared.
        """
        return [self.one(name, policy, step, moment) for name in self.due(moment)]

    def one(self, name: str, policy: MeasuredPolicy, step: int, moment: Moment) -> Record:
        """The measure of one evaluator: taken, compared with the start and written."""
        own = [record for record in self.records if record["evaluator"] == name]
        for record in own:
            if (record["moment"], record["step"]) == (moment, step):
                return record
        now_doing(f"evaluating {name}")
        record = as_record(name, moment, step, self.evaluators[name](policy, step))
        note_changes(own, record)
        if self.file is None:
            self._unwritten.append(record)
        else:
            append_jsonl(self.file, [record])
        return record


def as_record(name: str, moment: Moment, step: int, measured: Mapping[str, Estimate]) -> Record:
    """Figures and rows of an evaluator, as a line of the file."""
    rows = measured.rows if isinstance(measured, Figures) else {}
    groups = measured.groups if isinstance(measured, Figures) else {}
    record = Record(
        evaluator=name,
        moment=moment,
        step=step,
        figures={figure: estimate.as_dict() for figure, estimate in measured.items()},
        rows={figure: dict(values) for figure, values in rows.items()},
    )
    return {**record, "groups": groups} if groups else record


def note_changes(starts: Sequence[Record], record: Record) -> None:
    """Note in a record its changes from that of the start, if this is among `starts`."""
    for start in starts:
        if (start["evaluator"], start["moment"]) == (record["evaluator"], "before"):
            record["change"] = changes(start, record)


def changes(start: Record, now: Record) -> dict[str, FigureChange]:
    """Distance above the start of each figure that both have.

    If both measured the same rows, the interval is over rows. Else it is that of two independent
    estimates. If some rows are common, it is rather too wide.
    """
    result = {}
    prompts = now.get("groups", {})
    for name, fields in now["figures"].items():
        if (first := start["figures"].get(name)) is None:
            continue
        own, other = (record["rows"].get(name) for record in (now, start))
        paired = None
        if own and other and own.keys() == other.keys():
            groups = [prompts.get(row, row) for row in own]
            paired = gain([other[row] for row in own], list(own.values()), groups)
        difference = apart(estimate_of(first), estimate_of(fields)) if paired is None else paired
        result[name] = FigureChange(difference=difference.as_dict(), paired=paired is not None)
    return result


def estimate_of(fields: EstimateFields) -> Estimate:
    """The estimate that these fields were written from."""
    value = fields["value"]
    low = fields["low"]
    high = fields["high"]
    return Estimate(
        math.nan if value is None else value,
        -math.inf if low is None else low,
        math.inf if high is None else high,
        fields["count"],
        fields.get("reason", ""),
    )


def apart(first: Estimate, second: Estimate) -> Estimate:
    """The second less the first, from two independent estimates.

    Equation: ``d − √((v_2 − l_2)² + (h_1 − v_1)²) … d + √((h_2 − v_2)² + (v_1 − l_1)²)``.
    Paper: Zou and Donner 2008, https://doi.org/10.1002/sim.3095.
    """
    value = second.value - first.value
    count = min(first.count, second.count)
    if reason := first.reason or second.reason:
        return without_interval(value, count, reason.removeprefix(f"{TOO_FEW} "))
    low = value - math.hypot(second.value - second.low, first.high - first.value)
    high = value + math.hypot(second.high - second.value, first.value - first.low)
    return Estimate(value, low, high, count)
