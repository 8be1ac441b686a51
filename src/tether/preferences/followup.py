"""What votes lead to beside labels: pairs that people do not agree on go to the experts, answers and models get a place."""

# SQLModel types columns as the values in them, so that conditions on columns look like plain bools.
# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from sqlalchemy import select, update

from tether.preferences.aggregation import bradley_terry
from tether.preferences.exchange import How, labelled, votes
from tether.preferences.store import PART, Store
from tether.preferences.tables import PromptRow, ResponseRow, TaskRow
from tether.preferences.votes import latest_votes


def escalate(store: Store, below: float, how: How = "soft", *, round: str | None = None) -> int:
    """Send judged pairs whose label has less than this behind it (`exchange.sureness`) to the experts; returns how many."""
    unsure = defaultdict(list)
    for case, _ in labelled(store, how, round=round, below=below):
        if case.state == "done":
            unsure[case.round].append(case.item.partition("/")[2])
    sent = 0
    with store.transaction() as session:
        for name, pairs in unsure.items():
            for start in range(0, len(pairs), PART):
                done = (TaskRow.round == name, TaskRow.state == "done", TaskRow.pair.in_(pairs[start : start + PART]))
                sent += session.execute(update(TaskRow).where(*done).values(state="expert")).rowcount
    return sent


@dataclass(frozen=True, slots=True)
class Standing:
    """A model's place among those whose answers were compared: its score in log-odds, and the votes on its answers."""

    model: str
    score: float
    won: int
    tied: int
    lost: int


def standings(store: Store, *, round: str | None = None) -> list[Standing]:
    """Models by the votes on their answers to the same prompts (Bradley–Terry), the best first; experts' votes count, too.

    Pairs of one model's answers, and answers of unknown models, say nothing here. The scores have mean 0; a prior of one tie
    with an average model keeps those of few votes near it.
    """
    with store.reading() as session:
        models = dict(session.execute(select(ResponseRow.id, ResponseRow.model)).all())
    said = list(votes(store, round=round, experts=True))
    sides = {vote.item: tuple(models.get(side, "") for side in vote.item.split("/")[1:]) for vote in said}
    said = [vote for vote in said if all(sides[vote.item]) and len(set(sides[vote.item])) == 2]
    scores, tallies = bradley_terry(said, sides), defaultdict(Counter)
    for vote in latest_votes(said)[0]:
        first, second = sides[vote.item]
        tallies[first][vote.verdict] += 1
        tallies[second][{"first": "second", "second": "first"}.get(vote.verdict, "tie")] += 1
    return [Standing(name, score, *(tallies[name][how] for how in ("first", "tie", "second"))) for name, score in scores.items()]


def ranked(store: Store, *, round: str | None = None) -> Iterator[dict[str, Any]]:
    """Every prompt whose answers were compared, with these answers from best to worst and their Bradley–Terry scores.

    The rows are in a layout of `tether.data` (responses with scores). One fit is that of all prompts: their answers meet in the
    prior's imaginary answer alone, which ties the fits' origins together and changes nothing else.
    """
    said = list(votes(store, round=round, experts=True))
    scores = bradley_terry(said, {vote.item: tuple(vote.item.split("/")[1:]) for vote in said})
    by_prompt: dict[str, set[str]] = defaultdict(set)
    for vote in said:
        prompt, *sides = vote.item.split("/")
        by_prompt[prompt].update(sides)
    with store.reading() as session:
        for prompt, answers in sorted(by_prompt.items()):
            asked = session.get_one(PromptRow, prompt)
            rows = session.execute(select(ResponseRow).where(ResponseRow.id.in_(answers))).scalars().all()
            rows = sorted(rows, key=lambda row: (-scores[row.id], row.id))
            mean = sum(scores[row.id] for row in rows) / len(rows)
            yield {
                "prompt": asked.messages,
                "responses": [row.messages[-1]["content"] for row in rows],
                "scores": [scores[row.id] - mean for row in rows],
                "models": [row.model for row in rows],
                "group": asked.group,
            }
