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
from typing import Protocol, Unpack

from tether.core.errors import ConfigError
from tether.core.protocols import DrawArguments
from tether.core.thoughts import answer_start
from tether.core.types import Prompt, RolloutGroup, Sampling, StopReason
from tether.data.chat import ChatEncoder
from tether.rollout.drawn import (
    Drawn,
    Draws,
    Ids,
    PromptReader,
    TokenEngine,
    as_groups,
    draws_of,
    opening_of,
    ordinal_of_part,
)


class ReadingEngine(TokenEngine, PromptReader, Protocol):
    """An engine that encodes prompts."""


def generate_within(
    engine: ReadingEngine,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    **how: Unpack[DrawArguments],
) -> list[RolloutGroup]:
    """See core.protocols.Engine.generate. Replies are drawn up to the budget, and then to their
    end.

    Raises:
        DataError: as an engine's own; or the chat template writes no thought.
        ConfigError: no token is left for an answer.
    """
    draws = draws_of(engine, prompts, sampling, **how)
    rows = draws.rows
    budget = sampling.thought_tokens
    thoughts = replace(sampling, max_new_tokens=budget, thought_tokens=0)
    replies = engine.draw(draws._replace(sampling=thoughts, progress=None))
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
        keys = [ordinal_of_part(draws.ordinals[row], sample, 1) for row, sample, _ in some]
        answers = Draws(begun, keys, replace(thoughts, max_new_tokens=room), seed=draws.seed)
        for (row, sample, given), (rest,) in zip(some, engine.draw(answers), strict=True):
            replies[row][sample] = _joined(replies[row][sample], given, rest)
    if draws.progress:
        draws.progress(len(rows) * draws.num_samples)
    return as_groups(engine.encoder, prompts, draws, replies, engine.policy_version)


def _given(encoder: ChatEncoder, prompt: Ids, reply: Drawn) -> Ids:
    """The ids that end the thought of a reply; none where it has ended, or has not begun."""
    if answer_start(opening_of(encoder, prompt) + encoder.decode(reply.ids)) is not None:
        return ()
    last = encoder.tokenizer.decode([reply.ids[-1]], skip_special_tokens=False)
    return tuple(encoder.continued(last, encoder.chat.closing))


def _joined(begun: Drawn, given: Ids, rest: Drawn) -> Drawn:
    ids = begun.ids + given
    spans = ()
    if given:
        spans = ((0, len(begun.ids)), (len(ids), len(ids) + len(rest.ids)))
    return Drawn(ids + rest.ids, begun.logprobs + rest.logprobs, rest.reason, spans)
