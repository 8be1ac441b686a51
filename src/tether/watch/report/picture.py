"""The picture on top of a page: the number that decides, on one axis with no difference, beside the
course of the training. A terminal has it in a few lines.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tether.core.amounts import sparkline
from tether.stats import Estimate
from tether.watch.report.about import judge_of
from tether.watch.report.figures import Rod, charts, rod_figures
from tether.watch.report.gains import gold_gain, heldout_gain, proxy_gain
from tether.watch.report.narrative import control_of, rate_at_best
from tether.watch.report.numbers import Show, bracketed, decimal, has_interval, percent, signed
from tether.watch.report.plotting import BLUE, FRAMES, MUTED, SIZE, Plot
from tether.watch.report.reading import Journey, SubRun, estimate, mapping

WIDTH = 44
"""Characters of an axis in a terminal."""
DECIDES, BESIDE = 15.0, 9.0
"""Sizes of the mark of the number that decides, and of those beside it."""


class Rods(NamedTuple):
    """Numbers of one kind, the one that decides first; `even` is no difference."""

    title: str
    even: float
    show: Show
    numbers: Sequence[tuple[str, Estimate]]

    def plots(self, *, equal: bool = False) -> list[Plot]:
        """One chart, a row a number; `equal` where none decides more than the others."""
        rows = [
            Rod(name, value, MUTED if thin else BLUE, size=BESIDE if thin else DECIDES)
            for place, (name, value) in enumerate(self.numbers)
            for thin in [place > 0 and not equal]
        ]
        shares = ["x"] if self.show is percent else []
        frame = {**FRAMES["decides"], "title": self.title, "percent": shares}
        return rod_figures(frame, rows, self.even, self.show)

    def lines(self) -> Iterator[str]:
        """The same for a terminal: a stroke for the interval, a colon for `even`."""
        widest = max((len(name) for name, _ in self.numbers), default=0)
        for plot in self.plots():
            yield f"{self.title} (':' is {self.show(self.even)}, no difference)"
            for name, value in self.numbers:
                numbers = bracketed(value, self.show)
                yield f"  {name:{widest}} {_bar(plot, value, self.even)} {numbers}"


def _bar(plot: Plot, value: Estimate, even: float) -> str:
    """A row of a chart in WIDTH characters."""

    def place(x: float) -> int:
        return max(0, min(WIDTH - 1, plot.x.at(x) * WIDTH // SIZE))

    cells = [" "] * WIDTH
    if has_interval(value):
        low, high = place(value.low), place(value.high)
        cells[low : high + 1] = ["|", *"-" * (high - low - 1), "|"][: high - low + 1]
    cells[place(even)] = ":"
    cells[place(value.value)] = "●"
    return "".join(cells)


def _curve_line(plot: Plot) -> str:
    """A curve in one line of a terminal, with its ends."""
    ys = [y for y in plot.traces[0].ys if y is not None]
    return f"{plot.title}: {decimal(ys[0])} {sparkline(ys, WIDTH)} {decimal(ys[-1])}"


def win_rates(policy: SubRun) -> list[tuple[str, Estimate]]:
    """The policy's win rates against the start model, the one that decides first."""
    chosen = mapping(control_of(policy.summary).get("best_of_n")).items()
    rates = {
        "each at its best temperature": rate_at_best(policy),
        "both at one temperature": policy.summary.get("gold_win_rate"),
        "at one temperature and equal length": policy.summary.get("gold_win_rate_at_equal_length"),
        **{f"against the start's best of {n}": mapping(row).get("win_rate") for n, row in chosen},
    }
    return [(name, rate) for name, value in rates.items() if (rate := estimate(value))]


def rods(journey: Journey) -> Rods | None:
    """The numbers that the verdict rests on; None where nothing was held out or judged."""
    policy, judge = journey.judged, judge_of(journey)
    if rates := win_rates(policy):
        title = f"Wins against the start model's answers, judged by {judge}"
        return Rods(title, 0.5, percent, rates)
    held_out, direct = heldout_gain(policy), journey.stage("direct", "rounds")
    right = held_out and held_out.checked
    options = (
        (f"Change of the {judge:score}", 0.0, signed, {"held-out answers": gold_gain(policy)}),
        (
            f"Change of the {'share of right answers' if right else 'held-out reward'}",
            0.0,
            signed,
            {"held-out prompts": held_out and held_out.gain},
        ),
        ("Change of the reward in training", 0.0, signed, {"last steps": proxy_gain(policy)}),
        (
            "Held-out pairs that are ranked right",
            0.5,
            percent,
            {"by the policy": direct.estimate("heldout_accuracy")},
        ),
    )
    for title, even, show, values in options:
        if numbers := [(name, value) for name, value in values.items() if value]:
            return Rods(title, even, show, numbers)
    return None


def multiples(journey: Journey) -> list[Plot]:
    """Small charts of the judged policy's course; without one, of what was trained last."""
    trained = [stage for stage in journey.stages if stage.metrics]
    options = (journey.judged, *journey.policies, *reversed(trained))
    stage = next((stage for stage in options if stage.metrics), None)
    return charts("picture", [stage], journey.own_reward, judge_of(journey)) if stage else []


def picture(journey: Journey) -> list[Plot]:
    """What decides, and the course of the training."""
    numbers = rods(journey)
    return [*(numbers.plots() if numbers else []), *multiples(journey)]


def picture_lines(journey: Journey) -> Iterator[str]:
    """The picture in a few lines of a terminal."""
    if numbers := rods(journey):
        yield from numbers.lines()
    yield from map(_curve_line, multiples(journey)[:1])
