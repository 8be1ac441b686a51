"""The parts that all figures share: colours, lines, bars, axes, and labels that a plot cannot mistake for markup.

Figures are the plain dictionaries that plotly.js reads. Strings that begin with `@` are colours of the page's theme,
filled in by page.js when it draws.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tether.report.reading import printable

# Okabe and Ito's palette; the four first keep a contrast of 3:1 on white and on the dark page.
BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"
PALETTE = (BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY)
MUTED = "@muted"
LONGEST_LINE = 2000

Trace = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Figure:
    """One plot: what plotly.js draws, and the line under it that says what to look for."""

    id: str
    title: str
    caption: str
    data: Sequence[Trace]
    layout: dict[str, Any]
    height: int = 320

    @property
    def drawing(self) -> dict[str, Any]:
        return {"data": list(self.data), "layout": {**self.layout, "height": self.height}}


def plot(id: str, title: str, caption: str, data: Sequence[Trace], layout: dict[str, Any], height: int = 320) -> list[Figure]:
    """The figure in a list, which is empty where there is nothing to draw."""
    return [Figure(id, title, caption, data, layout, height)] if data else []


def label(value: Any, longest: int = 32) -> str:
    """A name for use inside a plot: plotly reads a subset of HTML in labels, so markup is escaped."""
    text = " ".join(printable(value, 200).split())
    return html.escape(text if len(text) <= longest else text[: longest - 1] + "…", quote=False)


def rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.6g}")


def thin(xs: Sequence[Any], ys: Sequence[Any], longest: int = LONGEST_LINE) -> tuple[list[Any], list[Any]]:
    """At most `longest` points, evenly spaced, the last one always among them."""
    stride = max(1, -(-len(xs) // longest))
    keep = range((len(xs) - 1) % stride, len(xs), stride) if len(xs) else range(0)
    return [rounded(xs[i]) for i in keep], [rounded(ys[i]) for i in keep]


def line(
    xs: Sequence[Any], ys: Sequence[Any], name: str, colour: str, *, dash: str = "solid", mode: str = "lines", axis: str = "y",
    width: float = 1.8, hover: str = "step %{x}: %{y:.4g}", **more: Any,
) -> Trace:  # fmt: skip
    """A line or, by `mode`, marks; `more` are plotly's own attributes."""
    x, y = thin(xs, ys)
    return {
        "type": "scatter", "x": x, "y": y, "name": label(name), "yaxis": axis, "connectgaps": False,
        "mode": "lines+markers" if len(x) == 1 and mode == "lines" else mode,
        "line": {"color": colour, "width": width, "dash": dash}, "marker": {"color": colour, "size": 6},
        "hovertemplate": hover + "<extra>%{fullData.name}</extra>", **more,
    }  # fmt: skip


def marks(xs: Sequence[Any], ys: Sequence[Any], name: str, colour: str, *, hover: str, marker: Trace, **more: Any) -> Trace:
    return line(xs, ys, name, colour, mode="markers", hover=hover, marker={"color": colour, **marker}, **more)


def guide(xs: Sequence[float], ys: Sequence[float], name: str) -> Trace:
    """A dotted line to compare with: a diagonal, a chance level."""
    return line(xs, ys, name, MUTED, dash="dot", width=1.2, hoverinfo="skip")


def axis(title: str, **more: Any) -> dict[str, Any]:
    return {"title": {"text": title, "standoff": 8}, "automargin": True, "zeroline": False, **more}


def layout(x: dict[str, Any], y: dict[str, Any], right: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    """Axes and the legend above the plot, where a phone has room for it."""
    legend = {"orientation": "h", "x": 0, "xanchor": "left", "y": 1.02, "yanchor": "bottom", "traceorder": "normal"}
    result = {"xaxis": x, "yaxis": y, "margin": {"l": 8, "r": 8, "t": 8, "b": 8}, "hovermode": "closest", "legend": legend}
    if right is not None:
        result["yaxis2"] = {**right, "overlaying": "y", "side": "right", "showgrid": False, "tickmode": "auto"}
    return {**result, "showlegend": True, **more}
