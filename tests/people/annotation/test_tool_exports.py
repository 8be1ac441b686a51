"""Exports of Label Studio and Argilla in the shapes that their own libraries write: last words
count, withdrawn ones do not.

The shapes were compared with those of label-studio-sdk 2.1 (`converter`) and argilla 2.8
(`to_dict`, `to_list`).
"""

from __future__ import annotations

import csv
import json
import logging

import pytest
from tests.people.annotation.test_importing import lines
from tests.people.annotation.test_work import check
from typer.testing import CliRunner

from tether.cli import app
from tether.cli.options import columns_of
from tether.core.errors import ConfigError, DataError
from tether.core.once import once
from tether.core.types import assistant, user
from tether.data.sources import Quarantine
from tether.people.annotation.exchange import cases
from tether.people.annotation.importing import format_of, import_cases, read_cases
from tether.people.annotation.task_json import spoken_choice

DATA = {"prompt": "why?", "answer1": "because", "answer2": "so"}


def said(path, **how):
    """Of each case the texts of its answers, and who said what, with the case as the file has
    it.
    """
    rows = []
    for case in read_cases(path, **how):
        sides = {"first": case.first.response[0].content, "second": case.second.response[0].content}
        rows.append(
            (
                sides["first"],
                sides["second"],
                {o.annotator: sides.get(o.choice, o.choice) for o in case.opinions},
            ),
        )
    return rows


def result(kind, value, name="cmp"):
    return {
        "id": "x",
        "from_name": name,
        "to_name": name,
        "type": kind,
        "value": value,
        "origin": "manual",
    }


def left_or_right(side):
    return result("pairwise", {"selected": side})


def choice(*words, name="more"):
    return result("choices", {"choices": [*words]}, name)


def annotation(number, who, *results, **more):
    day = f"2026-01-{number:02}T10:00:00.000000Z"
    times = {"created_at": day, "updated_at": day, "lead_time": 3.5}
    return {
        "id": number,
        "completed_by": who,
        "result": [*results],
        "was_cancelled": False,
        **times,
        **more,
    }


def task(*annotations, data=DATA, number=7):
    more = {
        "meta": {},
        "inner_id": 1,
        "total_annotations": len(annotations),
        "project": 1,
        "drafts": [],
        "predictions": [],
    }
    return {"id": number, "data": data, "annotations": [*annotations], **more}


ADA = {"id": 1, "email": "ada@example.org", "first_name": "", "last_name": ""}
BOB = {"id": 2, "email": "bob@example.org"}


@pytest.mark.parametrize(
    ("annotations", "expected"),
    [
        (
            [annotation(1, ADA, left_or_right("left")), annotation(2, ADA, left_or_right("right"))],
            {"ada@example.org": "so"},
        ),
        (
            [annotation(2, ADA, left_or_right("right")), annotation(1, ADA, left_or_right("left"))],
            {"ada@example.org": "so"},
        ),
        (
            [
                annotation(1, ADA, left_or_right("left"), updated_at="2026-02-01T00:00:00Z"),
                annotation(2, ADA, choice("tie")),
            ],
            {"ada@example.org": "because"},
        ),
        ([annotation(1, ADA, left_or_right("left")), annotation(2, ADA, was_cancelled=True)], {}),
        (
            [annotation(1, ADA, was_cancelled=True), annotation(2, ADA, left_or_right("left"))],
            {"ada@example.org": "because"},
        ),
        ([annotation(1, ADA, left_or_right("left"), skipped=True)], {}),
        (
            [annotation(1, ADA, left_or_right("left")), annotation(2, ADA)],
            {"ada@example.org": "because"},
        ),
        (
            [
                annotation(1, ADA, left_or_right("left")),
                annotation(2, BOB, left_or_right("right")),
                annotation(3, 9, choice("Neither")),
            ],
            {"ada@example.org": "because", "bob@example.org": "so", "label-studio-9": "both_bad"},
        ),
    ],
    ids=[
        "later",
        "newest first",
        "updated",
        "withdrawn",
        "after a skip",
        "skipped",
        "empty",
        "three people",
    ],
)
def test_the_last_word_of_each_person_counts(tmp_path, annotations, expected):
    path = lines(tmp_path / "export.jsonl", [task(*annotations)])
    assert format_of(path) == "label-studio"
    ((first, second, opinions),) = said(path)
    assert {first, second} == {"because", "so"} and opinions == expected


