"""What a store holds, for those who use it: cases with all that was said of them, comparisons to learn from, votes to compare.

Rows come as a stream, in the order of their tasks, as of one moment; gold questions and judgments that were taken back stay out.
People are called annotator-1, annotator-2 ... unless names are asked for; secrets and comments are never part of it.
"""

# SQLModel types columns as the values in them, so that conditions on columns look like plain bools.
# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false, reportOptionalMemberAccess=false

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any, Literal, get_args

from sqlalchemy import select
from sqlmodel import Session

from tether.core.errors import ConfigError
from tether.core.types import Annotation, Comparison
from tether.preferences.aggregation import Label, dawid_skene
from tether.preferences.rows import turns_of
from tether.preferences.store import Answer, Store
from tether.preferences.tables import AnnotatorRow, AssignmentRow, JudgmentRow, PromptRow, ResponseRow, TaskRow
from tether.preferences.votes import Choice, Side, Vote, more_than_half

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
    parts = [(name, *name.rpartition("/")) for name in ratings]
    return {f"{of}/{places[side]}" if slash and side in places else name: ratings[name] for name, of, slash, side in parts}


def cases(store: Store, *, states: Sequence[str] = FINISHED, round: str | None = None, names: bool = False) -> Iterator[Case]:
    """The tasks of these states with their answers and live judgments, in order; gold questions are left out."""
    last: Any = 0
    with store.reading() as session:
        query = select(TaskRow).where(TaskRow.state.in_(states), TaskRow.known.is_(None))
        query = query if round is None else query.where(TaskRow.round == round)
        while tasks := session.execute(query.where(TaskRow.id > last).order_by(TaskRow.id).limit(CHUNK)).scalars().all():
            yield from _filled(session, tasks, names)
            last = tasks[-1].id
            session.expunge_all()


def _filled(session: Session, tasks: Sequence[TaskRow], names: bool) -> Iterator[Case]:
    prompts = {task.prompt_id for task in tasks}
    sides = {side for task in tasks for side in (task.first_id, task.second_id)}
    asked = {row.id: row for row in session.execute(select(PromptRow).where(PromptRow.id.in_(prompts))).scalars()}
    answers = {}
    for row in session.execute(select(ResponseRow).where(ResponseRow.id.in_(sides))).scalars():
        prompt, origin = asked[row.prompt_id], {name: getattr(row, name) for name in PROVENANCE}
        turns, told = (turns_of(prompt.messages), turns_of(row.messages)), {**origin, "prompt_details": prompt.details}
        answers[row.id] = Answer(*turns, prompt.group, **told)
    said: dict[int, list[Said]] = defaultdict(list)
    for judgment, person, left, role in session.execute(
        select(JudgmentRow, AnnotatorRow, AssignmentRow.left, AssignmentRow.role)
        .join(AnnotatorRow, AnnotatorRow.id == JudgmentRow.annotator_id)
        .join(AssignmentRow, AssignmentRow.id == JudgmentRow.assignment_id)
        .where(JudgmentRow.task_id.in_([task.id for task in tasks]), JudgmentRow.withdrawn.is_(None))
        .order_by(JudgmentRow.id)
    ):
        how = {name: getattr(judgment, name) for name in ("choice", "strength", "ratings", "seconds", "guidelines", "at")}
        name = person.name if names else f"annotator-{person.id}"
        said[judgment.task_id].append(Said(name, **how, left=left or None, role=role))
    for task in tasks:
        what = {name: getattr(task, name) for name in ("state", "needed", "known", "round", "strategy", "details")}
        yield Case(answers[task.first_id], answers[task.second_id], tuple(said[task.id or 0]), **what)


