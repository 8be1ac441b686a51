"""Steps of every engine before and after it draws tokens: prompts to ids, and ids to rollouts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, TypedDict

import torch

from tether.core.errors import DataError
from tether.core.protocols import Engine
from tether.core.thoughts import opened_by
from tether.core.types import Prompt, Rollout, RolloutGroup, Sampling, Spans, StopReason
from tether.data.batches import make_batch
from tether.data.chat import ChatEncoder, Encoded
from tether.models.trunk import Role

Ids = tuple[int, ...]
OPENING = 16
"""Tokens at the end of a prompt that may spell the mark of a thought."""
SAMPLES, TURNS = 1 << 12, 1 << 12
"""More than the samples of a prompt, and the parts of a response that are drawn one after another."""


class Drawn(NamedTuple):
    """One response: its ids with the stop token, the log-probability of each (nats), why it ended,
    and which of its tokens were drawn (none given: all of them).
    """

    ids: Ids
    logprobs: tuple[float, ...]
    reason: StopReason
    spans: Spans = ()


def drawn_of(response: Sequence[tuple[int, float]], reason: StopReason) -> Drawn:
    """A response by its tokens, each with its log-probability."""
    return Drawn(
        tuple(token for token, _ in response),
        tuple(logprob for _, logprob in response),
        reason,
    )


class Draws(NamedTuple):
    """Responses to draw: `num_samples` to each row of prompt ids, whose randomness depends on its
    ordinal. `cpu_kernels` as in LocalEngine.
    """

    rows: Sequence[Ids]
    ordinals: Sequence[int]
    sampling: Sampling
    num_samples: int
    seed: int
    cpu_kernels: bool


class TokenEngine(Engine, Protocol):
    """An engine that takes prompts as ids."""

    def draw(
        self,
        rows: list[Ids],
        ordinals: Sequence[int],
        sampling: Sampling,
        num_samples: int,
        seed: int,
    ) -> list[list[Drawn]]:
        """`num_samples` responses to each row of prompt ids."""
        ...


class DrawArguments(TypedDict, total=False):
    """Arguments of `Engine.generate` that an engine hands on to another one."""

    num_samples: int
    seed: int


def has_stop_string(encoder: ChatEncoder, sampling: Sampling, response: Sequence[int]) -> bool:
    """True if the end of the response's ids decodes to one of the strings that end a response."""
    stops = sampling.stop_strings
    if not stops:
        return False
    tail = response[max(0, len(response) - max(len(stop.encode()) for stop in stops) - 8) :]
    text = encoder.tokenizer.decode(list(tail))
    return any(stop in text for stop in stops)


def encode_prompts(
    encoder: ChatEncoder,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    context_length: int,
) -> list[Ids]:
    """The prompts as ids.

    Raises:
        DataError: the template refuses a prompt, or a prompt and its response do not fit the
            model's context.
    """
    rows = []
    for prompt in prompts:
        try:
            rows.append(prompt_ids(encoder, prompt, sampling.max_new_tokens, context_length))
        except DataError as error:
            raise DataError(f"prompt {prompt.id or prompt.text[:40]!r}: {error}") from error
    return rows


def prompt_ids(
    encoder: ChatEncoder,
    prompt: Prompt,
    max_new_tokens: int,
    context_length: int,
) -> Ids:
    """One prompt as ids.

    Raises:
        DataError: the template refuses the prompt, or it leaves no room for its response;
            "category: detail", as in quarantine.
    """
    ids = encoder.prompt(prompt.messages)
    if len(ids) + max_new_tokens > context_length:
        raise DataError(
            f"does not fit the model's context of {context_length}: {len(ids)} tokens, and "
            f"{max_new_tokens} new ones. Shorten the prompt or lower max_new_tokens.",
        )
    return ids


def ordinal_of_part(place: int, sample: int, part: int) -> int:
    """The number by which the draws of a later part of a response differ from all others of a run."""
    return ((place + 1) * SAMPLES + sample) * TURNS + part


def opening_of(encoder: ChatEncoder, prompt: Ids) -> str:
    """The mark of a thought that a prompt ends with."""
    return opened_by(encoder.decode(prompt[-OPENING:]))


def as_group(
    encoder: ChatEncoder,
    prompt: Prompt,
    ids: Ids,
    drawn: Sequence[Drawn],
    sampling: Sampling,
    version: int,
) -> RolloutGroup:
    """All samples of one prompt; a text ends before its first stop string."""

    def text(response: Ids) -> str:
        words = encoder.decode(response)
        for stop in sampling.stop_strings:
            words = words.split(stop)[0]
        return words

    opening = opening_of(encoder, ids)
    rollouts = (
        Rollout(
            ids,
            one.ids,
            one.logprobs,
            one.reason,
            text(one.ids),
            index,
            version,
            sampling,
            prompt,
            spans=one.spans,
            opening=opening,
        )
        for index, one in enumerate(drawn)
    )
    return RolloutGroup(prompt, tuple(rollouts))


@torch.no_grad()
def score_ids(role: Role, ids: Ids, *, padded: bool = False) -> list[float]:
    """The log-probability of every token but the first, in nats, at temperature 1; `padded`: see
    Role.logprobs_of.
    """
    batch = make_batch([Encoded(ids, (False, *(True,) * (len(ids) - 1)))], ids[0]).to(role.device)
    return role.logprobs_of(role.hidden(batch), batch, padded=padded)[0].tolist()
