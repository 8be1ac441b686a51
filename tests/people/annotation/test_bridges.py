"""Label Studio and Argilla: tasks as their pages describe them, and our own there and back."""

from __future__ import annotations

import json
import re

import pytest
from tests.people.annotation.test_exchange import awkward, judged
from tests.people.annotation.test_importing import lines
from tests.people.annotation.test_work import check

from tether.core.errors import DataError
from tether.core.types import assistant, user
from tether.data.sources import Quarantine
from tether.people.annotation.exchange import cases, comparisons, ordered, votes
from tether.people.annotation.exporting import export_labels
from tether.people.annotation.importing import format_of, import_cases, read_cases
from tether.people.annotation.store import Store
from tether.people.labels.votes import Opinion


def annotation(who, **more):
    """As in https://labelstud.io/guide/task_format."""
    return {
        "id": 1,
        "completed_by": who,
        "was_cancelled": False,
        "ground_truth": False,
        "lead_time": 4.25,
        "task": 1,
        **more,
    }


def side(selected):
    return [
        {
            "from_name": "comparison",
            "to_name": "comparison",
            "id": "x",
            "type": "pairwise",
            "value": {"selected": selected},
        },
    ]


def word(choice):
    return [
        {
            "from_name": "more",
            "to_name": "prompt",
            "id": "y",
            "type": "choices",
            "value": {"choices": [choice]},
        },
    ]


STUDIO = [
    {
        "id": 7,
        "data": {"prompt": "why?", "answer1": "because", "answer2": "so", "topic": "law"},
        "annotations": [
            annotation(10, result=side("right")),
            annotation(
                {"id": 11, "email": "ada@example.org"},
                result=[*word("Both bad"), {"type": "rating", "value": {"rating": 2}}],
            ),
            annotation(12, result=side("left"), was_cancelled=True),
            annotation(13, result=[]),
        ],
        "predictions": [{"model_version": "m", "result": side("left")}],
    },
    {
        "id": 8,
        "data": {"question": [{"role": "user", "content": "q"}], "text1": "x", "text2": "y"},
        "annotations": [],
    },
    {"id": 9, "data": {"prompt": "why?", "answer1": "because"}, "annotations": []},
    {
        "id": 10,
        "data": {"prompt": "w", "answer1": "a", "answer2": "b"},
        "annotations": [annotation(1, result=word("unsure"))],
    },
]


def test_tasks_of_label_studio_bring_their_judgments(tmp_path):
    path, bad = tmp_path / "export.json", Quarantine()
    path.write_text(json.dumps(STUDIO, indent=1))
    assert format_of(path) == "label-studio"
    first, second = read_cases(path, quarantine=bad)
    assert first.first.response == (assistant("because"),) and first.details == {
        "id": "label-studio:7",
        "metadata": {"topic": "law"},
    }
    assert [(s.annotator, s.choice, s.strength, s.seconds) for s in first.opinions] == [
        ("label-studio-10", "second", None, 4.25), ("ada@example.org", "both_bad", 2, 4.25),
    ]  # fmt: skip
    assert second.first.prompt == (user("q"),) and second.opinions == ()
    assert bad.count == 2 and set(bad.reasons) == {"unknown fields", "no verdict"}


RECORDS = [
    {
        "id": "r1", "fields": {"instruction": "why?", "response1": "because", "response2": "so"}, "metadata": {"topic": "law"},
        "suggestions": {"ranking": {"value": ["response1", "response2"], "score": 0.9, "agent": "m"}},
        "responses": {"comment": [{"value": "fine", "user_id": "u1"}], "ranking": [
            {"value": ["response2", "response1"], "user_id": "u1"},
            {"value": [{"value": "response1", "rank": 1}, {"value": "response2", "rank": 1}], "user_id": "u2"},
            {"value": [{"value": "response2", "rank": 2}, {"value": "response1", "rank": 1}], "user_id": "u3"},
        ]},
        "vectors": {}, "_server_id": "s",
    },
    {
        "id": "r2", "fields": {"chat": [{"role": "user", "content": "q"}], "answer_a": "x", "answer_b": "y"}, "metadata": {},
        "suggestions": {}, "responses": {"best": [{"value": "answer_b", "user_id": "u1"}, {"value": "tie", "user_id": "u2"}]},
    },
    {
        "id": "r3", "fields": {"prompt": "q", "response1": "x", "response2": "y"},
        "responses": {"rating": [{"value": 4, "user_id": "u"}]},
    },
]  # fmt: skip
FLAT = {
    "id": "r1", "status": "completed", "_server_id": "s", "instruction": "why?", "response1": "because", "response2": "so",
    "ranking.responses": [["response2", "response1"], ["response1", "response2"]], "ranking.responses.users": ["u1", "u2"],
    "ranking.responses.status": ["submitted", "draft"], "ranking.suggestion": None, "topic": "law",
}  # fmt: skip


