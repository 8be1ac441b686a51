"""Transcripts in the manner of Anthropic's HH-RLHF: turns after "Human:" and "Assistant:"."""

from __future__ import annotations

import re
from typing import Any

from tether.core.errors import DataError
from tether.core.types import Conversation, Message

# Only a blank line before the speaker begins a turn: people also write "Human:" within one.
_SPEAKER = re.compile(r"\n\n(Human|Assistant):")


def is_transcript(value: Any) -> bool:
    return isinstance(value, str) and re.match(r"\s*(Human|Assistant):", value) is not None


def awaits_assistant(value: Any) -> bool:
    """True if a text is a transcript that ends on "Assistant:", as prompts in this style do."""
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