def comparisons(
    store: Store,
    how: How = "majority",
    *,
    round: str | None = None,
    names: bool = False,
    unfinished: bool = False,
    least: float = 0.0,
) -> Iterator[Comparison]:
    """What the store teaches: a comparison for every pair that was judged by as many people as asked.

    `majority`: what more than half said, probability 1; without that a tie. `soft`: the same, with the share of the votes as the
    probability (ties count half). `dawid-skene`: by how reliable each annotator is, with the posterior as the probability. Where
    an expert has decided, that holds. `annotations` has every vote; `margin` is the mean strength (1 to 3) where all gave one.

    Args:
        round: of these tasks only.
        unfinished: also those that wait for more judgments or for an expert, as far as they were judged.
        least: pairs whose label has less than this behind it are left out (`sureness`).

    Raises:
        ConfigError: there is no such way.
        DataError: `dawid-skene` finds no votes at all.
    """
    found = labelled(store, how, round=round, names=names, unfinished=unfinished, least=least)
    return (label for _, label in found if label is not None)


def labelled(
    store: Store,
    how: How,
    *,
    round: str | None = None,
    names: bool = False,
    unfinished: bool = False,
    least: float = 0.0,
    below: float = math.inf,
) -> Iterator[tuple[Case, Comparison | None]]:
    """As `comparisons`, each with its case; of a case without judgments there is no comparison. `below`: less sure ones only.

    Raises:
        ConfigError: there is no such way to a label.
    """
    if how not in get_args(How):
        raise ConfigError(f"labels are made by {', '.join(get_args(How))}, not by {how!r}")
    # People are judged by their gold questions too.
    fit = dawid_skene(votes(store, gold=True), gold=gold_answers(store)).labels if how == "dawid-skene" else ()
    learned = {label.item: label for label in fit}
    states = ("open", "expert", *FINISHED) if unfinished else FINISHED
    for case in cases(store, states=states, round=round, names=names):
        label = learned.get(case.item)
        if not case.said or least <= sureness(case, label) < below:
            yield case, comparison(case, how, label) if case.said else None


def sureness(case: Case, label: Label | None = None) -> float:
    """What stands behind the label of a judged case: the largest share of its votes, or the posterior of `label`; 1 where an
    expert has decided."""
    if case.settled:
        return 1.0
    counts = Counter("tie" if said.choice == "both_bad" else said.choice for said in case.said)
    return label.confidence if label else max(counts.values()) / counts.total()


def comparison(case: Case, how: How = "majority", label: Label | None = None) -> Comparison:
    """The comparison that a case with judgments makes; `label` is the pair's for `dawid-skene`."""
    counted = [case.settled] if case.settled else [s for s in case.said if s.role == "annotator"] or list(case.said)
    choices = [said.choice for said in counted]
    first, second, winner = choices.count("first"), choices.count("second"), more_than_half(choices)
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


_VOTES = (
    select(
        TaskRow.prompt_id, TaskRow.pair, TaskRow.first_id, TaskRow.second_id, TaskRow.strategy, TaskRow.round, PromptRow.details,
        AnnotatorRow.id, AnnotatorRow.name, AssignmentRow.left, AssignmentRow.role, JudgmentRow.choice, JudgmentRow.strength,
        JudgmentRow.seconds, JudgmentRow.at,
    )
    .join(JudgmentRow, JudgmentRow.task_id == TaskRow.id)
    .join(PromptRow, PromptRow.id == TaskRow.prompt_id)
    .join(AnnotatorRow, AnnotatorRow.id == JudgmentRow.annotator_id)
    .join(AssignmentRow, AssignmentRow.id == JudgmentRow.assignment_id)
    .where(JudgmentRow.withdrawn.is_(None))
    .order_by(TaskRow.id, JudgmentRow.id)
)  # fmt: skip


def votes(
    store: Store, *, round: str | None = None, names: bool = False, gold: bool = False, experts: bool = False
) -> Iterator[Vote]:
    """What everybody said of every pair, finished or not; `gold` adds gold questions, `experts` their votes."""
    query = _VOTES if round is None else _VOTES.where(TaskRow.round == round)
    query = query if gold else query.where(TaskRow.known.is_(None))
    query = query if experts else query.where(AssignmentRow.role == "annotator")
    with store.reading() as session:
        for prompt, pair, first, second, strategy, batch, details, number, name, left, role, choice, strength, seconds, at in (
            session.execute(query.execution_options(yield_per=CHUNK))
        ):  # fmt: skip
            turn = FLIPPED if first > second else {}
            value, slices = turn.get(choice, choice), {"strategy": strategy, "round": batch, **details}
            short = {key: text for key, text in slices.items() if isinstance(text, str) and 0 < len(text) <= LONGEST_SLICE}
            if strength is not None and value in FLIPPED:
                value = float(strength if value == "first" else -strength)
            who, side = name if names else f"annotator-{number}", turn.get(left, left) or None
            yield Vote(f"{prompt}/{pair}", who, value, at, seconds or None, side, short, role != "annotator")


