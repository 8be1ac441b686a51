"""Rows that a stage reads and does not train on, or cuts: counted by reason in its summary, and said
in one sentence everywhere.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from tether.core.types import Facts

SEEN = 0.05
"""Share of the rows left out, or cut, from which on it is a warning."""
DONE = {"skipped": "do not train", "cut": "are cut"}
"""The fate of rows in words, by the key of a summary that counts them."""
TOO_LONG = re.compile(r"(longer than .*); (\d+) would keep it")


def too_long(tokens: int, limit: int, key: str, context: int) -> str:
    """The reason to leave out or cut a row of so many tokens, with the power of two that would keep
    it, or the model's context where that is smaller; no limit keeps a row beyond the context.
    """
    if tokens > context:
        return f"longer than the model's context of {context} tokens"
    size = min(1 << (tokens - 1).bit_length(), context)
    return f"longer than {key} = {limit} tokens; {size} would keep it"


def left_out_words(summary: Facts, rows: float | None) -> str:
    """Number of rows that do not train or are cut, the reasons, and the limit that would keep nearly
    all long rows; empty below SEEN.
    """
    sentences = []
    for key, done in DONE.items():
        given = summary.get(key)
        counts = given if isinstance(given, Mapping) else {}
        total = sum(counts.values())
        if not rows or total < max(1, SEEN * rows):
            continue
        matched = {reason: TOO_LONG.fullmatch(reason) for reason in counts}
        parts = [f"{n:,} {reason}" for reason, n in counts.items() if not matched[reason]]
        long_rows = [(int(m[2]), counts[reason], m[1]) for reason, m in matched.items() if m]
        for size, _, reason in sorted(long_rows):
            if (beyond := sum(n for other, n, _ in long_rows if other > size)) < SEEN * rows:
                but = f"all but {beyond:,}" if beyond else "all"
                parts.insert(
                    0,
                    f"{sum(row[1] for row in long_rows):,} {reason}; {size:,} would keep {but}",
                )
                break
        seen = f"{total:,} of {rows:,.0f} rows ({total / rows:.0%}) {done}"
        sentences.append(f"{seen}: {', '.join(parts)}.")
    return " ".join(sentences)
