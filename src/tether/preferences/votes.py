"""A vote: what one person said of two answers; and which votes count."""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from tether.core.errors import DataError

Choice = Literal["first", "second", "tie", "both_bad"]
"""Which answer is better, whatever side it stood on; `both_bad` is a tie that says more."""
Verdict = Literal["first", "second", "tie"]
Side = Literal["first", "second"]
Coding = Literal["choice", "verdict", "strength"]
"""What of a vote is compared: one of four choices; three, `both_bad` being a tie; or its place on a scale."""
CHOICES: tuple[str, ...] = get_args(Choice)
VERDICTS: tuple[str, ...] = get_args(Verdict)


@dataclass(frozen=True, slots=True)
class Vote:
    """What one person said of two answers, after the random order of the sides has been undone.

    `value` is a choice or a strength: positive for `first`, negative for `second`, 0 for a tie. `at` is when (any unit that
    grows), `seconds` how long it took, `shown_left` the answer that stood on the left, `slices` what else is known of the
    item, such as its topic. `expert`: said to settle what others left open.

    Raises:
        DataError: the value is no choice and no finite number, a name is empty, or the side on the left is no side.
    """

    item: str
    annotator: str
    value: Choice | float
    at: float = 0.0
    seconds: float | None = None
    shown_left: Side | None = None
    slices: Mapping[str, str] = field(default_factory=dict)
    expert: bool = False

    def __post_init__(self) -> None:
        if not self.item or not self.annotator:
            raise DataError(f"a vote needs an item and an annotator, got {self.item!r} and {self.annotator!r}")
        known = self.value in CHOICES if isinstance(self.value, str) else math.isfinite(self.value)
        if not known:
            raise DataError(f"{self.item}: a vote is one of {', '.join(CHOICES)} or a finite strength, not {self.value!r}")
        if self.shown_left not in (None, "first", "second"):
            raise DataError(f"{self.item}: the answer on the left is first, second or None (unknown), not {self.shown_left!r}")

    @classmethod
    def seen(cls, item: str, annotator: str, said: str | float, shown_left: Side, **more: Any) -> Vote:
        """The vote of a person who said `left`, `right`, `tie` or `both_bad`, or a strength that is positive for the left side.

        Raises:
            DataError: nothing of that kind was said.
        """
        if isinstance(said, str):
            right = "second" if shown_left == "first" else "first"
            value: Any = {"left": shown_left, "right": right, "tie": "tie", "both_bad": "both_bad"}.get(said)
            if value is None:
                raise DataError(f"{item}: left, right, tie or both_bad can be said of two sides, not {said!r}")
        else:
            value = said if shown_left == "first" or not said else -said
        return cls(item, annotator, value, shown_left=shown_left, **more)

    @property
    def choice(self) -> Choice:
        if isinstance(self.value, str):
            return self.value
        return "tie" if self.value == 0 else "first" if self.value > 0 else "second"

    @property
    def verdict(self) -> Verdict:
        """The choice, `both_bad` being a tie: what a label can use."""
        return "tie" if self.choice == "both_bad" else self.choice

    @property
    def chose_left(self) -> bool | None:
        """Whether the left side was preferred; None for a tie, or where the order is not known."""
        return None if self.shown_left is None or self.verdict == "tie" else self.verdict == self.shown_left


def more_than_half(choices: Sequence[str]) -> str | None:
    """The verdict of more than half of these choices, `both_bad` counted as a tie; None without one."""
    counts = Counter("tie" if choice == "both_bad" else choice for choice in choices)
    return next((verdict for verdict, count in counts.items() if 2 * count > len(choices)), None)


def latest_votes(votes: Iterable[Vote]) -> tuple[list[Vote], list[tuple[Vote, Vote]]]:
    """Each person's latest vote on each item, sorted by item and person; and each vote that was given again, with the next one.

    Raises:
        DataError: a person contradicts himself on an item at one and the same time, so that neither vote is the latest.
    """
    by_both: dict[tuple[str, str], list[Vote]] = defaultdict(list)
    for vote in votes:
        by_both[vote.item, vote.annotator].append(vote)
    kept, repeats = [], []
    for (item, annotator), group in sorted(by_both.items()):
        group.sort(key=lambda vote: (vote.at, str(vote.value)))
        for before, after in itertools.pairwise(group):
            if before.at == after.at and before.value != after.value:
                raise DataError(
                    f"{annotator} votes {before.value!r} and {after.value!r} on {item}, both at {after.at}. Give `at`"
                )
        kept.append(group[-1])
        repeats += itertools.pairwise(group)
    return kept, repeats


def coded(votes: Sequence[Vote], coding: Coding) -> tuple[list[Vote], list[Any], str]:
    """Each person's latest votes with the values to compare; and what to say when there is nothing to compare."""
    kept, _ = latest_votes(votes)
    if coding != "strength":
        return kept, [vote.choice if coding == "choice" else vote.verdict for vote in kept], "there are no votes"
    plain: dict[Any, float] = {"tie": 0.0, "both_bad": 0.0}
    if all(isinstance(vote.value, str) for vote in kept):
        plain |= {"first": 1.0, "second": -1.0}
    # Beside strengths a bare "first" has a side but no place on the scale, so it is left out.
    placed = [vote for vote in kept if not isinstance(vote.value, str) or vote.value in plain]
    return placed, [plain[v.value] if isinstance(v.value, str) else float(v.value) for v in placed], "no vote has a strength"
