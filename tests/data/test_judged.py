"""Verdicts on two answers and on single ones: words, scales, files whose numbers mean something
else, and the ways out.
"""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tether.core.errors import DataError
from tether.core.types import Comparison, Demonstration, Feedback, Problem, Prompt, user
from tether.data.inspection import inspect_data
from tether.data.sources import Quarantine, read

TWO = {"prompt": "Q", "response_a": "one", "response_b": "two"}
ONE = {"prompt": "Q", "completion": "C"}
MODELS = {**TWO, "model_a": "llama", "model_b": "mistral"}
BATTLE = {
    "conversation_a": [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "one"}],
}
BATTLE["conversation_b"] = [*BATTLE["conversation_a"][:1], {"role": "assistant", "content": "two"}]


def rows_of(tmp_path: Path, rows: list[Any], kind: type, **options: Any) -> list[Any]:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return list(read(path, kind, **options))


def refusal(tmp_path: Path, rows: list[Any], kind: type, **options: Any) -> str:
    with pytest.raises(DataError) as error:
        rows_of(tmp_path, rows, kind, **options)
    return str(error.value)


def better(pair: Comparison) -> str:
    return "tie" if pair.tie else pair.chosen[-1].content


@pytest.mark.parametrize(
    ("verdict", "expected"),
    [
        ("a", "one"), ("B", "two"), ("response_a", "one"), ("Response B", "two"), ("[[A]]", "one"), ("model_b", "two"),
        ("llama", "one"), ("mistral", "two"), ("first", "one"), ("right", "two"), ("A>B", "one"), ("B >> A", "two"),
        ("A<B", "two"), ("a=b", "tie"), ("tie", "tie"), ("Tie (bothbad)", "tie"), ("both_bad", "tie"), ("two", "two"),
    ],
)  # fmt: skip
def test_words_that_name_the_better_answer(tmp_path: Path, verdict: str, expected: str) -> None:
    [pair] = rows_of(tmp_path, [{**MODELS, "winner": verdict}], Comparison)
    assert better(pair) == expected
    assert pair.metadata["chosen_position"] == (2 if expected == "two" else 1)
    assert ("both_bad" in pair.metadata) == ("bad" in verdict)


@pytest.mark.parametrize(
    ("first", "second", "column", "verdict", "expected"),
    [
        ("response_1", "response_2", "preference", "response_2", "two"),
        ("answer_0", "answer_1", "better", "answer_0", "one"),
        ("output1", "output2", "chosen", "output1", "one"),
        ("completion_a", "completion_b", "preference", "b", "two"),
        ("model_response_A", "model_response_B", "verdict", "A", "one"),
    ],
)
def test_names_of_two_answers(
    tmp_path: Path,
    first: str,
    second: str,
    column: str,
    verdict: str,
    expected: str,
) -> None:
    [pair] = rows_of(
        tmp_path,
        [{"prompt": "Q", first: "one", second: "two", column: verdict}],
        Comparison,
    )
    assert (pair.prompt, better(pair)) == ((user("Q"),), expected)


@pytest.mark.parametrize("verdict", [0, 1, 2, 1.0, "1", "-1", True])
def test_a_number_is_no_verdict_on_two_answers(tmp_path: Path, verdict: Any) -> None:
    assert "ambiguous verdict" in refusal(tmp_path, [{**TWO, "label": verdict}], Comparison)


def test_every_way_out_of_an_ambiguous_number_reads_it(tmp_path: Path) -> None:
    """The mappings are taken out of the message itself."""
    message = refusal(tmp_path, [{**TWO, "label": 1}], Comparison)
    ways = [
        tomllib.loads(f"columns = {part.partition('}')[0].join('{}')}")["columns"]
        for part in message.split("{")[1:]
    ]
    found = [
        better(rows_of(tmp_path, [{**TWO, "label": 1}], Comparison, columns=way)[0]) for way in ways
    ]
    # counted from 0; counted from 1; 1 for the first and 0 for the second
    assert found == ["two", "one", "one"]


def test_a_word_that_names_no_answer_is_refused(tmp_path: Path) -> None:
    reason = "unreadable verdict: winner 'response_c' is none of response_a, response_b and tie"
    assert reason in refusal(tmp_path, [{**TWO, "winner": "response_c"}], Comparison)


