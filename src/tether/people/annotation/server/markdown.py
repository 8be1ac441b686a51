"""Texts of models and people as HTML that cannot do anything: no raw HTML, no images, no links but
plain web addresses.
"""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any

from markdown_it import MarkdownIt
from markdown_it.token import Token
from markupsafe import Markup

from tether.core.visible import visible

CUT = 8_000
"""Characters of a text that are shown at once; the rest is asked for."""
LONGEST = 20_000
"""Beyond it Markdown is not read: time grows with the square of some texts' length, and half a
second is enough.
"""
BLOCK = 20_000
CELLS = 10_000
"""Of tables whose short rows are filled up with empty cells, as many as a text of `LONGEST`
characters can hold full ones.
"""


def shown_text(text: str) -> str:
    """The text without what cannot be written as UTF-8 (halves of surrogate pairs), controls by
    their signs.
    """
    whole = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return visible(whole.replace("\r\n", "\n").replace("\r", "\n"))


def rendered(text: str) -> Markup:
    """Markdown as HTML; a text beyond `LONGEST`, or one whose tables may have more than `CELLS`, as
    it is.
    """
    return as_written(text) if len(text) > LONGEST or _cells(text) > CELLS else _rendered(text)


def _cells(text: str) -> int:
    """The largest number of cells that a table of all these lines could have."""
    lines = re.split(r"[\r\n]", text)
    return len(lines) * max(line.count("|") for line in lines)


@lru_cache(maxsize=256)
def _rendered(text: str) -> Markup:
    return Markup(_parser().render(shown_text(text)))


def as_written(text: str) -> Markup:
    """The text as it is, in blocks that a browser lays out only when they come into view."""
    text = shown_text(text)
    blocks = (text[start : start + BLOCK] for start in range(0, max(len(text), 1), BLOCK))
    return Markup("".join(f'<pre class="plain">{html.escape(block)}</pre>' for block in blocks))


def beginning(text: str) -> Markup:
    """The first part of a long text, cut where a line or a word ends if there is such a place
    nearby.
    """
    if len(text) <= CUT:
        return rendered(text)
    edge = max(text.rfind("\n", CUT - 500, CUT), text.rfind(" ", CUT - 200, CUT))
    return rendered(text[: edge if edge > 0 else CUT])


@cache
def _parser() -> MarkdownIt:
    parser = MarkdownIt("commonmark", {"html": False, "maxNesting": 60}).enable(
        ["table", "strikethrough"],
    )
    parser.validateLink = lambda url: bool(
        re.match(r"(https?://|mailto:)", url.strip(), re.IGNORECASE),
    )
    renderer: Any = parser.renderer
    renderer.rules |= {
        "image": _image,
        "link_open": _link,
        "heading_open": _heading,
        "heading_close": _heading,
        "fence": _fence,
    }
    return parser


def _image(tokens: Sequence[Token], index: int, options: object, env: object) -> str:
    return (
        '<span class="image">[image: '
        f"{html.escape(tokens[index].content) or 'without a description'}]</span>"
    )


def _link(tokens: Sequence[Token], index: int, options: object, env: object) -> str:
    address = html.escape(str(tokens[index].attrGet("href") or ""))
    return (
        f'<a href="{address}" title="{address}" rel="noopener nofollow noreferrer" target="_blank">'
    )


def _heading(tokens: Sequence[Token], index: int, options: object, env: object) -> str:
    # The page's own headings are the first two levels.
    level = min(6, int(tokens[index].tag[1]) + 2)
    return f"<h{level}>" if tokens[index].nesting == 1 else f"</h{level}>\n"


def _fence(tokens: Sequence[Token], index: int, options: object, env: object) -> str:
    return f'<pre tabindex="0"><code>{html.escape(tokens[index].content)}</code></pre>\n'
