"""What fine-tuning on calls says of the calls that its model samples."""

import json
import re

import pytest
from tests.runner.test_episodes import TEMPLATE

import tether
from tether.core.rundir import read_json
from tether.core.types import Message, Prompt, Sampling
from tether.runner.assembly.roles import load_policy, local_engine
from tether.runner.methods import supervised

TOOL = {
    "type": "function",
    "function": {
        "name": "double",
        "description": "Twice a number.",
        "parameters": {
            "type": "object",
            "properties": {"x": {"type": "integer", "description": "the number"}},
            "required": ["x"],
        },
    },
}
CALL = {"type": "function", "function": {"name": "double", "arguments": {"x": 2}}}
TURNS = [
    {"role": "user", "content": "two?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "name": "double", "content": "4"},
    {"role": "assistant", "content": "4"},
]


def tuned(rows, epochs, run="run", **model):
    chosen = {"source": "tiny", "dtype": "float32", "stop_tokens": ["<|end|>"], **model}
    done = tether.sft(
        chosen,
        rows,
        epochs=epochs,
        batch_size=4,
        heldout_fraction=0.0,
        lora=False,
        optimizer={"learning_rate": 1e-2},
        run=run,
    )
    return done.path / "sft"


@pytest.fixture
def template(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "template.jinja").write_text(TEMPLATE)
    return "template.jinja"


def right(text):
    """True if each call in a reply is JSON with a name and an object of arguments."""
    calls = re.findall(r"<tool_call>(.*?)</tool_call>", text)
    try:
        values = [json.loads(call) for call in calls]
    except ValueError:
        return False
    return bool(values) and all({*value} == {"name", "arguments"} for value in values)


@pytest.mark.parametrize("needed", [0.999, 0.1])
def test_the_share_of_sampled_replies_whose_call_can_be_read(template, needed, monkeypatch):
    monkeypatch.setattr(supervised, "CALLS_NEEDED", needed)
    rows = [{"messages": TURNS, "tools": [TOOL]}] * 48
    folder = tuned(rows, 7, chat_template=template)
    summary = read_json(folder / "summary.json")
    role, loaded = load_policy(str(folder / "model"))
    prompt = Prompt((Message("user", "two?", tools=json.dumps([TOOL])),))
    groups = local_engine(role, loaded).generate([prompt] * 48, Sampling(256), seed=0)
    share = sum(right(group.rollouts[0].text) for group in groups) / 48
    assert summary["calls_read"] == pytest.approx(share) and 0.1 < share < 0.999
    (note,) = (note for note in summary["notes"] if "demonstrated calls" in note)
    assert note.startswith(f"{share:.0%} of 48 replies")
    assert ("reinforcement learning will likely fail" in note) == (needed > share)


def test_demonstrations_without_calls_or_with_a_template_that_is_not_read(template, tmp_path):
    rows = [{"prompt": "two?", "response": "4"}] * 8
    assert "calls_read" not in read_json(tuned(rows, 1, chat_template=template) / "summary.json")
    odd = TEMPLATE.replace("<tool_call>", "[[").replace("</tool_call>", "]]")
    (tmp_path / "odd.jinja").write_text(odd)
    rows = [{"messages": TURNS, "tools": [TOOL]}] * 8
    summary = read_json(tuned(rows, 1, "odd", chat_template="odd.jinja") / "summary.json")
    assert "calls_read" not in summary
    assert any("cannot be read" in note for note in summary["notes"])