@pytest.mark.parametrize(
    ("row", "column", "values", "part"),
    [
        (
            {"prompt": "Q", "output_1": "x", "output_2": "y"},
            "label",
            [1, 0],
            "column label holds 0, where 1 and 2",
        ),
        (
            {"prompt": "Q", "response_0": "x", "response_1": "y"},
            "better_response_id",
            [1, 2],
            "holds 2, where 0 and 1",
        ),
        (
            {"history": "Q", "human_ref_A": "x", "human_ref_B": "y"},
            "labels",
            [1, 2],
            "holds 2, where 0 and 1",
        ),
        (
            {"instruction": "Q", "output_1": "x", "output_2": "y"},
            "preference",
            [1, 0],
            "0 and nothing above 1",
        ),
    ],
)
def test_a_file_that_counts_its_answers_otherwise_is_refused(
    tmp_path: Path,
    row: dict[str, Any],
    column: str,
    values: list[int],
    part: str,
) -> None:
    message = refusal(tmp_path, [{**row, column: value} for value in values], Comparison)
    assert part in message and "chosen and rejected" in message
    assert rows_of(tmp_path, [{**row, column: value} for value in values], Prompt)[0].messages == (
        user("Q"),
    )


@pytest.mark.parametrize(
    ("verdict", "desirable"),
    [
        ("good", True),
        ("Bad", False),
        ("thumbs_up", True),
        ("thumbs-down", False),
        ("👎", False),
        ("accepted", True),
        ("unsafe", False),
    ],
)
def test_words_that_judge_one_answer(tmp_path: Path, verdict: str, desirable: bool) -> None:
    [one] = rows_of(tmp_path, [{**ONE, "label": verdict}], Feedback)
    assert one.desirable is desirable


@pytest.mark.parametrize(
    "column",
    ["kto_tag", "feedback", "accepted", "thumbs_up", "is_safe", "liked", "desirable"],
)
def test_names_of_a_verdict_on_one_answer(tmp_path: Path, column: str) -> None:
    rows = [
        {"instruction": "Do.", "input": "this", "output": "C", column: value}
        for value in (True, False)
    ]
    good, bad = rows_of(tmp_path, rows, Feedback)
    assert (good.desirable, bad.desirable) == (True, False)
    assert good.prompt == (user("Do.\n\nthis"),)
    quarantine = Quarantine()
    assert len(rows_of(tmp_path, rows, Demonstration, quarantine=quarantine)) == 1
    assert list(quarantine.reasons) == ["undesirable response"]


def test_a_scale_never_becomes_a_verdict(tmp_path: Path) -> None:
    """Labels 0 and 1 among others are points of a scale, too."""
    for values in ([1, 5], [0, 1, 2], [1, 0, 0.5], ["1", "2"], ["1", "0", "5"]):
        message = refusal(tmp_path, [{**ONE, "label": value} for value in values], Feedback)
        assert "scale" in message or "neither true nor false" in message
    for name in ("rating", "score", "helpfulness", "stars"):
        assert f"Column {name} is a scale and no verdict" in refusal(
            tmp_path,
            [{**ONE, name: 1}],
            Feedback,
        )
        assert f"Column {name} judges a single response" in refusal(
            tmp_path,
            [{**ONE, name: 1}],
            Comparison,
        )


def test_a_text_in_a_column_of_verdicts_is_no_verdict(tmp_path: Path) -> None:
    row = {**ONE, "feedback": "Too long, but true."}
    assert len(rows_of(tmp_path, [row], Demonstration)) == 1
    assert "neither true nor false" in refusal(tmp_path, [row], Feedback)
    [judged] = rows_of(tmp_path, [{**row, "label": True}], Feedback)
    assert judged.metadata == {"feedback": "Too long, but true."}


def test_where_both_are_bad_neither_is_a_demonstration(tmp_path: Path) -> None:
    rows = [{**BATTLE, "winner": winner} for winner in ("tie (bothbad)", "tie", "model_b")]
    demonstrations = rows_of(tmp_path, rows, Demonstration)
    assert [one.messages[-1].content for one in demonstrations] == ["one", "two"]
    verdicts = [
        (one.response[0].content, one.desirable) for one in rows_of(tmp_path, rows, Feedback)
    ]
    assert verdicts == [("one", False), ("two", False), ("two", True), ("one", False)]


def test_the_likelier_side_is_the_demonstration(tmp_path: Path) -> None:
    row = {"prompt": "Q", "chosen": "less likely", "rejected": "likelier", "probability": 0.2}
    [one] = rows_of(tmp_path, [row], Demonstration)
    assert one.messages[-1].content == "likelier"


def test_several_answers_a_side_give_all_pairs(tmp_path: Path) -> None:
    row = {"prompt": "Q", "chosen": ["good"], "rejected": ["bad", "worse", "good"]}
    quarantine = Quarantine()
    pairs = rows_of(tmp_path, [row], Comparison, quarantine=quarantine)
    assert [(pair.chosen[0].content, pair.rejected[0].content) for pair in pairs] == [
        ("good", "bad"),
        ("good", "worse"),
    ]
    assert len({pair.group for pair in pairs}) == 1
    assert quarantine.reasons == {"equal responses": 1}
    beside = {"messages": BATTLE["conversation_a"], "rejected_response": ["bad", "worse"]}
    assert [pair.rejected[0].content for pair in rows_of(tmp_path, [beside], Comparison)] == [
        "bad",
        "worse",
    ]


