"""Rows that become token ids: what is counted, what is held out, and what is gathered."""

import pytest

from tether.core.errors import DataError
from tether.core.types import Comparison, assistant, user
from tether.data.chat import Encoded
from tether.data.prepare import Limit, by_prompt, encode_rows, encoded_split, within


def sequence(*ids):
    return Encoded(ids, (False, *(True for _ in ids[1:])))


def refuse_odd(number):
    if number % 2:
        raise DataError("odd")
    return -number


def test_refused_rows_are_counted_by_reason_and_the_others_keep_their_order():
    assert encode_rows([4, 1, 2, 3], refuse_odd) == ([-4, -2], {"odd": 2})
    assert within(sequence(1, 2), Limit(2, "x.length")) == sequence(1, 2)
    with pytest.raises(DataError, match=r"longer than x\.length = 1 tokens; 2 would keep it"):
        within(sequence(1, 2), Limit(1, "x.length"))


def test_each_distinct_response_stands_once_and_every_row_finds_its_own():
    a, b, c = sequence(1, 2), sequence(1, 3), sequence(1, 4)
    rows = [
        ("p", (a, b), (0.5,)),
        ("q", (c, a), (0.1,)),
        ("p", (c, a), (0.7,)),
        ("p", (b, a), (0.9,)),
    ]
    assert list(by_prompt(rows)) == [
        ("p", (a, b, c), (0, 2, 1), (1, 0, 0), (0.5, 0.7, 0.9)),
        ("q", (c, a), (0,), (1,), (0.1,)),
    ]


def test_prompts_are_held_out_whole_and_their_ties_are_counted():
    rows = [
        Comparison(
            (user(f"q{n % 40}"),),
            (assistant("a"),),
            (assistant("b"),),
            id=str(n),
            tie=n >= 80,
        )
        for n in range(120)
    ]

    def encode(part):
        return encode_rows(part, lambda row: row.prompt[0].content if not row.tie else refuse_tie())

    def refuse_tie():
        raise DataError("tie")

    split = encoded_split(rows, encode, 0.3, 0, "comparisons")
    assert not set(split.train) & set(split.test) and len(split.train) + len(split.test) == 80
    assert split.skipped == {"tie": 40} and split.heldout_ties == len(set(split.test)) > 0
    assert encoded_split(rows, encode, 0.0, 0, "comparisons").heldout_ties == 0
    with pytest.raises(
        DataError,
        match=(
            r"none of 40 comparisons can be used for training: "
            r"\{'tie': 40\}"
        ),
    ):
        encoded_split(rows[80:], encode, 0.3, 0, "comparisons")
