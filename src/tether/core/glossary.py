"""Metrics and terms with their meanings (glossary.toml)."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

from tether.core.tables import table_beside

_ROWS = table_beside(__file__, "glossary.toml")
METRICS: dict[str, str] = _ROWS["metrics"]
"""Columns of metrics.jsonl, by their names."""
TERMS: dict[str, str] = _ROWS["terms"]
"""Terms of the field and of tether."""
REPORT: dict[str, str] = _ROWS["report"]
"""Words of the report, of its charts and of terminal lines."""
ALSO: dict[str, str] = _ROWS["also"]
"""Other names, with the term that each stands for."""
EVERY = {**TERMS, **REPORT, **METRICS}
"""All entries."""


def meanings(word: str) -> dict[str, str]:
    """The entries of a word: of its whole name or another one, and of the last part of a metric."""
    plain = _plain(word)
    names = [*(name for name in EVERY if _plain(name) == plain)]
    names += [term for name, term in ALSO.items() if _plain(name) == plain]
    names += [name for name in METRICS if _plain(name.rpartition("/")[2]) == plain]
    return {name: EVERY[name] for name in names}


def near(word: str, others: Iterable[str] = ()) -> list[str]:
    """Names of entries or others that are written almost as `word`, the nearest first, or begin
    with it.
    """
    plain = _plain(word)
    spellings = {_plain(name.rpartition("/")[2]): name for name in METRICS}
    spellings |= {_plain(name): name for name in [*others, *ALSO, *EVERY]}
    close = difflib.get_close_matches(plain, list(spellings), cutoff=0.7)
    return [spellings[one] for one in close or spellings if close or one.startswith(plain)][:3]


def _plain(word: str) -> str:
    """A name in small letters and words, without apostrophes and the s of a plural."""
    words = " ".join(re.split(r"[-_/.\s]+", word.lower().replace("'", ""))).strip()
    return re.sub(r"(?<=\w\w[^\Ws])s\b", "", words)
