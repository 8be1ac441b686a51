"""The page of a sweep: sliders over its keys move numbers, curves and rollouts. Beside them are its
control arms, and the alignment tax: the change of abilities above the start in percentage points,
alone and per nat of KL.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from tether.stats import Estimate, mean_of_runs
from tether.watch.report import about
from tether.watch.report.about import control_lines
from tether.watch.report.evaluators import by_importance, figure_words, last_figures
from tether.watch.report.frame import write_page
from tether.watch.report.gains import spent_kl
from tether.watch.report.measures import BY_KEY
from tether.watch.report.narrative import Conclusion
from tether.watch.report.numbers import (
    SENTENCES,
    HeadAndRows,
    bracketed,
    decimal,
    has_interval,
    percent,
    signed,
)
from tether.watch.report.picture import NOTHING, Rods, best_of
from tether.watch.report.reading import SubRun, printable
from tether.watch.report.rollouts import packed, packed_rollouts
from tether.watch.report.sweep_figures import by_setting, curves, frontier
from tether.watch.report.sweeps import (
    FIGURE_KEY,
    GAINS,
    Measured,
    Setting,
    Sweep,
    control_arms,
    is_ability,
    measures_of,
    percentage_points,
)
from tether.watch.report.tiles import Tile, estimate_tile

STAGES_PAGE = "stages.html"
"""Beside the page of a sweep: the page of the stages in the run's own folder."""
SAYS = SENTENCES["sweep"]
MOST_ROLLOUTS = 2_200_000
"""Characters of the page that rollouts may take."""
FIRST = 5
"""Numbers that a sentence names, and that have a figure."""
DECIDES = ("rate-at-best", "rate", *GAINS, "loss")
"""Numbers by which settings are compared, the first that a sweep has."""


class SweepBrief(NamedTuple):
    """A sweep in the terminal: its verdict and picture, and a row a setting with its first
    numbers.
    """

    verdict: Conclusion
    lines: Sequence[str]
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str]


def sweep_brief(sweep: Sweep) -> SweepBrief:
    """The same verdict and means as on the page."""
    measures, _ = _judged(sweep)
    columns, rows = _table(sweep, measures[:FIRST])
    lines = [line for one in _picture(sweep, measures) for line in one.lines()]
    return SweepBrief(_verdict(sweep, measures), lines, columns, rows, _notes(sweep))


def write_sweep(sweep: Sweep, output: Path) -> Path:
    """Write the page, and give its path."""
    measures, judge = _judged(sweep)
    gain, kl = _gain_and_kl(measures)
    start = gain.greatest if gain else 0
    policies = [replace(member.policy, name=member.label) for member in sweep.members]
    stages = [stage for member in sweep.members for stage in member.journey.stages]
    picture = _picture(sweep, measures)
    further = [one for one in measures[FIRST:] if one.key.startswith(FIGURE_KEY)]
    shown = {one.id for one in picture}
    rows = [by_setting(sweep, one) for one in (*measures[:FIRST], *further)]
    drawn = {
        "picture": [plot for one in picture for plot in one.plots()],
        "frontier": frontier(sweep, gain, kl) if gain and kl else [],
        "settings": [plot for one in rows if one.id not in shown for plot in one.plots()],
    }
    return write_page(
        output,
        "sweep.html",
        sweep.path.resolve().name,
        drawn,
        _notes(sweep),
        scripts=("rollouts.js", "sweep.js", "page.js"),
        price=about.price(SubRun(""), {stage.path: stage for stage in stages}.values()),
        title=f"Sweep over {' and '.join(sweep.keys) or 'seeds'}",
        sweep=sweep,
        start=start,
        verdict=_verdict(sweep, measures),
        views=[
            (
                _sentence(sweep, number, measures),
                _tiles(number, measures),
                plots,
            )
            for number, plots in enumerate(curves(sweep, judge))
        ],
        data=packed(
            [[(one.label, one.name) for one in setting.members] for setting in sweep.settings],
        ),
        tax=sweep_tax(sweep),
        controls=sweep_controls(sweep, gain),
        table_of=_table(sweep, measures),
        evaluated=any(one.key.startswith(FIGURE_KEY) for one in measures),
        rollouts=packed_rollouts(policies, MOST_ROLLOUTS),
        stages=STAGES_PAGE if (sweep.path / STAGES_PAGE).is_file() else "",
    )


def _judged(sweep: Sweep) -> tuple[list[Measured], about.Judge]:
    """The numbers of a sweep, and its judge."""
    judge = about.judge_of_all(member.journey for member in sweep.members)
    return measures_of(sweep, judge), judge


def _gain_and_kl(measures: Sequence[Measured]) -> tuple[Measured | None, Measured | None]:
    """The first gain that was measured, and the KL that it took."""
    by_key = {one.key: one for one in measures}
    gain = next((by_key[key] for key in GAINS if key in by_key), None)
    return gain, by_key.get("kl")


def _picture(sweep: Sweep, measures: Sequence[Measured]) -> list[Rods]:
    """The deciding numbers, and the KL that they took."""
    drawn = {one.key: by_setting(sweep, one) for one in measures}
    first = next((drawn[key] for key in DECIDES if key in drawn), NOTHING)
    return [first, drawn.get("kl", NOTHING)]


