"""Comparisons gathered by prompt and encoded once: what a reward model and the direct methods on pairs train on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple, Protocol, TypeVar

from tether.core.errors import DataError
from tether.core.types import Comparison
from tether.data.batches import cut_together
from tether.data.chat import ChatEncoder, Encoded
from tether.data.prepare import by_prompt, encode_rows, within
from tether.data.sources import group_of


class Gathered(Protocol):
    """Responses to one prompt."""

    @property
    def sequences(self) -> tuple[Encoded, ...]: ...


GatheredT = TypeVar("GatheredT", bound=Gathered)


@dataclass(frozen=True)
class Ranking:
    """One prompt's distinct responses, encoded, and the pairs among them as indices into `sequences`."""

    group: str
    sequences: tuple[Encoded, ...]
    chosen: tuple[int, ...]
    rejected: tuple[int, ...]
    probability: tuple[float, ...]
    margin: tuple[float, ...]


class Pairs(NamedTuple):
    """The pairs of several rankings as indices into all their sequences, one after another, with the prompt of each."""

    chosen: list[int]
    rejected: list[int]
    probability: list[float]
    margin: list[float]
    groups: list[str]


def by_votes(comparisons: Sequence[Comparison]) -> list[Comparison]:
    """The same comparisons, the label of each the share of its annotators who prefer `chosen`; a tie counts half to both sides.

    A comparison without votes keeps its label, and a tie among many votes is no tie but an even label.

    Raises:
        DataError: there are no votes at all.
    """
    if comparisons and not any(row.annotations for row in comparisons):
        raise DataError("labels = 'votes' asks for the annotators' votes, and no comparison has any. Use labels = 'given'")

    def share(row: Comparison) -> float:
        return sum(0.5 + 0.5 * ((a.preference > 0) - (a.preference < 0)) for a in row.annotations) / len(row.annotations)

    return [replace(row, probability=share(row), tie=False) if row.annotations else row for row in comparisons]


def encode_comparisons(
    comparisons: Sequence[Comparison], encoder: ChatEncoder, max_length: int, option: str = "max_length", one_turn: bool = False
) -> tuple[list[Ranking], dict[str, int]]:
    """Comparisons gathered by prompt, each distinct response encoded once; ties and unusable rows are counted by reason.

    The likelier side comes first, whatever the source called it.

    Args:
        max_length: longer responses are left out; the reason names `option`, the setting of this length.
        one_turn: leave out pairs whose sides go on for several turns, of which only the last would count.
    """

    def encode(row: Comparison) -> tuple[str, list[Encoded], tuple[float, float]]:
        if row.tie:
            raise DataError("tie")
        if one_turn and max(len(row.chosen), len(row.rejected)) > 1:
            raise DataError("a side has several turns")
        row = row if row.probability >= 0.5 else row.swap()
        sides = [encoder.conversation((*row.prompt, *side), "last") for side in (row.chosen, row.rejected)]
        within(max(sides, key=len), max_length, option)
        if sides[0].ids == sides[1].ids:
            raise DataError("both sides are the same tokens")
        return group_of(row), sides, (row.probability, abs(row.margin or 0.0))

    pairs, skipped = encode_rows(comparisons, encode)
    return [Ranking(*columns) for columns in by_prompt(pairs)], skipped


def pairs_of(rankings: Sequence[Ranking]) -> Pairs:
    """All pairs, in order."""
    starts = accumulate((len(ranking.sequences) for ranking in rankings), initial=0)
    rows = [
        (start + chosen, start + rejected, *label, ranking.group)
        for start, ranking in zip(starts, rankings, strict=False)
        for chosen, rejected, *label in zip(ranking.chosen, ranking.rejected, ranking.probability, ranking.margin, strict=True)
    ]
    return Pairs(*([row[column] for row in rows] for column in range(5)))  # type: ignore[arg-type]


def sequences_of(rows: Iterable[Gathered]) -> list[Encoded]:
    """All responses, in order."""
    return [sequence for row in rows for sequence in row.sequences]


def cut_rankings(rankings: Sequence[GatheredT], budget: int, *, document_tokens: int = 0) -> list[list[GatheredT]]:
    """Rankings together as long as the padded size of their batch fits; a prompt's responses are never separated."""
    return [[rankings[i] for i in cut] for cut in cut_together([r.sequences for r in rankings], budget, document_tokens)]
