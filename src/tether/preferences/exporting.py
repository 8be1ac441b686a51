"""Out of the store into a file: whole under its name, or not at all."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, get_args

from tether.core.errors import ConfigError
from tether.preferences import argilla, label_studio
from tether.preferences.exchange import FINISHED, Case, How, cases, comparison, learned_labels, placed
from tether.preferences.rows import as_row
from tether.preferences.store import Store, StoreError

Target = Literal["jsonl", "parquet", "label-studio", "argilla"]
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
) -> int:
    """Write what was judged; returns the number of rows.

    `jsonl` and `parquet` are comparisons with every vote, which `data.sources.read` gives back as `exchange.comparisons` made
    them. `label-studio` and `argilla` are tasks with their judgments, to go on with there. Annotators have numbers for names.

    Args:
        how: what the label is made by, as in `exchange.comparisons`.
        names: annotators by their names.
        unfinished: also what waits for judgments or an expert; of Label Studio and Argilla, tasks that nobody has judged too.

    Raises:
        ConfigError: there is no such format, or no such way to a label.
        StoreError: there is nothing to write; no file is made.
    """
    if target not in get_args(Target):
        raise ConfigError(f"comparisons are exported as {', '.join(get_args(Target))}, not as {target!r}")
    learned = learned_labels(store, how)
    unjudged = unfinished and target in ("label-studio", "argilla")

    def rows() -> Iterator[Mapping[str, Any]]:
        states = ("open", "expert", *FINISHED) if unfinished else FINISHED
        for case in cases(store, states=states, round=round, names=names):
            if case.said or unjudged:
                label = comparison(case, how, learned.get(case.item)) if case.said else None
                yield _WRITERS[target](case, label)

    with _whole(Path(path)) as temporary:
        if target == "parquet":
            count = _parquet(rows(), temporary)
        else:
            count = _json(rows(), temporary, is_array=target != "jsonl")
        if not count:
            raise StoreError(
                "there is nothing to export: no pair was judged by as many people as were asked (--unfinished: by fewer)"
            )
    return count


def _comparison_row(case: Case, label: Any) -> dict[str, Any]:
    """A row of the format `preference`; each vote has what its reader does not need beside it."""
    row = as_row(label)
    turned = label.chosen != case.first.response
    places = {"first": "rejected" if turned else "chosen", "second": "chosen" if turned else "rejected"}
    row["annotations"] = [
        {
            "annotator": said.annotator,
            "preference": vote.preference,
            "choice": places.get(said.choice, said.choice),
            "strength": said.strength,
            "ratings": placed(said.ratings, places),
            "seconds": said.seconds,
            "guidelines": said.guidelines,
            "left": places.get(said.left or ""),
            "role": said.role,
        }
        for said, vote in zip(case.said, label.annotations, strict=True)
    ]
    return row


_WRITERS: dict[str, Callable[[Case, Any], dict[str, Any]]] = {
    "jsonl": _comparison_row,
    "parquet": _comparison_row,
    "label-studio": label_studio.write_task,
    "argilla": argilla.write_task,
}


@contextmanager
def _whole(path: Path) -> Iterator[Path]:
    """A temporary file beside `path` that takes its name at the end; on any error `path` is as it was."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        temporary.chmod(0o644)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _json(rows: Iterable[Mapping[str, Any]], path: Path, *, is_array: bool) -> int:
    count = 0
    with path.open("w", encoding="utf-8") as file:
        for row in rows:
            file.write(("," if count else "[") + "\n" if is_array else "")
            file.write(json.dumps(row, ensure_ascii=False) + ("" if is_array else "\n"))
            count += 1
        file.write("\n]\n" if is_array else "")
    return count


def _parquet(rows: Iterable[Mapping[str, Any]], path: Path) -> int:
    """Twice over the rows, once to a file of lines, since the columns are known at the end only."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    lines, kinds = path.with_name(f"{path.name}.lines"), dict[str, set[str]]()
    try:
        count = _json((_flat(row, kinds) for row in rows), lines, is_array=False)
        schema = _schema(kinds)
        with lines.open(encoding="utf-8") as file, pq.ParquetWriter(path, schema) as writer:
            part: list[dict[str, Any]] = []
            for number, line in enumerate(file, 1):
                part.append(_typed(json.loads(line), kinds))
                if len(part) == 1000 or number == count:
                    writer.write_table(pa.Table.from_pylist(part, schema=schema))
                    part = []
    finally:
        lines.unlink(missing_ok=True)
    return count


def _flat(row: Mapping[str, Any], kinds: dict[str, set[str]]) -> dict[str, Any]:
    """The row with its metadata as columns of their own, whose kinds are noted."""
    known = {name: value for name, value in row.items() if name != "metadata"}
    for annotation in known["annotations"]:
        annotation["ratings"] = json.dumps(annotation["ratings"])
    facts = {f"metadata_{name}" if name in _READ else name: value for name, value in row.get("metadata", {}).items()}
    for name, value in facts.items():
        kinds.setdefault(name, set()).add(_kind(value))
    return {**facts, **known}


def _kind(value: Any) -> str:
    if isinstance(value, list) and value and len({type(inner) for inner in value}) == 1 and not isinstance(value[0], list):
        return f"list {_kind(value[0])}"
    return {bool: "bool", int: "int", float: "float", str: "str", type(None): "none"}.get(type(value), "object")


def _one_kind(kinds: set[str]) -> str:
    """The kind that holds all of these; `object` is a JSON text."""
    some = kinds - {"none"}
    if some == {"int", "float"}:
        return "float"
    return next(iter(some)) if len(some) == 1 and "object" not in next(iter(some)) else "object" if some else "str"


def _schema(kinds: Mapping[str, set[str]]) -> Any:
    import pyarrow as pa

    plain = {"bool": pa.bool_(), "int": pa.int64(), "float": pa.float64(), "str": pa.string(), "object": pa.string()}
    turns = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
    vote = {"annotator": "str", "preference": "float", "choice": "str", "strength": "int", "ratings": "str", "seconds": "float"}
    vote |= {"guidelines": "int", "left": "str", "role": "str"}
    votes = pa.list_(pa.struct([(name, plain[kind]) for name, kind in vote.items()]))
    known: dict[str, Any] = {"id": pa.string(), **dict.fromkeys(_TURNS, turns), "probability": pa.float64(), "tie": pa.bool_()}
    known |= {"margin": pa.float64(), "group": pa.string(), "annotations": votes}
    for name, some in kinds.items():
        head, _, inner = _one_kind(some).rpartition(" ")
        known[name] = pa.list_(plain[inner]) if head else plain[inner]
    return pa.schema(list(known.items()))


def _typed(row: dict[str, Any], kinds: Mapping[str, set[str]]) -> dict[str, Any]:
    texts = {name for name, some in kinds.items() if _one_kind(some) == "object"}
    return {n: json.dumps(v, ensure_ascii=False) if n in texts and v is not None else v for n, v in row.items()}
