"""Battles of two models, and the winner by the vote of a person.

Chatbot Arena's conversations and MT-bench's human judgments
(https://huggingface.co/datasets/lmsys/chatbot_arena_conversations,
https://huggingface.co/datasets/lmsys/mt_bench_human_judgments, https://arxiv.org/abs/2306.05685),
the battles of lmarena (https://huggingface.co/datasets/lmarena-ai/arena-human-preference-140k), and
their turns as lists (https://huggingface.co/datasets/lmarena-ai/arena-human-preference-55k). Two
conversations with a rating each (https://huggingface.co/datasets/llm-blender/Unified-Feedback).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tether.core.errors import DataError
from tether.core.types import Comparison, Conversation, assistant, user
from tether.data.formats import fields
from tether.data.formats.json_rows import Row
from tether.data.formats.judged import compared
from tether.data.formats.pairs import shared_prompt
from tether.data.formats.sides import Two, side_of

_BATTLE = Two(("conversation_a", "conversation_b"), ("a", "b"))
_WON = {"winner_model_a": 1.0, "winner_model_b": -1.0, "winner_tie": 0.0}


def read_arena(row: Row) -> Iterator[Comparison]:
    """`winner` is model_a, model_b, tie, or tie (bothbad); of a conversation the turns up to `turn`
    were judged.
    """
    both = [fields.turns_at(row, name, "user") for name in _BATTLE.columns]
    lean, facts = side_of(row.get("winner"), "winner", _BATTLE, row)
    judged = int(row["turn"]) if isinstance(dict.get(row, "turn"), int) else 0
    cut = [_up_to(turns, judged) for turns in both]
    later = [
        turn.content for turns, until in zip(both, cut, strict=True) for turn in turns[len(until) :]
    ]
    votes = {fields.text(row, "judge"): lean} if fields.has(row, "judge") else {}
    yield _battle(
        row,
        cut,
        lean,
        votes=votes,
        facts=facts | ({"later_turns": later} if later else {}),
    )


def _up_to(turns: Conversation, count: int) -> Conversation:
    """The first `count` questions with their answers; all turns without a count."""
    questions = [place for place, turn in enumerate(turns) if turn.role == "user"]
    return turns[: questions[count]] if 0 < count < len(questions) else turns


def read_arena_lists(row: Row) -> Iterator[Comparison]:
    """`prompt`, `response_a` and `response_b` list the turns; one of `winner_model_a`,
    `winner_model_b`, `winner_tie` is 1.
    """
    questions = fields.texts(row, "prompt")
    both = [
        _interleaved(questions, fields.texts(row, name), name)
        for name in ("response_a", "response_b")
    ]
    won = [name for name in _WON if fields.has(row, name) and fields.boolean(row[name], name)]
    if len(won) != 1:
        raise DataError(
            f"unreadable verdict: {len(won)} of winner_model_a, winner_model_b and winner_tie are 1",
        )
    yield _battle(row, both, _WON[won[0]])


def read_rated(row: Row) -> Iterator[Comparison]:
    """`conv_A` and `conv_B` with a rating each: the higher one is better, equal ones tie; the
    margin is their difference.
    """
    both = [fields.turns_at(row, name, "user") for name in ("conv_A", "conv_B")]
    one, other = (
        fields.number(row.get(f"{name}_rating"), f"{name}_rating") for name in ("conv_A", "conv_B")
    )
    yield _battle(row, both, one - other, margin=one - other)


def _interleaved(questions: tuple[str, ...], answers: tuple[str, ...], name: str) -> Conversation:
    if len(questions) != len(answers):
        raise DataError(
            f"uneven lists: {len(questions)} turns in prompt but {len(answers)} in {name}",
        )
    return tuple(
        turn
        for pair in zip(map(user, questions), map(assistant, answers), strict=True)
        for turn in pair
    )


def _battle(row: Row, both: list[Conversation], lean: float, **more: Any) -> Comparison:
    one, other = both
    length = len(one) - 1 if one == other else shared_prompt(one, other)
    models = (row.get("model_a"), row.get("model_b"))
    prompt = (
        one[:length]
        if one[:1] and one[0].role == "system"
        else fields.system_turn(row) + one[:length]
    )
    return compared(
        prompt,
        (one[length:], other[length:]),
        lean,
        models=models if any(models) else (),
        **more,
    )
