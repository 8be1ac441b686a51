"""Answers to the same held-out prompts before and after, chosen by a rule that shows the failures
too.
"""

from __future__ import annotations

from collections.abc import Sequence

from tether.watch.report.about import GOLD_JUDGE, Judge
from tether.watch.report.numbers import SENTENCES
from tether.watch.report.reading import Row, SubRun, finite

SHOWN = 24
SAYS = SENTENCES["answers"]


def answer_groups(
    rows: Sequence[Row],
    judge: Judge = GOLD_JUDGE,
) -> tuple[str, list[tuple[str, Sequence[Row]]]]:
    """The way in which the answers were chosen, in one sentence, and groups of answers by title.

    Groups are a third each of best, median and worst changes of the judge's score.
    """
    ranked = ranked_answers(rows)
    if not ranked:
        return "", []
    unscored = sum("before" in row and "after" in row for row in rows) - len(ranked)
    third = SHOWN // 3
    words = {"judge": judge, "third": third}
    text = SAYS["all" if len(ranked) <= SHOWN else "thirds"].format(count=len(ranked), **words)
    text += " " + SAYS["unscored"].format(count=unscored, **words) if unscored else ""
    if len(ranked) <= SHOWN:
        return text, [("All answers, best change first", ranked)]
    middle = (len(ranked) - third) // 2
    return text, [
        (f"The {third} best changes", ranked[:third]),
        (f"The {third} around the median: the typical change", ranked[middle : middle + third]),
        (f"The {third} worst changes", ranked[: -third - 1 : -1]),
    ]


def ranked_answers(rows: Sequence[Row]) -> list[Row]:
    """The answers whose change of the judge's score is known, the best change first."""
    usable = [row for row in rows if "before" in row and "after" in row]
    changes = [(change, row) for row in usable if (change := gold_change(row)) is not None]
    return [row for _, row in sorted(changes, key=lambda pair: -pair[0])]


def three_answers(rows: Sequence[Row]) -> list[tuple[str, Row]]:
    """The typical change, the best and the worst; none of fewer than three."""
    ranked = ranked_answers(rows)
    places = {"the median change": len(ranked) // 2, "the best": 0, "the worst": -1}
    return [(name, ranked[at]) for name, at in places.items()] if len(ranked) > 2 else []


def training_samples(policy: SubRun) -> list[Row]:
    """A few samples from the first, the middle and the last step recorded."""
    samples = [row for row in policy.samples if finite(row, "step") is not None]
    steps = sorted({row["step"] for row in samples})
    chosen = sorted({steps[0], steps[len(steps) // 2], steps[-1]}) if steps else []
    return [
        row
        for step in chosen
        for row in [row for row in samples if row["step"] == step and "response" in row][:4]
    ]


def gold_change(row: Row) -> float | None:
    """The gold score after less that before; None where one is missing."""
    before = finite(row, "gold_before")
    after = finite(row, "gold_after")
    return None if before is None or after is None else after - before