def test_a_response_without_a_score_is_counted(tmp_path: Path) -> None:
    row = {"prompt": "Q", "responses": ["a", "b", "c"], "scores": [1, None, 2]}
    quarantine = Quarantine()
    [pair] = rows_of(tmp_path, [row], Comparison, quarantine=quarantine, strict=True)
    assert better(pair) == "c"
    assert quarantine.reasons == {"response without a score": 1}


def test_the_safer_response_by_name(tmp_path: Path) -> None:
    row = {
        "prompt": "Q",
        "response_0": "helpful",
        "response_1": "safe",
        "better_response_id": 0,
        "safer_response_id": 1,
    }
    [pair] = rows_of(tmp_path, [row], Comparison)
    assert (better(pair), pair.metadata["safer_response_id"]) == ("helpful", 1)
    [pair] = rows_of(
        tmp_path,
        [row],
        Comparison,
        columns={"better_response_id": "safer_response_id"},
    )
    assert (better(pair), pair.metadata["better_response_id (of the file)"]) == ("safe", 0)
    assert "safer_response_id" in inspect_data(tmp_path / "rows.jsonl").quarantine.unused


def test_a_judged_answer_is_not_the_truth_of_a_problem(tmp_path: Path) -> None:
    rows = [{"question": "2+2?", "answer": "5", "label": False}]
    assert "not problems" in refusal(tmp_path, rows, Problem)


def test_turns_after_the_judged_one_are_left_out_and_kept(tmp_path: Path) -> None:
    more = [{"role": "user", "content": "later"}, {"role": "assistant", "content": "reply"}]
    row = {
        "conversation_a": BATTLE["conversation_a"] + more,
        "conversation_b": BATTLE["conversation_b"] + more,
    }
    [pair] = rows_of(
        tmp_path,
        [{**row, "winner": "model_a", "turn": 1, "judge": "expert_1"}],
        Comparison,
    )
    assert (len(pair.prompt), len(pair.chosen), pair.metadata["later_turns"]) == (
        1,
        1,
        ["later", "reply"] * 2,
    )
    assert [(vote.annotator, vote.preference) for vote in pair.annotations] == [("expert_1", 1.0)]


@pytest.mark.parametrize(
    ("row", "kind", "part"),
    [
        (TWO, Comparison, "add a column preference that holds response_a, response_b or tie"),
        (
            {"ask": "Q", "yes": "a", "no": "b"},
            Comparison,
            'prompt = "question", chosen = "good", rejected = "bad"',
        ),
        (
            {"ask": "Q", "reply": "a", "ok": True},
            Feedback,
            'prompt = "question", completion = "reply", label = "verdict"',
        ),
        ({"ask": "Q", "reply": "a"}, Demonstration, 'prompt = "question", response = "reply"'),
    ],
)
def test_a_refusal_names_the_way_out(
    tmp_path: Path,
    row: dict[str, Any],
    kind: type,
    part: str,
) -> None:
    assert part in refusal(tmp_path, [row], kind)


ANSWERED = {
    "preference": (Comparison, {"chosen": "one", "rejected": "two"}),
    "names": (Comparison, {"accepted": "one", "rejected": "two"}),
    "ranking": (Comparison, {"responses": ["one", "two"], "scores": [2, 1]}),
    "ultrafeedback": (
        Comparison,
        {"completions": [{"response": r, "overall_score": s} for r, s in (("one", 2), ("two", 1))]},
    ),
    "two answers": (Comparison, {"response_a": "one", "response_b": "two", "winner": "a"}),
    "rejected beside": (Comparison, {"output": "one", "rejected_response": "two"}),
    "kto": (Feedback, {"output": "one", "kto_tag": True}),
}
TOOL = {
    "type": "function",
    "function": {"name": "find", "parameters": {"type": "object", "properties": {}}},
}


@pytest.mark.parametrize("layout", ANSWERED)
def test_all_of_the_prompt_is_read(tmp_path: Path, layout: str) -> None:
    kind, more = ANSWERED[layout]
    row = {
        "instruction": "Translate.",
        "input": "Hello",
        "history": [["Hi", "Yes?"]],
        "system_prompt": "Be brief.",
        "tools": [TOOL],
    }
    [record] = rows_of(tmp_path, [{**row, "tools": [TOOL], **more}], kind)
    turns = [(turn.role, turn.content) for turn in record.prompt]
    assert turns == [
        ("system", "Be brief."),
        ("user", "Hi"),
        ("assistant", "Yes?"),
        ("user", "Translate.\n\nHello"),
    ]
    assert "find" in record.prompt[0].tools
    [record] = rows_of(tmp_path, [{"instruction": "Translate.", "context": "Hello", **more}], kind)
    assert record.prompt == (user("Translate.\n\nHello"),)