def gold_answers(store: Store) -> dict[str, str]:
    """The known choices of the gold questions by item, as votes on them are given: what an expert said of one that was flagged,
    and none for one that waits for that."""
    ruled = select(JudgmentRow.task_id, JudgmentRow.choice).join(AssignmentRow, AssignmentRow.id == JudgmentRow.assignment_id)
    ruled = ruled.join(TaskRow, TaskRow.id == JudgmentRow.task_id).where(TaskRow.known.is_not(None), TaskRow.state == "settled")
    ruled = ruled.where(JudgmentRow.withdrawn.is_(None), AssignmentRow.role != "annotator").order_by(JudgmentRow.id)
    query = select(TaskRow.id, TaskRow.prompt_id, TaskRow.pair, TaskRow.first_id, TaskRow.second_id, TaskRow.known)
    query = query.where(TaskRow.known.is_not(None), TaskRow.state != "expert").order_by(TaskRow.id)
    with store.reading() as session:
        experts, rows = dict(session.execute(ruled).all()), session.execute(query).all()
    known = [(f"{prompt}/{pair}", a > b, experts.get(key, choice)) for key, prompt, pair, a, b, choice in rows]
    return {item: FLIPPED.get(choice, choice) if turned else choice for item, turned, choice in known}


@dataclass(frozen=True)
class Share:
    """So many of so many."""

    part: int
    whole: int

    def __str__(self) -> str:
        return f"{self.part / self.whole:.0%} of {self.whole}" if self.whole else "–"

    @classmethod
    def of(cls, flags: Iterable[bool | None]) -> Share:
        """How many of those that are known are true."""
        known = [flag for flag in flags if flag is not None]
        return cls(sum(known), len(known))


@dataclass(frozen=True, slots=True)
class Worker:
    """What one person has done; `seconds` is the median of what a judgment took, where that is known.

    `agrees` is with each other vote of annotators on the same pairs, gold questions left out; `left` is of sided choices.
    """

    name: str
    role: str
    access: str
    judged: int
    seconds: float | None
    agrees: Share
    left: Share
    gold: Share
    last: float | None


def workload(store: Store) -> list[Worker]:
    """Everybody, those with most judgments first."""
    return workers(store.annotators(), list(votes(store, names=True, gold=True, experts=True)), gold_answers(store))


def workers(people: Iterable[AnnotatorRow], said: Sequence[Vote], gold: Mapping[str, str]) -> list[Worker]:
    """Everybody, from all that was said, by name, and the known answers."""
    people, mine, verdicts = list(people), defaultdict(list), defaultdict(Counter)
    for vote in said:
        mine[vote.annotator].append(vote)
        if vote.item not in gold and not vote.expert:
            verdicts[vote.item][vote.verdict] += 1
    found = []
    for row in people:
        own, times = mine[row.name], [vote.seconds for vote in mine[row.name] if vote.seconds]
        compared = [vote for vote in own if not vote.expert and vote.item not in gold]
        same = sum(verdicts[vote.item][vote.verdict] - 1 for vote in compared)
        found.append(Worker(
            name=row.name,
            role=row.role,
            access="locked out" if row.disabled else "invited" if row.invitation else "imported",
            judged=len(own),
            seconds=median(times) if times else None,
            agrees=Share(same, sum(verdicts[vote.item].total() - 1 for vote in compared)),
            left=Share.of(vote.chose_left for vote in own),
            gold=Share.of(vote.verdict == gold[vote.item].replace("both_bad", "tie") for vote in own if vote.item in gold),
            last=max((vote.at for vote in own), default=None),
        ))  # fmt: skip
    return sorted(found, key=lambda worker: (-worker.judged, worker.name))
