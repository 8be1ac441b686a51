"""Preference files of hosted services that list the candidates of the last reply.

Gemini's tuning on Vertex AI
(https://cloud.google.com/vertex-ai/generative-ai/docs/models/gemini-preference-tuning) and Amazon
Nova's on Bedrock
(https://docs.aws.amazon.com/nova/latest/userguide/customize-fine-tune-prepare-data.html). OpenAI's
is a pair under other names, see `pairs`.
"""

from __future__ import annotations

from collections.abc import Iterator

from tether.core.errors import DataError
from tether.core.types import Comparison, Conversation, JsonValue
from tether.data.formats import fields
from tether.data.formats.json_rows import Row
from tether.data.formats.rankings import Ranked, RankedResponses


def gemini(row: Row) -> RankedResponses:
    """`contents` and `completions`, each with a `score` (1 for the preferred one, 0 for the other)
    and a `completion`.
    """
    ranked = []
    for item in fields.sequence(row.get("completions"), "completions"):
        if not isinstance(item, dict):
            raise DataError("not a response: completions need score and completion")
        reply = fields.turns(item.get("completion"), "assistant", "completions.completion")
        ranked.append(Ranked(reply, fields.number(item.get("score"), "score")))
    return RankedResponses(fields.prompt_turns(row, "contents"), ranked, measured=False)


_LABELS = {"preferred": 1.0, "non-preferred": 0.0}


def has_candidates(row: Row) -> bool:
    """True for messages whose last one lists candidates."""
    messages = row["messages"]
    return (
        bool(messages)
        and isinstance(messages, list)
        and isinstance(messages[-1], dict)
        and "candidates" in messages[-1]
    )


def nova(row: Row) -> Iterator[Comparison | DataError]:
    """`messages`, the last of which lists `candidates`, each with `content` and a
    `preferenceLabel`.
    """
    *before, last = fields.sequence(row.get("messages"), "messages") or [None]
    if not isinstance(last, dict):
        raise DataError("not a comparison: the last message lists no candidates")
    ranked = [
        _candidate(item) for item in fields.sequence(last.get("candidates"), "messages.candidates")
    ]
    prompt: Conversation = fields.system_turn(row) + fields.turns(before, "user", "messages")
    return RankedResponses(prompt, ranked, measured=False).pairs()


def _candidate(item: JsonValue) -> Ranked:
    label = str(item.get("preferenceLabel")).lower() if isinstance(item, dict) else ""
    if label not in _LABELS:
        raise DataError(
            f"unreadable verdict: preferenceLabel {label!r:.40} is neither preferred "
            "nor non-preferred",
        )
    return Ranked(
        fields.turns(
            [{"role": "assistant", "content": item.get("content")}],
            "assistant",
            "candidates",
        ),
        _LABELS[label],
    )
