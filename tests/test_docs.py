"""The documents: the index lists them all, links and anchors lead somewhere, and files of this
project that they name are there.
"""

import json
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "tether"
DOCS = sorted((ROOT / "docs").rglob("*.md"))
LINKING = [*sorted(ROOT.glob("*.md")), *DOCS]
OF_THEIR_DAY = {"lab", "decisions"}
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "AGENTS.md",
    *(p for p in DOCS if not OF_THEIR_DAY & {p.stem, p.parent.name}),
]
FOLDERS = {
    "src",
    "tests",
    "docs",
    "studies",
    "benchmarks",
    "tools",
    *(path.name for path in PACKAGE.iterdir() if path.is_dir()),
}


def without_code(text):
    """A page without its fenced blocks and its words in backticks."""
    return re.sub(r"`[^`\n]*`", "`", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S))


def links_in(page, text):
    """(file, anchor) of each relative link of a page; the anchor is empty without one."""
    for target, anchor in re.findall(r"\]\(([^)\s#]*)(?:#([^)\s]*))?\)", without_code(text)):
        if not re.match(r"\w+:", target):
            yield (page.parent / target).resolve() if target else page, anchor


def links_of(page):
    return list(links_in(page, page.read_text(encoding="utf-8")))


def anchors_in(text):
    """The anchors that GitHub gives to the headings of a page."""
    seen = {}
    for heading in re.findall(
        r"^#{1,6} +(.+?) *$",
        re.sub(r"^```.*?^```", "", text, flags=re.M | re.S),
        re.M,
    ):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        name = re.sub(r"[^\w\- ]", "", words.lower()).replace(" ", "-")
        count = seen[name] = seen.get(name, -1) + 1
        yield f"{name}-{count}" if count else name


@cache
def anchors_of(page):
    return set(anchors_in(page.read_text(encoding="utf-8")))


def paths_in(text):
    """Names in backticks that look like files of the project."""
    names = re.findall(
        r"`([\w./-]+\.(?:py|md|toml|svg|jsonl))`",
        re.sub(r"^```.*?^```", "", text, flags=re.M | re.S),
    )
    return {name for name in names if "/" in name and name.split("/")[0] in FOLDERS}


def test_the_index_lists_every_document():
    linked = {path for path, _ in links_of(ROOT / "docs" / "README.md")}
    assert [
        str(p)
        for p in DOCS
        if p not in linked
        and p != ROOT / "docs" / "README.md"
        and p.parent.name not in OF_THEIR_DAY
    ] == []


def test_every_document_has_a_folder():
    """Of the pages in docs/ itself, one is the index and one the lab book."""
    assert {p.name for p in DOCS if p.parent.name == "docs"} == {"README.md", "lab.md"}


@pytest.mark.parametrize("page", LINKING, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    broken = [
        f"{path}#{anchor}"
        for path, anchor in links_of(page)
        if not path.exists() or (anchor and path.suffix == ".md" and anchor not in anchors_of(path))
    ]
    assert broken == []


def test_links_and_anchors_are_read_as_github_does():
    page = ROOT / "docs" / "README.md"
    text = "[a](../README.md#x-y) [b](#here) [c](https://a.b/c.md) `[d](nowhere.md)`"
    assert list(links_in(page, text)) == [(ROOT / "README.md", "x-y"), (page, "here")]
    text = "# [ppo] and `kl`: a *b*\n## Two\n## Two\n```\n# no heading\n```\n## ε, and β_1\n"
    assert list(anchors_in(text)) == ["ppo-and-kl-a-b", "two", "two-1", "ε-and-β_1"]
    assert sum(bool(anchor) for p in LINKING for _, anchor in links_of(p)) > 40


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_files_that_are_named_are_there(page):
    names = paths_in(page.read_text(encoding="utf-8"))
    assert (
        sorted(
            name for name in names if not (ROOT / name).exists() and not (PACKAGE / name).exists()
        )
        == []
    )


def test_a_missing_file_would_be_noticed():
    assert paths_in(
        "`src/tether/nowhere.py` and `core/config.py`, `summary.json`, `mine.toml`",
    ) == {
        "src/tether/nowhere.py",
        "core/config.py",
    }
    assert sum(len(paths_in(page.read_text(encoding="utf-8"))) for page in PAGES) > 60


def test_the_lab_book_has_verdict_and_command_of_each_claim_and_a_line_for_each_record():
    text = (ROOT / "docs" / "lab.md").read_text(encoding="utf-8")
    month = re.search(r"^## (\d{4}-\d\d)$", text, re.M)[1]
    rows = re.findall(r"^\| \d\d-(\d\d) \| [+−?] \| (\S.*) \| (\S.*) \|$", text, re.M)
    assert len(rows) > 100 and len(rows) == len(re.findall(r"^\| \d", text, re.M))
    assert [day for day, *_ in rows] == sorted((day for day, *_ in rows), reverse=True)
    lines = [f"{month}-{day} · {claim}" for day, claim, _ in rows]
    tables = json.loads((ROOT / "benchmarks/results/tables.json").read_text(encoding="utf-8"))
    cited = {table["entry"] for table in tables["tables"] if table["entry"]}
    assert len(cited) > 10
    assert [entry for entry in cited if not any(line.startswith(entry) for line in lines)] == []
