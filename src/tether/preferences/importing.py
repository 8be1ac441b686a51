"""Into the store: comparisons with what people said of them, comparisons to be judged, gold questions, answers.

Rows go in by parts, each of which is kept whole or not at all; what is there already is left as it is, so that an import that
was interrupted is simply started again, also while people judge.
"""

# SQLModel types columns as the values in them, so that conditions on columns look like plain bools.
# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false, reportOptionalMemberAccess=false

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import func, insert, select
from sqlmodel import Session

from tether.core.errors import DataError
from tether.core.types import Comparison
from tether.data.formats.containers import places
from tether.data.formats.format import Row
from tether.data.formats.json_rows import BadRow
from tether.data.sources import SNIFFED_ROWS, Quarantine, read
from tether.preferences import argilla, label_studio
from tether.preferences.carried import told
from tether.preferences.exchange import PROVENANCE, STRENGTHS, Case, Said, turned
from tether.preferences.store import Answer, Question, Store, StoreError
from tether.preferences.tables import AnnotatorRow, AssignmentRow, FlagRow, JudgmentRow, TaskRow
from tether.preferences.votes import more_than_half

T = TypeVar("T")
PART = 500
BRIDGES = {"label-studio": label_studio, "argilla": argilla}
_ORIGIN = {f"{side}_{told}": (side, name) for side in ("chosen", "rejected") for name, told in PROVENANCE.items()}


@dataclass(frozen=True)
class Imported:
    """How many rows were read and what they brought; `repeated` are judgments by people who had judged the pair already."""

    rows: int = 0
    answers: int = 0
    tasks: int = 0
    judgments: int = 0
    repeated: int = 0

    def __add__(self, other: Imported) -> Imported:
        return Imported(*(getattr(self, name) + getattr(other, name) for name in self.__dataclass_fields__))


def format_of(file: str | Path) -> str:
    """What most of the first rows look like: `label-studio`, `argilla`, `answers`, or `auto` for one of the house's formats."""
    first = places(file)[0]
    votes = Counter(_format_of(row) for _, row in islice(first.rows(), SNIFFED_ROWS) if not isinstance(row, BadRow))
    return votes.most_common(1)[0][0] if votes else "auto"


def _format_of(row: Row) -> str:
    several = "responses" in row and not row.keys() & {"scores", "ranks", "chosen"}
    other = "answers" if several or ({"prompt", "response"} <= row.keys() and "chosen" not in row) else "auto"
    return next((name for name, bridge in BRIDGES.items() if bridge.matches(row)), other)


def read_cases(
    files: str | Path | Sequence[str | Path],
    *,
    format: str = "auto",
    quarantine: Quarantine | None = None,
    fields: Sequence[str] = (),
    labels: str = "",
    gold: bool = False,
    limit: int | None = None,
) -> Iterator[Case]:
    """Comparisons out of files, each as a case with the judgments of its annotators.

    Args:
        format: `label-studio`, `argilla`, a format of `tether.data`, or `auto`.
        fields: of a task of Label Studio or Argilla, the names of the prompt and of the two answers, where they are unusual.
        labels: the file's own label counts as the judgment of an annotator of this name.
        gold: the file's own label is the known choice of a gold question.
        limit: so many of each file.

    Raises:
        DataError, MissingFileError: as `data.sources.read`; `labels` or `gold` for a file that has no labels.
    """
    for file in [files] if isinstance(files, str | Path) else files:
        layout = format_of(file) if format == "auto" else format
        if layout == "answers":
            raise DataError(f"{file} holds answers and no comparisons of them. Import it by itself with --format answers")
        bridge = BRIDGES.get(layout)
        if fields and bridge is None:
            raise DataError(f"{file}: fields are named for tasks of Label Studio or Argilla, and this file is neither")
        if bridge is None:
            found = _read(file, format, quarantine, limit, labels=labels, gold=gold)
        elif labels or gold:
            raise DataError(f"{file}: tasks of Label Studio and Argilla have people's judgments and no label of their own")
        else:
            found = islice(parsed(file, lambda row, read=bridge.read_task: [read(row, fields)], quarantine), limit)
        yield from found


def _read(file: str | Path, format: str, quarantine: Quarantine | None, limit: int | None, **how: Any) -> Iterator[Case]:
    def check(row: Comparison) -> None:
        _case(row, **how)

    for row in read(file, Comparison, format=format, quarantine=quarantine, limit=limit, check=check):
        yield _case(row, **how)


