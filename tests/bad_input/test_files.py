"""Files that are cut off, of another kind, in another encoding or not there: one message with what,
where and what to do.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.bad_input.rows import refused

from tether.core.errors import DataError, MissingFileError, RunError, TetherError
from tether.core.types import Comparison, Prompt
from tether.data.formats import json_rows
from tether.data.formats.containers import places
from tether.data.sources import Quarantine, read

ROW = {"prompt": "Why?", "chosen": "Bécause.", "rejected": "No."}
LINE = json.dumps(ROW, ensure_ascii=False) + "\n"
LINES = LINE.encode() * 50
ARRAY = json.dumps([ROW] * 50).encode()
TABLE = b"prompt,chosen,rejected\n" + b"Why?,Because.,No.\n" * 50
TWICE = b"prompt,chosen,rejected,chosen\n1,2,3,4\n"


def parquet(**columns: object) -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.table(columns), sink)
    return sink.getvalue()


def zstd(words: bytes) -> bytes:
    return pa.compress(words, codec="zstd", asbytes=True)


PAIRS = parquet(prompt=["p"] * 9, chosen=["a"] * 9, rejected=["b"] * 9)
PACKED = gzip.compress(LINES)
HALF = len(PACKED) // 2
EQUAL = b'{"prompt": "p", "chosen": "a", "rejected": "a"}\n'

# what is wrong, the file's name, its bytes, what the message says
FAULTS: list[tuple[str, str, bytes, str]] = [
    ("nothing at all", "a.jsonl", b"", r"a\.jsonl is empty: it holds no rows\. Give a file that "
                                       r"has some"),
    ("nothing but a mark", "a.jsonl", b"\xef\xbb\xbf", "is empty"),
    ("nothing but white space", "a.jsonl", b"\n \t\r\n", "is empty"),
    ("an empty array", "a.json", b"[]", "is empty"),
    ("an empty object", "a.json", b"{}", r"no known format has the columns \. Name the columns"),
    ("a table without rows", "a.csv", b"prompt,chosen,rejected\n", "is empty"),
    ("an empty table", "a.tsv", b"", "is empty"),
    ("Parquet without bytes", "a.parquet", b"", "not a readable Parquet file .*Copy or download "
                                                "the file again"),
    ("Parquet without rows", "a.parquet", parquet(prompt=pa.array([], pa.string())), "is empty"),
    ("gzip of nothing", "a.jsonl.gz", gzip.compress(b""), "is empty"),
    ("gzip cut in its header", "a.jsonl.gz", PACKED[:5], r"cut off or damaged .*download the file "
                                                         r"again"),
    ("gzip cut in its middle", "a.jsonl.gz", PACKED[:HALF], "is cut off or damaged"),
    ("gzip cut before its checksum", "a.csv.gz", gzip.compress(TABLE)[:-6], "is cut off or "
                                                                            "damaged"),
    ("gzip with a wrong checksum", "a.jsonl.gz", PACKED[:-8] + b"\1\2\3\4" + PACKED[-4:], "cut "
                                                                                          "off or "
                                                                                          "damaged"),
    ("gzip with flipped bytes", "a.jsonl.gz", PACKED[:12] + b"\xff" * 9 + PACKED[21:], "cut off "
                                                                                       "or "
                                                                                       "damaged"),
    ("gzip in gzip", "a.jsonl.gz", gzip.compress(gzip.compress(LINES)), r"is packed twice\. "
                                                                        r"Unpack it once"),
    ("zstd cut in its middle", "a.jsonl.zst", zstd(LINES)[:60], r"a\.jsonl\.zst is cut off or "
                                                                r"damaged"),
    ("zstd cut in its header", "a.jsonl.zst", zstd(LINES)[:5], "is cut off or damaged"),
    ("zstd that is none", "a.jsonl.zst", b"\x28\xb5\x2f\xfd" + b"?" * 40, "is cut off or damaged"),
    ("Parquet cut at its end", "a.parquet", PAIRS[:-9], "not a readable Parquet file"),
    ("Parquet cut at its beginning", "a.parquet", PAIRS[9:], r"a\.parquet"),
    ("Parquet with a broken footer", "a.parquet", PAIRS[:-40] + b"\xff" * 30 + PAIRS[-10:], r"a\.parquet"),
    ("Parquet that is JSON", "a.parquet", LINES, "not a readable Parquet file"),
    ("JSON that is Parquet", "a.jsonl", PAIRS, r"is a Parquet file\. Let its name end on "
                                               r"\.parquet"),
    ("a workbook under the name of a table", "a.csv", b"PK\x03\x04" + b"\0" * 40, "zip archive or "
                                                                                  "a "
                                                                                  "spreadsheet.*as CSV"),
    ("xz", "a.jsonl", b"\xfd7zXZ\0" + b"\1" * 40, "packed with xz. Unpack it"),
    ("bzip2", "a.jsonl", b"BZh91AY&SY" + b"\1" * 40, "packed with bzip2. Unpack it"),
    ("something binary", "a.txt", b"\x7fELF\2\1\1\0\0\0\0\0", "is binary, or text in UTF-16 or "
                                                              "UTF-32"),
    ("UTF-16 with a mark", "a.jsonl", LINE.encode("utf-16"), r"is text in UTF-16\. Save it as "
                                                             r"UTF-8"),
    ("UTF-16, big end first", "a.csv", b"\xfe\xff" + TABLE.decode().encode("utf-16-be"), "is text "
                                                                                         "in "
                                                                                         "UTF-16"),
    ("UTF-16 without a mark", "a.jsonl", LINE.encode("utf-16-le"), "UTF-16 or UTF-32. Export it "
                                                                   "as JSON lines in UTF-8"),
    ("UTF-32", "a.json", LINE.encode("utf-32"), "is text in UTF-16"),
    ("latin-1, all of it", "a.jsonl", LINE.encode("latin-1"), "line 1: not UTF-8: byte 0xe9 at "
                                                              "31; save the file as UTF-8"),
    ("latin-1 in a table", "a.csv", b"prompt,chosen,rejected\nWhy?,B\xe9cause,No\n", "line 2: not "
                                                                                     "UTF-8: "
                                                                                     "undecodable byte"),
    ("latin-1 in a table's head", "a.csv", b"pr\xe9mpt,chosen,rejected\nWhy?,Because,No\n", "not "
                                                                                            "UTF-8: undecodable byte"),
    ("prose", "a.jsonl", b"hello\nworld\n", r"2 rows can be used: malformed JSON \(2\)\. The "
                                            r"first, line 1: .*Expecting"),
    ("a hundred thousand brackets", "a.jsonl", b"[" * 100_000, r"a\.jsonl: malformed JSON "
                                                               r".*nested more than 100 deep"),
    ("a hundred thousand brackets, closed", "a.json", b"[" * 100_000 + b"]" * 100_000, "nested "
                                                                                       "more than "
                                                                                       "100 deep"),
    ("a hundred thousand braces", "a.jsonl", b'{"a":' * 100_000, "line 1: malformed JSON: "
                                                                 ".*nested more than 100 deep"),
    ("a number of ten thousand digits", "a.jsonl", b'{"prompt": ' + b"9" * 10_000 + b"}", "a "
                                                                                          "number "
                                                                                          "of "
                                                                                          "thousands of digits"),
    ("such a number in an array", "a.json", b'[{"prompt": ' + b"9" * 10_000 + b"}]", "thousands "
                                                                                     "of digits"),
    ("an array that does not end", "a.json", ARRAY[:-1], "cut off: its JSON does not end"),
    ("an array cut in an element", "a.json", ARRAY[:-9], "cut off: its JSON does not end"),
    ("more behind an array", "a.json", ARRAY + b"{}", r"malformed JSON \(Extra data\)"),
    ("an array of numbers", "a.json", b"[1, 2, 3]", "none of its 3 rows can be used: not an "
                                                    "object"),
    ("a lone text", "a.json", b'"text"', "not an object: a row is a text"),
    ("unknown columns", "a.jsonl", b'{"alpha": 1}\n', "no known format has the columns alpha. "
                                                      "Name the columns"),
    ("a column's name of many characters", "a.jsonl", b'{"' + b"x" * 1_000_000 + b'": 1}\n', "the "
                                                                                             "columns x{40}. Name"),
    ("a column's name that a terminal obeys", "a.jsonl", b'{"\\u001b[2J": 1}\n', r"the columns "
                                                                                 r"\?\[2J\. Name"),
    ("another kind of rows", "a.jsonl", b'{"instruction": "i", "output": "o"}\n', "alpaca "
                                                                                  "demonstrations "
                                                                                  ".*Preferences need"),
    ("one side only", "a.jsonl", b'{"prompt": "p", "chosen": "a"}\n', "looks like prompts .*not "
                                                                      "preferences"),
    ("equal pairs only", "a.jsonl", EQUAL * 3, r"none of its 3 rows can be used: equal responses "
                                               r"\(3\)"),
    ("a column twice", "a.csv", TWICE, "column chosen stands twice. Rename or remove one"),
    ("a Parquet column twice", "a.parquet", b"twice", "column prompt stands twice"),
    ("semicolons", "a.csv", TABLE.replace(b",", b";"), "columns are parted by ';'. Part them by "
                                                       "commas"),
    ("tabs in a .csv", "a.csv", TABLE.replace(b",", b"\t"), r"columns are parted by '\\t'"),
    ("an open quote", "a.csv", b'prompt,chosen,rejected\np,"x,y\n' + b"p,x,y\n" * 3_000_000, "A "
                                                                                             "quote is probably not closed"),
    ("rows of other lengths", "a.csv", b"prompt,chosen,rejected\na,b\na,b,c,d\n", "uneven row: 2 "
                                                                                  "cells under 3 "
                                                                                  "columns"),
    ("a folder's name", "a.jsonl", b"folder", "holds no data file. Data files end on .json, "),
    ("a pipe", "a.jsonl", b"pipe", "neither a file nor a folder, and data is read more than once. "
                                   "Save it in a file"),
    ("a file that the system cannot read", "a.jsonl", b"unreadable", r"a\.jsonl cannot be read: "
                                                                     r"Input/output error\. Mend that"),
    ("a link to nothing", "a.jsonl", b"dangling", "data file not found"),
    ("a link to itself", "a.jsonl", b"loop", r"data file not found|cannot be read"),
]  # fmt: skip


def make(path: Path, content: bytes) -> Path:
    match content:
        case b"folder":
            path.mkdir()
        case b"pipe":
            os.mkfifo(path)
        case b"unreadable":
            path.symlink_to("/proc/self/mem")
        case b"dangling":
            path.symlink_to(path.parent / "nowhere")
        case b"loop":
            path.symlink_to(path)
        case b"twice":
            table = pa.Table.from_arrays([pa.array(["p"])] * 2, names=["prompt", "prompt"])
            pq.write_table(table, path)
        case _:
            path.write_bytes(content)
    return path


@pytest.mark.parametrize(
    ("what", "name", "content", "message"),
    FAULTS,
    ids=[fault[0] for fault in FAULTS],
)
def test_a_wrong_file_is_one_message(
    tmp_path: Path,
    what: str,
    name: str,
    content: bytes,
    message: str,
) -> None:
    if content == b"unreadable" and not sys.platform.startswith("linux"):
        pytest.skip("needs /proc/self/mem, a file that opens and cannot be read")
    path = make(tmp_path / name, content)
    begun = time.monotonic()
    with pytest.raises(TetherError, match=message) as error:
        list(read(path, Comparison))
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value) and len(str(error.value)) < 1000
    assert time.monotonic() - begun < 20
    assert os.listdir(tmp_path) == [name]


NAMES: list[tuple[str, str, str]] = [
    ("nothing", "", "the name of a data source is empty. Name a file, a folder or hub:owner/name"),
    ("white space", " ", "the name of a data source is empty"),
    (
        "no such file",
        "nowhere.jsonl",
        "data file not found: nowhere.jsonl. Give the path of a file",
    ),
    ("a NUL", "a\0b.jsonl", "data file not found"),
    (
        "too many characters",
        "x" * 5000,
        "cannot be read: File name too long. Mend that, or name another",
    ),
    (
        "nobody's home",
        "~nobody-of-this-name/a.jsonl",
        "cannot be read: Could not determine home directory",
    ),
    (
        "an unknown ending",
        __file__,
        r"unknown kind of file. Data files end on .*each also \.gz or "
        r"\.zst",
    ),
    ("a web address", "https://example.org/a.jsonl", "data file not found: .*hub:owner/name"),
    (
        "the hub without an owner",
        "hub:name",
        "'hub:name' is no data set on the hub. Write hub:owner/name",
    ),
    ("the hub without a name", "hub:", "is no data set on the hub"),
    ("the hub with too many parts", "hub:a/b/c/d", "is no data set on the hub"),
    ("the hub with a folder of this machine", "hub:../..", "is no data set on the hub"),
    ("the hub with white space", "hub:owner/na me", "is no data set on the hub"),
    ("the hub with an empty split", "hub:owner/name:", "is no data set on the hub"),
    ("the hub with a command", "hub:owner/name;rm", "is no data set on the hub"),
]


@pytest.mark.parametrize(("what", "name", "message"), NAMES, ids=[name[0] for name in NAMES])
def test_a_wrong_name_is_refused_before_anything_is_read(
    what: str,
    name: str,
    message: str,
) -> None:
    with pytest.raises(TetherError, match=message) as error:
        read(name, Comparison)
    assert len(str(error.value)) < 500
    with pytest.raises(
        DataError,
        match=(
            r"unknown data format 'preferense' .did you mean "
            r"'preference'"
        ),
    ):
        read(__file__, Comparison, format="preferense")


@pytest.mark.parametrize(
    "name",
    ["a.jsonl", "a.json", "a.csv", "a.tsv", "a.jsonl.gz", "a.jsonl.zst"],
)
def test_a_mark_of_bytes_simply_works(tmp_path: Path, name: str) -> None:
    words = {".csv": TABLE, ".tsv": TABLE.replace(b",", b"\t"), ".json": ARRAY}.get(
        Path(name).suffix,
        LINES,
    )
    pack = {".gz": gzip.compress, ".zst": zstd}.get(Path(name).suffix, bytes)
    (tmp_path / name).write_bytes(pack(b"\xef\xbb\xbf" + words))
    assert refused(tmp_path / name, Comparison) == (50, [])
    assert places(tmp_path / name)[0].stem == "a"


LONG = json.dumps({**ROW, "chosen": "x" * 2_000_000})
# what is wrong, the second line of a file whose other lines are good, the reason that goes to
# quarantine
BAD_LINES: list[tuple[str, bytes, str]] = [
    ("cut off", LINE.encode()[:30], "malformed JSON"),
    ("latin-1", LINE.encode("latin-1").strip(), "not UTF-8: byte 0xe9 at 31"),
    ("a number", b"5", "not an object: a row is a number"),
    ("null", b"null", "not an object: a row is nothing"),
    ("a list", b"[1]", "not an object: a row is a list"),
    ("NaN alone", b"NaN", "not an object: a row is a number"),
    ("an empty object", b"{}", "missing text: nothing in column chosen"),
    ("a byte 0", b'{"prompt": "a\0b"}', "malformed JSON: Invalid control character"),
    (
        "an escaped byte 0",
        b'{"prompt": "a\\u0000b", "chosen": "x", "rejected": "y"}',
        "NUL character",
    ),
    (
        "half a pair",
        b'{"prompt": "\\ud83d", "chosen": "x", "rejected": "y"}',
        "not UTF-8: half a surrogate pair",
    ),
    (
        "half a pair in a name",
        b'{"\\udfff": 1, "chosen": "x", "rejected": "y"}',
        "not UTF-8: half a surrogate pair",
    ),
    (
        "brackets that close",
        b'{"prompt": ' + b"[" * 200 + b"]" * 200 + b"}",
        "malformed JSON: lists or objects nested more than 100",
    ),
    (
        "brackets that do not",
        b'{"prompt": ' + b"[" * 100_000,
        "malformed JSON: lists or objects nested more than 100 deep",
    ),
    (
        "a long number",
        b'{"prompt": 1' + b"0" * 5000 + b"}",
        "malformed JSON: a number of thousands of digits",
    ),
    ("two million characters and a missing brace", LONG.encode()[:-1], "malformed JSON: Expecting"),
    ("two objects", LINE.encode().strip() * 2, "malformed JSON: Extra data"),
]


@pytest.mark.parametrize(("what", "line", "reason"), BAD_LINES, ids=[bad[0] for bad in BAD_LINES])
def test_a_wrong_line_costs_only_itself(
    tmp_path: Path,
    what: str,
    line: bytes,
    reason: str,
) -> None:
    path, log = tmp_path / "a.jsonl", tmp_path / "bad" / "rows.jsonl"
    path.write_bytes(LINE.encode() + line + b"\n" + LONG.encode() + b"\n")
    count, [(file, number, said)] = refused(path, Comparison)
    assert (count, file, number) == (2, str(path), 2)
    assert said.startswith(reason) and len(said) < 200
    list(read(path, Comparison, quarantine=Quarantine(log)))
    [entry] = [json.loads(words) for words in log.read_text(encoding="utf-8").splitlines()]
    assert (entry["line"], entry["reason"]) == (2, said) and len(entry["row"]) <= 400


def test_cells_that_cannot_be_read_cost_their_row(tmp_path: Path) -> None:
    """A text column whose second text is no UTF-8, written past the checks of the writer."""
    texts = pa.array([b"p", b"\xff\xfe", b"q"], pa.binary()).cast(pa.string(), safe=False)
    columns = {"prompt": texts, "chosen": pa.array(["a"] * 3), "rejected": pa.array(["b"] * 3)}
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    count, [(_, line, reason)] = refused(tmp_path / "a.parquet", Comparison)
    assert (count, line) == (2, 2) and reason.startswith("unreadable cell: ")


def test_a_text_inside_messages_that_cannot_be_read_costs_its_row(tmp_path: Path) -> None:
    texts = pa.array([b"p", b"\xff\xfe", b"q"], pa.binary()).cast(pa.string(), safe=False)
    turn = pa.StructArray.from_arrays([pa.array(["user"] * 3), texts], ["role", "content"])
    talks = pa.ListArray.from_arrays(pa.array([0, 1, 2, 3], pa.int32()), turn)
    answers = {"chosen": pa.array(["a"] * 3), "rejected": pa.array(["b"] * 3)}
    pq.write_table(pa.table({"prompt": talks, **answers}), tmp_path / "a.parquet")
    count, [(_, line, reason)] = refused(tmp_path / "a.parquet", Comparison)
    assert (count, line) == (2, 2) and reason.startswith("unreadable cell: ")


def test_files_of_other_kinds_in_a_folder(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(LINES)
    (tmp_path / "b.csv").write_bytes(TABLE)
    assert refused(tmp_path, Comparison) == (100, [])
    (tmp_path / "c.jsonl").write_bytes(b'{"question": "q", "answer": "a"}\n')
    with pytest.raises(
        DataError,
        match=(
            r"c\.jsonl looks like question_answer problems .*not "
            r"preferences"
        ),
    ):
        list(read(tmp_path, Comparison))


def test_a_line_without_end_is_not_read_into_memory(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(json_rows, "LONGEST_LINE", 1 << 20)
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"x" * (1 << 24)))
    with pytest.raises(
        DataError,
        match=(
            r"a\.txt\.gz, line 1: longer than 1 MiB\. The file is "
            r"damaged, or has no lines"
        ),
    ):
        list(read(tmp_path / "a.txt.gz", Prompt))


def test_a_quarantine_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(LINES + b"oops\n")
    with pytest.raises(RunError, match=r"is a link or a folder, .* Move it away"):
        list(read(tmp_path / "a.jsonl", Comparison, quarantine=Quarantine(tmp_path)))


@pytest.mark.parametrize(
    "name",
    ["nowhere.jsonl", "bad.jsonl", "deep.json", "cut.jsonl.gz", "wide.csv"],
)
def test_the_command_line_exits_with_2_and_one_line(tmp_path: Path, name: str) -> None:
    contents = {
        "bad.jsonl": b"oops\n",
        "deep.json": b"[" * 100_000,
        "cut.jsonl.gz": PACKED[:HALF],
        "wide.csv": TWICE,
    }
    if name in contents:
        (tmp_path / name).write_bytes(contents[name])
    command = [sys.executable, "-m", "tether", "data", "inspect", str(tmp_path / name)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert (
        done.stderr.startswith("tether: ") and name in done.stderr and done.stderr.count("\n") == 1
    )


def test_missing_is_missing() -> None:
    with pytest.raises(MissingFileError):
        read("nowhere.jsonl", Comparison)
