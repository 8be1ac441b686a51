"""Comparisons and demonstrations as JSON lines that `data.sources.read` gives back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from tether.core.protocols import RewardSource
from tether.core.rundir import write_jsonl
from tether.core.types import (
    Comparison,
    Conversation,
    Demonstration,
    Entries,
    Json,
    Message,
    RolloutGroup,
    Score,
)
from tether.data.formats.json_rows import fault
from tether.data.formats.messages import TEMPLATE_ARGUMENTS, read_message
from tether.data.sources import Quarantine


def turn_rows(conversation: Conversation) -> list[Json]:
    """A conversation as plain JSON values, with what its first turn says of the whole."""
    return [turn.as_row() | _of_whole(turn) for turn in conversation]


def _of_whole(turn: Message) -> dict[str, str]:
    """The schemas of tools and the arguments of the chat template, where a turn has them."""
    both = {"tools": turn.tools, TEMPLATE_ARGUMENTS: turn.template}
    return {name: text for name, text in both.items() if text}


def turns_of(rows: Sequence[Entries]) -> Conversation:
    """The conversation that `turn_rows` was given."""
    return tuple(turn for row in rows for turn in read_message(row, "messages"))


def record_row(record: Comparison | Demonstration) -> Json:
    """A row of the formats `preference` or `messages`, as plain JSON values, with columns of
    tools and of the template's arguments; empty fields are left out.
    """
    more: Json = {"id": record.id, "metadata": dict(record.metadata)}
    if isinstance(record, Demonstration):
        row: Json = {"messages": [turn.as_row() for turn in record.messages]}
        first = record.messages[:1]
    else:
        row = {
            name: [turn.as_row() for turn in getattr(record, name)]
            for name in ("prompt", "chosen", "rejected")
        }
        row |= {"probability": record.probability, "tie": record.tie}
        votes = [
            {"annotator": vote.annotator, "preference": vote.preference}
            for vote in record.annotations
        ]
        first = record.prompt[:1]
        more |= {"margin": record.margin, "group": record.group, "annotations": votes}
    more |= _of_whole(first[0]) if first else {}
    return {
        **row,
        **{name: value for name, value in more.items() if value not in (None, "", [], {})},
    }


def without_faults(row: Json, quarantine: Quarantine) -> Json:
    """A prompt's row with its responses; those that no reader takes are set aside, and empty
    here.
    """
    faults = list(map(fault, row["responses"]))
    for text, reason in zip(row["responses"], faults, strict=True):
        if reason:
            quarantine.add(row["id"], None, reason, text)
    usable = zip(row["responses"], faults, strict=True)
    return {**row, "responses": ["" if reason else text for text, reason in usable]}


def write_rows(path: str | Path, records: Iterable[Comparison | Demonstration]) -> None:
    """All of them, or the file as it was before."""
    write_jsonl(path, map(record_row, records))


def answer_rows(groups: Sequence[RolloutGroup], scorer: RewardSource | None) -> Iterator[Json]:
    """A row for each prompt with its answers, and what a reward model gives them."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    scores = iter([Score(None)] * len(rollouts) if scorer is None else scorer.score(rollouts))
    for group in groups:
        own = [next(scores) for _ in group.rollouts]
        row = {
            "id": group.prompt.id,
            "prompt": group.prompt.text,
            "responses": [rollout.text for rollout in group.rollouts],
        }
        members = [
            [value for name, value in sorted(s.parts.items()) if name.startswith("member_")]
            for s in own
        ]
        yield {**row, "scores": [score.value for score in own], "members": members}
