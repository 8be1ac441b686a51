"""The numbers of single tokens that a step leaves for its report."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch

from tether.core.types import Json
from tether.data.chat import ChatEncoder
from tether.stages.rollouts import Experience

NOTED = 2
"""Responses of a step whose tokens are noted."""
MOST_TOKENS = 256
"""Tokens of a response that are noted: its first."""
MOST_REPLIES = 4
"""Replies of an episode for which so many are noted, with what lies between."""


def token_rows(
    experience: Experience,
    encoder: ChatEncoder,
    places: Sequence[int],
    step: int,
) -> Iterator[Json]:
    """A row for each response: text, KL with the reference, value and advantage of each token by
    the policy, and the number of counted tokens.

    `sample` is the place among the responses of the step that are recorded. Values
    that are all 0, and what the step has not measured, are left out. Of a response that teaches nothing no token counts.
    Tokens of an environment have None for numbers.
    """
    matrices = {
        "kl": experience.logprobs - experience.reference_logprobs,
        "value": experience.values,
        "advantage": experience.advantages,
    }
    for sample, place in enumerate(places[:NOTED]):
        spans = experience.rollouts[place].spans
        most = MOST_TOKENS * min(len(spans), MOST_REPLIES)
        ids = experience.rollouts[place].response_ids[:most]
        own = {at for start, stop in spans for at in range(start, min(stop, len(ids)))}
        rows = torch.stack([one[place, : len(own)] for one in matrices.values()]).tolist()
        measured = {
            "kl": bool(experience.has_logprobs[place] and experience.has_reference[place]),
            "value": any(rows[1]),
            "advantage": True,
        }
        yield {
            "step": step,
            "sample": sample,
            "tokens": pieces(encoder, ids),
            "counted": len(ids) if experience.num_taught[place] else 0,
            **{
                name: [float(f"{next(row):.3g}") if at in own else None for at in range(len(ids))]
                for name, row in zip(matrices, map(iter, rows), strict=True)
                if measured[name]
            },
        }


def pieces(encoder: ChatEncoder, ids: Sequence[int]) -> list[str]:
    """The text of each token as it is within its response, stop tokens included."""
    decode = encoder.tokenizer.decode
    texts = [decode([*ids[:1]])] if ids else []
    for before, token in pairwise(ids):
        both = decode([before, token])
        texts.append(both[len(decode([before])) :])
    return texts
