"""Tasks of Label Studio: its JSON export in, tasks with annotations out.

Format: https://labelstud.io/guide/task_format, the tag https://labelstud.io/tags/pairwise. Label
Studio shows the two answers in one order to everybody; in what is written here that order is drawn
for each pair. Label Studio refuses a task that names an unknown user, so names are in the results'
`meta`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import combinations
from types import MappingProxyType

from tether.core.errors import DataError
from tether.core.types import Comparison, Facts, Json, JsonValue, Texts
from tether.data.formats.conversations import MOST
from tether.data.formats.fields import as_text, number, sequence
from tether.data.formats.values import structure_in
from tether.people.annotation.exchange import Case
from tether.people.annotation.task_json import (
    PROMPTS,
    Bridge,
    Judged,
    ReadCase,
    field_names,
    foreign_case,
    has_fields,
    json_object,
    judged_case,
    moment,
    objects,
    packed_case,
    shown_case,
    shown_texts,
    spoken_choice,
    strength_of,
    unpacked_case,
)
from tether.people.labels.votes import Choice, Opinion

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
_OF_ROW = (
    "annotation_id",
    "annotator",
    "created_at",
    "updated_at",
    "lead_time",
    "agreement",
    "was_cancelled",
    "id",
)
"""Columns of an annotation in JSON_MIN and CSV, beside the data of its task and a column for each
question.
"""
_TEXTS = ("body", "text", "html", "title")
"""Keys of an item of the tag List, the longest text first."""
_KINDS = {"selected": "pairwise", "ranker": "ranker", "rating": "rating", "choices": "choices"}


def _matches(row: Facts) -> bool:
    if {"annotation_id", "annotator"} <= row.keys():
        return True
    is_judged = "annotations" in row or "predictions" in row
    return isinstance(row.get("data"), Mapping) and (
        is_judged or row.keys() <= {"data", "id", "meta"}
    )


def _read_task(row: Facts, fields: Sequence[str] = ()) -> Iterable[DataError | Case]:
    """The case of a task, or the cases of a task whose answers are ranked, a pair each.

    Of several annotations by one person the last counts. A cancelled or skipped one removes the
    person's earlier choice. Unfinished ones and predictions do not count.

    Raises:
        DataError: the prompt or the answers are not found, or of several annotations none holds a
            verdict that can be read.
    """
    if "data" not in row and "annotation_id" in row:
        row = _task_of(row, fields)
    data = row.get("data")
    if not isinstance(data, Mapping):
        raise DataError("not a task: it has no data")
    annotations = [
        a
        for a in objects(row.get("annotations"), "annotations")
        if a.get("result") or _is_withdrawn(a)
    ]
    annotations.sort(key=_last_change)
    details = {"id": f"{TOOL}:{row['id']}"} if "id" in row else {}
    judged = [
        Judged(_person(annotation), annotation, _is_withdrawn(annotation))
        for annotation in annotations
    ]
    if not (fields or isinstance(data.get("tether"), Mapping)) and (
        ranked := _ranked_answers(data, annotations)
    ):
        return _rankings(data, ranked, judged, details)
    task: ReadCase
    if isinstance(data.get("tether"), Mapping) and not fields:
        task = unpacked_case(data["tether"], TOOL)
        names = ("answer1", "answer2")
    else:
        prompt, *names = fields or field_names(data)
        task = (foreign_case(data, (prompt, *names)),)
    notes = {opinion.annotator: opinion for opinion in task[-1].opinions}
    return judged_case(task, judged, partial(_opinion, notes=notes, names=names), details)


def _task_of(row: Facts, fields: Sequence[str]) -> Json:
    """The task of a row of JSON_MIN or CSV, with its one annotation.

    Raises:
        DataError: the prompt or the answers are not found.
    """
    cells = {
        name: _cell(value)
        for name, value in row.items()
        if name not in _OF_ROW and value not in (None, "")
    }
    results = {name: kind for name, value in cells.items() if (kind := _kind_of(value))}
    data = {name: value for name, value in cells.items() if name not in results}
    if not _lists_of_answers(data):
        named = [*(fields or field_names(data))]
        results |= {
            name: "choices"
            for name in data
            if name not in named and spoken_choice(data[name], named[1:])
        }
    value_of = {name: _value_of(cells[name]) for name in results}
    annotation = {
        "result": [
            {"from_name": name, "type": kind, "value": value_of[name]}
            for name, kind in results.items()
        ],
    }
    annotation |= {name: row.get(name) for name in ("created_at", "updated_at", "lead_time")}
    cancelled = str(row.get("was_cancelled") or "").lower() in ("true", "1")
    annotation |= {
        "completed_by": _cell(row.get("annotator")),
        "was_cancelled": cancelled,
        "id": row.get("annotation_id"),
    }
    read = data if _lists_of_answers(data) else {"tether": data.get("tether")}
    task = {
        "data": {name: read.get(name, row[name]) for name in data if name not in results},
        "annotations": [annotation],
    }
    return task | ({"id": row["id"]} if row.get("id") not in (None, "") else {})


def _cell(value: object) -> JsonValue:
    """A cell of CSV: the list, object or whole number that its text is."""
    if not isinstance(value, str):
        return value
    if value.isdecimal():
        return int(value)
    return structure_in(value)


def _kind_of(value: object) -> str:
    """The type of a question's results, as their keys tell it; empty for other values."""
    first = value[0] if isinstance(value, list) and value else value
    return next(
        (kind for key, kind in _KINDS.items() if isinstance(first, Mapping) and key in first),
        "",
    )


