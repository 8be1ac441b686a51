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

from sqlalchemy import insert, select
from sqlmodel import Session

from tether.core.errors import DataError
from tether.core.types import Annotation, Comparison
from tether.data.formats.containers import places
from tether.data.formats.fields import as_text
from tether.data.formats.format import Row
from tether.data.formats.json_rows import BadRow
from tether.data.formats.preference import read_pair
from tether.data.sources import SNIFFED_ROWS, Quarantine, read
from tether.preferences import argilla, label_studio
from tether.preferences.carried import readable, remarked, strength_of, told
from tether.preferences.exchange import FLIPPED, PROVENANCE, STRENGTHS, Case, Said, turned
from tether.preferences.store import PART, Answer, Question, Store, StoreError
from tether.preferences.tables import AnnotatorRow, AssignmentRow, FlagRow, JudgmentRow, TaskRow
from tether.preferences.votes import CHOICES, more_than_half

T = TypeVar("T")
BRIDGES = {"label-studio": label_studio, "argilla": argilla}
_ORIGIN = {f"{side}_{told}": (side, name) for side in ("chosen", "rejected") for name, told in PROVENANCE.items()}
_SIDES = {"chosen": "first", "rejected": "second"}


@dataclass(frozen=True)
class Imported:
    """How many rows were read and what they brought; `repeated` are judgments by people who had judged the pair already.

    Of pairs that were there before, `widened` are asked of more people now, and `not_gold` were judged already, so that they
    did not become gold questions.
    """

    rows: int = 0
    answers: int = 0
    tasks: int = 0
    judgments: int = 0
    repeated: int = 0
    widened: int = 0
    not_gold: int = 0

    def __add__(self, other: Imported) -> Imported:
        return Imported(*(getattr(self, name) + getattr(other, name) for name in self.__dataclass_fields__))


def format_of(file: str | Path) -> str:
    """What most of the first rows look like: `label-studio`, `argilla`, `answers`, `export` (our own comparisons), or `auto`."""
    first = places(file)[0]
    votes = Counter(_format_of(row) for _, row in islice(first.rows(), SNIFFED_ROWS) if not isinstance(row, BadRow))
    return votes.most_common(1)[0][0] if votes else "auto"


def _format_of(row: Row) -> str:
    several = "responses" in row and not row.keys() & {"scores", "ranks", "chosen"}
    other = "answers" if several or ({"prompt", "response"} <= row.keys() and "chosen" not in row) else "auto"
    votes = row.get("annotations") if row.keys() >= {"chosen", "rejected"} else None
    if isinstance(votes, list) and any(isinstance(vote, Mapping) and "choice" in vote for vote in votes):
        return "export"
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
        ours = layout == "export" or (format == "preference" and format_of(file) == "export")
        if fields and bridge is None:
            raise DataError(f"{file}: fields are named for tasks of Label Studio or Argilla, and this file is neither")
        if ours:
            found = parsed(file, lambda row, skipped: _exported(row, skipped, labels=labels, gold=gold), quarantine, limit)
        elif bridge is None:
            found = _read(file, format, quarantine, limit, labels=labels, gold=gold)
        elif labels or gold:
            raise DataError(f"{file}: tasks of Label Studio and Argilla have people's judgments and no label of their own")
        else:
            tasks = parsed(file, lambda row, skipped, read=bridge.read_task: [read(row, fields, skipped)], quarantine)
            found = islice(tasks, limit)
        yield from found


def _read(file: str | Path, format: str, quarantine: Quarantine | None, limit: int | None, **how: Any) -> Iterator[Case]:
    def check(row: Comparison) -> None:
        _case(row, **how)

    for row in read(file, Comparison, format=format, quarantine=quarantine, limit=limit, check=check):
        yield _case(row, **how)


def parsed(
    files: str | Path | Sequence[str | Path],
    parse: Callable[[Row, list[str]], Iterable[T]],
    quarantine: Quarantine | None,
    limit: int | None = None,
) -> Iterator[T]:
    """What `parse` makes of the rows (the first `limit` of each file); those that it refuses go to quarantine.

    So do the reasons that it adds to its list, of what it left out of a row that it used.

    Raises:
        DataError, MissingFileError: a file is missing, damaged or has no row that can be used.
    """
    for place in places(files):
        bad, used = Quarantine(keep=0), 0
        for line, row in islice(place.rows(), limit):
            skipped: list[str] = []
            try:
                if isinstance(row, BadRow):
                    raise DataError(row.reason)
                found = list(parse(row, skipped))
            except (DataError, OverflowError) as error:
                reason = str(error) if isinstance(error, DataError) else "not a number: the row has one that is too large"
                for where in (bad, *([] if quarantine is None else [quarantine])):
                    where.add(place.name, line, reason, row.excerpt if isinstance(row, BadRow) else row)
                continue
            for reason in skipped if quarantine is not None else ():
                quarantine.add(place.name, line, f"one judgment only, {reason}", row)
            used += len(found)
            yield from found
        if not used:
            why = f"none of its {bad.count} rows can be used: {bad.top_reasons()}. Mend them" if bad.count else "it holds no rows"
            raise DataError(f"{place.name}: {why}.")


