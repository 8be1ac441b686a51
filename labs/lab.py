"""The part that all labs share: texts, tables, plots, bands, and the page that they end in."""

from __future__ import annotations

import inspect
import math
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, SupportsFloat

from markdown_it import MarkdownIt
from markupsafe import Markup, escape
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer

from tether.core.keeping import durable
from tether.watch.report.frame import fill_template
from tether.watch.report.plotting import PALETTE, Trace, framed

HERE = Path(__file__).resolve().parent
HEIGHT = 300
"""Of a plot, in pixels."""
MARGIN = 200
"""Of a plot's title, legend and caption in a notebook, in pixels."""
SEED = "TETHER_LAB_SEED"
"""The variable of the environment that holds another seed than 0."""
QUESTION = re.compile(r"^# \*\*Question:\*\* (.*)\n#\n", re.MULTILINE)
"""The question that the page opens with."""
MARKDOWN = MarkdownIt("commonmark").enable("table")


CHANGED = (
    "The bands hold for the published lab. If you changed the lab, these numbers may be right."
)


class OutsideBandError(SystemExit):
    """A number of a lab lies outside the band that theory or measured seeds give it. The program
    ends with code 1 and this message, without a traceback.
    """


class Expected(NamedTuple):
    """A measured number, the band that it must lie in, and the source of the band."""

    name: str
    value: float
    low: float
    high: float
    source: str

    @property
    def inside(self) -> bool:
        return self.low <= self.value <= self.high

    def __str__(self) -> str:
        verdict = "inside" if self.inside else "OUTSIDE"
        band = f"[{self.low:.4g}, {self.high:.4g}]"
        return f"{self.name}: {self.value:.4g}, {verdict} the band {band} ({self.source})"


class Cell(NamedTuple):
    """A cell of a lab: its kind (text or code), HTML, and the number of its last line."""

    kind: str
    html: Markup
    last_line: int


class Shown(NamedTuple):
    """An output of a lab, and the line that made it; `kind` is text, table or plot."""

    line: int
    kind: str
    value: Any


def line(ys: Sequence[float | None], name: str, xs: Sequence[float] = (), **style: Any) -> Trace:
    """A curve over 1, 2, 3 ..., or over `xs`, with a gap at each None."""
    return Trace(xs or range(1, len(ys) + 1), ys, name, **style)


def points(ys: Sequence[float], name: str, xs: Sequence[float] = (), **style: Any) -> Trace:
    """Marks without a line between them."""
    return line(ys, name, xs, mode="marks", **{"size": 9, **style})


def level(value: float, name: str, xs: Sequence[float], **style: Any) -> Trace:
    """A dotted horizontal line, such as a bound or the value of a control."""
    ends = [min(xs), max(xs)]
    return line([value, value], name, ends, **{"dash": "dot", "colour": "muted", **style})


