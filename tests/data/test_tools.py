"""Rows with tool calls: read, rendered as the template writes them, trained on the calls and never
on the results.
"""

import json
from pathlib import Path

import pytest

from tether.api.given import data_values
from tether.core.errors import DataError
from tether.core.rundir import RunDirectory
from tether.core.types import Demonstration, Message, assistant, user
from tether.data.chat import ChatEncoder
from tether.data.formats.registry import format_named, kind_reader
from tether.data.rows import turn_rows, turns_of, write_rows
from tether.data.sources import Quarantine, read
from tether.data.templates import PLAIN_TEMPLATE
from tether.models.tiny import tiny_model, tiny_tokenizer
from tether.models.trunk import Role
from tether.settings.learner import OptimizerConfig
from tether.settings.supervised import SFTConfig
from tether.stages.sft import SFT

TEMPLATE = (  # in the style of Qwen2.5's
    "{% if tools %}<|system|>{% for tool in tools %}{{ tool | tojson }}{{ '\n' }}{% endfor "
    "%}<|end|>{{ '\n' }}{% endif %}"
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}"
    "{% for call in message.tool_calls %}{{ '\n<tool_call>\n' }}"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson '
    "}}}\n</tool_call>{% endfor %}"
    "<|end|>\n{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SCHEMA = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}},
}
CALL = {
    "id": "c1",
    "type": "function",
    "function": {"name": "weather", "arguments": ('{"city": "Bern"}')},
}
TURNS = [
    {"role": "user", "content": "Rain in Bern?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "name": "weather", "content": "sun"},
    {"role": "assistant", "content": "No.", "tool_calls": None},
]
CALLED = '\n<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call><|end|>'


def encoder(template=TEMPLATE):
    return ChatEncoder(tiny_tokenizer(), (1,), template)


def demonstration(turns=TURNS, **columns):
    (record,) = kind_reader(format_named("messages"), Demonstration, "here", {})(
        {"messages": turns, **columns},
    )
    return record


def pieces(encoded, tokenizer):
    """The texts of the runs of tokens that count."""
    runs, before = [], False
    for i, counts in zip(encoded.ids, encoded.trained, strict=True):
        if counts and not before:
            runs.append([])
        if counts:
            runs[-1].append(i)
        before = counts
    return [tokenizer.decode(run) for run in runs]


@pytest.mark.parametrize("tools", [[SCHEMA], json.dumps([SCHEMA])], ids=["list", "text"])
def test_the_whole_conversation_reads_as_transformers_renders_it(tools):
    chat = encoder()
    encoded = chat.conversation(demonstration(tools=tools).messages)
    function = {"name": "weather", "arguments": {"city": "Bern"}}
    rows = [
        TURNS[0],
        {"role": "assistant", "content": "", "tool_calls": [{"function": function}]},
        TURNS[2],
    ]
    rows += [{"role": "assistant", "content": "No."}]
    text = chat.tokenizer.apply_chat_template(
        rows,
        tools=[SCHEMA],
        chat_template=TEMPLATE,
        tokenize=False,
    )
    assert '"weather", "parameters"' in text and CALLED in text
    assert chat.tokenizer.decode(list(encoded.ids)) == text.removesuffix("\n")


def test_calls_are_trained_and_results_are_not():
    chat = encoder()
    messages = demonstration(tools=[SCHEMA]).messages
    assert pieces(chat.conversation(messages), chat.tokenizer) == [CALLED, "No.<|end|>"]
    assert pieces(chat.conversation(messages, "last"), chat.tokenizer) == ["No.<|end|>"]


def test_a_conversation_may_end_on_a_call_and_say_something_beside_it():
    chat = encoder()
    messages = demonstration([TURNS[0], {**TURNS[1], "content": "Let me look."}]).messages
    whole = chat.conversation(messages)
    assert pieces(whole, chat.tokenizer) == ["Let me look." + CALLED]
    prompt = chat.prompt(messages[:-1])
    assert whole.ids[: len(prompt)] == prompt


def test_the_schemas_reach_the_prompt():
    chat = encoder()
    messages = demonstration(tools=[SCHEMA]).messages
    prompt, whole = chat.prompt(messages[:3]), chat.conversation(messages, "last")
    assert prompt == whole.prompt and json.dumps(SCHEMA) in chat.tokenizer.decode(list(prompt))


def test_a_column_tools_that_lists_no_schemas_stays_metadata():
    for value in ("search", ["search"], [], None, {"a": 1}):
        assert demonstration(tools=value).messages == demonstration().messages


def test_a_template_that_leaves_out_calls_is_refused():
    with pytest.raises(DataError, match=r"leaves out tool calls.*model\.chat_template"):
        encoder(PLAIN_TEMPLATE).conversation(demonstration().messages)
    assert encoder(PLAIN_TEMPLATE).conversation((user("a"), assistant("b"))).num_trained


@pytest.mark.parametrize(
    "call",
    [
        "text",
        {},
        {"function": "weather"},
        {"function": {"name": "weather"}},
        {"function": {"name": 3, "arguments": {}}},
    ]
    + [{"function": {"name": "weather", "arguments": wrong}} for wrong in ("{", "[1]", 3, None)],
)
def test_a_malformed_call_is_refused_with_a_reason(call, tmp_path):
    with pytest.raises(DataError, match="unreadable tool call: in column messages"):
        demonstration([TURNS[0], {**TURNS[1], "tool_calls": [call]}])


def test_a_turn_that_neither_says_nor_calls_anything_is_refused():
    with pytest.raises(DataError, match="the content of a turn in column messages is nothing"):
        demonstration([TURNS[0], {**TURNS[1], "tool_calls": []}])


def test_a_file_is_read_and_its_bad_row_set_aside(tmp_path):
    path = tmp_path / "rows.jsonl"
    bad = [TURNS[0], {**TURNS[1], "tool_calls": [{"function": {}}]}]
    rows = [
        {"messages": TURNS, "tools": [SCHEMA]},
        {"messages": json.dumps(TURNS)},
        {"messages": bad},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    records = list(read(path, Demonstration))
    assert [r.messages[1].tool_calls for r in records] == [
        demonstration().messages[1].tool_calls,
    ] * 2
    assert json.loads(records[0].messages[0].tools) == [SCHEMA]


CAPTURE = Path(__file__).with_name("openenv_capture.jsonl")
"""Two calls of a tool with their answers, a reply that was thrown away, and a title by another call
without tools: `export_session(include_messages=True)` of openenv 0.10.0 for calls that we made up.
"""


def test_a_capture_of_openenv_is_the_conversation_of_its_agent(tmp_path):
    quarantine = Quarantine(tmp_path / "left.jsonl")
    (record,) = read(CAPTURE, Demonstration, quarantine=quarantine)
    assert [(turn.role, turn.spoken) for turn in record.messages] == [
        ("system", "You look things up."),
        ("user", "Rain in Bern?"),
        ("assistant", 'rain({"city": "Bern"})'),
        ("tool", "3 mm"),
        ("assistant", 'Now Chur.\nrain({"city": "Chur"})'),
        ("tool", "0 mm"),
        ("assistant", "Bern is wet, Chur is dry."),
    ]
    (tool,) = json.loads(record.messages[0].tools)
    assert tool["function"]["name"] == "rain"
    assert pieces(encoder().conversation(record.messages), encoder().tokenizer)[-1] == (
        "Bern is wet, Chur is dry.<|end|>"
    )


@pytest.mark.parametrize(
    "spoil",
    [
        lambda row: [turn.pop("request_messages") for turn in row["turns"]],
        lambda row: row["turns"].clear(),
        lambda row: row.update(turns=["text"]),
        lambda row: [path.pop("node_ids") for path in row["sequences"]],
        lambda row: row.update(sequences=[3]),
        lambda row: row["turns"][3].update(request_messages=None),
        lambda row: row["turns"][3].update(response_message=None),
    ],
)
def test_a_capture_without_messages_is_refused(spoil):
    row = json.loads(CAPTURE.read_text())
    spoil(row)
    results = [*kind_reader(format_named("openenv"), Demonstration, "here", [row])(row)]
    assert results and all(isinstance(one, DataError) for one in results)
    assert "include_messages" in str(results[0])


TRACE = Path(__file__).with_name("openenv_trace.jsonl")
"""The same calls as a `TrainingTrace` of openenv 0.10.0, and one of which no token is trained."""


def test_a_trace_of_openenv_is_the_calls_that_no_later_one_continues():
    (capture,), (record,) = ([*read(path, Demonstration)] for path in (CAPTURE, TRACE))
    assert record.messages == capture.messages
    row = json.loads(TRACE.read_text())
    # the harness wrote the last request anew, so that two rows are left
    row["turns"][2]["prompt_token_ids"][0] = 99
    reader = kind_reader(format_named("openenv_trace"), Demonstration, "here", [row])
    first, second, other = reader(row)
    assert "of which no token is to be trained" in str(other)
    assert first.messages == capture.messages[:5] and second.messages == capture.messages
    assert all(len(one.messages[0].tools) > 10 for one in (first, second))


@pytest.mark.parametrize(
    "spoil",
    [
        lambda row: [turn.pop("request") for turn in row["turns"]],
        lambda row: [turn.pop("prompt_token_ids") for turn in row["turns"]],
        lambda row: [turn.update(response={"choices": []}) for turn in row["turns"]],
        lambda row: [
            turn.update(response={"choices": [{"message": None}]}) for turn in row["turns"]
        ],
        lambda row: [turn.update(request={"messages": []}) for turn in row["turns"]],
        lambda row: [turn.update(loss_mask=None) for turn in row["turns"]],
        lambda row: row.update(turns=[3]),
        lambda row: row.update(turns=["text"]),
    ],
)
def test_a_trace_that_lacks_something_is_refused(spoil):
    row = json.loads(TRACE.read_text())
    spoil(row)
    results = [*kind_reader(format_named("openenv_trace"), Demonstration, "here", [row])(row)]
    assert results and all(isinstance(one, DataError) for one in results)


def test_a_log_of_calls_of_an_api_is_read(tmp_path):
    """As proxies write it: the body that was sent, and the body that came back."""
    (turn, *_) = json.loads(TRACE.read_text())["turns"]
    reply = turn["response"] | {
        "id": "x",
        "object": "chat.completion",
        "usage": {"total_tokens": 9},
    }
    asked = turn["request"] | {"model": "m", "temperature": 1.0}
    path = tmp_path / "log.jsonl"
    rows = [{"request": asked, "response": reply}, {"request": asked, "response": {"error": "no"}}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    quarantine = Quarantine(tmp_path / "left.jsonl")
    (record,) = read(path, Demonstration, quarantine=quarantine)
    assert record.messages[-1].tool_calls and json.loads(record.messages[0].tools)
    assert quarantine.count == 1


def test_what_apis_write_beside_a_message_changes_nothing():
    turns = [
        TURNS[0] | {"content": [{"type": "text", "text": TURNS[0]["content"]}]},
        TURNS[1] | {"refusal": None, "annotations": [], "audio": None, "function_call": None},
        TURNS[2],
        TURNS[3] | {"finish_reason": "stop"},
    ]
    assert demonstration(turns, parallel_tool_calls=False).messages == demonstration().messages


def test_calls_survive_being_written_down():
    messages = demonstration().messages
    assert turns_of(json.loads(json.dumps(turn_rows(messages)))) == messages
    assert (
        Message("user", "a").as_row() == {"role": "user", "content": "a"} and len({*messages}) == 4
    )


def test_records_that_are_handed_over_in_python_keep_calls_and_schemas(tmp_path):
    records = [demonstration(tools=[SCHEMA]), Demonstration((user("a"), assistant("b")))]
    (tmp_path / "data").mkdir()
    path = data_values(records, tmp_path, "train")["path"]
    assert [r.messages for r in read(path, Demonstration)] == [r.messages for r in records]
    lines = [json.loads(line) for line in Path(path).read_text().splitlines()]
    assert lines[1] == {
        "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
    }
    write_rows(tmp_path / "again.jsonl", records)
    assert [r.messages for r in read(tmp_path / "again.jsonl", Demonstration)] == [
        r.messages for r in records
    ]


def test_sft_learns_to_call(tmp_path):
    config = SFTConfig(
        epochs=3,
        batch_size=2,
        heldout_fraction=0.0,
        optimizer=OptimizerConfig(learning_rate=3e-3),
    )
    stage = SFT(config, Role(tiny_model().requires_grad_(False)), encoder())
    rows = [demonstration(tools=[SCHEMA])] * 2
    encoded = [one for row in rows for one in encoder().conversations(row.messages)]
    before = stage.evaluate(encoded)["loss"]
    summary = stage.train(rows, RunDirectory(tmp_path))
    assert summary["updates"] == 3 and summary["skipped"] == {}
    assert stage.evaluate(encoded)["loss"] < before


def test_sft_sets_rows_aside_whose_calls_the_template_leaves_out(tmp_path):
    config = SFTConfig(epochs=1, batch_size=1, heldout_fraction=0.0)
    stage = SFT(config, Role(tiny_model().requires_grad_(False)), encoder(PLAIN_TEMPLATE))
    rows = [demonstration(), Demonstration((user("a"), assistant("b")))]
    summary = stage.train(rows, RunDirectory(tmp_path))
    assert summary["num_train"] == 1 and sum(summary["skipped"].values()) == 1
