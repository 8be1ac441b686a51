"""Names propose what a column means, and the values of all rows decide: labels and thoughts,
options that count from 0 or from 1, constraints and answers, JSON and texts.
"""

from __future__ import annotations

import csv
import json
import logging

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tether.core.errors import DataError
from tether.core.types import Comparison, Demonstration, Problem, Prompt
from tether.data.sources import Quarantine, read
from tether.evaluation.questions import read_questions


def rows_file(folder, rows, kind="jsonl"):
    """The rows in a file of this kind; CSV holds lists and objects as JSON."""
    path = folder / f"rows.{kind}"
    if kind == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif kind == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif kind == "arrow":
        table = pa.Table.from_pylist(rows)
        with pa.ipc.new_file(path, table.schema) as writer:
            writer.write_table(table)
    else:
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, rows[0].keys())
            writer.writeheader()
            as_text = lambda v: json.dumps(v) if isinstance(v, list | dict) else v  # noqa: E731
            writer.writerows({n: as_text(v) for n, v in row.items()} for row in rows)
    return path


def thoughts(path, kind: type = Demonstration):
    turns = []
    for record in read(path, kind):
        own = record.messages if kind is Demonstration else (*record.chosen, *record.rejected)
        turns += [turn.reasoning for turn in own if turn.role == "assistant"]
    return turns


LABELS = (
    ("on", "off"),
    ("yes", "no"),
    ("low", "medium", "high"),
    ("enabled", "disabled"),
    ("True", "False"),
    ("detailed thinking on", "detailed thinking off"),
    ("/think", "/no_think"),
    ("1", "0"),
    ("chain", "direct"),
)


def turn(words, thought):
    return {"role": "assistant", "content": words, "reasoning_content": thought}