def test_two_people_on_the_same_task_are_two_and_earlier_words_are_counted(store, tmp_path):
    given = [
        annotation(n, who, left_or_right(side))
        for n, who, side in ((1, ADA, "left"), (2, BOB, "left"), (3, ADA, "right"))
    ]
    found = import_cases(store, read_cases(lines(tmp_path / "a.jsonl", [task(*given)])))
    assert (found["judgments"], found["repeated"], found["replaced"]) == (2, 1, 0)
    check(store)


@pytest.mark.parametrize(
    ("results", "reason"),
    [
        (
            [left_or_right("left"), choice("tie")],
            "several verdicts: one annotation says first and tie",
        ),
        (
            [left_or_right("left"), result("pairwise", {"selected": "right"}, "harm")],
            "several verdicts",
        ),
        ([choice("Response 1", "Response 2")], "several verdicts"),
        ([choice("3")], "no verdict"),
        ([choice("1")], "no verdict"),
        ([result("rating", {"rating": 2})], "no verdict"),
    ],
)
def test_an_annotation_without_one_verdict_is_refused(tmp_path, results, reason):
    with pytest.raises(DataError, match=reason):
        said(lines(tmp_path / "a.jsonl", [task(annotation(1, ADA, *results))]))


def test_choices_name_an_answer(tmp_path):
    """The tag Choices in the place of Pairwise; other questions say nothing of the two."""
    words = ("Response 2", "answer1", "Answer B is better", "left", "Both bad", "about the same")
    rows = [
        task(annotation(1, ADA, choice(word), choice("fluent", name="style")), number=n)
        for n, word in enumerate(words)
    ]
    bad = Quarantine()
    opinions = [
        opinions["ada@example.org"]
        for _, _, opinions in said(lines(tmp_path / "a.jsonl", rows), quarantine=bad)
    ]
    assert opinions == ["so", "because", "so", "because", "both_bad"] and bad.reasons == {
        ("no verdict"): 1,
    }


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("left", "first"), ("Right", "second"), ("the second one", "second"), ("A", "first"), ("b", "second"),
        ("Response A", "first"), ("response_2", "second"), ("Model B is "
                                                            "better", "second"), ("Output 1 wins", "first"),
        ("mine", "second"), ("tie", "tie"), ("No preference", "tie"), ("both good", "tie"), ("both_bad", "both_bad"),
        ("Both are bad", "both_bad"), ("neither", "both_bad"), ("1", None), ("good", None), ("a bit", None),
        ("Response 12", None), ("", None), (None, None), (1, None), ("response c", None),
    ],
)  # fmt: skip
def test_words_of_a_choice(word, meant):
    assert spoken_choice(word, ("yours", "mine")) == meant


# --- JSON_MIN and CSV: a row an annotation
# ------------------------------------------------------------------------------------


def least(number, who, **columns):
    times = {
        "created_at": f"2026-01-{number:02}T10:00:00Z",
        "updated_at": f"2026-01-{number:02}T10:00:00Z",
    }
    return {
        **DATA,
        "id": 7,
        **columns,
        "annotator": who,
        "annotation_id": number,
        **times,
        "lead_time": 3.5,
    }


MIN_ROWS = [  # the newest first, as the tool writes them
    least(3, "ada@example.org", cmp=[{"selected": "right"}]),
    least(2, "bob@example.org", more="tie"),
    least(1, "ada@example.org", cmp=[{"selected": "left"}], strength=[{"rating": 2}]),
]


def written(folder, rows, kind):
    if kind == "json":
        path = folder / "result.json"
        path.write_text(json.dumps(rows, indent=2))
        return path
    path = folder / "result.csv"
    names = sorted({name for row in rows for name in row})
    with path.open("w", newline="") as file:
        writer = csv.writer(file, quoting=csv.QUOTE_NONNUMERIC)
        writer.writerow(names)
        for row in rows:
            cells = (row.get(name, "") for name in names)
            writer.writerow(
                [
                    json.dumps(c, separators=(",", ":")) if isinstance(c, list | dict) else c
                    for c in cells
                ],
            )
    return path