def parsed(
    files: str | Path | Sequence[str | Path],
    parse: Callable[[Row], Iterable[T]],
    quarantine: Quarantine | None,
    limit: int | None = None,
) -> Iterator[T]:
    """What `parse` makes of the rows (the first `limit` of each file); those that it refuses go to quarantine.

    Raises:
        DataError, MissingFileError: a file is missing, damaged or has no row that can be used.
    """
    for place in places(files):
        bad, used = Quarantine(keep=0), 0
        for line, row in islice(place.rows(), limit):
            try:
                if isinstance(row, BadRow):
                    raise DataError(row.reason)
                found = list(parse(row))
            except (DataError, OverflowError) as error:
                reason = str(error) if isinstance(error, DataError) else "not a number: the row has one that is too large"
                for where in (bad, *([] if quarantine is None else [quarantine])):
                    where.add(place.name, line, reason, row.excerpt if isinstance(row, BadRow) else row)
                continue
            used += len(found)
            yield from found
        if not used:
            why = f"none of its {bad.count} rows can be used: {bad.top_reasons()}. Mend them" if bad.count else "it holds no rows"
            raise DataError(f"{place.name}: {why}.")


def _case(row: Comparison, *, labels: str, gold: bool) -> Case:
    if row.chosen == row.rejected:
        raise DataError("equal responses: there is nothing to compare")
    facts, origin = plain(dict(row.metadata)), {"chosen": {}, "rejected": {}}
    for key in [key for key in facts if key in _ORIGIN]:
        side, name = _ORIGIN[key]
        origin[side][name] = facts.pop(key)
    expert = facts.pop("settled_by", None)
    for computed in ("verdict", "guidelines", "state"):
        facts.pop(computed, None)
    sides = (
        Answer(row.prompt, text, row.group, **told(origin[name]))
        for name, text in (("chosen", row.chosen), ("rejected", row.rejected))
    )
    chosen, rejected = sides
    said = tuple(_said(a.annotator, a.preference, expert) for a in row.annotations)
    own: Any = "tie" if row.tie or row.probability == 0.5 else "first" if row.probability > 0.5 else "second"
    known = {"round": str(facts.pop("round", "")), "strategy": str(facts.pop("strategy", "")) or "imported"}
    details = {"id": row.id, "metadata": facts}
    case = Case(chosen, rejected, (*said, *([Said(labels, own)] if labels else ())), details=details, **known)
    case = replace(case, said=(), known=own) if gold else case
    # The better side of a file often comes first; which is `first` here must not tell.
    return case if case.in_order else turned(case)


def _said(name: str, preference: float, expert: str | None) -> Said:
    size, choice = abs(preference), "first" if preference > 0 else "second" if preference < 0 else "tie"
    strength = None if size in (0.0, 1.0) else min(STRENGTHS, max(1, round(STRENGTHS * size)))
    return Said(name, choice, strength, role="expert" if name == expert else "annotator")


def plain(value: Any) -> Any:
    """The value as JSON has it: what has no place there becomes a text, what is not finite becomes null."""
    if isinstance(value, Mapping):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if value is None or isinstance(value, str | int | float | bool) else str(value)


def import_cases(
    store: Store,
    found: Iterable[Case],
    *,
    ask: int | None = None,
    round: str | None = None,
    prefix: str = "",
    priority: float = 0.0,
) -> Imported:
    """Put cases into the store.

    Judgments become those of annotators of these names, who cannot enter until they are invited; a pair that has some is not
    asked again, unless `ask` wants more people, and a pair that has none is asked of `ask` people, by default one.

    Args:
        ask: people for each pair, those who have judged it included.
        round: the name of the batch, in place of the cases' own.
        prefix: goes before every annotator's name, so that people of two sources are not taken for one.

    Raises:
        StoreError: a name is empty; what was put in by earlier parts stays.
    """
    total, rows = Imported(), iter(found)
    while part := list(islice(rows, PART)):
        part = [case if round is None else replace(case, round=round) for case in part]
        answers = store.add_answers(side for case in part for side in (case.first, case.second))
        tasks = store.add_questions(_question(case, ask, priority) for case in part)
        with store.transaction() as session:
            kept, repeated = _keep(session, part, prefix, store.clock())
        total += Imported(len(part), answers, tasks, kept, repeated)
    return total


def _question(case: Case, ask: int | None, priority: float) -> Question:
    people = sum(said.role == "annotator" for said in case.said)
    needed = max(1, people, ask or case.needed)
    sides = (case.first.prompt_id, case.first.id, case.second.id)
    return Question(*sides, needed, case.known, case.strategy, priority, case.round, plain(case.details))


