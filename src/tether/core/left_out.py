"""Rows that a stage reads and does not train on: counted by reason in its summary, and said in one
sentence everywhere.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

SEEN = 0.05
"""Share of the rows left out from which on it is a warning."""
TOO_LONG = re.compile(r"(longer than .*); (\d+) would keep it")


def too_long(tokens: int, limit: int, key: str) -> str:
    """The reason to leave out a row of so many tokens, with the power of two that would keep it."""
    return f"longer than {key} = {limit} tokens; {1 << (tokens - 1).bit_length()} would keep it"


def left_out_words(skipped: Mapping[str, object], rows: float | None) -> str:
    """Number of rows that do not train, the reasons, and the limit that would keep nearly all long
    rows; empty below SEEN.
    """
    counts = {reason: n for reason, n in skipped.items() if isinstance(n, int) and n}
    total = sum(counts.values())
    if not rows or total < SEEN * rows:
        return ""
    matched = {reason: TOO_LONG.fullmatch(reason) for reason in counts}
    parts = [f"{n:,} {reason}" for reason, n in counts.items() if not matched[reason]]
    long_rows = [(int(m[2]), counts[reason], m[1]) for reason, m in matched.items() if m]
    for size, _, reason in sorted(long_rows):
        if (beyond := sum(n for other, n, _ in long_rows if other > size)) < SEEN * rows:
            long = sum(n for _, n, _ in long_rows)
            but = f"all but {beyond:,}" if beyond else "all"
            parts.insert(0, f"{long:,} {reason}; {size:,} would keep {but}")
            break
    return f"{total:,} of {rows:,.0f} rows ({total / rows:.0%}) do not train: {', '.join(parts)}."
