"""A case as JSON that another tool carries and gives back, so that it is the same case; and how other people's tasks are read."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, NamedTuple, TypeVar

from tether.core.errors import DataError
from tether.core.types import Comparison, Conversation, Json
from tether.data.formats.fields import as_text, checked_prompt, checked_response, fault, missing, number, sequence, turns
from tether.data.formats.json_rows import kind_name, parse
from tether.preferences.exchange import Case, turned
from tether.preferences.pairs import shown_left
from tether.preferences.rows import turn_rows
from tether.preferences.store import ORIGIN, Answer
from tether.preferences.votes import FLIPPED, STRENGTHS, Opinion, ratings_at

T = TypeVar("T")
PROMPTS = ("prompt", "instruction", "request", "question", "input", "context", "conversation", "messages", "chat")
MOST_PEOPLE = 10_000
_ANSWER = re.compile(r"(response|answer|output|completion|generation|candidate|text)[-_ ]?(1|2|a|b)", re.IGNORECASE)
_RECORDED = ("seconds", "guidelines", "at", "role")


def spoken(conversation: Conversation) -> str:
    """A conversation for people to read; the text alone where there is one turn."""
    if len(conversation) == 1:
        return conversation[0].spoken
    return "\n\n".join(f"{turn.role}: {turn.spoken}" for turn in conversation)


class Bridge(NamedTuple):
    """The two ways between the store and another tool: its tasks are recognised and read, and ours are written.

    `read_task` takes a row and the names of its fields, where these are unusual; it gives the reasons against judgments that
    cannot be read, and last the case.
    """

    matches: Callable[[Mapping[str, Any]], bool]
    read_task: Callable[..., Iterator[Case | DataError]]
    write_task: Callable[[Case, Comparison | None, str], Json]


@dataclass(frozen=True)
class Task:
    """A case whose answers stand as a tool shows them, their names there, and `packed_task`'s notes on judgments by annotator.

    `turned`: the store has them in the other order.
    """

    case: Case
    names: tuple[str, str] = ("", "")
    turned: bool = False
    notes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def texts(self) -> list[str]:
        """The prompt and both answers, to read."""
        return [spoken(words) for words in (self.case.first.prompt, self.case.first.response, self.case.second.response)]

    def judged(self, items: Iterable[T], read: Callable[[T], Opinion], details: Json) -> Iterator[Case | DataError]:
        """The reasons against those of these judgments that cannot be read, and the case with the others."""
        opinions, problems = readable_opinions(items, read)
        case = replace(self.case, opinions=opinions, details={**details, **self.case.details})
        yield from problems
        yield turned(case) if self.turned else case


def shown_task(case: Case, tool: str) -> Task:
    """The case with its answers in the order in which a tool shows them to all, drawn for each pair."""
    is_turned = shown_left(0, case.item, tool) != "first"
    return Task(turned(case) if is_turned else case, turned=is_turned)


def packed_task(task: Task, store: str) -> Json:
    """A case as plain JSON values, with the parts of its judgments that the tools have no place for.

    `store` is the id of the store whose numbers the annotators have, or nothing where they have their names.
    """
    case, sides = task.case, (task.case.first, task.case.second)
    origins = [{name: value for name in ORIGIN if (value := getattr(side, name)) not in (None, "", {})} for side in sides]
    return {
        "prompt": turn_rows(case.first.prompt),
        "group": case.first.group,
        "known": dict(case.first.prompt_details),
        "answers": [{"text": turn_rows(side.response), **origin} for side, origin in zip(sides, origins, strict=True)],
        "turned": task.turned,
        "said": {opinion.annotator: recorded(opinion, {}) for opinion in case.opinions},
        **({"store": store} if store else {}),
        **{name: getattr(case, name) for name in ("needed", "round", "strategy")},
        "details": dict(case.details),
    }


def unpacked_task(stored: Mapping[str, Any] | str, names: tuple[str, str] = ("", "")) -> Task:
    """The task that `packed_task` wrote; the store is in the case's details.

    Raises:
        DataError: it was damaged since.
    """
    try:
        row: Mapping[str, Any] = parse(stored) if isinstance(stored, str) else stored
        if reason := fault(row):
            raise DataError(reason)
        prompt, about = turns(row["prompt"], "user", "prompt"), {"prompt_details": json_object(row["known"], "known")}
        first, second = (
            Answer(prompt, turns(a["text"], "assistant", "text"), as_text(row["group"], "group"), **about, **origin_of(a))
            for a in objects(row["answers"], "answers")
        )
        if first.response == second.response:
            raise DataError("equal responses")
        if not 1 <= (needed := number(row["needed"], "needed")) <= MOST_PEOPLE:
            raise DataError(f"needed is {needed:g}")
        fields: Json = {name: as_text(row[name], name) for name in ("round", "strategy")}
        details = dict(json_object(row["details"], "details"))
        details |= {"store": as_text(row["store"], "store")} if "store" in row else {}
        details |= {"metadata": json_object(details["metadata"], "metadata")} if "metadata" in details else {}
        case = Case(first, second, needed=int(needed), details=details, **fields)
        return Task(case, names, bool(row.get("turned")), json_object(row.get("said"), "said"))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(f"damaged task: what was written beside it cannot be read ({error!r:.200})") from None


def foreign(values: Mapping[str, Any], fields: Sequence[str]) -> Task:
    """A task that was not made here, its prompt and its answers in these fields or in those of the usual names.

    Raises:
        DataError: the prompt or the two answers are not found, are empty or equal.
    """
    prompt, first, second = fields or _names(values)
    for name in (prompt, first, second):
        if not values.get(name):
            raise DataError(f"missing text: the task has nothing in {name}; it has {', '.join(values):.200}")
    question = checked_prompt(turns(values[prompt], "user", prompt))
    one, other = (Answer(question, checked_response(turns(values[name], "assistant", name), name)) for name in (first, second))
    if one == other:
        raise DataError("equal responses: there is nothing to compare")
    rest = {name: value for name, value in values.items() if name not in (prompt, first, second) and value is not None}
    return Task(Case(one, other, strategy="imported", details={"metadata": rest}), (first, second))


def _names(values: Mapping[str, Any]) -> tuple[str, str, str]:
    sides = sorted(name for name in values if _ANSWER.fullmatch(name))
    prompts = [name for name in PROMPTS if name in values]
    if len(sides) != 2 or not prompts:
        names = f"{', '.join(values):.200}. Name them with --fields PROMPT,FIRST,SECOND"
        raise DataError(f"unknown fields: a prompt and two answers are looked for among {names}")
    return prompts[0], sides[0], sides[1]


def origin_of(values: Mapping[str, Any]) -> Json:
    """The origin of an answer, as far as these values tell it, by the names of the fields of `Answer`.

    Raises:
        DataError: a name is no text, a score is no number, settings or details are no object.
    """
    readers = {"model": as_text, "checkpoint": as_text, "score": number, "spread": number}
    return {name: readers.get(name, json_object)(values[name], name) for name in ORIGIN if not missing(values.get(name))}


def recorded(opinion: Opinion, places: Mapping[str, str]) -> Json:
    """The facts that belong to a judgment beside choice and strength, answers being called by these names."""
    left, ratings = places.get(opinion.left or "", opinion.left), ratings_at(opinion.ratings, places)
    return {name: getattr(opinion, name) for name in _RECORDED} | {"left": left, "ratings": ratings}


def opinion_fields(values: Mapping[str, Any], places: Mapping[str, Any]) -> Json:
    """The fields of `Opinion` that `recorded` wrote, as far as these values have them; `places` gives the sides by their names.

    Raises:
        DataError: one of them is out of its range.
    """
    ratings = {str(name): number(value, "ratings") for name, value in json_object(values.get("ratings"), "ratings").items()}
    fields: Json = {name: number(values[name], name) for name in ("seconds", "at") if values.get(name)}
    fields |= {"guidelines": int(number(values["guidelines"], "guidelines"))} if values.get("guidelines") else {}
    fields |= {"role": "annotator" if values["role"] == "annotator" else "expert"} if values.get("role") else {}
    fields["ratings"] = ratings_at({name: int(value) if value.is_integer() else 0 for name, value in ratings.items()}, places)
    if problem := Opinion("tie", **fields).problem():
        raise DataError(problem)
    left = values.get("left")
    left = places.get(left, left) if isinstance(left, str) else None
    return fields | {"left": left if left in FLIPPED else None}


def moment(value: Any, name: str) -> float:
    """Seconds since 1970 of a time as ISO 8601 writes it; 0 where there is none."""
    try:
        return datetime.fromisoformat(value).timestamp() if not missing(value) else 0.0
    except (TypeError, ValueError, OverflowError):
        raise DataError(f"not a time: {name} holds {value!r:.40}") from None


def readable_opinions(items: Iterable[T], read: Callable[[T], Opinion]) -> tuple[tuple[Opinion, ...], list[DataError]]:
    """The judgments among these that can be read, and the reasons against the others.

    Raises:
        DataError: none of them can.
    """
    opinions, problems = [], []
    for item in items:
        try:
            opinions.append(read(item))
        except (DataError, OverflowError) as error:
            problems.append(str(error))
    if problems and not opinions:
        raise DataError(problems[0])
    return tuple(opinions), [DataError(f"one judgment only, {problem}") for problem in problems]


def json_object(value: Any, name: str) -> Mapping[str, Any]:
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
    items = [] if missing(value) else sequence(value, name)
    if others := [kind_name(item) for item in items if not isinstance(item, Mapping)]:
        raise DataError(f"not an object: {name} lists {others[0]}")
    return items


def strength_of(value: Any) -> int | None:
    """A rating of how strong a preference is, where it is one."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return int(value) if is_number and value in range(1, STRENGTHS + 1) else None
