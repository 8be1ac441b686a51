import math

import pytest

from tether.core.errors import DataError
from tether.people.labels.votes import Vote


@pytest.mark.parametrize(
    ("said", "left", "value", "chose_left"),
    [
        ("left", "first", "first", True),
        ("left", "second", "second", True),
        ("right", "first", "second", False),
        ("right", "second", "first", False),
        ("tie", "second", "tie", None),
        ("both_bad", "first", "both_bad", None),
        (2, "first", 2, True),
        (2, "second", -2, True),
        (-1.5, "second", 1.5, False),
        (0, "second", 0, None),
    ],
)
def test_the_order_of_the_sides_is_undone(said, left, value, chose_left):
    vote = Vote.seen("x", "ann", said, left, at=3.0)
    assert (vote.value, vote.shown_left, vote.at) == (
        value,
        left,
        3.0,
    ) and vote.chose_left is chose_left


@pytest.mark.parametrize(
    ("value", "choice", "verdict"),
    [
        ("both_bad", "both_bad", "tie"),
        (0.0, "tie", "tie"),
        (0.1, "first", "first"),
        (-3, "second", "second"),
    ],
)
def test_choice_and_verdict(value, choice, verdict):
    vote = Vote("x", "ann", value)
    assert (vote.choice, vote.verdict) == (choice, verdict) and vote.chose_left is None


@pytest.mark.parametrize(
    "wrong",
    [{"value": "left"}, {"value": math.nan}, {"value": math.inf}, {"item": ""}, {"annotator": ""}],
)
def test_a_vote_without_value_item_or_annotator_is_refused(wrong):
    with pytest.raises(DataError):
        Vote(**{"item": "x", "annotator": "ann", "value": "tie"} | wrong)
    with pytest.raises(DataError, match="left"):
        Vote("x", "ann", "tie", shown_left="left")  # type: ignore[arg-type]
    with pytest.raises(DataError, match="left, right"):
        Vote.seen("x", "ann", "first", "first")