def _exported(row: Row, skipped: list[str], *, labels: str, gold: bool) -> Iterator[Case]:
    """A comparison that an export wrote, with all that its votes have."""
    votes = row["annotations"] if _format_of(row) == "export" else ()
    for pair in read_pair({**row, "annotations": None} if votes else row):
        said = readable(votes, _vote, skipped)
        stores = {str(vote.get("store") or "") for vote in votes if isinstance(vote, Mapping)}
        case = _case(replace(pair, id=str(row.get("id") or "")), said, labels=labels, gold=gold)
        yield replace(case, details={**case.details, "store": stores.pop()}) if len(stores) == 1 and any(stores) else case


def _vote(vote: Any) -> Said:
    if not isinstance(vote, Mapping):
        raise DataError(f"not an annotation: {vote!r:.40}")
    choice = vote.get("choice")
    choice = _SIDES.get(choice, choice) if isinstance(choice, str) else None
    if choice not in CHOICES:
        raise DataError(f"no verdict: a vote's choice is {choice!r:.40}, none of chosen, rejected, tie, both_bad")
    return Said(as_text(vote.get("annotator"), "annotator"), choice, strength_of(vote.get("strength")), **remarked(vote, _SIDES))


def _case(row: Comparison, said: Sequence[Said] = (), *, labels: str, gold: bool) -> Case:
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
    said = tuple(said) or tuple(_said(vote, expert) for vote in row.annotations)
    own: Any = "tie" if row.tie or row.probability == 0.5 else "first" if row.probability > 0.5 else "second"
    known = {"round": str(facts.pop("round", "")), "strategy": str(facts.pop("strategy", "")) or "imported"}
    details = {"id": row.id, "metadata": facts}
    case = Case(chosen, rejected, (*said, *([Said(labels, own)] if labels else ())), details=details, **known)
    case = replace(case, said=(), known=own) if gold else case
    # The better side of a file often comes first; which is `first` here must not tell.
    return case if case.in_order else turned(case)


def _said(vote: Annotation, expert: str | None) -> Said:
    size, choice = abs(vote.preference), "first" if vote.preference > 0 else "second" if vote.preference < 0 else "tie"
    strength = None if size in (0.0, 1.0) else min(STRENGTHS, max(1, round(STRENGTHS * size)))
    return Said(vote.annotator, choice, strength, role="expert" if vote.annotator == expert else "annotator")


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
    ours = {f"annotator-{row.id}": row.name for row in store.annotators()}

    def called(case: Case, said: Said) -> str:
        own = ours.get(said.annotator) if case.details.get("store") == store.id else None
        return own or _name(prefix, said.annotator)

    while part := list(islice(rows, PART)):
        part = [case if round is None else replace(case, round=round) for case in part]
        part = [replace(c, said=tuple(replace(s, annotator=called(c, s)) for s in c.said)) for c in part]
        answers = store.add_answers(side for case in part for side in (case.first, case.second))
        tasks = store.add_questions(_question(case, ask, priority) for case in part)
        with store.transaction() as session:
            known = _tasks(session, part)
            widened = _widen(session, list(known.values()), ask) if ask else 0
            not_gold = sum(not _is_gold(known[_key(case)], case) for case in part if case.known)
            kept, repeated = _keep(session, part, known, store.clock())
        total += Imported(len(part), answers, tasks, kept, repeated, widened, not_gold)
    return total


def _question(case: Case, ask: int | None, priority: float) -> Question:
    people = sum(said.role == "annotator" for said in case.said)
    needed = max(1, people, ask or case.needed)
    sides = (case.first.prompt_id, case.first.id, case.second.id)
    details = {name: value for name, value in case.details.items() if name != "store"}
    return Question(*sides, needed, case.known, case.strategy, priority, case.round, plain(details))


