"""The documents: the index lists them all, and files of this project that they name are there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "tether"
DOCS = sorted((ROOT / "docs").rglob("*.md"))
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *(p for p in DOCS if p.name != "lab.md" and p.parent.name != "decisions"),
]
FOLDERS = {
    "src",
    "tests",
    "docs",
    "studies",
    "benchmarks",
    *(path.name for path in PACKAGE.iterdir() if path.is_dir()),
}


def links_of(page):
    """The files that a page links to."""
    targets = re.findall(r"\]\(([^)\s#]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
    return {(page.parent / target).resolve() for target in targets if "://" not in target}


def paths_in(text):
    """Names in backticks that look like files of the project."""
    names = re.findall(
        r"`([\w./-]+\.(?:py|md|toml|svg|jsonl))`",
        re.sub(r"^```.*?^```", "", text, flags=re.M | re.S),
    )
    return {name for name in names if "/" in name and name.split("/")[0] in FOLDERS}


def test_the_index_lists_every_document():
    linked = links_of(ROOT / "docs" / "README.md")
    assert [
        str(p)
        for p in DOCS
        if p not in linked and p != ROOT / "docs" / "README.md" and p.parent.name != "decisions"
    ] == []


@pytest.mark.parametrize(
    "page",
    [*DOCS, ROOT / "README.md", ROOT / "CONTRIBUTING.md"],
    ids=lambda p: str(p.relative_to(ROOT)),
)
def test_links_lead_somewhere(page):
    assert [str(path) for path in links_of(page) if not path.exists()] == []


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
        "`src/tether/nowhere.py` and `core/config.py`, `summary.json`, `mine.toml`"
    ) == {
        "src/tether/nowhere.py",
        "core/config.py",
    }
    assert sum(len(paths_in(page.read_text(encoding="utf-8"))) for page in PAGES) > 60
