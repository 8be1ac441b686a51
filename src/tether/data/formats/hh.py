"""Anthropic's HH-RLHF: two whole transcripts, `chosen` and `rejected`.

https://github.com/anthropics/hh-rlhf (paper: https://arxiv.org/abs/2204.05862)
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from tether.core.errors import DataError
from tether.core.types import Comparison, Conversation, Message
from tether.data.formats.fields import comparison, leftover, text
from tether.data.formats.format import Format, Row

# Only a blank line before the speaker begins a turn: people also write "Human:" within one.
_SPEAKER = re.compile(r"\n\n(Human|Assistant):")


def is_transcript(value: Any) -> bool:
    return isinstance(value, str) and re.match(r"\s*(Human|Assistant):", value) is not None


def awaits_assistant(value: Any) -> bool:
    """Whether a text is a transcript that ends on "Assistant:", as prompts in this style do."""
    return is_transcript(value) and value.rstrip().endswith("\n\nAssistant:")


def split_transcript(transcript: str) -> Conversation:
    """A transcript -> its turns, without the white space around each."""
    before, *parts = _SPEAKER.split("\n\n" + transcript.lstrip())
    if before.strip() or not parts:
        raise DataError("not a transcript: it does not begin with a Human or an Assistant turn")
    spoken = zip(parts[::2], parts[1::2], strict=True)
    return tuple(Message("user" if speaker == "Human" else "assistant", words.strip()) for speaker, words in spoken)


def split_prompt(transcript: str) -> Conversation:
    """A transcript that ends on "Assistant:" -> the turns that wait for an answer."""
    turns = split_transcript(transcript)
    return turns[:-1] if turns[-1].role == "assistant" and not turns[-1].content else turns


def shared_prompt(first: Conversation, second: Conversation) -> int:
    """The length of the longest shared opening that ends before an answer."""
    shared = 0
    for one, other in zip(first, second, strict=False):
        if one != other:
            break
        shared += 1
    while shared and first[shared - 1].role not in ("user", "tool"):
        shared -= 1
    return shared


def read_pair(row: Row) -> Iterator[Comparison]:
    """The prompt is the longest shared opening that ends on a Human turn; what follows are the two continuations.

    Pairs that branch before the last reply are kept with all their turns, as long as both end on an Assistant turn.
    """
    chosen, rejected = (split_transcript(text(row, side)) for side in ("chosen", "rejected"))
    if chosen == rejected:
        raise DataError("equal responses: chosen and rejected are the same")
    length = shared_prompt(chosen, rejected)
    if not length:
        raise DataError("no shared prompt: the transcripts differ from the first turn on")
    yield comparison(chosen[:length], chosen[length:], rejected[length:], metadata=leftover(row, ("id", "chosen", "rejected")))


FORMATS = (
    Format(
        "hh",
        lambda row: is_transcript(row.get("chosen")) and is_transcript(row.get("rejected")) and "prompt" not in row,
        {Comparison: read_pair},
    ),
)
