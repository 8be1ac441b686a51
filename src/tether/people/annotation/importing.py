"""Imports into the store: comparisons with the judgments on them, comparisons to be judged, gold
questions.

Rows go in by parts. Each part is kept whole or not at all, and existing rows stay as they are. So
the same command continues an interrupted import, also while people judge.
"""

# SQLModel types columns as the values in them, so that conditions on columns look like plain bools.
# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false, reportOptionalMemberAccess=false

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path

from sqlalchemy import select
from sqlmodel import Session

from tether.core.digest import digest
from tether.core.errors import DataError
from tether.core.types import Comparison, Row, Texts
from tether.data.formats.containers import Sources, places
from tether.data.formats.json_rows import BadRow
from tether.data.sources import SNIFFED_ROWS, Quarantine, read, read_rows
from tether.people.annotation.bridges import BRIDGES
from tether.people.annotation.exchange import Case, turned
from tether.people.annotation.queries import recount
from tether.people.annotation.store import PART, Store, StoreError
from tether.people.annotation.tables import AnnotatorRow, AssignmentRow, JudgmentRow, TaskRow
from tether.people.annotation.task_json import case_of, has_votes, json_safe, read_case
from tether.people.annotation.work import free_late, judgment_row
from tether.people.labels.votes import Opinion


def format_of(file: str | Path) -> str:
    """The format of most of the first rows: `label-studio`, `argilla`, `answers`, `export` (our own
    comparisons), or `auto`.
    """
    first = places(file)[0]
    votes = Counter(
        _format_of(row)
        for _, row in islice(first.rows(), SNIFFED_ROWS)
        if not isinstance(row, BadRow)
    )
    return votes.most_common(1)[0][0] if votes else "auto"


def _format_of(row: Row) -> str:
    several = "responses" in row and not row.keys() & {"scores", "ranks", "chosen"}
    other = (
        "answers"
        if several or ({"prompt", "response"} <= row.keys() and "chosen" not in row)
        else "auto"
    )
    if has_votes(row):
        return "export"
    return next((name for name, bridge in BRIDGES.items() if bridge.matches(row)), other)


def read_cases(
    files: Sources,
    *,
    format: str = "auto",
    quarantine: Quarantine | None = None,
    fields: Sequence[str] = (),
    labels: str = "",
    gold: bool = False,
    limit: int | None = None,
    columns: Texts | None = None,
) -> Iterator[Case]:
    """Comparisons out of files, each as a case with the judgments of its annotators.

    Args:
        format: `label-studio`, `argilla`, a format of `tether.data`, or `auto`.
        fields: of a task of Label Studio or Argilla, the names of the prompt and of the two
            answers, where they are unusual. Such a task is read as a pair.
        labels: the file's own label counts as the judgment of an annotator of this name.
        gold: the file's own label is the known choice of a gold question.
        limit: the number of rows of each file to read. In a format of `tether.data`, the number
            of comparisons.
        columns: names of a format for a file's own columns, as in `data.sources.read`.

    Raises:
        DataError, MissingFileError: as `data.sources.read`; `labels` or `gold` for a file that has
            no labels.
    """
    for file in [files] if isinstance(files, str | Path) else files:
        layout = format_of(file) if format == "auto" else format
        if layout == "answers":
            raise DataError(
                f"{file} holds answers and no comparisons of them. Import it by "
                "itself with --format answers",
            )
        bridge = BRIDGES.get(layout)
        case = partial(case_of, labels=labels, gold=gold)
        if fields and bridge is None:
            raise DataError(
                f"{file}: fields are named for tasks of Label Studio or Argilla, and "
                "this file is neither",
            )
        if bridge and columns:
            raise DataError(
                f"{file}: columns are named for comparisons, and this file holds "
                "tasks, whose fields are named",
            )
        if bridge and (labels or gold):
            raise DataError(
                f"{file}: tasks of Label Studio and Argilla have people's judgments "
                "and no label of their own",
            )
        if (
            bridge
            or (layout == "export" and not columns)
            or (format == "preference" and format_of(file) == "export")
        ):
            one = (
                partial(bridge.read_task, fields=fields)
                if bridge
                else partial(read_case, labels=labels, gold=gold)
            )
            yield from read_rows(file, one, quarantine, limit)
        else:
            rows = read(
                file,
                Comparison,
                format=format,
                check=case,
                quarantine=quarantine,
                limit=limit,
                columns=columns,
            )
            yield from map(case, rows)


