"""Calls of a user's function, and the scores in the values that it returns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any

from tether.core.errors import RewardError
from tether.core.types import Rollout, Score

UNORDERED = (str, bytes, bytearray, memoryview, Mapping, Set)
"""Values that can be gone through and are no list of scores: their items are letters, keys, or in no order."""


def whole_groups(rollouts: Sequence[Rollout], size: int) -> list[list[Rollout]]:
    """The rollouts in parts of at most `size`; the answers to one prompt stay together, so that a part may be longer."""
    groups: list[list[Rollout]] = []
    for one in rollouts:
        before = groups[-1][-1] if groups else None
        if before is not None and one.prompt_ids == before.prompt_ids and one.sample_index > before.sample_index:
            groups[-1].append(one)
        else:
            groups.append([one])
    parts: list[list[Rollout]] = []
    for group in groups:
        if parts and len(parts[-1]) + len(group) <= size:
            parts[-1].extend(group)
        else:
            parts.append(group)
    return parts


def scores_of(returned: Any, count: int, source: str = "the reward function") -> list[Score]:
    """The scores of `count` answers in what a function returned: a list, an array or anything else that has an order.

    Raises:
        RewardError: it is no such thing, or has another number of values.
    """
    if isinstance(returned, UNORDERED) or not isinstance(returned, Iterable):
        kind = type(returned).__name__
        raise RewardError(
            f"{source} returned a {kind}, not a list of numbers: return one for each of the {count} answers, in order"
        )
    try:
        values = list(returned)
    except TypeError:  # an array without a dimension
        raise RewardError(
            f"{source} returned one number, not a list of them: return one for each of the {count} answers"
        ) from None
    if len(values) != count:
        raise RewardError(f"{source} returned {len(values)} scores for {count} responses")
    return [as_score(value, source) for value in values]


def as_score(value: Any, source: str = "the reward function") -> Score:
    """What a function returned for one answer, as a score; text is no number, even where it could be read as one."""
    if value is None:
        return Score(None, reason=f"{source} gave no score")
    score = value if isinstance(value, Score) else Score(value)
    if score.value is None:
        return score
    try:
        if isinstance(score.value, UNORDERED):
            raise TypeError
        number = float(score.value)
    except (TypeError, ValueError, RuntimeError):
        return Score(None, reason=f"{source} returned a {type(score.value).__name__}, not a number")
    return replace(score, value=number).finite(source, number)
