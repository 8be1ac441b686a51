"""Out of the store into a file: whole under its name, or not at all."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, Literal, get_args

from tether.core.errors import ConfigError
from tether.core.files import whole_file
from tether.core.types import Comparison
from tether.preferences import argilla, label_studio
from tether.preferences.carried import remarks
from tether.preferences.exchange import Case, How, labelled
from tether.preferences.rows import as_row
from tether.preferences.store import Store, StoreError

Target = Literal["jsonl", "parquet", "label-studio", "argilla"]
BRIDGES = {"label-studio": label_studio.write_task, "argilla": argilla.write_task}
_TURNS = ("prompt", "chosen", "rejected")
_READ = {"id", "system", "question", "instruction", "conversations", "margin", "tie", "probability", "annotations", "group"} | {
    "score_chosen", "score_rejected", "chosen_score", "rejected_score", "chosen-rating", "rejected-rating", "metadata", *_TURNS
}  # fmt: skip
"""Columns that mean something to the reader of comparisons; metadata of such a name gets another one."""


def export(
    store: Store,
    path: str | Path,
    target: Target = "jsonl",
    *,
    how: How = "soft",
    round: str | None = None,
    names: bool = False,
    unfinished: bool = False,
    least: float = 0.0,
) -> int:
    """Write what was judged; returns the number of rows.

    `jsonl` and `parquet` are comparisons with every vote, which `data.sources.read` gives back as `exchange.comparisons` made
    them. `label-studio` and `argilla` are tasks with their judgments, to go on with there. Annotators have numbers for names.

    Args:
        how: what the label is made by, as in `exchange.comparisons`.
        names: annotators by their names.
        unfinished: also what waits for judgments or an expert; of Label Studio and Argilla, tasks that nobody has judged too.
        least: leave out pairs whose label has less than this behind it (`exchange.sureness`).

    Raises:
        ConfigError: there is no such format, or no such way to a label.
        StoreError: there is nothing to write; no file is made.
    """
    if target not in get_args(Target):
        raise ConfigError(f"comparisons are exported as {', '.join(get_args(Target))}, not as {target!r}")
    found, bridge = labelled(store, how, round=round, names=names, unfinished=unfinished, least=least), BRIDGES.get(target)
    own = "" if names else store.id  # whose numbers stand for people
    if bridge:
        rows = (bridge(case, label, own) for case, label in found if label or unfinished)
    else:
        rows = (_row(case, label, own) for case, label in found if label)
    with whole_file(path) as temporary:
        count = _parquet(rows, temporary) if target == "parquet" else _json(rows, temporary, is_array=bool(bridge))
        if not count:
            raise StoreError(
                "there is nothing to export: no pair was judged by as many people as were asked (--unfinished: by fewer)"
            )
    return count


def _row(case: Case, label: Comparison, store: str) -> dict[str, Any]:
    """A row of the format `preference`; each vote has what its reader does not need beside it."""
    turned = label.chosen != case.first.response
    places = {"first": "rejected" if turned else "chosen", "second": "chosen" if turned else "rejected"}
    votes = [
        {"annotator": said.annotator, "preference": vote.preference, "strength": said.strength}
        | {"choice": places.get(said.choice, said.choice), **remarks(said, places), **({"store": store} if store else {})}
        for said, vote in zip(case.said, label.annotations, strict=True)
    ]
    return as_row(label) | {"annotations": votes}


def _json(rows: Iterable[Mapping[str, Any]], path: Path, *, is_array: bool) -> int:
    count = 0
    with path.open("w", encoding="utf-8") as file:
        for count, row in enumerate(rows, 1):
            file.write(("[\n" if count == 1 else ",\n") if is_array else "")
            file.write(json.dumps(row, ensure_ascii=False) + ("" if is_array else "\n"))
        file.write("\n]\n" if is_array else "")
    return count


def _parquet(rows: Iterable[Mapping[str, Any]], path: Path) -> int:
    """Twice over the rows, once to a file of lines, since the columns are known at the end only."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    lines, kinds = path.with_name(f"{path.name}.lines"), defaultdict[str, set[Any]](set)
    try:
        count = _json((_flat(row, kinds) for row in rows), lines, is_array=False)
        columns = {name: _one_kind(some) for name, some in kinds.items()}
        texts = {name for name, kind in columns.items() if kind is None}
        turns = pa.list_(pa.struct({"role": pa.string(), "content": pa.string()}))
        vote: dict[str, Any] = dict.fromkeys(("annotator", "choice", "ratings", "left", "role", "store"), pa.string())
        vote |= dict.fromkeys(("preference", "seconds", "at"), pa.float64())
        vote |= dict.fromkeys(("strength", "guidelines"), pa.int64())
        known = {"id": pa.string(), **dict.fromkeys(_TURNS, turns), "probability": pa.float64(), "tie": pa.bool_()}
        known |= {"margin": pa.float64(), "group": pa.string(), "annotations": pa.list_(pa.struct(vote))}
        schema = pa.schema({**known, **{name: kind or pa.string() for name, kind in columns.items()}})
        with lines.open(encoding="utf-8") as file, pq.ParquetWriter(path, schema) as writer:
            found = map(json.loads, file)
            while part := list(islice(found, 1000)):
                for row in part:
                    row |= {name: json.dumps(row[name], ensure_ascii=False) for name in texts if row.get(name) is not None}
                writer.write_table(pa.Table.from_pylist(part, schema=schema))
    finally:
        lines.unlink(missing_ok=True)
    return count


def _flat(row: Mapping[str, Any], kinds: Mapping[str, set[Any]]) -> dict[str, Any]:
    """The row with its metadata as columns of their own, whose kinds are noted."""
    known = {name: value for name, value in row.items() if name != "metadata"}
    known["annotations"] = [vote | {"ratings": json.dumps(vote["ratings"])} for vote in known["annotations"]]
    facts = {f"metadata_{name}" if name in _READ else name: value for name, value in row.get("metadata", {}).items()}
    for name, value in facts.items():
        kinds[name].add(_kind(value))
    return {**facts, **known}


def _kind(value: Any) -> Any:
    """The type of the column that holds the value; None for what becomes a JSON text."""
    import pyarrow as pa

    plain = {bool: pa.bool_(), int: pa.int64(), float: pa.float64(), str: pa.string()}
    if isinstance(value, list) and len({type(inner) for inner in value}) == 1 and type(value[0]) in plain:
        return pa.list_(plain[type(value[0])])
    return pa.null() if value is None else plain.get(type(value))


def _one_kind(kinds: set[Any]) -> Any:
    """The kind that holds all of these."""
    import pyarrow as pa

    some = kinds - {pa.null()}
    if some == {pa.int64(), pa.float64()}:
        return pa.float64()
    return (some.pop() if len(some) == 1 else None) if some else pa.string()
