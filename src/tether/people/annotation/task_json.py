"""A case as a row of JSON that a file or another tool carries and gives back; and how other
people's tasks are read.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, NamedTuple, TypeVar

from tether.core.errors import DataError
from tether.core.types import (
    Annotation,
    Comparison,
    Conversation,
    Entries,
    Facts,
    Json,
    JsonValue,
    Row,
)
from tether.data.formats.fields import (
    as_text,
    attempt,
    checked_prompt,
    checked_response,
    missing,
    number,
    sequence,
    turns,
)
from tether.data.formats.json_rows import fault, kind_name, parse
from tether.data.formats.registry import format_named, kind_reader
from tether.data.rows import record_row
from tether.people.annotation.exchange import COMPUTED, PROVENANCE, Case, ordered, turned
from tether.people.annotation.store import ORIGIN, Answer, Origin
from tether.people.labels.pairs import shown_left
from tether.people.labels.votes import CHOICES, STRENGTHS, Choice, Opinion

T = TypeVar("T")
_SIDE = re.compile(
    r"(?:the )?(left|right|first|second)(?: (?:one|answer|response|side|text))?"
    r"|(?:the "
    r")?(?:response|answer|output|completion|option|model|candidate|assistant|text|generation) "
    r"?([12ab])|([ab])",
)
_AFTER = re.compile(r" (?:is (?:much |slightly |the )?(?:better|best)|wins)$")
_PLACES: dict[str, Choice] = {
    **dict.fromkeys(("left", "first", "1", "a"), "first"),
    **dict.fromkeys(("right", "second", "2", "b"), "second"),
}
_TIES = (
    "tie",
    "equal",
    "same",
    "both",
    "both good",
    "both are good",
    "equally good",
    "draw",
    "no preference",
)
_BOTH_BAD = ("both bad", "both are bad", "equally bad", "neither", "none")
_UNDECIDED: dict[str, Choice] = {
    **dict.fromkeys(_TIES, "tie"),
    **dict.fromkeys(_BOTH_BAD, "both_bad"),
}
ReadCase = tuple[*tuple[DataError, ...], Case]
"""The reasons against judgments that cannot be read, and last the case with the others."""
PROMPTS = (
    "prompt",
    "instruction",
    "request",
    "question",
    "input",
    "context",
    "conversation",
    "messages",
    "chat",
)
MOST_PEOPLE = 10_000
_ANSWER = re.compile(
    r"(response|answer|output|completion|generation|candidate|text)[-_ "
    r"]?(1|2|a|b)",
    re.IGNORECASE,
)
_RECORDED = ("strength", "choice", "left", "ratings", "seconds", "guidelines", "at", "role")
_SIDES = {"chosen": "first", "rejected": "second"}


def spoken(conversation: Conversation) -> str:
    """A conversation for people to read; the text alone where there is one turn."""
    if len(conversation) == 1:
        return conversation[0].spoken
    return "\n\n".join(f"{turn.role}: {turn.spoken}" for turn in conversation)


class Bridge(NamedTuple):
    """The two ways between the store and another tool: its tasks are recognised and read, and ours
    are written.

    `read_task` takes a row and the names of its fields, where these are unusual.
    """

    matches: Callable[[Facts], bool]
    read_task: Callable[..., Iterable[DataError | Case]]
    write_task: Callable[[Case, Comparison, str], Json]


def shown_case(case: Case, tool: str) -> Case:
    """The case with its answers in the order in which a tool shows them to all, drawn for each
    pair.
    """
    case = ordered(case)
    return case if shown_left(0, case.item, tool) == "first" else turned(case)


def shown_texts(case: Case) -> list[str]:
    """The prompt and both answers, to read."""
    return [
        spoken(words) for words in (case.first.prompt, case.first.response, case.second.response)
    ]


@dataclass(frozen=True)
class Judged:
    """A judgment as a tool has it: by whom, whether they took it back, and what it says."""

    person: str
    said: Facts
    withdrawn: bool = False


def judged_case(
    task: ReadCase,
    judged: Sequence[Judged],
    read: Callable[[Facts], Opinion],
    details: Json,
) -> ReadCase:
    """The case with these judgments in place of its own: of each person the last, unless they took
    that back.

    Args:
        judged: in the order in which they were made.
    """
    *damaged, case = task
    last = {one.person: one for one in judged}
    opinions, problems = readable_opinions(
        (one.said for one in last.values() if not one.withdrawn),
        read,
    )
    replaced = sum(not one.withdrawn and one is not last[one.person] for one in judged)
    return *(damaged + problems), replace(
        case,
        opinions=opinions,
        details={**details, **case.details},
        replaced=replaced,
    )


def spoken_choice(word: object, names: Sequence[str] = ()) -> Choice | None:
    """The choice that a label says: "Response A", "left", "answer2 is better", "tie", "both bad";
    None if it says none.

    Args:
        names: of the fields of both answers.
    """
    if not isinstance(word, str):
        return None
    if word in names:
        return "first" if word == names[0] else "second"
    plain = _AFTER.sub("", " ".join(re.sub(r"[^a-z0-9]+", " ", word.lower()).split()))
    if plain in _UNDECIDED:
        return _UNDECIDED[plain]
    side = _SIDE.fullmatch(plain)
    return None if side is None else _PLACES[next(filter(None, side.groups()))]


def case_row(case: Case, label: Comparison, store: str) -> Json:
    """A row of the format `preference`; each vote has everything that was recorded of it.

    `store` is the id of the store whose numbers the annotators have, or nothing where they have
    their names.
    """
    is_turned = label.chosen != case.first.response
    places = {
        "first": "rejected" if is_turned else "chosen",
        "second": "chosen" if is_turned else "rejected",
    }
    votes = [
        {"annotator": opinion.annotator, "preference": vote.preference}
        | {name: getattr(opinion.placed(places), name) for name in _RECORDED}
        | ({"store": store} if store else {})
        for opinion, vote in zip(case.opinions, label.annotations, strict=True)
    ]
    return record_row(label) | {"annotations": votes}


def has_votes(row: Entries) -> bool:
    """True for a comparison whose votes are those of `case_row`."""
    votes = row.get("annotations") if row.keys() >= {"chosen", "rejected"} else None
    return isinstance(votes, list) and any(
        isinstance(vote, Mapping) and "choice" in vote for vote in votes
    )


def read_case(row: Row, labels: str = "", gold: bool = False) -> ReadCase:
    """The case that `case_row` wrote, with everything that its votes hold; `labels` and `gold` as
    in `read_cases`.
    """
    votes = row["annotations"] if has_votes(row) else ()
    read_pair = kind_reader(format_named("preference"), Comparison, "this row", [row])
    (pair,) = read_pair({**row, "annotations": None} if votes else row)
    if isinstance(pair, DataError):
        raise pair
    opinions, problems = readable_opinions(votes, _vote)
    case = case_of(replace(pair, id=str(row.get("id") or "")), opinions, labels=labels, gold=gold)
    stores = {str(vote.get("store") or "") for vote in votes if isinstance(vote, Mapping)}
    details = (
        {**case.details, "store": stores.pop()}
        if len(stores) == 1 and any(stores)
        else case.details
    )
    return *problems, replace(case, details=details)


def packed_case(case: Case, label: Comparison, store: str) -> Json:
    """The row that a tool carries beside a task of its own: with it comes back what the tool has no
    place for.
    """
    more = {
        "needed": case.needed,
        "strategy": case.strategy,
        "about_prompt": dict(case.first.prompt_details),
    }
    return case_row(case, label, store) | more


def unpacked_case(packed: object, tool: str) -> ReadCase:
    """The case of `packed_case`, as the tool shows it.

    Raises:
        DataError: it was damaged since.
    """
    try:
        packed = parse(packed) if isinstance(packed, str) else packed
        if reason := fault(packed):
            raise DataError(reason)
        row = dict(json_object(packed, "tether"))
        needed = number(row.pop("needed", None), "needed")
        about = json_object(row.pop("about_prompt", None), "about_prompt")
        if not 1 <= needed <= MOST_PEOPLE:
            raise DataError(f"needed is {needed:g}")
        strategy = as_text(row.pop("strategy", None), "strategy")
        *problems, case = read_case(row)
    except ValueError as error:
        raise DataError(
            f"damaged task: what was written beside it cannot be read ({error})",
        ) from None
    first, second = (replace(side, prompt_details=about) for side in (case.first, case.second))
    return *problems, shown_case(
        replace(case, first=first, second=second, needed=int(needed), strategy=strategy),
        tool,
    )


def foreign_case(values: Entries, fields: Sequence[str]) -> Case:
    """A case that was not made here, its prompt and its answers in these fields.

    Raises:
        DataError: the prompt or the two answers are not found, are empty or equal.
    """
    prompt, first, second = fields
    for name in fields:
        if values.get(name) in (None, "", []):
            raise DataError(
                f"missing text: the task has nothing in {name}; it has {', '.join(values):.200}",
            )
    question = checked_prompt(turns(values[prompt], "user", prompt))
    one, other = (
        Answer(question, checked_response(turns(values[name], "assistant", name), name))
        for name in (first, second)
    )
    if one.id == other.id:
        raise DataError("equal responses: there is nothing to compare")
    rest = {
        name: value for name, value in values.items() if name not in fields and value is not None
    }
    return Case(one, other, strategy="imported", details={"metadata": rest})


def field_names(values: Entries) -> tuple[str, str, str]:
    """The usual names of a prompt and of two answers, as far as these values have them.

    Raises:
        DataError: they have none, or more than two answers.
    """
    sides = sorted(name for name in values if _ANSWER.fullmatch(name))
    prompts = [name for name in PROMPTS if name in values]
    if len(sides) != 2 or not prompts:
        names = f"{', '.join(values):.200}. Name them with --fields PROMPT,FIRST,SECOND"
        raise DataError(f"unknown fields: a prompt and two answers are looked for among {names}")
    return prompts[0], sides[0], sides[1]


def has_fields(values: Entries) -> bool:
    """True if these values have a prompt and two answers by their usual names."""
    try:
        return bool(field_names(values))
    except DataError:
        return False


def origin_of(values: Entries) -> Origin:
    """The origin of an answer, as far as these values tell it, by the names of the fields of
    `Answer`.

    Raises:
        DataError: a name is no text, a score is no number, settings or details are no object.
    """
    readers = {"model": as_text, "checkpoint": as_text, "score": number, "spread": number}
    origin: Any = {
        name: readers.get(name, json_object)(values[name], name)
        for name in ORIGIN
        if not missing(values.get(name))
    }
    return origin


def _vote(vote: object) -> Opinion:
    """The opinion in a vote of `case_row`, of the sides in the row's order.

    Raises:
        DataError: a part of it cannot be read or is out of its range.
    """
    if not isinstance(vote, Mapping):
        raise DataError(f"not an annotation: {vote!r:.40}")
    ratings = {
        str(name): number(value, "ratings")
        for name, value in json_object(vote.get("ratings"), "ratings").items()
    }
    seconds, guidelines, at = (
        number(vote.get(name) or 0, name) for name in ("seconds", "guidelines", "at")
    )
    sides: Any = [str(vote.get(name)) for name in ("choice", "left")]
    choice, left = sides
    opinion = Opinion(
        choice,
        strength_of(vote.get("strength")),
        left=left,
        seconds=seconds,
        at=at,
        ratings={name: int(value) if value.is_integer() else 0 for name, value in ratings.items()},
        guidelines=int(guidelines),
        annotator=as_text(vote.get("annotator"), "annotator"),
        role="annotator" if (vote.get("role") or "annotator") == "annotator" else "expert",
    ).placed(_SIDES)
    if opinion.choice not in CHOICES:
        raise DataError(
            f"no verdict: a vote's choice is {choice!r:.40}, none of chosen, "
            "rejected, tie, both_bad",
        )
    if problem := opinion.problem():
        raise DataError(problem)
    return opinion


def case_of(
    row: Comparison,
    opinions: Sequence[Opinion] = (),
    *,
    labels: str = "",
    gold: bool = False,
) -> Case:
    """The case of a comparison, with these opinions or those of its annotators; `labels` and `gold`
    as in `read_cases`.

    Raises:
        DataError: both answers are equal.
    """
    facts = json_safe(dict(row.metadata))
    sides = {"chosen": row.chosen, "rejected": row.rejected}
    origins = [
        {name: facts.pop(f"{side}_{fact}", None) for name, fact in PROVENANCE.items()}
        for side in sides
    ]
    answers = zip(sides.values(), map(origin_of, origins), strict=True)
    chosen, rejected = (Answer(row.prompt, side, row.group, **origin) for side, origin in answers)
    if chosen.id == rejected.id:
        raise DataError("equal responses: there is nothing to compare")
    # a store's own rows have both, whatever else they have; of another file these are plain facts
    ours = {"verdict", "strategy"} <= facts.keys()
    own = {name: facts.pop(name, "") for name in COMPUTED} if ours else {}
    expert = own.get("settled_by")
    opinions = tuple(opinions) or tuple(_annotated(vote, expert) for vote in row.annotations)
    label = (
        "tie"
        if row.tie or row.probability == 0.5
        else "first"
        if row.probability > 0.5
        else "second"
    )
    if labels:
        opinions = (*opinions, Opinion(label, annotator=labels))
    details = {"id": row.id, "metadata": facts}
    case = Case(
        chosen,
        rejected,
        () if gold else opinions,
        known=label if gold else None,
        round=str(own.get("round", "")),
        strategy=str(own.get("strategy", "")) or "imported",
        details=details,
    )
    # the better side of a file often comes first; which is `first` here must not tell
    return ordered(case)


def _annotated(vote: Annotation, expert: str | None) -> Opinion:
    size = abs(vote.preference)
    choice = "first" if vote.preference > 0 else "second" if vote.preference < 0 else "tie"
    strength = None if size in (0.0, 1.0) else min(STRENGTHS, max(1, round(STRENGTHS * size)))
    return Opinion(
        choice,
        strength,
        annotator=vote.annotator,
        role="expert" if vote.annotator == expert else "annotator",
    )


def json_safe(value: object) -> JsonValue:
    """The value as JSON has it: what has no place there becomes a text, what is not finite becomes
    null.
    """
    if isinstance(value, Mapping):
        return {str(key): json_safe(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [json_safe(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if value is None or isinstance(value, str | int | float | bool) else str(value)


def moment(value: JsonValue) -> float:
    """Seconds since 1970 of a time as ISO 8601 writes it; 0 where there is none."""
    try:
        return datetime.fromisoformat(value).timestamp() if not missing(value) else 0.0
    except (TypeError, ValueError, OverflowError):
        raise DataError(f"not a time: created_at holds {value!r:.40}") from None


def readable_opinions(
    items: Iterable[T],
    read: Callable[[T], Opinion],
) -> tuple[tuple[Opinion, ...], list[DataError]]:
    """The judgments among these that can be read, and the reasons against the others.

    Raises:
        DataError: none of them can.
    """
    results = list(attempt(read, items))
    opinions = tuple(result for result in results if isinstance(result, Opinion))
    problems = [result for result in results if not isinstance(result, Opinion)]
    if problems and not opinions:
        raise problems[0]
    return opinions, [DataError(f"one judgment only, {problem}") for problem in problems]


def json_object(value: object, name: str) -> Facts:
    """An object, also from the JSON text of one; nothing counts as an empty one."""
    if isinstance(value, str) and value.startswith("{"):
        with suppress(ValueError):
            value = parse(value)
        if reason := fault(value):
            raise DataError(reason)
    if isinstance(value, Mapping) or missing(value):
        return value if isinstance(value, Mapping) else {}
    raise DataError(f"not an object: {name} holds {kind_name(value)}")


def objects(value: object, name: str) -> list[Facts]:
    """A list of objects; nothing counts as an empty one."""
    items = [] if missing(value) else sequence(value, name)
    if others := [kind_name(item) for item in items if not isinstance(item, Mapping)]:
        raise DataError(f"not an object: {name} lists {others[0]}")
    return items


def strength_of(value: JsonValue) -> int | None:
    """A rating of how strong a preference is, where it is one."""
    return int(value) if not isinstance(value, bool) and value in range(1, STRENGTHS + 1) else None