@pytest.mark.parametrize("kind", ["json", "csv"])
@pytest.mark.parametrize("order", [1, -1], ids=["newest first", "oldest first"])
def test_rows_of_annotations_join_in_the_store(store, tmp_path, kind, order):
    path = written(tmp_path, MIN_ROWS[::order], kind)
    assert format_of(path) == "label-studio"
    (first, second, opinions), *others = said(path)
    assert {first, second} == {"because", "so"} and len(others) == 2 and len(opinions) == 1
    found = import_cases(store, read_cases(path))
    assert (found["tasks"], found["judgments"], found["repeated"]) == (1, 2, 1)
    check(store)
    (case,) = cases(store, names=True)
    texts = {"first": case.first.response[0].content, "second": case.second.response[0].content}
    assert {(o.annotator, texts.get(o.choice, o.choice), o.strength) for o in case.opinions} == {
        ("ada@example.org", "so", None),
        ("bob@example.org", "tie", None),
    }
    assert case.first.prompt == (user("why?"),) and case.details["id"] == "label-studio:7"


@pytest.mark.parametrize("text", ["007", "0", "[1, 2]", '{"a": 1}'])
def test_an_answer_of_csv_is_a_text_whatever_it_looks_like(tmp_path, text):
    answers = [name for name in DATA if DATA[name] in ("because", "so")]
    row = {**MIN_ROWS[2], answers[0]: text}
    ((first, second, opinions),) = said(written(tmp_path, [row], "csv"))
    assert {first, second} == {text, DATA[answers[1]]} and len(opinions) == 1


def test_a_later_file_replaces_what_the_same_person_said(store, tmp_path):
    earlier, later = (lines(tmp_path / f"{n}.jsonl", [MIN_ROWS[n]]) for n in (2, 0))
    assert import_cases(store, read_cases(earlier))["judgments"] == 1
    found = import_cases(store, read_cases(later))
    assert (found["judgments"], found["replaced"], found["repeated"]) == (1, 1, 0)
    check(store)
    again = import_cases(store, read_cases([earlier, later]))
    assert (again["judgments"], again["replaced"], again["repeated"]) == (0, 0, 2)
    (case,) = cases(store)
    (opinion,) = case.opinions
    assert (
        getattr(case, opinion.choice).response == (assistant("so"),)
        and store.counts()["judgments"] == 1
    )


@pytest.mark.parametrize("kind", ["json", "csv"])
def test_choices_and_people_by_number_in_rows(tmp_path, kind):
    rows = [
        least(1, 12, better="Response 2", style="left-wing"),
        least(2, 13, better="Response 1", style="plain"),
    ]
    assert [opinions for _, _, opinions in said(written(tmp_path, rows, kind))] == [
        {"label-studio-12": "so"},
        {"label-studio-13": "because"},
    ]


# --- Ranker
# -------------------------------------------------------------------------------------------------------------------

ITEMS = [
    {"id": f"m{n}", "title": f"Model {n}", "body": text}
    for n, text in enumerate(("because", "so", "dunno"))
]


def ranking(value):
    return result("ranker", {"ranker": value}, "rank")


def test_a_ranking_of_two_is_a_verdict(tmp_path):
    data = {"prompt": "why?", "items": ITEMS[:2], "topic": "law"}
    given = [
        annotation(1, ADA, ranking({"rank": ["m1", "m0"]})),
        annotation(2, BOB, ranking(["m0", "m1"])),
    ]
    (case,) = read_cases(lines(tmp_path / "a.jsonl", [task(*given, data=data)]))
    texts = {"first": case.first.response[0].content, "second": case.second.response[0].content}
    assert {o.annotator: texts[o.choice] for o in case.opinions} == {
        "ada@example.org": "so",
        "bob@example.org": "because",
    }
    assert case.first.prompt == (user("why?"),) and case.details == {
        "id": "label-studio:7",
        "metadata": {"topic": "law"},
    }


@pytest.mark.parametrize("kind", ["task", "json", "csv"])
def test_a_ranking_of_three_is_three_pairs(tmp_path, kind):
    data = {"prompt": "why?", "items": ITEMS}
    if kind == "task":
        path = lines(
            tmp_path / "a.jsonl",
            [task(annotation(1, ADA, ranking(["m2", "m0", "m1"])), data=data)],
        )
    else:
        columns = {"items": ITEMS, "rank": [{"ranker": ["m2", "m0", "m1"]}]}
        row = {
            name: value
            for name, value in least(1, "ada@example.org", **columns).items()
            if "answer" not in name
        }
        path = written(tmp_path, [row], kind)
    rows = said(path)
    assert {
        (frozenset((first, second)), opinions["ada@example.org"])
        for first, second, opinions in rows
    } == {
        (frozenset(("because", "so")), "because"),
        (frozenset(("because", "dunno")), "dunno"),
        (frozenset(("so", "dunno")), "dunno"),
    }
    ids = [case.details["id"] for case in read_cases(path)]
    assert ids == ["label-studio:7:m0-m1", "label-studio:7:m0-m2", "label-studio:7:m1-m2"]