def import_cases(
    store: Store,
    incoming: Iterable[Case],
    *,
    ask: int | None = None,
    round: str | None = None,
    prefix: str = "",
) -> Counter[str]:
    """Put cases into the store; returns the number of `rows` and of what they brought: `answers`,
    `tasks`, `judgments`.

    `repeated` are judgments by people who judged the pair before, or again: by its time the last
    one counts, and without times the first. `replaced` are those in the store that later ones have
    replaced. `held` are judgments of pairs that the person has on the screen, skipped, flagged or
    took back: these are not kept. Of earlier pairs, `widened` now go to more people. `not_gold` had
    judgments already, so they did not become gold questions.

    Judgments become those of annotators of these names, who cannot enter until they are invited. A
    pair with judgments goes to further people only if `ask` wants more. A pair without goes to
    `ask` people, by default one.

    Args:
        ask: people for each pair, those who have judged it included.
        round: the name of the batch, in place of the cases' own.
        prefix: goes before every annotator's name, to separate the people of two sources.

    Raises:
        StoreError: a name is empty; what was put in by earlier parts stays.
    """
    total = Counter[str]()
    rows = iter(incoming)
    exported = {f"annotator-{row.id}": row.name for row in store.annotators()}

    def named(case: Case) -> Case:
        """The case in its round, its people under the names that they have in this store."""
        own = exported if case.details.get("store") == store.id else {}
        opinions = (
            replace(o, annotator=own.get(o.annotator) or _name(prefix, o.annotator))
            for o in case.opinions
        )
        return replace(case, opinions=tuple(opinions), round=case.round if round is None else round)

    while part := [named(case) for case in islice(rows, PART)]:
        total["rows"] += len(part)
        total["answers"] += store.add_answers(
            side for case in part for side in (case.first, case.second)
        )
        total["tasks"] += store.add_tasks(_task(case, ask) for case in part)
        with store.transaction() as session:
            wanted = {(case.pair, case.round) for case in part}
            candidates = session.scalars(
                select(TaskRow).where(TaskRow.pair.in_({pair for pair, _ in wanted})),
            )
            by_pair = {
                key: task for task in candidates if (key := (task.pair, task.round)) in wanted
            }
            total["widened"] += _widen(session, by_pair.values(), ask) if ask else 0
            tasked = [(by_pair[case.pair, case.round], case) for case in part]
            tasked = [
                (task, case if task.first_id == case.first.id else turned(case))
                for task, case in tasked
            ]
            total["not_gold"] += sum(
                not _is_gold(task, case) for task, case in tasked if case.known
            )
            counts = _keep(session, tasked, store.clock())
        given = sum(len(case.opinions) + case.replaced for case in part)
        total.update(counts, repeated=given - counts["judgments"] - counts["held"])
    return total


def _task(case: Case, ask: int | None) -> TaskRow:
    people = sum(opinion.role == "annotator" for opinion in case.opinions)
    details = json_safe({name: value for name, value in case.details.items() if name != "store"})
    return TaskRow(
        prompt_id=case.first.prompt_id,
        first_id=case.first.id,
        second_id=case.second.id,
        known=case.known,
        strategy=case.strategy,
        round=case.round,
        needed=max(1, people, ask or case.needed),
        details=details,
    )


def _widen(session: Session, tasks: Iterable[TaskRow], ask: int) -> int:
    """Ask `ask` people about tasks that fewer were asked about; returns the number of these
    tasks.
    """
    short = [
        task
        for task in tasks
        if task.needed < ask and task.known is None and task.state != "settled"
    ]
    for task in short:
        task.needed = ask
        recount(session, task)
    return len(short)


def _is_gold(task: TaskRow, case: Case) -> bool:
    """Make a task without a judgment the gold question of the case; True if it is one now."""
    if task.known != case.known and not task.judged and task.state == "open":
        task.known = case.known
    return task.known == case.known


