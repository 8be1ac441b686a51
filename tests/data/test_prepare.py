"""Rows that become token ids: what is counted, what is held out, and what is gathered."""

from collections import Counter

import pytest

from tether.core.errors import DataError
from tether.core.types import Comparison, assistant, user
from tether.data.chat import ChatEncoder, Encoded
from tether.data.prepare import Limit, by_prompt, encode_rows, encoded_split, within
from tether.models.tiny import tiny_tokenizer
from tether.settings.supervised import DirectConfig

ENCODER = ChatEncoder(tiny_tokenizer(), (1,))


def sequence(*ids):
    return Encoded(ids, (False, *(True for _ in ids[1:])))


def refuse_odd(number):
    if number % 2:
        raise DataError("odd")
    return -number


def test_refused_rows_are_counted_by_reason_and_the_others_keep_their_order():
    assert encode_rows([4, 1, 2, 3], refuse_odd) == ([-4, -2], {"odd": 2})
    assert within([sequence(1, 2)], Limit(2, "x.length")) == [sequence(1, 2)]
    with pytest.raises(DataError, match=r"longer than x\.length = 1 tokens; 2 would keep it"):
        within([sequence(1, 2)], Limit(1, "x.length"))
    with pytest.raises(DataError, match="longer than the model's context of 1 tokens"):
        within([sequence(1, 2)], Limit(1, "x.length", context=1))


def test_a_cut_row_counts_once_and_one_without_a_token_that_counts_is_left_out():
    """Its sequences end where the limit is; those that keep no trained token go."""
    limit = Limit(2, "x.length", Counter())
    late = Encoded((1, 2, 3), (False, False, True))
    assert within([sequence(1, 2, 3), late, sequence(7)], limit) == [sequence(1, 2)]
    assert limit.cut == {"longer than x.length = 2 tokens; 4 would keep it": 1}
    with pytest.raises(DataError, match="longer than"):
        within([late], limit)
    assert limit.cut.total() == 1


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

    def split_of(rows, share):
        config = DirectConfig(heldout_fraction=share)
        return encoded_split(rows, config, ENCODER, "direct")

    split = split_of(rows, 0.3)
    train, test = (sum(len(one.chosen) for one in part) for part in split[:2])
    assert not {one.group for one in split.train} & {one.group for one in split.test}
    assert train + test == 80 and split.heldout_ties == len(split.test) > 0
    assert split.counts == {"skipped": {"tie": 40}}
    assert split_of(rows, 0.0).heldout_ties == 0
    with pytest.raises(
        DataError,
        match=(
            r"none of 40 rows of \[direct\] can be used for training: "
            r"\{'tie': 40\}"
        ),
    ):
        split_of(rows[80:], 0.3)
