"""Containers, detection, quarantine, errors and memory, on files that the tests write
themselves.
"""

from __future__ import annotations

import gzip
import io
import json
import logging
import re
import struct
import subprocess
import sys
import tracemalloc
import types
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tether.core.errors import DataError, MissingFileError
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
from tether.data.chat import Encoded
from tether.data.formats import arrow
from tether.data.sources import Quarantine, detect_format, group_of, look, read, split_by_group
from tether.data.steps import Solution

PAIRS = [
    {"prompt": f"question {i}", "chosen": f"good, {i}\nyes", "rejected": (f'bad "{i}" é\u2028')}
    for i in range(50)
]


def lines(rows: list[Any]) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def table(rows: list[dict[str, Any]], delimiter: str) -> bytes:
    """Quoted by hand, as RFC 4180 says."""
    quoted = lambda cell: '"' + str(cell).replace('"', '""') + '"'  # noqa: E731
    return "\r\n".join(
        delimiter.join(map(quoted, cells))
        for cells in [rows[0].keys(), *(row.values() for row in rows)]
    ).encode()


def parquet(rows: list[dict[str, Any]]) -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), sink, row_group_size=7)
    return sink.getvalue()


CONTAINERS: dict[str, bytes] = {
    "lines.jsonl": lines(PAIRS),
    "marked.jsonl": b"\xef\xbb\xbf" + lines(PAIRS),
    "disguised.json": lines(PAIRS),
    "array.json": json.dumps(PAIRS).encode(),
    "pretty.json": b"\xef\xbb\xbf" + json.dumps(PAIRS, indent=2, ensure_ascii=False).encode(),
    "array.jsonl": json.dumps(PAIRS).encode(),
    "objects.json": "\n".join(json.dumps(row, indent=1) for row in PAIRS).encode(),
    "windows.jsonl": lines(PAIRS).replace(b"\n", b"\r\n\r\n"),
    "table.csv": table(PAIRS, ","),
    "marked.csv": b"\xef\xbb\xbf" + table(PAIRS, ","),
    "table.tsv": table(PAIRS, "\t"),
    "rows.parquet": parquet(PAIRS),
}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", CONTAINERS)
def test_containers(tmp_path: Path, name: str, packed: bool) -> None:
    path = tmp_path / (name + ".gz" * packed)
    path.write_bytes(gzip.compress(CONTAINERS[name]) if packed else CONTAINERS[name])
    pairs = list(read(path, Comparison, strict=True))
    assert [(p.prompt, p.chosen, p.rejected) for p in pairs] == [
        ((user(row["prompt"]),), (assistant(row["chosen"]),), (assistant(row["rejected"]),))
        for row in PAIRS
    ]
    assert pairs[0].id.startswith(Path(name).stem + ":")


def test_text_is_one_prompt_a_line(tmp_path: Path) -> None:
    path = tmp_path / "p.txt"
    path.write_bytes(b"\xef\xbb\xbffirst\n\n  second \r\nb\xffd\nlast")
    quarantine = Quarantine()
    prompts = list(read(path, Prompt, quarantine=quarantine))
    assert [(p.text, p.id) for p in prompts] == [
        ("first", "p:1"),
        ("second", "p:3"),
        ("last", "p:5"),
    ]
    assert [e["line"] for e in quarantine.examples] == [4]


def test_single_object_is_one_row(tmp_path: Path) -> None:
    for words in (json.dumps(PAIRS[0]), json.dumps(PAIRS[0], indent=2)):
        (tmp_path / "one.json").write_text(words)
        assert len(list(read(tmp_path / "one.json", Comparison))) == 1