def _key(case: Case) -> tuple[str, str]:
    return "/".join(sorted((case.first.id, case.second.id))), case.round


def _tasks(session: Session, part: Sequence[Case]) -> dict[tuple[str, str], TaskRow]:
    wanted = {_key(case) for case in part}
    found = session.execute(select(TaskRow).where(TaskRow.pair.in_({pair for pair, _ in wanted}))).scalars()
    return {(task.pair, task.round): task for task in found if (task.pair, task.round) in wanted}


def _flagged(session: Session, tasks: Iterable[int | None]) -> set[int]:
    query = select(FlagRow.task_id).where(FlagRow.task_id.in_(tasks), FlagRow.resolved.is_(None))
    return set(session.execute(query).scalars())


def _widen(session: Session, tasks: Sequence[TaskRow], ask: int) -> int:
    """Ask tasks that were asked of fewer people of so many; returns how many these are."""
    short = [task for task in tasks if task.needed < ask and task.known is None and task.state != "settled"]
    flagged = _flagged(session, [task.id for task in short])
    for task in short:
        task.needed = ask
        task.state = task.state if task.id in flagged else "open"
    return len(short)


def _is_gold(task: TaskRow, case: Case) -> bool:
    """Make a task that nobody has judged the gold question of the case; whether it is that now, or was."""
    known = case.known if task.first_id == case.first.id else FLIPPED.get(case.known or "", case.known)
    if task.known != known and not task.judged and task.state == "open":
        task.known = known
    return task.known == known


def _keep(session: Session, part: Sequence[Case], tasks: Mapping[tuple[str, str], TaskRow], now: float) -> tuple[int, int]:
    """Judgments that are new, and those that are not; their tasks say so afterwards."""
    people = _people(session, {said.annotator: said.role for case in part for said in case.said}, now)
    ids = {tasks[_key(case)].id for case in part if case.said}
    query = select(AssignmentRow.task_id, AssignmentRow.annotator_id).where(AssignmentRow.task_id.in_(ids))
    seen, repeated = set(map(tuple, session.execute(query))), 0
    fresh: dict[tuple[int, int], tuple[TaskRow, AnnotatorRow, Said]] = {}
    for case in part:
        for said in case.said:
            task, person = tasks[_key(case)], people[said.annotator]
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
    for number, ((task_id, annotator_id), (task, _, said)) in enumerate(fresh.items()):
        at = said.at or now + number * 1e-6  # so that of a person's two judgments of a pair one is the later
        who = {"task_id": task_id, "annotator_id": annotator_id}
        counted = task.known is None and said.role == "annotator"
        how = {"left": said.left or "", "state": "judged", "counted": counted, "role": said.role}
        leases.append({**who, **how, "begun": at, "expires": at})
        same = {name: getattr(said, name) for name in ("choice", "strength", "seconds", "guidelines")}
        judgments.append({**who, **same, "ratings": dict(said.ratings), "comment": "", "at": at})
    columns = (AssignmentRow.task_id, AssignmentRow.annotator_id, AssignmentRow.id)
    given = {(task, person): key for task, person, key in session.execute(insert(AssignmentRow).returning(*columns), leases)}
    rows = [{**row, "assignment_id": given[row["task_id"], row["annotator_id"]]} for row in judgments]
    session.execute(insert(JudgmentRow), rows)


def _settle(session: Session, fresh: Sequence[tuple[TaskRow, AnnotatorRow, Said]]) -> None:
    """Count the judgments in, and say what becomes of their tasks."""
    counts = Counter(task.id for task, _, said in fresh if said.role == "annotator")
    decided = {task.id for task, _, said in fresh if said.role != "annotator"}
    tasks = {task.id: task for task, _, _ in fresh}
    ids = list(tasks)
    flagged = _flagged(session, ids)
    choices: dict[int | None, list[str]] = {key: [] for key in ids}
    live = select(JudgmentRow.task_id, JudgmentRow.choice).where(JudgmentRow.task_id.in_(ids), JudgmentRow.withdrawn.is_(None))
    for key, choice in session.execute(live):
        choices[key].append(choice)
    for key, task in tasks.items():
        task.judged += counts[key]
        if task.known is not None:
            continue
        task.taken += counts[key]
        task.needed = max(task.needed, task.taken)
        if key in decided:
            task.state = "settled"
        elif task.state != "settled" and (key in flagged or task.judged >= task.needed):
            task.state = "done" if key not in flagged and more_than_half(choices[key]) else "expert"
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
