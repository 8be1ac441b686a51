"""The page of words names what is there: every row's file holds one of its names, and every name is
in the source.
"""

import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "tether"
ROWS = [
    [cell.strip() for cell in line.split("|")[1:-1]]
    for line in (ROOT / "docs" / "reference" / "vocabulary.md")
    .read_text(encoding="utf-8")
    .splitlines()
    if line.startswith("| ") and not line.startswith("| word")
]
CODE = re.compile(r"`([^`]+)`")


@cache
def everything():
    return "\n".join(path.read_text(encoding="utf-8") for path in sorted(SOURCE.rglob("*.py")))


def names(cell):
    """The identifiers in a cell: `critic = true` is `critic`, `kl.mode = "adaptive"` is `mode`."""
    words = (word.partition(" = ")[0].strip("[]") for word in CODE.findall(cell))
    return [word if "/" in word else word.rpartition(".")[2] for word in words]


@pytest.mark.parametrize("row", ROWS, ids=[row[0] for row in ROWS])
def test_a_rows_names_are_in_the_source(row):
    *_, ours, place = row
    (file,) = (word.partition(" (")[0] for word in CODE.findall(place)[:1])
    text = (SOURCE / file).read_text(encoding="utf-8")
    for name in names(ours):
        assert re.search(rf"\b{re.escape(name)}\b", everything()), name
    assert any(re.search(rf"\b{re.escape(name)}\b", text) for name in names(ours)), (
        file,
        names(ours),
    )


def test_all_words_that_were_asked_for_are_there():
    words = " ".join(row[0] for row in ROWS).lower()
    for word in (
        "policy",
        "trajectory",
        "return",
        "advantage",
        "baseline",
        "on-policy",
        "value",
        "gae",
        "kl",
        "entropy",
        "clip",
    ):
        assert word in words
