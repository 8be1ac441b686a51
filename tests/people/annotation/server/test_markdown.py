"""Texts become harmless HTML, in bounded time, without losing a character."""

from __future__ import annotations

import html
import re
import time

import pytest

from tether.people.annotation.server.markdown import (
    BLOCK,
    CUT,
    LONGEST,
    as_written,
    beginning,
    rendered,
    shown_text,
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a *b* **c** `d<`", "<p>a <em>b</em> <strong>c</strong> <code>d&lt;</code></p>"),
        ("# One\n\n###### Six", "<h3>One</h3>\n<h6>Six</h6>"),
        ("<b>x</b>", "<p>&lt;b&gt;x&lt;/b&gt;</p>"),
        ("[x](javascript:alert(1))", "<p>[x](javascript:alert(1))</p>"),
        ("[x](//evil.example)", "<p>[x](//evil.example)</p>"),
        ("![a cat](http://x/y.png)", '<p><span class="image">[image: a cat]</span></p>'),
        ("```py\na < b\n```", '<pre tabindex="0"><code>a &lt; b\n</code></pre>'),
        ("~~a~~", "<p><s>a</s></p>"),
        ("a\x00b\x1b[31m", "<p>a␀b␛[31m</p>"),
        ("half \ud83d", "<p>half �</p>"),
        ("whole \ud83d\ude00", "<p>whole 😀</p>"),
    ],
)
def test_markdown(text, expected):
    assert str(rendered(text)).strip() == expected


def test_links_lead_out_without_a_trace():
    found = str(rendered('[x](https://a.example/?q="b"&c)'))
    assert (
        'href="https://a.example/?q=%22b%22&amp;c"' in found
        and ('rel="noopener nofollow noreferrer"') in found
    )


def test_tables_and_deep_lists_are_whole():
    assert str(rendered("|a|b|\n|-|-|\n|1|2|")).count("<td>") == 2
    deep = "\n".join(f"{'  ' * n}- level {n}" for n in range(25))
    assert all(
        f"level {n}\n" in str(rendered(deep)) or f"level {n}<" in str(rendered(deep))
        for n in range(25)
    )


def test_a_plain_text_keeps_every_character():
    text = "".join(chr(32 + n % 90) for n in range(3 * BLOCK + 7))
    blocks = re.findall(r'<pre class="plain">(.*?)</pre>', str(as_written(text)), re.DOTALL)
    assert len(blocks) == 4 and html.unescape("".join(blocks)) == text and as_written("") != ""


def test_the_beginning_ends_where_a_word_does():
    shown = html.unescape(re.sub(r"<[^>]+>", "", str(beginning("word " * 4000)))).strip()
    assert CUT - 205 < len(shown) <= CUT and set(shown.split()) == {"word"}
    assert len(str(beginning("x" * 10**6))) < CUT + 20
    assert shown_text("a" * 10) == "a" * 10


@pytest.mark.parametrize("columns", [41, 256, 4000])
@pytest.mark.parametrize("end", ["\n", "\r", "\r\n", "\n> ", "\n- "])
def test_rows_of_a_table_that_are_filled_up_are_bounded(columns, end):
    table = end.join(["", "a|" * columns, "-|" * columns, *("|b" for _ in range(250))])
    for text in (table, "a\n\n".join([table] * 4))[: 1 + (columns < 256)]:
        started = time.process_time()
        assert len(str(rendered(text))) < 100_000 + 2 * len(text)
        assert time.process_time() - started < 0.4


def test_a_large_table_is_one_still():
    rows = "\n".join(f"|{'x|' * 12}" for _ in range(300))
    assert str(rendered(f"|{'h|' * 12}\n|{'-|' * 12}\n{rows}")).count("<td>") == 3600


@pytest.mark.parametrize(
    "piece",
    [
        "[",
        "![",
        "[a](",
        "*a ",
        "_a",
        "`" * 3 + "\n",
        "> ",
        "- ",
        "|a",
        "<a ",
        "&",
        "\\",
        "~~a",
        "a\n",
    ],
)
def test_no_text_takes_long(piece):
    started = time.process_time()
    rendered(piece * (LONGEST // len(piece)))
    rendered(piece * 10**6)
    assert time.process_time() - started < 5