@pytest.mark.parametrize(
    ("items", "reason"),
    [
        (
            [{"id": f"m{n}", "body": f"answer {n}"} for n in range(10_000)],
            "too many answers: column items lists 10000, of at most 512",
        ),
        (
            [*ITEMS, {"id": "m0", "body": "another"}],
            "equal ids: two answers in column items have the same one",
        ),
    ],
)
def test_rankings_of_too_many_answers_or_of_two_under_one_id_are_refused(tmp_path, items, reason):
    given = annotation(1, ADA, ranking(["m1", "m0"]))
    path = lines(tmp_path / "a.jsonl", [task(given, data={"prompt": "why?", "items": items})])
    with pytest.raises(DataError, match=reason):
        list(read_cases(path))


def test_rankings_that_do_not_order_the_answers_are_refused(tmp_path):
    data = {"prompt": "why?", "items": ITEMS}
    buckets = ranking({"good": ["m0", "m1"], "bad": ["m2"]})
    with pytest.raises(DataError, match="sorted into several lists"):
        said(lines(tmp_path / "a.jsonl", [task(annotation(1, ADA, buckets), data=data)]))
    part = [task(annotation(1, ADA, ranking(["m1", "m0"])), data=data)]
    assert [len(opinions) for *_, opinions in said(lines(tmp_path / "b.jsonl", part))] == [1, 0, 0]


def five(number, *texts):
    """A task that ranks these five answers, the first one best."""
    items = [{"id": f"m{place}", "body": text} for place, text in enumerate(texts)]
    order = ranking([f"m{place}" for place in range(5)])
    data = {"subject": "why?", "prompt": f"q{number}", "items": items}
    return task(annotation(1, ADA, order), data=data, number=number)


def test_two_equal_answers_cost_a_ranking_their_pair_alone(tmp_path):
    bad = Quarantine()
    rows = said(lines(tmp_path / "a.jsonl", [five(1, *"abcce")]), quarantine=bad)
    assert bad.reasons == {"equal responses": 1}
    better = [opinions["ada@example.org"] for _, _, opinions in rows]
    assert sorted(better) == [*"aaaabbbcc"]
    bad, empty = Quarantine(), five(1, "a", "", "c", "", "e")
    rows = said(lines(tmp_path / "b.jsonl", [empty]), quarantine=bad)
    assert len(rows) == 3 and bad.reasons == {"missing text": 1}


def test_a_limit_counts_rankings_and_named_fields_make_a_pair_of_them(tmp_path):
    path = lines(tmp_path / "a.jsonl", [five(1, *"abcde"), five(2, *"abcde")])
    assert [case.first.prompt for case in read_cases(path, limit=1)] == [(user("q1"),)] * 10
    with pytest.raises(DataError, match=r"missing text: .*in m0"):
        list(read_cases(path, fields=("subject", "m0", "m1")))
    data = {"subject": "why?", "good": "because", "bad": "so", "items": ITEMS}
    (case,) = read_cases(
        lines(tmp_path / "b.jsonl", [task(data=data)]),
        fields=("subject", "good", "bad"),
    )
    assert case.first.prompt == (user("why?"),) and case.first.response == (assistant("because"),)


# --- Argilla
# ------------------------------------------------------------------------------------------------------------------

PEOPLE = [f"00000000-0000-4000-8000-00000000000{n}" for n in range(4)]
RESPONSES = [
    ("response1", 0, "submitted"),
    ("response2", 1, "discarded"),
    ("response2", 2, "draft"),
    (None, 3, "discarded"),
]


def record(responses):
    given = [
        {"value": value, "user_id": PEOPLE[who], "status": status}
        for value, who, status in responses
    ]
    return {
        "id": "1",
        "fields": {"prompt": "why?", "response1": "because", "response2": "so"},
        "metadata": {},
        "responses": {
            "preference": given,
            "strength": [{"value": 2, "user_id": PEOPLE[0], "status": "submitted"}],
        },
    }


