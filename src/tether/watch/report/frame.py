"""The frame of every page: templates, styles and scripts in one file that needs no network, in
which nothing that a model wrote can act.
"""

from __future__ import annotations

import base64
import hashlib
import logging
import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape
from resvg_py import svg_to_bytes

from tether.core.errors import RunError
from tether.core.keeping import write_whole
from tether.core.visible import visible
from tether.watch.report import about
from tether.watch.report.numbers import decimal, signed
from tether.watch.report.plotting import SIZE, Plot
from tether.watch.report.reading import LONGEST_NAME, finite, mapping, printable
from tether.watch.report.rollouts import gold_change

_LOG = logging.getLogger(__name__)
HERE = Path(__file__).resolve().parent
LETTER = '<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"><text y="9">a</text></svg>'
Figures = Mapping[str, Sequence[Plot]]
"""By section, in the page's order; an empty list leaves its section out."""
SCRIPTS = ("rollouts.js", "page.js")
INTERVAL = re.compile(r"(?<= )(\[(?:too few|[−+]?\d[\d.,%]*, [−+]?\d[\d.,%]*)\])")
PAIR = re.compile(r"(-?\d+) (-?\d+)")
SECTION = re.compile(r'<section[^>]* id="([^"]+)"(?: aria-label="([^"]+)")?><h2>(.*?)</h2>')


def with_code(text: str) -> Markup:
    """A sentence as HTML, escaped, with text in backticks as code."""
    parts = [escape(visible(part)) for part in text.split("`")]
    if len(parts) % 2 == 0:
        return Markup("`").join(parts)
    return Markup("").join(
        Markup("<code>{}</code>").format(part) if place % 2 else part
        for place, part in enumerate(parts)
    )


def with_interval(cell: str) -> Markup:
    """A cell of a table as HTML, escaped; on a wide page its interval stays on one line."""
    parts = [escape(visible(part)) for part in INTERVAL.split(cell)]
    parts[1::2] = [Markup('<span class="interval">{}</span>').format(one) for one in parts[1::2]]
    return Markup("").join(parts)


def sections(body: str) -> list[tuple[str, Markup]]:
    """The list of contents of a page: id and heading of each section with an id, from three on."""
    listed = SECTION.findall(body)
    return [(id, Markup(label or title)) for id, label, title in listed if len(listed) > 2]


def fitted(path: str, x: float, y: float, width: float, height: float) -> str:
    """A drawing's path in a box of a picture. Its strokes keep their thickness without a
    stretched box and `vector-effect`, which programs that make a PNG do not know.
    """

    def place(pair: re.Match[str]) -> str:
        across, down = (int(number) / SIZE for number in pair.groups())
        return f"{x + width * across:.1f} {y + height * down:.1f}"

    return PAIR.sub(place, path)


FILTERS = {
    "fitted": fitted,
    "interval": with_interval,
    "sections": sections,
    "text": printable,
    "mapping": mapping,
    "number": finite,
    "signed": signed,
    "gold_change": gold_change,
    "code": with_code,
    "anchor": about.anchor,
    "method": about.method_name,
    "score": lambda value: "–" if (score := finite(value)) is None else decimal(score),
}
"""Of the templates. Besides, every text that they print is made visible and then escaped."""


def fill_template(
    template: Path,
    name: str,
    drawn: Figures,
    notes: Sequence[str],
    scripts: Sequence[str] = SCRIPTS,
    **values: object,
) -> str:
    """A page's text: the template, which may extend this room's, with its figures, script and style
    put into it.

    Every text among `values` is made visible and escaped where it is printed, so it may come from a
    model.
    """
    script = "\n".join((HERE / one).read_text(encoding="utf-8") for one in scripts)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    values = {"title": name, "about": [], **values}
    return (
        _templates(template.parent)
        .get_template(template.name)
        .render(
            name=printable(name, LONGEST_NAME),
            notes=[printable(note, 400) for note in notes],
            figures=drawn,
            script=script,
            digest=digest,
            style=(HERE / "page.css").read_text(encoding="utf-8"),
            **values,
        )
    )


@cache
def _templates(folder: Path) -> Environment:
    """The templates of a folder and of this room, compiled once a process."""
    environment = Environment(
        loader=FileSystemLoader([folder, HERE]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: (
            visible(value) if isinstance(value, str) and not isinstance(value, Markup) else value
        ),
    )
    environment.filters |= FILTERS
    return environment


def write_page(
    output: Path,
    template: str,
    name: str,
    drawn: Figures,
    notes: Sequence[str],
    scripts: Sequence[str] = SCRIPTS,
    **values: object,
) -> Path:
    """Write a page of this room, and give its path. Beside it go its headline and the charts of
    `picture`, for a README, a message or a talk: as SVG, and as PNG where the machine has a font.
    """
    text = ""
    for one, path in ((template, output), ("picture.svg", output.with_suffix(".svg"))):
        text = fill_template(HERE / one, name, drawn, notes, scripts, **values)
        write_whole(path, text.encode("utf-8", "replace"))
    image = output.with_suffix(".png")
    if svg_to_bytes(LETTER) != svg_to_bytes(LETTER.replace("a", "")):
        write_whole(image, svg_to_bytes(text, zoom=2))
    else:
        _LOG.warning("%s is not written, since this machine has no font. Install one.", image)
    return output


def page_path(output: Path) -> Path:
    """The path of a page to write.

    Raises:
        RunError: it is a folder.
    """
    if output.is_dir():
        raise RunError(f"{output} is a folder. Give the path of the HTML file to write.")
    return output
