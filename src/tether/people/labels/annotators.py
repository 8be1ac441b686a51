"""Simulated annotators: votes drawn from hidden scores with Bradley-Terry noise, and the majority
among them.

They replace people in the quickstart (the synthetic set-up of Gao et al. 2022,
https://arxiv.org/abs/2210.10760). From labels onwards, the path is the same as for people's labels.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Collection, Sequence
from dataclasses import replace

from tether.core.types import Annotation, Comparison, Prompt, assistant

EQUALLY_FLUENT = 0.04
"""In that part of gold: a tenth of a nat a token."""


def noise_for_agreement(differences: Sequence[float], agreement: float) -> float:
    """The noise scale s at which two annotators, each preferring with sigma(difference / s), agree
    with probability `agreement`.

    The mean of p^2 + (1 - p)^2 falls with s from 1 to 1/2, so bisection finds it.
    """

    def expected(scale: float) -> float:
        probabilities = [1 / (1 + math.exp(-max(-60.0, min(60.0, d / scale)))) for d in differences]
        return sum(p * p + (1 - p) * (1 - p) for p in probabilities) / len(probabilities)

    low = 1e-4
    high = 1e4
    for _ in range(80):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if expected(middle) > agreement else (low, middle)
    return math.sqrt(low * high)


def label_pairs(
    prompts: Sequence[Prompt],
    responses: Sequence[Sequence[str]],
    scores: Sequence[Sequence[float]],
    *,
    agreement: float = 0.70,
    num_annotators: int = 3,
    undecided: float = 0.2,
    seed: int | str = 0,
    only: Collection[tuple[int, int, int]] | None = None,
    noise: float | None = None,
) -> tuple[list[Comparison], dict[str, float]]:
    """All pairs of every prompt's responses, voted on; the majority decides, pairs without one are
    dropped; and figures of that.

    An annotator perceives difference / noise + a logistic draw, and says "tie" when that lies
    within `undecided`.

    Args:
        scores: hidden scores, one a response; only their noisy order reaches the labels.
        agreement: how often two annotators who never say "tie" are to agree on pairs at random;
            the noise is fitted to it. Those who may say "tie" agree more often where both decide:
            0.62, 0.73 and 0.83 for 0.6, 0.7 and 0.8.
        only: the pairs to vote on, as (prompt, response, later response); None: all.
        noise: of annotators known from elsewhere; None: fitted.
    """
    pairs = _pairs(responses)
    distinct = [
        (p, a, b)
        for p, a, b in pairs
        if responses[p][a] and responses[p][b] and responses[p][a] != responses[p][b]
    ]
    if noise is None:
        noise = noise_for_agreement(
            [scores[p][a] - scores[p][b] for p, a, b in distinct],
            agreement,
        )
    if only is not None:
        pairs = [pair for pair in pairs if pair in only]
        distinct = [pair for pair in distinct if pair in only]
    comparisons = []
    agree = []
    votes_right = []
    majority_right = []
    for p, a, b in distinct:
        difference = scores[p][a] - scores[p][b]
        prompt = prompts[p]
        keys = [f"{seed}/{prompt.id or p}/{a}/{b}/{k}" for k in range(num_annotators)]
        votes = [_vote(difference, noise, undecided, key) for key in keys]
        gold = 1 if difference > 0 else -1
        agree += [x == y for x, y in itertools.combinations(votes, 2) if x and y]
        votes_right += [v == gold for v in votes if v]
        winner = next((side for side in (1, -1) if votes.count(side) * 2 > num_annotators), 0)
        if not winner:
            continue
        majority_right.append(winner == gold)
        best, worst = (a, b) if winner == 1 else (b, a)
        comparisons.append(Comparison(
            prompt.messages, (assistant(responses[p][best]),), (assistant(responses[p][worst]),),
            id=f"{prompt.id}-{a}{b}",
            group=prompt.id or str(p),
            margin=abs(sum(votes)) / num_annotators,
            annotations=tuple(Annotation(f"annotator-{k + 1}", v * winner) for k, v in enumerate(votes)),
            metadata={"gold_difference": scores[p][best] - scores[p][worst]},
        ))  # fmt: skip
    flags = {
        "annotator_agreement": agree,
        "annotator_gold_agreement": votes_right,
        "majority_gold_agreement": majority_right,
    }
    figures = {name: sum(values) / max(1, len(values)) for name, values in flags.items()}
    dropped = len(distinct) - len(comparisons)
    equal = len(pairs) - len(distinct)
    return comparisons, {
        **figures,
        "dropped_no_majority": dropped,
        "dropped_equal": equal,
        "noise": noise,
    }


def in_true_order(comparison: Comparison) -> Comparison:
    """The same two answers with the label that gold would give; `swap` alone would keep the
    annotators' label.
    """
    right = comparison.metadata["gold_difference"] >= 0
    return comparison if right else replace(comparison.swap(), probability=1.0)


def true_orders(comparisons: Sequence[Comparison]) -> dict[str, list[Comparison]]:
    """Pairs as gold orders them, by the name of the accuracy on them; apart those of which neither
    reads better.
    """
    judged = [c for c in comparisons if "gold_difference" in c.metadata]
    even = [c for c in judged if abs(c.metadata.get("fluent_difference", 1.0)) <= EQUALLY_FLUENT]
    orders = {"gold_accuracy": judged, "gold_accuracy_equally_fluent": even}
    return {name: [in_true_order(c) for c in pairs] for name, pairs in orders.items() if pairs}


def _pairs(responses: Sequence[Sequence[str]]) -> list[tuple[int, int, int]]:
    """All pairs of every prompt's responses, as (prompt, response, later response)."""
    return [
        (p, a, b)
        for p, texts in enumerate(responses)
        for a, b in itertools.combinations(range(len(texts)), 2)
    ]


def _vote(difference: float, noise: float, undecided: float, key: str) -> int:
    uniform = random.Random(key).uniform(1e-9, 1 - 1e-9)
    perceived = difference / noise + math.log(uniform / (1 - uniform))
    return 0 if abs(perceived) < undecided else (1 if perceived > 0 else -1)
