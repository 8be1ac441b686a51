"""Single responses with a verdict, gathered by prompt and encoded once: what KTO trains on."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from tether.core.errors import DataError
from tether.core.types import Comparison, Conversation, Feedback
from tether.data.chat import ChatEncoder, Encoded
from tether.data.sources import group_of, split_by_group


@dataclass(frozen=True)
class Judged:
    """One prompt's distinct responses, encoded, and the verdicts on them: `responses` are indices into `sequences`."""

    group: str
    sequences: tuple[Encoded, ...]
    responses: tuple[int, ...]
    desirable: tuple[bool, ...]


@dataclass(frozen=True)
class Verdicts:
    """The verdicts of several prompts; `responses` are indices into all their sequences, one after another."""

    responses: list[int]
    desirable: list[bool]


def encode_feedback(
    rows: Sequence[Feedback | Comparison], encoder: ChatEncoder, max_length: int, option: str = "max_length"
) -> tuple[list[Judged], dict[str, int]]:
    """Verdicts gathered by prompt, each distinct response encoded once; unusable rows are counted by reason.

    A comparison's likelier side is desirable and the other one is not; a tie says nothing about either.

    Args:
        max_length: longer responses are left out, with `option`, the setting that says so, in the reason.
    """
    grouped: dict[str, list[tuple[Conversation, Conversation, bool]]] = defaultdict(list)
    skipped: dict[str, int] = {}
    for row in rows:
        if isinstance(row, Feedback):
            grouped[group_of(row)].append((row.prompt, row.response, row.desirable))
        elif row.tie:
            skipped["tie"] = skipped.get("tie", 0) + 1
        else:
            likely = row.probability >= 0.5
            grouped[group_of(row)] += [(row.prompt, row.chosen, likely), (row.prompt, row.rejected, not likely)]
    judged = [_judged(group, verdicts, encoder, max_length, option, skipped) for group, verdicts in grouped.items()]
    return [j for j in judged if j is not None], skipped


def prepare_feedback(
    rows: Sequence[Feedback | Comparison],
    encoder: ChatEncoder,
    max_length: int,
    option: str,
    *,
    heldout_fraction: float,
    seed: int,
) -> tuple[list[Judged], list[Judged], dict[str, int]]:
    """What to train on, what is held out (by prompt), and the reasons for what was left out.

    Raises:
        DataError: nothing is left to train on, all of it is of one class, or it is about a single prompt.
    """
    parts = split_by_group(rows, heldout_fraction, seed) if heldout_fraction else (rows, [])
    (train, skipped), (test, more) = (encode_feedback(part, encoder, max_length, option) for part in parts)
    if not train:
        raise DataError(f"none of {len(rows)} judged responses can be used for training: {skipped or 'there are none'}")
    kinds = {verdict for judged in train for verdict in judged.desirable}
    if len(kinds) == 1:
        raise DataError(
            f"all responses to train on are {'desirable' if kinds.pop() else 'undesirable'}: KTO learns from both kinds. "
            "Add responses of the other kind; desirable ones alone are demonstrations, for sft."
        )
    if len(train) == 1:
        raise DataError("all responses to train on answer one prompt: KTO compares them with answers to other prompts. Add some.")
    return train, test, {key: skipped.get(key, 0) + more.get(key, 0) for key in {**skipped, **more}}


def _judged(
    group: str,
    verdicts: Sequence[tuple[Conversation, Conversation, bool]],
    encoder: ChatEncoder,
    max_length: int,
    option: str,
    skipped: dict[str, int],
) -> Judged | None:
    places: dict[Encoded, int] = {}
    kept: list[tuple[int, bool]] = []
    for prompt, response, desirable in verdicts:
        try:
            if len(response) > 1:
                raise DataError("a response has several turns")
            sequence = encoder.conversation((*prompt, *response), "last")
            if len(sequence) > max_length:
                raise DataError(f"longer than {option} = {max_length} tokens")
        except DataError as error:
            skipped[str(error)] = skipped.get(str(error), 0) + 1
            continue
        kept.append((places.setdefault(sequence, len(places)), desirable))
    if not kept:
        return None
    responses, desirable = zip(*kept, strict=True)
    return Judged(group, tuple(places), responses, desirable)


def verdicts_of(judged: Sequence[Judged]) -> Verdicts:
    """All verdicts, in order."""
    verdicts, start = Verdicts([], []), 0
    for row in judged:
        verdicts.responses.extend(start + i for i in row.responses)
        verdicts.desirable.extend(row.desirable)
        start += len(row.sequences)
    return verdicts


def mismatched(judged: Sequence[Judged], max_length: int) -> list[tuple[Encoded, int]]:
    """Every response behind the prompt of another row, and how many verdicts it stands for.

    The rows form a ring in the order of their groups' names, so that the pairs do not depend on the order given, and each
    response goes to the next prompt in the ring. Left out is what would be too long, or would meet its own prompt again: nothing
    comes of a single prompt.
    """
    ring = sorted(judged, key=lambda row: row.group)
    pairs = []
    for row, other in zip(ring, ring[1:] + ring[:1], strict=True):
        prompt = min(s.prompt for s in other.sequences)
        for index, sequence in enumerate(row.sequences):
            start = sequence.prompt_length
            trained = (False,) * len(prompt) + sequence.trained[start:]
            pair = Encoded(prompt + sequence.ids[start:], trained)
            if row is not other and pair != sequence and len(pair) <= max_length:
                pairs.append((pair, row.responses.count(index)))
    return pairs
