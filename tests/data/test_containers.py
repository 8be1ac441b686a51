"""Files and folders as other programs write them: each is read, refused in one sentence, or named
as left out.
"""

from __future__ import annotations

import gzip
import json
import logging
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import tether
from tether.core.errors import DataError
from tether.core.types import Comparison, Demonstration, Prompt, assistant, user
from tether.data.formats.containers import left_out, places
from tether.data.formats.folders import split_of
from tether.data.formats.values import cell_value
from tether.data.inspection import inspect_data
from tether.data.sources import Quarantine, read

ROWS = [{"prompt": "a", "answer": "1"}, {"prompt": "b", "answer": "2"}]


def lines(rows: list[Any]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def prompts(source: Any) -> list[str]:
    return [prompt.text for prompt in read(source, Prompt)]


# --- one object with all rows
# -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("indent", [None, 2], ids=["one line", "indented"])
@pytest.mark.parametrize(
    "whole",
    [
        {"data": ROWS},
        {"train": ROWS},
        {"version": "1.0", "data": ROWS},
        {"prompt": ["a", "b"], "answer": ["1", "2"]},
        {"prompt": {"0": "a", "1": "b"}, "answer": {"0": "1", "1": "2"}},
        {"columns": ["prompt", "answer"], "index": [0, 1], "data": [["a", "1"], ["b", "2"]]},
        {"schema": {"fields": []}, "data": ROWS},
    ],
    ids=["data", "train", "version", "columns", "pandas", "pandas split", "pandas table"],
)
def test_rows_inside_of_one_object_are_read(tmp_path, whole, indent):
    (tmp_path / "a.json").write_text(json.dumps(whole, indent=indent))
    assert [(row.text, row.metadata["answer"]) for row in read(tmp_path / "a.json", Prompt)] == [
        ("a", "1"),
        ("b", "2"),
    ]


def test_json_written_by_pandas_is_read(tmp_path):
    import pandas

    for orient in ("columns", "split", "records", "table"):
        pandas.DataFrame(ROWS).to_json(tmp_path / "a.json", orient=orient)
        assert prompts(tmp_path / "a.json") == ["a", "b"], orient


def test_one_row_in_a_file_stays_one_row(tmp_path):
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    rows = [
        {"messages": talk},
        {
            "prompt": talk[:1],
            "chosen": talk[1:],
            "rejected": [{"role": "assistant", "content": "c"}],
        },
        {"prompt": "a", "data": [{"x": 1}]},
        {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
    ]
    for row in rows:
        (tmp_path / "a.json").write_text(json.dumps(row, indent=1))
        assert prompts(tmp_path / "a.json") == ["a"]
    (tmp_path / "a.jsonl").write_text(lines([{"prompt": "x", "data": ROWS}]))
    assert prompts(tmp_path / "a.jsonl") == ["x"]


def test_splits_and_uneven_columns_in_one_file_are_refused(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps({"train": ROWS, "test": ROWS}))
    with pytest.raises(
        DataError,
        match=(
            r"a\.json holds several splits: train, test\. Save one of "
            r"them in a file of its own"
        ),
    ):
        prompts(tmp_path / "a.json")
    (tmp_path / "a.json").write_text(json.dumps({"prompt": ["a"], "answer": ["1", "2"]}))
    with pytest.raises(
        DataError,
        match=(
            r"a\.json: columns .* differ in their lengths: prompt has "
            r"1, answer has 2"
        ),
    ):
        prompts(tmp_path / "a.json")


def test_values_beside_the_rows_are_named(tmp_path, caplog):
    (tmp_path / "beside.json").write_text(
        json.dumps({"version": "1.0", "license": "x", "data": ROWS}),
    )
    with caplog.at_level(logging.WARNING, "tether.data"):
        prompts(tmp_path / "beside.json")
    assert "the rows are read from 'data'; left out beside it: version, license" in caplog.text


# --- Arrow and Parquet
# --------------------------------------------------------------------------------------------------------


def test_arrow_files_of_both_kinds_are_read(tmp_path):
    table = pa.Table.from_pylist(ROWS)
    with pa.ipc.new_file(tmp_path / "file.arrow", table.schema) as file:
        file.write_table(table)
    with pa.ipc.new_stream(tmp_path / "stream.arrow", table.schema) as stream:
        stream.write_table(table)
    assert prompts(tmp_path / "file.arrow") == prompts(tmp_path / "stream.arrow") == ["a", "b"]
    whole = (tmp_path / "stream.arrow").read_bytes()
    for damaged in (whole[: len(whole) // 2], b"nonsense" * 9):
        (tmp_path / "bad.arrow").write_bytes(damaged)
        with pytest.raises(DataError, match=r"bad\.arrow"):
            prompts(tmp_path / "bad.arrow")


CALLS = [
    {"name": "weather", "arguments": {"city": "Bern"}},
    {"name": "time", "arguments": {"zone": "UTC", "of": {"day": 1}}},
]


def talk_of(call: dict[str, Any]) -> dict[str, Any]:
    called = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"type": "function", "function": call}],
    }
    schema = {
        "type": "function",
        "function": {"name": call["name"], "parameters": {"properties": call["arguments"]}},
    }
    end = {"role": "assistant", "content": "Done."}
    return {
        "messages": [
            {"role": "user", "content": "Do."},
            called,
            {"role": "tool", "content": "x"},
            end,
        ],
        "tools": [schema],
    }


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_a_call_has_no_arguments_of_other_functions(tmp_path, kind):
    """The union of all arguments is the schema of a column: nulls fill what a call does not
    have.
    """
    rows = [talk_of(call) for call in CALLS]
    table = pa.Table.from_pylist(rows)
    assert "zone" in table.to_pylist()[0]["messages"][1]["tool_calls"][0]["function"]["arguments"]
    if kind == "parquet":
        pq.write_table(table, tmp_path / "a.parquet")
    else:
        with pa.ipc.new_stream(tmp_path / "a.arrow", table.schema) as stream:
            stream.write_table(table)
    (tmp_path / "a.jsonl").write_text(lines(rows))
    own = [record.messages for record in read(tmp_path / f"a.{kind}", Demonstration)]
    assert own == [record.messages for record in read(tmp_path / "a.jsonl", Demonstration)]
    assert [json.loads(messages[1].tool_calls[0])["function"]["arguments"] for messages in own] == [
        c["arguments"] for c in CALLS
    ]


def test_other_objects_of_a_table_keep_their_nulls(tmp_path):
    rows = [
        {"prompt": "a", "reward_model": {"truth": None, "style": "rule"}},
        {"prompt": "b", "reward_model": {"truth": "1"}},
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    first = next(iter(read(tmp_path / "a.parquet", Prompt)))
    assert first.row == rows[0]


# --- folders
# ------------------------------------------------------------------------------------------------------------------


def test_folders_that_datasets_saved(tmp_path):
    import datasets

    data_set = datasets.Dataset.from_list([*ROWS, {"prompt": "c", "answer": "3"}])
    data_set.filter(lambda row: row["prompt"] != "b").save_to_disk(tmp_path / "one", num_shards=2)
    assert prompts(tmp_path / "one") == ["a", "c"]
    (tmp_path / "one/cache-0123.arrow").write_bytes(
        (tmp_path / "one/data-00000-of-00002.arrow").read_bytes(),
    )
    assert prompts(tmp_path / "one") == ["a", "c"]
    datasets.DatasetDict({"train": data_set, "test": data_set}).save_to_disk(tmp_path / "two")
    reason = (
        "two holds several splits of a DatasetDict: train, test. Name the folder of one of them: "
        f"{tmp_path / 'two' / 'train'}"
    )
    with pytest.raises(DataError, match=reason):
        prompts(tmp_path / "two")
    assert prompts(tmp_path / "two/test") == ["a", "b", "c"]
    datasets.DatasetDict({"only": data_set}).save_to_disk(tmp_path / "three")
    assert prompts(tmp_path / "three") == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("file", "split"),
    [
        ("train-00000-of-00001.parquet", "train"),
        ("data/test-00001-of-00002-0123abcd.parquet", "test"),
        ("train_sft-00000-of-00001.parquet", "train_sft"),
        ("data/part-00000-of-00009.jsonl", ""),
        ("test/part-00000-of-00009.jsonl", "test"),
        ("helpful-base/train.jsonl.gz", "train"),
        ("my_Valid.csv", "validation"),
        ("dev.jsonl", "validation"),
        ("train/questions.jsonl", "train"),
        ("train/eval.jsonl", "test"),
        ("trainable.jsonl", ""),
        ("contest.jsonl", ""),
        ("rows.jsonl", ""),
    ],
)
def test_a_file_says_its_split(file, split):
    assert split_of(Path(file)) == split


def snapshot(folder: Path, files: list[str]) -> Path:
    for name in files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(lines([{"prompt": name}]))
    return folder


@pytest.mark.parametrize(
    ("files", "used"),
    [
        (["train.jsonl", "test.jsonl"], ["train.jsonl"]),
        (
            [
                "data/train-00000-of-00002.jsonl",
                "data/train-00001-of-00002.jsonl",
                "data/validation-00000-of-00001.jsonl",
            ],
            2,
        ),
        (["a.jsonl", "b.jsonl", "test.jsonl"], ["a.jsonl", "b.jsonl"]),
        (["x/train.jsonl", "x/test.jsonl", "y/train.jsonl"], ["x/train.jsonl", "y/train.jsonl"]),
        (["a.jsonl", "train.jsonl", "dev.jsonl"], ["a.jsonl", "train.jsonl"]),
        (["test.jsonl"], ["test.jsonl"]),
        (["test/a.jsonl", "test/b.jsonl"], ["test/a.jsonl", "test/b.jsonl"]),
        (["a.jsonl", "b.jsonl"], ["a.jsonl", "b.jsonl"]),
        (
            ["train-00000-of-00001.jsonl", "train_gen-00000-of-00001.jsonl"],
            ["train-00000-of-00001.jsonl"],
        ),
    ],
)
def test_the_training_rows_of_a_folder_are_read_and_the_others_named(tmp_path, caplog, files, used):
    folder = snapshot(tmp_path / "folder", files)
    with caplog.at_level(logging.WARNING, "tether.data"):
        used = files[:used] if isinstance(used, int) else used
        assert prompts(folder) == used
    others = [str(folder / name) for name in files if name not in used]
    assert [*left_out(folder)] == others and ("left out: " in caplog.text) == bool(others)
    assert all(str(Path(name).relative_to(folder)) in caplog.text for name in others)
    assert {*inspect_data(folder).unread} == {*others}


def test_splits_without_one_for_training_are_refused(tmp_path):
    folder = snapshot(tmp_path / "folder", ["test.jsonl", "validation.jsonl"])
    with pytest.raises(
        DataError,
        match=(
            r"holds several splits: test \(test.jsonl\), validation .* Name the "
            r"files of one of them"
        ),
    ):
        places(folder)
    folder = snapshot(
        tmp_path / "other",
        ["train_sft-00000-of-00001.jsonl", "train_gen-00000-of-00001.jsonl"],
    )
    with pytest.raises(DataError, match=r"several splits: train_gen .*, train_sft"):
        places(folder)


def test_files_that_describe_a_data_set_are_no_rows(tmp_path):
    folder = snapshot(
        tmp_path / "folder",
        ["a.jsonl", "README.txt", "dataset_infos.json", "LICENSE.txt", "LICENSE"],
    )
    assert prompts(folder) == ["a.jsonl"]
    assert {Path(name).name for name in left_out(folder)} == {
        "README.txt",
        "dataset_infos.json",
        "LICENSE.txt",
    }


def test_a_data_set_in_the_cache_of_the_hub_is_read_once(tmp_path):
    cached = tmp_path / "datasets--owner--name"
    for version in ("old", "new"):
        snapshot(cached / "snapshots" / version, ["train.jsonl"])
    (cached / "refs").mkdir()
    (cached / "refs/main").write_text("new")
    (place,) = places(cached)
    assert place.name == str(cached / "snapshots/new/train.jsonl")
    (cached / "refs/main").unlink()
    with pytest.raises(DataError, match="several snapshots: new, old"):
        places(cached)


OTHERS = {
    "rows.xlsx": "is a spreadsheet. Export it as CSV",
    "rows.zip": "is an archive. Unpack it",
    "rows.tar.gz": "is an archive. Unpack it",
    "rows.yaml": "is no table of rows. Write a JSON object a line",
    "rows.pkl": "holds objects of a program. Save rows as JSON lines or Parquet",
    "rows.sqlite": "is a database. Export a table as CSV or Parquet",
    "rows.md": "unknown kind of file. Data files end on .json",
    "rows.jsonl.bak": "unknown kind of file",
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_kinds_of_files_are_refused_alone_and_named_in_folders(tmp_path, caplog, name):
    (tmp_path / name).write_bytes(b"PK")
    with pytest.raises(DataError, match=f"{name}: {OTHERS[name]}"):
        places(tmp_path / name)
    with pytest.raises(DataError, match="holds no data file"):
        places(tmp_path)
    (tmp_path / "a.jsonl").write_text(lines(ROWS))
    assert len(places(tmp_path)) == 1
    assert [*left_out(tmp_path)] == [str(tmp_path / name)] and (
        f"left out: {name}: {OTHERS[name]}"
    ) in caplog.text


# --- tables as text
# -----------------------------------------------------------------------------------------------------------


def test_a_mark_of_byte_order_and_a_table_of_semicolons(tmp_path):
    (tmp_path / "a.csv").write_bytes(b"\xef\xbb\xbfprompt,answer\na,1\n")
    (tmp_path / "b.jsonl").write_bytes(b"\xef\xbb\xbf" + lines(ROWS[:1]).encode())
    (tmp_path / "c.json.gz").write_bytes(
        gzip.compress(b"\xef\xbb\xbf" + json.dumps({"data": ROWS[:1]}).encode()),
    )
    assert prompts([tmp_path / name for name in ("a.csv", "b.jsonl", "c.json.gz")]) == [
        "a",
        "a",
        "a",
    ]
    (tmp_path / "d.csv").write_text("prompt;answer\na;1\n")
    with pytest.raises(DataError, match="its columns are parted by ';'"):
        prompts(tmp_path / "d.csv")
    (tmp_path / "e.csv").write_text("prompt,prompt\na,b\n")
    with pytest.raises(DataError, match="column prompt stands twice"):
        prompts(tmp_path / "e.csv")


TALK = [{"role": "user", "content": "it's"}, {"role": "assistant", "content": 'b "q"\nnew, [1]'}]
PYTHON_TEXT = """[{'role': 'user', 'content': "it's"}, {'role': 'assistant', 'content': 'b "q"\\nnew, [1]'}]"""
NUMPY_TEXT = """[{'content': "it's", 'role': 'user'}\n {'content': 'b "q"\\nnew, [1]', 'role': 'assistant'}]"""


@pytest.mark.parametrize(
    "text",
    [json.dumps(TALK), PYTHON_TEXT, NUMPY_TEXT],
    ids=["json", "python", "numpy"],
)
def test_messages_as_text_are_messages(tmp_path, text):
    (tmp_path / "a.jsonl").write_text(lines([{"messages": text}]))
    (record,) = read(tmp_path / "a.jsonl", Demonstration)
    assert record.messages == (user("it's"), assistant('b "q"\nnew, [1]'))


def test_csv_written_by_pandas_is_read(tmp_path):
    """`to_csv` of a frame with lists, and of one with arrays, as `read_parquet` makes them."""
    import pandas

    rows = [{"messages": TALK, "nums": [1, 2], "words": ["x", "y"]}]
    pandas.DataFrame(rows).to_csv(tmp_path / "lists.csv", index=False)
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    pandas.read_parquet(tmp_path / "a.parquet").to_csv(tmp_path / "arrays.csv", index=False)
    assert "['x' 'y']" in (tmp_path / "arrays.csv").read_text()
    for name in ("lists", "arrays"):
        (record,) = read(tmp_path / f"{name}.csv", Demonstration)
        assert record.messages == (user("it's"), assistant('b "q"\nnew, [1]'))
    ranked = [{"prompt": "p", "responses": ["one", "two"], "scores": [1, 2]}]
    pandas.DataFrame(ranked).to_csv(tmp_path / "ranked.csv", index=False)
    pq.write_table(pa.Table.from_pylist(ranked), tmp_path / "b.parquet")
    pandas.read_parquet(tmp_path / "b.parquet").to_csv(tmp_path / "ranked-arrays.csv", index=False)
    for name in ("ranked", "ranked-arrays"):
        (pair,) = read(tmp_path / f"{name}.csv", Comparison)
        assert (pair.chosen, pair.rejected, pair.margin) == (
            (assistant("two"),),
            (assistant("one"),),
            1.0,
        )


@pytest.mark.parametrize(
    ("printed", "value"),
    [
        ("['a' 'b']", ["a", "b"]),
        ("['a', 'b']", ["a", "b"]),
        ("[1 2 3]", [1, 2, 3]),
        ("[ 1.5  nan]", [1.5, None]),
        ("[ True False]", [True, False]),
        ("[[1 2]\n [3 4]]", [[1, 2], [3, 4]]),
        ("[np.float64(1.5), np.int64(3), np.True_]", [1.5, 3, True]),
        ("array([{'x': array(['a', 'b'], dtype=object)}], dtype=object)", [{"x": ["a", "b"]}]),
        ("[(1, 2), {'a': None}]", [[1, 2], {"a": None}]),
        ("{'a': 'it\\'s', 'b': -1e-3}", {"a": "it's", "b": -0.001}),
        ("[1, 2]", [1, 2]),
    ],
)
def test_values_as_python_and_numpy_print_them(printed, value):
    assert cell_value(printed) == value


@pytest.mark.parametrize(
    "text",
    [
        "[1 2 ... 3]",
        "['a' ... 'b']",
        "[Timestamp('x')]",
        "['a",
        "[a]",
        "[1] [2]",
        ")(",
        "__import__('os')",
        "[" * 5000,
    ],
)
def test_texts_that_are_no_values_are_refused(text):
    with pytest.raises(ValueError, match="malformed JSON"):
        cell_value(text)


@pytest.mark.parametrize(
    "text",
    [
        '{"value": 42, "unit": "kg"}',
        '{"from": "Paris", "to": "Rome"}',
        '{"role": "admin", "id": 1}',
    ],
)
def test_an_answer_that_is_an_object_of_json_is_a_text(tmp_path, text):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": "as JSON", "response": text}) + "\n")
    (row,) = read(path, Demonstration, strict=True)
    assert row.messages[-1].content == text


def test_a_text_that_begins_like_messages_and_is_cut_off_is_refused(tmp_path):
    rows = [
        {"messages": PYTHON_TEXT[:40]},
        {"messages": NUMPY_TEXT.replace("\n", " ... ")},
        {"messages": PYTHON_TEXT},
    ]
    (tmp_path / "a.jsonl").write_text(lines(rows))
    quarantine = Quarantine()
    assert len(list(read(tmp_path / "a.jsonl", Prompt, quarantine=quarantine))) == 1
    assert [bad["reason"].partition(" (")[0] for bad in quarantine.examples] == [
        "not a list: column messages holds a text that only begins like messages",
    ] * 2
    texts = [
        "{'a': 1} What is this?",
        "[1, 2",
        '{"x": 1}',
        "[{'role': 'user', 'content': 'x'} is what I sent. Why?",
    ]
    (tmp_path / "b.jsonl").write_text(lines([{"prompt": text} for text in texts]))
    assert prompts(tmp_path / "b.jsonl") == texts


def test_a_configuration_that_is_a_folder_of_the_data_set(tmp_path, monkeypatch):
    """As in hub:Anthropic/hh-rlhf/helpful-base: no configuration has the name, and a folder has."""
    for part in ("one", "other"):
        (tmp_path / "owner/name" / part).mkdir(parents=True)
        (tmp_path / "owner/name" / part / "train.jsonl").write_text(lines([{"prompt": part}]))
    monkeypatch.chdir(tmp_path)
    assert prompts("hub:owner/name/other") == ["other"]
    with pytest.raises(
        DataError,
        match="the hub data set owner/name/third, split train cannot be read",
    ):
        prompts("hub:owner/name/third")


def test_files_left_out_stand_in_the_summary_of_a_run(tmp_path):
    rows = [{"prompt": f"a{n}", "response": "b"} for n in range(4)]
    for name in ("train", "test"):
        (tmp_path / "rows").mkdir(exist_ok=True)
        (tmp_path / f"rows/{name}.jsonl").write_text(lines(rows))
    run = tether.sft("tiny", str(tmp_path / "rows"), run=tmp_path / "run", progress=False)
    assert [*run.summary["files_left_out"]] == [str(tmp_path / "rows/test.jsonl")]
