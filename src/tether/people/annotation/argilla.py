"""Records of Argilla 2: `dataset.records.to_json`, or its flat columns as data sets on the hub have
them, in; records out. https://docs.argilla.io/latest/how_to_guides/import_export. Written records
fit a data set with text fields `prompt`, `response1`, `response2` and two questions. `preference`
is a label (response1, response2, tie, both_bad), `strength` a rating (1 to 3). Argilla shows the
two answers in one order to everybody; that order is drawn for each pair. Argilla's users have
UUIDs. Written records derive the UUIDs from the annotators' names, which the metadata holds.
"""

from __future__ import annotations

import json
import logging
import uuid
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

from tether.core.errors import DataError
from tether.core.once import once
from tether.core.types import Comparison, Facts, Json
from tether.data.formats.fields import as_text, number, sequence
from tether.people.annotation.exchange import Case
from tether.people.annotation.task_json import (
    Bridge,
    Judged,
    ReadCase,
    field_names,
    foreign_case,
    json_object,
    judged_case,
    objects,
    packed_case,
    shown_case,
    shown_texts,
    spoken_choice,
    strength_of,
    unpacked_case,
)
from tether.people.labels.votes import Choice, Opinion

TOOL = "argilla"
NAMES = ("response1", "response2")
NO_STATUS = (
    "Responses of Argilla have no status here (dataset.records.to_json writes none), so drafts "
    "and discarded ones count as well. dataset.records.to_datasets() writes the status."
)
_LOG = logging.getLogger("tether.people.annotation")
_USERS = uuid.UUID("6f1d2a0e-5d0b-4b8e-9d59-7e6c1a6a0f3b")


def _matches(row: Facts) -> bool:
    return (isinstance(row.get("fields"), Mapping) and "responses" in row) or any(
        key.endswith(".responses") for key in row
    )


def _read_task(row: Facts, fields: Sequence[str] = ()) -> ReadCase:
    """The case of a record. Drafts, discarded responses and suggestions do not count.

    Of several responses by one person the last counts. A label question may name an answer's field
    or give a choice in words. A ranking question orders the two fields, with equal ranks for a tie.
    The first such question counts.

    Raises:
        DataError: the prompt or the answers are not found, or no response is of either kind.
    """
    values, responses, metadata = _parts(row)
    if isinstance(metadata.get("tether"), str) and not fields:
        names = NAMES
        task = unpacked_case(metadata["tether"], TOOL)
    else:
        prompt, *names = fields or field_names(values)
        case = foreign_case(values, (prompt, *names))
        rest = {name: value for name, value in metadata.items() if value is not None}
        task = (replace(case, details={"metadata": {**case.details["metadata"], **rest}}),)
    question = next(
        (name for name, given in responses.items() if any(_tells(a, names) for a in given)),
        "",
    )
    if not question and any(
        not _is_withdrawn(answer) for given in responses.values() for answer in given
    ):
        raise DataError(
            f"no verdict: none of the questions {', '.join(responses)} names or ranks "
            f"{names[0]} and {names[1]}",
        )
    notes = {_user_id(opinion): opinion for opinion in task[-1].opinions}
    strengths = {
        _person(a): strength_of(a.get("value"))
        for a in responses.get("strength", ())
        if not _is_withdrawn(a)
    }

    def read(answer: Facts) -> Opinion:
        choice = _choice(answer.get("value"), names)
        user = as_text(answer.get("user_id") or TOOL, "user_id")
        if choice is None:
            raise DataError(
                f"unreadable verdict: {answer.get('value')!r:.60} neither names nor "
                f"ranks {names[0]} and {names[1]}",
            )
        note = notes.get(user) or Opinion(choice, annotator=user, left="first")
        return replace(note, choice=choice, strength=strengths.get(user))

    judged = [
        Judged(_person(answer), answer, _is_withdrawn(answer))
        for answer in responses.get(question, ())
    ]
    return judged_case(
        task,
        judged,
        read,
        {"id": str(row["id"])} if row.get("id") else {},
    )


def _person(answer: Facts) -> str:
    return str(answer.get("user_id") or TOOL)


def _is_withdrawn(answer: Facts) -> bool:
    return answer.get("status") == "discarded"


