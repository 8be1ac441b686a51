"""All rollouts that a run has recorded, packed into its page."""

from __future__ import annotations

import base64
import gzip
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from math import ceil
from typing import NamedTuple

from tether.watch.report.numbers import thousands
from tether.watch.report.reading import (
    Row,
    SubRun,
    finite,
    listed,
    mapping,
    printable,
    turn_texts,
)

TOKEN_NUMBERS = ("kl", "value", "advantage")
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
        for name in TOKEN_NUMBERS
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