def test_gzip_is_known_by_its_bytes_not_its_name(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(gzip.compress(lines(PAIRS)))
    (tmp_path / "b.jsonl.gz").write_bytes(lines(PAIRS))
    assert len(list(read([tmp_path / "a.jsonl", tmp_path / "b.jsonl.gz"], Comparison))) == 100


def test_folder_reads_known_files_in_sorted_order(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    for name in ("b.jsonl", "a.jsonl", "deep/c.jsonl", ".hidden.jsonl"):
        (tmp_path / name).write_bytes(lines([{"prompt": name, "chosen": "x", "rejected": "y"}]))
    (tmp_path / "notes.md").write_text("not data")
    assert [p.prompt[0].content for p in read(tmp_path, Comparison)] == [
        "a.jsonl",
        "b.jsonl",
        "deep/c.jsonl",
    ]


def test_csv_cells_may_hold_json_messages_and_lists(tmp_path: Path) -> None:
    messages = json.dumps([{"role": "user", "content": "Q"}])
    (tmp_path / "a.csv").write_bytes(
        table([{"prompt": messages, "chosen": "x", "rejected": '[{"a": 1}]'}], ","),
    )
    [pair] = read(tmp_path / "a.csv", Comparison)
    assert (pair.prompt, pair.rejected) == ((user("Q"),), (assistant('[{"a": 1}]'),))
    (tmp_path / "b.csv").write_bytes(
        table([{"prompt": "Q", "steps": '["a", "b"]', "labels": "[true, null]"}], ","),
    )
    [steps] = read(tmp_path / "b.csv", StepLabels)
    assert (steps.steps, steps.labels) == (("a", "b"), (True, None))


def test_csv_line_numbers_are_those_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(
        b'prompt,chosen,rejected\n"two\nlines",x,y\np,x\nq,\xff,y\nr,x,y\n',
    )
    quarantine = Quarantine()
    pairs = list(read(tmp_path / "a.csv", Comparison, quarantine=quarantine))
    assert [p.id for p in pairs] == ["a:2", "a:6"]
    assert [(e["line"], e["reason"].split(":")[0]) for e in quarantine.examples] == [
        (4, "uneven row"),
        (5, "not UTF-8"),
    ]


def test_csv_cells_may_be_long(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(
        table([{"prompt": "p", "chosen": "x" * 500_000, "rejected": "y"}], ","),
    )
    assert len(next(read(tmp_path / "a.csv", Comparison)).chosen[0].content) == 500_000


# --- bad rows
# ---------------------------------------------------------------------------------------------------------------

MIXED = (
    lines(PAIRS[:1])
    + b'{"prompt": "cut", "chosen"\n'
    + b'{"prompt": "\xff\xfe", "chosen": "a", "rejected": "b"}\n'
    + b'["a", "list"]\n'
    + b'{"prompt": "half \\ud83d", "chosen": "a", "rejected": "b"}\n'
    + b'{"prompt": "ok \\ud83d\\ude00", "chosen": "a", "rejected": "b"}\n'
    + b'{"prompt": "p", "chosen": "same", "rejected": "same"}\n'
)
REASONS = ["malformed JSON", "not UTF-8", "not an object", "not UTF-8", "equal responses"]


def test_bad_lines_go_to_quarantine_with_their_place(tmp_path: Path) -> None:
    path = tmp_path / "mixed.jsonl"
    path.write_bytes(MIXED)
    log = tmp_path / "logs" / "bad.jsonl"
    quarantine = Quarantine(log, keep=2)
    pairs = list(read(path, Comparison, quarantine=quarantine))
    assert [p.prompt[0].content for p in pairs] == ["question 0", "ok 😀"]
    assert (quarantine.count, len(quarantine.examples)) == (5, 2)
    written = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    assert [(e["file"], e["line"], e["reason"].split(":")[0]) for e in written] == [
        (str(path), line, reason) for line, reason in zip((2, 3, 4, 5, 7), REASONS, strict=True)
    ]
    assert quarantine.summary()["reasons"] == {
        "not UTF-8": 2,
        "malformed JSON": 1,
        ("not an object"): 1,
        "equal responses": 1,
    }
    assert "same" in written[-1]["row"]


def test_strict_stops_at_the_first_bad_row(tmp_path: Path) -> None:
    path = tmp_path / "mixed.jsonl"
    path.write_bytes(MIXED)
    with pytest.raises(DataError, match=r"mixed\.jsonl, line 2: malformed JSON"):
        list(read(path, Comparison, strict=True))
    path.write_bytes(lines([PAIRS[0], {**PAIRS[0], "chosen": ""}]))
    with pytest.raises(DataError, match=r"mixed\.jsonl, line 2: empty response"):
        list(read(path, Comparison, strict=True))


def test_without_a_quarantine_the_log_warns(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (tmp_path / "m.jsonl").write_bytes(MIXED)
    with caplog.at_level(logging.WARNING, "tether.data"):
        list(read(tmp_path / "m.jsonl", Comparison))
    assert "5 rows cannot be used: not UTF-8 (2)" in caplog.text


@pytest.mark.parametrize("limit", [1, 2, 3, None])
def test_rows_before_a_limit_are_named_as_well(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    limit: int | None,
) -> None:
    path = tmp_path / f"limit {limit}.jsonl"
    bad, good = {"prompt": ""}, {"prompt": "a", "mood": 1}
    path.write_bytes(lines([bad, good, {"prompt": "b"}, bad, {"prompt": "c"}]))
    with caplog.at_level(logging.INFO, "tether.data"):
        assert len(list(read(path, Prompt, limit=limit))) == (limit or 3)
    num_bad = 1 if limit in (1, 2) else 2
    assert [record.getMessage().partition(": ")[2] for record in caplog.records] == [
        f"{num_bad} rows cannot be used: empty prompt ({num_bad})",
        "columns not used: mood",
    ]
    quarantine = Quarantine()
    list(read(path, Prompt, limit=limit, quarantine=quarantine))
    assert (quarantine.count, dict(quarantine.unused)) == (num_bad, {"mood": 1})
    assert len(caplog.records) == 2


def test_bad_elements_of_an_array(tmp_path: Path) -> None:
    rows = [PAIRS[0], 7, {**PAIRS[1], "chosen": None}, PAIRS[2]]
    (tmp_path / "a.json").write_bytes(
        json.dumps(rows).encode().replace(b"question 2", b"question \xe9"),
    )
    quarantine = Quarantine()
    pairs = list(read(tmp_path / "a.json", Comparison, quarantine=quarantine))
    assert [p.id for p in pairs] == ["a:1"]
    assert [(e["line"], e["reason"].split(":")[0]) for e in quarantine.examples] == [
        (2, "not an object"),
        (3, "missing text"),
        (4, "not UTF-8"),
    ]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            b'[{"prompt": "p", "chosen": "a", "rejected": "b"}, {"prompt": }, {}]',
            r"a\.json, line 1: malformed JSON \(Expecting value\)",
        ),
        (b'[{"prompt": "p", "chosen": "a", "rejected": "b"}', "cut off"),
        (b'[{"prompt": "p", "chosen": "a", "rejected": "b"}, {"prompt": "q', "cut off"),
        (b'[{"prompt": "p", "chosen": "a", "rejected": "b"}] {}', "Extra data"),
        (b"", "is empty"),
        (b"[]", "is empty"),
        (b" \n\n", "is empty"),
        (b"hello\nworld\n", r"none of its 2 rows can be used: malformed JSON \(2\)"),
        ("[]".encode("utf-16"), "is text in UTF-16. Save it as UTF-8"),
    ],
)
def test_damaged_json(tmp_path: Path, words: bytes, message: str) -> None:
    (tmp_path / "a.json").write_bytes(words)
    with pytest.raises(DataError, match=message):
        list(read(tmp_path / "a.json", Comparison))


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.json.gz", "a.csv.gz"])
def test_truncated_gzip_names_the_file(tmp_path: Path, name: str) -> None:
    words = {
        "a.jsonl.gz": lines(PAIRS),
        "a.json.gz": json.dumps(PAIRS).encode(),
        "a.csv.gz": table(PAIRS, ","),
    }[name]
    packed = gzip.compress(words)
    (tmp_path / name).write_bytes(packed[: len(packed) // 2])
    with pytest.raises(DataError, match=rf"{name} is cut off or damaged"):
        list(read(tmp_path / name, Comparison))


def test_damaged_parquet_and_unclosed_quote(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(parquet(PAIRS)[:-20])
    with pytest.raises(DataError, match=r"a\.parquet: not a readable Parquet file"):
        list(read(tmp_path / "a.parquet", Comparison))
    (tmp_path / "a.csv").write_bytes(b'prompt,chosen,rejected\np,"x,y\n' + b"p,x,y\n" * 3_000_000)
    with pytest.raises(DataError, match="quote is probably not closed"):
        list(read(tmp_path / "a.csv", Comparison))


def test_every_row_bad(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(
        lines(
            [{"prompt": "p", "chosen": "a", "rejected": "a"}] * 3
            + [{"prompt": "", "chosen": "a", "rejected": "b"}],
        ),
    )
    with pytest.raises(
        DataError,
        match=(
            r"none of its 4 rows can be used: equal responses \(3\); "
            r"empty prompt \(1\)"
        ),
    ):
        list(read(tmp_path / "a.jsonl", Comparison))


def test_nothing_of_the_kind(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(lines([{"prompt": "p", "completion": "c", "label": False}]))
    with pytest.raises(DataError, match="none of its 1 rows can be used: undesirable response"):
        list(read(tmp_path / "a.jsonl", Demonstration))


# --- detection and arguments
# --------------------------------------------------------------------------------------------------


def test_wrong_kind_says_what_it_is_and_what_is_needed(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(lines([{"instruction": "i", "input": "", "output": "o"}]))
    with pytest.raises(DataError) as error:
        list(read(path, Comparison))
    assert str(error.value) == (
        f"{path} looks like alpaca demonstrations (columns instruction, input, output), not "
        "preferences. "
        "Preferences need two responses per prompt, for example columns prompt, chosen, rejected. "
        "If columns have other names, "
        'name them by data.columns, for example { prompt = "question", chosen = "good", rejected '
        '= "bad" }.'
    )


@pytest.mark.parametrize("kind", [Demonstration, Comparison, Feedback, StepLabels, Problem])
def test_prompts_are_nothing_else(tmp_path: Path, kind: type) -> None:
    (tmp_path / "a.txt").write_text("hello\n")
    with pytest.raises(DataError, match=r"a\.txt looks like prompts \(columns prompt\), not "):
        list(read(tmp_path / "a.txt", kind))


def test_detection_survives_bad_first_rows(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"oops\n" * 100 + lines([{"unrelated": 1}]) + lines(PAIRS))
    quarantine = Quarantine()
    pairs = list(read(tmp_path / "a.jsonl", Comparison, quarantine=quarantine))
    assert (len(pairs), quarantine.count, pairs[0].id) == (50, 101, "a:102")


def test_the_asked_kind_decides_between_formats(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(
        lines([{"prompt": "p", "response": "long r", "answer": "r"}]),
    )
    assert next(read(tmp_path / "a.jsonl", Problem)).answer == "r"
    assert next(read(tmp_path / "a.jsonl", Demonstration)).messages[-1].content == "long r"


def test_format_by_name(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(lines([{"question": "Q", "answer": "no marks"}]))
    assert detect_format(tmp_path / "a.jsonl").name == "question_answer"
    with pytest.raises(DataError, match=r"none of its 1 rows can be used: no final answer"):
        list(read(tmp_path / "a.jsonl", Problem, format="gsm8k"))
    with pytest.raises(DataError, match="did you mean 'gsm8k'"):
        read(tmp_path / "a.jsonl", Problem, format="gsmk8")


def test_unknown_columns(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(lines([{"alpha": 1, "beta": 2}]))
    with pytest.raises(DataError, match="no known format has the columns alpha, beta"):
        list(read(tmp_path / "a.jsonl", Comparison))


def test_paths_and_arguments_are_checked_before_the_first_row(tmp_path: Path) -> None:
    with pytest.raises(MissingFileError, match=r"nowhere\.jsonl"):
        read(tmp_path / "nowhere.jsonl", Comparison)
    (tmp_path / "a.xyz").write_text("")
    with pytest.raises(DataError, match="unknown kind of file"):
        read(tmp_path / "a.xyz", Comparison)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="holds no data file"):
        read(tmp_path / "empty", Comparison)
    with pytest.raises(DataError, match="no data source"):
        read([], Comparison)
    (tmp_path / "a.txt").write_text("x\n")
    with pytest.raises(DataError, match="is not one of Prompt"):
        read(tmp_path / "a.txt", int)
    with pytest.raises(DataError, match="limit is -1"):
        read(tmp_path / "a.txt", Prompt, limit=-1)


def test_limit_counts_records_over_all_files(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / f"{name}.jsonl").write_bytes(lines(PAIRS))
    records = list(read(tmp_path, Comparison, limit=60))
    assert [r.id for r in records[48:52]] == ["a:49", "a:50", "b:1", "b:2"]
    assert len(records) == 60


# --- the hub
# ----------------------------------------------------------------------------------------------------------------


def fake_hub(monkeypatch: pytest.MonkeyPatch, load: Any) -> None:
    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load))


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("hub:owner/name", ("owner/name", None, "train")),
        ("hub:owner/name:test", ("owner/name", None, "test")),
        ("hub:owner/na.me/conf-1:train[:5%]", ("owner/na.me", "conf-1", "train[:5%]")),
    ],
)
def test_hub_addresses(
    monkeypatch: pytest.MonkeyPatch,
    source: str,
    expected: tuple[Any, ...],
) -> None:
    calls = []

    def load(name: str, config: str | None, *, split: str, streaming: bool) -> Any:
        calls.append((name, config, split))
        assert streaming
        return iter(PAIRS)

    fake_hub(monkeypatch, load)
    pairs = list(read(source, Comparison, limit=3))
    assert calls == [expected]
    assert [p.id for p in pairs] == [f"{expected[0].split('/')[1]}:{i}" for i in (1, 2, 3)]


def test_hub_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: Any, **__: Any) -> Any:
        raise ConnectionError("no route")

    fake_hub(monkeypatch, load)
    with pytest.raises(
        DataError,
        match=(
            r"owner/name, split train cannot be read: "
            r"ConnectionError: no route"
        ),
    ):
        next(read("hub:owner/name", Comparison))

    def broken(*_: Any, **__: Any) -> Any:
        yield PAIRS[0]
        raise TimeoutError("slow")

    fake_hub(monkeypatch, broken)
    with pytest.raises(DataError, match="TimeoutError"):
        list(read("hub:owner/name", Comparison))
    with pytest.raises(DataError, match="is no data set on the hub"):
        read("hub:name", Comparison)


# --- groups
# -----------------------------------------------------------------------------------------------------------------


def pair(prompt: str, group: str = "") -> Comparison:
    return Comparison((user(prompt),), (assistant("a"),), (assistant("b"),), group=group)


def test_group_of_folds_case_and_space_and_prefers_the_explicit_one() -> None:
    assert (
        group_of(pair("What  is\nThis?"))
        == group_of(pair("what is this?"))
        != group_of(pair("what is that?"))
    )
    assert group_of(pair("x", "mine")) == "mine"
    assert (
        group_of(
            Solution(
                "1",
                "mine",
                (user("x"),),
                ("y",),
                sequence=Encoded((), ()),
                ends=(0,),
                labels=(True,),
                targets=(1.0,),
            ),
        )
        == "mine"
    )
    assert (
        group_of(Prompt((user("Q"),)))
        == group_of(Demonstration((user("q"), assistant("a"))))
        == group_of(pair("Q"))
    )


def test_split_keeps_groups_together_and_does_not_depend_on_the_other_rows() -> None:
    rows = [pair(f"q{i // 4}") for i in range(4000)]
    kept, held = split_by_group(rows, 0.2, seed=3)
    assert len(kept) + len(held) == 4000
    assert not {group_of(r) for r in kept} & {group_of(r) for r in held}
    # 1000 groups, each held out with probability 0.2: within four standard deviations of 200.
    assert abs(len(held) / 4 - 200) < 4 * (1000 * 0.2 * 0.8) ** 0.5
    again = split_by_group(rows[::-1][:100], 0.2, seed=3)[1]
    assert {group_of(r) for r in again} <= {group_of(r) for r in held}
    assert split_by_group(rows, 0.2, seed=4)[1] != held
    assert split_by_group(rows, 0.0)[1] == [] == split_by_group(rows, 1.0)[0]
    with pytest.raises(DataError, match="between 0 and 1"):
        split_by_group(rows, 20)


# --- memory
# -----------------------------------------------------------------------------------------------------------------


def write_rows(path: Path, count: int) -> None:
    with path.open("w", encoding="utf-8") as stream:
        stream.writelines(
            (f'{{"prompt": "question {i}", "chosen": "a {i}", "rejected": "b {i}"}}\n')
            for i in range(count)
        )


def test_memory_does_not_grow_with_a_file_of_lines(tmp_path: Path) -> None:
    peaks = []
    for count in (1_000, 9_000):
        path = tmp_path / f"rows{count}.jsonl"
        write_rows(path, count)
        tracemalloc.start()
        seen = sum(1 for _ in read(path, Comparison))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert seen == count
    assert max(peaks) < 2_000_000
    assert peaks[1] < peaks[0] + 50_000  # six bytes a row


def test_elements_of_every_kind(tmp_path: Path) -> None:
    """Escapes, numbers, words and characters of several bytes; and what is no object is one bad
    element.
    """
    rows = [
        {
            "prompt": 'é"\\\n😀',
            "chosen": "x" * n,
            "rejected": "yes",
            "n": -1.25e-7 * n,
            "flag": [True, None, False],
        }
        for n in range(1, 9)
    ]
    (tmp_path / "a.json").write_text(json.dumps(rows) + " \n")
    (tmp_path / "b.json").write_text(
        json.dumps(rows, ensure_ascii=False, indent=3),
        encoding="utf-8",
    )
    (tmp_path / "c.json").write_text("\n".join(json.dumps(row, indent=1) for row in rows))
    for name in "abc":
        pairs = list(read(tmp_path / f"{name}.json", Comparison, strict=True))
        assert [dict(p.metadata) for p in pairs] == [
            {"n": row["n"], "flag": row["flag"]} for row in rows
        ]
        assert [p.chosen[0].content for p in pairs] == [row["chosen"] for row in rows]
    (tmp_path / "d.json").write_text('[12345, {"prompt": "p"}]')
    quarantine = Quarantine()
    assert [p.id for p in read(tmp_path / "d.json", Prompt, quarantine=quarantine)] == ["d:2"]
    assert [e["row"] for e in quarantine.examples] == ["12345"]


@pytest.mark.parametrize(("module", "light"), [("sources", ()), ("inspection", ("numpy",))])
def test_reading_loads_no_heavy_module(module: str, light: tuple[str, ...]) -> None:
    heavy = {"torch", "transformers", "pyarrow", "datasets", "numpy", "scipy", "rich"} - set(light)
    code = (
        f"import sys, tether.data.{module}; print([m for m in {sorted(heavy)} if m in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout.strip() == "[]"


def test_columns_that_look_like_answers_are_said_once_where_only_prompts_are_read(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    good, plain = tmp_path / "pairs.jsonl", tmp_path / "plain.jsonl"
    good.write_bytes(lines([{"question": "2 + 2?", "good": "4", "bad": "5", "topic": "sums"}]))
    plain.write_bytes(lines([{"question": "2 + 2?", "topic": "a good one", "answer_id": 3}]))
    for _ in range(2):
        assert [len(list(read(path, Prompt))) for path in (good, plain)] == [1, 1]
    (message,) = [record.getMessage() for record in caplog.records]
    assert message.startswith(
        f"{good} is read as prompts alone; good, bad look like answers and are not used",
    )


def test_columns_of_ones_own_get_a_format_s_names(tmp_path):
    """As if the file had them; a row without such a column is set aside, and where none has it the
    error says which there are.
    """
    rows = [{"question": f"q{i}", "good": "yes", "bad": "no", "source": "mine"} for i in range(3)]
    (tmp_path / "own.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in [*rows, {"question": "q", "good": "y"}]),
    )
    (tmp_path / "own.csv").write_text(
        "question,good,bad,source\n" + "".join(f"q{i},yes,no,mine\n" for i in range(3)),
    )
    named = {"prompt": "question", "chosen": "good", "rejected": "bad"}
    for name in ("own.jsonl", "own.csv"):
        quarantine = Quarantine()
        pairs = list(read(tmp_path / name, Comparison, columns=named, quarantine=quarantine))
        assert [
            (p.prompt[-1].content, p.chosen[-1].content, p.rejected[-1].content) for p in pairs
        ] == [(f"q{i}", "yes", "no") for i in range(3)]
        assert pairs[0].metadata == {"source": "mine"} and quarantine.count == (name == "own.jsonl")
    with pytest.raises(
        DataError,
        match=(
            r"no column 'worse', which data\.columns names; there "
            r"are: question, good, bad, source"
        ),
    ):
        list(read(tmp_path / "own.csv", Comparison, columns={**named, "rejected": "worse"}))
    with pytest.raises(DataError, match="no column 'worse'"):
        look([str(tmp_path / "own.csv")], Comparison, columns={"rejected": "worse"})


NESTED = {
    "input": {"messages": [{"role": "user", "content": "Which?"}], "lang.code": "en"},
    "summaries": [{"text": "one"}, {"text": "other"}],
    "packed": '{"text": "in JSON"}',
    "printed": "[{'text': 'in Python'}]",
    "a.b": "of this very name",
    "a": {"b": "inside"},
    "rest": "worse",
}


@pytest.mark.parametrize(
    ("own", "text"),
    [
        ("summaries.0.text", "one"),
        ("summaries.-1.text", "other"),
        ("packed.text", "in JSON"),
        ("printed.0.text", "in Python"),
        ("a.b", "of this very name"),
        ("input.lang.code", "en"),
    ],
)
def test_a_name_with_dots_leads_into_objects_and_lists(tmp_path, own, text):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(NESTED) + "\n")
    (pair,) = read(
        path,
        Comparison,
        columns={"prompt": "input.messages", "chosen": own, "rejected": "rest"},
    )
    assert pair.prompt == (user("Which?"),) and pair.chosen == (assistant(text),)
    assert own not in pair.metadata and "input" not in pair.metadata
    if own != "input.lang.code":
        assert pair.metadata["input.lang.code"] == "en"
    if own == "summaries.0.text":
        assert pair.metadata["summaries.1"] == {"text": "other"}
    if own == "a.b":
        assert pair.metadata["a"] == {"b": "inside"}


@pytest.mark.parametrize(
    ("own", "reason"),
    [
        (
            "input.mesages",
            "no column 'input.mesages', which data.columns names; 'input' holds: "
            "messages, lang.code",
        ),
        ("summaries.2.text", "'summaries' is a list of 2, whose places count from 0"),
        ("summaries.text", "'summaries' is a list of 2, whose places count from 0"),
        ("summaries.0.txt", "'summaries.0' holds: text"),
        ("input.messages.0.content.more", "'input.messages.0.content' holds a text"),
        ("inputs.messages", "there are: input, summaries, packed, printed, a.b, a, rest"),
    ],
)
def test_a_name_that_leads_nowhere_is_refused_with_what_stands_there(tmp_path, own, reason):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(NESTED) + "\n")
    with pytest.raises(DataError, match=re.escape(reason)):
        list(read(path, Prompt, columns={"prompt": own}))


def test_a_name_that_no_format_has_is_refused_with_the_nearest(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"q": "Which?", "good": "a", "bad": "b", "more": 1}\n')
    with pytest.raises(
        DataError,
        match=(
            r"the name 'choosen', which no format has \(did you mean "
            r"'chosen'"
        ),
    ):
        list(read(path, Comparison, columns={"prompt": "q", "choosen": "good", "rejected": "bad"}))
    with pytest.raises(DataError, match="'zzzz', which no format has"):
        look(
            [str(path)],
            Comparison,
            columns={"prompt": "q", "chosen": "good", "rejected": "bad", "zzzz": "more"},
        )
    with pytest.raises(
        DataError,
        match=(
            r"the name 'promt', which no format has \(did you mean "
            r"'prompt'"
        ),
    ):
        list(read(path, Prompt, columns={"promt": "q"}, format="prompts"))


@pytest.mark.parametrize("ending", ["gz", "zst"])
def test_a_small_file_that_unpacks_to_gigabytes_is_an_error(tmp_path, monkeypatch, ending):
    monkeypatch.setattr(arrow, "FREE_BYTES", 1 << 20)
    fair = "".join(
        json.dumps({"prompt": f"question {n} {n * n}", "response": f"{n**3}"}) + "\n"
        for n in range(60_000)
    )
    bomb = '{"prompt": "' + "a" * (1 << 24) + '", "response": "b"}\n'
    for name, text in (("fair", fair), ("bomb", bomb * 4)):
        path = tmp_path / f"{name}.jsonl.{ending}"
        with pa.CompressedOutputStream(str(path), "gzip" if ending == "gz" else "zstd") as out:
            out.write(text.encode())
    assert len(list(read(tmp_path / f"fair.jsonl.{ending}", Demonstration))) == 60_000
    with pytest.raises(DataError, match="more than 200 times its size"):
        list(read(tmp_path / f"bomb.jsonl.{ending}", Demonstration))


def tabled(path, rows):
    """Write rows as a table whose texts are stored once: Parquet, Arrow with an index, or a stream of
    Arrow.
    """
    columns = {}
    for name in rows[0]:
        texts = list(dict.fromkeys(row[name] for row in rows))
        places = pa.array([texts.index(row[name]) for row in rows], pa.int32())
        columns[name] = pa.DictionaryArray.from_arrays(places, pa.array(texts))
    table = pa.table(columns)
    if path.suffix == ".parquet":
        large = {"dictionary_pagesize_limit": 1 << 30, "store_schema": False}
        pq.write_table(table, path, compression="zstd", **large)
        return
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    kind = pa.ipc.new_file if path.stem == "index" else pa.ipc.new_stream
    with (
        pa.OSFile(str(path), "wb") as file,
        kind(file, table.schema, options=options) as writer,
    ):
        writer.write_table(table)


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow", "index.arrow"])
def test_a_small_table_of_many_large_texts_is_an_error_before_it_fills_memory(
    tmp_path,
    monkeypatch,
    name,
):
    monkeypatch.setattr(arrow, "FREE_BYTES", 1 << 24)
    text = "a" * (1 << 22)
    tabled(tmp_path / name, [{"prompt": text, "response": f"{n}"} for n in range(300)])
    assert (tmp_path / name).stat().st_size < 1 << 17
    tracemalloc.start()
    with pytest.raises(DataError, match=f"{name} grows to more than 200 times its size"):
        list(read(tmp_path / name, Demonstration))
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 1 << 28


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
def test_a_prompt_that_all_rows_of_a_table_share_is_no_fault(tmp_path, monkeypatch, name):
    monkeypatch.setattr(arrow, "FREE_BYTES", 1 << 20)
    rows = [{"prompt": "a" * 5000, "response": "b"} for _ in range(6000)]
    tabled(tmp_path / name, rows)
    assert (tmp_path / name).stat().st_size < 6000 * 5000 / 1000
    assert sum(1 for _ in read(tmp_path / name, Demonstration)) == 6000


def test_a_table_of_countless_equal_rows_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(arrow, "FREE_BYTES", 1 << 20)
    columns = {"prompt": ["q"] * 300_000, "response": ["a"] * 300_000}
    pq.write_table(pa.table(columns), tmp_path / "a.parquet", compression="zstd")
    with pytest.raises(DataError, match="more than 200 times its size"):
        for _ in read(tmp_path / "a.parquet", Demonstration):
            pass


DAMAGED = """
import random, sys
from pathlib import Path
from tether.core.errors import DataError
from tether.core.types import Demonstration
from tether.data.sources import read
whole, place = Path(sys.argv[1]).read_bytes(), Path(sys.argv[1]).with_stem("damaged")
draw, refused = random.Random(1), 0
for _ in range(150):
    content = bytearray(whole)
    for _ in range(draw.randint(1, 4)):
        at = draw.randrange(len(content))
        content[at] = draw.choice([0, 255, 127, 128, content[at] ^ 1])
    place.write_bytes(content)
    try:
        repr(list(read(place, Demonstration)))
    except DataError:
        refused += 1
print(refused)
"""
"""Bytes of a file are changed at random; whatever is read, the process lives on."""


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow", "index.arrow"])
def test_a_damaged_table_is_refused_and_ends_no_process(tmp_path, name):
    rows = [{"prompt": f"q {n}" * 3, "response": f"a {n}", "tags": ["x", "y"]} for n in range(40)]
    table = pa.Table.from_pylist(rows)
    if name.endswith("parquet"):
        pq.write_table(table, tmp_path / name)
    else:
        kind = pa.ipc.new_file if name.startswith("index") else pa.ipc.new_stream
        with pa.OSFile(str(tmp_path / name), "wb") as file, kind(file, table.schema) as writer:
            writer.write_table(table)
    command = [sys.executable, "-c", DAMAGED, str(tmp_path / name)]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr[-2000:]
    assert int(finished.stdout) > 20


def test_texts_that_lie_outside_of_an_arrow_file_are_not_read(tmp_path):
    batch = pa.RecordBatch.from_pylist([{"prompt": "abc", "response": "def"}] * 2)
    with (
        pa.OSFile(str(tmp_path / "a.arrow"), "wb") as file,
        pa.ipc.new_stream(file, batch.schema) as writer,
    ):
        writer.write_batch(batch)
    content = (tmp_path / "a.arrow").read_bytes()
    inside, outside = (struct.pack("<3i", 0, 3, end) for end in (6, 1 << 30))
    assert content.count(inside) == 2
    (tmp_path / "a.arrow").write_bytes(content.replace(inside, outside))
    program = (
        "import sys; from tether.data.sources import read; from tether.core.types import "
        "Demonstration; list(read(sys.argv[1], Demonstration))"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "a.arrow")]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    assert finished.returncode == 1 and "not a readable Arrow file" in finished.stderr
