"""Crowds whose truth is known: honest people of known accuracy, and those who do not read."""

from __future__ import annotations

import random
from collections.abc import Sequence

from tether.people.labels.votes import Vote

CARELESS = ("random", "always_left", "adversarial")


def crowd(
    annotators: Sequence[float | str],
    *,
    items: int = 300,
    overlap: int = 3,
    ties: float = 0.0,
    hard: float = 0.0,
    seed: int = 0,
) -> tuple[list[Vote], dict[str, str]]:
    """Votes of people given by accuracy, or as one of CARELESS, named by place and kind; and the
    truth of each item.

    Of each item `overlap` people, drawn at random, say what they think; `ties` is the share of
    items whose truth is a tie. An item's difficulty, drawn up to `hard`, moves accuracies towards
    one half.
    """
    draw, votes, truth = random.Random(f"crowd/{seed}"), [], {}
    verdicts = ["first", "second", "tie"] if ties else ["first", "second"]
    for number in range(items):
        item = f"item-{number}"
        truth[item] = "tie" if draw.random() < ties else draw.choice(verdicts[:2])
        ease = 1 - draw.uniform(0, hard)
        for place in draw.sample(range(len(annotators)), overlap):
            kind, left = annotators[place], draw.choice(["first", "second"])
            wrong = draw.choice([verdict for verdict in verdicts if verdict != truth[item]])
            if isinstance(kind, str):
                sure = {"random": draw.choice(verdicts), "always_left": left, "adversarial": wrong}
                said = sure[kind] if draw.random() < 0.95 else draw.choice(verdicts)
            else:
                said = truth[item] if draw.random() < kind * ease + 0.5 * (1 - ease) else wrong
            seconds = draw.lognormvariate(1.0 if isinstance(kind, str) else 3.0, 0.4)
            votes.append(
                Vote(
                    item,
                    f"{place}-{kind}",
                    said,
                    at=float(number),
                    seconds=seconds,
                    shown_left=left,
                ),
            )  # type: ignore[arg-type]
    return votes, truth
