"""What a case takes along to another tool and brings back, so that it is the same case; and how other people's tasks are read."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Any, TypeVar

from tether.core.errors import DataError
from tether.core.types import Conversation
from tether.data.formats.fields import as_text, checked_prompt, checked_response, fault, missing, number, sequence, turns
from tether.data.formats.json_rows import kind_name, parse
from tether.preferences.exchange import FLIPPED, PROVENANCE, STRENGTHS, Case, Said, placed
from tether.preferences.pairs import shown_left
from tether.preferences.rows import turn_rows
from tether.preferences.store import Answer

T = TypeVar("T")
PROMPTS = ("prompt", "instruction", "request", "question", "input", "context", "conversation", "messages", "chat")
MOST_PEOPLE = 10_000
_ANSWER = re.compile(r"(response|answer|output|completion|generation|candidate|text)[-_ ]?(1|2|a|b)", re.IGNORECASE)


def spoken(conversation: Conversation) -> str:
    """A conversation for people to read; the text alone where there is one turn."""
    if len(conversation) == 1:
        return conversation[0].content
    return "\n\n".join(f"{turn.role}: {turn.content}" for turn in conversation)


def in_view(case: Case, tool: str) -> tuple[Answer, Answer]:
    """The answers in the order in which a tool that shows them in one order to all shall have them, drawn for each pair."""
    return (case.first, case.second) if shown_left(0, case.item, tool) == "first" else (case.second, case.first)


def packed(case: Case, sides: Sequence[Answer], store: str) -> dict[str, Any]:
    """A case as plain JSON values, its answers in this order, and of its judgments what the tools have no place for.

    `store` is the id of the store whose numbers the annotators have, or nothing where they have their names.
    """
    row: dict[str, Any] = {
        "prompt": turn_rows(case.first.prompt),
        "group": case.first.group,
        "known": dict(case.first.prompt_details),
    }
    row["answers"] = [
        {
            "text": turn_rows(side.response),
            **{name: getattr(side, name) for name in PROVENANCE if getattr(side, name) not in (None, "", {})},
        }
        for side in sides
    ]
    row["turned"] = sides[0] is not case.first
    as_shown = FLIPPED if row["turned"] else {}
    row |= {"said": {said.annotator: remarks(said, as_shown) for said in case.said}} | ({"store": store} if store else {})
    return row | {"needed": case.needed, "round": case.round, "strategy": case.strategy, "details": dict(case.details)}


def unpacked(stored: Mapping[str, Any] | str) -> tuple[Case, bool, Mapping[str, Any]]:
    """The case that `packed` was given, its answers in the order in which they were shown, and whether that is another order.

    With it the remarks on its judgments by annotator; the store is in the case's details.
    """
    try:
        row: Mapping[str, Any] = parse(stored) if isinstance(stored, str) else stored
        if reason := fault(row):
            raise DataError(reason)
        prompt, about = turns(row["prompt"], "user", "prompt"), {"prompt_details": table(row["known"], "known")}
        first, second = (
            Answer(prompt, turns(a["text"], "assistant", "text"), as_text(row["group"], "group"), **about, **told(a))
            for a in objects(row["answers"], "answers")
        )
        if first.response == second.response:
            raise DataError("equal responses")
        if not 1 <= (needed := number(row["needed"], "needed")) <= MOST_PEOPLE:
            raise DataError(f"needed is {needed:g}")
        known: dict[str, Any] = {name: as_text(row[name], name) for name in ("round", "strategy")}
        details = {**table(row["details"], "details"), **({"store": as_text(row["store"], "store")} if "store" in row else {})}
        details |= {"metadata": table(details["metadata"], "metadata")} if "metadata" in details else {}
        case = Case(first, second, needed=int(needed), details=details, **known)
        return case, bool(row.get("turned")), table(row.get("said"), "said")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(f"damaged task: what was written beside it cannot be read ({error!r:.200})") from None


def told(values: Mapping[str, Any]) -> dict[str, Any]:
    """Where an answer comes from, as far as these say it, by the names of the fields of `Answer`.

    Raises:
        DataError: a name is no text, a score is no number, settings or details are no object.
    """
    readers = {"model": as_text, "checkpoint": as_text, "sampling": table, "score": number, "spread": number, "details": table}
    return {name: read(values[name], name) for name, read in readers.items() if not missing(values.get(name))}


def remarks(said: Said, places: Mapping[str, str]) -> dict[str, Any]:
    """What belongs to a judgment beside choice and strength, answers being called by these names."""
    known = {name: getattr(said, name) for name in ("seconds", "guidelines", "at", "role")}
    return known | {"left": places.get(said.left or "", said.left), "ratings": placed(said.ratings, places)}


def remarked(values: Mapping[str, Any], places: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `Said` that `remarks` wrote, as far as these values have them; `places` gives the sides by their names.

    Raises:
        DataError: one of them is out of its range.
    """
    left, ratings = values.get("left"), {str(k): number(v, "ratings") for k, v in table(values.get("ratings"), "ratings").items()}
    if any(value not in range(1, 6) or not 0 < len(name) <= 40 for name, value in ratings.items()):
        raise DataError("impossible rating: ratings lie between 1 and 5, with names of at most 40 characters")
    known: dict[str, Any] = {name: number(values[name], name) for name in ("seconds", "at", "guidelines") if values.get(name)}
    known |= {"guidelines": int(known["guidelines"])} if "guidelines" in known else {}
    if wrong := [name for name, value in known.items() if not 0 <= value < (2**31 if name == "guidelines" else 2**53)]:
        raise DataError(f"impossible number: {wrong[0]} of a judgment is {known[wrong[0]]:g}")
    known |= {"role": "annotator" if values["role"] == "annotator" else "expert"} if values.get("role") else {}
    left = places.get(left, left) if isinstance(left, str) else None
    return known | {"ratings": placed({k: int(v) for k, v in ratings.items()}, places), "left": left if left in FLIPPED else None}


