"""Rows of every format with columns added, taken away, renamed, emptied and filled with other
things, read as every kind.

Each text of a row has a mark of its own. The property: a row is refused with a `DataError`, or
every mark stands in a record (its turns, answers, steps or metadata), or the column of the mark is
named as not used.
"""

from __future__ import annotations

import contextlib
import copy
import json
import random
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from tests.bad_input.rows import SEEDS
from tests.data.layouts import LAYOUTS, Layout
from tests.data.test_layouts import outcome

from tether.core.errors import DataError
from tether.core.types import (
    Annotation,
    Comparison,
    Demonstration,
    Feedback,
    Message,
    Problem,
    Prompt,
    StepLabels,
)
from tether.data.formats.registry import FORMATS, detect
from tether.data.sources import Quarantine, read

KINDS = (Prompt, Demonstration, Comparison, Feedback, StepLabels, Problem)
NAMES = {layout.name for layout in FORMATS}
ROWS = [seed["row"] for seed in SEEDS if seed["format"] in NAMES] + [
    layout.row for layout in LAYOUTS if layout.read
]
EXTRA = [
    "input", "context", "history", "system", "system_prompt", "tools", "metadata", "source", "tags", "title", "passage", "notes",
    "score", "rating", "label", "labels", "feedback", "answer", "solution", "response", "output", "completion", "chosen",
    "prompt", "question", "instruction", "query", "messages", "conversations", "model", "preference", "winner", "reasoning",
    "group", "x.y",
]  # fmt: skip
"""Names of columns that some reader looks for, and a few others."""
BESIDE = (
    "source",
    "tags",
    "notes",
    "metadata",
    "title",
    "comment",
    "model",
    "id",
    "reference",
    "topic",
    "lang",
    "x.y",
)
"""Columns that belong to no prompt and to no verdict."""
_SENTENCE = re.compile(r"(?=[.?!]\Z)")


