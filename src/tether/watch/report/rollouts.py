"""Texts of a run on its page: all rollouts that it has recorded, packed; and answers to the same
held-out prompts before and after, chosen by a rule that shows the failures too.
"""

from __future__ import annotations

import base64
import gzip
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from math import ceil
from typing import NamedTuple

from tether.core.types import Row
from tether.watch.report.about import GOLD_JUDGE, Judge
from tether.watch.report.numbers import SENTENCES, thousands
from tether.watch.report.reading import SubRun, finite, listed, mapping, printable, turn_texts

MOST = 3_500_000
"""Characters of the page that rollouts may take."""


class Packed(NamedTuple):
    """Rollouts as base64 of gzipped JSON, and a sentence on how many of how many they are."""

    text: str
    sentence: str


def packed_rollouts(stages: Sequence[SubRun], most: int = MOST) -> Packed | None:
    """The rollouts of all stages. If they take more than `most` characters, those of fewer steps,
    at last of fewer rows. None: there are none, or not one fits.
    """
    rows = shown = [(stage, row) for stage in stages for row in _rollouts(stage)]
    every = 1
    while shown and len(text := _packed(stages, shown)) > most:
        every *= max(2, ceil(len(text) / most))
        fewer = _of_steps(rows, every)
        shown = fewer if len(fewer) < len(shown) else shown[1::2]
    if not shown:
        return None
    steps = len({(stage.name, row["step"]) for stage, row in shown})
    number = thousands(len(shown))
    if len(shown) == len(rows):
        return Packed(text, f"All {number} rollouts that were recorded, of {steps} steps.")
    return Packed(
        text,
        f"{number} of {thousands(len(rows))} recorded rollouts, of {steps} steps: the page would be "
        "too large with all. All of them are in samples.jsonl of the stage.",
    )


def _rollouts(stage: SubRun) -> Iterator[Row]:
    """The samples of a stage, those with `tokens` whose tokens were noted."""
    noted = {(row.get("step"), row.get("sample")): row for row in stage.tokens}
    places = Counter[float]()
    for row in stage.samples:
        step = finite(row, "step")
        if step is not None and isinstance(row.get("response"), str):
            tokens = noted.get((row["step"], places[step]))
            places[step] += 1
            yield row if tokens is None else {**row, "tokens": tokens}


def _tokens(row: Row) -> Row | None:
    """Texts and numbers of tokens, as many as there are texts; None where none were noted."""
    tokens = mapping(row, "tokens")
    texts = [printable(text, 60) for text in listed(tokens, "tokens")]
    numbers = {
        name: [finite(value) for value in listed(tokens, name)]
        for name in ("kl", "value", "advantage")
        if len(listed(tokens, name)) == len(texts)
    }
    counted = finite(tokens, "counted")
    return {"texts": texts, "counted": counted, **numbers} if texts else None


def _of_steps(rows: Sequence[tuple[SubRun, Row]], every: int) -> list[tuple[SubRun, Row]]:
    """The rows of each stage's first step, of its last, and of one in so many between."""
    steps: dict[str, set[float]] = {}
    for stage, row in rows:
        steps.setdefault(stage.name, set()).add(row["step"])
    chosen = {name: {*sorted(own)[::every], max(own)} for name, own in steps.items()}
    return [(stage, row) for stage, row in rows if row["step"] in chosen[stage.name]]


def _packed(stages: Sequence[SubRun], rows: Sequence[tuple[SubRun, Row]]) -> str:
    prompts: dict[str, int] = {}
    rollouts = [
        (
            stage.title,
            row["step"],
            prompts.setdefault(printable(row.get("prompt")), len(prompts)),
            printable(row["response"]),
            finite(row, "proxy"),
            printable(row.get("stop"), 40),
            _tokens(row),
            turn_texts(row.get("turns")),
            printable(row.get("reason"), 400),
        )
        for stage, row in rows
    ]
    alarms = [
        (stage.title, printable(alarm.get("detector"), 60), finite(alarm, "step"))
        for stage in stages
        for alarm in stage.alarms
    ]
    value = {"prompts": list(prompts), "rows": rollouts, "alarms": alarms}
    return packed(value)


def packed(value: object) -> str:
    """A value as base64 of gzipped JSON, which page.js unpacks."""
    content = json.dumps(value, ensure_ascii=False).encode("utf-8", "replace")
    return base64.b64encode(gzip.compress(content, 9, mtime=0)).decode()


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
