"""The crowd of lab 14: pairs with a better answer, votes on them, and vote counts in theory."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from tether.api.labs.words import Answers, draw, fine_tuned, gold
from tether.people.labels.aggregation import Label
from tether.people.labels.votes import Vote


def take(answers: Answers, rows: Tensor) -> Answers:
    """Some of the answers."""
    return Answers(answers.tokens[rows], answers.mask[rows])


def decided(count: int, luck: torch.Generator) -> tuple[Answers, Answers]:
    """Pairs of answers of which the truth prefers one."""
    first, second = (draw(fine_tuned(), 3 * count, luck) for _ in range(2))
    rows = (gold(first) != gold(second)).nonzero()[:count, 0]
    return take(first, rows), take(second, rows)


def ballots(choices: Mapping[str, Tensor], left: Mapping[str, Tensor]) -> list[Vote]:
    """Make the votes on every pair.

    Args:
        choices: by name, True for each pair of which the first answer is chosen.
        left: by name, True for each pair of which the first answer was shown on the left.
    """
    return [
        Vote(
            f"{number:03d}",
            name,
            "first" if chosen else "second",
            shown_left="first" if left[name][number] else "second",
        )
        for name, row in choices.items()
        for number, chosen in enumerate(row.tolist())
    ]


def accuracy_of(labels: Sequence[Label], truth: Tensor) -> float:
    """The share of right labels; an undecided one is half right."""
    right = [
        0.5 if label.verdict is None else (label.verdict == "first") == bool(truth[int(label.item)])
        for label in labels
    ]
    return sum(right) / len(right)


def in_theory(accuracies: Sequence[float], weights: Sequence[float]) -> float:
    """The chance that a weighted vote is right, summed over all ways to vote."""
    total = 0.0
    for ways in itertools.product((True, False), repeat=len(accuracies)):
        chance = 1.0
        margin = 0.0
        for right, accuracy, weight in zip(ways, accuracies, weights, strict=True):
            chance *= accuracy if right else 1 - accuracy
            margin += weight if right else -weight
        total += chance * (1.0 if margin > 1e-9 else 0.5 if margin > -1e-9 else 0.0)
    return total


def log_odds(accuracy: float) -> float:
    """The best weight of a person: log a / (1 − a)."""
    return float(torch.logit(torch.tensor(accuracy)))
