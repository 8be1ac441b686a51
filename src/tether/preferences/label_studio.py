"""Tasks of Label Studio: its JSON export in, tasks with annotations out.

Format: https://labelstud.io/guide/task_format, the tag https://labelstud.io/tags/pairwise. Label Studio shows the two answers in
one order to everybody; in what is written here that order is drawn for each pair. A person of ours is no user there, and a task
that names an unknown user is refused, so names stand in the results' `meta`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from tether.core.errors import DataError
from tether.core.types import Comparison, Json
from tether.data.formats.fields import as_text, number, sequence
from tether.preferences import task_json
from tether.preferences.exchange import Case
from tether.preferences.votes import Choice, Opinion

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
TOOL = "label-studio"
_SIDES: dict[str, Choice] = {"left": "first", "right": "second"}
_UNDECIDED: dict[str, Choice] = {"tie": "tie", "equal": "tie", "both": "tie", "both_bad": "both_bad", "neither": "both_bad"}


def _matches(row: Mapping[str, Any]) -> bool:
    is_judged = "annotations" in row or "predictions" in row
    return isinstance(row.get("data"), Mapping) and (is_judged or row.keys() <= {"data", "id", "meta"})


def _read_task(row: Mapping[str, Any], fields: Sequence[str] = ()) -> task_json.ReadCase:
    """The case of a task; cancelled and unfinished annotations say nothing, and predictions are nobody's judgment.

    Raises:
        DataError: the prompt or the answers are not found, or of several annotations none holds a verdict that can be read.
    """
    data = row.get("data")
    if not isinstance(data, Mapping):
        raise DataError("not a task: it has no data")
    task = (
        task_json.unpacked_case(data["tether"], TOOL)
        if isinstance(data.get("tether"), Mapping) and not fields
        else (task_json.foreign_case(data, fields or task_json.field_names(data)),)
    )
    notes = {opinion.annotator: opinion for opinion in task[-1].opinions}
    done = [a for a in task_json.objects(row.get("annotations"), "annotations") if not a.get("was_cancelled") and a.get("result")]
    details = {"id": f"{TOOL}:{row['id']}"} if "id" in row else {}
    return task_json.judged_case(task, done, partial(_opinion, notes=notes), details)


def _opinion(annotation: Mapping[str, Any], notes: Mapping[str, Opinion]) -> Opinion:
    results = task_json.objects(annotation["result"], "result")
    values = {str(result.get("type")): task_json.json_object(result.get("value"), "value") for result in results}
    meta = next((r["meta"] for r in results if isinstance(r.get("meta"), Mapping) and "annotator" in r["meta"]), None)
    side = str(values.get("pairwise", {}).get("selected"))
    word = str(sequence(values.get("choices", {}).get("choices") or [""], "choices")[0]).strip().lower().replace(" ", "_")
    choice = _SIDES.get(side) or _UNDECIDED.get(word)
    if choice is None:
        raise DataError("no verdict: an annotation has neither a pairwise selection nor a choice of tie or both_bad")
    strength = task_json.strength_of(values.get("rating", {}).get("rating"))
    seconds = number(annotation.get("lead_time") or 0, "lead_time")
    if meta is None:
        at = task_json.moment(annotation.get("created_at"), "created_at")
        return Opinion(choice, strength, seconds=seconds, annotator=_user(annotation.get("completed_by")), left="first", at=at)
    # Ours, and when it was made there is not when it was said.
    annotator = as_text(meta["annotator"], "annotator")
    note = notes.get(annotator) or Opinion(choice, seconds=seconds, annotator=annotator)
    return replace(note, choice=choice, strength=strength)


def _user(who: Any) -> str:
    if isinstance(who, Mapping):
        who = who.get("email") or who.get("username") or who.get("id")
    return f"label-studio-{who}" if isinstance(who, int) else as_text(who or "label-studio", "completed_by")


def _write_task(case: Case, label: Comparison, store: str) -> Json:
    """A task with every judgment as an annotation; its label stays here, since a prediction would be shown to those who judge."""
    shown = task_json.shown_case(case, TOOL)
    data: Json = dict(zip(("prompt", "answer1", "answer2"), task_json.shown_texts(shown), strict=True))
    annotations = [{"result": _result(opinion), "lead_time": opinion.seconds} for opinion in shown.opinions]
    return {"data": data | {"tether": task_json.packed_case(case, label, store)}, "annotations": annotations}


def _result(opinion: Opinion) -> list[Json]:
    side = next((side for side, choice in _SIDES.items() if choice == opinion.choice), None)
    # The tag Pairwise is a result's source and its object in one.
    source, target, kind = ("comparison", "comparison", "pairwise") if side else ("otherwise", "prompt", "choices")
    value = {"selected": side} if side else {"choices": [opinion.choice]}
    result = {"from_name": source, "to_name": target, "type": kind, "value": value, "meta": {"annotator": opinion.annotator}}
    rating = {"from_name": "strength", "to_name": "prompt", "type": "rating", "value": {"rating": opinion.strength}}
    return [result, rating] if opinion.strength else [result]


BRIDGE = task_json.Bridge(_matches, _read_task, _write_task)
