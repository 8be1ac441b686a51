"""Single responses with a verdict, gathered by prompt and encoded once: what KTO trains on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

from tether.core.errors import DataError
from tether.core.types import Comparison, Conversation, Feedback
from tether.data.chat import ChatEncoder, Encoded
from tether.data.prepare import Split, by_prompt, encode_rows, prepare, within
from tether.data.sources import group_of

Verdict = tuple[str, Conversation, Conversation, bool | None]
"""A prompt's name, the prompt, a response, and whether it is desirable (None: a tie)."""


@dataclass(frozen=True)
class JudgedPrompt:
    """One prompt's distinct responses, encoded, and the verdicts on them: `responses` are indices into `sequences`."""

    group: str
    sequences: tuple[Encoded, ...]
    responses: tuple[int, ...]
    desirable: tuple[bool, ...]


def encode_feedback(
    rows: Sequence[Feedback | Comparison], encoder: ChatEncoder, max_length: int, option: str = "max_length"
) -> tuple[list[JudgedPrompt], dict[str, int]]:
    """Verdicts gathered by prompt, each distinct response encoded once; unusable rows are counted by reason.

    A comparison's likelier side is desirable and the other one is not; a tie says nothing about either.

    Args:
        max_length: longer responses are left out; the reason names `option`, the setting of this length.
    """

    def encode(verdict: Verdict) -> tuple[str, list[Encoded], tuple[bool]]:
        group, prompt, response, desirable = verdict
        if desirable is None:
            raise DataError("tie")
        if len(response) > 1:
            raise DataError("a response has several turns")
        return group, [within(encoder.conversation((*prompt, *response), "last"), max_length, option)], (desirable,)

    responses, skipped = encode_rows((verdict for row in rows for verdict in _verdicts(row)), encode)
    return [JudgedPrompt(*columns) for columns in by_prompt(responses)], skipped


def _verdicts(row: Feedback | Comparison) -> list[Verdict]:
    group = group_of(row)
    if isinstance(row, Feedback):
        return [(group, row.prompt, row.response, row.desirable)]
    if row.tie:
        return [(group, row.prompt, row.chosen, None)]
    likely = row.probability >= 0.5
    return [(group, row.prompt, row.chosen, likely), (group, row.prompt, row.rejected, not likely)]


def prepare_feedback(
    rows: Sequence[Feedback | Comparison], encoder: ChatEncoder, max_length: int, option: str, heldout_fraction: float, seed: int
) -> Split[JudgedPrompt]:
    """Verdicts to train on and verdicts on held-out prompts, with how many were left out, by reason.

    Raises:
        DataError: nothing is left to train on, all of it is of one class, or it is about a single prompt.
    """
    encode = partial(encode_feedback, encoder=encoder, max_length=max_length, option=option)
    split = prepare(rows, encode, heldout_fraction, seed, "judged responses")
    kinds = {verdict for judged in split.train for verdict in judged.desirable}
    if len(kinds) == 1:
        raise DataError(
            f"all responses to train on are {'desirable' if kinds.pop() else 'undesirable'}: KTO learns from both kinds. "
            "Add responses of the other kind; desirable ones alone are demonstrations, for sft."
        )
    if len(split.train) == 1:
        raise DataError("all responses to train on answer one prompt: KTO compares them with answers to other prompts. Add some.")
    return split


def verdicts_of(judged: Sequence[JudgedPrompt]) -> tuple[list[int], list[bool]]:
    """All verdicts in order: the places of their responses among all sequences, and whether each is desirable."""
    starts = accumulate((len(row.sequences) for row in judged), initial=0)
    places = [start + i for start, row in zip(starts, judged, strict=False) for i in row.responses]
    return places, [desirable for row in judged for desirable in row.desirable]


def mismatched(judged: Sequence[JudgedPrompt], max_length: int) -> list[tuple[Encoded, int]]:
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
            pair = Encoded(prompt + sequence.ids[start:], (False,) * len(prompt) + sequence.trained[start:])
            if row is not other and pair != sequence and len(pair) <= max_length:
                pairs.append((pair, row.responses.count(index)))
    return pairs
