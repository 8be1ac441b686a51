"""Wrong tasks of Label Studio and Argilla, wrong answers, wrong comparisons for a store: the rows
with a fault stay out.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from tests.bad_input.rows import GOOD, SEEDS, changed, write

from tether.core.errors import DataError, MissingFileError, TetherError
from tether.data.sources import Quarantine
from tether.people.annotation.answers import import_answers, read_answers
from tether.people.annotation.importing import format_of, import_cases, read_cases
from tether.people.annotation.store import Store

HUGE = 10**400
STUDIO, ARGILLA = GOOD["label-studio"], GOOD["argilla"]
FLAT = next(seed["row"] for seed in SEEDS if "rank.responses" in seed["row"])
PACKED = next(
    seed["row"]["data"]["tether"] for seed in SEEDS if "tether" in seed["row"].get("data", {})
)
ABOUT, (VOTE,) = PACKED["metadata"], PACKED["annotations"]
MANY, ONE = (seed["row"] for seed in SEEDS if seed["format"] == "answers")
VERDICT = {"type": "pairwise", "value": {"selected": "left"}}
TEXTS = {"prompt": "Q", "answer1": "a", "answer2": "b"}


def judged(*result: Any, **more: Any) -> dict[str, Any]:
    return {"annotations": [{"result": list(result), "completed_by": 1, **more}]}


def kept(**change: Any) -> dict[str, Any]:
    return {"data": {**TEXTS, "tether": changed(PACKED, change)}}


def responded(value: Any, user: Any = "u1") -> dict[str, Any]:
    return {"responses": {"preference": [{"value": value, "user_id": user}]}}


# a good row, what is changed in it, how the reason begins
TASKS: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (STUDIO, {"data": 5}, "not a task: it has no data"),
    (STUDIO, {"data": ...}, "not a task: it has no data"),
    (STUDIO, {"data": {}}, "unknown fields: a prompt and two answers are looked for among"),
    (STUDIO, {"data": {"prompt": "Q", "answer1": "a"}}, "unknown fields: .* among prompt, "
                                                        "answer1. Name them with --fields"),
    (STUDIO, {"data": {**TEXTS, "answer3": "c", "prompt": ""}}, "missing text: the task has "
                                                                "nothing in prompt"),
    (STUDIO, {"data": {**TEXTS, "answer1": "b"}}, "equal responses: there is nothing to compare"),
    (STUDIO, {"data": {**TEXTS, "answer1": [5]}}, "not a message: column answer1 lists a number"),
    (STUDIO, {"data": {**TEXTS, "answer1": {"role": "user", "content": "a"}}}, "response ends on "
                                                                               "a user turn"),
    (STUDIO, {"data": {**TEXTS, "prompt": " "}}, "empty prompt"),
    (STUDIO, {"data": {**TEXTS, "prompt": "a\0b"}}, "NUL character"),
    (STUDIO, {"annotations": 5}, "not a list: column annotations holds a number"),
    (STUDIO, {"annotations": ["x"]}, "not an object: annotations lists a text"),
    (STUDIO, {"annotations": [None]}, "not an object: annotations lists nothing"),
    (STUDIO, {"annotations": [{"result": 5}]}, "not a list: column result holds a number"),
    (STUDIO, judged("x"), "not an object: result lists a text"),
    (STUDIO, judged({"type": "pairwise", "value": 5}), "not an object: value holds a number"),
    (STUDIO, judged({"type": "pairwise", "value": {"selected": "up"}}), "no verdict: an "
                                                                        "annotation has neither"),
    (STUDIO, judged({"type": "choices", "value": {"choices": {"a": 1}}}), "not a list: column "
                                                                          "choices holds an "
                                                                          "object"),
    (STUDIO, judged({"type": ["pairwise"], "value": {}}), "no verdict"),
    (STUDIO, judged(VERDICT, lead_time="long"), "not a number: column lead_time holds 'long'"),
    (STUDIO, judged(VERDICT, lead_time=HUGE), "not a number: column lead_time"),
    (STUDIO, judged(VERDICT, completed_by=[1]), "not a text: column completed_by holds a list"),
    (STUDIO, kept(prompt=...), r"damaged task: what was written beside it cannot be read \(empty "
                               r"prompt"),
    (STUDIO, kept(prompt=[5]), "damaged task: .*not a message"),
    (STUDIO, kept(rejected=...), "damaged task: .*missing text: nothing in column rejected"),
    (STUDIO, kept(chosen=[1, 2]), "damaged task: .*column chosen lists a number"),
    (STUDIO, kept(rejected=PACKED["chosen"]), "damaged task: .*equal responses"),
    (STUDIO, kept(metadata={**ABOUT, "chosen_reward_score": "high"}), "damaged task: .*column "
                                                                      "score holds 'high'"),
    (STUDIO, kept(metadata={**ABOUT, "rejected_sampling": 5}), "damaged task: .*sampling holds a "
                                                               "number"),
    (STUDIO, kept(needed="many"), "damaged task: .*column needed holds 'many'"),
    (STUDIO, kept(needed=0), "damaged task: .*needed is 0"),
    (STUDIO, kept(needed=2**70), "damaged task: .*needed is 1.18"),
    (STUDIO, kept(about_prompt=[1]), "damaged task: .*about_prompt holds a list"),
    (STUDIO, kept(strategy=...), "damaged task: .*column strategy holds nothing"),
    (STUDIO, kept(group={}), "damaged task: .*column group holds an object"),
    (STUDIO, kept(annotations=[{**VOTE, "choice": "up"}]), "damaged task: .*no verdict: a vote's "
                                                           "choice is 'up'"),
    (STUDIO, kept(annotations=[{**VOTE, "seconds": -1}]), "damaged task: .*impossible number: "
                                                          "seconds"),
    (ARGILLA, {"fields": {"prompt": "Q"}}, "unknown fields"),
    (ARGILLA, {"fields": {**ARGILLA["fields"], "response2": None}}, "missing text: the task has "
                                                                    "nothing in response2"),
    (ARGILLA, {"responses": [1]}, "not an object: responses lists a number"),
    (ARGILLA, {"responses": {"preference": "response1"}}, "not a list: column preference holds a text"),
    (ARGILLA, {"responses": {"preference": ["response1"]}}, "not an object: preference lists a text"),
    (ARGILLA, responded("response3"), "no verdict: none of the questions preference names or "
                                      "ranks response1 and response2"),
    (ARGILLA, responded(None), "no verdict"),
    (ARGILLA, responded({"a": 1}), "no verdict"),
    (ARGILLA, responded([{"value": [1]}, {"value": {}}]), "no verdict"),
    (ARGILLA, responded([{"value": "response1", "rank": "x"}, {"value": "response2"}]), "not a "
                                                                                        "number: "
                                                                                        "column "
                                                                                        "rank "
                                                                                        "holds 'x'"),
    (ARGILLA, responded("tie", [1]), "not a text: column user_id holds a list"),
    (ARGILLA, {"metadata": 5}, "not an object: metadata holds a number"),
    (ARGILLA, {"metadata": {"tether": "{"}}, "damaged task: .*malformed JSON"),
    (ARGILLA, {"metadata": {"tether": "[" * 100_000}}, "damaged task: .*nested more than 100 deep"),
    (ARGILLA, {"metadata": {"tether": "5"}}, "damaged task"),
    (ARGILLA, {"metadata": {"tether": json.dumps({**PACKED, "group": "\ud800"})}}, "damaged task: "
                                                                                   ".*half a "
                                                                                   "surrogate pair"),
    (FLAT, {"rank.responses": 5}, "not a list: column rank holds a number"),
    (FLAT, {"rank.responses.users": 5}, "not a list: column rank holds a number"),
    (FLAT, {"rank.responses": [["response1"]]}, "no verdict"),
    (FLAT, {"prompt": None}, "missing text: the task has nothing in prompt"),
    (GOOD["preference"], {"chosen": "No."}, "equal responses"),
    (GOOD["preference"], {"chosen": "No.", "tie": True}, "equal responses: there is nothing to "
                                                         "compare"),
    (GOOD["preference"], {"chosen_reward_score": "high"}, "not a number: column score holds "
                                                          "'high'"),
    (GOOD["preference"], {"rejected_sampling": [1]}, "not an object: sampling holds a list"),
    (GOOD["preference"], {"chosen_details": 5}, "not an object: details holds a number"),
    (GOOD["preference"], {"chosen_model": {}}, "not a text: column model holds an object"),
]  # fmt: skip

ANSWERS: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (MANY, {"prompt": None}, "no prompt in the row, and its id is of none in --prompts"),
    (MANY, {"prompt": [5]}, "not a message: column prompt lists a number"),
    (MANY, {"responses": None}, "no answer: the row has neither responses nor a response"),
    (MANY, {"responses": "a"}, "not a list: column responses holds a text"),
    (MANY, {"responses": []}, "uneven lists: 0 responses but 2 of score"),
    (ONE, {"response": None, "responses": []}, "empty response: all of the row's responses are empty"),
    (MANY, {"responses": ["a", 1, 2]}, "uneven lists: 3 responses but 2 of score"),
    (MANY, {"responses": ["", " "]}, "empty response: all of the row's responses are empty"),
    (MANY, {"responses": [{}, "b"]}, "no answer: a response has none of response, completion"),
    (MANY, {"responses": [{"text": [1]}, "b"]}, "not a message: column responses lists a number"),
    (MANY, {"responses": [None, "b"]}, "not a text: column responses holds nothing"),
    (MANY, {"scores": ["high", 1]}, "not a number: column score holds 'high'"),
    (MANY, {"scores": 5}, "not a list: column scores holds a number"),
    (MANY, {"members": [5, 5]}, "not a list: column members holds a number"),
    (MANY, {"members": [["x"], [1]]}, "not a number: column members holds 'x'"),
    (MANY, {"members": [[1e308, 1e308], [1]]}, "not a number: the row has one that is too large"),
    (MANY, {"group": [1]}, "not a text: column group holds a list"),
    (ONE, {"sampling": "hot"}, "not an object: sampling holds a text"),
    (ONE, {"model": ["m"]}, "not a text: column model holds a list"),
    (ONE, {"score": HUGE}, "not a number: column score holds 1000"),
    (ONE, {"response": " "}, "empty response"),
    (ONE, {"messages": [{"role": "assistant", "content": "x"}]}, "prompt ends on an assistant turn"),
]  # fmt: skip


@pytest.mark.parametrize(("good", "change", "reason"), TASKS + ANSWERS)
def test_a_wrong_row_stays_out_of_the_store(
    tmp_path: Path,
    good: dict[str, Any],
    change: dict[str, Any],
    reason: str,
) -> None:
    path, quarantine = (
        write(tmp_path / "rows.jsonl", good, changed(good, change), good),
        Quarantine(),
    )
    is_answer = good in (MANY, ONE)
    found = list(
        read_answers(path, quarantine=quarantine)
        if is_answer
        else read_cases(path, quarantine=quarantine),
    )
    assert len(found) == (4 if good == MANY else 2)
    [entry] = quarantine.examples
    assert (entry["file"], entry["line"]) == (str(path), 2)
    assert re.match(reason, entry["reason"]), entry["reason"]
    alone = write(tmp_path / "alone.jsonl", changed(good, change))
    layout = (
        "label-studio" if good == STUDIO else "argilla" if good in (ARGILLA, FLAT) else "preference"
    )
    with pytest.raises(DataError, match=r"alone\.jsonl: none of its 1 rows can be used: "):
        list(read_answers(alone) if is_answer else read_cases(alone, format=layout))


def test_a_bad_file_leaves_its_good_rows_in_the_store_alone(tmp_path: Path) -> None:
    store = Store(str(tmp_path / "store.sqlite"))
    tasks = [changed(good, change) for good, change, _ in TASKS if good == STUDIO]
    found = import_cases(store, read_cases(write(tmp_path / "t.jsonl", *tasks, STUDIO)))
    assert (found["rows"], found["answers"], found["tasks"], found["judgments"]) == (1, 2, 1, 2)
    answers = [changed(good, change) for good, change, _ in ANSWERS]
    found = import_answers(store, read_answers(write(tmp_path / "a.jsonl", *answers, MANY)))
    assert (found["rows"], found["answers"]) == (2, 0)  # the answers of the task
    with pytest.raises(DataError):
        import_cases(
            store,
            read_cases(write(tmp_path / "b.jsonl", *tasks[:5]), format="label-studio"),
        )
    counts = store.counts()
    assert (counts["responses"], counts["tasks"], counts["judgments"]) == (2, 1, 2)


FILES: list[tuple[str, bytes, str]] = [
    ("nothing", b"", "is empty: it holds no rows"),
    ("prose", b"hello\n", "none of its 1 rows can be used: malformed JSON"),
    ("no columns of ours", b'{"alpha": 1}\n', "no known format has the columns alpha"),
    (
        "answers alone",
        b'{"prompt": "Q", "responses": ["a"]}\n',
        "holds answers and no comparisons of them. Import it by itself",
    ),
    (
        "tasks without texts",
        b'{"data": {}, "annotations": []}\n',
        "none of its 1 rows can be used: unknown fields",
    ),
    ("brackets", b"[" * 100_000, "nested more than 100 deep"),
    ("UTF-16", '{"data": {}}'.encode("utf-16"), "is text in UTF-16"),
]


@pytest.mark.parametrize(("what", "content", "message"), FILES, ids=[case[0] for case in FILES])
def test_a_wrong_file_is_one_message(
    tmp_path: Path,
    what: str,
    content: bytes,
    message: str,
) -> None:
    (tmp_path / "a.jsonl").write_bytes(content)
    with pytest.raises(TetherError, match=message):
        list(read_cases(tmp_path / "a.jsonl"))
    if b"responses" not in content:
        with pytest.raises(TetherError):
            list(read_answers(tmp_path / "a.jsonl"))


def test_contradictory_wishes(tmp_path: Path) -> None:
    pairs, tasks = (
        write(tmp_path / "p.jsonl", GOOD["preference"]),
        write(tmp_path / "t.jsonl", STUDIO),
    )
    with pytest.raises(
        DataError,
        match=(
            r"p\.jsonl: fields are named for tasks of Label Studio or Argilla, and "
            r"this file is neither"
        ),
    ):
        list(read_cases(pairs, fields=("a", "b", "c")))
    with pytest.raises(
        DataError,
        match=(
            r"t\.jsonl: tasks .* have people's judgments and no label "
            r"of their own"
        ),
    ):
        list(read_cases(tasks, gold=True))
    with pytest.raises(
        DataError,
        match=(
            r"missing text: the task has nothing in topic|none of its "
            r"1 rows"
        ),
    ):
        list(read_cases(tasks, fields=("topic", "answer1", "answer2")))
    with pytest.raises(MissingFileError, match="data file not found"):
        format_of(tmp_path / "nowhere.jsonl")


def test_an_id_of_two_prompts_names_neither(tmp_path: Path) -> None:
    prompts = write(
        tmp_path / "p.jsonl",
        *({"id": name, "prompt": words} for name, words in ("xa", "xb", "yc", "yc")),
    )
    rows = write(tmp_path / "r.jsonl", *({"id": name, "response": "r"} for name in "xyz"))
    quarantine = Quarantine()
    assert [
        answer.prompt[0].content
        for answer in read_answers(rows, prompts=prompts, quarantine=quarantine)
    ] == ["c"]
    reasons = [entry["reason"] for entry in quarantine.examples]
    assert reasons == [
        "ambiguous prompt: several rows of --prompts have the id 'x'",
        "no prompt in the row, and its id is of none in --prompts",
    ]