class Lab:
    """One lab while it runs: what it shows, what it expects, and its page."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.seed = int(os.environ.get(SEED, "0"))
        caller = sys._getframe(1)
        path = caller.f_globals.get("__file__")
        self.path = Path(path) if path else None
        page = f"{name}_seed{self.seed}" if self.seed else name
        self.page = Path("runs") / "labs" / f"{page}.html"
        self.expected: list[Expected] = []
        self.shown: list[Shown] = []
        self.leading: Any = None
        """The plot that the page opens with."""
        self.started = time.perf_counter()

    def text(self, text: str) -> None:
        """Show a sentence or a printed output."""
        print(text)
        self._keep("text", text)

    def source(self, function: Callable[..., Any]) -> None:
        """Show the code of a function of the labs' own modules."""
        code = inspect.getsource(function)
        print(code)
        self._keep("source", coloured(code))

    def table(self, head: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Show a table; numbers with three significant digits."""
        cells = [[_cell(value) for value in row] for row in rows]
        widths = [max(map(len, column)) for column in zip(head, *cells, strict=True)]
        for row in (head, *cells):
            print("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)))
        self._keep("table", (head, cells))

    def plot(
        self,
        title: str,
        traces: Sequence[Trace],
        *,
        x: str,
        y: str,
        look_at: str,
        right: str = "",
        leads: bool = False,
    ) -> None:
        """Show curves in one picture; the curves take the palette's colours in their order.

        Args:
            right: the title of a second axis, for the curves that are made with `right=True`.
            leads: the page opens with this plot; it answers the lab's question.
        """
        free = iter(PALETTE)
        painted = [
            trace if trace.colour == "muted" else trace._replace(colour=next(free))
            for trace in traces
        ]
        frame = {
            "id": f"plot-{len(self.shown)}",
            "title": title,
            "caption": f"Look at: {look_at}",
            "x": x,
            "y": y,
            "right": right,
        }
        plot = framed(frame, painted, height=HEIGHT)[0]
        print(f"[plot] {title}. {plot.caption}")
        self._keep("plot", plot)
        if leads:
            self.leading = plot
        if self.path is None:
            self._show(plot)

    def expect(self, name: str, value: SupportsFloat, low: float, high: float, source: str) -> None:
        """Measure a number, and note the band that it must lie in.

        Args:
            source: of the band: "theory: ..." or "seeds 0 to 4: ...".
        """
        expected = Expected(name, float(value), low, high, source)
        print(expected)
        self.expected.append(expected)

    def finish(self, lesson: str) -> None:
        """Write the page, and hold all numbers to their bands. The last line is the lesson, which
        holds where all numbers are inside.

        Raises:
            OutsideBandError: a number lies outside its band.
        """
        if self.path:
            print(f"page: {self.write_page(lesson)}")
            print(f"code: {self.path.resolve()}")
        outside = [str(expected) for expected in self.expected if not expected.inside]
        if outside:
            raise OutsideBandError("\n".join(["", *outside, CHANGED]))
        print(f"Lesson: {lesson}")

    def write_page(self, lesson: str) -> Path:
        """Write one HTML page that needs no network, and give its path."""
        if self.path is None:
            raise FileNotFoundError(
                f"{self.name} runs in a notebook: a page is written where it runs as a program"
            )
        source = self.path.read_text(encoding="utf-8")
        cells = list(cells_of(source))
        seconds = time.perf_counter() - self.started
        page = fill_template(
            HERE / "lab.html", self.name, {}, [],
            title=f"Lab {title_of(source)}",
            question=question_of(source),
            leading=self.leading,
            cells=[(cell, list(self._of(cell, cells))) for cell in cells],
            lesson=lesson,
            expected=self.expected,
            seconds=seconds,
            seed=self.seed,
        )  # fmt: skip
        self.page.parent.mkdir(parents=True, exist_ok=True)
        with durable(self.page) as temporary:
            temporary.write_bytes(page.encode("utf-8", "replace"))
        return self.page.resolve()

    def _show(self, plot: Any) -> None:
        """Draw a plot below the cell of a notebook."""
        notebook = sys.modules.get("IPython.display")
        if notebook is None:
            return
        page = escape(fill_template(HERE / "plot.html", self.name, {}, [], plot=plot))
        notebook.display(
            notebook.HTML(
                f'<div><iframe srcdoc="{page}" title="{escape(plot.title)}" '
                f'style="width: 100%; height: {HEIGHT + MARGIN}px; border: 0"></iframe></div>'
            )
        )

    def _of(self, cell: Cell, cells: Sequence[Cell]) -> Iterator[Shown]:
        """The outputs that stand below a cell."""
        before = max((one.last_line for one in cells if one.last_line < cell.last_line), default=0)
        return (shown for shown in self.shown if before < shown.line <= cell.last_line)

    def _keep(self, kind: str, value: Any) -> None:
        """Note an output with the line of the lab that made it."""
        frame = sys._getframe(2)
        while frame.f_back and Path(frame.f_code.co_filename) != self.path:
            frame = frame.f_back
        self.shown.append(Shown(frame.f_lineno, kind, value))


def cells_of(source: str) -> Iterator[Cell]:
    """The cells of a lab as HTML, in their order."""
    number = 0
    for part in re.split(r"^(?=# %%)", source, flags=re.MULTILINE):
        first, _, body = part.partition("\n")
        number += part.count("\n")
        if "[markdown]" in first:
            text = re.sub(r"^# ?", "", QUESTION.sub("", body), flags=re.MULTILINE)
            yield Cell("text", Markup(MARKDOWN.render(text)), number)
        elif body.strip():
            yield Cell("code", coloured(body), number)


def coloured(code: str) -> Markup:
    """Python code as HTML, its kinds of words as classes."""
    return Markup(highlight(code.strip("\n"), PythonLexer(), HtmlFormatter(nowrap=True)))


def ratio(value: float, base: float) -> float:
    """One measured number over another; infinite over 0, as before the first update."""
    return value / base if base else math.inf


def title_of(source: str) -> str:
    """The heading of a lab's first cell."""
    heading = re.search(r"^# # (.*)$", source, flags=re.MULTILINE)
    return heading[1] if heading else ""


def question_of(source: str) -> str:
    """The question of a lab's first cell."""
    question = QUESTION.search(source)
    return question[1] if question else ""


def _cell(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
