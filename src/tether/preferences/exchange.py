"""What a store holds, for those who use it: cases with all that was said of them, comparisons to learn from, votes to compare.

Rows come as a stream, in the order of their tasks, as of one moment; gold questions and judgments that were taken back stay out.
People are called annotator-1, annotator-2 ... unless names are asked for; secrets and comments are never part of it.
"""

# SQLModel types columns as the values in them, so that conditions on columns look like plain bools.
# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false, reportOptionalMemberAccess=false

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any, Literal, get_args

from sqlalchemy import select
from sqlmodel import Session

from tether.core.errors import ConfigError
from tether.core.types import Annotation, Comparison, Message
from tether.preferences.aggregation import Label, dawid_skene
from tether.preferences.store import Answer, Store
from tether.preferences.tables import AnnotatorRow, AssignmentRow, JudgmentRow, PromptRow, ResponseRow, TaskRow
from tether.preferences.votes import Choice, Side, Vote
from tether.preferences.work import majority

How = Literal["majority", "soft", "dawid-skene"]
CHUNK = 500
FINISHED = ("done", "settled")
STRENGTHS = 3
LONGEST_SLICE = 40
FLIPPED: dict[str, Any] = {"first": "second", "second": "first"}
PROVENANCE = {"model": "model", "checkpoint": "checkpoint", "sampling": "sampling"} | {
    "score": "reward_score", "spread": "reward_spread", "details": "details"
}  # fmt: skip
"""Fields of an answer and what they are called in a comparison's metadata, after `chosen_` or `rejected_`."""


