"""Calls in replies, by the templates that installed packages ship and by tether's own."""

import json
from pathlib import Path

import pytest
from benchmarks.templates import TOOLS, Published, call, published

import tether.models
from tether.core.errors import DataError
from tether.core.types import Message
from tether.data.bridge import TurnBridge
from tether.data.calls import Calls

OURS = Path(tether.models.__file__).with_name("chatml-tools.jinja").read_text(encoding="utf-8")
TEMPLATES = {"chatml-tools": OURS, **published()}
READ = [
    "chatml-tools",
    "trl/qwen2_5",
    "trl/qwen3",
    "trl/qwen3_5_nothink",
    "trl/qwen3_5_think",
    "trl/llama3_1",
    "trl/gptoss",
]
ONE_CALL = {"trl/llama3_1", "trl/gptoss"}
"""A reply of these is words or one call."""


def template(name):
    if name not in TEMPLATES:
        pytest.skip("needs trl, which ships the template")
    return Published(TEMPLATES[name])


def read(calls, text, number=0):
    encoder = calls.encoder
    prompt = encoder.prompt((Message("user", "Rain?", tools=TOOLS),))
    ids = tuple(encoder.tokenizer(text, add_special_tokens=False)["input_ids"])
    return calls.read(prompt[-64:], ids, number)


@pytest.mark.parametrize("name", READ)
@pytest.mark.parametrize("words", ["", "Let me see."])
def test_what_the_template_writes_is_read_again(name, words):
    calls = Calls(template(name).encoder, TOOLS)
    if words and name in ONE_CALL:
        pytest.skip("a reply of these is words or a call")
    written = [call("rain", "Bern"), call("wind", "Chur", 1)][: 1 if name in ONE_CALL else 2]
    question = Message("user", "Rain?", tools=TOOLS)
    message = Message("assistant", words, tool_calls=tuple(written))
    text = calls.encoder.chat.reply((question,), message)[1]
    reply = read(calls, text, 36)
    assert reply.content == words
    functions = [json.loads(one)["function"] for one in reply.tool_calls]
    assert functions == [json.loads(one)["function"] for one in written]
    assert [json.loads(one)["id"] for one in reply.tool_calls] == ["call00010", "call00011"][
        : len(written)
    ]


def test_types_of_the_schema_decide_what_an_argument_is():
    schema = json.loads(TOOLS)[:1]
    schema[0]["function"]["parameters"]["properties"]["city"]["type"] = "integer"
    calls = Calls(template("chatml-tools").encoder, json.dumps(schema))
    text = '<tool_call>{"name": "rain", "arguments": {"city": "7"}}</tool_call><|im_end|>'
    (one,) = read(calls, text).tool_calls
    assert json.loads(one)["function"]["arguments"] == {"city": 7}


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>{"name": "rain"</tool_call>',
        '<tool_call>{"name": "rain", "arguments": {}}',
        '<tool_call>{"name": "rain"}</tool_call>',
        '<tool_call>{"arguments": {}}</tool_call>',
        '<tool_call>{"name": "rain", "arguments": []}</tool_call>',
        "<tool_call>3</tool_call>",
        "<tool_call></tool_call>",
        "<tool_call>" + "[" * 5000 + "</tool_call>",
        "<tool_call>" + "9" * 5000 + "</tool_call>",
    ],
)
def test_a_broken_call_is_a_fault_and_never_an_empty_call(text):
    calls = Calls(template("chatml-tools").encoder, TOOLS)
    with pytest.raises(DataError) as error:
        read(calls, f"{text}<|im_end|>")
    assert len(str(error.value)) < 300


def test_words_without_a_call_stay_words():
    reply = read(Calls(template("chatml-tools").encoder, TOOLS), "It rains.<|im_end|>")
    assert reply == Message("assistant", "It rains.")


def test_templates_whose_calls_nothing_reads_are_refused():
    refused = 0
    for text in TEMPLATES.values():
        try:
            Calls(Published(text).encoder, TOOLS)
        except DataError as error:
            refused += "template" in str(error)
    assert 20 <= refused <= len(TEMPLATES) - 20


def test_our_template_is_chatml():
    encoder = template("chatml-tools").encoder
    asked = Message("user", "Rain?", tools=TOOLS)
    text = encoder.chat.render((asked,), waiting=True)
    assert text.startswith("<|im_start|>system\n") and text.endswith("<|im_start|>assistant\n")
    assert all(json.dumps(row["function"])[:30] in text for row in json.loads(TOOLS))
    said = (Message("tool", "3 mm", tool_call_id="call00000"),)
    one = json.loads(call("rain", "Bern"))
    ids = TurnBridge(encoder, TOOLS).after(encoder.stop_ids[-1], [one], said)
    assert encoder.tokenizer.decode(ids) == (
        "\n<|im_start|>tool\n3 mm<|im_end|>\n<|im_start|>assistant\n"
    )
