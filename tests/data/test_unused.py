"""Columns and inner keys are used, or named as left out: in the inspection, and in a stage's
summary.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from tools.dev.references import examples

from tether.core.errors import DataError
from tether.core.types import (
    Annotation,
    Comparison,
    Demonstration,
    Feedback,
    Problem,
    Prompt,
    StepLabels,
    assistant,
    user,
)
from tether.data.formats.cells import Cells
from tether.data.formats.conversions import CONVERSIONS
from tether.data.formats.registry import FORMATS, Format, reader_for
from tether.data.formats.table import KINDS
from tether.data.inspection import inspect_data
from tether.data.sources import Quarantine, read
from tether.runner.assembly.data.rows import rows_of
from tether.runner.assembly.job import Job
from tether.runner.methods.stage import run_stage
from tether.settings.model import ModelConfig
from tether.settings.section import DataConfig
from tether.settings.stages import STAGES
from tether.settings.supervised import ProcessSection, SFTSection


def unused(tmp_path: Path, rows: list[Any], kind: type) -> dict[str, int]:
    path, quarantine = tmp_path / "rows.jsonl", Quarantine()
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    assert list(read(path, kind, quarantine=quarantine))
    return dict(quarantine.unused)


TURNS = [{"role": "user", "content": "q", "mood": 1}, {"role": "assistant", "content": "a"}]


@pytest.mark.parametrize(
    ("row", "kind", "names"),
    [
        ({"instruction": "i", "input": "", "output": "o"}, Demonstration, set()),
        ({"instruction": "i", "input": "", "output": "o"}, Prompt, {"output"}),
        ({"prompt": "p", "output": "o", "response": "r"}, Demonstration, {"output"}),
        ({"prompt": "p", "completion": "c", "label": True, "output": "o"}, Feedback, {"output"}),
        ({"prompt": "p", "chosen": "a", "rejected": "b"}, Comparison, set()),
        ({"prompt": "p", "chosen": "a", "rejected": "b"}, Demonstration, {"rejected"}),
        ({"prompt": "p", "chosen": "a", "rejected": "b", "source": "s"}, Prompt, {"source", "chosen", "rejected"}),
        ({"prompt": "p", "chosen": "a", "rejected": "b", "margin": 1, "score_chosen": 2, "score_rejected": 1}, Comparison,
         {"score_chosen", "score_rejected"}),
        ({"messages": TURNS}, Demonstration, {"messages.mood"}),
        ({"messages": TURNS, "id": 3, "task_id": 4, "empty": None, "none": "", "few": []}, Demonstration,
         {"messages.mood", "task_id"}),
        ({"question": "q", "answer": "w\n#### 1", "level": 2}, Problem, {"level"}),
        ({"question": "q", "ground_truth": "w\nA: 1", "m": {"solution": "s", "is_correct": True, "tokens": 5}, "seed": 1},
         Feedback, {"m.tokens", "seed", "ground_truth"}),
    ],
)  # fmt: skip
def test_names_of_what_is_not_used(tmp_path: Path, row: Any, kind: type, names: set[str]) -> None:
    assert set(unused(tmp_path, [row], kind)) == names


def test_names_are_counted_over_usable_rows_alone(tmp_path: Path) -> None:
    row = {"prompt": "p", "chosen": "a", "rejected": "b"}
    rows = [
        row,
        {**row, "note": "x"},
        {**row, "note": "y", "by": 1},
        {**row, "note": "z", "rejected": "a"},
    ]
    assert unused(tmp_path, rows, Comparison) == {"note": 2, "by": 1}


def test_keys_of_a_tree_have_one_name_at_every_depth(tmp_path: Path) -> None:
    leaf = {"role": "assistant", "text": "a", "rank": 0, "lang": "en", "replies": []}
    again = {
        "role": "prompter",
        "text": "more",
        "lang": "en",
        "replies": [{**leaf, "text": "c"}, {**leaf, "text": "d", "rank": 1}],
    }
    tree = {
        "role": "prompter",
        "text": "q",
        "lang": "en",
        "replies": [{**leaf, "replies": [again]}, {**leaf, "text": "b", "rank": 1}],
    }
    assert unused(tmp_path, [{"message_tree_id": "t", "prompt": tree}], Comparison) == {
        "prompt.lang": 1,
        "prompt.replies.lang": 1,
    }


def test_inner_keys_are_metadata_and_those_of_lists_are_named_alone(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    question = {"full_text": "q", "id": "x", "dataset": "eli5"}
    row = {
        "question": question,
        "answer_0": "a",
        "answer_1": "b",
        "score_0": 1,
        "score_1": 0,
        "metadata": {"split": "dev"},
    }
    path.write_text(json.dumps(row) + "\n")
    quarantine = Quarantine()
    [pair] = read(path, Comparison, quarantine=quarantine)
    assert pair.metadata == {"question.id": "x", "question.dataset": "eli5", "split": "dev"}
    assert set(quarantine.unused) == {"question.id", "question.dataset"}


def test_inspection_names_them(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"messages": TURNS, "source": "s"}) + "\n")
    from rich.console import Console

    from tether.data.inspection import inspection_tables

    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(inspection_tables(inspect_data(path)))
    assert "source, messages.mood" in console.export_text()


VOTE = Annotation("ann", 1.0)
RECORDS = {
    Comparison: Comparison(
        (user("1q"),),
        (assistant("2a"),),
        (assistant("3b"),),
        margin=4.25,
        probability=0.625,
        annotations=(VOTE,),
    ),
    Feedback: Feedback((user("1q"),), (assistant("2a"),), True),
    Demonstration: Demonstration((user("1q"), assistant("2a"))),
    Problem: Problem((user("1q"),), "2a", "3s"),
    StepLabels: StepLabels((user("1q"),), ("2s",), (True,)),
}


@pytest.mark.parametrize(
    "pair",
    CONVERSIONS,
    ids=lambda pair: f"{pair[0].__name__}-{pair[1].__name__}",
)
def test_a_conversion_keeps_each_field_or_names_it(pair: tuple[type, type]) -> None:
    """Each field of the native record shows in the records made of it, decides about them, or is
    among the lost ones.
    """
    native, conversion = RECORDS[pair[0]], CONVERSIONS[pair]
    made, lost = repr([*conversion.make(native)]), set(conversion.lost(native))
    for field in (
        field for field in dataclasses.fields(native) if field.name not in ("metadata", "row")
    ):
        value = getattr(native, field.name)
        shows = value in (field.default, True) or str(value).strip("(),'") in made
        assert shows or field.name in lost or ("last reply" in lost and field.name == "messages"), (
            field.name
        )


def test_cells_record_what_was_read() -> None:
    cells = Cells({"a": 1, "b": {"c": 2, "d": 3}, "e": [{"f": 4, "g": 5}, 6], "h": 7})
    assert "a" in cells and [*cells] == ["a", "b", "e", "h"] and cells.get("none") is None
    assert cells.unused() == ["a", "b", "e", "h"]
    assert cells["b"]["c"] == 2 and cells.get("e")[0]["f"] == 4
    assert cells.unused() == ["a", "h", "b.d", "e.g"]
    assert cells.unread() == {"a": 1, "h": 7, "b.d": 3}
    assert {**cells} == {"a": 1, "b": {"c": 2, "d": 3}, "e": [{"f": 4, "g": 5}, 6], "h": 7}
    assert cells.unused() == ["b.d", "e.g"]
    assert json.loads(json.dumps(cells)) == {**cells} and cells.unused() == []


def test_a_stage_names_them_in_its_summary_and_once_in_the_log(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    path = tmp_path / "rows.jsonl"
    rows = [
        {
            "prompt": f"{n}?",
            "steps": ["a", "b"],
            "labels": [True, False],
            "share": [1, 0],
            "seed": n,
        }
        for n in range(4)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {
        "data": DataConfig(path=str(path)),
        "label_column": "share",
        "epochs": 1,
        "heldout_fraction": 0.0,
    }
    section = ProcessSection.model_validate(settings)
    model = ModelConfig(source="tiny", dtype="float32")
    kind = STAGES["process"]
    summary = run_stage(
        Job(name="process", kind=kind, settings=section, folder=tmp_path / "run", model=model),
    )
    assert summary["columns_not_used"] == {"seed": 4} and summary["quarantine"]["count"] == 0
    [said] = [record.getMessage() for record in caplog.records if "not used" in record.getMessage()]
    assert said == "[process]: columns not used: seed"


def test_rows_that_come_with_tether_are_read_without_a_note(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    model, section = ModelConfig(source="tiny"), SFTSection()
    job = Job(name="sft", kind=STAGES["sft"], settings=section, folder=tmp_path, model=model)
    rows, quarantine = rows_of(job, DataConfig(path="tether:demonstrations"), Demonstration)
    assert len(rows) == 200 and quarantine.unused["kind"] == 200
    assert [record for record in caplog.records if "not used" in record.getMessage()] == []


READ = [(layout, kind) for layout in FORMATS for kind in KINDS if reader_for(layout, kind)]


@pytest.mark.parametrize(
    ("layout", "kind"),
    READ,
    ids=lambda value: getattr(value, "name", None) or value.__name__,
)
def test_a_column_of_no_format_is_named_in_every_layout(
    tmp_path: Path,
    layout: Format,
    kind: type,
) -> None:
    """A reader that copies or walks over its row would read all columns, and none would be
    named.
    """
    row, path, quarantine = (
        {**examples()[layout.name], "mood": "blue"},
        tmp_path / "rows.jsonl",
        Quarantine(),
    )
    path.write_text(json.dumps(row) + "\n", encoding="utf-8")
    try:
        records = list(read(path, kind, format=layout.name, quarantine=quarantine))
    except DataError:
        assert kind is not layout.kind
        return
    assert records and quarantine.unused["mood"] == 1