@dataclass(frozen=True, slots=True)
class Said:
    """A judgment of one person, with what belongs to it."""

    annotator: str
    choice: Choice
    strength: int | None = None
    ratings: Mapping[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    guidelines: int = 0
    left: Side | None = None
    at: float = 0.0
    role: str = "annotator"

    @property
    def preference(self) -> float:
        """+1 for the first answer, -1 for the second; less for a weaker preference, 0 for none."""
        sign = {"first": 1.0, "second": -1.0}.get(self.choice, 0.0)
        return sign if self.strength is None else sign * self.strength / STRENGTHS

    def turned(self) -> Said:
        """The same said of the answers in the other order."""
        choice, left = FLIPPED.get(self.choice, self.choice), FLIPPED.get(self.left or "")
        return replace(self, choice=choice, left=left, ratings=placed(self.ratings, FLIPPED))


@dataclass(frozen=True, slots=True)
class Case:
    """Two answers of one prompt and what was said of them; the same whether it comes out of a store or goes into one."""

    first: Answer
    second: Answer
    said: tuple[Said, ...] = ()
    state: str = "open"
    needed: int = 1
    known: str | None = None
    round: str = ""
    strategy: str = ""
    details: Mapping[str, Any] = field(default_factory=dict)

    @property
    def item(self) -> str:
        """The name of the pair, whichever answer comes first: that of `pairs.Pair`."""
        return "/".join((self.first.prompt_id, *sorted((self.first.id, self.second.id))))

    @property
    def in_order(self) -> bool:
        return self.first.id <= self.second.id

    @property
    def settled(self) -> Said | None:
        """The word of the expert that ended it."""
        experts = [said for said in self.said if said.role != "annotator"]
        return experts[-1] if experts and self.state == "settled" else None


def turned(case: Case) -> Case:
    """The same case with its sides exchanged."""
    known = case.known and FLIPPED.get(case.known, case.known)
    return replace(case, first=case.second, second=case.first, said=tuple(s.turned() for s in case.said), known=known)


def placed(ratings: Mapping[str, int], places: Mapping[str, str]) -> dict[str, int]:
    """Ratings of an answer, `criterion/first` or `criterion/second`, under the names of these places; others as they are."""
    found = {}
    for name, value in ratings.items():
        criterion, slash, side = name.rpartition("/")
        found[f"{criterion}/{places[side]}" if slash and side in places else name] = value
    return found


def cases(
    store: Store, *, states: Sequence[str] = FINISHED, round: str | None = None, gold: bool = False, names: bool = False
) -> Iterator[Case]:
    """The tasks of these states with their answers and live judgments, in order; `gold` gives the gold questions instead."""
    last: Any = 0
    with store.reading() as session:
        query = select(TaskRow).where(TaskRow.state.in_(states), TaskRow.known.is_not(None) if gold else TaskRow.known.is_(None))
        query = query if round is None else query.where(TaskRow.round == round)
        while tasks := session.execute(query.where(TaskRow.id > last).order_by(TaskRow.id).limit(CHUNK)).scalars().all():
            yield from _filled(session, tasks, names)
            last = tasks[-1].id
            session.expunge_all()


def _filled(session: Session, tasks: Sequence[TaskRow], names: bool) -> Iterator[Case]:
    prompts = {task.prompt_id for task in tasks}
    sides = {side for task in tasks for side in (task.first_id, task.second_id)}
    asked = {row.id: row for row in session.execute(select(PromptRow).where(PromptRow.id.in_(prompts))).scalars()}
    answers = {
        row.id: _answer(asked[row.prompt_id], row)
        for row in session.execute(select(ResponseRow).where(ResponseRow.id.in_(sides))).scalars()
    }
    said: dict[int, list[Said]] = defaultdict(list)
    for judgment, person, left in session.execute(
        select(JudgmentRow, AnnotatorRow, AssignmentRow.left)
        .join(AnnotatorRow, AnnotatorRow.id == JudgmentRow.annotator_id)
        .join(AssignmentRow, AssignmentRow.id == JudgmentRow.assignment_id)
        .where(JudgmentRow.task_id.in_([task.id for task in tasks]), JudgmentRow.withdrawn.is_(None))
        .order_by(JudgmentRow.id)
    ):
        how = {name: getattr(judgment, name) for name in ("choice", "strength", "ratings", "seconds", "guidelines", "at")}
        name = person.name if names else f"annotator-{person.id}"
        said[judgment.task_id].append(Said(name, **how, left=left or None, role=person.role))
    for task in tasks:
        what = {name: getattr(task, name) for name in ("state", "needed", "known", "round", "strategy", "details")}
        yield Case(answers[task.first_id], answers[task.second_id], tuple(said[task.id or 0]), **what)


def _answer(prompt: PromptRow, row: ResponseRow) -> Answer:
    turns = [tuple(Message(m["role"], m["content"]) for m in part.messages) for part in (prompt, row)]
    origin = {name: getattr(row, name) for name in PROVENANCE}
    return Answer(turns[0], turns[1], prompt.group, **origin, prompt_details=prompt.details)


def comparisons(
    store: Store, how: How = "majority", *, round: str | None = None, names: bool = False, unfinished: bool = False
) -> Iterator[Comparison]:
    """What the store teaches: a comparison for every pair that was judged by as many people as asked.

    `majority`: what more than half said, probability 1; without that a tie. `soft`: the same, with the share of the votes as the
    probability (ties count half). `dawid-skene`: by how reliable each annotator is, with the posterior as the probability. Where
    an expert has decided, that holds. `annotations` has every vote; `margin` is the mean strength (1 to 3) where all gave one.

    Args:
        round: of these tasks only.
        unfinished: also those that wait for more judgments or for an expert, as far as they were judged.

    Raises:
        ConfigError: there is no such way; crowd-kit is missing for `dawid-skene`.
        DataError: `dawid-skene` finds no votes at all.
    """
    learned = learned_labels(store, how)
    states = ("open", "expert", *FINISHED) if unfinished else FINISHED
    for case in cases(store, states=states, round=round, names=names):
        if case.said:
            yield comparison(case, how, learned.get(case.item))


def learned_labels(store: Store, how: How) -> dict[str, Label]:
    """What Dawid–Skene makes of all votes by item, people being judged by their gold questions too; nothing for other ways.

    Raises:
        ConfigError: there is no such way.
    """
    if how not in get_args(How):
        raise ConfigError(f"labels are made by {', '.join(get_args(How))}, not by {how!r}")
    if how != "dawid-skene":
        return {}
    return {label.item: label for label in dawid_skene(votes(store, gold=True), gold=gold_answers(store)).labels}


def comparison(case: Case, how: How = "majority", label: Label | None = None) -> Comparison:
    """The comparison that a case with judgments makes; `label` is the pair's for `dawid-skene`."""
    counted = [case.settled] if case.settled else [s for s in case.said if s.role == "annotator"] or list(case.said)
    choices = [said.choice for said in counted]
    first, second, winner = choices.count("first"), choices.count("second"), majority(choices)
    if label is not None and not case.settled:
        share = label.probability if case.in_order else 1.0 - label.probability
        tie = label.verdict not in ("first", "second")
    elif how == "soft":
        share, tie = 0.5 + (first - second) / (2 * len(counted)), 2 * max(first, second) <= len(counted)
    else:
        share, tie = {"first": 1.0, "second": 0.0}.get(winner or "tie", 0.5), winner not in ("first", "second")
    turned = share < 0.5
    sign = -1.0 if turned else 1.0
    chosen, rejected = (case.second, case.first) if turned else (case.first, case.second)
    return Comparison(
        prompt=chosen.prompt,
        chosen=chosen.response,
        rejected=rejected.response,
        id=str(case.details.get("id") or "-".join(sorted(side.id[:12] for side in (chosen, rejected)))),
        group=chosen.group,
        margin=None if tie else _margin(counted, sign),
        tie=tie,
        probability=1.0 - share if turned else share,
        annotations=tuple(Annotation(said.annotator, said.preference * sign if said.preference else 0.0) for said in case.said),
        metadata=_metadata(case, chosen, rejected, tie),
    )


def _margin(said: Sequence[Said], sign: float) -> float | None:
    if any(one.strength is None and one.preference for one in said) or not any(one.strength for one in said):
        return None
    mean = sign * STRENGTHS * sum(one.preference for one in said) / len(said)
    return mean if mean > 0 else None


def _metadata(case: Case, chosen: Answer, rejected: Answer, tie: bool) -> dict[str, Any]:
    bad = [said.choice for said in ([case.settled] if case.settled else case.said) if said.choice in ("tie", "both_bad")]
    verdict = "chosen" if not tie else "both_bad" if 2 * bad.count("both_bad") > len(bad) else "tie"
    known = {f"chosen_{told}": getattr(chosen, name) for name, told in PROVENANCE.items()}
    known |= {f"rejected_{told}": getattr(rejected, name) for name, told in PROVENANCE.items()}
    known |= {"verdict": verdict, "round": case.round, "strategy": case.strategy}
    known |= {"guidelines": sorted({said.guidelines for said in case.said} - {0})}
    known |= {"settled_by": case.settled.annotator if case.settled else None}
    known |= {"state": None if case.state in FINISHED else case.state}
    told = {name: value for name, value in known.items() if value not in (None, "", {}, [])}
    return {**chosen.prompt_details, **case.details.get("metadata", {}), **told}


def votes(
    store: Store, *, round: str | None = None, names: bool = False, gold: bool = False, experts: bool = False
) -> Iterator[Vote]:
    """What everybody said of every pair, finished or not; `gold` adds gold questions, `experts` their votes."""
    states = ("open", "expert", *FINISHED)
    for is_gold in (False, True) if gold else (False,):
        for case in cases(store, states=states, round=round, gold=is_gold, names=names):
            slices = {"strategy": case.strategy, "round": case.round, **case.first.prompt_details}
            short = {name: value for name, value in slices.items() if isinstance(value, str) and 0 < len(value) <= LONGEST_SLICE}
            for said in case.said:
                if experts or said.role == "annotator":
                    yield _vote(case, said, short)


def _vote(case: Case, said: Said, slices: Mapping[str, str]) -> Vote:
    turn = (lambda side: side) if case.in_order else (lambda side: FLIPPED.get(side, side))
    strength = STRENGTHS * said.preference * (1 if case.in_order else -1)
    value = turn(said.choice) if said.strength is None or not strength else strength
    more = {"seconds": said.seconds or None, "shown_left": turn(said.left), "slices": slices}
    return Vote(case.item, said.annotator, value, said.at, **more)


@dataclass(frozen=True, slots=True)
class Worker:
    """What one person has done; `seconds` is the median of what a judgment took, where that is known."""

    name: str
    role: str
    judged: int
    seconds: float | None
    access: str


def workload(store: Store) -> list[Worker]:
    """Everybody, those with most judgments first."""
    times: dict[int, list[float]] = defaultdict(list)
    query = select(JudgmentRow.annotator_id, JudgmentRow.seconds).where(JudgmentRow.withdrawn.is_(None))
    with store.reading() as session:
        for person, seconds in session.execute(query):
            times[person].append(seconds)
    found = []
    for row in store.annotators():
        mine, known = times[row.id or 0], [seconds for seconds in times[row.id or 0] if seconds > 0]
        access = "locked out" if row.disabled else "invited" if row.invitation else "imported"
        found.append(Worker(row.name, row.role, len(mine), median(known) if known else None, access))
    return sorted(found, key=lambda worker: (-worker.judged, worker.name))


def gold_answers(store: Store) -> dict[str, str]:
    """The known choices of the gold questions by item, as votes on them are given."""
    found = cases(store, states=("open", "expert", *FINISHED), gold=True)
    return {case.item: case.known if case.in_order else FLIPPED.get(case.known, case.known) for case in found if case.known}