def _notes(sweep: Sweep) -> list[str]:
    waiting = SAYS["waiting"].format(names="; ".join(sweep.waiting[:20]), count=len(sweep.waiting))
    return [*sweep.notes, *[waiting] * bool(sweep.waiting)]


def _tiles(setting: int, measures: Sequence[Measured]) -> list[Tile]:
    """The mean of each number over seeds, and the seeds."""
    made = []
    for one in measures:
        if mean := one.mean(setting):
            values = [one.show(value.value) for _, value in one.values[setting]]
            seeds = SAYS["seeds"].format(count=len(values), values=", ".join(values))
            detail = seeds if len(values) > 1 else ""
            made.append(estimate_tile(one.name, mean, one.show, detail))
    return made


def _sentence(sweep: Sweep, setting: int, measures: Sequence[Measured]) -> str:
    """The first numbers of a setting in one line, which a screen reader reads as a slider moves."""
    title = sweep.title(sweep.settings[setting])
    if not sweep.settings[setting].members:
        return SAYS["not-run"].format(setting=title)
    means = [(one, one.mean(setting)) for one in measures[:FIRST]]
    numbers = " · ".join(f"{one.short} {one.show(mean.value)}" for one, mean in means if mean)
    return numbers or SAYS["no-numbers"].format(setting=title)


def _verdict(sweep: Sweep, measures: Sequence[Measured]) -> Conclusion:
    """The setting with the greatest number that decides, of those that show a gain after Holm's
    correction for the number of settings, else of all. Where no win rate does, gold may.
    """
    picture, _ = _picture(sweep, measures)
    by_key = {one.key: one for one in measures}
    key = picture.id.removeprefix("by-")
    if key not in SAYS:
        return best_of(picture)
    kl = by_key.get("kl")
    options = by_key[key], by_key.get("gold", by_key[key])
    gain = next((one for one in options if one.gaining()), by_key[key])
    means = {place: mean for place in range(len(gain.values)) if (mean := gain.mean(place))}
    shown = gain.gaining()
    clear = any(map(has_interval, means.values()))
    best = max(shown or means, key=lambda place: means[place].value)
    title = sweep.title(sweep.settings[best])
    mean = bracketed(means[best], gain.show)
    spent = kl.mean(best) if kl else None
    numbers = SAYS["verdict" if spent is None else "verdict-kl"].format(
        setting=title,
        name=gain.name,
        gain=mean,
        kl=bracketed(spent),
        over=SAYS["over-seeds" if len(gain.values[best]) > 1 else "over-prompts"],
    )
    sentences = [numbers]
    if best == gain.greatest and len(means) > 1:
        sentences.append(SAYS["largest"].format(count=len(means)))
    if clear and len(means) > 1:
        sentences.append(SAYS["corrected"].format(count=len(means), shown=len(shown)))
    headline = SAYS[f"{gain.key}{'' if shown else '-open'}" if clear else "few-seeds"]
    return Conclusion("open", headline.format(setting=title, gain=mean), sentences)


def _table(sweep: Sweep, measures: Sequence[Measured]) -> HeadAndRows:
    """A row a setting: how many runs, and each number's mean with its interval."""
    rows = [
        [
            *(setting.values or [sweep.title(setting)]),
            str(len(setting.members)),
            *(bracketed(one.mean(number), one.show) for one in measures),
        ]
        for number, setting in enumerate(sweep.settings)
    ]
    return [*(sweep.keys or ["setting"]), "runs", *(one.name for one in measures)], rows


JUDGED = ("gold", "heldout")
"""Gains that arms with different rewards have in common."""


def sweep_controls(
    sweep: Sweep,
    gain: Measured | None,
) -> tuple[list[str], list[list[str]], list[str]]:
    """Columns, a row an arm and setting, and a sentence for each arm: what it takes away.

    The last column compares each policy with the arm of the same seed.
    """
    if gain is None or gain.key not in JUDGED:
        return [], [], []
    rows = [row for setting in sweep.settings for row in _rows(setting, gain)]
    arms = [arm for member in sweep.members for arm in member.journey.policies]
    columns = [*sweep.keys, "arm", "runs", f"{gain.name} of the arm", "of the policy", "difference"]
    return columns, rows, list(dict.fromkeys(control_lines(arms))) if rows else []


def _rows(setting: Setting, gain: Measured) -> list[list[str]]:
    read = BY_KEY[gain.key].read
    gains: defaultdict[str, list[tuple[Estimate, Estimate, Estimate]]] = defaultdict(list)
    for member, arm in control_arms(setting.members):
        own = read(member.policy)
        theirs = read(arm)
        if own and theirs:
            ahead = Estimate(own.value - theirs.value, math.nan, math.nan, 0)
            gains[arm.title].append((theirs, own, ahead))
    return [
        [
            *setting.values,
            name,
            str(len(values)),
            *(bracketed(mean_of_runs(one)[0], gain.show) for one in zip(*values, strict=True)),
        ]
        for name, values in gains.items()
    ]


TAX_COLUMNS = ("start", "end", "change, points", "points per nat of KL")
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
    """A row a policy and ability, in the order `ability`, KL, TAX_COLUMNS."""
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
    return ["ability", *sweep.keys, "runs", "KL, nats", *TAX_COLUMNS], rows


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
