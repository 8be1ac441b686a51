"""Files of every tool, with anything in them: an import takes them or refuses them in a sentence,
and the store that it leaves is whole.
"""

from __future__ import annotations

import copy
import csv
import gzip
import json
import os
import random
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.bad_input.rows import HARSH, SEEDS
from tests.people.annotation.test_work import check
from typer.testing import CliRunner

from tether.cli import app
from tether.core.errors import TetherError
from tether.core.once import once
from tether.people.annotation.exchange import cases, comparisons
from tether.people.annotation.exporting import export_labels
from tether.people.annotation.importing import import_cases, read_cases
from tether.people.annotation.store import Store, StoreError

PAGE = "<script>alert(1)</script><img src=x onerror=alert(1)>\x1b[2J\x1b]0;title\x07\u202e"
DAY = "2026-01-02T10:00:00.000000Z"
MINIMAL = {
    **{"id": 7, "annotation_id": 3, "annotator": "ada@example.org", "lead_time": 2.5},
    **{"created_at": DAY, "updated_at": DAY, "prompt": "why?", "answer1": "so", "answer2": "no"},
    "better": {"selected": "left"},
}
RANKED = {
    "id": 8,
    "data": {"prompt": "why?", "items": [{"id": f"m{n}", "body": f"text {n}"} for n in range(3)]},
    "annotations": [
        {
            "completed_by": {"id": 1, "email": "bo@example.org"},
            "result": [{"type": "ranker", "value": {"ranker": {"rank": ["m1", "m0", "m2"]}}}],
            "updated_at": DAY,
        },
    ],
}
SERVED = {
    "fields": {"prompt": "why?", "response1": "so", "response2": "no"},
    "responses": [
        {"user_id": "u1", "status": "submitted", "values": {"preference": {"value": "response2"}}},
    ],
}
TOOLS = ("preference", "label-studio", "argilla", "answers")
ROWS = [seed["row"] for seed in SEEDS if seed["format"] in TOOLS] + [MINIMAL, RANKED, SERVED]
STRANGE: tuple[Any, ...] = (
    *(value for value in HARSH if value != "\ud800"),
    *(PAGE, PAGE * 2000, "'); DROP TABLE tasks; --", 2**63, -(2**63) - 1, 10**30, -0.5, 1e-320),
    *("9999-99-99", "0001-01-01T00:00:00", '{"a": 1}', "[{}]", [{}], [{"id": {}}] * 3, {"": ""}),
    *("both bad", "Response 1", ["m0", "m0"], {"rank": [], "other": ["m0"]}, "submitted", "ada"),
)


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Each container within a value, with each of its keys."""
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield value, key
            yield from places(inner)


def bent(draw: random.Random) -> Any:
    """A row of a tool with up to four changes anywhere in it; sometimes no row at all."""
    row = copy.deepcopy(draw.choice(ROWS))
    if draw.random() < 0.02:
        return copy.deepcopy(draw.choice(STRANGE))
    for _ in range(draw.randint(0, 4)):
        inside = [*places(row)]
        if not inside:
            break
        space, key = draw.choice(inside)
        match draw.randint(0, 5):
            case 0:
                del space[key]
            case 1:
                space[key] = [copy.deepcopy(space[key])] * draw.choice([1, 2, 50])
            case 2:
                other, name = draw.choice(inside)
                space[key] = copy.deepcopy(other[name])
            case 3 if isinstance(space, dict):
                space[draw.choice([*ROWS[0], *MINIMAL, "tether", "x" * 300])] = space.pop(key)
            case _:
                space[key] = copy.deepcopy(draw.choice(STRANGE))
    return row


def written(draw: random.Random, folder: Path, rows: list[Any]) -> Path:
    """A file of these rows, as one of the tools writes them, sometimes damaged."""
    kind = draw.choice(["jsonl", "jsonl", "json", "csv", "jsonl.gz"])
    path = folder / f"rows.{kind}"
    if kind == "csv":
        rows = [row for row in rows if isinstance(row, dict)]
        names = [*dict.fromkeys(str(name) for row in rows for name in row)]
        with path.open("w", newline="", encoding="utf-8", errors="replace") as file:
            table = csv.DictWriter(
                file,
                names,
                quoting=draw.choice([csv.QUOTE_MINIMAL, csv.QUOTE_ALL]),
            )
            table.writeheader()
            for row in rows:
                table.writerow(
                    {n: v if isinstance(v, str) else json.dumps(v) for n, v in row.items()},
                )
        text = path.read_bytes()
    else:
        lines = [json.dumps(row) for row in rows]
        text = (f"[{','.join(lines)}]" if kind == "json" else "\n".join(lines)).encode()
    if draw.random() < 0.1:
        place = draw.randrange(len(text) + 1)
        text = draw.choice(
            [text[:place], text[:place] + b"\xff\x00" + text[place:], b"\xef\xbb\xbf" + text],
        )
    path.write_bytes(gzip.compress(text) if kind.endswith("gz") else text)
    return path


def imported(store: Path, *options: Any) -> tuple[int, str]:
    """The exit code of `tether prefs import`, and its words; any other end fails."""
    result = CliRunner().invoke(app, ["prefs", "import", str(store), *map(str, options)])
    if isinstance(result.exception, TetherError):
        # which the program shows as one message, and ends with 2
        words = str(result.exception)
        assert words.strip() and len(words) < 20_000 and "Traceback" not in words
        return 2, words
    assert result.exit_code in (0, 2), repr(result.exception)
    assert "Traceback" not in result.output and 0 < len(result.output) < 20_000
    assert "\x1b[2J" not in result.output and "\x07" not in result.output
    return result.exit_code, result.output


def whole(path: Path, folder: Path) -> None:
    """A store can be counted, read, exported and imported again, and its columns agree."""
    store = Store(str(path))
    try:
        check(store)
        there = list(cases(store))
        assert len(there) <= store.counts()["tasks"]
        judged = [*comparisons(store)]
        for format, name in (
            ("jsonl", "o.jsonl"),
            ("label-studio", "l.json"),
            ("argilla", "a.json"),
        ):
            try:
                count = export_labels(store, folder / name, format, unfinished=format != "jsonl")  # type: ignore[arg-type]
            except StoreError:  # no pair was judged by as many people as were asked
                continue
            if count:
                again = import_cases(store, read_cases(folder / name))
                assert (again["tasks"], again["answers"]) == (0, 0), (format, again)
        assert [*comparisons(store)] == judged
        check(store)
    finally:
        store.close()
    stats = CliRunner().invoke(app, ["prefs", "stats", str(path)])
    assert stats.exit_code == 0 and "\x1b[2J" not in stats.output, stats.output


def fuzz(folder: Path, count: int, seed: int) -> tuple[int, int]:
    """How many of so many files were imported, and how many were refused."""
    draw, taken, refused = random.Random(seed), 0, 0
    for number in range(count):
        once.cache_clear()
        store = folder / f"{number % 40}.db"
        rows = [bent(draw) for _ in range(draw.choice([1, 1, 3, 8]))]
        path = written(draw, folder, rows)
        words = draw.choice(
            [[], [], ["--ask", 2], ["--prefix", "x "], ["--labels", "me"], ["--gold"]],
        )
        before = store.exists()
        try:
            code, _ = imported(store, path, *words)
            taken, refused = taken + (code == 0), refused + (code != 0)
            assert store.exists() or code
            assert before or not store.exists() or code == 0, "no store is made for nothing"
            if store.exists() and (code == 0) and draw.random() < 0.1:
                whole(store, folder)
        except BaseException as error:
            raise AssertionError(
                f"file {number} of seed {seed}: {error!r}\n{rows!r:.4000}",
            ) from error
        if number % 40 == 39:
            for old in folder.glob("*.db*"):
                old.unlink()
    return taken, refused


def test_files_of_tools_with_anything_in_them_are_imported_or_refused(tmp_path):
    taken, refused = fuzz(tmp_path, 60, seed=1)
    assert min(taken, refused) > 5


@pytest.mark.slow
def test_three_thousand_files_of_tools_are_imported_or_refused(tmp_path):
    taken, refused = fuzz(tmp_path, 3000, seed=2)
    assert min(taken, refused) > 300


def hostile(folder: Path) -> dict[str, Path]:
    """Files that are none of a tool's, and rows that are too much."""
    row = json.dumps(MINIMAL)
    long = json.dumps({**MINIMAL, "prompt": PAGE * 200_000})
    contents = {
        "nothing": b"",
        "zeros": b"\0" * 100_000,
        "a line of brackets": b"[" * 1_000_000,
        "a cut row": row.encode()[:40],
        "ten megabytes in a row": long.encode(),
        "ten megabytes in a name": json.dumps({**MINIMAL, "x" * 10_000_000: 1}).encode(),
        "a hundred thousand columns": json.dumps(
            {**MINIMAL, **{f"c{n}": n for n in range(100_000)}},
        ).encode(),
        "a row twenty thousand times": (row + "\n").encode() * 20_000,
        "UTF-16": row.encode("utf-16"),
        "not text": os.urandom(10_000),
        "a page": f"<html>{PAGE}</html>".encode(),
    }
    files = {name: folder / f"{number}.jsonl" for number, name in enumerate(contents)}
    for name, path in files.items():
        path.write_bytes(contents[name])
    (folder / "folder.jsonl").mkdir()
    (folder / "itself.jsonl").symlink_to("itself.jsonl")
    (folder / "gone.jsonl").symlink_to("nowhere.jsonl")
    with zipfile.ZipFile(folder / "zip.jsonl", "w") as packed:
        packed.writestr("../../out.jsonl", row)
    with gzip.open(folder / "bomb.jsonl.gz", "wb", compresslevel=1) as packed:
        for _ in range(400):
            packed.write(b" " * (1 << 20))
    quoted = folder / "open quote.csv"
    quoted.write_text('prompt,answer1,answer2\n"why,so,no\n' + "x" * 1_000_000, encoding="utf-8")
    more = ("folder.jsonl", "itself.jsonl", "gone.jsonl", "zip.jsonl", "bomb.jsonl.gz")
    return files | {name: folder / name for name in more} | {"an open quote": quoted}


@pytest.mark.slow
def test_hostile_files_are_imported_or_refused_and_leave_a_store_that_is_whole(tmp_path):
    (tmp_path / "in").mkdir()
    for number, (name, path) in enumerate(hostile(tmp_path / "in").items()):
        store = tmp_path / f"{number}.db"
        code, words = imported(store, path)
        assert store.exists() == (code == 0), (name, words)
        if code == 0:
            whole(store, tmp_path)
    assert [path.name for path in tmp_path.glob("out*")] == []
