"""Tasks of Label Studio: its JSON export in, tasks with annotations out.

Format: https://labelstud.io/guide/task_format, the tag https://labelstud.io/tags/pairwise. Label Studio shows the two answers in
one order to everybody; in what is written here that order is drawn for each pair. A person of ours is no user there, and a task
that names an unknown user is refused, so names stand in the results' `meta`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from tether.core.errors import DataError
from tether.core.types import Comparison
from tether.data.formats.fields import as_text, number, sequence
from tether.preferences.carried import (
    foreign,
    in_view,
    moment,
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

CONFIG = """<View>
  <Text name="prompt" value="$prompt"/>
  <Pairwise name="comparison" toName="answer1,answer2"/>
  <View style="display: flex; gap: 1em">
    <View style="flex: 1"><Text name="answer1" value="$answer1"/></View>
    <View style="flex: 1"><Text name="answer2" value="$answer2"/></View>
  </View>
  <Choices name="otherwise" toName="prompt" choice="single" showInline="true">
    <Choice value="tie"/>
    <Choice value="both_bad"/>
  </Choices>
  <Rating name="strength" toName="prompt" maxRating="3"/>
</View>
"""
"""The labelling interface for the tasks that are written here."""

_UNDECIDED = {"tie": "tie", "equal": "tie", "both": "tie", "both_bad": "both_bad", "neither": "both_bad"}


def matches(row: Mapping[str, Any]) -> bool:
    return isinstance(row.get("data"), Mapping) and (
        "annotations" in row or "predictions" in row or set(row) <= {"data", "id", "meta"}
    )


def read_task(row: Mapping[str, Any], fields: Sequence[str] = (), skipped: list[str] | None = None) -> Case:
    """The case of a task; cancelled and unfinished annotations say nothing, and predictions are nobody's judgment.

    What is wrong with an annotation that cannot be read is added to `skipped`.

    Raises:
        DataError: the prompt or the answers are not found, or of several annotations none holds a verdict that can be read.
    """
    data = row.get("data")
    if not isinstance(data, Mapping):
        raise DataError("not a task: it has no data")
    ours = isinstance(data.get("tether"), Mapping) and not fields
    case, was_turned, notes = unpacked(data["tether"]) if ours else (foreign(data, fields)[0], False, {})
    done = [a for a in objects(row.get("annotations"), "annotations") if not a.get("was_cancelled") and a.get("result")]
    said = readable(done, lambda annotation: _said(annotation, notes), skipped)
    details = {"id": f"label-studio:{row['id']}", **case.details} if "id" in row else case.details
    case = replace(case, said=said, details=details)
    return turned(case) if was_turned else case


def _said(annotation: Mapping[str, Any], notes: Mapping[str, Any]) -> Said:
    results = objects(annotation["result"], "result")
    values = {str(result.get("type")): table(result.get("value"), "value") for result in results}
    meta = next((r["meta"] for r in results if isinstance(r.get("meta"), Mapping) and "annotator" in r["meta"]), {})
    side, words = (
        values.get("pairwise", {}).get("selected"),
        sequence(values.get("choices", {}).get("choices") or [""], "choices"),
    )
    undecided = _UNDECIDED.get(str(words[0]).strip().lower().replace(" ", "_"))
    choice = {"left": "first", "right": "second"}.get(str(side)) or undecided
    if choice is None:
        raise DataError("no verdict: an annotation has neither a pairwise selection nor a choice of tie or both_bad")
    known: dict[str, Any] = {"strength": strength_of(values.get("rating", {}).get("rating"))}
    known |= {"seconds": number(annotation.get("lead_time") or 0.0, "lead_time")}
    if "annotator" in meta:  # ours, and when it was made there is not when it was said
        who = as_text(meta["annotator"], "annotator")
        known |= remarked({"role": meta.get("role"), **table(notes.get(who), "said")}, {})
    else:
        who = _user(annotation.get("completed_by"))
        known |= {"left": "first", "at": moment(annotation.get("created_at"), "created_at")}
    return Said(who, choice, **known)  # type: ignore[arg-type]


def _user(who: Any) -> str:
    if isinstance(who, Mapping):
        who = who.get("email") or who.get("username") or who.get("id")
    return f"label-studio-{who}" if isinstance(who, int) else as_text(who or "label-studio", "completed_by")


def write_task(case: Case, label: Comparison | None, store: str) -> dict[str, Any]:
    """A task with every judgment as an annotation; its label stays here, since a prediction would be shown to those who judge."""
    sides = in_view(case, "label-studio")
    names = {"first": "left", "second": "right"} if sides[0] is case.first else {"first": "right", "second": "left"}
    data = {"prompt": spoken(case.first.prompt), "answer1": spoken(sides[0].response), "answer2": spoken(sides[1].response)}
    annotations = []
    for said in case.said:
        who = {"annotator": said.annotator, "role": said.role}
        annotations.append(
            {"result": _result(names.get(said.choice, said.choice), said.strength, who), "lead_time": said.seconds}
        )
    return {"data": data | {"tether": packed(case, sides, store)}, "annotations": annotations}


def _result(choice: str, strength: int | None, meta: Mapping[str, str]) -> list[dict[str, Any]]:
    # The tag Pairwise is a result's source and its object in one.
    if choice in ("left", "right"):
        found: dict[str, Any] = {
            "from_name": "comparison",
            "to_name": "comparison",
            "type": "pairwise",
            "value": {"selected": choice},
        }
    else:
        found = {"from_name": "otherwise", "to_name": "prompt", "type": "choices", "value": {"choices": [choice]}}
    rated = {"from_name": "strength", "to_name": "prompt", "type": "rating", "value": {"rating": strength}}
    return [found | {"meta": dict(meta)}] + ([rated] if strength else [])
