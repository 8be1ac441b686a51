"""The content of a store for those who use it: cases with their judgments, comparisons to learn
from, votes to compare.

Rows come as a stream, in the order of their tasks, as of one moment; gold questions and judgments
that were taken back stay out. People are called annotator-1, annotator-2 ... unless names are asked
for; secrets are never part of it.
"""

# SQLModel types columns as the values in them, so that conditions on columns look like plain bools.
# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false, reportOptionalMemberAccess=false

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import KW_ONLY, dataclass, field, replace
from statistics import median
from typing import Literal, TypedDict, Unpack, get_args

from sqlalchemy import ColumnElement, and_, exists, or_, select

from tether.core.errors import ConfigError
from tether.core.types import Annotation, Comparison, Facts, Json, Texts, turned_facts
from tether.people.annotation.queries import ESCALATED, JUDGED, OPEN, TASKS
from tether.people.annotation.store import ORIGIN, Answer, Store, answer_of
from tether.people.annotation.tables import (
    AnnotatorRow,
    AssignmentRow,
    FlagRow,
    JudgmentRow,
    PromptRow,
    TaskRow,
)
from tether.people.labels.aggregation import Label, dawid_skene
from tether.people.labels.quality import Share
from tether.people.labels.votes import FLIPPED, STRENGTHS, Opinion, Vote, as_verdict, more_than_half

How = Literal["majority", "soft", "dawid-skene"]
CHUNK = 500
FINISHED = ("done", "settled")
LONGEST_SLICE = 40
COMPUTED = ("verdict", "round", "strategy", "guidelines", "settled_by", "state")
"""Facts that a store adds to those of each comparison."""
PROVENANCE = {
    name: {"score": "reward_score", "spread": "reward_spread"}.get(name, name) for name in ORIGIN
}
"""Fields of an answer and what they are called in a comparison's metadata, after `chosen_` or
`rejected_`.
"""


@dataclass(frozen=True)
class Case:
    """Two answers of one prompt and the opinions on them; the same whether it comes out of a store
    or goes into one.

    `replaced` counts earlier judgments by people who judged again: the later ones are among the
    opinions.
    """

    first: Answer
    second: Answer
    opinions: tuple[Opinion, ...] = ()
    _: KW_ONLY
    state: str = "open"
    needed: int = 1
    known: str | None = None
    round: str = ""
    strategy: str = ""
    details: Facts = field(default_factory=dict)
    replaced: int = 0
    number: int = 0
    """The task of the store."""
    flags: tuple[str, ...] = ()
    """Reasons for which it waits for an expert."""

    @property
    def item(self) -> str:
        """The name of the pair, whichever answer comes first: that of `pairs.Pair`."""
        return f"{self.first.prompt_id}/{self.pair}"

    @property
    def pair(self) -> str:
        return "/".join(sorted((self.first.id, self.second.id)))

    @property
    def in_order(self) -> bool:
        return self.first.id <= self.second.id

    @property
    def settled(self) -> Opinion | None:
        """The word of the expert that ended it."""
        experts = [opinion for opinion in self.opinions if opinion.role != "annotator"]
        return experts[-1] if experts and self.state == "settled" else None


def turned(case: Case) -> Case:
    """The same case with its sides exchanged."""
    opinions = tuple(opinion.placed(FLIPPED) for opinion in case.opinions)
    gold = FLIPPED.get(case.known or "", case.known)
    metadata = turned_facts(case.details.get("metadata", {}))
    details = {**case.details, "metadata": metadata} if metadata else case.details
    return replace(
        case,
        first=case.second,
        second=case.first,
        opinions=opinions,
        known=gold,
        details=details,
    )


def ordered(case: Case) -> Case:
    """The same case with its sides in the order of their ids, as votes on it are given."""
    return case if case.in_order else turned(case)


def opinion_of(
    judgment: JudgmentRow,
    lease: AssignmentRow,
    annotator: str = "",
) -> Opinion:
    """The opinion that two rows hold; without a name its annotator has a number."""
    return Opinion(
        judgment.choice,
        judgment.strength,
        judgment.ratings,
        judgment.comment,
        correction=judgment.correction,
        seconds=judgment.seconds,
        guidelines=judgment.guidelines,
        annotator=annotator or f"annotator-{judgment.annotator_id}",
        left=lease.left or None,
        at=judgment.at,
        role=lease.role,
    )


