"""Metrics and terms with their meanings (glossary.toml)."""

from __future__ import annotations

import difflib
import tomllib
from pathlib import Path

_TABLES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
METRICS: dict[str, str] = _TABLES["metrics"]
"""Columns of metrics.jsonl, by their names."""
TERMS: dict[str, str] = _TABLES["terms"]
"""Terms of the field, of tether and of the report."""
EVERY = {**TERMS, **METRICS}
"""All entries."""
CLOSE = 0.75
"""Likeness from which a name is taken for another."""


def meanings(word: str) -> dict[str, str]:
    """The entries of a word: of its whole name, and of the last part of a metric."""
    plain = _plain(word)
    exact = {name: text for name, text in EVERY.items() if _plain(name) == plain}
    parts = {
        name: text for name, text in METRICS.items() if _plain(name.rpartition("/")[2]) == plain
    }
    return {**exact, **parts}


def near(word: str, most: int = 3) -> list[str]:
    """Names that are written almost as `word`, the nearest first."""
    spellings = {_plain(name.rpartition("/")[2]): name for name in METRICS}
    spellings |= {_plain(name): name for name in EVERY}
    return [
        spellings[one]
        for one in difflib.get_close_matches(_plain(word), list(spellings), n=most, cutoff=CLOSE)
    ]


def _plain(word: str) -> str:
    return " ".join(word.lower().replace("_", " ").replace("-", " ").replace("/", " ").split())