def _keep(session: Session, tasked: Sequence[tuple[TaskRow, Case]], now: float) -> Counter[str]:
    """Keep the judgments that are new, and those that are later than one by the same person;
    returns their numbers.
    """
    free_late(session, now)
    people = _people(
        session,
        {opinion.annotator: opinion.role for _, case in tasked for opinion in case.opinions},
        now,
    )
    last: dict[tuple[int, int], tuple[TaskRow, Opinion]] = {}
    for task, case in tasked:
        for opinion in case.opinions:
            key = (task.id, people[opinion.annotator].id)
            if key not in last or opinion.at > last[key][1].at > 0:
                last[key] = (task, opinion)
    given = select(AssignmentRow).where(AssignmentRow.task_id.in_({task for task, _ in last}))
    leases = {(lease.task_id, lease.annotator_id): lease for lease in session.scalars(given)}
    before = session.scalars(
        select(JudgmentRow).where(
            JudgmentRow.assignment_id.in_([lease.id for lease in leases.values()]),
        ),
    ).all()
    ever_judged = {row.assignment_id for row in before}
    judged = {(row.task_id, row.annotator_id): row for row in before if row.withdrawn is None}
    fresh: list[tuple[AssignmentRow, Opinion]] = []
    held = 0
    for key, (task, opinion) in last.items():
        lease = leases.get(key)
        if lease and (lease.state != "expired" or lease.id in ever_judged):
            held += key not in judged
            continue
        lease = lease or AssignmentRow(task_id=key[0], annotator_id=key[1])
        # so that of a person's two judgments of a pair one is the later
        lease.begun = lease.expires = opinion.at or now + len(fresh) * 1e-6
        lease.counted = task.known is None and opinion.role == "annotator"
        lease.role = opinion.role
        lease.left = opinion.left or ""
        lease.state = "judged"
        fresh.append((lease, opinion))
    session.add_all(lease for lease, _ in fresh)
    session.flush()
    session.add_all(judgment_row(lease, opinion, lease.begun) for lease, opinion in fresh)
    changed = {lease.task_id: last[lease.task_id, lease.annotator_id][0] for lease, _ in fresh}
    later = _later(session, last, leases, judged, now)
    for task in [*changed.values(), *(task for task in later if task.id not in changed)]:
        recount(session, task)
    return Counter(judgments=len(fresh) + len(later), replaced=len(later), held=held)


def _later(
    session: Session,
    last: Mapping[tuple[int, int], tuple[TaskRow, Opinion]],
    leases: Mapping[tuple[int, int], AssignmentRow],
    judged: Mapping[tuple[int, int], JudgmentRow],
    now: float,
) -> list[TaskRow]:
    """Put later judgments in place of earlier ones by the same people; returns their tasks.
    Decisions of experts stay.
    """
    later: list[TaskRow] = []
    for key, (task, opinion) in last.items():
        row = judged.get(key)
        if row is None:
            continue
        if (
            opinion.at > row.at
            and (opinion.choice, opinion.strength) != (row.choice, row.strength)
            and task.state != "settled"
        ):
            row.withdrawn = now
            session.flush()  # one live judgment an assignment
            leases[key].left = opinion.left or ""
            session.add(judgment_row(leases[key], opinion, opinion.at))
            later.append(task)
    return later


def _name(prefix: str, name: str) -> str:
    """The name of a person in a store; a long one ends with a digest, which keeps people apart."""
    full = f"{prefix}{name}".strip()
    if len(full) > 80:
        full = f"{full[:66]}… {digest(full)[:12]}"
    if not full:
        raise StoreError(
            "an annotator in this file has no name. Give --prefix, which goes before every name",
        )
    return full


def _people(session: Session, roles: Texts, now: float) -> Mapping[str, AnnotatorRow]:
    """The rows of people by name; new people are added."""
    people = {
        row.name: row
        for row in session.scalars(select(AnnotatorRow).where(AnnotatorRow.name.in_(roles)))
    }
    people |= {
        name: AnnotatorRow(name=name, role=role, created=now)
        for name, role in roles.items()
        if name not in people
    }
    session.add_all(people.values())
    session.flush()
    return people
