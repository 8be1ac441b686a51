"""Rows become token ids once: unusable ones are counted by reason, whole prompts are held out, responses gathered by prompt."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from tether.core.errors import DataError
from tether.data.chat import Encoded
from tether.data.sources import split_by_group

Row = TypeVar("Row")
Prepared = TypeVar("Prepared")
Encoding = tuple[list[Prepared], dict[str, int]]
"""Usable rows in tokens, and how many others there were, by reason."""


class Split(NamedTuple, Generic[Prepared]):
    """Rows to train on, rows of held-out prompts, how many were left out by reason, and how many of those were ties held out."""

    train: Sequence[Prepared]
    test: Sequence[Prepared]
    skipped: dict[str, int]
    heldout_ties: int = 0


def prepare(
    rows: Sequence[Row], encode: Callable[[Sequence[Row]], Encoding[Prepared]], heldout_fraction: float, seed: int, noun: str
) -> Split[Prepared]:
    """Hold out whole prompts, then encode both parts.

    Args:
        noun: the word for rows in the error.

    Raises:
        DataError: nothing is left to train on.
    """
    parts = split_by_group(rows, heldout_fraction, seed)
    (train, skipped), (test, more) = map(encode, parts)
    reasons = dict(Counter(skipped) + Counter(more))
    if not train:
        raise DataError(f"none of {len(rows)} {noun} can be used for training: {reasons or 'there are none'}")
    return Split(train, test, reasons, more.get("tie", 0))


def encode_rows(rows: Iterable[Row], encode: Callable[[Row], Prepared]) -> Encoding[Prepared]:
    """Every row that `encode` takes, and how many it refused with a DataError, by its message."""
    encoded: list[Prepared] = []
    skipped: Counter[str] = Counter()
    for row in rows:
        try:
            encoded.append(encode(row))
        except DataError as error:
            skipped[str(error)] += 1
    return encoded, dict(skipped)


def within(sequence: Encoded, max_length: int, option: str) -> Encoded:
    """The sequence, if it has at most `max_length` tokens; the error names `option`, the setting of this length.

    Raises:
        DataError: it is longer.
    """
    if len(sequence) > max_length:
        raise DataError(f"longer than {option} = {max_length} tokens")
    return sequence


def by_prompt(rows: Iterable[tuple[str, Sequence[Encoded], Sequence[Any]]]) -> Iterator[tuple[Any, ...]]:
    """Labelled responses gathered by prompt, each distinct one once.

    Args:
        rows: the prompt's name, responses, and their label, a tuple.

    Yields:
        name, distinct responses, and a column for each part of the rows: places of their responses, then parts of their labels.
    """
    groups: dict[str, tuple[dict[Encoded, int], list[tuple[Any, ...]]]] = {}
    for group, sequences, label in rows:
        places, members = groups.setdefault(group, ({}, []))
        members.append((*(places.setdefault(sequence, len(places)) for sequence in sequences), *label))
    for group, (places, members) in groups.items():
        yield group, tuple(places), *zip(*members, strict=True)