def cases(
    store: Store,
    *only: object,
    round: str | None = None,
    names: bool = False,
    question: str | None = None,
    at_once: int = CHUNK,
) -> Iterator[Case]:
    """The tasks that meet these conditions, with their answers and live judgments, in order: of a
    further question, with those that answer it.
    """
    query = TASKS.where(*only).order_by(TaskRow.id).limit(at_once)
    query = query if round is None else query.where(TaskRow.round == round)
    last = 0
    with store.reading() as session:
        while rows := session.execute(query.where(TaskRow.id > last)).all():
            opinions: dict[int, list[Opinion]] = {row[0].id: [] for row in rows}
            judged = JUDGED.where(JudgmentRow.task_id.in_(opinions)).order_by(JudgmentRow.id)
            for judgment, lease, person in session.execute(judged):
                name = person.name if names else ""
                if opinion := opinion_of(judgment, lease, name).on(question):
                    opinions[judgment.task_id].append(opinion)
            flags = session.scalars(
                select(FlagRow).where(FlagRow.task_id.in_(opinions), OPEN),
            ).all()
            for task, prompt, *sides in rows:
                yield Case(
                    *(answer_of(prompt, side) for side in sides),
                    tuple(opinions[task.id]),
                    state=task.state,
                    needed=task.needed,
                    known=task.known,
                    round=task.round,
                    strategy=task.strategy,
                    details=task.details,
                    number=task.id,
                    flags=tuple(one.reason for one in flags if one.task_id == task.id),
                )
            last = rows[-1][0].id
            session.expunge_all()


class Which(TypedDict, total=False):
    """The judged cases to make labels of, and how their people are called: see `comparisons`."""

    round: str | None
    names: bool
    unfinished: bool
    least: float
    question: str | None


def comparisons(
    store: Store,
    how: How = "majority",
    **which: Unpack[Which],
) -> Iterator[Comparison]:
    """The comparisons that a store teaches: one for every pair that was judged by as many people as
    asked.

    `majority`: what more than half said, probability 1; without that a tie. `soft`: the share of
    the votes as the probability (ties count half), also of pairs that wait for an expert only
    because no choice has more than half; a tie where the share is one half. `dawid-skene`: by how
    reliable each annotator is, with the posterior as the probability. Where an expert has decided,
    that holds.
    `annotations` has every vote; `margin` is the mean strength (1 to 3) where all gave one.

    Args:
        round: of these tasks only.
        names: annotators by their names.
        unfinished: also those that wait for more judgments or for an expert, as far as they were
            judged.
        least: the least support of a label (`sureness`); pairs below it are left out.
        question: a further question, whose answers count in place of the overall choices.

    Raises:
        ConfigError: there is no such way.
        DataError: `dawid-skene` finds no votes at all.
    """
    return (label for case, label in labelled(store, how, **which) if case.opinions)


def ready(how: How) -> ColumnElement[bool]:
    """The condition that a task has enough judgments for a label of this kind. For `soft` all its votes
    are enough, unless it was flagged or escalated to the experts.
    """
    flagged = exists().where(FlagRow.task_id == TaskRow.id, OPEN)
    escalated = TaskRow.details[ESCALATED].as_boolean()
    voted = and_(how == "soft", TaskRow.judged >= TaskRow.needed, escalated.is_(None), ~flagged)
    return or_(TaskRow.state.in_(FINISHED), voted)


def labelled(
    store: Store,
    how: How,
    *,
    below: float = math.inf,
    **which: Unpack[Which],
) -> Iterator[tuple[Case, Comparison]]:
    """As `comparisons`, each with its case, and cases without judgments as ties. `below`: less sure
    ones only.

    Raises:
        ConfigError: there is no such way to a label.
    """
    if how not in get_args(How):
        raise ConfigError(f"labels are made by {', '.join(get_args(How))}, not by {how!r}")
    # People are judged by their gold questions too.
    question = which.get("question")
    fit = (
        dawid_skene(
            votes(store, gold=True, question=question),
            gold={} if question else gold_answers(store),
        ).labels
        if how == "dawid-skene"
        else ()
    )
    learned = {label.item: label for label in fit}
    for case in cases(
        store,
        or_(ready(how), which.get("unfinished", False)),
        TaskRow.known.is_(None),
        round=which.get("round"),
        names=which.get("names", False),
        question=question,
    ):
        label = learned.get(case.item)
        if not case.opinions or which.get("least", 0.0) <= sureness(case, label) < below:
            yield case, comparison_of(case, how, label)