def _parts(
    row: Facts,
) -> tuple[Facts, Mapping[str, list[Facts]], Facts]:
    """Fields, responses by question, metadata; flat columns do not tell fields from metadata, so
    only our own are taken out.

    Drafts are left out. A response without a status counts as submitted,
    since `to_json` writes none.
    """
    if isinstance(row.get("fields"), Mapping):
        given = row.get("responses")
        by_question = (
            _of_people(given) if isinstance(given, list) else json_object(given, "responses")
        )
        answered = {name: _given(objects(answers, name)) for name, answers in by_question.items()}
        if any("status" not in answer for answers in answered.values() for answer in answers):
            once(_LOG.warning, NO_STATUS)
        return row["fields"], answered, json_object(row.get("metadata"), "metadata")
    questions = [key.removesuffix(".responses") for key in row if key.endswith(".responses")]
    flat = {
        key: value
        for key, value in row.items()
        if "." not in key and key not in ("id", "_server_id", "status")
    }
    return (
        flat,
        {name: _given(_of_columns(row, name)) for name in questions},
        {"tether": flat.pop("tether", None)},
    )


def _given(answers: Sequence[Facts]) -> list[Facts]:
    """The answers without drafts and submitted nothings; a discarded one stays, since it takes back
    an earlier one.
    """
    return [
        answer
        for answer in answers
        if (status := answer.get("status")) in (None, "discarded")
        or (status == "submitted" and answer.get("value") is not None)
    ]


def _of_people(responses: Sequence[object]) -> dict[str, list[Json]]:
    """Responses as the server's interface has them, one a person with a value for each question, by
    question.
    """
    by_question: dict[str, list[Json]] = defaultdict(list)
    for response in objects(responses, "responses"):
        facts = {"user_id": response.get("user_id"), "status": response.get("status")}
        for name, value in json_object(response.get("values"), "values").items():
            by_question[name].append({**json_object(value, name), **facts})
    return by_question


def _of_columns(row: Facts, name: str) -> list[Json]:
    """The responses to a question in flat columns.

    Raises:
        DataError: the columns have different lengths.
    """
    given = sequence(row[f"{name}.responses"] or [], name)
    users = sequence(row.get(f"{name}.responses.users") or [None] * len(given), name)
    status = sequence(row.get(f"{name}.responses.status") or [None] * len(given), name)
    if not len(given) == len(users) == len(status):
        raise DataError(
            f"uneven columns: {name} has {len(given)} responses, {len(users)} users "
            f"and {len(status)} statuses",
        )
    columns = zip(given, users, status, strict=True)
    return [{"value": value, "user_id": user, "status": how} for value, user, how in columns]


def _tells(answer: Facts, names: Sequence[str]) -> bool:
    """True for a response that names or ranks answers; a damaged ranking is one still."""
    try:
        return _choice(answer.get("value"), names) is not None
    except DataError:
        return True


def _choice(value: object, names: Sequence[str]) -> Choice | None:
    """A label or a ranking as a choice; None if it is neither."""
    places: dict[object, Choice] = {names[0]: "first", names[1]: "second"}
    if isinstance(value, str):
        return spoken_choice(value, names)
    if not isinstance(value, list) or len(value) != 2:
        return None
    items = [item if isinstance(item, Mapping) else {"value": item} for item in value]
    ranked = [
        (number(item.get("rank") or place, "rank"), item.get("value"))
        for place, item in enumerate(items)
    ]
    if [name for _, name in ranked] not in (list(names), list(names)[::-1]):
        return None
    return "tie" if ranked[0][0] == ranked[1][0] else places[min(ranked)[1]]


def _user_id(opinion: Opinion) -> str:
    return str(uuid.uuid5(_USERS, opinion.annotator))


def _write_task(case: Case, label: Comparison, store: str) -> Json:
    """A record with every judgment as a response; its label stays here, since a suggestion would be
    shown to those who judge.
    """
    shown = shown_case(case, TOOL)
    names: dict[str, str] = dict(zip(("first", "second"), NAMES, strict=True))
    answers: dict[str, list[Json]] = {"preference": [], "strength": []}
    for opinion in shown.opinions:
        user = {"user_id": _user_id(opinion), "status": "submitted"}
        answers["preference"].append({"value": names.get(opinion.choice, opinion.choice), **user})
        answers["strength"] += [{"value": opinion.strength, **user}] if opinion.strength else []
    return {
        "id": str(case.details.get("id") or case.item),
        "fields": dict(zip(("prompt", *NAMES), shown_texts(shown), strict=True)),
        "metadata": {
            "tether": json.dumps(packed_case(case, label, store), ensure_ascii=False),
        },
        "suggestions": {},
        "responses": {
            question: given
            for question, given in answers.items()
            if given or question == "preference"
        },
        "vectors": {},
    }


BRIDGE = Bridge(_matches, _read_task, _write_task)