def _value_of(cell: object) -> Facts:
    first = cell[0] if isinstance(cell, list) else cell
    return first if isinstance(first, Mapping) else {"choices": [first]}


def _is_withdrawn(annotation: Facts) -> bool:
    return bool(annotation.get("was_cancelled") or annotation.get("skipped"))


def _last_change(annotation: Facts) -> float:
    """The time of the last change; annotations without a time keep their order, before the others."""
    with suppress(DataError):
        return moment(annotation.get("updated_at") or annotation.get("created_at"))
    return 0.0


def _noted(annotation: Facts) -> object:
    """The annotator's name in an annotation that tether wrote; None in those of the tool's users."""
    results = annotation.get("result")
    metas = (
        [r.get("meta") for r in results if isinstance(r, Mapping)]
        if isinstance(results, list)
        else []
    )
    return next(
        (meta["annotator"] for meta in metas if isinstance(meta, Mapping) and "annotator" in meta),
        None,
    )


def _person(annotation: Facts) -> str:
    who = annotation.get("completed_by")
    who = who.get("id", who.get("email")) if isinstance(who, Mapping) else who
    return repr(_noted(annotation) or who)


def _opinion(annotation: Facts, notes: Mapping[str, Opinion], names: Sequence[str]) -> Opinion:
    results = [
        (str(r.get("type")), json_object(r.get("value"), "value")) for r in _results(annotation)
    ]
    choices: list[Choice] = [
        *{choice for kind, value in results for choice in _choices(kind, value, names)},
    ]
    if not choices:
        raise DataError(
            "no verdict: an annotation has neither a pairwise selection nor a choice "
            "that names an answer or a tie",
        )
    if len(choices) > 1:
        raise DataError(f"several verdicts: one annotation says {' and '.join(sorted(choices))}")
    ratings = [value.get("rating") for kind, value in results if kind == "rating"]
    return _of_user(
        annotation,
        choices[0],
        strength_of(ratings[0]) if len(ratings) == 1 else None,
        notes,
    )


def _results(annotation: Facts) -> list[Facts]:
    return objects(annotation.get("result"), "result")


def _choices(kind: str, value: Facts, names: Sequence[str]) -> Iterator[Choice]:
    """The verdicts that a result says."""
    if kind == "pairwise" and (side := _SIDES.get(str(value.get("selected")))):
        yield side
    for word in sequence(value.get("choices") or [], "choices") if kind == "choices" else ():
        if choice := spoken_choice(word, names):
            yield choice


def _of_user(
    annotation: Facts,
    choice: Choice,
    strength: int | None,
    notes: Mapping[str, Opinion] = MappingProxyType({}),
) -> Opinion:
    """The opinion of the person who made an annotation."""
    seconds = number(annotation.get("lead_time") or 0, "lead_time")
    if (noted := _noted(annotation)) is None:
        at = moment(annotation.get("updated_at") or annotation.get("created_at"))
        return Opinion(
            choice,
            strength,
            seconds=seconds,
            annotator=_user(annotation.get("completed_by")),
            left="first",
            at=at,
        )
    # Ours, and when it was made there is not when it was said.
    annotator = as_text(noted, "annotator")
    note = notes.get(annotator) or Opinion(choice, seconds=seconds, annotator=annotator)
    return replace(note, choice=choice, strength=strength)


def _lists_of_answers(data: Facts) -> list[tuple[str, dict[str, str]]]:
    """Columns that list answers to rank, each with the texts by id."""
    lists = {
        name: value for name, value in data.items() if isinstance(value, list) and len(value) > 1
    }
    answers = {
        name: {
            str(item["id"]): next((str(item[key]) for key in _TEXTS if item.get(key)), "")
            for item in items
        }
        for name, items in lists.items()
        if all(isinstance(item, Mapping) and "id" in item for item in items)
    }
    return list(answers.items())


