"""Uses of votes beside labels: disputed pairs go to the experts, answers and models are ranked, and
a judge's win rates are corrected.
"""

# SQLModel types columns as the values in them, so that conditions on columns look like plain bools.
# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import KW_ONLY, dataclass
from statistics import fmean

import numpy as np
from sqlalchemy import select

from tether.core.errors import DataError
from tether.core.types import Comparison, Json
from tether.people.annotation.exchange import How, comparisons, labelled, votes
from tether.people.annotation.queries import ESCALATED
from tether.people.annotation.store import Store
from tether.people.annotation.tables import PromptRow, ResponseRow, TaskRow
from tether.people.labels.aggregation import bradley_terry
from tether.people.labels.votes import FLIPPED, latest_votes
from tether.stats import grouped_mean
from tether.stats.prediction_powered import prediction_powered_win_rate


def escalate(store: Store, below: float, how: How = "soft", *, round: str | None = None) -> int:
    """Send judged pairs whose label has less than this behind it (`exchange.sureness`) to the
    experts, where they stay until one decides, also those that wait for one already; returns how
    many.
    """
    unsure = [(case.pair, case.round) for case, _ in labelled(store, how, round=round, below=below)]
    sent = 0
    with store.transaction() as session:
        for pair, batch in unsure:
            judged = (TaskRow.pair == pair, TaskRow.round == batch)
            undecided = TaskRow.state.in_(("done", "expert"))
            for task in session.scalars(select(TaskRow).where(*judged, undecided)):
                task.state = "expert"
                task.details = {**task.details, ESCALATED: True}
                sent += 1
    return sent


@dataclass(frozen=True)
class Standing:
    """A model's place among those whose answers were compared: its score in log-odds, and the votes
    on its answers.
    """

    model: str
    score: float
    won: int
    _: KW_ONLY
    tied: int
    lost: int


def standings(store: Store, *, round: str | None = None) -> list[Standing]:
    """Models by the votes on their answers to the same prompts (Bradley–Terry), the best first;
    experts' votes count, too.

    Pairs of one model's answers, and answers of unknown models, say nothing here. The scores have
    mean 0; a prior of one tie with an average model keeps those of few votes near it.
    """
    with store.reading() as session:
        models = dict(session.execute(select(ResponseRow.id, ResponseRow.model)).all())
    cast = list(votes(store, round=round, experts=True))
    sides = {
        vote.item: tuple(models.get(side, "") for side in vote.item.split("/")[1:]) for vote in cast
    }
    cast = [vote for vote in cast if all(sides[vote.item]) and len(set(sides[vote.item])) == 2]
    scores = bradley_terry(cast, sides)
    tallies = defaultdict(Counter)
    for vote in latest_votes(cast)[0]:
        first, second = sides[vote.item]
        tallies[first][vote.verdict] += 1
        tallies[second][FLIPPED.get(vote.verdict, "tie")] += 1
    return [
        Standing(name, score, won=tally["first"], tied=tally["tie"], lost=tally["second"])
        for name, score in scores.items()
        for tally in [tallies[name]]
    ]


def ranked(store: Store, *, round: str | None = None) -> Iterator[Json]:
    """Every prompt whose answers were compared, with these answers from best to worst and their
    Bradley–Terry scores.

    The rows are in a layout of `tether.data` (responses with scores). One fit covers all prompts.
    Only the prior's imaginary answer connects them, which gives all scores one origin.
    """
    cast = list(votes(store, round=round, experts=True))
    scores = bradley_terry(cast, {vote.item: tuple(vote.item.split("/")[1:]) for vote in cast})
    by_prompt: dict[str, set[str]] = defaultdict(set)
    for vote in cast:
        prompt, *sides = vote.item.split("/")
        by_prompt[prompt].update(sides)
    with store.reading() as session:
        for prompt, answers in sorted(by_prompt.items()):
            row = session.get_one(PromptRow, prompt)
            responses = select(ResponseRow).where(ResponseRow.id.in_(answers))
            best_first = sorted(
                session.scalars(responses),
                key=lambda response: (-scores[response.id], response.id),
            )
            mean = fmean(scores[response.id] for response in best_first)
            yield {
                "prompt": row.messages,
                "responses": [_plain(response.messages) for response in best_first],
                "scores": [scores[response.id] - mean for response in best_first],
                "models": [response.model for response in best_first],
                "group": row.group,
            }


def _plain(turns: list[Json]) -> list[Json] | str:
    """The text of an answer that is nothing else."""
    alone = len(turns) == 1 and turns[0].keys() == {"role", "content"}
    return turns[0]["content"] if alone else turns


def corrected(store: Store, rows: Iterable[Comparison], *, round: str | None = None) -> list[Json]:
    """For any two models the first one's win rate by a judge, by people who voted on some of the
    pairs, and by the judge as people's votes correct it.

    Args:
        rows: judged pairs whose metadata names both models. A pair without a verdict (`failed`)
            says nothing.

    Raises:
        DataError: no row names two models, or people judged none of these pairs.
    """
    people = {}
    for vote in comparisons(store, "soft", round=round, unfinished=True):
        people[vote.prompt, vote.chosen, vote.rejected] = vote.probability
        people[vote.prompt, vote.rejected, vote.chosen] = 1 - vote.probability
    contests: dict[tuple[str, str], list[Comparison]] = defaultdict(list)
    for row in rows:
        sides = row.metadata.get("chosen_model"), row.metadata.get("rejected_model")
        if all(sides) and "failed" not in row.metadata:
            turned = sides[::-1] in contests
            contests[sides[::-1] if turned else sides].append(row.swap() if turned else row)
    if not contests:
        raise DataError(
            "no pair names its two models (metadata.chosen_model, metadata.rejected_model). Give "
            "the file that `tether duel --output` writes",
        )
    results = [_corrected(*models, own, people) for models, own in contests.items()]
    if not any(one["voted"] for one in results):
        raise DataError("nobody has judged any of these pairs yet")
    return results


def _corrected(
    first: str,
    second: str,
    rows: list[Comparison],
    people: dict[tuple[object, ...], float],
) -> Json:
    human = [people.get((row.prompt, row.chosen, row.rejected)) for row in rows]
    machine = [row.probability for row in rows]
    prompts = [row.prompt for row in rows]
    voted = sum(label is not None for label in human)
    result = prediction_powered_win_rate(human, machine, prompts) if voted else None
    return {
        "first": first,
        "second": second,
        "pairs": len(rows),
        "judge": grouped_mean(np.array(machine), prompts).as_dict(),
        "voted": voted,
        "people": result and result.human_only.as_dict(),
        "corrected": result and result.estimate.as_dict(),
        "weight": result and result.weight,
    }
