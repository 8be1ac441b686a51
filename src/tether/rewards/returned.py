"""The scores in the values that a user's function returned: each is used, or a failed score names
it.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from itertools import islice
from typing import Any, TypeVar

import numpy as np
import torch

from tether.core.errors import LONGEST, RewardError, error_words
from tether.core.secrets import redact
from tether.core.types import Rollout, Score

T = TypeVar("T")
UNORDERED = (str, bytes, bytearray, memoryview, Mapping, Set)
"""Values that can be gone through and are no list of scores: their items are letters, keys, or in
no order.
"""
LARGEST = 1e15
"""The largest size of a score: sums of squares of larger ones end beyond float32, in which training
computes.
"""

NO_SCORE = "gave no score"
"""End of the reason of a value that is None."""
TAKEN_PARTS = ("score", "proxy", "kl")
"""Columns that measurements have beside the parts of scores."""


def in_parts(items: Sequence[T], size: int, joined: Callable[[T, T], bool]) -> list[list[T]]:
    """The items in parts of at most `size`; neighbours that are `joined` stay together, so that a
    part may be longer.
    """
    groups: list[list[T]] = []
    for one in items:
        if groups and joined(groups[-1][-1], one):
            groups[-1].append(one)
        else:
            groups.append([one])
    parts: list[list[T]] = []
    for group in groups:
        if parts and len(parts[-1]) + len(group) <= size:
            parts[-1].extend(group)
        else:
            parts.append(group)
    return parts


def whole_groups(rollouts: Sequence[Rollout], size: int) -> list[list[Rollout]]:
    """The rollouts in parts of at most `size`; the answers to one prompt stay together."""
    return in_parts(
        rollouts,
        size,
        lambda a, b: b.prompt_ids == a.prompt_ids and b.sample_index > a.sample_index,
    )


def scores_of(returned: object, count: int, source: str = "the reward function") -> list[Score]:
    """The scores of `count` answers in what a function returned: a list, an array or anything else
    that has an order.

    Raises:
        RewardError: it is no such thing, or has another number of values.
    """
    if isinstance(returned, torch.Tensor | np.ndarray):
        returned = returned.tolist()
    if isinstance(returned, UNORDERED) or not isinstance(returned, Iterable):
        kind = "nothing (None)" if returned is None else f"a {type(returned).__name__}"
        raise RewardError(
            f"{source} returned {kind}, not a list of numbers: return one for each of the {count} "
            "answers, in order",
        )
    values = list(islice(returned, count + 1))
    if len(values) != count:
        number = f"more than {count}" if len(values) > count else len(values)
        raise RewardError(f"{source} returned {number} scores for {count} responses")
    return [as_score(value, source) for value in values]


def as_score(value: object, source: str = "the reward function") -> Score:
    """Score from a function's value for one answer. Text is refused, even if it could be read as a
    number.
    """
    try:
        return _score(value) or Score(None, reason=f"{source} {NO_SCORE}")
    except RewardError as error:
        return Score(None, reason=f"{source} returned {error}")
    except Exception as error:  # noqa: BLE001 - a user's object may raise anything
        kind = type(value).__name__
        raised = redact(error_words(error))
        return Score(
            None,
            reason=f"{source} returned a {kind} that cannot be read: it raised {raised}",
        )


def placed(score: Score, rollout: Rollout, source: str) -> Score:
    """The score itself; a failed one where a step ends outside of the response."""
    length = len(rollout.response_ids)
    for end, _ in score.steps:
        if not 0 <= end < length:
            return Score(
                None,
                reason=f"{source} returned a step that ends at token {end} "
                f"of a response of {length}",
            )
    return score


def _score(value: object) -> Score | None:
    """A number or a Score in plain values; None of nothing, or a failed score without a reason.

    Raises:
        RewardError: it is none, with the end of the sentence "the function returned ...".
    """
    if not isinstance(value, Score):
        return None if value is None else Score(_number(value))
    if value.value is None:
        return Score(None, reason=str(value.reason)[:LONGEST]) if value.reason else None
    for taken in TAKEN_PARTS:
        if taken in value.parts:
            raise RewardError(
                f"a Score whose part is named {taken!r}, as a column of the run is: rename the part",
            )
    return Score(
        _number(value.value),
        {str(name): _number(part) for name, part in value.parts.items()},
        str(value.reason)[:LONGEST],
        steps=tuple((operator.index(end), _number(step)) for end, step in value.steps),
    )


def _number(value: Any) -> float:
    """A value as a number.

    Raises:
        RewardError: it is none, or none that training can use, with the words for what it is.
    """
    try:
        if isinstance(value, UNORDERED):
            raise TypeError
        number = float(value)
    except OverflowError:
        raise RewardError(f"a number beyond {LARGEST:g}: scale the scores") from None
    except (TypeError, ValueError, RuntimeError):
        raise RewardError(f"a {type(value).__name__}, not a number") from None
    if not math.isfinite(number):
        raise RewardError(f"{number}")
    if abs(number) > LARGEST:
        raise RewardError(f"{number:g}, beyond {LARGEST:g}: scale the scores")
    return number
