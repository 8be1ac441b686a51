"""Records of Argilla 2: `dataset.records.to_json`, or its flat columns as data sets on the hub have them, in; records out.

https://docs.argilla.io/latest/how_to_guides/import_export. Written records fit a data set with text fields `prompt`, `response1`,
`response2`, a label question `preference` (response1, response2, tie, both_bad) and a rating question `strength` (1 to 3).
Argilla shows the two answers in one order to everybody; that order is drawn for each pair. Its users have UUIDs: those written
here are made of the annotators' names, which stand in the metadata.
"""

from __future__ import annotations

import json
import uuid
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from tether.core.errors import DataError
from tether.core.types import Comparison
from tether.data.formats.fields import as_text, number, sequence
from tether.preferences.carried import (
    foreign,
    in_view,
    objects,
    packed,
    readable,
    remarked,
    spoken,
    strength_of,
    table,
    unpacked,
)
from tether.preferences.exchange import Case, Said, turned

NAMES = ("response1", "response2")
_USERS = uuid.UUID("6f1d2a0e-5d0b-4b8e-9d59-7e6c1a6a0f3b")


def matches(row: Mapping[str, Any]) -> bool:
    return (isinstance(row.get("fields"), Mapping) and "responses" in row) or any(key.endswith(".responses") for key in row)


def read_task(row: Mapping[str, Any], fields: Sequence[str] = (), skipped: list[str] | None = None) -> Case:
    """The case of a record; drafts and discarded responses say nothing, and suggestions are nobody's judgment.

    A label question may name an answer's field, `tie` or `both_bad`; a ranking question orders the two fields, with equal ranks
    for a tie. The first such question counts. What is wrong with a response that cannot be read is added to `skipped`.

    Raises:
        DataError: the prompt or the answers are not found, or no response is of either kind.
    """
    values, responses, metadata = _parts(row)
    was_turned, names, notes = False, NAMES, {}
    if isinstance(metadata.get("tether"), str) and not fields:
        case, was_turned, notes = unpacked(metadata["tether"])
    else:
        case, names = foreign(values, fields)
        rest = {name: value for name, value in metadata.items() if value is not None}
        case = replace(case, details={"metadata": {**case.details["metadata"], **rest}})
    question = next((name for name, given in responses.items() if any(_tells(a, names) for a in given)), None)
    if question is None and any(responses.values()):
        raise DataError(f"no verdict: none of the questions {', '.join(responses)} names or ranks {names[0]} and {names[1]}")
    ids, called = (sequence(metadata.get(name) or [], name) for name in ("annotator_ids", "annotators"))
    people = {str(key): as_text(name, "annotators") for key, name in zip(ids, called, strict=False)}
    strengths = {str(a.get("user_id") or "argilla"): strength_of(a.get("value")) for a in responses.get("strength", ())}

    def read(answer: Mapping[str, Any]) -> Said:
        choice, user = _choice(answer.get("value"), names), as_text(answer.get("user_id") or "argilla", "user_id")
        if choice is None:
            raise DataError(f"unreadable verdict: {answer.get('value')!r:.60} neither names nor ranks {names[0]} and {names[1]}")
        who = people.get(user, user)
        known = {"left": "first", "role": "expert" if who == metadata.get("settled_by") else "annotator"}
        known |= remarked(table(notes.get(who), "said"), {}) if user in people else {}
        return Said(who, choice, strengths.get(user), **known)  # type: ignore[arg-type]

    details = {"id": str(row["id"]), **case.details} if row.get("id") else case.details
    case = replace(case, said=readable(responses.get(question or "", ()), read, skipped), details=details)
    return turned(case) if was_turned else case


def _parts(row: Mapping[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, list[Mapping[str, Any]]], Mapping[str, Any]]:
    """Fields, responses by question, metadata; flat columns do not tell fields from metadata, so only our own are taken out."""
    if isinstance(row.get("fields"), Mapping):
        answered = {name: objects(given, name) for name, given in table(row.get("responses"), "responses").items()}
        return row["fields"], answered, table(row.get("metadata"), "metadata")
    responses: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for name in [key.removesuffix(".responses") for key in row if key.endswith(".responses")]:
        given = sequence(row[f"{name}.responses"] or [], name)
        users = sequence(row.get(f"{name}.responses.users") or [None] * len(given), name)
        status = sequence(row.get(f"{name}.responses.status") or ["submitted"] * len(given), name)
        for value, user, how in zip(given, users, status, strict=False):
            if how == "submitted":
                responses[name].append({"value": value, "user_id": user or "argilla"})
    plain = {key: value for key, value in row.items() if "." not in key and key not in ("id", "_server_id", "status")}
    ours = {key: plain.pop(key) for key in ("tether", "annotators", "annotator_ids", "settled_by") if key in plain}
    return plain, responses, ours


def _tells(answer: Mapping[str, Any], names: Sequence[str]) -> bool:
    """Whether a response names or ranks answers; a ranking that is damaged is one still."""
    try:
        return _choice(answer.get("value"), names) is not None
    except DataError:
        return True


def _choice(value: Any, names: Sequence[str]) -> str | None:
    """A label or a ranking as a choice; None if it is neither."""
    places: dict[Any, str] = {names[0]: "first", names[1]: "second"}
    if isinstance(value, str):
        word = value.strip().lower().replace(" ", "_")
        return places.get(value) or (word if word in ("tie", "both_bad") else None)
    if not isinstance(value, list) or len(value) != 2:
        return None
    ranked = [
        (number(item.get("rank") or n, "rank"), item.get("value")) if isinstance(item, Mapping) else (n, item)
        for n, item in enumerate(value)
    ]
    if [name for _, name in ranked] not in (list(names), list(names)[::-1]):
        return None
    return "tie" if ranked[0][0] == ranked[1][0] else places[min(ranked)[1]]


def write_task(case: Case, label: Comparison | None, store: str) -> dict[str, Any]:
    """A record with every judgment as a response and the label, where there is one, as a suggestion."""
    sides = in_view(case, "argilla")
    names: dict[str, str] = dict(zip(("first", "second") if sides[0] is case.first else ("second", "first"), NAMES, strict=True))
    ids = [str(uuid.uuid5(_USERS, said.annotator)) for said in case.said]
    given = [{"value": names.get(said.choice, said.choice), "user_id": key} for said, key in zip(case.said, ids, strict=True)]
    rated = [{"value": said.strength, "user_id": key} for said, key in zip(case.said, ids, strict=True) if said.strength]
    metadata: dict[str, Any] = {"tether": json.dumps(packed(case, sides, store), ensure_ascii=False)}
    metadata |= {"annotators": [said.annotator for said in case.said], "annotator_ids": ids}
    metadata |= {"settled_by": case.settled.annotator} if case.settled else {}
    suggestions = {}
    if label is not None:
        best = "tie" if label.tie else names["first" if label.chosen == case.first.response else "second"]
        suggestions = {"preference": {"value": best, "score": label.probability, "agent": "tether"}}
    texts = (spoken(case.first.prompt), *(spoken(side.response) for side in sides))
    return {
        "id": str(case.details.get("id") or case.item),
        "fields": dict(zip(("prompt", *NAMES), texts, strict=True)),
        "metadata": metadata,
        "suggestions": suggestions,
        "responses": {"preference": given, **({"strength": rated} if rated else {})},
        "vectors": {},
    }