ASK = {"role": "user", "content": "q"}
PLACES = {
    "prompt and response": lambda n, t: {"prompt": f"q{n}", "response": "a", "reasoning": t},
    "instruction": lambda n, t: {"instruction": f"q{n}", "output": "a", "thinking": t},
    "messages": lambda n, t: {"messages": [ASK, turn(f"a{n}", t)]},
    "ShareGPT": lambda n, t: {
        "conversations": [
            {"from": "human", "value": f"q{n}"},
            {"from": "gpt", "value": "a", "thinking": t},
        ],
    },
    "messages as text": lambda n, t: {"messages": json.dumps([ASK, turn(f"a{n}", t)], indent=1)},
    "preference": lambda n, t: {
        "prompt": f"q{n}",
        "chosen": [turn("good", t)],
        "rejected": [turn("bad", t)],
    },
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("words", LABELS)
def test_few_words_that_all_rows_share_are_no_thoughts(tmp_path, place, words):
    kind = Comparison if place == "preference" else Demonstration
    rows = [PLACES[place](n, words[n % len(words)]) for n in range(40)]
    assert set(thoughts(rows_file(tmp_path, rows), kind)) == {""}


@pytest.mark.parametrize("place", PLACES)
def test_thoughts_stay_thoughts(tmp_path, place):
    kind = Comparison if place == "preference" else Demonstration
    given = [f"Add one to {n}." for n in range(12)] + ["hm", "two steps", "so it is five"]
    rows = [PLACES[place](n, thought) for n, thought in enumerate(given)]
    assert list(dict.fromkeys(thoughts(rows_file(tmp_path, rows), kind))) == given


def test_a_label_among_thoughts_is_refused_and_a_thought_in_the_reply_stands_alone(tmp_path):
    rows = [{"prompt": "q", "response": "a", "reasoning": f"I take {n}."} for n in range(9)]
    rows.insert(4, {"prompt": "q", "response": "a", "reasoning": "off"})
    rows.append({"prompt": "q", "response": "<think>Own.</think>a", "reasoning": "Another one."})
    aside = Quarantine()
    records = list(read(rows_file(tmp_path, rows), Demonstration, quarantine=aside))
    assert [r.messages[-1].reasoning for r in records] == [f"I take {n}." for n in range(9)] + [""]
    assert aside.reasons == {"ambiguous thought": 1} and aside.examples[0]["line"] == 5
    assert aside.unused == {"reasoning": 1}


def test_all_shards_of_a_folder_decide_together(tmp_path):
    """No row of the first file shows that the numbers begin with 1."""
    folder = tmp_path / "shards"
    for shard, answers in enumerate([[1, 2, 1] * 5, [2, 3, 3] * 5]):
        (folder / f"{shard}").mkdir(parents=True)
        rows = [{"question": "q", "choices": ["u", "v", "w"], "answer": a} for a in answers]
        rows_file(folder / f"{shard}", rows)
    letters = [problem.answer for problem in read(folder, Problem)]
    assert letters == [*"ABA"] * 5 + [*"BCC"] * 5
    with pytest.raises(DataError, match="ambiguous answer: column answer "):
        list(read(folder / "0", Problem))


WRITTEN = {
    "from 0": lambda place: place,
    "from 1": lambda place: place + 1,
    "from 1, as text": lambda place: str(place + 1),
    "letters": lambda place: "ABCD"[place],
    "small letters": lambda place: "abcd"[place],
    "letters in brackets": lambda place: f"({'ABCD'[place]})",
    "letters with a dot": lambda place: f"{'ABCD'[place]}.",
    "texts": lambda place: ["red", "green", "blue", "black"][place],
}
OPTIONS = {
    "choices": {"choices": ["red", "green", "blue", "black"]},
    "options": {"options": ["red", "green", "blue", "black"]},
    "labels": {"choices": {"text": ["red", "green", "blue", "black"], "label": [*"ABCD"]}},
}


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet"])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("written", WRITTEN)
def test_the_right_option_is_found_however_it_is_written(tmp_path, written, options, kind):
    places = [3, 1, 0, 2, 2, 3, 0, 1]
    column = "answerKey" if options == "labels" else "answer"
    rows = [
        {"question": f"q{n}", **OPTIONS[options], column: WRITTEN[written](place)}
        for n, place in enumerate(places)
    ]
    path = rows_file(tmp_path, rows, kind)
    assert [problem.answer for problem in read(path, Problem)] == ["ABCD"[p] for p in places]
    if options != "options":
        assert [question.answer for question in read_questions(path)] == places


def test_numbers_that_may_count_from_0_or_from_1_are_named_or_refused(tmp_path, caplog):
    row = {"question": "q", "choices": ["u", "v", "w"], "answer": 1}
    with caplog.at_level(logging.WARNING, "tether.data"):
        (few,) = read(rows_file(tmp_path, [row]), Problem)
    assert few.answer == "B" and "column answer " in caplog.text
    with pytest.raises(DataError, match="ambiguous answer: column answer "):
        list(read(rows_file(tmp_path, [row, {**row, "answer": 2}] * 4), Problem))
    with pytest.raises(DataError, match="ambiguous answer: column answer "):
        read_questions(tmp_path / "rows.jsonl")


def test_a_number_that_is_an_option_is_that_option_or_refused(tmp_path):
    row = {"question": "q", "choices": ["3", "4", "5"], "answer": 4}
    assert [p.answer for p in read(rows_file(tmp_path, [row] * 9), Problem)] == ["B"] * 9
    both = {"question": "q", "choices": ["1", "2", "3"], "answer": 1}
    with pytest.raises(DataError, match="no right option"):
        list(read(rows_file(tmp_path, [both] * 9), Problem))


CHECK = {"instruction_id": ["punctuation:no_comma"], "kwargs": [None]}
CONSTRAINTS = (
    [CHECK],
    CHECK,
    json.dumps([CHECK]),
    "\n " + json.dumps([CHECK], indent=2),
    str([CHECK]),
    {"func_name": "validate_lowercase", "N": None},
    json.dumps({"func_name": "validate_lowercase"}),
    [{"instruction_id_list": ["a:b"], "kwargs": [{}]}],
    [{"constraint": "no commas", "verifier": "f"}],
)
ROWS = {
    "messages": lambda given: {"messages": [ASK], "ground_truth": given},
    "question and answer": lambda given: {"question": "q", "answer": given},
    "reward_model": lambda given: {"prompt": [ASK], "reward_model": {"ground_truth": given}},
    "a column of one's own": lambda given: {"question": "q", "constraints": given},
}


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("constraint", CONSTRAINTS, ids=range(len(CONSTRAINTS)))
def test_constraints_are_no_answers(tmp_path, row, constraint):
    path = rows_file(tmp_path, [ROWS[row](constraint)] * 3)
    columns = {"answer": "constraints"} if "own" in row else None
    with pytest.raises(DataError, match="a constraint in place of an answer: column "):
        list(read(path, Problem, columns=columns))


@pytest.mark.parametrize("answer", ["5", ["5"], '["5"]', " [5] "])
def test_answers_stay_answers(tmp_path, answer):
    for row in ("messages", "question and answer", "reward_model"):
        (problem,) = read(rows_file(tmp_path, [ROWS[row](answer)]), Problem)
        assert problem.answer == "5"


TALK = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
TEXTS = {
    "plain": json.dumps(TALK),
    "indented": json.dumps(TALK, indent=4),
    "behind a blank": " " + json.dumps(TALK),
    "behind line breaks": "\r\n\n" + json.dumps(TALK) + "\n",
    "behind a mark of byte order": "\ufeff" + json.dumps(TALK),
    "Python's": "\n" + str(TALK),
    "spaced": '[ { "role" : "user" , "content" : "q" } , {"role":"assistant","content":"a"} ]',
}


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet", "arrow"])
@pytest.mark.parametrize("text", TEXTS)
def test_messages_are_found_in_cells_of_text(tmp_path, text, kind):
    path = rows_file(tmp_path, [{"messages": TEXTS[text]}] * 2, kind)
    said = [(turn.role, turn.content) for turn in next(read(path, Demonstration)).messages]
    assert said == [("user", "q"), ("assistant", "a")]
    opening = TEXTS[text].replace('"assistant"', '"user"').replace("'assistant'", "'user'")
    path = rows_file(tmp_path, [{"prompt": opening, "chosen": "c", "rejected": "r"}] * 2, kind)
    assert [turn.content for turn in next(read(path, Comparison)).prompt] == ["q", "a"]
    if kind != "csv":
        path = rows_file(tmp_path, [{"messages": [json.dumps(turn) for turn in TALK]}], kind)
        assert next(read(path, Demonstration)).messages[1].content == "a"


PARAMETERS = {"type": "object", "properties": {"x": {"type": "integer"}}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": PARAMETERS}}
TOOLS = {
    "a list": [TOOL],
    "its text": json.dumps([TOOL]),
    "its indented text": "\n" + json.dumps([TOOL], indent=2),
    "a list of texts": [json.dumps(TOOL)],
    "the text of a list of texts": json.dumps([json.dumps(TOOL)]),
    "one schema": TOOL,
    "the text of one": json.dumps(TOOL),
    "parameters as text": [
        {"type": "function", "function": {"name": "f", "parameters": json.dumps(PARAMETERS)}},
    ],
    "the function as text": [{"type": "function", "function": json.dumps(TOOL["function"])}],
    "without an envelope": [{"name": "f", "parameters": json.dumps(PARAMETERS)}],
}


@pytest.mark.parametrize("column", ["tools", "functions"])
@pytest.mark.parametrize("tools", TOOLS)
def test_schemas_of_tools_are_found_in_cells_of_text(tmp_path, tools, column):
    path = rows_file(tmp_path, [{"messages": TALK, column: TOOLS[tools]}])
    assert json.loads(next(read(path, Demonstration)).messages[0].tools) == [TOOL]
    path = rows_file(tmp_path, [{"messages": [{**TALK[0], "tools": TOOLS[tools]}, TALK[1]]}])
    assert json.loads(next(read(path, Prompt)).messages[0].tools) == [TOOL]


def test_labels_of_tools_are_named_and_broken_schemas_refused(tmp_path):
    aside = Quarantine()
    for tools in ("calculator, search", ["calculator"], {"count": 2}):
        path = rows_file(tmp_path, [{"messages": TALK, "tools": tools}])
        assert not next(read(path, Demonstration, quarantine=aside)).messages[0].tools
    assert sum(aside.unused.values()) == 3
    path = rows_file(tmp_path, [{"messages": TALK, "tools": '[{"name": "f", '}])
    with pytest.raises(DataError, match="unreadable tools"):
        list(read(path, Demonstration))