def _ranked_answers(data: Facts, annotations: Sequence[Facts]) -> tuple[str, dict[str, str]] | None:
    """The column and the answers that the tag Ranker shows; None where nothing is ranked."""
    lists = _lists_of_answers(data)
    results = (annotation.get("result") for annotation in annotations)
    each = (one for given in results if isinstance(given, list) for one in given)
    ranks = any(isinstance(one, Mapping) and one.get("type") == "ranker" for one in each)
    if not lists or (not ranks and (annotations or has_fields(data))):
        return None
    return lists[0]


def _rankings(
    data: Facts,
    ranked: tuple[str, Texts],
    judged: Sequence[Judged],
    details: Json,
) -> Iterator[DataError | Case]:
    """A case for each pair of the ranked answers, with the rankings' verdicts on it;
    https://labelstud.io/tags/ranker. Of pairs that are no case, one reason of each kind.

    Raises:
        DataError: the prompt is not found, or of several rankings none can be read.
    """
    column, answers = ranked
    if len(answers) > MOST:
        raise DataError(
            f"too many answers: column {column} lists {len(answers)}, of at most {MOST}",
        )
    if len(answers) < len(data[column]):
        raise DataError(f"equal ids: two answers in column {column} have the same one")
    prompt = next((name for name in PROMPTS if name in data), None)
    if prompt is None:
        raise DataError(f"unknown fields: a prompt is looked for among {', '.join(data):.200}")
    rest = {name: value for name, value in data.items() if name != column}
    problems: dict[str, DataError] = {}
    for pair in combinations(answers, 2):
        try:
            case = foreign_case(
                {**rest, **{name: answers[name] for name in pair}},
                (prompt, *pair),
            )
        except DataError as error:
            problems.setdefault(str(error).partition(": ")[0], error)
            continue
        of_pair = [
            one for one in judged if one.withdrawn or {*pair} <= _ranked_ids(one.said, {*pair})
        ]
        name = (
            {"id": f"{details['id']}:{'-'.join(pair)}"} if details and len(answers) > 2 else details
        )
        yield from judged_case((case,), of_pair, partial(_of_ranking, pair=pair), name)
    yield from problems.values()


def _ranked_ids(annotation: Facts, pair: set[str]) -> set[str]:
    """The answers that a ranking holds; those of the pair where it cannot be read, so that the
    reason is given.
    """
    try:
        return {*_order(annotation)}
    except DataError:
        return pair


def _of_ranking(annotation: Facts, pair: tuple[str, str]) -> Opinion:
    order = _order(annotation)
    return _of_user(
        annotation,
        "first" if order.index(pair[0]) < order.index(pair[1]) else "second",
        None,
    )


def _order(annotation: Facts) -> list[str]:
    """The ids of the answers from the best to the worst.

    Raises:
        DataError: there is no ranking, or one in several lists.
    """
    values = [
        json_object(r.get("value"), "value").get("ranker")
        for r in _results(annotation)
        if r.get("type") == "ranker"
    ]
    if len(values) != 1:
        raise DataError(f"no verdict: an annotation holds {len(values)} rankings")
    lists = (
        [ids for ids in values[0].values() if ids]
        if isinstance(values[0], Mapping)
        else [values[0]]
    )
    if len(lists) != 1:
        raise DataError(
            "no verdict: answers are sorted into several lists, whose order a ranking does not have",
        )
    return [as_text(one, "ranker") for one in sequence(lists[0], "ranker")]


def _user(who: object) -> str:
    if isinstance(who, Mapping):
        who = who.get("email") or who.get("username") or who.get("id")
    return (
        f"label-studio-{who}"
        if isinstance(who, int)
        else as_text(who or "label-studio", "completed_by")
    )


def _write_task(case: Case, label: Comparison, store: str) -> Json:
    """A task with every judgment as an annotation; its label stays here, since a prediction would
    be shown to those who judge.
    """
    shown = shown_case(case, TOOL)
    data: Json = dict(
        zip(("prompt", "answer1", "answer2"), shown_texts(shown), strict=True),
    )
    annotations = [
        {"result": _result(opinion), "lead_time": opinion.seconds} for opinion in shown.opinions
    ]
    return {
        "data": data | {"tether": packed_case(case, label, store)},
        "annotations": annotations,
    }


def _result(opinion: Opinion) -> list[Json]:
    side = next((side for side, choice in _SIDES.items() if choice == opinion.choice), None)
    # The tag Pairwise is a result's source and its object in one.
    source, target, kind = (
        ("comparison", "comparison", "pairwise") if side else ("otherwise", "prompt", "choices")
    )
    value = {"selected": side} if side else {"choices": [opinion.choice]}
    result = {
        "from_name": source,
        "to_name": target,
        "type": kind,
        "value": value,
        "meta": {"annotator": opinion.annotator},
    }
    rating = {
        "from_name": "strength",
        "to_name": "prompt",
        "type": "rating",
        "value": {"rating": opinion.strength},
    }
    return [result, rating] if opinion.strength else [result]


BRIDGE = Bridge(_matches, _read_task, _write_task)
