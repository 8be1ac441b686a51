"""Turns as people and judges read them: calls of tools are said, not left out."""

import json

from tether.core.types import Comparison, Message, assistant, user
from tether.data.inspection import inspect_data, longer_chosen
from tether.judges.pairwise import pair_question
from tether.people.annotation.store import content_id
from tether.people.annotation.task_json import spoken


def calling(city, content=""):
    call = {
        "id": "c1",
        "type": "function",
        "function": {"name": "weather", "arguments": {"city": city}},
    }
    return Message("assistant", content, (json.dumps(call),))


ROME, OSLO = 'weather({"city": "Rome"})', 'weather({"city": "Oslo"})'


def test_a_turn_that_only_calls_is_not_empty():
    assert calling("Rome").spoken == ROME and calling("Rome", "Let me look.").spoken == (
        f"Let me look.\n{ROME}"
    )
    assert assistant("Hello.").spoken == "Hello." and assistant("").spoken == ""
    assert spoken((calling("Rome"),)) == ROME
    assert (
        spoken((calling("Rome"), Message("tool", "sunny"))) == f"assistant: {ROME}\n\ntool: sunny"
    )


def test_a_judge_reads_the_calls():
    pair = Comparison((user("Is it warm in Rome?"),), (calling("Rome"),), (calling("Oslo"),))
    text = pair_question(pair, "Which is right?", swapped=False)[0].content
    assert ROME in text and OSLO in text and text.index(ROME) < text.index(OSLO)


def test_answers_that_differ_in_calls_alone_are_two():
    assert content_id((calling("Rome"),)) != content_id((calling("Oslo"),))
    assert content_id((assistant("a"),)) == content_id((Message("assistant", "a"),))


def test_inspect_shows_calls(tmp_path):
    row = {
        "messages": [
            {"role": "user", "content": "Rome?"},
            calling("Rome").as_row(),
            {"role": "tool", "content": "sunny"},
        ],
    }
    row["messages"].append({"role": "assistant", "content": "It is sunny."})
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    assert any(
        ROME in text
        for example in inspect_data(tmp_path / "rows.jsonl").examples
        for text in example.values()
    )


def test_the_share_of_pairs_whose_longer_side_is_preferred():
    def pair(chosen, rejected, **more):
        return Comparison((user("q"),), (assistant(chosen),), (assistant(rejected),), **more)

    pairs = [
        pair("a b c", "a"),
        pair("a b", "a"),
        pair("a", "a b"),
        pair("a", "b"),
        pair("a b", "a", tie=True),
    ]
    longer = longer_chosen(pairs)
    assert (round(longer.value, 6), longer.count) == (round(2 / 3, 6), 3) and longer_chosen(
        pairs[3:4],
    ) is None