def sureness(case: Case, label: Label | None = None) -> float:
    """The support of a judged case's label: its largest share of votes, or the posterior of
    `label`. If an expert has decided, 1.
    """
    if case.settled:
        return 1.0
    counts = Counter(as_verdict(opinion.choice) for opinion in case.opinions)
    return label.confidence if label else max(counts.values()) / counts.total()


def comparison_of(case: Case, how: How = "majority", label: Label | None = None) -> Comparison:
    """The comparison that a case makes, without judgments a tie; `label` is the pair's for
    `dawid-skene`.
    """
    counted = (
        [case.settled]
        if case.settled
        else [o for o in case.opinions if o.role == "annotator"] or list(case.opinions)
    )
    choices = [opinion.choice for opinion in counted]
    share = 0.5 + (choices.count("first") - choices.count("second")) / (2 * max(1, len(counted)))
    fit = None if case.settled else label
    if fit:
        share = fit.probability if case.in_order else 1.0 - fit.probability
    elif how != "soft":
        share = {"first": 1.0, "second": 0.0}.get(more_than_half(choices) or "tie", 0.5)
    if share < 0.5:
        return comparison_of(turned(case), how, label)
    tie = fit.verdict not in FLIPPED if fit else share == 0.5
    chosen, rejected = case.first, case.second
    return Comparison(
        prompt=chosen.prompt,
        chosen=chosen.response,
        rejected=rejected.response,
        id=str(
            case.details.get("id") or "-".join(sorted(side.id[:12] for side in (chosen, rejected))),
        ),
        group=chosen.group,
        margin=None if tie else _margin(counted),
        tie=tie,
        probability=share,
        annotations=tuple(Annotation(o.annotator, o.preference) for o in case.opinions),
        metadata=_metadata(case, tie),
    )


def _margin(opinions: Sequence[Opinion]) -> float | None:
    """The mean strength, positive for the chosen side; None if a judgment has none."""
    if any(one.strength is None and one.preference for one in opinions) or not any(
        one.strength for one in opinions
    ):
        return None
    mean = STRENGTHS * sum(one.preference for one in opinions) / len(opinions)
    return mean if mean > 0 else None


def _metadata(case: Case, tie: bool) -> Json:
    settled = case.settled
    opinions = [case.settled] if case.settled else case.opinions
    bad = [opinion.choice for opinion in opinions if opinion.choice in ("tie", "both_bad")]
    sides = {"chosen": case.first, "rejected": case.second}
    computed = (
        "chosen" if not tie else "both_bad" if 2 * bad.count("both_bad") > len(bad) else "tie",
        case.round,
        case.strategy,
        sorted({opinion.guidelines for opinion in case.opinions} - {0}),
        settled.annotator if settled else None,
        None if case.state in FINISHED else case.state,
    )
    facts = {
        f"{side}_{fact}": getattr(sides[side], name)
        for side in sides
        for name, fact in PROVENANCE.items()
    } | dict(zip(COMPUTED, computed, strict=True))
    given = {name: value for name, value in facts.items() if value not in (None, "", {}, [])}
    brought = {
        f"imported_{name}" if name in given else name: value
        for name, value in case.details.get("metadata", {}).items()
    }
    return {**case.first.prompt_details, **brought, **given}


