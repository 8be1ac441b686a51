"""Conversations of data as rollouts, to be scored."""

from __future__ import annotations

from tether.core.types import Conversation, Prompt, Rollout, Sampling, StopReason
from tether.data.chat import ChatEncoder, Encoded


def as_rollout(conversation: Conversation, encoder: ChatEncoder | None) -> Rollout:
    """A conversation as if its last turn had been sampled; without an encoder by its text alone."""
    encoded = Encoded((), ()) if encoder is None else encoder.conversation(conversation, "last")
    ids = encoded.ids
    length = encoded.prompt_length
    prompt = Prompt(conversation[:-1])
    text = conversation[-1].content
    return Rollout(
        ids[:length],
        ids[length:],
        (),
        StopReason.STOP_TOKEN,
        text,
        0,
        0,
        Sampling(),
        prompt,
    )
