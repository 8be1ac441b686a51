"""Statistics of data, against numbers worked out by hand and against the published files' own
counts.
"""

from __future__ import annotations

import gzip
import itertools
import json
import os
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from tether.core.errors import DataError
from tether.core.types import (
    Comparison,
    Demonstration,
    Feedback,
    Problem,
    Prompt,
    StepLabels,
    assistant,
    user,
)
from tether.data.inspection import inspect_data, inspection_tables, longer_chosen, summarise
from tether.stats import wilson_interval

DATA = os.environ.get("TETHER_DATA")
needs_data = pytest.mark.skipif(
    not DATA,
    reason=("TETHER_DATA does not name a folder with the published files"),
)


def write(tmp_path: Path, rows: list[Any]) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_pairs_by_hand(tmp_path: Path) -> None:
    rows = [
        {"prompt": "one two", "chosen": "a b c", "rejected": "a"},
        {"prompt": "One  TWO", "chosen": "a", "rejected": "a b c"},
        {"prompt": "one two", "chosen": "a b c", "rejected": "a"},
        {"prompt": "x", "chosen": "a b", "rejected": "c d"},
        {"prompt": "y", "chosen": "a b c d", "rejected": "a", "tie": True},
        {"prompt": "z", "chosen": "same", "rejected": "same"},
    ]
    seen = inspect_data(write(tmp_path, rows))
    assert (seen.format, seen.kind, seen.rows, seen.quarantine.count) == (
        "preference",
        Comparison,
        5,
        1,
    )
    assert seen.quarantine.reasons == {"equal responses": 1}
    assert (seen.prompts, seen.duplicate_rows, seen.ties) == (3, 1, 1)
    assert seen.longer_chosen is not None
    assert (seen.longer_chosen.value, seen.longer_chosen.count) == (pytest.approx(2 / 3), 3)
    assert seen.lengths["chosen"].tolist() == [1, 2, 3, 3, 4]
    assert seen.lengths["prompt"].mean() == pytest.approx(8 / 5)
    assert seen.agreement is None


@pytest.mark.parametrize(
    ("record", "column", "values"),
    [
        ({"prompt": "q", "completion": "a"}, "label", [True, False, True]),
        ({"prompt": "q", "chosen": "a", "rejected": "b"}, "tie", [False, True, False]),
        ({"prompt": "q", "chosen": "a", "rejected": "b"}, "probability", [0.9, 0.1, 0.9]),
        ({"prompt": "q", "completions": ["a", "b"]}, "labels", [[True, True], [True, False], [True, True]]),
    ],
)  # fmt: skip
def test_a_row_with_another_verdict_is_no_duplicate(
    tmp_path: Path,
    record: dict[str, Any],
    column: str,
    values: list[Any],
) -> None:
    seen = inspect_data(write(tmp_path, [{**record, column: value} for value in values]))
    assert (seen.rows, seen.prompts, seen.duplicate_rows) == (3, 1, 1)


def test_a_folder_is_called_by_all_its_formats(tmp_path: Path) -> None:
    hh = {"chosen": "\n\nHuman: a\n\nAssistant: b", "rejected": "\n\nHuman: a\n\nAssistant: c"}
    (tmp_path / "a.jsonl").write_text(
        json.dumps({"prompt": "p", "chosen": "a", "rejected": "b"}) + "\n",
    )
    (tmp_path / "b.jsonl").write_text(json.dumps(hh) + "\n")
    seen = inspect_data(tmp_path)
    assert (seen.format, seen.rows) == ("preference, hh", 2)


def test_percentiles_by_hand() -> None:
    assert summarise(np.arange(1, 101)) == ("50.5", "50.5", "95", "100")
    assert summarise(np.array([5, 5, 5, 9])) == ("6.0", "5.0", "9", "9")
    assert summarise(np.array([1200, 1201])) == ("1,200.5", "1,200.5", "1,201", "1,201")


