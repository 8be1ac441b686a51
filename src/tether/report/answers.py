"""Answers to the same held-out prompts before and after, chosen by a rule that shows the failures
too.
"""

from __future__ import annotations

from collections.abc import Sequence

from tether.report.numbers import SENTENCES
from tether.report.reading import Row, SubRun, finite

SHOWN = 24
SAYS = SENTENCES["answers"]


def answer_groups(
    rows: Sequence[Row],
    count: int = SHOWN,
) -> tuple[str, list[tuple[str, Sequence[Row]]]]:
    """The way in which the answers were chosen, in one sentence, and groups of answers by title.

    Groups are a third each of best, median and worst changes of gold.
    """
    usable = [row for row in rows if "before" in row and "after" in row]
    changes = [(change, row) for row in usable if (change := gold_change(row)) is not None]
    ranked = [row for _, row in sorted(changes, key=lambda pair: -pair[0])]
    if not ranked:
        return "", []
    unscored = len(usable) - len(ranked)
    third = count // 3
    text = SAYS["all" if len(ranked) <= count else "thirds"].format(count=len(ranked), third=third)
    text += " " + SAYS["unscored"].format(count=unscored) if unscored else ""
    if len(ranked) <= count:
        return text, [("All answers, best change first", ranked)]
    middle = (len(ranked) - third) // 2
    return text, [
        (f"The {third} best changes", ranked[:third]),
        (f"The {third} around the median: the typical change", ranked[middle : middle + third]),
        (f"The {third} worst changes", ranked[: -third - 1 : -1]),
    ]


def training_samples(policy: SubRun | None, count: int = 4) -> list[Row]:
    """A few samples from the first, the middle and the last step recorded."""
    samples = [
        row for row in (policy.samples if policy else ()) if finite(row.get("step")) is not None
    ]
    steps = sorted({row["step"] for row in samples})
    chosen = sorted({steps[0], steps[len(steps) // 2], steps[-1]}) if steps else []
    return [
        row
        for step in chosen
        for row in [row for row in samples if row["step"] == step and "response" in row][:count]
    ]


def gold_change(row: Row) -> float | None:
    """The gold score after less that before; None where one is missing."""
    before = finite(row.get("gold_before"))
    after = finite(row.get("gold_after"))
    return None if before is None or after is None else after - before
