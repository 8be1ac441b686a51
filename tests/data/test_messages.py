"""One message in all its spellings, and the columns that belong to a prompt, against values written
by hand.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tether.core.types import (
    Comparison,
    Demonstration,
    Feedback,
    Message,
    Problem,
    Prompt,
    StepLabels,
    assistant,
    user,
)
from tether.data.formats.conversions import prompt_of
from tether.data.formats.messages import read_message, tool_schemas
from tether.data.rows import record_row, turn_rows, turns_of
from tether.data.sources import Quarantine, read

CALL = '{"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}'
ASK = {"role": "user", "content": "q"}


def thought(words: str, reasoning: str) -> tuple[Message, ...]:
    return (Message("assistant", words, reasoning=reasoning),)


CALLED = (Message("assistant", "", (CALL,)),)


def one(tmp_path: Path, row: Any, kind: type) -> tuple[Any, Quarantine]:
    path, quarantine = tmp_path / "rows.jsonl", Quarantine()
    path.write_text(json.dumps(row) + "\n", encoding="utf-8")
    [record] = read(path, kind, quarantine=quarantine, strict=True)
    return record, quarantine


def refusal(tmp_path: Path, row: Any, kind: type) -> str:
    path, quarantine = tmp_path / "rows.jsonl", Quarantine()
    path.write_text(json.dumps(row) + "\n", encoding="utf-8")
    with pytest.raises(Exception, match="none of its 1 rows"):
        list(read(path, kind, quarantine=quarantine))
    return quarantine.examples[0]["reason"]


@pytest.mark.parametrize(
    ("item", "turns"),
    [
        ({"role": "User", "content": "a"}, (user("a"),)),
        ({"from": "gpt", "value": "a"}, (assistant("a"),)),
        ({"role": "CHATBOT", "message": "a"}, (assistant("a"),)),
        ({"role": "model", "parts": [{"text": "a"}, {"text": "b"}]}, (assistant("ab"),)),
        ({"role": "model", "parts": [{"text": "hm", "thought": True}, {"text": "b"}]}, thought("b", "hm")),
        ({"role": "user", "content": {"content_type": "text", "parts": ["a", "b"]}}, (user("ab"),)),
        ({"role": "user", "content": [{"type": "text", "text": "a", "image": None}, "b"]}, (user("ab"),)),
        ({"role": "user", "content": [{"type": "input_text", "text": "a"}]}, (user("a"),)),
        ({"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}, (assistant("no"),)),
        ({"role": "user", "content": "a", "name": "Ann"}, (Message("user", "a", name="Ann"),)),
        ({"role": "assistant", "content": "a", "reasoning_content": "r"}, thought("a", "r")),
        ({"role": "assistant", "content": "a", "thinking": "r"}, thought("a", "r")),
        ({"role": "assistant", "content": "a", "reasoning": "r", "thinking": None}, thought("a", "r")),
        (
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "r"}, {"type": "text", "text": "a"}]},
            thought("a", "r"),
        ),
        (
            {"role": "assistant", "content": [{"type": "thinking", "thinking": [{"type": "text", "text": "r"}]}, "a"]},
            thought("a", "r"),
        ),
        (
            {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "f", "input": {"x": 1}}]},
            (Message("assistant", "", (CALL.replace("{", '{"id": "t1", ', 1),)),),
        ),
        (
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": [{"text": "r"}]}, "a"]},
            (Message("tool", "r", tool_call_id="t"), user("a")),
        ),
        ({"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t"}]}, (Message("tool", "", tool_call_id="t"),)),
        ({"role": "model", "parts": [{"functionCall": {"name": "f", "args": {"x": 1}}}]}, CALLED),
        (
            {"role": "user", "parts": [{"functionResponse": {"name": "f", "response": {"y": 2}}}]},
            (Message("tool", '{"y": 2}', name="f"),),
        ),
        (
            {"role": "assistant", "content": "", "function_call": {"name": "f", "arguments": '{"x": 1}'}},
            CALLED,
        ),
        ({"role": "assistant", "content": None, "tool_calls": [{"name": "f", "arguments": {"x": 1}}]}, CALLED),
        ({"from": "function_call", "value": '{"name": "f", "arguments": {"x": 1}}'}, CALLED),
        ({"role": "tool_call", "content": '[{"name": "f", "parameters": {"x": 1}}]'}, CALLED),
        ({"role": "function", "name": "f", "content": "r"}, (Message("tool", "r", name="f"),)),
        ({"role": "ipython", "content": "r"}, (Message("tool", "r"),)),
        ({"from": "observation", "value": "r"}, (Message("tool", "r"),)),
        ({"role": "tool", "tool_call_id": "c", "content": "r"}, (Message("tool", "r", tool_call_id="c"),)),
        ({"input": "q", "output": "a"}, (user("q"), assistant("a"))),
        ({"assistant": "a", "user": "q", "system": "s"}, (Message("system", "s"), user("q"), assistant("a"))),
        ({"human": "q"}, (user("q"),)),
        *(({"role": "assistant", "content": "a", flag: off}, (Message("assistant", "a", train=False),))
          for flag in ("weight", "train", "training", "loss", "loss_mask") for off in (0, 0.0, False, "false")),
        *(({"role": "assistant", "content": "a", flag: on}, (assistant("a"),))
          for flag in ("weight", "train") for on in (1, 1.0, True)),
        ({"role": "user", "content": "a", "weight": 0}, (user("a"),)),
    ],
)  # fmt: skip
def test_spellings_of_a_message(item: Any, turns: Any) -> None:
    assert read_message(item, "messages") == turns


@pytest.mark.parametrize(
    ("item", "reason"),
    [
        ({"role": "narrator", "content": "a"}, "unknown role: 'narrator'"),
        ({"content": "a"}, "unknown role: None"),
        ({"question": "a", "prompt": "b"}, "unknown role: None"),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
            "not a text: .* part of type 'image_url'",
        ),
        (
            {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "a"}]},
            "part of type 'image'.*Leave such rows out",
        ),
        (
            {"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]},
            "part of type 'input_audio'",
        ),
        ({"role": "user", "parts": [{"inlineData": {"data": "x"}}]}, "a part with inlineData"),
        (
            {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}]},
            "part of type 'redacted_thinking'",
        ),
        (
            {"role": "assistant", "content": "a", "weight": 0.5},
            "unreadable flag: weight .* 0.5; it must be 0 or 1",
        ),
        ({"role": "assistant", "content": "a", "mask": 1}, "ambiguous flag: mask"),
        (
            {
                "role": "assistant",
                "content": "a",
                "train_detail": [{"begin_offset": 0, "end_offset": 1, "train": False}],
            },
            "parts of a turn",
        ),
        ({"from": "function_call", "value": "weather in Bern"}, "unreadable tool call"),
        ({"role": "user", "content": None}, "the content of a turn in column messages is nothing"),
    ],
)
def test_messages_that_are_refused(tmp_path: Path, item: Any, reason: str) -> None:
    assert re.search(
        reason,
        refusal(
            tmp_path,
            {"messages": [ASK, item, {"role": "assistant", "content": "b"}]},
            Demonstration,
        ),
    )


def test_keys_of_messages_that_nobody_reads_are_named(tmp_path: Path) -> None:
    answer = {
        "role": "assistant",
        "content": [
            {"type": "text", "text": "a", "cache_control": {}},
            {"type": "text", "text": "b", "citations": [1]},
        ],
    }
    turns = [{**ASK, "reasoning_content": "r", "train": True}, {**answer, "logprobs": [1]}]
    for messages in (turns, json.dumps(turns)):
        record, quarantine = one(tmp_path, {"messages": messages}, Demonstration)
        assert record.messages == (user("q"), assistant("ab"))
        names = {
            "messages.reasoning_content",
            "messages.train",
            "messages.logprobs",
            "messages.content.citations",
        }
        assert quarantine.unused.keys() == names


SCHEMA = {
    "type": "function",
    "function": {"name": "f", "description": "d", "parameters": {"type": "object"}},
}


@pytest.mark.parametrize(
    "schemas",
    [
        [SCHEMA],
        json.dumps([SCHEMA]),
        [{"name": "f", "description": "d", "parameters": {"type": "object"}}],
        [{"name": "f", "description": "d", "input_schema": {"type": "object"}}],
        [{"type": "function", "name": "f", "description": "d", "parameters": {"type": "object"}}],
        [
            {
                "functionDeclarations": [
                    {"name": "f", "description": "d", "parameters": {"type": "object"}},
                ],
            },
        ],
    ],
)
def test_schemas_have_one_form(schemas: Any) -> None:
    assert json.loads(tool_schemas(schemas)) == [SCHEMA]


RECORDS = (
    (Prompt, {"prompt": "q"}),
    (Prompt, {"messages": [ASK]}),
    (Demonstration, {"messages": [ASK, {"role": "assistant", "content": "a"}]}),
    (Demonstration, {"instruction": "q", "output": "a"}),
    (Comparison, {"prompt": "q", "chosen": "a", "rejected": "b"}),
    (Comparison, {"prompt": "q", "responses": ["a", "b"], "scores": [2, 1]}),
    (Feedback, {"prompt": "q", "completion": "a", "label": True}),
    (StepLabels, {"prompt": "q", "steps": ["a"], "labels": [True]}),
    (Problem, {"question": "q", "answer": "1"}),
)


@pytest.mark.parametrize("column", ["tools", "functions"])
@pytest.mark.parametrize(
    ("kind", "row"),
    RECORDS,
    ids=lambda value: getattr(value, "__name__", "row"),
)
def test_schemas_of_every_kind_of_row_are_on_its_first_turn(
    tmp_path: Path,
    kind: type,
    row: Any,
    column: str,
) -> None:
    record, quarantine = one(tmp_path, {**row, column: [SCHEMA]}, kind)
    first, *more = record.messages if kind in (Prompt, Demonstration) else record.prompt
    assert (
        json.loads(first.tools) == [SCHEMA]
        and not any(turn.tools for turn in more)
        and not quarantine.unused
    )
    record, quarantine = one(tmp_path, {**row, column: ["hammer"]}, kind)
    assert prompt_of(record)[0].tools == "" and set(quarantine.unused) == {column}


@pytest.mark.parametrize("column", ["image", "images", "audio", "videos"])
def test_rows_with_more_than_text_are_refused(tmp_path: Path, column: str) -> None:
    reason = refusal(tmp_path, {"prompt": "q", column: [{"bytes": "x"}]}, Prompt)
    assert reason == (
        f"not a text: column {column} holds more than text, and only text is read. "
        "Leave such rows out"
    )


EVERYTHING = (
    Message("system", "s", tools=json.dumps([SCHEMA])),
    Message("user", "q", name="Ann"),
    Message("assistant", "a", (CALL,), reasoning="r", train=False),
    Message("tool", "t", name="f", tool_call_id="c"),
    Message("assistant", "b", reasoning="r"),
)


def test_messages_come_back_from_their_rows(tmp_path: Path) -> None:
    rows = json.loads(json.dumps(turn_rows(EVERYTHING)))
    assert turns_of(rows) == EVERYTHING
    pair = Comparison(EVERYTHING[:2], EVERYTHING[2:], (assistant("no"),), id="i", group="g")
    for record in (Demonstration(EVERYTHING, id="i"), pair):
        assert one(tmp_path, record_row(record), type(record))[0] == record


WANTED = "Translate to French.\n\nGood morning"
BESIDE = (
    (Prompt, {}),
    (Demonstration, {"output": "o"}),
    (Demonstration, {"response": "o"}),
    (Comparison, {"chosen": "a", "rejected": "b"}),
    (Comparison, {"responses": ["a", "b"], "scores": [2, 1]}),
    (Feedback, {"completion": "a", "label": True}),
    (Problem, {"answer": "1"}),
    (StepLabels, {"steps": ["a"], "labels": [True]}),
)


@pytest.mark.parametrize("system", ["system", "system_prompt", "system_message", "sys"])
@pytest.mark.parametrize(
    ("question", "more"),
    [("prompt", "input"), ("question", "context"), ("prompt", "context"), ("question", "input")],
)
@pytest.mark.parametrize(
    ("kind", "row"),
    BESIDE,
    ids=lambda value: getattr(value, "__name__", "row"),
)
def test_columns_that_belong_to_the_prompt(
    tmp_path: Path,
    kind: type,
    row: Any,
    question: str,
    more: str,
    system: str,
) -> None:
    whole = {
        question: "Translate to French.",
        more: "Good morning",
        "history": [["x", "y"]],
        system: "s",
        **row,
    }
    record, quarantine = one(tmp_path, whole, kind)
    assert prompt_of(record) == (Message("system", "s"), user("x"), assistant("y"), user(WANTED))
    assert not quarantine.unused


@pytest.mark.parametrize(
    ("row", "turns"),
    [
        ({"instruction": "i", "input": "<noinput>"}, (user("i"),)),
        ({"instruction": "i", "input": "", "context": "c"}, (user("i\n\nc"),)),
        ({"instruction": "Choose.", "question": "A or B?"}, (user("Choose.\n\nA or B?"),)),
        ({"instruction": "A or B?", "question": "Choose. A or B?"}, (user("Choose. A or B?"),)),
        ({"prompt": "", "question": "q"}, (user("q"),)),
        ({"question": "q", "options": "a) 1 b) 2"}, (user("q\na) 1 b) 2"),)),
        ({"question": "q", "choices": ["(A) w", "B. x"]}, (user("q\nA. w\nB. x"),)),
        ({"question": "q? A. w B. x", "choices": ["w", "x"]}, (user("q? A. w B. x"),)),
        ({"prompt": "q", "context": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]},
         (user("x"), assistant("y"), user("q"))),
        ({"prompt": "q", "history": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]},
         (user("x"), assistant("y"), user("q"))),
        ({"prompt": "q", "history": '[["x", "y"]]'}, (user("x"), assistant("y"), user("q"))),
        ({"prompt": "q", "system": [{"type": "text", "text": "s"}]}, (Message("system", "s"), user("q"))),
        ({"prompt": "q", "systemInstruction": {"parts": [{"text": "s"}]}}, (Message("system", "s"), user("q"))),
        ({"prompt": [{"role": "system", "content": "t"}, ASK], "system": "s"}, (Message("system", "t"), user("q"))),
    ],
)  # fmt: skip
def test_prompts_in_parts(tmp_path: Path, row: Any, turns: Any) -> None:
    assert one(tmp_path, row, Prompt)[0].messages == turns


def test_parts_of_a_prompt_that_are_no_text_are_refused(tmp_path: Path) -> None:
    assert refusal(tmp_path, {"question": "q", "context": {"title": "t"}}, Prompt) == (
        "not a text: column context holds an object"
    )
    assert refusal(tmp_path, {"question": "q", "history": [["a"]]}, Prompt).startswith(
        "unreadable history",
    )