def test_an_unsure_label_counts_as_it_says_and_pairs_of_a_prompt_hang_together() -> None:
    """Fifty prompts with four pairs each that prefer the longer side with 0.1: a tenth, and no
    certainty of 200 pairs.
    """
    long, short = (assistant("one two three"),), (assistant("one"),)
    rows = [Comparison((user(f"q{n // 4}"),), long, short, probability=0.1) for n in range(200)]
    found = longer_chosen(rows)
    assert found is not None and found.value == pytest.approx(0.1) and found.count == 200
    assert (found.low, found.high) == pytest.approx(wilson_interval(5, 50))
    tied = [replace(row, probability=0.5, tie=True) for row in rows]
    assert longer_chosen(tied) is None
    sure = [replace(row, probability=float(n // 4 < 25)) for n, row in enumerate(rows)]
    one_each, four_each = longer_chosen(sure[::4]), longer_chosen(sure)
    assert one_each is not None and four_each is not None
    assert four_each.high - four_each.low == pytest.approx(one_each.high - one_each.low, rel=0.1)


def test_agreement_over_rows_in_both_orders(tmp_path: Path) -> None:
    row = {"prompt": "Q", "completion_a": "x", "completion_b": "y"}
    turned = {"prompt": "Q", "completion_a": "y", "completion_b": "x"}
    rows = [
        {**row, "evaluator": "e1", "preference": "a-is-better"},
        {**turned, "evaluator": "e2", "preference": "b-is-slightly-better"},  # the same side
        {**turned, "evaluator": "e3", "preference": "a-is-better"},  # the other side
        {**row, "evaluator": "e1", "preference": "tie"},  # a second vote of e1 does not count
        {
            "prompt": "R",
            "completion_a": "x",
            "completion_b": "x",
            "evaluator": "e1",
            "preference": "tie",
        },
        {
            "prompt": "R",
            "completion_a": "x",
            "completion_b": "x",
            "evaluator": "e2",
            "preference": "tie",
        },
    ]
    votes = inspect_data(write(tmp_path, rows)).agreement
    assert votes is not None
    assert (votes.value, votes.count, votes.num_pairs) == (pytest.approx(1 / 3), 3, 1)


@needs_data
def test_published_agreement_and_length_bias() -> None:
    """Both worked out here from the raw rows; the README of the files gives 79% for the length
    bias.
    """
    root = Path(DATA or "")
    with gzip.open(root / "open-instruct/human-eval.jsonl.gz", "rt", encoding="utf-8") as stream:
        raw = [json.loads(line) for line in stream]
    verdict = {"a": 1, "b": -1, "t": 0}
    votes: dict[Any, dict[str, int]] = defaultdict(dict)
    for row in raw:
        sides = (row["completion_a"], row["completion_b"])
        if sides[0] != sides[1]:
            sign = 1 if sides == tuple(sorted(sides)) else -1
            votes[(row["prompt"], *sorted(sides))].setdefault(
                row["evaluator"],
                sign * verdict[row["preference"][0]],
            )
    both = [a == b for cast in votes.values() for a, b in itertools.combinations(cast.values(), 2)]
    seen = inspect_data(root / "open-instruct/human-eval.jsonl.gz").agreement
    assert seen is not None
    assert (seen.count, seen.value) == (len(both), pytest.approx(sum(both) / len(both)))
    bias = inspect_data(root / "alpaca_eval/gpt4-judged-pairs.jsonl.gz").longer_chosen
    assert bias is not None
    assert bias.value == pytest.approx(0.79, abs=0.01)
    assert bias.low < bias.value < bias.high


@pytest.mark.parametrize(
    ("row", "kind", "names", "labels"),
    [
        ({"prompt": "a"}, Prompt, {"prompt"}, {}),
        ({"prompt": "a", "response": "b"}, Demonstration, {"prompt", "response"}, {}),
        (
            {"prompt": "a", "completion": "b", "label": 1},
            Feedback,
            {"prompt", "response"},
            {"desirable": 1},
        ),
        (
            {"prompt": "a", "steps": ["b", "c"], "labels": [1, None]},
            StepLabels,
            {"prompt", "response"},
            {"right steps": 1, "unjudged steps": 1},
        ),
        ({"question": "a", "answer": "b"}, Problem, {"prompt", "answer"}, {}),
    ],
)
def test_every_kind(
    tmp_path: Path,
    row: Any,
    kind: type,
    names: set[str],
    labels: dict[str, int],
) -> None:
    seen = inspect_data(write(tmp_path, [row]))
    assert (seen.kind, set(seen.lengths), dict(seen.labels)) == (kind, names, labels)
    Console(file=open(os.devnull, "w")).print(inspection_tables(seen))  # noqa: SIM115


def test_another_kind_and_a_limit(tmp_path: Path) -> None:
    rows = [{"prompt": f"p{i}", "chosen": "a", "rejected": "b"} for i in range(10)]
    seen = inspect_data(write(tmp_path, rows), kind=Demonstration, limit=4)
    assert (seen.kind, seen.rows) == (Demonstration, 4)
    with pytest.raises(DataError, match="is not one of"):
        inspect_data(write(tmp_path, rows), kind=str)


def test_examples_are_a_fixed_uniform_sample(tmp_path: Path) -> None:
    path = write(tmp_path, [{"prompt": f"p{i}"} for i in range(500)])
    chosen = [example["prompt"] for example in inspect_data(path, num_examples=200).examples]
    assert chosen == [
        example["prompt"] for example in inspect_data(path, num_examples=200).examples
    ]
    assert len(set(chosen)) == 200
    # Of 200 draws from 500 about 80 come from the first 200: within four standard deviations
    # (hypergeometric, 5.4).
    assert abs(sum(int(p[1:]) < 200 for p in chosen) - 80) < 22


def test_rendered_examples_are_escaped_and_short(tmp_path: Path) -> None:
    hostile = "[bold red]not markup[/] \x1b[31m " + "long " * 500
    path = write(tmp_path, [{"prompt": hostile, "chosen": "[/nonsense]", "rejected": "b"}])
    console = Console(width=100, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(inspection_tables(inspect_data(path)))
    words = console.export_text()
    assert "[bold red]not markup[/]" in words
    assert "[/nonsense]" in words
    assert "\x1b[31m" not in words
    assert len(words) < 4000


def test_prompts_that_a_template_has_rendered_already_are_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    rendered = {
        "prompt": "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
        "response": "Yes<|im_end|>",
    }
    rows = [rendered, rendered | {"response": "No"}, {"prompt": "Hi", "response": "Yes"}]
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    inspection = inspect_data(path)
    assert inspection.rendered == {"ChatML": 2}
    console = Console(width=200, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(inspection_tables(inspection))
    assert "2 prompts (marks of ChatML)" in console.export_text()
