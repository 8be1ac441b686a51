"""The alignment tax: the change of abilities above the start in percentage points, alone and per nat
of KL.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import NamedTuple

from tether.stats import Estimate
from tether.watch.report.evaluators import by_importance, figure_words, last_figures
from tether.watch.report.gains import spent_kl
from tether.watch.report.numbers import HeadAndRows, bracketed, decimal, percent, signed
from tether.watch.report.reading import SubRun, printable
from tether.watch.report.sweeps import Measured, Sweep, is_ability, percentage_points

COLUMNS = ("start", "end", "change, points", "points per nat of KL")
LEAST_KL = 0.1
"""Nats per response. After a smaller KL a change per nat is the noise of the KL."""


class Tax(NamedTuple):
    """An ability of a policy: shares at its start and its end, and the change in points, alone and
    per nat of KL.

    The interval per nat is that of the change. The KL counts as exact.
    """

    start: float | None
    end: float | None
    points: Estimate
    per_nat: Estimate | None


def taxes(policy: SubRun, stages: Sequence[SubRun]) -> dict[tuple[str, str], Tax]:
    """The abilities of a policy that its evaluators measured, by evaluator and figure."""
    kl = spent_kl(policy)
    measured = last_figures(policy, stages)
    return {
        name: Tax(
            None if value is None else value - change.value,
            value,
            percentage_points(change),
            None if kl is None or kl.value < LEAST_KL else percentage_points(change, kl.value),
        )
        for name in by_importance(measured)
        if is_ability(*name)
        for value, change in (measured[name],)
    }


def tax_rows(policies: Sequence[SubRun], stages: Sequence[SubRun]) -> list[list[str]]:
    """A row a policy and ability, in the order `ability`, KL, COLUMNS."""
    return [
        [
            f"{f'{policy.title}: ' if len(policies) > 1 else ''}{_words(*name)}",
            bracketed(spent_kl(policy)),
            *_ends([tax]),
            bracketed(tax.points, signed),
            bracketed(tax.per_nat, signed),
        ]
        for policy in policies
        for name, tax in taxes(policy, stages).items()
    ]


def sweep_tax(sweep: Sweep) -> HeadAndRows:
    """A row an ability and setting: means over its runs with their intervals."""
    read = {one.label: taxes(one.policy, one.journey.stages) for one in sweep.members}
    names = by_importance(dict.fromkeys(name for own in read.values() for name in own))
    kl = Measured("kl", "", "", decimal, sweep.values(lambda one: spent_kl(one.policy)))
    rows = []
    for name in names:
        own = {label: taxes[name] for label, taxes in read.items() if name in taxes}
        points = _over_seeds(sweep, {label: tax.points for label, tax in own.items()})
        rates = _over_seeds(sweep, {label: tax.per_nat for label, tax in own.items()})
        for number, setting in enumerate(sweep.settings):
            runs = [own[one.label] for one in setting.members if one.label in own]
            whole = all(tax.per_nat for tax in runs)
            rows += [
                [
                    _words(*name),
                    *setting.values,
                    str(len(runs)),
                    bracketed(kl.mean(number)),
                    *_ends(runs),
                    bracketed(points.mean(number), signed),
                    bracketed(rates.mean(number), signed) if whole else "",
                ],
            ] * bool(runs)
    return ["ability", *sweep.keys, "runs", "KL, nats", *COLUMNS], rows


def _words(evaluator: str, figure: str) -> str:
    return printable(", ".join(figure_words(evaluator, figure)), 80)


def _ends(runs: Sequence[Tax]) -> list[str]:
    """Shares at the start and at the end, as means over runs."""
    starts = [tax.start for tax in runs if tax.start is not None]
    ends = [tax.end for tax in runs if tax.end is not None]
    return [percent(fmean(shares)) if shares else "" for shares in (starts, ends)]


def _over_seeds(sweep: Sweep, values: dict[str, Estimate | None]) -> Measured:
    """A number of runs, by their labels."""
    return Measured("", "", "", decimal, sweep.values(lambda one: values.get(one.label)))