def flat(responses):
    values, who, status = zip(*responses, strict=True)
    columns = {"": [*values], ".users": [PEOPLE[n] for n in who], ".status": [*status]}
    return (
        record([])["fields"]
        | {"id": "1", "status": "pending"}
        | {f"preference.responses{k}": v for k, v in columns.items()}
    )


def of_server(responses):
    values = [{"preference": {"value": value}} if value else {} for value, _, _ in responses]
    given = [
        {"values": v, "user_id": PEOPLE[who], "status": s}
        for v, (_, who, s) in zip(values, responses, strict=True)
    ]
    return {**record([]), "responses": given}


@pytest.mark.parametrize("shape", [record, flat, of_server])
@pytest.mark.parametrize(
    ("responses", "expected"),
    [
        (RESPONSES, {0: "because"}),
        ([("response1", 0, "submitted"), ("response2", 0, "submitted")], {0: "so"}),
        ([("response1", 0, "submitted"), ("response2", 0, "discarded")], {}),
        ([("response1", 0, "discarded"), ("response2", 0, "submitted")], {0: "so"}),
        ([("response1", 0, "submitted"), ("response2", 0, "draft")], {0: "because"}),
        (
            [("tie", 0, "submitted"), ("response2", 1, "submitted"), ("response2", 2, None)],
            {0: "tie", 1: "so", 2: "so"},
        ),
        ([("response1", 1, "draft"), ("response2", 2, "discarded")], {}),
    ],
    ids=[
        "statuses",
        "twice",
        "withdrawn",
        "after a discard",
        "draft later",
        "three people",
        "nobody",
    ],
)
def test_only_what_people_submitted_counts(tmp_path, shape, responses, expected):
    path = lines(tmp_path / "a.jsonl", [shape(responses)])
    assert format_of(path) == "argilla"
    ((_, _, opinions),) = said(path)
    assert opinions == {PEOPLE[who]: text for who, text in expected.items()}


def test_responses_without_a_status_count_and_the_log_says_so(tmp_path, caplog):
    given = record([("response1", 0, "submitted"), (None, 3, "discarded")])
    for answers in given["responses"].values():
        for answer in answers:
            del answer["status"]
    once.cache_clear()
    with caplog.at_level(logging.WARNING, "tether.people.annotation"):
        ((_, _, opinions),) = said(lines(tmp_path / "a.jsonl", [given]))
    assert opinions == {PEOPLE[0]: "because"} and "have no status here" in caplog.text


def test_columns_of_different_lengths_are_refused(tmp_path):
    row = flat(RESPONSES)
    row["preference.responses.users"] = PEOPLE[:2]
    with pytest.raises(
        DataError,
        match=r"uneven columns: .*4 .*2 .*4",
    ):
        said(lines(tmp_path / "a.jsonl", [row]))


def test_the_command_names_columns_by_its_own_option(tmp_path):
    runner, store = CliRunner(), str(tmp_path / "store.db")
    path = lines(tmp_path / "own.jsonl", [{"q": {"text": "why?"}, "good": "because", "bad": "so"}])
    refused = runner.invoke(app, ["prefs", "import", store, str(path)])
    assert refused.exit_code == 2 or isinstance(refused.exception, DataError)
    assert (
        "--columns" in str(refused.exception) + refused.output
        and "data.columns" not in str(refused.exception) + refused.output
    )
    columns = "prompt=q.text,chosen=good,rejected=bad"
    assert (
        runner.invoke(app, ["prefs", "import", store, str(path), "--columns", columns]).exit_code
        == 0
    )
    inspected = runner.invoke(app, ["data", "inspect", str(path), "--columns", columns])
    assert inspected.exit_code == 0 and "preference (preferences)" in inspected.output
    assert columns_of('{ prompt = "q.text", chosen = "good", rejected = "bad" }') == columns_of(
        columns,
    )
    for odd in ("prompt", "=q", "prompt=", "{ prompt = 3 }", "{ prompt"):
        with pytest.raises(ConfigError, match="--columns has the form"):
            columns_of(odd)
    tasks = lines(tmp_path / "tasks.jsonl", [task()])
    with pytest.raises(DataError, match="columns are named for comparisons"):
        said(tasks, columns={"prompt": "q"})
