"""Comparisons gathered by prompt and encoded once: what a reward model and the direct methods on pairs train on."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from tether.core.errors import DataError
from tether.core.types import Comparison
from tether.data.batches import cut_together
from tether.data.chat import ChatEncoder, Encoded
from tether.data.sources import group_of, split_by_group


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


@dataclass(frozen=True)
class Pairs:
    """The pairs of several rankings as indices into all their sequences, one after another."""

    chosen: list[int]
    rejected: list[int]
    probability: list[float]
    margin: list[float]


def by_votes(comparisons: Sequence[Comparison]) -> list[Comparison]:
    """The same comparisons, the label of each the share of its annotators who prefer `chosen`; a tie counts half to both sides.

    A comparison that nobody voted on keeps its label, and a tie among many is no tie but an even label.

    Raises:
        DataError: there are no votes at all.
    """
    if comparisons and not any(row.annotations for row in comparisons):
        raise DataError("labels = 'votes' asks for the annotators' votes, and no comparison has any. Use labels = 'given'")

    def share(row: Comparison) -> float:
        return sum(0.5 + 0.5 * ((a.preference > 0) - (a.preference < 0)) for a in row.annotations) / len(row.annotations)

    return [replace(row, probability=share(row), tie=False) if row.annotations else row for row in comparisons]


def encode_comparisons(
    comparisons: Sequence[Comparison],
    encoder: ChatEncoder,
    max_length: int,
    option: str = "max_length",
    *,
    one_turn: bool = False,
) -> tuple[list[Ranking], dict[str, int]]:
    """Comparisons gathered by prompt, each distinct response encoded once; ties and unusable rows are counted by reason.

    The likelier side comes first, whatever the source called it.

    Args:
        max_length: longer responses are left out, with `option`, the setting that says so, in the reason.
        one_turn: leave out pairs whose sides go on for several turns, of which only the last would count.
    """
    grouped: dict[str, list[Comparison]] = defaultdict(list)
    skipped: dict[str, int] = {}
    for comparison in comparisons:
        if comparison.tie:
            skipped["tie"] = skipped.get("tie", 0) + 1
        elif one_turn and max(len(comparison.chosen), len(comparison.rejected)) > 1:
            skipped["a side has several turns"] = skipped.get("a side has several turns", 0) + 1
        else:
            grouped[group_of(comparison)].append(comparison if comparison.probability >= 0.5 else comparison.swap())
    rankings = [_ranking(group, rows, encoder, max_length, option, skipped) for group, rows in grouped.items()]
    return [r for r in rankings if r is not None], skipped


def prepare_comparisons(
    comparisons: Sequence[Comparison],
    encoder: ChatEncoder,
    max_length: int,
    option: str,
    *,
    heldout_fraction: float,
    seed: int,
    one_turn: bool = False,
) -> tuple[list[Ranking], list[Ranking], dict[str, int], int]:
    """Rankings to train on, rankings of held-out prompts, the reasons for what was left out, and the held-out ties.

    Raises:
        DataError: nothing is left to train on.
    """
    parts = split_by_group(comparisons, heldout_fraction, seed) if heldout_fraction else (comparisons, [])
    (train, skipped), (test, more) = (encode_comparisons(p, encoder, max_length, option, one_turn=one_turn) for p in parts)
    if not train:
        raise DataError(f"none of {len(comparisons)} comparisons can be used for training: {skipped or 'there are none'}")
    reasons = {key: skipped.get(key, 0) + more.get(key, 0) for key in {**skipped, **more}}
    return train, test, reasons, sum(c.tie for c in parts[1])


def _ranking(
    group: str, rows: list[Comparison], encoder: ChatEncoder, max_length: int, option: str, skipped: dict[str, int]
) -> Ranking | None:
    places: dict[tuple[int, ...], int] = {}
    sequences: list[Encoded] = []
    pairs: list[tuple[int, int, float, float]] = []
    for row in rows:
        try:
            sides = [encoder.conversation((*row.prompt, *side), "last") for side in (row.chosen, row.rejected)]
            if max(map(len, sides)) > max_length:
                raise DataError(f"longer than {option} = {max_length} tokens")
            if sides[0].ids == sides[1].ids:
                raise DataError("both sides are the same tokens")
        except DataError as error:
            skipped[str(error)] = skipped.get(str(error), 0) + 1
            continue
        for side in sides:
            if side.ids not in places:
                places[side.ids] = len(sequences)
                sequences.append(side)
        pairs.append((places[sides[0].ids], places[sides[1].ids], row.probability, abs(row.margin or 0.0)))
    if not pairs:
        return None
    chosen, rejected, probability, margin = zip(*pairs, strict=True)
    return Ranking(group, tuple(sequences), chosen, rejected, probability, margin)


def pairs_of(rankings: Sequence[Ranking]) -> Pairs:
    """All pairs, in order."""
    pairs, start = Pairs([], [], [], []), 0
    for ranking in rankings:
        pairs.chosen.extend(start + i for i in ranking.chosen)
        pairs.rejected.extend(start + i for i in ranking.rejected)
        pairs.probability.extend(ranking.probability)
        pairs.margin.extend(ranking.margin)
        start += len(ranking.sequences)
    return pairs


def cut_rankings(rankings: Sequence[GatheredT], budget: int, *, document_tokens: int = 0) -> list[list[GatheredT]]:
    """Rankings together as long as the padded size of their batch fits; a prompt's responses are never separated."""
    return [[rankings[i] for i in cut] for cut in cut_together([r.sequences for r in rankings], budget, document_tokens)]
