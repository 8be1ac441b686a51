"""Rows become token ids once: unusable ones are counted by reason, whole prompts are held out,
responses gathered by prompt.

`Ranking` is what a reward model and the direct methods on pairs train on, `JudgedPrompt` what KTO
trains on.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Generic, Literal, NamedTuple, TypeVar

from tether.core.errors import DataError
from tether.core.left_out import left_out_words, too_long
from tether.core.once import once
from tether.core.protocols import now_doing
from tether.core.types import Comparison, Demonstration, Feedback, Json
from tether.data.batches import cut_together
from tether.data.chat import ChatEncoder, Encoded
from tether.data.sources import group_of, split_by_group
from tether.settings.learner import SupervisedConfig
from tether.settings.supervised import DirectConfig, KTOConfig, SFTConfig

_LOG = logging.getLogger("tether.data")
Row = TypeVar("Row")
Prepared = TypeVar("Prepared")
Encoding = tuple[list[Prepared], dict[str, int]]
"""Usable rows in tokens, and how many others there were, by reason."""


class Split(NamedTuple, Generic[Prepared]):
    """Rows to train on, rows of held-out prompts, by reason how many were left out (`skipped`) and
    how many `cut`, as a summary has them, and how many of the former were ties held out.
    """

    train: Sequence[Prepared]
    test: Sequence[Prepared]
    counts: Json
    heldout_ties: int = 0


def encoded_split(
    rows: Sequence,
    config: SupervisedConfig,
    encoder: ChatEncoder,
    section: str,
) -> Split:
    """Hold out whole prompts, then encode both parts.

    Args:
        section: of the recipe, for its name in messages.

    Raises:
        DataError: nothing is left to train on.
    """
    noun = f"rows of [{section}]"
    now_doing(f"encoding {len(rows)} {noun}")
    if dict(config).get("labels") == "votes":
        rows = by_votes(rows)
    limit = limit_of(encoder, config, section)
    (train, skipped), (test, more) = (
        encode(part, config, encoder, limit)
        for part in split_by_group(rows, config.heldout_fraction, config.seed)
    )
    reasons = dict(Counter(skipped) + Counter(more))
    if not train:
        raise DataError(
            f"none of {len(rows)} {noun} can be used for training: {reasons or 'there are none'}",
        )
    counts = {"skipped": reasons} | ({"cut": dict(limit.cut)} if limit.cut else {})
    warn_left_out(counts, len(rows), noun)
    warn_without_held_out(len(test), config.heldout_fraction, noun)
    return Split(train, test, counts, more.get("tie", 0))


def warn_left_out(counts: Json, rows: int, noun: str) -> None:
    """Name in the log, once a process, the share of rows that are left out or cut, and why, where
    it is seen.
    """
    if words := left_out_words(counts, rows):
        once(_LOG.warning, "%s: %s", noun, words)


def warn_without_held_out(num_held_out: int, fraction: float, noun: str) -> None:
    """Name in the log, once a process, that no row is held out although a part of the prompts
    should be.
    """
    if fraction and not num_held_out:
        once(
            _LOG.warning,
            "held out: no %s (heldout_fraction = %g). Accuracy and loss are those of rows that "
            "the model learns from. Raise heldout_fraction, or give more prompts.",
            noun,
            fraction,
        )


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


class Limit(NamedTuple):
    """The most tokens that a row may have, the key that says so, the number of rows that were cut
    there, by reason (None: longer rows are left out), and the model's context.
    """

    tokens: int
    key: str = ""
    cut: Counter[str] | None = None
    context: int = 2**31


def limit_of(encoder: ChatEncoder, config: SupervisedConfig, section: str) -> Limit:
    """The smaller one of a section's `max_length` and the model's context."""
    cut = Counter[str]() if dict(config).get("too_long") == "truncate" else None
    context = encoder.context_length
    return Limit(min(config.max_length, context), f"{section}.max_length", cut, context)


def within(sequences: Sequence[Encoded], limit: Limit) -> list[Encoded]:
    """The sequences of a row, cut after the limit's last token where rows are cut; no stop token is
    put there. Those of which no token that counts is left are left out.

    Raises:
        DataError: one is longer, and rows are left out; or nothing that counts would be left. The
            error names the limit.
    """
    longest = max(map(len, sequences))
    if longest <= limit.tokens:
        return [*sequences]
    reason = too_long(longest, limit.tokens, limit.key, limit.context)
    edge = limit.tokens
    parts = [
        Encoded(s.ids[:edge], s.trained[:edge], tuple(fork for fork in s.forks if fork < edge))
        for s in sequences
    ]
    left = [part for part in parts if part.num_trained]
    if limit.cut is None or not left:
        raise DataError(reason)
    limit.cut[reason] += 1
    return left


def by_prompt(
    rows: Iterable[tuple[str, Sequence[Encoded], Sequence[object]]],
) -> Iterator[tuple[Any, ...]]:
    """Labelled responses gathered by prompt, each distinct one once.

    Args:
        rows: the prompt's name, responses, and their label, a tuple.

    Yields:
        name, distinct responses, and a column for each part of the rows: places of their responses, then parts of their labels.
    """
    groups: dict[str, tuple[dict[Encoded, int], list[tuple[object, ...]]]] = {}
    for group, sequences, label in rows:
        places, members = groups.setdefault(group, ({}, []))
        members.append(
            (*(places.setdefault(sequence, len(places)) for sequence in sequences), *label),
        )
    for group, (places, members) in groups.items():
        yield group, tuple(places), *zip(*members, strict=True)


@dataclass(frozen=True)
class Ranking:
    """One prompt's distinct responses, encoded, and the pairs among them as indices into
    `sequences`.
    """

    group: str
    sequences: tuple[Encoded, ...]
    chosen: tuple[int, ...]
    rejected: tuple[int, ...]
    probability: tuple[float, ...]
    margin: tuple[float, ...]


def num_pairs(rankings: Iterable[Ranking]) -> int:
    """Pairs of all these prompts."""
    return sum(len(ranking.chosen) for ranking in rankings)


def pair_counts(split: Split[Ranking]) -> Json:
    """Counts of prompts and pairs, as a summary has them."""
    return {
        "num_prompts": len(split.train),
        "num_pairs": num_pairs(split.train),
        "num_heldout_pairs": num_pairs(split.test),
    }


@dataclass(frozen=True)
class JudgedPrompt:
    """One prompt's distinct responses, encoded, and the verdicts on them: `responses` are indices
    into `sequences`.
    """

    group: str
    sequences: tuple[Encoded, ...]
    responses: tuple[int, ...]
    desirable: tuple[bool, ...]


Gathered = Ranking | JudgedPrompt
"""Responses to one prompt."""
GatheredT = TypeVar("GatheredT", bound=Gathered)


class Pairs(NamedTuple):
    """The pairs of several rankings as indices into all their sequences, one after another, with
    the prompt of each.
    """

    chosen: list[int]
    rejected: list[int]
    probability: list[float]
    margin: list[float]
    groups: list[str]


def by_votes(comparisons: Sequence[Comparison]) -> list[Comparison]:
    """The same comparisons, the label of each the share of its annotators who prefer `chosen`; a
    tie counts half to both sides.

    A comparison without votes keeps its label, and a tie among many votes is no tie but an even
    label.

    Raises:
        DataError: there are no votes at all.
    """
    if comparisons and not any(row.annotations for row in comparisons):
        raise DataError(
            "labels = 'votes' asks for the annotators' votes, and no comparison has "
            "any. Use labels = 'given'",
        )

    def share(row: Comparison) -> float:
        return sum(
            0.5 + 0.5 * ((a.preference > 0) - (a.preference < 0)) for a in row.annotations
        ) / len(row.annotations)

    return [
        replace(row, probability=share(row), tie=False) if row.annotations else row
        for row in comparisons
    ]


def encode(
    rows: Sequence,
    config: SupervisedConfig,
    encoder: ChatEncoder,
    limit: Limit,
) -> Encoding:
    """Rows of a stage in tokens, as its settings have them, and how many others there were, by
    reason.
    """
    if isinstance(config, SFTConfig):
        return encode_demonstrations(rows, encoder, limit, config.train_on)
    if isinstance(config, KTOConfig):
        return encode_feedback(rows, encoder, limit)
    return encode_comparisons(rows, encoder, limit, isinstance(config, DirectConfig))


def encode_demonstrations(
    rows: Sequence[Demonstration],
    encoder: ChatEncoder,
    limit: Limit,
    train_on: Literal["all", "last"] = "all",
) -> Encoding[Encoded]:
    """The sequences of all rows; a row has several where the template renders its earlier replies
    differently later.
    """
    encoded, skipped = encode_rows(
        rows,
        lambda row: within(encoder.conversations(row.messages, train_on), limit),
    )
    return [sequence for sequences in encoded for sequence in sequences], skipped


def encode_comparisons(
    comparisons: Sequence[Comparison],
    encoder: ChatEncoder,
    limit: Limit,
    one_turn: bool = False,
) -> Encoding[Ranking]:
    """Comparisons gathered by prompt, each distinct response encoded once; ties and unusable rows
    are counted by reason.

    The likelier side comes first, whatever the source called it.

    Args:
        one_turn: leave out pairs whose sides go on for several turns, of which only the last would
            count.
    """

    def encode(row: Comparison) -> tuple[str, list[Encoded], tuple[float, float]]:
        if row.tie:
            raise DataError("tie")
        if one_turn and max(len(row.chosen), len(row.rejected)) > 1:
            raise DataError("a side has several turns")
        row = row if row.probability >= 0.5 else row.swap()
        sides = within(
            [
                encoder.conversation((*row.prompt, *side), "last")
                for side in (row.chosen, row.rejected)
            ],
            limit,
        )
        if len({side.ids for side in sides}) < 2:
            raise DataError("both sides are the same tokens")
        return group_of(row), sides, (row.probability, abs(row.margin or 0.0))

    pairs, skipped = encode_rows(comparisons, encode)
    rankings = [
        Ranking(group, sequences, chosen, rejected, probability=probability, margin=margin)
        for group, sequences, chosen, rejected, probability, margin in by_prompt(pairs)
    ]
    return rankings, skipped


def pairs_of(rankings: Sequence[Ranking]) -> Pairs:
    """All pairs, in order."""
    starts = accumulate((len(ranking.sequences) for ranking in rankings), initial=0)
    rows = [
        (start + chosen, start + rejected, *label, ranking.group)
        for start, ranking in zip(starts, rankings, strict=False)
        for chosen, rejected, *label in zip(
            ranking.chosen,
            ranking.rejected,
            ranking.probability,
            ranking.margin,
            strict=True,
        )
    ]
    return Pairs(*([row[column] for row in rows] for column in range(5)))  # type: ignore[arg-type]


def sequences_of(rows: Iterable[Gathered]) -> list[Encoded]:
    """All responses, in order."""
    return [sequence for row in rows for sequence in row.sequences]


def cut_rankings(
    rankings: Sequence[GatheredT],
    budget: int,
    *,
    document_tokens: int = 0,
) -> list[list[GatheredT]]:
    """Rankings together as long as the padded size of their batch fits; a prompt's responses are
    never separated.
    """
    return [
        [rankings[i] for i in cut]
        for cut in cut_together([r.sequences for r in rankings], budget, document_tokens)
    ]


def encode_feedback(
    rows: Sequence[Feedback],
    encoder: ChatEncoder,
    limit: Limit,
) -> Encoding[JudgedPrompt]:
    """Verdicts gathered by prompt, each distinct response encoded once; unusable rows are counted
    by reason.
    """

    def encode(row: Feedback) -> tuple[str, list[Encoded], tuple[bool]]:
        if len(row.response) > 1:
            raise DataError("a response has several turns")
        sequence = encoder.conversation((*row.prompt, *row.response), "last")
        return group_of(row), within([sequence], limit), (row.desirable,)

    responses, skipped = encode_rows(rows, encode)
    return [JudgedPrompt(*columns) for columns in by_prompt(responses)], skipped


def prepare_feedback(
    rows: Sequence[Feedback],
    config: KTOConfig,
    encoder: ChatEncoder,
) -> Split[JudgedPrompt]:
    """Verdicts to train on and verdicts on held-out prompts, with how many were left out, by
    reason.

    Raises:
        DataError: nothing is left to train on, all of it is of one class, or it is about a single
            prompt.
    """
    split = encoded_split(rows, config, encoder, "kto")
    kinds = {verdict for judged in split.train for verdict in judged.desirable}
    if len(kinds) == 1:
        raise DataError(
            f"all responses to train on are {'desirable' if kinds.pop() else 'undesirable'}: KTO "
            "learns from both kinds. "
            "Add responses of the other kind; desirable ones alone are demonstrations, for sft.",
        )
    if len(split.train) == 1:
        raise DataError(
            "all responses to train on answer one prompt: KTO compares them with "
            "answers to other prompts. Add some.",
        )
    return split


def verdicts_of(judged: Sequence[JudgedPrompt]) -> tuple[list[int], list[bool]]:
    """All verdicts in order: the places of their responses among all sequences, and whether each is
    desirable.
    """
    starts = accumulate((len(row.sequences) for row in judged), initial=0)
    places = [start + i for start, row in zip(starts, judged, strict=False) for i in row.responses]
    return places, [desirable for row in judged for desirable in row.desirable]


def mismatched(judged: Sequence[JudgedPrompt], max_length: int) -> list[tuple[Encoded, int]]:
    """Every response after the prompt of another row, and the number of its verdicts.

    The rows form a ring in the order of their groups' names, so the pairs do not depend on the
    given order. Each response goes to the next prompt in the ring. A response is left out if it
    would be too long, or would meet its own prompt again. A single prompt gives no pairs.
    """
    ring = sorted(judged, key=lambda row: row.group)
    pairs = []
    for row, other in zip(ring, ring[1:] + ring[:1], strict=True):
        prompt = min(s.prompt for s in other.sequences)
        for index, sequence in enumerate(row.sequences):
            start = sequence.prompt_length
            pair = Encoded(
                prompt + sequence.ids[start:],
                (False,) * len(prompt) + sequence.trained[start:],
            )
            if row is not other and pair != sequence and len(pair) <= max_length:
                pairs.append((pair, row.responses.count(index)))
    return pairs