def test_records_of_argilla_bring_their_judgments(tmp_path):
    path, bad = tmp_path / "records.json", Quarantine()
    path.write_text(json.dumps(RECORDS))
    assert format_of(path) == "argilla"
    first, second = read_cases(path, quarantine=bad)
    assert [(s.annotator, s.choice) for s in first.opinions] == [
        ("u1", "second"),
        ("u2", "tie"),
        ("u3", "first"),
    ]
    assert first.details == {"id": "r1", "metadata": {"topic": "law"}}
    assert second.first.prompt == (user("q"),) and [s.choice for s in second.opinions] == [
        "second",
        "tie",
    ]
    assert bad.reasons == {"no verdict": 1}
    (flat,) = read_cases(lines(tmp_path / "hub.jsonl", [FLAT]))
    assert [(s.annotator, s.choice) for s in flat.opinions] == [
        ("u1", "second"),
    ] and flat.details == first.details


def test_an_annotation_that_cannot_be_read_leaves_the_others(tmp_path):
    damaged = {**annotation(3, result=side("left")), "lead_time": "long"}
    odd = [annotation(1, result=word("unsure")), annotation(2, result=side("left")), damaged]
    rows, bad = [{"id": 1, "data": STUDIO[0]["data"], "annotations": odd}], Quarantine()
    (case,) = read_cases(lines(tmp_path / "studio.jsonl", rows), quarantine=bad)
    assert [(s.annotator, s.choice) for s in case.opinions] == [("label-studio-2", "first")]
    assert bad.reasons == {"one judgment only, no verdict": 1, "one judgment only, not a number": 1}
    values = [
        ["response1"],
        [{"value": "response1", "rank": "x"}, {"value": "response2"}],
        ["response2", "response1"],
    ]
    given = [{"value": value, "user_id": f"u{n}"} for n, value in enumerate(values)]
    rows, bad = [{**RECORDS[0], "responses": {"ranking": given}}], Quarantine()
    (case,) = read_cases(lines(tmp_path / "argilla.jsonl", rows), quarantine=bad)
    assert [(s.annotator, s.choice) for s in case.opinions] == [("u2", "second")]
    assert bad.reasons == {
        "one judgment only, unreadable verdict": 1,
        ("one judgment only, not a number"): 1,
    }


@pytest.mark.parametrize(
    ("written", "at"),
    [
        ("2020-09-13T12:26:40Z", 1.6e9),
        ("2020-09-13T14:26:40.500000+02:00", 1.6e9 + 0.5),
        (None, None),
    ],
)
def test_an_annotation_was_made_when_label_studio_says(store, clock, tmp_path, written, at):
    rows = [
        {
            "id": 1,
            "data": STUDIO[0]["data"],
            "annotations": [annotation(1, result=side("left"), created_at=written)],
        },
    ]
    import_cases(store, read_cases(lines(tmp_path / "x.jsonl", rows)))
    assert [vote.at for vote in votes(store)] == [at or clock.now]
    rows[0]["annotations"][0]["created_at"] = "soon"
    with pytest.raises(DataError, match="not a time"):
        list(read_cases(lines(tmp_path / "x.jsonl", rows)))


@pytest.mark.parametrize("target", ["label-studio", "argilla"])
def test_settings_that_are_none_are_refused_with_their_task(store, tmp_path, target):
    judged(store, "first")
    export_labels(store, tmp_path / "tasks.json", target)
    text = (tmp_path / "tasks.json").read_text()
    (tmp_path / "tasks.json").write_text(re.sub(r"""\{\\?"t\\?": 0\}""", "5", text))
    bad = Quarantine()
    with pytest.raises(DataError, match="damaged task"):
        list(read_cases(tmp_path / "tasks.json", quarantine=bad))
    assert "sampling holds a number" in bad.examples[0]["reason"]


