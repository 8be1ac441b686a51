"""The content policy of every page: its own script by that script's digest, and nothing else that
acts.
"""

from __future__ import annotations

import base64
import hashlib

import pytest
from tests.watch.report.synthetic_sweep import write_sweep
from tests.watch.report.test_report import Page

from tether.watch.report.duel import write_duel
from tether.watch.report.overlay import write_overlay
from tether.watch.report.page import write_report


@pytest.fixture(params=["run", "sweep", "overlay", "duel"])
def page(request, tmp_path, synthetic):
    """A page of each kind."""
    output = tmp_path / "page.html"
    if request.param == "sweep":
        return Page(write_report(write_sweep(tmp_path / "sweep"), output))
    if request.param == "duel":
        counts = {"pairs": 1, "wins": 1, "ties": 0, "losses": 0}
        part = {**counts, "win_rate": None, "at_equal_length": None}
        figures = {
            "models": ["a", "b"],
            "judge": "c",
            "num_prompts": 1,
            "failures": {},
            "position": None,
            "words": {"a": 1.0, "b": 1.0},
            "unanswered": {"a": {}, "b": {}},
            "contests": [{"first": "a", "second": "b", "results": {"all": part}}],
            "ranking": {"standings": [], "reason": ""},
        }
        write_duel(output, figures, [])
        return Page(output)
    first = synthetic.write_quickstart(tmp_path / "one", arms=False)
    if request.param == "run":
        return Page(write_report(first, output))
    second = synthetic.write_quickstart(tmp_path / "two", arms=False)
    return Page(write_overlay([first, second], output))


def policy_of(page):
    """The directives of a page's policy, each with its sources."""
    texts = [
        attributes["content"]
        for tag, attributes in page.elements
        if tag == "meta" and attributes.get("http-equiv") == "Content-Security-Policy"
    ]
    assert len(texts) == 1
    directives = (directive.split() for directive in texts[0].split(";"))
    return {words[0]: set(words[1:]) for words in directives}


def test_a_page_runs_its_own_script_alone_by_its_digest(page):
    (script,) = page.scripts
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert len(script) > 1000
    assert policy_of(page) == {
        "default-src": {"'none'"},
        "script-src": {f"'sha256-{digest}'"},
        "style-src": {"'unsafe-inline'"},
        "img-src": {"data:"},
        "base-uri": {"'none'"},
        "form-action": {"'none'"},
    }


def test_the_policy_comes_before_all_that_it_governs(page):
    tags = [tag for tag, _ in page.elements]
    policy = next(n for n, (_, given) in enumerate(page.elements) if "http-equiv" in given)
    assert policy < min(tags.index(tag) for tag in ("style", "script", "link", "body"))


def test_no_attribute_of_a_page_is_a_script_or_leads_elsewhere(page):
    given = [pair for _, attributes in page.elements for pair in attributes.items()]
    assert [name for name, _ in given if name.startswith("on")] == []
    places = [str(value) for name, value in given if name in ("href", "src", "action")]
    assert [place for place in places if not place.startswith(("#", "data:"))] == []
