"""One label from the votes of several people: majority, Dawid–Skene, Bradley–Terry; and which items need another look.

Labels are over verdicts (`first`, `second`, `tie`): `both_bad` has no direction either, so it counts as a tie here. Each
person's latest vote on an item counts (`votes.latest_votes`). The order of the votes changes nothing.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array

from tether.core.errors import ConfigError, DataError
from tether.preferences.votes import VERDICTS, Verdict, Vote, latest_votes, more_than_half

Array = NDArray[Any]
LEAST = 1e-10
"""No probability is taken to be less."""
STILL = 1e-7
"""The fit ends when no posterior moves by more."""


@dataclass(frozen=True)
class Label:
    """What the votes on an item make of it; `verdict` is None where they are undecided."""

    item: str
    verdict: Verdict | None
    probabilities: Mapping[str, float]
    num_votes: int

    @property
    def confidence(self) -> float:
        return max(self.probabilities.values())

    @property
    def probability(self) -> float:
        """P(`first` is preferred), a tie being half of each: the soft label of a `Comparison` whose chosen side is `first`."""
        return self.probabilities.get("first", 0.0) + 0.5 * self.probabilities.get("tie", 0.0)


@dataclass(frozen=True)
class DawidSkeneFit:
    """Labels with posterior probabilities, the shares of the verdicts, and what each annotator says (inner key) of each truth.

    `accuracy` is an annotator's probability of saying what is true of an item drawn at random.
    """

    labels: list[Label]
    priors: Mapping[str, float]
    confusion: Mapping[str, Mapping[str, Mapping[str, float]]]
    accuracy: Mapping[str, float]


def majority(votes: Iterable[Vote], *, undecided: Literal["drop", "soft"] = "drop") -> list[Label]:
    """The verdict of more than half of the votes of each item, sorted by item; probabilities are shares of votes.

    Items without a majority are left out (`drop`), or kept for their probabilities with no verdict (`soft`).
    Trap: one vote is a majority of one; `num_votes` tells.
    """
    labels, by_item = [], defaultdict[str, list[str]](list)
    for vote in latest_votes(votes)[0]:
        by_item[vote.item].append(vote.verdict)
    for item, said in sorted(by_item.items()):
        counts = Counter(said)
        winner: Any = more_than_half(said)
        labels.append(Label(item, winner, {v: counts[v] / len(said) for v in VERDICTS if counts[v]}, len(said)))
    return [label for label in labels if undecided == "soft" or label.verdict]


def dawid_skene(
    votes: Iterable[Vote], *, gold: Mapping[str, str] | None = None, smoothing: int = 1, max_iterations: int = 2000
) -> DawidSkeneFit:
    """Labels by how reliable each annotator turns out to be, found together with the labels by expectation maximisation.

    Paper: Dawid and Skene 1979, https://doi.org/10.2307/2346806. It goes on until no posterior moves by 1e-7.
    `gold` gives items whose truth is known. `smoothing` adds imaginary votes of every annotator on imaginary items of known
    truth: so many of each verdict for each truth, and as many again of the right one. Without it (0) a few votes make an
    annotator infallible and the posteriors close to 0 and 1 are mostly too sure of themselves.
    Shapes: one label an item, sorted; posteriors over the verdicts that occur, `first` and `second` at least.
    Trap: where all annotators are about equally good it is no better than the majority; and what most of a crowd get wrong
    together, it calls right.

    Raises:
        DataError: there are no votes, or a gold answer is no verdict.
    """
    kept = sorted(latest_votes(votes)[0], key=lambda vote: (vote.item, vote.annotator))
    if not kept:
        raise DataError("there are no votes to make labels of")
    truth = {item: verdict_of(item, answer) for item, answer in (gold or {}).items()}
    occurring = {"first", "second"} | {vote.verdict for vote in kept} | set(truth.values())
    classes, annotators = [v for v in VERDICTS if v in occurring], sorted({vote.annotator for vote in kept})
    numbers = Counter(vote.item for vote in kept)
    items = {item: place for place, item in enumerate(numbers)}
    people, verdicts = ({name: place for place, name in enumerate(names)} for names in (annotators, classes))
    cast = np.array([(items[v.item], people[v.annotator], verdicts[v.verdict]) for v in kept])
    known = np.array([(items[i], verdicts[v]) for i, v in truth.items() if i in items], dtype=np.int64).reshape(-1, 2)
    posterior, errors = _expectation_maximisation(cast, known, (len(items), len(people), len(classes)), smoothing, max_iterations)
    priors = dict(zip(classes, posterior.mean(0).tolist(), strict=True))
    labels = []
    for item, row in zip(items, posterior.tolist(), strict=True):
        winners: list[Any] = [verdict for verdict, share in zip(classes, row, strict=True) if share > max(row) - 1e-9]
        shares = dict(zip(classes, row, strict=True))
        labels.append(Label(item, winners[0] if len(winners) == 1 else None, shares, numbers[item]))
    confusion = {
        name: {t: dict(zip(classes, errors[number, :, place].tolist(), strict=True)) for t, place in verdicts.items()}
        for name, number in people.items()
    }
    accuracy = {name: sum(priors[t] * row[t][t] for t in classes) for name, row in confusion.items()}
    return DawidSkeneFit(labels, priors, confusion, accuracy)


def _expectation_maximisation(
    cast: Array, known: Array, shape: tuple[int, int, int], smoothing: int, max_iterations: int
) -> tuple[Array, Array]:
    """Posteriors (items, truths) and what each annotator says of each truth (annotators, said, truths), until nothing moves.

    Args:
        cast: rows of item, annotator, verdict.
        known: rows of item, truth.
        shape: how many items, annotators and verdicts there are.
    """
    num_items, num_people, num_classes = shape
    spoken = csr_array(
        (np.ones(len(cast)), (cast[:, 0], cast[:, 1] * num_classes + cast[:, 2])), (num_items, num_people * num_classes)
    )
    posterior = np.asarray(spoken @ np.tile(np.eye(num_classes), (num_people, 1)))
    posterior /= posterior.sum(1, keepdims=True)
    posterior[known[:, 0]] = np.eye(num_classes)[known[:, 1]]
    imagined = smoothing * (1.0 + np.eye(num_classes))

    def errors() -> Array:
        counts = np.maximum((spoken.T @ posterior).reshape(num_people, num_classes, num_classes) + imagined, LEAST)
        return counts / counts.sum(1, keepdims=True)

    for _ in range(max_iterations):
        prior = posterior.sum(0) + imagined.sum(0)
        odds = np.log(np.maximum(prior / prior.sum(), LEAST)) + spoken @ np.log(errors()).reshape(-1, num_classes)
        now = np.exp(odds - odds.max(1, keepdims=True))
        now /= now.sum(1, keepdims=True)
        now[known[:, 0]] = posterior[known[:, 0]]
        moved, posterior = float(np.abs(now - posterior).max()), now
        if moved < STILL:
            break
    return posterior, errors()


def bradley_terry(
    votes: Iterable[Vote], sides: Mapping[str, tuple[str, str]], *, prior: int = 1, max_iterations: int = 2000
) -> dict[str, float]:
    """Scores of the responses to one prompt from votes on pairs of them, with mean 0; best first.

    Equation: `P(i over j) = σ(s_i − s_j)`, a tie being half a win of each.
    Paper: Bradley and Terry 1952, https://doi.org/10.2307/2334029; Hunter 2004, https://doi.org/10.1214/aos/1079120141, whose
    algorithm crowd-kit runs. `prior` is how many times each response meets an imaginary one and wins half of it: without it a
    response that never lost would have no finite score.
    Shapes: `sides` gives the ids of the first and the second response of each item; the unit is log-odds.
    Trap: responses that no chain of votes connects are compared through the prior alone.

    Raises:
        ConfigError: the package crowd-kit is missing.
        DataError: an item's sides are not given or are one response, or the prior is not positive.
    """
    crowdkit = _crowdkit()
    import pandas

    if prior < 1:
        raise DataError(f"bradley_terry needs a prior of 1 or more, got {prior}: a response that never lost has no score without")
    kept, _ = latest_votes(votes)
    rows: list[tuple[str, str, str]] = []
    for vote in kept:
        first, second = sides.get(vote.item, ("", ""))
        if not first or not second or first == second:
            raise DataError(f"{vote.item}: `sides` must name two responses, got {first!r} and {second!r}")
        # Whole wins only: each vote is two of them, and a tie one of each.
        winners = {"first": (first, first), "second": (second, second), "tie": (first, second)}[vote.verdict]
        rows += [(first, second, winner) for winner in winners]
    responses = sorted({name for row in rows for name in row[:2]})
    rows += [(name, "", winner) for name in responses for winner in (name, "") for _ in range(prior)]
    if not rows:
        return {}
    numbers = {name: number for number, name in enumerate(["", *responses])}
    table = pandas.DataFrame([[numbers[name] for name in row] for row in rows], columns=["left", "right", "label"])
    # With any tolerance above 0 crowd-kit 1.4 stops after two steps, since it compares its new scores with themselves.
    strengths = crowdkit.BradleyTerry(n_iter=max_iterations, tol=0.0).fit_predict(table)
    scores = {name: math.log(strengths.loc[numbers[name]]) for name in responses}
    mean = sum(scores.values()) / len(scores)
    return dict(sorted(((name, score - mean) for name, score in scores.items()), key=lambda pair: (-pair[1], pair[0])))


def verdict_of(item: str, answer: str) -> str:
    """The verdict that a known answer (a choice) stands for; DataError if it is none."""
    verdict = "tie" if answer == "both_bad" else answer
    if verdict not in VERDICTS:
        raise DataError(f"{item}: a gold answer is one of {', '.join(VERDICTS)} or both_bad, not {answer!r}")
    return verdict


def _crowdkit() -> ModuleType:
    try:
        from crowdkit import aggregation
    except ImportError as error:
        raise ConfigError("this needs the package crowd-kit. Install it with `pip install 'tether-rlhf[preferences]'`") from error
    return aggregation
