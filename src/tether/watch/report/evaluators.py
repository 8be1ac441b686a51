"""Figures of evaluators before, along and after a training, each with its interval: a table and
curves.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from tether.stats import Estimate
from tether.watch.report.numbers import SENTENCES, bracketed, decimal, has_interval, signed
from tether.watch.report.plotting import FRAMES, PALETTE, Plot, Trace, framed
from tether.watch.report.reading import SubRun, estimate, finite, mapping, printable

COLUMNS = ("figure", "before", "along", "after", "change")
MOST_CURVES = 3
"""Curves of one evaluator; its table has all figures."""
SHOWN_ELSEWHERE = "held_out", "kl", "decoding", "best_of_n"
"""Evaluators whose figures a sweep's page shows as gains, KL and controls."""
FIGURE_NAMES = SENTENCES["evaluated"]
ABILITIES = {"multiple_choice": ("acc", "acc_norm", "ece"), "short_answers": ("accuracy",)}
"""By evaluator the figures of what a model can do, whose fall is the alignment tax. A page with only
a few figures shows them before the others.
"""


class Measurement(NamedTuple):
    """A figure at one moment; `policy` names it where a stage compares several, and `change` is its
    distance above the start, in words.
    """

    policy: str
    evaluator: str
    figure: str
    moment: str
    step: float
    value: Estimate
    change: str


def measurements(stage: SubRun) -> Iterator[Measurement]:
    """The figures that a stage's evaluators measured, in their order."""
    for record in stage.evaluations:
        evaluator, policy, moment = (
            printable(record.get(name), 60) for name in ("evaluator", "policy", "moment")
        )
        changes = mapping(record, "change")
        for name, fields in mapping(record, "figures").items():
            change = mapping(changes, name)
            words = bracketed(change.get("difference"), signed)
            words += ", not paired" if words and change.get("paired") is False else ""
            if (value := estimate(fields)) is not None:
                step = finite(record, "step") or 0.0
                figure = printable(name, 60)
                yield Measurement(policy, evaluator, figure, moment, step, value, words)


def figure_words(evaluator: str, figure: str) -> tuple[str, str]:
    """An evaluator and its figure as people call them; names that a user gave stay."""
    if evaluator == "decoding":
        temperature, _, part = figure.partition("/")
        return FIGURE_NAMES[evaluator], f"{figure_words('held_out', part)[1]} at {temperature}"
    figure = FIGURE_NAMES.get(f"{evaluator}/{figure}", figure)
    return FIGURE_NAMES.get(evaluator, evaluator), figure


def evaluator_rows(stage: SubRun) -> list[list[str]]:
    """A row a figure and policy, in the order of COLUMNS; along a training its last measurement."""
    measured = [*measurements(stage)]
    starts = {(m.evaluator, m.figure): m for m in measured if m.moment == "before"}
    later = {
        (m.policy, m.evaluator, m.figure, m.moment): m for m in measured if m.moment != "before"
    }
    policies = dict.fromkeys(policy for policy, *_ in later) or {"": None}
    rows = []
    for policy in policies:
        for evaluator, figure in dict.fromkeys((m.evaluator, m.figure) for m in measured):
            first = starts.get((evaluator, figure))
            along, after = (
                later.get((policy, evaluator, figure, moment)) for moment in ("along", "after")
            )
            if (
                along is None
                and after is None
                and (first is None or policy != next(iter(policies)))
            ):
                continue
            at = f", step {along.step:.0f}" if along else ""
            last = after or along
            rows.append(
                [
                    f"{f'{policy}: ' if policy else ''}{', '.join(figure_words(evaluator, figure))}",
                    bracketed(first and first.value),
                    bracketed(along and along.value) + at,
                    bracketed(after and after.value),
                    last.change if last else "",
                ],
            )
    return rows


def evaluator_curves(stages: Sequence[SubRun]) -> list[Plot]:
    """A curve for each of an evaluator's first figures that a training measured more than once."""
    own = [[m for m in measurements(stage) if not m.policy] for stage in stages]
    drawn: list[Plot] = []
    counts: dict[str, int] = {}
    for evaluator, figure in dict.fromkeys((m.evaluator, m.figure) for ms in own for m in ms):
        traces = []
        for index, (stage, measured) in enumerate(zip(stages, own, strict=True)):
            points = {
                m.step: m.value for m in measured if (m.evaluator, m.figure) == (evaluator, figure)
            }
            if len(points) > 1:
                name = stage.title if len(stages) > 1 else ""
                traces += _with_intervals(points, name, PALETTE[index % len(PALETTE)])
        if traces and counts.get(evaluator, 0) < MOST_CURVES:
            counts[evaluator] = counts.get(evaluator, 0) + 1
            words = figure_words(evaluator, figure)
            frame = {
                **FRAMES["evaluator"],
                "id": f"evaluator-{len(drawn)}",
                "title": ": ".join(words),
                "y": words[1],
            }
            drawn += framed(frame, traces)
    return drawn


def _with_intervals(points: dict[float, Estimate], name: str, colour: str) -> list[Trace]:
    """A line of values, and a stroke for each interval."""
    steps = sorted(points)
    values = [points[step] for step in steps]
    line = Trace(
        steps,
        [value.value for value in values],
        name,
        colour,
        "both",
        notes=[bracketed(value, decimal) for value in values],
    )
    ends = [
        (step, bound)
        for step, value in zip(steps, values, strict=True)
        if has_interval(value)
        for bound in (value.low, value.high, None)
    ]
    strokes = Trace([x for x, _ in ends], [y for _, y in ends], "", colour, size=1.6, silent=True)
    return [*([strokes] if ends else []), line]


class LastFigure(NamedTuple):
    """A figure of a policy as measured last: its value where one was recorded, and its change above
    the start.
    """

    value: float | None
    change: Estimate


def last_figures(policy: SubRun, stages: Sequence[SubRun]) -> dict[tuple[str, str], LastFigure]:
    """The figures of a policy that have a change, as measured last, by evaluator and figure. The
    lines of its training come first, then those of the recipe's end.
    """
    ends = [
        (record, policy.name if stage.path != policy.path else None)
        for stage in (*(one for one in stages if one.path != policy.path), policy)
        for record in stage.evaluations
    ]
    last = {}
    for record, owner in ends:
        if owner is not None and record.get("policy") != owner:
            continue
        values = mapping(record, "figures")
        for name, change in mapping(record, "change").items():
            difference = estimate(change, "difference")
            if difference is not None:
                value = estimate(values, name)
                end = LastFigure(value and value.value, difference)
                last[str(record.get("evaluator")), name] = end
    return last


def by_importance(names: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Evaluators and figures: of each evaluator those of ABILITIES first, the others in their order."""

    def place(name: tuple[str, str]) -> int:
        leading = ABILITIES.get(name[0], ())
        return leading.index(name[1]) if name[1] in leading else len(leading)

    return sorted(names, key=place)