def test_people_of_a_tool_join_those_of_the_store(store, tmp_path):
    judged(store, "first", needed=2)
    export_labels(store, tmp_path / "tasks.json", "label-studio", unfinished=True)
    (task,) = json.loads((tmp_path / "tasks.json").read_text())
    # As the tool gives it back: with its user's own annotation beside ours.
    shown = "left" if task["data"]["answer1"] == "0 of 0" else "right"
    task["annotations"].append(
        annotation({"id": 4, "email": "ada@example.org"}, result=side(shown)),
    )
    found = import_cases(
        store,
        read_cases(lines(tmp_path / "back.jsonl", [task]), format="label-studio"),
        prefix="ls-",
    )
    assert (found["judgments"], found["repeated"]) == (1, 1)
    check(store)
    (case,) = cases(store, names=True)
    assert [(s.annotator, s.choice) for s in case.opinions] == [
        ("annotator 0", "first"),
        ("ls-ada@example.org", "first"),
    ]


def test_fields_of_other_names_are_told(tmp_path):
    path = lines(
        tmp_path / "x.jsonl",
        [{"id": 1, "data": {"ask": "why?", "left": "a", "right": "b"}, "annotations": []}],
    )
    with pytest.raises(DataError, match=r"none of.* 1 .*unknown fields"):
        list(read_cases(path))
    (case,) = read_cases(path, fields=("ask", "left", "right"))
    assert case.second.response == (assistant("b"),)


@pytest.mark.parametrize("target", ["label-studio", "argilla"])
def test_cases_come_back_as_they_went(store, tmp_path, target):
    awkward(store)
    judged(store, Opinion("first", strength=3, seconds=2.0), "second", experts=["tie"])
    judged(store, "first", needed=2)
    judged(store)
    written = export_labels(store, tmp_path / "tasks.json", target, unfinished=True, names=True)
    assert written == store.counts()["tasks"] == 7 and format_of(tmp_path / "tasks.json") == target
    other = Store(tmp_path / "other.db")
    import_cases(other, read_cases(tmp_path / "tasks.json"))
    check(other)

    def plainly(one):
        # Which answer is the first is drawn by their content on the way, as in all imports.
        rows = map(ordered, cases(one, names=True))
        said = lambda case: [(s.annotator, s.choice, s.strength, s.role) for s in case.opinions]  # noqa: E731
        return {
            case.item: (case.first, case.second, said(case), case.state, case.needed, case.strategy)
            for case in rows
        }

    one, two = plainly(store), plainly(other)
    assert one == two
    assert [c.probability for c in comparisons(store, "soft")] == [
        c.probability for c in comparisons(other, "soft")
    ]


def test_written_tasks_have_the_form_of_their_tool(store, tmp_path):
    sides = [judged(store, "first", "first", Opinion("second", strength=2)) for _ in range(12)]
    export_labels(store, tmp_path / "studio.json", "label-studio")
    tasks, places = json.loads((tmp_path / "studio.json").read_text()), []
    for task, (first, second) in zip(tasks, sides, strict=True):
        places.append("left" if task["data"]["answer1"] == first.response[0].content else "right")
        selected = [a["result"][0]["value"]["selected"] for a in task["annotations"]]
        assert selected == [places[-1], places[-1], {"left": "right", "right": "left"}[places[-1]]]
        assert "predictions" not in task  # they would be shown to those who judge
        assert {task["data"]["answer1"], task["data"]["answer2"]} == {
            first.response[0].content,
            second.response[0].content,
        }
        # an unknown user would be refused there
        assert all("completed_by" not in a for a in task["annotations"])
    # Label Studio shows all people the same side, so it is drawn for each pair
    assert len(set(places)) == 2
    export_labels(store, tmp_path / "argilla.json", "argilla")
    for record, (first, _) in zip(
        json.loads((tmp_path / "argilla.json").read_text()),
        sides,
        strict=True,
    ):
        name = next(
            name for name, text in record["fields"].items() if text == first.response[0].content
        )
        assert [r["value"] for r in record["responses"]["preference"][:2]] == [name, name]
        assert len({r["user_id"] for r in record["responses"]["preference"]}) == 3
        assert not record["suggestions"]  # they would be shown to those who judge


def test_damaged_tasks_are_set_aside(store, tmp_path):
    judged(store, "first")
    export_labels(store, tmp_path / "tasks.json", "label-studio")
    (task,) = json.loads((tmp_path / "tasks.json").read_text())
    del task["data"]["tether"]["rejected"]
    rows = [task, {"data": 3, "annotations": []}, {"data": STUDIO[0]["data"], "annotations": [3]}]
    for row in rows:
        with pytest.raises(DataError, match="none of its 1"):
            list(read_cases(lines(tmp_path / "bad.jsonl", [row]), format="label-studio"))
