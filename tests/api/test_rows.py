"""Containers of rows in memory, each against the rows that it was made of."""

from __future__ import annotations

import datetime
import json
from collections import namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from pydantic import BaseModel

import tether
from tether.api.given import data_values
from tether.api.rows import rows_in
from tether.core.errors import ConfigError
from tether.core.types import Prompt, user
from tether.data.sources import read

ROWS: list[dict[str, Any]] = [
    {
        "prompt": "How do I boil an egg?",
        "nums": [1, 2],
        "level": 3,
        "extra": {"index": 0, "of": None},
        "score": 0.5,
    },
    {
        "prompt": "What is blue?",
        "nums": [],
        "level": None,
        "extra": {"index": 1, "of": "x"},
        "score": None,
    },
]
TALKS = [[{"role": "user", "content": "it's"}, {"role": "assistant", "content": 'b "q"\nnew'}]] * 2


class Indexed:
    """A data set as torch has them: places and a length, and no iterator that ends."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, place: int) -> dict[str, Any]:
        return ROWS[place]


def containers() -> dict[str, Any]:
    import datasets
    import pandas

    data_set, table = datasets.Dataset.from_list(ROWS), pa.Table.from_pylist(ROWS)
    return {
        "list": ROWS,
        "tuple": (*ROWS,),
        "generator": (row for row in ROWS),
        "columns": {name: [row[name] for row in ROWS] for name in ROWS[0]},
        "arrays": {name: np.array([row[name] for row in ROWS], dtype=object) for name in ROWS[0]},
        "data set": data_set,
        "to_dict": data_set.to_dict(),
        "slice": data_set[:2],
        "iterable": data_set.to_iterable_dataset(),
        "torch columns": data_set.with_format(
            "torch",
            columns=["score"],
            output_all_columns=True,
        ).select_columns([*ROWS[0]]),
        "torch": Indexed(),
        "subset": torch.utils.data.Subset(Indexed(), [0, 1]),  # pyright: ignore[reportArgumentType]
        "table": table,
        "batch": table.to_batches()[0],
        "reader": table.to_reader(),
        "frame": pandas.DataFrame(ROWS),
    }


@pytest.mark.parametrize("name", containers())
def test_every_container_gives_the_rows_that_it_was_made_of(name):
    rows = rows_in(containers()[name], "prompts")
    assert json.loads(json.dumps(rows, allow_nan=False)) == rows == ROWS


def test_frames_read_from_parquet_have_no_arrays_and_no_numbers_of_numpy(tmp_path):
    import pandas

    pq.write_table(
        pa.Table.from_pylist(
            [{**row, "talk": talk} for row, talk in zip(ROWS, TALKS, strict=True)],
        ),
        tmp_path / "a",
    )
    frame = pandas.read_parquet(tmp_path / "a")
    assert isinstance(frame["talk"][0], np.ndarray)
    rows = rows_in(frame, "data")
    assert rows == [{**row, "talk": talk} for row, talk in zip(ROWS, TALKS, strict=True)]
    assert {type(row["score"]) for row in rows} == {float, type(None)}


def test_cells_of_frames_become_what_json_has():
    import pandas

    when = datetime.datetime(2026, 1, 2, 3, 4, 5)
    frame = pandas.DataFrame(
        {
            "prompt": ["a", "b"],
            "at": [pandas.Timestamp(when), pandas.NaT],
            "n": pandas.array([1, None], "Int64"),
        },
    )
    assert rows_in(frame, "data") == [
        {"prompt": "a", "at": "2026-01-02T03:04:05", "n": 1},
        {"prompt": "b", "at": None, "n": None},
    ]
    named = frame.set_index("n")[["prompt"]]
    assert rows_in(named, "data") == [{"n": 1, "prompt": "a"}, {"n": None, "prompt": "b"}]


def test_rows_in_other_shapes():
    class Question(BaseModel):
        prompt: str
        level: int

    pair = namedtuple("pair", "prompt level")
    for row in (Question(prompt="a", level=1), pair("a", 1)):
        assert rows_in([row], "prompts") == [{"prompt": "a", "level": 1}]
    turn = {"role": "user", "content": "a"}
    assert (
        rows_in([np.array([turn], dtype=object)], "prompts")
        == [{"messages": [turn]}]
        == rows_in([(turn,)], "prompts")
    )
    assert (
        rows_in(np.array(["a"]), "prompts")
        == rows_in(pa.array(["a"]), "prompts")
        == [{"prompt": "a"}]
    )


def test_a_prompt_that_was_read_keeps_its_columns_when_it_is_handed_over(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"question": "a", "answer": "1 #### 1", "level": 2}\n')
    rows = rows_in(read(tmp_path / "a.jsonl", Prompt), "prompts")
    assert rows == [
        {
            "messages": [{"role": "user", "content": "a"}],
            "id": "a:1",
            "metadata": {"question": "a", "answer": "1", "level": 2},
        },
    ]
    assert "row" not in rows_in([Prompt((user("a"),))], "prompts")[0]


def test_nulls_that_a_schema_adds_to_tool_calls_are_taken_out_of_tables_alone():
    calls = [
        {"name": "weather", "arguments": {"city": "Bern"}},
        {"name": "time", "arguments": {"zone": "UTC"}},
    ]
    rows = [
        {
            "messages": [{"role": "assistant", "content": "", "tool_calls": [call]}],
            "of": {"x": None},
        }
        for call in calls
    ]
    table = pa.Table.from_pylist(rows)
    assert table.to_pylist()[0]["messages"][0]["tool_calls"][0]["arguments"] == {
        "city": "Bern",
        "zone": None,
    }
    assert rows_in(table, "data") == rows
    explicit = [
        {"messages": [{"role": "assistant", "tool_calls": [{"arguments": {"zone": None}}]}]},
    ]
    assert rows_in(explicit, "data") == explicit


def refused() -> dict[str, tuple[Any, str]]:
    import datasets
    import pandas

    data_set = datasets.Dataset.from_list(ROWS)
    splits = {"train": data_set, "test": data_set}
    loader = torch.utils.data.DataLoader(Indexed())  # pyright: ignore[reportArgumentType]
    twice = pandas.DataFrame([["a", "b"]], columns=["prompt", "prompt"])
    levels = pandas.DataFrame([["a"]], columns=pandas.MultiIndex.from_tuples([("x", "prompt")]))
    named = r"with the splits train, test: give one of them, data\['train'\]"
    return {
        "DatasetDict": (datasets.DatasetDict(splits), f"is a DatasetDict {named}"),
        "IterableDatasetDict": (
            datasets.IterableDatasetDict(
                {name: one.to_iterable_dataset() for name, one in splits.items()},
            ),
            f"is a IterableDatasetDict {named}",
        ),
        "dict of data sets": (splits, f"is a dict {named}"),
        "dict of frames": ({"train": twice, "test": twice}, named),
        "one row": (
            {"prompt": "a", "answer": "b"},
            "is a dict with the keys prompt, answer: give a list of such rows",
        ),
        "one conversation": (
            {"messages": TALKS[0]},
            "is a dict with the keys messages: give a list of such rows",
        ),
        "columns and a text": ({"prompt": ["a"], "source": "x"}, "a dict of columns"),
        "uneven columns": ({"prompt": ["a", "b"], "answer": ["c"]}, "prompt has 2, answer has 1"),
        "nothing": ([], "holds no row"),
        "no columns": ({}, "holds no row"),
        "no rows": ({"prompt": []}, "holds no row"),
        "set": ({"a", "b"}, "has no order: give a list"),
        "loader": (loader, "gives batches: hand over its data set, data.dataset"),
        "function": (lambda: iter(ROWS), "hand over what it returns"),
        "number": (3, "is a int: give a file, a hub data set, or rows"),
        "bytes": (b"abc", "is a bytes"),
        "two columns of a name": (twice, "column prompt stands twice"),
        "levels": (levels, "columns of several levels"),
        "object": (
            [{"prompt": "a", "image": object()}],
            r"data\[0\]\['image'\] holds a object: a "
            r"cell is a text",
        ),
        "number in a list": ([3], r"data\[0\] is 3: a row is a text"),
        "nan in a list": (["a", float("nan")], r"data\[1\] is nan: a row is a text"),
    }


@pytest.mark.parametrize("name", refused())
def test_a_source_without_rows_is_refused(name):
    rows, reason = refused()[name]
    with pytest.raises(ConfigError, match=reason):
        rows_in(rows, "data")


def test_files_may_be_several_and_a_data_table_may_hold_rows(tmp_path):
    files = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    for file in files:
        file.write_text('{"prompt": "a"}\n')
    names = [str(file) for file in files]
    assert (
        data_values(files, tmp_path, "data")
        == data_values(names, tmp_path, "data")
        == {"path": names}
    )
    values = data_values({"path": [{"q": "a"}], "columns": {"prompt": "q"}}, tmp_path, "data")
    assert values is not None and values["columns"] == {"prompt": "q"}
    assert Path(values["path"]).read_text() == '{"q":"a"}\n'
    columns = data_values({"path": ["/a", "/b"], "prompt": ["c", "d"]}, tmp_path, "data")
    assert (
        columns is not None
        and Path(columns["path"]).read_text()
        == '{"path":"/a","prompt":"c"}\n{"path":"/b","prompt":"d"}\n'
    )


def test_conversations_of_any_container_give_a_reward_messages(tmp_path):
    import pandas

    frame = pandas.DataFrame({"prompt": [talk[:1] for talk in TALKS], "answer": ["a", "b"]})
    seen: list[Any] = []

    def reward(completions, answer):
        seen.extend(completions)
        return [0.0] * len(completions)

    few: Any = {
        "steps": 1,
        "prompts_per_step": 1,
        "samples_per_prompt": 2,
        "max_new_tokens": 2,
        "progress": False,
    }
    tether.grpo("tiny", prompts=frame, reward=reward, run=tmp_path / "run", **few)
    assert seen[0][0]["role"] == "assistant"
