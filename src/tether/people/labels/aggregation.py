"""One label from the votes of several people: majority, Dawid–Skene, Bradley–Terry; and which items
need another look.

Labels are over verdicts (`first`, `second`, `tie`): `both_bad` has no direction either, so it
counts as a tie here. Each person's latest vote on an item counts (`votes.latest_votes`). The order
of the votes changes nothing.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array

from tether.core.errors import DataError
from tether.core.types import Texts
from tether.people.labels.votes import (
    CHOICES,
    VERDICTS,
    Verdict,
    Vote,
    as_verdict,
    latest_votes,
    more_than_half,
)

Array = NDArray[np.float64]
LEAST = 1e-10
"""No probability is taken to be less."""
STILL = 1e-7
"""The fit ends when no posterior moves by more, or after so many steps:"""
MOST_STEPS = 2000


@dataclass(frozen=True)
class Label:
    """The label that the votes on an item give it; `verdict` is None where they are undecided."""

    item: str
    verdict: Verdict | None
    probabilities: Mapping[str, float]
    num_votes: int

    @property
    def confidence(self) -> float:
        return max(self.probabilities.values())

    @property
    def probability(self) -> float:
        """P(`first` is preferred), a tie being half of each: the soft label of a `Comparison` whose
        chosen side is `first`.
        """
        return self.probabilities.get("first", 0.0) + 0.5 * self.probabilities.get("tie", 0.0)


class DawidSkeneFit(NamedTuple):
    """Labels with posterior probabilities, and each annotator's probability of saying what is true
    of an item drawn at random.
    """

    labels: list[Label]
    accuracy: Mapping[str, float]


def majority(votes: Iterable[Vote], *, undecided: Literal["drop", "soft"] = "drop") -> list[Label]:
    """The verdict of more than half of the votes of each item, sorted by item; probabilities are
    shares of votes.

    Items without a majority are left out (`drop`), or kept for their probabilities with no verdict
    (`soft`).
    Trap: one vote is a majority of one; see `num_votes`.
    """
    labels = []
    for item, group in itertools.groupby(latest_votes(votes)[0], key=lambda vote: vote.item):
        counts: Counter[Verdict] = Counter(vote.verdict for vote in group)
        shares = {
            verdict: counts[verdict] / counts.total() for verdict in VERDICTS if counts[verdict]
        }
        labels.append(Label(item, more_than_half(list(counts.elements())), shares, counts.total()))
    return [label for label in labels if undecided == "soft" or label.verdict]


def dawid_skene(
    votes: Iterable[Vote],
    *,
    gold: Texts | None = None,
    smoothing: int = 1,
) -> DawidSkeneFit:
    """Labels by how reliable each annotator turns out to be, found together with the labels by
    expectation maximisation.

    Paper: Dawid and Skene 1979, https://doi.org/10.2307/2346806. It goes on until no posterior
    moves by 1e-7. `gold` gives items whose truth is known. `smoothing` adds imaginary votes of
    every annotator on items of known truth. Each truth gets so many of each verdict, and as many
    again of the right one. Without it (0) a few votes make an annotator infallible and the
    posteriors close to 0 and 1 are mostly too sure of themselves.
    Shapes: one label an item, sorted; posteriors over the verdicts that occur, `first` and `second`
        at least.
    Trap: with equally good annotators it is no better than the majority. A mistake that most of a
    crowd share counts as right.

    Raises:
        DataError: there are no votes, or a gold answer is no verdict.
    """
    latest, _ = latest_votes(votes)
    if not latest:
        raise DataError("there are no votes to make labels of")
    truth = gold_verdicts(gold or {})
    numbers = Counter(vote.item for vote in latest)
    occurring = {"first", "second"} | {vote.verdict for vote in latest} | set(truth.values())
    classes: list[Verdict] = [v for v in VERDICTS if v in occurring]
    annotators = sorted({vote.annotator for vote in latest})
    items, people, verdicts = (
        {name: place for place, name in enumerate(names)}
        for names in (numbers, annotators, classes)
    )
    cast = np.array([(items[v.item], people[v.annotator], verdicts[v.verdict]) for v in latest])
    fixed = np.array(
        [(items[i], verdicts[v]) for i, v in truth.items() if i in items],
        dtype=np.int64,
    ).reshape(-1, 2)
    posterior, errors = _expectation_maximisation(
        cast,
        fixed,
        (len(items), len(people), len(classes)),
        smoothing,
    )
    labels = []
    for item, row in zip(items, posterior.tolist(), strict=True):
        shares: dict[str, float] = dict(zip(classes, row, strict=True))
        winners: list[Verdict] = [
            verdict for verdict in classes if shares[verdict] > max(row) - 1e-9
        ]
        labels.append(Label(item, winners[0] if len(winners) == 1 else None, shares, numbers[item]))
    accuracy = np.einsum("t,ptt->p", posterior.mean(0), errors).tolist()
    return DawidSkeneFit(labels, dict(zip(people, accuracy, strict=True)))


def _expectation_maximisation(
    cast: NDArray[np.int64],
    fixed: NDArray[np.int64],
    shape: tuple[int, int, int],
    smoothing: int,
) -> tuple[Array, Array]:
    """Posteriors (items, truths) and what each annotator says of each truth (annotators, said,
    truths), until nothing moves.

    Args:
        cast: rows of item, annotator, verdict.
        fixed: rows of item, truth.
        shape: how many items, annotators and verdicts there are.
    """
    num_items, num_people, num_classes = shape
    spoken = csr_array(
        (np.ones(len(cast)), (cast[:, 0], cast[:, 1] * num_classes + cast[:, 2])),
        (num_items, num_people * num_classes),
    )
    posterior = np.asarray(spoken @ np.tile(np.eye(num_classes), (num_people, 1)))
    posterior /= posterior.sum(1, keepdims=True)
    posterior[fixed[:, 0]] = np.eye(num_classes)[fixed[:, 1]]
    imagined = smoothing * (1.0 + np.eye(num_classes))

    def errors() -> Array:
        counts = np.maximum(
            (spoken.T @ posterior).reshape(num_people, num_classes, num_classes) + imagined,
            LEAST,
        )
        return counts / counts.sum(1, keepdims=True)

    for _ in range(MOST_STEPS):
        prior = posterior.sum(0) + imagined.sum(0)
        odds = np.log(np.maximum(prior / prior.sum(), LEAST)) + spoken @ np.log(errors()).reshape(
            -1,
            num_classes,
        )
        now = np.exp(odds - odds.max(1, keepdims=True))
        now /= now.sum(1, keepdims=True)
        now[fixed[:, 0]] = posterior[fixed[:, 0]]
        moved = float(np.abs(now - posterior).max())
        posterior = now
        if moved < STILL:
            break
    return posterior, errors()


def bradley_terry(votes: Iterable[Vote], sides: Mapping[str, tuple[str, str]]) -> dict[str, float]:
    """Scores of the responses to one prompt from votes on pairs of them, with mean 0; best first.

    Equation: the maximum of `Σ log σ(s_winner − s_loser)`, a tie being half a win of each.
    Paper: Bradley and Terry 1952, https://doi.org/10.2307/2334029. Each response has a tie with an
    imaginary one of score 0: without it a response that never lost would have no finite score.
    Shapes: `sides` gives the ids of the first and the second response of each item; the unit is
        log-odds.
    Trap: responses that no chain of votes connects are compared through that imaginary one alone.

    Raises:
        DataError: an item's sides are not given or are one response.
    """
    from scipy.optimize import minimize
    from scipy.special import expit

    won: Counter[tuple[str, str]] = Counter()
    for vote in latest_votes(votes)[0]:
        first, second = sides.get(vote.item, ("", ""))
        if not first or not second or first == second:
            raise DataError(
                f"{vote.item}: `sides` must name two responses, got {first!r} and {second!r}",
            )
        won[first, second] += {"first": 2, "tie": 1, "second": 0}[vote.verdict]
        won[second, first] += {"first": 0, "tie": 1, "second": 2}[vote.verdict]
    if not won:
        return {}
    names = {
        name: place for place, name in enumerate(sorted({name for pair in won for name in pair}))
    }
    winner, loser = np.array([[names[name] for name in pair] for pair in sorted(won)]).T
    wins = np.array([won[pair] / 2 for pair in sorted(won)])

    def loss(scores: Array) -> tuple[float, Array]:
        margins = scores[winner] - scores[loser]
        ties = np.logaddexp(0, scores) + np.logaddexp(0, -scores)
        pull = wins * expit(-margins)
        gradient = (
            np.bincount(loser, pull, len(names))
            - np.bincount(winner, pull, len(names))
            + expit(scores)
            - 0.5
        )
        return float(wins @ np.logaddexp(0, -margins) + ties.sum() / 2), gradient

    best = minimize(loss, np.zeros(len(names)), jac=True, method="L-BFGS-B", tol=1e-12).x
    scores = zip(names, (best - best.mean()).tolist(), strict=True)
    return dict(sorted(scores, key=lambda pair: (-pair[1], pair[0])))


def gold_verdicts(answers: Texts) -> dict[str, Verdict]:
    """The verdicts of known answers (choices), by item; DataError if an answer is invalid."""
    verdicts: dict[str, Verdict] = {}
    for item, answer in answers.items():
        if answer not in CHOICES:
            raise DataError(
                f"{item}: a gold answer is one of {', '.join(VERDICTS)} or both_bad, not {answer!r}",
            )
        verdicts[item] = as_verdict(answer)
    return verdicts
