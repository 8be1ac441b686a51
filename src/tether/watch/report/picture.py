"""The picture on top of every page: the numbers that decide, on one axis with no difference, beside
the course of the training. A terminal has it in a few lines.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import cycle
from typing import NamedTuple

from tether.core.amounts import sparkline
from tether.stats import Estimate
from tether.watch.report.about import judge_of, judge_of_all
from tether.watch.report.figures import Rod, charts, rod_figures
from tether.watch.report.gains import heldout_gain
from tether.watch.report.measures import BY_KEY
from tether.watch.report.narrative import Conclusion, control_of, judge_in_words
from tether.watch.report.numbers import (
    SENTENCES,
    Show,
    bracketed,
    decimal,
    has_interval,
    percent,
    signed,
)
from tether.watch.report.plotting import BLUE, FRAMES, MUTED, PALETTE, SIZE, Plot
from tether.watch.report.reading import Journey, estimate, mapping

SAYS = SENTENCES["picture"]
KINDS = (("rate-at-best", "rate", "equal"), ("gold",), ("heldout",), ("proxy",), ("right",))
"""Keys of numbers that may be rows of one chart, the kind that decides first."""
WIDTH = 44
"""Characters of an axis in a terminal."""
DECIDES, BESIDE = 15.0, 9.0
"""Sizes of the mark of the number that decides, and of those beside it."""


class Rods(NamedTuple):
    """Numbers of one kind, a row each."""

    title: str
    show: Show
    numbers: Sequence[Rod]
    id: str = "decides"
    of: str = ""
    note: str = ""
    """The property in which the rows differ, and a line under the chart."""

    @property
    def even(self) -> float | None:
        """No difference, of shares and of changes; None of other numbers, such as losses."""
        return 0.5 if self.show is percent else 0.0 if self.show is signed else None

    def plots(self) -> list[Plot]:
        """One chart, a row a number."""
        frame = FRAMES["by-setting" if self.of else "decides"]
        frame = {**frame, "id": self.id, "title": self.title, "y": self.of, "caption": self.note}
        frame |= {"percent": ["x"] * (self.show is percent)}
        return rod_figures(frame, self.numbers, self.even, self.show)

    def lines(self) -> Iterator[str]:
        """The same for a terminal: a stroke for the interval, a colon for `even`."""
        widest = max((len(rod.name) for rod in self.numbers), default=0)
        even = "" if self.even is None else f" (':' is {self.show(self.even)}, no difference)"
        for plot in self.plots():
            yield f"{self.title}{even}"
            for name, value, *_ in self.numbers:
                numbers = bracketed(value, self.show)
                yield f"  {name:{widest}} {_bar(plot, value, self.even)} {numbers}"


NOTHING = Rods("", decimal, [])


def best_of(numbers: Rods) -> Conclusion:
    """A headline that names the best row; that it is better than another is not tested. Of numbers
    without an `even`, such as losses, the least is the best.
    """
    rods = sorted(numbers.numbers, key=lambda rod: rod.value.value)
    if not rods:
        return Conclusion("open", SAYS["nothing"])
    best = rods[0 if numbers.even is None else -1]
    name = " = ".join(filter(None, (numbers.of, best.name)))
    text = SAYS["best" if len(rods) > 1 else "alone"]
    shown = bracketed(best.value, numbers.show)
    return Conclusion(
        "open",
        text.format(name=name, number=shown),
    )


def deciding(numbers: Mapping[str, Estimate | None]) -> list[Rod]:
    """Rows of the numbers that there are, the first one as the one that decides."""
    measured = [(name, value) for name, value in numbers.items() if value]
    return [
        Rod(
            name,
            value,
            MUTED if place else BLUE,
            size=BESIDE if place else DECIDES,
        )
        for place, (name, value) in enumerate(measured)
    ]


def _bar(plot: Plot, value: Estimate, even: float | None) -> str:
    """A row of a chart in WIDTH characters."""

    def place(x: float) -> int:
        return max(0, min(WIDTH - 1, plot.x.at(x) * WIDTH // SIZE))

    cells = [" "] * WIDTH
    if has_interval(value):
        low, high = place(value.low), place(value.high)
        cells[low : high + 1] = ["|", *"-" * (high - low - 1), "|"][: high - low + 1]
    if even is not None:
        cells[place(even)] = ":"
    cells[place(value.value)] = "●"
    return "".join(cells)


def _curve_line(plot: Plot) -> str:
    """A curve in one line of a terminal, with its ends."""
    ys = [y for y in plot.traces[0].ys if y is not None]
    return f"{plot.title}: {decimal(ys[0])} {sparkline(ys, WIDTH)} {decimal(ys[-1])}"


def rods(journey: Journey) -> Rods:
    """The numbers that the verdict rests on; none where nothing was held out or judged."""
    main = journey.main
    judge = judge_of(journey)
    chosen = mapping(control_of(main.summary), "best_of_n").items()
    measured = heldout_gain(main)
    for keys in KINDS:
        values = {SAYS[key]: BY_KEY[key].read(main) for key in keys}
        values |= {
            SAYS["best-of"].format(n=n, count=value.count): value
            for n, row in chosen
            if len(keys) > 1 and (value := estimate(row, "win_rate"))
        }
        if numbers := deciding(values):
            checked = "heldout" in keys and measured and measured.checked
            title = SAYS["right-answers" if checked else f"{keys[-1]}-title"]
            title = title.format(judge=judge, words=judge_in_words(journey).partition(" (")[0])
            return Rods(title, BY_KEY[keys[0]].show, numbers)
    return NOTHING


def rods_of_runs(runs: Mapping[str, Journey]) -> Rods:
    """The number that decides of each run, of the first one's kind; the note names the runs that
    have another. A colour a run.
    """
    each = {name: rods(journey) for name, journey in runs.items()}
    kind = next((one for one in each.values() if one.numbers), NOTHING)
    title = [kind.title, *(rod.name for rod in kind.numbers[:1])]
    rows = [
        rod._replace(name=name, colour=colour)
        for (name, one), colour in zip(each.items(), cycle(PALETTE))
        for rod in one.numbers[:1]
        if [one.title, rod.name] == title
    ]
    drawn = {row.name for row in rows}
    others = [name for name in runs if name not in drawn]
    note = SAYS["others"].format(names=", ".join(others)) if others else ""
    return kind._replace(title=", ".join(title), numbers=rows, note=note)


def multiples(runs: Mapping[str, Journey]) -> list[Plot]:
    """Small charts of the course of each run's training; a legend names a run once."""
    stages = [replace(journey.main, name=name) for name, journey in runs.items()]
    own = all(journey.own_reward for journey in runs.values())
    plots = []
    seen = set[str]()
    judge = judge_of_all(runs.values())
    for plot in charts("picture", stages, own, judge) or charts("picture-rows", stages):
        traces = [one._replace(listed=one.name not in seen) for one in plot.traces]
        plots.append(replace(plot, traces=traces))
        seen |= {one.name for one in traces}
    return plots


def picture(journey: Journey) -> list[Plot]:
    """The deciding numbers, and the course of the training."""
    return [*rods(journey).plots(), *multiples({"": journey})]


def picture_lines(journey: Journey) -> Iterator[str]:
    """The picture in a few lines of a terminal."""
    yield from rods(journey).lines()
    yield from map(_curve_line, multiples({"": journey})[:1])
