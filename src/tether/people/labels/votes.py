"""Judgments of two answers: what a person may say, what is recorded of it, and which votes
count.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any, Literal, get_args

from tether.core.errors import DataError
from tether.core.types import Texts

Choice = Literal["first", "second", "tie", "both_bad"]
"""The better answer, on either side; `both_bad` is a tie with a further meaning."""
Verdict = Literal["first", "second", "tie"]
Side = Literal["first", "second"]
Coding = Literal["choice", "verdict", "strength"]
"""The part of a vote that is compared: one of four choices; three, `both_bad` being a tie; or its
place on a scale.
"""
CHOICES: tuple[Choice, ...] = get_args(Choice)
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)
FLIPPED: dict[str, Side] = {"first": "second", "second": "first"}
STRENGTHS = 3
QUESTIONS = {
    "two": "left5 right5",
    "three": "left5 tie5 right5",
    "scale": "left3 left2 left1 tie5 right1 right2 right3",
}
"""Kinds of questions on two answers, with what may be said: a side, and its strength (5: none is asked)."""
MAX_COMMENT = 4000
TEXTS = {"comment": MAX_COMMENT, "correction": 20_000}
"""The most characters of what people write."""


@dataclass(frozen=True)
class Opinion:
    """One person's judgment of two answers, with everything that is recorded of it.

    `strength` is 1 to 3, `ratings` are 1 to 5 by criterion, `seconds` is the duration, `guidelines`
    their version. `left` is the left answer, `at` the time in seconds since 1970, `correction` a
    better answer. An answer to a further question is the rating `question/better/choice`: its
    strength, or 5 where none is asked.
    """

    choice: Choice
    strength: int | None = None
    ratings: Mapping[str, int] = field(default_factory=dict)
    comment: str = ""
    _: KW_ONLY
    seconds: float = 0.0
    guidelines: int = 0
    correction: str = ""
    annotator: str = ""
    left: Side | None = None
    at: float = 0.0
    role: str = "annotator"

    @property
    def preference(self) -> float:
        """+1 for the first answer, -1 for the second; less for a weaker preference, 0 for none."""
        sign = {"first": 1.0, "second": -1.0}.get(self.choice, 0.0)
        return sign if self.strength is None else sign * self.strength / STRENGTHS

    def on(self, question: str | None) -> Opinion | None:
        """The same person's opinion on a further question, of a criterion by the higher rating;
        None without an answer.
        """
        if not question:
            return self
        rate = self.ratings.get
        first, second = (rate(f"{question}/{side}") for side in FLIPPED)
        if first and second:
            better = "first" if first > second else "second" if first < second else "tie"
            return replace(self, choice=better, strength=None)
        for choice in VERDICTS:
            if strength := rate(f"{question}/better/{choice}"):
                return replace(
                    self,
                    choice=choice,
                    strength=strength if strength <= STRENGTHS else None,
                )
        return None

    def placed(self, places: Mapping[str, object]) -> Opinion:
        """The same opinion with the answers under these names in its choice, left side and ratings
        (`criterion/answer`).
        """
        parts = [(*name.rpartition("/"), rating) for name, rating in self.ratings.items()]
        ratings = {
            f"{of}{slash}{places.get(side, side) if slash else side}": rating
            for of, slash, side, rating in parts
        }
        return replace(
            self,
            choice=places.get(self.choice, self.choice),
            left=places.get(self.left or ""),
            ratings=ratings,
        )

    def problem(self) -> str:
        """A sentence on the first field that is out of its range; empty where there is none."""
        if self.choice not in CHOICES:
            return f"a choice is one of {', '.join(CHOICES)}, not {self.choice!r}"
        if self.strength not in (None, *range(1, STRENGTHS + 1)):
            return f"a strength is 1, 2 or 3, not {self.strength!r}"
        if len(self.ratings) > 20 or any(
            not 1 <= rating <= 5 or not 0 < len(of) <= 50 for of, rating in self.ratings.items()
        ):
            return (
                "impossible rating: at most 20 ratings between 1 and 5, with names of at most "
                "50 characters"
            )
        for name, most in TEXTS.items():
            if len(text := getattr(self, name)) > most or "\0" in text:
                return (
                    f"a {name} has at most {most} characters (this one has "
                    f"{len(text)}) and no null character"
                )
        limits = {"seconds": 2**53, "at": 2**53, "guidelines": 2**31}
        odd = next(
            (name for name, limit in limits.items() if not 0 <= getattr(self, name) < limit),
            "",
        )
        return f"impossible number: {odd} of a judgment is {getattr(self, odd):g}" if odd else ""


@dataclass(frozen=True)
class Vote:
    """One person's vote on two answers, after the random order of the sides has been undone.

    `value` is a choice or a strength: positive for `first`, negative for `second`, 0 for a tie.
    `at` is a time (any unit that grows), `seconds` the duration, `shown_left` the left answer,
    `slices` other facts on the item, such as its topic. `expert`: cast to settle what others left
    open.

    Raises:
        DataError: the value is neither a choice nor a finite number, a name is empty, or the left
            side is unknown.
    """

    item: str
    annotator: str
    value: Choice | float
    at: float = 0.0
    _: KW_ONLY
    seconds: float | None = None
    shown_left: Side | None = None
    slices: Texts = field(default_factory=dict)
    expert: bool = False

    def __post_init__(self) -> None:
        if not self.item or not self.annotator:
            raise DataError(
                f"a vote needs an item and an annotator, got {self.item!r} and {self.annotator!r}",
            )
        if not (
            self.value in CHOICES if isinstance(self.value, str) else math.isfinite(self.value)
        ):
            raise DataError(
                f"{self.item}: a vote is one of {', '.join(CHOICES)} or a finite "
                f"strength, not {self.value!r}",
            )
        if self.shown_left not in (None, "first", "second"):
            raise DataError(
                f"{self.item}: the answer on the left is first, second or None "
                f"(unknown), not {self.shown_left!r}",
            )

    @classmethod
    def seen(
        cls,
        item: str,
        annotator: str,
        said: str | float,
        shown_left: Side,
        *,
        at: float = 0.0,
        seconds: float | None = None,
        slices: Texts | None = None,
    ) -> Vote:
        """The vote of a person who said `left`, `right`, `tie` or `both_bad`, or a strength that is
        positive for the left side.

        Raises:
            DataError: nothing of that kind was said.
        """
        value = (
            answer_on(said, shown_left)
            if isinstance(said, str)
            else said
            if shown_left == "first" or not said
            else -said
        )
        return cls(
            item,
            annotator,
            value,
            at=at,
            seconds=seconds,
            shown_left=shown_left,
            slices=slices or {},
        )

    @property
    def choice(self) -> Choice:
        if isinstance(self.value, str):
            return self.value
        return "tie" if self.value == 0 else "first" if self.value > 0 else "second"

    @property
    def verdict(self) -> Verdict:
        """The choice, `both_bad` being a tie: what a label can use."""
        return as_verdict(self.choice)

    @property
    def chose_left(self) -> bool | None:
        """True where the left side was preferred; None for a tie, or where the order is not
        known.
        """
        return (
            None
            if self.shown_left is None or self.verdict == "tie"
            else self.verdict == self.shown_left
        )


def as_verdict(choice: Choice) -> Verdict:
    """The choice, `both_bad` being a tie."""
    return "tie" if choice == "both_bad" else choice


def answer_on(side: str, left: str) -> Choice:
    """The answer on a side (`left`, `right`) as a choice, `left` standing there; `tie` and
    `both_bad` are themselves.

    Raises:
        DataError: it is none of the four.
    """
    if side in ("tie", "both_bad"):
        return side
    if side not in ("left", "right"):
        raise DataError(f"a verdict is left, right, tie or both_bad, not {side!r}")
    return "first" if (side == "left") == (left == "first") else "second"


def more_than_half(choices: Sequence[Choice]) -> Verdict | None:
    """The verdict of more than half of these choices, `both_bad` counted as a tie; None without
    one.
    """
    counts = Counter(map(as_verdict, choices))
    return next((verdict for verdict in VERDICTS if 2 * counts[verdict] > len(choices)), None)


def latest_votes(votes: Iterable[Vote]) -> tuple[list[Vote], list[tuple[Vote, Vote]]]:
    """Each person's latest vote on each item, sorted by item and person; and each vote that was
    given again, with the next one.

    Raises:
        DataError: a person contradicts himself on an item at one and the same time, so that neither
            vote is the latest.
    """
    by_both: dict[tuple[str, str], list[Vote]] = defaultdict(list)
    for vote in votes:
        by_both[vote.item, vote.annotator].append(vote)
    latest = []
    repeats = []
    for (item, annotator), group in sorted(by_both.items()):
        group.sort(key=lambda vote: (vote.at, str(vote.value)))
        for before, after in itertools.pairwise(group):
            if before.at == after.at and before.value != after.value:
                raise DataError(
                    f"{annotator} votes {before.value!r} and {after.value!r} on {item}, both at "
                    f"{after.at}. Give `at`",
                )
        latest.append(group[-1])
        repeats += itertools.pairwise(group)
    return latest, repeats


def coded(votes: Sequence[Vote], coding: Coding) -> tuple[list[Vote], list[Any], str]:
    """Each person's latest votes with the values to compare; and what was looked for, in words."""
    latest, _ = latest_votes(votes)
    if coding != "strength":
        return (
            latest,
            [vote.choice if coding == "choice" else vote.verdict for vote in latest],
            "votes",
        )
    scale: dict[object, float] = {"tie": 0.0, "both_bad": 0.0}
    if all(isinstance(vote.value, str) for vote in latest):
        scale |= {"first": 1.0, "second": -1.0}
    # Beside strengths a bare "first" has a side but no place on the scale, so it is left out.
    on_scale = [vote for vote in latest if not isinstance(vote.value, str) or vote.value in scale]
    return (
        on_scale,
        [scale[v.value] if isinstance(v.value, str) else float(v.value) for v in on_scale],
        "votes" if len(on_scale) == len(latest) else "votes with a strength",
    )