def votes(
    store: Store,
    *,
    round: str | None = None,
    names: bool = False,
    gold: bool = False,
    experts: bool = False,
    question: str | None = None,
) -> Iterator[Vote]:
    """The votes of annotators on every pair, finished or not, overall or on a further question;
    `gold` adds gold questions, `experts` the experts' votes.
    """
    query = JUDGED.add_columns(TaskRow, PromptRow.details).join(
        TaskRow,
        TaskRow.id == JudgmentRow.task_id,
    )
    query = query.join(PromptRow, PromptRow.id == TaskRow.prompt_id).order_by(
        TaskRow.id,
        JudgmentRow.id,
    )
    query = query if round is None else query.where(TaskRow.round == round)
    query = query if gold else query.where(TaskRow.known.is_(None))
    query = query if experts else query.where(AssignmentRow.role == "annotator")
    with store.reading() as session:  # not by `cases`: the texts would cost two thirds more
        for judgment, lease, person, task, details in session.execute(
            query.execution_options(yield_per=CHUNK),
        ):
            opinion = opinion_of(judgment, lease, person.name if names else "").on(question)
            if opinion is None:
                continue
            opinion = opinion.placed(FLIPPED) if task.first_id > task.second_id else opinion
            graded = opinion.strength is not None and opinion.choice in FLIPPED
            value = opinion.preference * STRENGTHS if graded else opinion.choice
            slices = {"strategy": task.strategy, "round": task.round, **details}
            short = {
                key: text
                for key, text in slices.items()
                if isinstance(text, str) and 0 < len(text) <= LONGEST_SLICE
            }
            seconds = opinion.seconds or None
            expert = opinion.role != "annotator"
            item = f"{task.prompt_id}/{task.pair}"
            yield Vote(
                item,
                opinion.annotator,
                value,
                opinion.at,
                seconds=seconds,
                shown_left=opinion.left,
                slices=short,
                expert=expert,
            )


def gold_answers(store: Store) -> dict[str, str]:
    """The known choices of the gold questions by item, as votes on them are given.

    Of a question that was flagged it is the expert's choice; one that waits for an expert has none.
    """
    golden = map(ordered, cases(store, TaskRow.known.is_not(None), TaskRow.state != "expert"))
    return {case.item: case.settled.choice if case.settled else str(case.known) for case in golden}


def gold_items(store: Store) -> set[str]:
    """The items of all gold questions, those that were flagged included."""
    golden = select(TaskRow.prompt_id, TaskRow.pair).where(TaskRow.known.is_not(None))
    with store.reading() as session:
        return {f"{prompt}/{pair}" for prompt, pair in session.execute(golden)}


@dataclass(frozen=True, kw_only=True)
class Worker:
    """The work of one person; `seconds` is the median of what a judgment took, where that is known.

    `agrees` is with each other vote of annotators on the same pairs, gold questions left out;
    `left` is of sided choices.
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
    return workers(
        store.annotators(),
        list(votes(store, names=True, gold=True, experts=True)),
        gold_answers(store),
        gold_items(store),
    )


def workers(
    people: Iterable[AnnotatorRow],
    cast: Sequence[Vote],
    gold: Texts,
    golden: Set[str],
) -> list[Worker]:
    """Everybody, from all votes, by name, the known answers, and the items of gold questions."""
    by_person = defaultdict(list)
    verdicts = defaultdict(Counter)
    for vote in cast:
        by_person[vote.annotator].append(vote)
        if vote.item not in golden and not vote.expert:
            verdicts[vote.item][vote.verdict] += 1

    def worker(person: AnnotatorRow) -> Worker:
        own = by_person[person.name]
        compared = [vote for vote in own if not vote.expert and vote.item not in golden]
        same = sum(verdicts[vote.item][vote.verdict] - 1 for vote in compared)
        return Worker(
            name=person.name,
            role=person.role,
            access="locked out"
            if person.disabled
            else "invited"
            if person.invitation
            else "imported",
            judged=len(own),
            seconds=median(times)
            if (times := [vote.seconds for vote in own if vote.seconds])
            else None,
            agrees=Share(same, sum(verdicts[vote.item].total() - 1 for vote in compared)),
            left=Share.of(vote.chose_left for vote in own),
            gold=Share.of(
                vote.verdict == as_verdict(gold[vote.item]) for vote in own if vote.item in gold
            ),
            last=max((vote.at for vote in own), default=None),
        )

    return sorted(map(worker, people), key=lambda worker: (-worker.judged, worker.name))
