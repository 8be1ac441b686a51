"""Whatever is fed to a parser, it gives records or a `TetherError`, the same ones each time, and
soon.
"""

from __future__ import annotations

import contextlib
import copy
import gzip
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.bad_input.rows import HARSH, SEEDS, write

import tether.core.types as types
from tether.core.errors import DataError, TetherError
from tether.core.types import Record
from tether.data.formats.containers import SUFFIXES
from tether.data.formats.fields import turns
from tether.data.formats.json_rows import fault
from tether.data.formats.registry import FORMATS
from tether.data.sources import Quarantine, read
from tether.people.annotation.answers import read_answers
from tether.people.annotation.bridges import BRIDGES
from tether.people.annotation.exchange import Case
from tether.settings.reading import build, load_recipe
from tether.settings.recipe import Recipe

label_studio, argilla = BRIDGES["label-studio"], BRIDGES["argilla"]
READERS = {layout.name: layout.readers for layout in FORMATS}
KINDS = (
    types.Prompt,
    types.Demonstration,
    types.Comparison,
    types.Feedback,
    types.StepLabels,
    types.Problem,
)
NAMES = sorted(
    {name for seed in SEEDS for name in seed["row"]}
    | {"role", "content", "from", "value", "text", "rank", "replies"},
)
few = settings(
    max_examples=12,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    derandomize=True,
)

words = st.text(max_size=12) | st.sampled_from(
    [
        "user",
        "gpt",
        "tie",
        "a",
        "[",
        '[{"role":"user","content":1}]',
        "#### 1",
        r"\boxed{",
        "\n\nHuman: x\n\nAssistant: y",
        "1e999",
    ],
)
scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(10**400), 10**400)
    | st.floats()
    | words
)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(NAMES) | words, inner, max_size=3)
    ),
)


@st.composite
def bent(draw: Callable[..., Any], seeds: list[dict[str, Any]]) -> dict[str, Any]:
    """A good row with one to three of its values, at any depth, taken away or replaced."""
    row = copy.deepcopy(draw(st.sampled_from(seeds))["row"])
    for _ in range(draw(st.integers(1, 3))):
        node: Any = row
        while isinstance(node, dict | list) and node:
            key = draw(
                st.sampled_from(sorted(node) if isinstance(node, dict) else range(len(node))),
            )
            if not isinstance(node[key], dict | list) or draw(st.booleans()):
                if isinstance(node, dict) and draw(st.integers(0, 3)) == 0:
                    del node[key]
                else:
                    node[key] = draw(values)
                break
            node = node[key]
    return row


def edits(node: Any) -> Iterator[Any]:
    """Every copy of a value in which one thing is taken away or replaced by one of the harsh
    ones.
    """
    for key in (
        list(node) if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ()
    ):
        rest = (
            {name: value for name, value in node.items() if name != key}
            if isinstance(node, dict)
            else node[:key] + node[key + 1 :]
        )
        yield rest
        for other in (*HARSH, *edits(node[key])):
            yield (
                {**node, key: other}
                if isinstance(node, dict)
                else [*node[:key], other, *node[key + 1 :]]
            )


def parsers(seed: dict[str, Any]) -> Iterator[Callable[[dict[str, Any]], Any]]:
    of_tool = [BRIDGES[seed["format"]].read_task] if seed["format"] in BRIDGES else []
    readers = (READERS.get(seed["format"]) or {}).values()
    yield from (lambda row, read=read: records(read(row)) for read in (*of_tool, *readers))


def records(made: Any) -> list[Any]:
    """What a reader made of a row: one record, or several."""
    return [made] if isinstance(made, Record | Case) else [*made]


@pytest.mark.parametrize(
    "seed",
    [s for s in SEEDS if s["format"] != "answers"],
    ids=lambda seed: seed["format"],
)
def test_every_value_replaced_by_every_harsh_one(seed: dict[str, Any]) -> None:
    """Bounded and complete, where chance may pass by."""
    for row in edits(seed["row"]):
        if fault(row):
            continue
        for layout in (*FORMATS, label_studio, argilla):
            layout.matches(row)
        for parse in parsers(seed):
            with contextlib.suppress(DataError):
                parse(row)


def test_every_value_of_answers_replaced_by_every_harsh_one(tmp_path: Path) -> None:
    rows = [row for seed in SEEDS if seed["format"] == "answers" for row in edits(seed["row"])]
    write(tmp_path / "a.jsonl", *rows)
    quarantine = Quarantine(keep=len(rows))
    assert sum(1 for _ in read_answers(tmp_path / "a.jsonl", quarantine=quarantine)) > 0
    assert 0 < quarantine.count < len(rows)


def settled(parse: Callable[[], Any]) -> str:
    """What comes of it, in words: the same each time, within seconds."""
    told = []
    for _ in range(2):
        begun = time.monotonic()
        try:
            told.append(repr(parse()))
        except TetherError as error:
            told.append(f"{type(error).__name__}: {error}")
        assert time.monotonic() - begun < 10
    assert told[0] == told[1]
    return told[0]


