"""Replies whose thought has a budget: where it is spent, the mark that ends a thought is given, and
the answer follows (https://arxiv.org/abs/2501.19393).

What is given is read like the words of an environment: it is no part of the reply's spans, so that
it has no loss, KL or advantage. Rewards read the whole reply, and checks of answers what is behind
its thought.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from tether.core.errors import ConfigError
from tether.core.protocols import Finished
from tether.core.thoughts import answer_start
from tether.core.types import Prompt, RolloutGroup, Sampling, StopReason
from tether.data.chat import ChatEncoder
from tether.rollout.drawn import (
    Drawn,
    Ids,
    TokenEngine,
    as_group,
    encode_prompts,
    opening_of,
    ordinal_of_part,
)


class EncodingEngine(TokenEngine, Protocol):
    """An engine with the encoder of its prompts."""

    encoder: ChatEncoder
    context_length: int


def generate_within(
    engine: EncodingEngine,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    ordinals: Sequence[int] | None,
    progress: Finished,
    *,
    num_samples: int = 1,
    seed: int = 0,
) -> list[RolloutGroup]:
    """See core.protocols.Engine.generate. Replies are drawn up to the budget, and then to their
    end.

    Raises:
        DataError: as an engine's own; or the chat template writes no thought.
        ConfigError: no token is left for an answer.
    """
    rows = encode_prompts(engine.encoder, prompts, sampling, engine.context_length)
    places = range(len(rows)) if ordinals is None else ordinals
    budget = sampling.thought_tokens
    first = replace(sampling, max_new_tokens=budget, thought_tokens=0)
    replies = engine.draw(rows, places, first, num_samples, seed)
    going: dict[int, list[tuple[int, int, Ids]]] = defaultdict(list)
    for row, group in enumerate(replies):
        for sample, reply in enumerate(group):
            if reply.reason is StopReason.LENGTH:
                given = _given(engine.encoder, rows[row], reply)
                going[len(given)].append((row, sample, given))
    for length, some in going.items():
        if (room := sampling.max_new_tokens - budget - length) < 1:
            raise ConfigError(
                f"thought_tokens = {budget} and the {length} tokens that end a thought leave "
                f"nothing of max_new_tokens = {sampling.max_new_tokens} for an answer. Lower "
                "thought_tokens",
            )
        begun = [rows[row] + replies[row][sample].ids + given for row, sample, given in some]
        keys = [ordinal_of_part(places[row], sample, 1) for row, sample, _ in some]
        drawn = engine.draw(begun, keys, replace(first, max_new_tokens=room), 1, seed)
        for (row, sample, given), (rest,) in zip(some, drawn, strict=True):
            replies[row][sample] = _joined(replies[row][sample], given, rest)
    if progress:
        progress(len(rows) * num_samples)
    return [
        as_group(engine.encoder, prompt, ids, group, sampling, engine.policy_version)
        for prompt, ids, group in zip(prompts, rows, replies, strict=True)
    ]


def _given(encoder: ChatEncoder, prompt: Ids, reply: Drawn) -> Ids:
    """The ids that end the thought of a reply; none where it has ended, or has not begun."""
    if answer_start(opening_of(encoder, prompt) + encoder.decode(reply.ids)) is not None:
        return ()
    last = encoder.tokenizer.decode([reply.ids[-1]], skip_special_tokens=False)
    return tuple(encoder.continued(last, encoder.chat.closing))


def _joined(begun: Drawn, given: Ids, rest: Drawn) -> Drawn:
    ids = begun.ids + given + rest.ids
    edges = len(begun.ids), len(begun.ids) + len(given)
    spans = ((0, edges[0]), (edges[1], len(ids))) if given else ()
    return Drawn(ids, begun.logprobs + rest.logprobs, rest.reason, spans)
