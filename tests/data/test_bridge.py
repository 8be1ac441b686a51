"""What follows on a sampled reply, against transformers' rendering of the whole conversation, for every
chat template that an installed package ships.
"""

import json
import os
import random

import pytest
from benchmarks.templates import MARK, TOOLS, Published, call, published

from tether.core.errors import DataError
from tether.core.types import Message, assistant, user
from tether.data.bridge import TurnBridge, common_end

TEMPLATES = published()
TALKS = int(os.environ.get("TETHER_TALKS", "4"))
"""Random conversations a template."""
WORDS = [
    "alpha",
    "γάμμα",
    "<think>",
    "1<2",
    "{x}",
    "</think>",
    "it's",
    "end.",
    '"so"',
    "a/b",
    "你好",
]


def words(draw, number):
    """Words with marks of thoughts for people and tools; templates read those of replies."""
    kinds = WORDS if number % 2 == 0 else [word for word in WORDS if "think" not in word]
    return f"Q{number}x {' '.join(draw.choice(kinds) for _ in range(draw.randrange(6)))} x{number}Q"


def spliced(template, turns):
    """The text of prompt, replies and bridges, as ids are appended; the replies end as the template
    ends them.
    """
    encoder = template.encoder
    bridge = TurnBridge(encoder)
    ids = list(encoder.prompt(turns[:1]))
    for place in range(1, len(turns), 2):
        reply, said = turns[place], turns[place + 1 : place + 2]
        _, text = encoder.chat.reply(turns[:place], reply)
        ids += encoder.tokenizer(text, add_special_tokens=False)["input_ids"]
        before = list(ids)
        if said:
            ids += bridge.after(ids[-1], (), said)
        assert ids[: len(before)] == before
    return encoder.tokenizer.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_bridge_is_what_the_template_writes_between_two_replies(name):
    template, draw = Published(TEMPLATES[name]), random.Random(name)
    bridge = TurnBridge(template.encoder)
    for _ in range(TALKS):
        replies = [assistant(words(draw, number)) for number in (1, 3)]
        asked = [user(words(draw, number)) for number in (0, 2, 4)]
        turns = (asked[0], replies[0], asked[1], replies[1], asked[2])
        whole = template.rendered(turns, waiting=True)
        for reply, said, upto in ((replies[0], asked[1], 3), (replies[1], asked[2], 5)):
            try:
                ids = bridge.after(template.encoder.stop_ids[-1], (), (said,))
            except DataError:
                return  # counted below
            text = template.tokenizer.decode(ids, skip_special_tokens=False)
            shown = template.rendered(turns[:upto], waiting=True)
            assert shown.endswith(text) and said.content in text
            behind = shown[: -len(text)].rpartition(reply.content.strip())[2]
            # between the words of the reply and the bridge there are marks of its end alone
            assert not MARK.sub("", behind).strip()
        assert common_end(whole, text) == text


def test_nearly_all_templates_have_a_bridge():
    refused = 0
    for text in TEMPLATES.values():
        encoder = Published(text).encoder
        try:
            TurnBridge(encoder).after(encoder.stop_ids[-1], (), (user("And?"),))
        except DataError:
            refused += 1
    assert len(TEMPLATES) - refused >= 0.9 * len(TEMPLATES)


@pytest.mark.parametrize(
    "family",
    ["qwen2_5", "qwen3", "qwen3_5_think", "llama3_1", "gptoss", "glm4moe", "gemma4"],
)
@pytest.mark.parametrize("count", [1, 2])
def test_results_of_calls_follow_as_the_template_writes_them(family, count):
    name = f"trl/{family}"
    if name not in TEMPLATES:
        pytest.skip("needs trl, which ships the template")
    template = Published(TEMPLATES[name])
    calls = [json.loads(call(name, "Bern", n)) for n, name in enumerate(["rain", "wind"][:count])]
    said = tuple(
        Message("tool", f"{n} mm <think>", name=one["function"]["name"], tool_call_id=one["id"])
        for n, one in enumerate(calls)
    )
    bridge = TurnBridge(template.encoder, TOOLS)
    asked = Message("user", "Rain?", tools=TOOLS)
    whole = (asked, Message("assistant", "", tool_calls=tuple(map(json.dumps, calls))), *said)
    expected = template.rendered(whole, waiting=True)
    try:
        ids = bridge.after(template.encoder.stop_ids[-1], calls, said)
    except DataError:
        assert expected is None or family == "gptoss"  # which writes one call a reply
        return
    text = template.tokenizer.decode(ids, skip_special_tokens=False)
    assert expected is None or expected.endswith(text)
    assert all(json.dumps(turn.content)[1:-1] in text or turn.content in text for turn in said)
    assert "Bern" not in text


def test_a_turn_that_a_template_leaves_out_is_refused():
    template = Published(TEMPLATES["trl/phi3"]) if "trl/phi3" in TEMPLATES else None
    if template is None:
        pytest.skip("needs trl, which ships the template")
    with pytest.raises(DataError, match="tool"):
        TurnBridge(template.encoder).after(
            template.encoder.stop_ids[0],
            (),
            (Message("tool", "3 mm"),),
        )


def test_history_that_a_template_keeps_is_spliced_byte_for_byte():
    kept = set()
    for name, text in TEMPLATES.items():
        template, draw = Published(text), random.Random(name)
        for _ in range(TALKS):
            turns = tuple((user if n % 2 == 0 else assistant)(words(draw, n)) for n in range(5))
            whole = template.rendered(turns, waiting=True)
            try:
                TurnBridge(template.encoder).after(template.encoder.stop_ids[-1], (), turns[2:3])
                replies = [template.encoder.chat.reply(turns[:n], turns[n]) for n in (1, 3)]
            except DataError:
                break
            if all(whole.startswith(before + reply) for before, reply in replies):
                assert spliced(template, turns) == whole
                kept.add(name)
    assert len(kept) >= 25
