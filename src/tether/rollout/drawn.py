"""Steps of every engine before and after it draws tokens: prompts to ids, and ids to rollouts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

import torch

from tether.algorithms.distillation import CHUNK
from tether.core.errors import DataError
from tether.core.protocols import Engine, Finished
from tether.core.thoughts import opened_by
from tether.core.types import Prompt, Rollout, RolloutGroup, Sampling, Spans, StopReason
from tether.data.batches import make_batch
from tether.data.chat import ChatEncoder, Encoded
from tether.models.trunk import Role

Ids = tuple[int, ...]
Top = tuple[list[int], list[float]]
"""The likeliest tokens at a place, and their log-probabilities."""
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
    ordinal. `progress` gets the number of those finished so far.
    """

    rows: Sequence[Ids]
    ordinals: Sequence[int]
    sampling: Sampling
    num_samples: int = 1
    seed: int = 0
    progress: Finished = None


class TokenEngine(Engine, Protocol):
    """An engine that takes prompts as ids."""

    def draw(self, draws: Draws) -> list[list[Drawn]]:
        """The responses to each row of prompt ids."""
        ...


class PromptReader(Protocol):
    """The encoder of a model, and its limit in tokens."""

    encoder: ChatEncoder
    context_length: int


def has_stop_string(encoder: ChatEncoder, sampling: Sampling, response: Sequence[int]) -> bool:
    """True if the end of the response's ids decodes to one of the strings that end a response."""
    stops = sampling.stop_strings
    if not stops:
        return False
    tail = response[max(0, len(response) - max(len(stop.encode()) for stop in stops) - 8) :]
    text = encoder.tokenizer.decode(list(tail))
    return any(stop in text for stop in stops)


def draws_of(
    reader: PromptReader,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    *,
    num_samples: int = 1,
    seed: int = 0,
    ordinals: Sequence[int] | None = None,
    progress: Finished = None,
) -> Draws:
    """The arguments of `Engine.generate`, with the prompts as ids.

    Raises:
        DataError: the template refuses a prompt, or a prompt and its response do not fit the
            model's context.
    """
    most = sampling.max_new_tokens
    rows = []
    for prompt in prompts:
        try:
            rows.append(prompt_ids(reader.encoder, prompt, most, reader.context_length))
        except DataError as error:
            raise DataError(f"prompt {prompt.id or prompt.text[:40]!r}: {error}") from error
    places = range(len(rows)) if ordinals is None else ordinals
    return Draws(rows, places, sampling, num_samples, seed, progress)


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


def as_groups(
    encoder: ChatEncoder,
    prompts: Sequence[Prompt],
    draws: Draws,
    drawn: Iterable[Sequence[Drawn]],
    version: int,
) -> list[RolloutGroup]:
    """All samples, prompt by prompt; a text ends before its first stop string."""
    groups = []
    for prompt, ids, responses in zip(prompts, draws.rows, drawn, strict=True):
        opening = opening_of(encoder, ids)
        rollouts = []
        for index, one in enumerate(responses):
            text = encoder.decode(one.ids)
            for stop in draws.sampling.stop_strings:
                text = text.split(stop)[0]
            rollouts.append(
                Rollout(
                    ids,
                    one.ids,
                    one.logprobs,
                    one.reason,
                    text,
                    index,
                    version,
                    draws.sampling,
                    prompt,
                    spans=one.spans,
                    opening=opening,
                ),
            )
        groups.append(RolloutGroup(prompt, tuple(rollouts)))
    return groups


@torch.no_grad()
def score_ids(role: Role, ids: Ids, *, padded: bool = False) -> list[float]:
    """The log-probability of every token but the first, in nats, at temperature 1; `padded`: see
    Role.logprobs_of.
    """
    counted = (False,) + (True,) * (len(ids) - 1)
    batch = make_batch([Encoded(ids, counted)], ids[0]).to(role.device)
    hidden = role.hidden(batch)
    logprobs, _ = role.logprobs_of(hidden, batch, padded=padded)
    return logprobs.tolist()


@torch.no_grad()
def top_ids(role: Role, ids: Ids, count: int) -> list[Top]:
    """The likeliest tokens in the place of every token but the first, at temperature 1."""
    counted = (False,) + (True,) * (len(ids) - 1)
    batch = make_batch([Encoded(ids, counted)], ids[0]).to(role.device)
    head = role.unembedding()
    parts = role.hidden(batch)[batch.predict].split(CHUNK)
    tops = [head.logprobs(part).topk(count) for part in parts]
    return [
        row for one in tops for row in zip(one.indices.tolist(), one.values.tolist(), strict=True)
    ]
