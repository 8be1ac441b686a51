"""Exports of a store into a file, which is whole under its name or not there at all."""

# SQLModel types columns as the values in them, so that conditions on columns look like plain bools.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportOptionalMemberAccess=false

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal, Unpack, get_args

from sqlalchemy import and_, exists, func, or_, select
from sqlalchemy import case as when

from tether.core.errors import ConfigError
from tether.core.keeping import durable
from tether.core.types import Demonstration, Json, assistant
from tether.data.formats.pairs import PAIR_COLUMNS
from tether.people.annotation.bridges import BRIDGES
from tether.people.annotation.exchange import How, Which, cases, labelled, ready
from tether.people.annotation.queries import LIVE, nobody_can_take
from tether.people.annotation.store import Store, StoreError
from tether.people.annotation.tables import JudgmentRow, TaskRow
from tether.people.annotation.task_json import case_row

Target = Literal["jsonl", "parquet", "label-studio", "argilla"]
WHO_TAKES = {
    "gold questions": "never exported",
    "with a label below --least": "a lower --least takes them",
    "without an answer to --question, or below --least": "people answer it, or a lower --least",
    "waiting for an expert": "an expert decides, or --unfinished takes those with judgments",
    "with too few judgments": "--unfinished takes them",
    "skipped by everybody": "invite others by `tether prefs invite`",
    "not judged yet": "people judge them by `tether prefs serve`",
}
"""The reasons why a pair is left out, and what takes it."""
_TURNS = ("prompt", "chosen", "rejected")
_READ = {"id", "metadata", *_TURNS, *PAIR_COLUMNS.split()}
"""Columns that mean something to the reader of comparisons; metadata of such a name gets another
one.
"""


def export_labels(
    store: Store,
    path: str | Path,
    target: Target = "jsonl",
    *,
    how: How = "soft",
    **which: Unpack[Which],
) -> int:
    """Write what was judged; returns the number of rows.

    `jsonl` and `parquet` are comparisons with every vote, which `data.sources.read` gives back as
    `exchange.comparisons` made them. `label-studio` and `argilla` are tasks with their judgments,
    to go on with there. Annotators have numbers for names.

    Args:
        how, which: as in `exchange.comparisons`; `unfinished` tasks of Label Studio and Argilla may
            have no judgment.

    Raises:
        ConfigError: there is no such format, or no such way to a label.
        StoreError: there is no such round, or there is nothing to write; no file is made.
    """
    if target not in get_args(Target):
        raise ConfigError(
            f"comparisons are exported as {', '.join(get_args(Target))}, not as {target!r}",
        )
    store.check_round(which.get("round"))
    cases = labelled(store, how, **which)
    bridge = BRIDGES.get(target)
    own = "" if which.get("names") else store.id  # whose numbers stand for people
    write, unjudged = (bridge.write_task, which.get("unfinished")) if bridge else (case_row, False)
    rows = (write(case, label, own) for case, label in cases if case.opinions or unjudged)
    with durable(path) as unfinished:
        count = (
            _parquet(rows, unfinished)
            if target == "parquet"
            else _json(rows, unfinished, is_array=bool(bridge))
        )
        if not count:
            others = kept_back(store, 0, target, how=how, **which)
            reasons = (f"{num:,} {why} ({WHO_TAKES[why]})" for why, num in others.items())
            answered = (
                f". Answered questions: {', '.join(store.questions())}"
                if which.get("question")
                else ""
            )
            raise StoreError(
                f"there is nothing to export: {'; '.join(reasons) or 'no pairs'}{answered}",
            )
    return count


def kept_back(
    store: Store,
    count: int,
    target: Target = "jsonl",
    *,
    how: How = "soft",
    **which: Unpack[Which],
) -> dict[str, int]:
    """The pairs that an export of `count` rows left out, by the reasons of `WHO_TAKES`."""
    judged = TaskRow.judged > 0
    unfinished = which.get("unfinished", False)
    out = or_(ready(how), and_(unfinished, or_(judged, target in BRIDGES)))
    gold, unsure, unanswered, expert, few, skipped, new = WHO_TAKES
    unsure = unanswered if which.get("question") else unsure
    reason = when(
        (TaskRow.known.is_not(None), gold),
        (out, unsure),
        (TaskRow.state == "expert", expert),
        (judged, few),
        (nobody_can_take(), skipped),
        else_=new,
    )
    batch = which.get("round")
    query = select(reason, func.count()).where(or_(batch is None, TaskRow.round == batch))
    with store.reading() as session:
        numbers = Counter(dict(session.execute(query.group_by(reason)).all()))
    numbers[unsure] -= count
    return dict((+numbers).most_common())


def demonstrations(
    store: Store,
    round: str | None = None,
    names: bool = False,
) -> Iterator[Demonstration]:
    """The better answers that people wrote, each after its prompt; of gold questions, too."""
    wrote = exists().where(JudgmentRow.task_id == TaskRow.id, LIVE, JudgmentRow.correction != "")
    for case in cases(store, wrote, round=round, names=names):
        for opinion in case.opinions:
            if opinion.correction:
                yield Demonstration(
                    (*case.first.prompt, assistant(opinion.correction)),
                    f"{case.number}-{opinion.annotator}",
                    {**case.first.prompt_details, "annotator": opinion.annotator},
                )


def _json(rows: Iterable[Json], path: Path, *, is_array: bool) -> int:
    count = 0
    (before, between, after) = ("[\n", ",\n", "\n]\n") if is_array else ("", "\n", "\n")
    with path.open("w", encoding="utf-8") as file:
        for count, row in enumerate(rows, 1):
            file.write((between if count > 1 else before) + json.dumps(row, ensure_ascii=False))
        file.write(after)
    return count


def _parquet(rows: Iterable[Json], path: Path) -> int:
    """All rows at once, since the kinds of the columns of metadata are known at the end only."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    records = [
        row | {f"metadata_{k}" if k in _READ else k: v for k, v in row.pop("metadata", {}).items()}
        for row in rows
    ]
    for vote in (vote for record in records for vote in record["annotations"]):
        vote["ratings"] = json.dumps(vote["ratings"])
    for turn in (turn for record in records for name in _TURNS for turn in record[name]):
        if "tool_calls" in turn:  # no two calls need have arguments of one kind
            turn["tool_calls"] = json.dumps(turn["tool_calls"], ensure_ascii=False)
    columns = {
        name: [record.get(name) for record in records]
        for name in dict.fromkeys(name for record in records for name in record)
    }
    arrays = {
        name: pa.array(column) if name in (*_TURNS, "annotations") else _column(column)
        for name, column in columns.items()
    }
    pq.write_table(pa.table(arrays), path)
    return len(records)


def _column(values: Sequence[object]) -> object:
    """The values as Arrow has them: numbers, texts, or lists of these; anything else as JSON
    texts.
    """
    import pyarrow as pa

    try:
        column = pa.array(values)
        items = column.type.value_type if pa.types.is_list(column.type) else column.type
        if not pa.types.is_nested(items) and not pa.types.is_null(items):
            return column
    except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError):
        pass
    return pa.array(
        [None if value is None else json.dumps(value, ensure_ascii=False) for value in values],
        pa.string(),
    )
