"""What a case takes along to another tool and brings back, so that it is the same case; and how other people's tasks are read."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from tether.core.errors import DataError
from tether.core.types import Conversation, Message
from tether.data.formats.fields import checked_prompt, checked_response, turns
from tether.preferences.exchange import PROVENANCE, Case
from tether.preferences.pairs import shown_left
from tether.preferences.store import Answer

PROMPTS = ("prompt", "instruction", "request", "question", "input", "context", "conversation", "messages", "chat")
_ANSWER = re.compile(r"(response|answer|output|completion|generation|candidate|text)[-_ ]?(1|2|a|b)", re.IGNORECASE)


def spoken(conversation: Conversation) -> str:
    """A conversation for people to read; the text alone where there is one turn."""
    if len(conversation) == 1:
        return conversation[0].content
    return "\n\n".join(f"{turn.role}: {turn.content}" for turn in conversation)


def in_view(case: Case, tool: str) -> tuple[Answer, Answer]:
    """The answers in the order in which a tool that shows them in one order to all shall have them, drawn for each pair."""
    return (case.first, case.second) if shown_left(0, case.item, tool) == "first" else (case.second, case.first)


def packed(case: Case, sides: Sequence[Answer]) -> dict[str, Any]:
    """A case without its judgments as plain JSON values, its answers in this order."""
    row: dict[str, Any] = {
        "prompt": _rows(case.first.prompt),
        "group": case.first.group,
        "known": dict(case.first.prompt_details),
    }
    row["answers"] = [
        {
            "text": _rows(side.response),
            **{name: getattr(side, name) for name in PROVENANCE if getattr(side, name) not in (None, "", {})},
        }
        for side in sides
    ]
    row["turned"] = sides[0] is not case.first
    return row | {"needed": case.needed, "round": case.round, "strategy": case.strategy, "details": dict(case.details)}


def unpacked(stored: Mapping[str, Any] | str) -> tuple[Case, bool]:
    """The case that `packed` was given, its answers in the order in which they were shown, and whether that is another order."""
    try:
        row: Mapping[str, Any] = json.loads(stored) if isinstance(stored, str) else stored
        prompt = _turns(row["prompt"])
        sides = [
            Answer(
                prompt, _turns(a["text"]), row["group"], prompt_details=row["known"], **{n: a[n] for n in PROVENANCE if n in a}
            )
            for a in row["answers"]
        ]
        known = {name: row[name] for name in ("needed", "round", "strategy", "details")}
        return Case(sides[0], sides[1], **known), bool(row.get("turned"))
    except (KeyError, TypeError, IndexError, ValueError) as error:
        raise DataError(f"damaged task: what was written beside it cannot be read ({error!r})") from None


def foreign(values: Mapping[str, Any], fields: Sequence[str]) -> tuple[Case, tuple[str, str]]:
    """A task that was not made here: the case, and the names of its answers in their order.

    Raises:
        DataError: the prompt or the two answers are not found, are empty or equal.
    """
    prompt, first, second = fields or _names(values)
    for name in (prompt, first, second):
        if not values.get(name):
            raise DataError(f"missing text: the task has nothing in {name}; it has {', '.join(values)}")
    asked = checked_prompt(turns(values[prompt], "user", prompt))
    texts = [checked_response(turns(values[name], "assistant", name), name) for name in (first, second)]
    if texts[0] == texts[1]:
        raise DataError("equal responses: there is nothing to compare")
    rest = {name: value for name, value in values.items() if name not in (prompt, first, second) and value is not None}
    return Case(Answer(asked, texts[0]), Answer(asked, texts[1]), strategy="imported", details={"metadata": rest}), (
        first,
        second,
    )


def _names(values: Mapping[str, Any]) -> tuple[str, str, str]:
    sides = sorted(name for name in values if _ANSWER.fullmatch(name))
    prompts = [name for name in PROMPTS if name in values]
    if len(sides) != 2 or not prompts:
        raise DataError(
            f"unknown fields: a prompt and two answers are looked for among {', '.join(values)}. "
            "Name them with --fields PROMPT,FIRST,SECOND"
        )
    return prompts[0], sides[0], sides[1]


def _rows(conversation: Conversation) -> list[dict[str, str]]:
    return [{"role": turn.role, "content": turn.content} for turn in conversation]


def _turns(rows: Sequence[Mapping[str, str]]) -> Conversation:
    return tuple(Message(row["role"], row["content"]) for row in rows)  # type: ignore[arg-type]
