"""The two answers of a row by the names of their columns, and verdicts that name one of them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from tether.core.errors import DataError
from tether.core.types import Row
from tether.data.formats.fields import has
from tether.data.formats.table import LISTS


@dataclass(frozen=True)
class Two:
    """The names of two columns of answers, and the endings that tell them apart."""

    columns: Sequence[str]
    endings: Sequence[str]


_ANSWER = re.compile(
    r"(?P<stem>(?:\w+_)?(?:response|answer|output|completion|generation|candidate|reply|summary|continuation|assistant))"
    r"[ _-]?(?P<ending>[012AB])",
    re.IGNORECASE,
)
_ENDINGS = (("a", "b"), ("0", "1"), ("1", "2"))
VERDICTS = LISTS["verdicts"]
"""Columns that say which of two answers is better."""
_TIES, _BAD, _FIRST, _SECOND, _KINDS = (
    LISTS[name] for name in ("ties", "both_bad", "first", "second", "kinds_of_answers")
)
_ORDER = re.compile(r"\[*(?P<one>[ab12])\]*\s*(?P<sign>>+|<+|=+)\s*\[*(?P<other>[ab12])\]*")


def two_answers(row: Row) -> Two | None:
    """The two columns of answers, by their names: response_a and response_b, output_1 and output_2
    and the like.
    """
    stems: dict[str, dict[str, str]] = {}
    for name in row:
        if parts := _ANSWER.fullmatch(name):
            stems.setdefault(parts["stem"].lower(), {})[parts["ending"].lower()] = name
    pairs = [
        Two((own[e[0]], own[e[1]]), e)
        for own in stems.values()
        for e in _ENDINGS
        if own.keys() == set(e)
    ]
    return pairs[0] if len(pairs) == 1 else None


def names_better(row: Row) -> bool:
    """True for two answers and a verdict; chosen and rejected count as a verdict only where they
    name a side.
    """
    two = two_answers(row)
    if two is None or not any(name in row for name in VERDICTS):
        return False
    if not {"chosen", "rejected"} <= row.keys():
        return True
    return all(
        side_of_word(dict.get(row, name), two, row) is not None for name in ("chosen", "rejected")
    )


_SCORES = ("score", "rating", "reward")


def score_columns(row: Row, two: Two) -> list[str]:
    """The columns of the scores of two answers: score_a and score_b, or response_a_score and
    response_b_score.
    """
    for word in _SCORES:
        pairs = (
            [f"{word}_{end}" for end in two.endings],
            [f"{column}_{word}" for column in two.columns],
        )
        for pair in (*pairs, [f"{word}_{column[-1]}" for column in two.columns]):
            if all(has(row, name) for name in pair):
                return pair
    return []


def side_of(
    value: object,
    name: str,
    two: Two,
    row: Row,
) -> tuple[float, dict[str, bool]]:
    """The lean of a verdict, and whether both answers are bad.

    Raises:
        DataError: the verdict is a number, or a word that names no side.
    """
    lean = side_of_word(value, two, row)
    if lean is not None:
        both_bad = _word(value) in _BAD
        return lean, {"both_bad": True} if both_bad else {}
    one, other = two.columns
    if isinstance(value, float) and not value.is_integer():
        raise DataError(
            f"ambiguous verdict: {name} {value:g} may be the probability of {one} or of {other}. "
            "Write the likelier answer into column chosen, the other into rejected, and the "
            "probability of the likelier one into probability",
        )
    if (
        isinstance(value, bool | int | float)
        or str(value).strip().lstrip("-").replace(".", "", 1).isdigit()
    ):
        raise DataError(
            f"ambiguous verdict: {name} {value!s:.20} may count the answers from 0 or from 1. Say "
            "so by data.columns: "
            f'0 is {one}: {{ response_0 = "{one}", response_1 = "{other}", better_response_id = '
            f'"{name}" }}; '
            f'1 is {one} and 2 {other}: {{ output_1 = "{one}", output_2 = "{other}", label = '
            f'"{name}" }}; '
            f'1 is {one} and 0 {other}: {{ human_ref_A = "{one}", human_ref_B = "{other}", labels '
            f'= "{name}" }}',
        )
    raise DataError(f"unreadable verdict: {name} {value!r:.40} is none of {one}, {other} and tie")


def _word(value: object) -> str:
    return re.sub(r"[\W_]+", "", str(value).lower())


def side_of_word(
    value: object,
    two: Two,
    row: Row,
) -> float | None:
    """+1 or -1 for a value that names the first or second side, 0 for a tie."""
    if not isinstance(value, str) or not value.strip():
        return None
    if order := _ORDER.fullmatch(value.strip().lower()):
        letters = ("a", "b") if order["one"] in "ab" else two.endings
        places = [
            letters.index(side) if side in letters else -1
            for side in (order["one"], order["other"])
        ]
        sign = (order["sign"][0] == ">") - (order["sign"][0] == "<")
        return None if sorted(places) != [0, 1] else float(sign if places[0] == 0 else -sign)
    word = _word(value)
    one, other = (
        {_word(column), *(f"{kind}{end}" for kind in _KINDS)}
        for column, end in zip(two.columns, two.endings, strict=True)
    )
    for names, lean in (({*one, *_FIRST}, 1.0), ({*other, *_SECOND}, -1.0), ((*_TIES, *_BAD), 0.0)):
        if word in names:
            return lean
    for kind in ("", "model", "generator"):
        names = [f"{kind}_{end}" for end in two.endings] if kind else two.columns
        one, other = (dict.get(row, name) for name in names)
        if one != other and value in (one, other):
            return 1.0 if value == one else -1.0
    return None