class Marks:
    """Marks for texts: equal texts get equal marks, so that what belongs together stays
    together.
    """

    def __init__(self) -> None:
        self.known: dict[str, str] = {}

    def new(self) -> str:
        return self.on(f"text {len(self.known)}.")

    def on(self, words: str) -> str:
        return self.known.setdefault(
            words,
            _SENTENCE.sub(f" mark{len(self.known):04}z", words, count=1),
        )

    def all_over(self, value: Any) -> Any:
        if isinstance(value, dict):
            return {key: self.all_over(inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [self.all_over(inner) for inner in value]
        is_text = (
            isinstance(value, str)
            and _SENTENCE.search(value)
            and any(letter.isalpha() for letter in value)
        )
        return self.on(value) if is_text else value


def bent(draw: random.Random) -> dict[str, Any]:
    """A valid row with marks, and up to three edits."""
    marks = Marks()
    row = marks.all_over(copy.deepcopy(draw.choice(ROWS)))
    for _ in range(draw.randint(0, 3)):
        name = draw.choice(list(row)) if row else ""
        match draw.randint(0, 6):
            case 0 | 1:
                row.setdefault(draw.choice(EXTRA), strange(draw, marks))
            case 2:
                row.pop(name, None)
            case 3 if name:
                row[draw.choice([f"{name}_2", name.upper(), *EXTRA])] = row.pop(name)
            case 4 if name:
                row[name] = None
            case 5 if name:
                row[name] = strange(draw, marks)
            case 6:
                row["metadata"] = {"own": marks.new(), draw.choice(EXTRA): {"deep": [marks.new()]}}
    return row


def strange(draw: random.Random, marks: Marks) -> Any:
    """A value of any type, with a mark where there is room for one."""
    turn = {"role": draw.choice(["user", "assistant", "system", "tool"]), "content": marks.new()}
    pair = [[marks.new(), marks.new()]]
    options = (
        marks.new(),
        [marks.new()],
        {"a": marks.new()},
        [{"a": {"b": marks.new()}}],
        [turn],
        turn,
        pair,
    )
    return draw.choice(
        [
            *options,
            7,
            0,
            1,
            -1,
            0.5,
            True,
            False,
            "",
            [],
            {},
            "tie",
            "A",
            "good",
            [1, 2],
            json.dumps([turn]),
        ],
    )


def inside(value: Any) -> Iterator[str]:
    """All texts within a value."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for item in value:
            yield from inside(item)
    elif isinstance(value, Message | Annotation):
        yield from inside([getattr(value, field.name) for field in fields(value)])
    elif isinstance(value, str):
        yield value


def told(records: list[Any]) -> str:
    """All that records hold."""
    values = [getattr(record, field.name) for record in records for field in fields(record)]
    return "\n".join(
        inside([dict(value) if hasattr(value, "items") else value for value in values]),
    )


def native(path: Path, kind: type) -> list[Any]:
    """The records of a file's own kind."""
    try:
        return list(read(path, kind, quarantine=Quarantine()))
    except DataError:
        return []


def lost(row: dict[str, Any], kind: type, path: Path) -> list[str]:
    """The columns of a row whose marks nobody told and nobody named. Nothing of rows that were
    refused, also in part.
    """
    quarantine = Quarantine()
    try:
        records = list(read(path, kind, quarantine=quarantine))
    except DataError:
        return []
    if quarantine.count:
        return []
    known, named = told(records), set(quarantine.unused)
    layout = detect([row], kind, "row")
    if layout.kind is not kind:
        # what has no place in the other kind is named
        known += told(native(path, layout.kind)) if named else ""
    marks = {name: re.findall(r"mark\d+z", json.dumps(value)) for name, value in row.items()}
    heads = {name.partition(".")[0] for name in named} | named
    return [
        name
        for name, own in marks.items()
        if name not in heads and any(mark not in known for mark in own)
    ]


def check(tmp_path: Path, count: int, seed: int) -> list[tuple[int, str, str, dict[str, Any]]]:
    """The lost columns of so many rows, read as every kind."""
    draw, path = random.Random(seed), tmp_path / "rows.jsonl"
    faults = []
    for number in range(count):
        row = bent(draw)
        path.write_text(json.dumps(row) + "\n", encoding="utf-8")
        faults += [
            (number, kind.__name__, name, row) for kind in KINDS for name in lost(row, kind, path)
        ]
    return faults


def extended(draw: random.Random, layout: Layout) -> dict[str, Any]:
    """The row with up to three more columns, in any order."""
    marks, row = Marks(), copy.deepcopy(layout.row)
    for _ in range(draw.randint(0, 3)):
        row.setdefault(draw.choice(BESIDE), strange(draw, marks))
    names = list(row)
    draw.shuffle(names)
    return {name: row[name] for name in names}


def turned(tmp_path: Path, count: int, seed: int) -> list[tuple[str, str, str]]:
    """The readings of published layouts that further columns make wrong."""
    draw, faults = random.Random(seed), []
    layouts = [layout for layout in LAYOUTS if layout.read]
    for _ in range(count):
        layout = draw.choice(layouts)
        changed = layout._replace(row=extended(draw, layout))
        readings = {kind.__name__: outcome(tmp_path, changed, kind) for kind in KINDS}
        faults += [
            (layout.name, kind, found)
            for kind, found in readings.items()
            if found.startswith("misread")
        ]
        faults += [
            (layout.name, kind, found)
            for kind, found in readings.items()
            if found != "read" and kind == layout.kind.__name__
        ]
    return faults


def test_further_columns_turn_no_verdict(tmp_path: Path) -> None:
    assert turned(tmp_path, 150, seed=3)[:3] == []


@pytest.mark.slow
def test_further_columns_turn_no_verdict_of_many_rows(tmp_path: Path) -> None:
    assert turned(tmp_path, 2000, seed=4)[:3] == []


def test_no_column_is_lost_in_silence(tmp_path: Path) -> None:
    assert check(tmp_path, 200, seed=1)[:3] == []


@pytest.mark.slow
def test_no_column_of_two_thousand_rows_is_lost_in_silence(tmp_path: Path) -> None:
    assert check(tmp_path, 2000, seed=2)[:3] == []


@pytest.mark.parametrize(
    ("count", "seed"),
    [(600, 9), pytest.param(30_000, 10, marks=pytest.mark.slow)],
)
def test_every_format_takes_every_row(tmp_path: Path, count: int, seed: int) -> None:
    """A format that is named, and columns that are named, give records or a `DataError`."""
    draw, path = random.Random(seed), tmp_path / "rows.jsonl"
    for _ in range(count):
        row = bent(draw)
        path.write_text(json.dumps(row) + "\n", encoding="utf-8")
        columns = (
            {draw.choice(EXTRA): draw.choice(list(row))} if row and draw.random() < 0.3 else None
        )
        with contextlib.suppress(DataError):
            list(
                read(
                    path,
                    draw.choice(KINDS),
                    format=draw.choice(sorted(NAMES)),
                    columns=columns,
                    quarantine=Quarantine(),
                ),
            )