@pytest.mark.parametrize("layout", FORMATS, ids=lambda layout: layout.name)
@few
@given(data=st.data())
def test_every_reader_takes_any_row(layout: Any, data: st.DataObject) -> None:
    own = [seed for seed in SEEDS if seed["format"] == layout.name]
    row = data.draw(
        bent(own) | bent(SEEDS) | st.dictionaries(st.sampled_from(NAMES), values, max_size=6),
    )
    if fault(row):
        return
    layout.matches(row)
    for kind, reader in layout.readers.items():

        def parse(kind: type = kind, reader: Any = reader) -> list[Any]:
            found = records(reader(copy.deepcopy(row)))
            assert all(isinstance(record, kind | DataError) for record in found)
            return [str(record) if isinstance(record, DataError) else record for record in found]

        settled(parse)


@pytest.mark.parametrize("suffix", [*SUFFIXES, ".jsonl.gz", ".jsonl.zst"])
@few
@given(data=st.data())
def test_every_container_takes_any_bytes(tmp_path: Path, suffix: str, data: st.DataObject) -> None:
    seed = json.dumps(data.draw(bent(SEEDS))).encode()
    content = data.draw(
        st.binary(max_size=60)
        | st.sampled_from([seed, b"[" + seed, b"[" + seed + b"]", b"a,b\n" + seed]),
    )
    cut = data.draw(st.integers(0, len(content)))
    content = content[:cut] + data.draw(st.binary(max_size=4)) + content[cut:]
    path = tmp_path / f"a{suffix}"
    path.write_bytes(
        gzip.compress(content, mtime=0)[: data.draw(st.integers(4, 99))]
        if suffix.endswith("gz")
        else content,
    )
    kind = data.draw(st.sampled_from(KINDS))
    settled(lambda: list(read(path, kind, quarantine=Quarantine())))


@few
@given(rows=st.lists(bent(SEEDS) | values, min_size=1, max_size=6), kind=st.sampled_from(KINDS))
def test_every_row_is_used_or_in_quarantine(tmp_path: Path, rows: list[Any], kind: type) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    quarantine = Quarantine(keep=10_000)
    try:
        used = {
            int(record.id.partition("a:")[2].partition(":")[0])
            for record in read(path, kind, quarantine=quarantine)
            if "a:" in record.id
        }
    except TetherError:
        return
    assert used | {entry["line"] for entry in quarantine.examples} <= set(range(1, len(rows) + 1))
    assert len(used) <= len(rows)


@few
@given(value=values, name=st.sampled_from(["prompt", "messages"]))
def test_a_conversation_is_messages_or_an_error(value: Any, name: str) -> None:
    def parse() -> Any:
        found = turns(value, "user", name)
        assert all(
            isinstance(turn, types.Message) and isinstance(turn.content, str) for turn in found
        )
        assert all(turn.role in ("system", "user", "assistant", "tool") for turn in found)
        return found

    if not fault(value):
        settled(parse)


@pytest.mark.parametrize("bridge", [label_studio, argilla], ids=["label-studio", "argilla"])
@settings(few, max_examples=40)
@given(row=bent([seed for seed in SEEDS if seed["kind"] == "Case"]))
def test_every_bridge_takes_any_task(bridge: Any, row: dict[str, Any]) -> None:
    def parse() -> Any:
        *_, found = bridge.read_task(copy.deepcopy(row))
        assert isinstance(found, Case) and found.item
        assert all(said.choice in ("first", "second", "tie", "both_bad") for said in found.opinions)
        return found

    if not fault(row):
        bridge.matches(row)
        settled(parse)


@settings(few, max_examples=40)
@given(row=bent([seed for seed in SEEDS if seed["kind"] == "Answer"]))
def test_answers_are_read_or_refused(tmp_path: Path, row: dict[str, Any]) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps(row) + "\n")
    settled(lambda: list(read_answers(tmp_path / "a.jsonl")))


toml = st.lists(
    st.sampled_from(
        [
            'run = "x"',
            "seed = 1",
            "[sft]",
            "[model]",
            'source = "tiny"',
            "[[sft]]",
            "a.b = 2",
            "x = [",
            "]",
            "{",
            "}",
            "'''",
            '"""',
        ],
    )
    | st.text(max_size=20),
    max_size=8,
).map("\n".join)


@settings(few, max_examples=40)
@given(
    content=toml.map(lambda text: text.encode("utf-8", "surrogatepass")) | st.binary(max_size=40),
)
def test_a_recipe_is_read_or_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.toml").write_bytes(content)
    settled(lambda: load_recipe(tmp_path / "a.toml", Recipe))


keys = st.lists(
    st.sampled_from(
        ["sft", "seed", "optimizer", "learning_rate", "data", "path", "lora", "model", "rank"],
    )
    | st.text(max_size=5),
    max_size=4,
)


@settings(few, max_examples=40)
@given(
    parts=keys,
    value=st.sampled_from(["1", "true", "nan", "[1]", "{a=1}", "1e5", "1979-05-27", "'x'"])
    | st.text(max_size=10),
)
def test_an_override_is_taken_or_refused(parts: list[str], value: str) -> None:
    values = {"run": "x", "model": {"source": "tiny"}}
    settled(lambda: build(Recipe, values, [f"{'.'.join(parts)}={value}", "seed=5"]))