def moment(value: Any, name: str) -> float:
    """Seconds since 1970 of a time as ISO 8601 writes it; 0 where there is none."""
    try:
        return datetime.fromisoformat(value).timestamp() if not missing(value) else 0.0
    except (TypeError, ValueError, OverflowError):
        raise DataError(f"not a time: {name} holds {value!r:.40}") from None


def readable(items: Iterable[T], read: Callable[[T], Said], skipped: list[str] | None) -> tuple[Said, ...]:
    """The judgments among these that can be read; what is wrong with the others is added to `skipped`.

    Raises:
        DataError: none of them can.
    """
    found, wrong = [], []
    for item in items:
        try:
            found.append(read(item))
        except (DataError, OverflowError) as error:
            wrong.append(str(error))
    if wrong and not found:
        raise DataError(wrong[0])
    if skipped is not None:
        skipped += wrong
    return tuple(found)


def table(value: Any, name: str) -> Mapping[str, Any]:
    """An object, also from the JSON text of one; nothing counts as an empty one."""
    if isinstance(value, str) and value.startswith("{"):
        with suppress(ValueError):
            value = parse(value)
        if reason := fault(value):
            raise DataError(reason)
    if isinstance(value, Mapping) or missing(value):
        return value if isinstance(value, Mapping) else {}
    raise DataError(f"not an object: {name} holds {kind_name(value)}")


def objects(value: Any, name: str) -> list[Mapping[str, Any]]:
    """A list of objects; nothing counts as an empty one."""
    found = [] if missing(value) else sequence(value, name)
    if others := [kind_name(item) for item in found if not isinstance(item, Mapping)]:
        raise DataError(f"not an object: {name} lists {others[0]}")
    return found


def strength_of(value: Any) -> int | None:
    """A rating of how strong a preference is, where it is one."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return int(value) if is_number and value in range(1, STRENGTHS + 1) else None


def foreign(values: Mapping[str, Any], fields: Sequence[str]) -> tuple[Case, tuple[str, str]]:
    """A task that was not made here: the case, and the names of its answers in their order.

    Raises:
        DataError: the prompt or the two answers are not found, are empty or equal.
    """
    prompt, first, second = fields or _names(values)
    for name in (prompt, first, second):
        if not values.get(name):
            raise DataError(f"missing text: the task has nothing in {name}; it has {', '.join(values):.200}")
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
            f"unknown fields: a prompt and two answers are looked for among {', '.join(values):.200}. "
            "Name them with --fields PROMPT,FIRST,SECOND"
        )
    return prompts[0], sides[0], sides[1]
