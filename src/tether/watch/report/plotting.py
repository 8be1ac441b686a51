"""Charts as inline SVG: traces and axes in, paths and labels out, which the page's template prints.

A drawing is stretched to the width of the page. Its lines and marks keep their thickness, and its
labels are text of the page. So one drawing serves a desk, a phone and paper without a script.
Colours are classes of `page.css`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import NamedTuple

from tether.core.tables import table_beside
from tether.core.types import Row
from tether.watch.report.numbers import percent as as_percent
from tether.watch.report.reading import printable

# Okabe and Ito's palette; the four first keep a contrast of 3:1 on white and on the dark page.
BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY = PALETTE = ("c0", "c1", "c2", "c3", "c4", "c5")
MUTED = "muted"
MOST_POINTS, MOST_HITS, SIZE = 400, 40, 1000
"""Points of a line, places of a chart that tell their values on hover, and the drawing's own width
and height.
"""
LONGEST_ROW = 40
"""Characters of the name of a row."""
CHARTS: dict[str, list[Row]] = table_beside(__file__, "charts.toml")
"""By section of the page the charts of metrics; under `figures` those that functions draw."""
FRAMES = {frame["id"]: frame for frame in CHARTS["figures"]}

Value = float | None


class Trace(NamedTuple):
    """One series. Where a value is None the line has a gap.

    `mode`: line, marks, open (marks) or both (line and marks). `notes` are shown on hover instead
    of the values; with `silent` nothing is shown.
    """

    xs: Sequence[Value]
    ys: Sequence[Value]
    name: str = ""
    colour: str = BLUE
    mode: str = "line"
    dash: str = ""
    size: float = 0.0
    right: bool = False
    listed: bool = True
    silent: bool = False
    notes: Sequence[str] = ()


@dataclass(frozen=True)
class Axis:
    """From `low` to `high`, with ticks (value, text)."""

    title: str
    low: float
    high: float
    ticks: Sequence[tuple[float, str]]
    percent: bool = False
    names: Sequence[str] = ()

    def at(self, value: float) -> int:
        """The place of a value in the drawing's units, of `low` 0."""
        return round(SIZE * (value - self.low) / (self.high - self.low))

    def show(self, value: float) -> str:
        return as_percent(value) if self.percent else f"{value:,.4g}".replace("-", "−")

    @property
    def widest(self) -> int:
        """Characters of the longest tick."""
        return max((len(text) for _, text in self.ticks), default=0)


@dataclass(frozen=True)
class Plot:
    """One chart, and the line under it that says what to look for."""

    id: str
    title: str
    caption: str
    height: int
    traces: Sequence[Trace]
    x: Axis
    y: Axis
    right: Axis | None

    @property
    def paths(self) -> Iterator[tuple[str, float, str]]:
        """(classes, thickness or 0, path): lines first, marks on top."""
        for trace in self.traces:
            if trace.mode in ("line", "both"):
                yield (
                    f"{trace.colour} line {trace.dash}",
                    trace.size if trace.mode == "line" else 0,
                    self._points(trace, False),
                )
        for trace in self.traces:
            few = trace.mode == "line" and sum(y is not None for y in trace.ys) == 1
            if trace.mode in ("marks", "open", "both") or few:
                dots = self._points(trace, True)
                size = trace.size or (9 if trace.mode == "open" else 6)
                yield f"{trace.colour} mark", size, dots
                if trace.mode == "open":
                    yield "card mark", size - 4, dots

    def _points(self, trace: Trace, apart: bool) -> str:
        y = self._upright(trace)
        pieces = []
        joined = False
        for x, value in envelope(trace.xs, trace.ys):
            if x is None or value is None:
                joined = False
            else:
                pieces.append(
                    f"{'' if joined else 'M'}{self.x.at(x)} "
                    f"{SIZE - y.at(value)}{'h0' if apart else ''}",
                )
                joined = not apart
        return " ".join(pieces)

    def _upright(self, trace: Trace) -> Axis:
        return self.right if trace.right and self.right else self.y

    @property
    def hits(self) -> Iterator[tuple[str, str]]:
        """(path, text): strips that together cover the drawing and tell the values at their
        place.
        """
        rows = bool(self.y.names)
        across = self.y if self.y.names else self.x
        texts: dict[float, list[str]] = {}
        for trace in self.traces:
            for i, (x, y) in enumerate(zip(trace.xs, trace.ys, strict=True)):
                if x is not None and y is not None and not trace.silent:
                    value = (
                        trace.notes[i]
                        if trace.notes
                        else self.x.show(x)
                        if rows
                        else self._upright(trace).show(y)
                    )
                    texts.setdefault(y if rows else x, []).append(
                        f"{trace.name}: {value}" if trace.name else value,
                    )
        chosen = _spread(texts)
        ends = sorted((across.low, across.high))
        edges = [ends[0], *((a + b) / 2 for a, b in pairwise(chosen)), ends[1]]
        for place, (start, end) in zip(chosen, pairwise(edges), strict=True):
            first, last = sorted((across.at(start), across.at(end)))
            title = (
                across.names[int(place)]
                if rows
                else f"{across.title.partition(' (')[0]} {across.show(place)}"
            )
            path = (
                f"M0 {SIZE - last}H{SIZE}V{SIZE - first}H0z"
                if rows
                else f"M{first} 0V{SIZE}H{last}V0z"
            )
            yield path, "\n".join((title, *dict.fromkeys(texts[place])))

    @property
    def legend(self) -> list[Trace]:
        return [trace for trace in self.traces if trace.listed and trace.name]