def _keep(session: Session, part: Sequence[Case], prefix: str, now: float) -> tuple[int, int]:
    """Judgments that are new, and those that are not; their tasks say so afterwards."""
    wanted = {("/".join(sorted((c.first.id, c.second.id))), c.round) for c in part if c.said}
    found = session.execute(select(TaskRow).where(TaskRow.pair.in_({pair for pair, _ in wanted}))).scalars()
    tasks = {(task.pair, task.round): task for task in found if (task.pair, task.round) in wanted}
    people = _people(session, {_name(prefix, s.annotator): s.role for c in part for s in c.said}, now)
    ids = [task.id for task in tasks.values()]
    query = select(AssignmentRow.task_id, AssignmentRow.annotator_id).where(AssignmentRow.task_id.in_(ids))
    seen, repeated = set(map(tuple, session.execute(query))), 0
    fresh: dict[tuple[int, int], tuple[TaskRow, AnnotatorRow, Said]] = {}
    for case in part:
        for said in case.said:
            task = tasks["/".join(sorted((case.first.id, case.second.id))), case.round]
            person = people[_name(prefix, said.annotator)]
            key = (task.id or 0, person.id or 0)
            if key in seen:
                repeated += 1
                continue
            seen.add(key)
            fresh[key] = (task, person, said if task.first_id == case.first.id else said.turned())
    if fresh:
        _insert(session, fresh, now)
        _settle(session, list(fresh.values()))
    return len(fresh), repeated


def _insert(session: Session, fresh: Mapping[tuple[int, int], tuple[TaskRow, AnnotatorRow, Said]], now: float) -> None:
    leases, judgments = [], []
    for number, ((task_id, annotator_id), (task, person, said)) in enumerate(fresh.items()):
        at = said.at or now + number * 1e-6  # so that of a person's two judgments of a pair one is the later
        who = {"task_id": task_id, "annotator_id": annotator_id}
        counted = task.known is None and person.role == "annotator"
        leases.append({**who, "left": said.left or "", "state": "judged", "counted": counted, "begun": at, "expires": at})
        same = {name: getattr(said, name) for name in ("choice", "strength", "seconds", "guidelines")}
        judgments.append({**who, **same, "ratings": dict(said.ratings), "comment": "", "at": at})
    columns = (AssignmentRow.task_id, AssignmentRow.annotator_id, AssignmentRow.id)
    given = {(task, person): key for task, person, key in session.execute(insert(AssignmentRow).returning(*columns), leases)}
    rows = [{**row, "assignment_id": given[row["task_id"], row["annotator_id"]]} for row in judgments]
    session.execute(insert(JudgmentRow), rows)


def _settle(session: Session, fresh: Sequence[tuple[TaskRow, AnnotatorRow, Said]]) -> None:
    """Count the judgments in, and say what becomes of their tasks."""
    counts = Counter(task.id for task, person, _ in fresh if person.role == "annotator")
    decided = {task.id for task, person, _ in fresh if person.role != "annotator"}
    tasks = {task.id: task for task, _, _ in fresh}
    ids = list(tasks)
    flags = select(FlagRow.task_id, func.count()).where(FlagRow.task_id.in_(ids), FlagRow.resolved.is_(None))
    flagged = dict(session.execute(flags.group_by(FlagRow.task_id)).all())
    said: dict[int | None, list[str]] = {key: [] for key in ids}
    live = select(JudgmentRow.task_id, JudgmentRow.choice).where(JudgmentRow.task_id.in_(ids), JudgmentRow.withdrawn.is_(None))
    for key, choice in session.execute(live):
        said[key].append(choice)
    for key, task in tasks.items():
        task.judged += counts[key]
        if task.known is not None:
            continue
        task.taken += counts[key]
        task.needed = max(task.needed, task.taken)
        if key in decided:
            task.state = "settled"
        elif task.state != "settled" and (flagged.get(key) or task.judged >= task.needed):
            task.state = "done" if not flagged.get(key) and more_than_half(said[key]) else "expert"
    session.flush()


def _name(prefix: str, name: str) -> str:
    full = f"{prefix}{name}".strip()[:80]
    if not full:
        raise StoreError("an annotator in this file has no name. Give --prefix, which goes before every name")
    return full


def _people(session: Session, roles: Mapping[str, str], now: float) -> dict[str, AnnotatorRow]:
    query = select(AnnotatorRow).where(AnnotatorRow.name.in_(roles))
    known = {row.name: row for row in session.execute(query).scalars()}
    new = [AnnotatorRow(name=name, role=role, created=now) for name, role in roles.items() if name not in known]
    session.add_all(new)
    session.flush()
    return known | {row.name: row for row in new}