def _spread(texts: dict[float, list[str]]) -> list[float]:
    """At most MOST_HITS of these places, evenly spread; of neighbours the one with most to tell."""
    places = sorted(texts)
    if len(places) <= MOST_HITS:
        return places
    width = (places[-1] - places[0]) / (MOST_HITS - 1e-9)
    buckets = groupby(places, key=lambda place: int((place - places[0]) / width))
    return [max(bucket, key=lambda place: len(texts[place])) for _, bucket in buckets]


def envelope(
    xs: Sequence[Value],
    ys: Sequence[Value],
    longest: int = MOST_POINTS,
) -> list[tuple[Value, Value]]:
    """At most about `longest` points: of neighbours the lowest and the highest, so that no spike is
    lost, and the last one.
    """
    points = list(zip(xs, ys, strict=True))
    if len(points) <= longest:
        return points
    width = -(-2 * len(points) // longest)
    chosen = []
    for start in range(0, len(points), width):
        bucket = range(start, min(start + width, len(points)))
        values = [(y, i) for i in bucket if (y := points[i][1]) is not None]
        chosen += sorted({min(values)[1], max(values)[1]}) if values else [start]
    return [points[i] for i in dict.fromkeys((*chosen, len(points) - 1))]


def label(value: object, longest: int = 32) -> str:
    """A name for use inside a chart: one line, cut."""
    text = " ".join(printable(value, 200).split())
    return text if len(text) <= longest else text[: longest - 1] + "…"


def axis(
    title: str,
    values: Sequence[Value],
    *,
    zero: bool = False,
    percent: bool = False,
    snug: bool = False,
    ticks: int = 5,
) -> Axis:
    """An axis for these values, with ticks at round numbers, or at whole ones for whole values.

    It ends a little beyond the outermost values, so that no line lies on the edge. A single tick
    gives no scale, so there are two at least, except of whole values.

    Args:
        zero: it begins at 0, or below.
        snug: it ends at the outermost values, with no room around them.
        ticks: about as many; they are further from each other where their texts lie side by side.
    """
    present = [value for value in values if value is not None] + [0.0] * zero
    low = min(present, default=0.0)
    high = max(present, default=1.0)
    whole = snug and all(float(value).is_integer() for value in present)
    if high - low <= 1e-6 * max(abs(low), abs(high)):
        room = 0.5 if whole else abs(high) / 2 or 1.0
        low = low - room * (low != 0)
        high = high + room
    elif not snug:
        room = (high - low) / 20
        low -= room * (low != 0 or not zero)
        high += room
    step = max(_step((high - low) / ticks), float(whole))
    made = _ticked(title, low, high, step, percent)
    return made if whole or made.ticks[1:] else _ticked(title, low, high, _step(step / 3), percent)


def _ticked(title: str, low: float, high: float, step: float, percent: bool = False) -> Axis:
    """An axis with ticks at the multiples of a step."""
    places = max(0, -math.floor(math.log10(step) + 1e-9) - 2 * percent)
    style = f",.{places}{'%' if percent else 'f'}" if 1e-4 <= step < 1e6 else ".3g"
    ticks = [
        (step * i, f"{step * i:{style}}".replace("-", "−"))
        for i in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)
    ]
    return Axis(title, low, high, ticks, percent)


def _beside(left: Axis, plain: Axis) -> Axis:
    """The plain axis made longer, so that its ticks lie on the grid lines of the left one."""
    (first, _), (second, _), *_ = left.ticks
    below, above = ((end - first) / (second - first) for end in (left.low, left.high))
    step = _step((plain.high - plain.low) / (above - below))
    while (lines := math.floor(plain.low / step - below + 1e-9)) + above < plain.high / step:
        step = _step(1.5 * step)
    return _ticked(plain.title, step * (lines + below), step * (lines + above), step)


def _step(least: float) -> float:
    """1, 2 or 5 times a power of ten, no less than this."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least * (1 - 1e-9))


def framed(
    frame: str | Row,
    traces: Sequence[Trace],
    *,
    height: int = 0,
    rows: Sequence[str] = (),
) -> list[Plot]:
    """The chart of a frame of `charts.toml`; with `rows` the names of its rows, the first on top.
    None where there is nothing.
    """
    if not traces:
        return []
    frame = FRAMES[frame] if isinstance(frame, str) else frame
    zero = frame.get("zero", ())
    percent = frame.get("percent", ())
    xs = [x for t in traces for x in t.xs]
    ends = [[y for t in traces if t.right is side for y in t.ys] for side in (False, True)]
    x = axis(
        frame.get("x", "step"),
        xs,
        zero="x" in zero,
        percent="x" in percent,
        snug=not rows and "x" not in (*percent, *zero),
    )
    y = axis(
        frame.get("y", ""),
        ends[0],
        zero="y" in zero,
        percent="y" in percent,
        ticks=frame.get("ticks", 7),
    )
    if rows:
        names = [label(row, LONGEST_ROW) for row in rows]
        y = Axis(y.title, len(rows) - 0.5, -0.5, list(enumerate(names)), names=names)
    right = (
        _beside(y, axis(frame["right"], ends[1], zero="right" in zero))
        if frame.get("right") and ends[1]
        else None
    )
    return [
        Plot(
            frame["id"],
            frame["title"],
            frame["caption"],
            height or frame.get("height", 260),
            traces,
            x,
            y,
            right,
        ),
    ]
