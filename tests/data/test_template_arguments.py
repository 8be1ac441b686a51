"""Arguments of chat templates: every one of every template that an installed package ships, with two
values, against transformers' `apply_chat_template` with the same keywords.
"""

import json
from dataclasses import replace
from functools import cache

import pytest
from benchmarks.templates import TALKS, VALUES, Published, prefixes, published

from tether.cli.tools.export_transformers import whole_template
from tether.core.errors import DataError, ModelError
from tether.core.types import Demonstration, Message, Prompt, assistant, user
from tether.data.chat import ChatEncoder
from tether.data.formats.registry import FORMATS, reader_for
from tether.data.rows import record_row, turn_rows, turns_of
from tether.data.sources import Quarantine, read

TEMPLATES = published()
NAMES = ("plain", "thoughts", "system, result, turns")
SEEN_IN_PICTURES = {"add_vision_id"}
"""Arguments that change nothing in a conversation of texts."""


@cache
def cases():
    """(template's name, argument, value, template with it) of all published templates."""
    if "trl/qwen3" not in TEMPLATES:
        pytest.skip("needs trl, which ships chat templates")
    return [
        (name, argument, value, Published(text, {argument: value}))
        for name, text in TEMPLATES.items()
        for argument in sorted(Published(text).encoder.chat.arguments)
        for value in VALUES[argument]
    ]


def test_arguments_are_read_off_the_template():
    names = {name for name, *_ in cases()}
    assert (len(names), len(cases())) == (40, 164)
    assert {argument for _, argument, *_ in cases()} == VALUES.keys()
    qwen = Published(TEMPLATES["trl/qwen3"]).encoder.chat
    assert qwen.arguments == {"enable_thinking"}, "not content, which it sets itself"
    gptoss = Published(TEMPLATES["trl/gptoss"]).encoder.chat
    assert gptoss.arguments == {"builtin_tools", "model_identity", "reasoning_effort"}
    assert Published(TEMPLATES["trl/phi3"]).encoder.chat.arguments == set()


@pytest.mark.parametrize("name", TEMPLATES)
def test_prompts_and_replies_are_what_transformers_renders_with_the_same_keywords(name):
    """In prompts to sample from and in what SFT trains; a row's own arguments give the same ids."""
    texts: dict[str, list[list[str | None]]] = {}
    for _, argument, value, template in (case for case in cases() if case[0] == name):
        plain = ChatEncoder(template.tokenizer, template.encoder.stop_ids)
        shown = []
        for prefix in (part for talk in NAMES for part in prefixes(TALKS[talk])):
            shown += [template.rendered(prefix), template.rendered(prefix[:-1], waiting=True)]
            if template.check(prefix).startswith("refused"):
                continue
            row = (replace(prefix[0], template=json.dumps({argument: value})), *prefix[1:])
            assert plain.prompt(row[:-1]) == template.encoder.prompt(prefix[:-1])
            trained = template.encoder.conversation(prefix, "last")
            assert plain.conversation(row, "last") == trained
        texts.setdefault(argument, []).append(shown)
    assert {
        argument for argument, (one, other) in texts.items() if one == other
    } <= SEEN_IN_PICTURES


@pytest.mark.parametrize("name", TEMPLATES)
def test_an_exported_template_speaks_the_same_way_and_still_takes_the_argument(name):
    for _, argument, value, template in (case for case in cases() if case[0] == name):
        encoder = template.encoder
        rows = [turn.as_row() for turn in TALKS["plain"]]
        ours = whole_template(encoder, to_the_end=False)
        again = ChatEncoder(
            template.tokenizer,
            encoder.stop_ids,
            ours,
            arguments=template.arguments,
        )
        assert again.templates == ours, "the same arguments are written down once"
        for keywords in ({}, *({argument: other} for other in VALUES[argument])):
            theirs, exported = (
                template.tokenizer.apply_chat_template(
                    rows[:-1],
                    chat_template=text,
                    add_generation_prompt=True,
                    return_dict=True,
                    **more,
                )["input_ids"]
                for text, more in (
                    (TEMPLATES[name], {argument: value} | keywords),
                    (ours, keywords),
                )
            )
            assert exported == theirs
            if not keywords:
                assert tuple(exported) == encoder.prompt(TALKS["plain"][:-1])
        scored = whole_template(encoder, to_the_end=True)
        whole = template.tokenizer.apply_chat_template(rows, chat_template=scored, return_dict=True)
        ids = encoder.conversation(TALKS["plain"], "last").ids
        if template.check(TALKS["plain"]) == "equal":
            assert tuple(whole["input_ids"]) == ids


def test_unknown_names_are_refused_with_those_that_exist():
    if "trl/qwen3_6" not in TEMPLATES:
        pytest.skip("needs trl, which ships chat templates")
    template = Published(TEMPLATES["trl/qwen3_6"])
    known = "takes add_vision_id, enable_thinking, preserve_thinking"
    with pytest.raises(ModelError, match=f"template names enable_thinkin, and .* {known}"):
        _ = Published(template.text, {"enable_thinkin": False, "enable_thinking": True}).encoder
    for name in (
        "enable_thinkin",
        "messages",
        "tokenize",
        "bos_token",
        "content",
        "raise_exception",
    ):
        talk = (Message("user", "a", template=json.dumps({name: True})),)
        with pytest.raises(DataError, match=f"chat_template_kwargs names {name}, and .* {known}"):
            template.encoder.prompt(talk)
    with pytest.raises(ModelError, match="takes none"):
        _ = Published("{{ messages[0]['content'] }}", {"enable_thinking": False}).encoder


def test_a_row_overrides_the_model():
    text = "{% for m in messages %}{{ m.content }}{% endfor %}[{{ mood }}{{ tone }}]"
    encoder = Published(text, {"mood": "calm", "tone": "low"}).encoder
    row = Message("user", "a", template='{"mood": "glad"}')
    spoken = [encoder.tokenizer.decode(encoder.prompt((turn,))) for turn in (user("a"), row)]
    assert spoken == ["a[calmlow]", "a[gladlow]"]


@pytest.mark.parametrize("as_text", [False, True])
@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_a_column_of_arguments_reaches_the_first_turn(tmp_path, suffix, as_text):
    given = [{"enable_thinking": False}, {"reasoning_effort": "low"}, None]
    cells = [json.dumps(one) if as_text and one else one for one in given]
    rows = [
        {"prompt": f"Say {n}", "response": "yes", "chat_template_kwargs": cell}
        for n, cell in enumerate(cells)
    ]
    path = tmp_path / f"rows.{suffix}"
    if suffix == "parquet":
        import pyarrow as pa
        import pyarrow.parquet as pq

        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    aside = Quarantine()
    records = [*read(str(path), Demonstration, quarantine=aside)]
    own = [json.loads(record.messages[0].template or "null") for record in records]
    assert own == given and not aside.count and "chat_template_kwargs" not in aside.unused
    for record in records:
        assert turns_of(turn_rows(record.messages)) == record.messages
        layout = next(layout for layout in FORMATS if layout.matches(record_row(record)))
        reader = reader_for(layout, Demonstration)
        assert reader is not None
        (again,) = reader(record_row(record))
        assert isinstance(again, Demonstration) and again.messages == record.messages


def test_arguments_that_are_no_object_set_the_row_aside(tmp_path):
    path = tmp_path / "rows.jsonl"
    cells = ["thinking", 3, ["enable_thinking"], {}]
    rows = [{"prompt": "a", "chat_template_kwargs": cell} for cell in cells]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    aside = Quarantine()
    assert [p.messages for p in read(str(path), Prompt, quarantine=aside)] == [(user("a"),)]
    assert aside.count == 3
    assert all(why.startswith("chat_template_kwargs is ") for why in aside.reasons)


def test_a_template_keeps_or_drops_earlier_thoughts():
    if "trl/qwen3_6" not in TEMPLATES:
        pytest.skip("needs trl, which ships chat templates")
    for preserve in (False, True):
        template = Published(TEMPLATES["trl/qwen3_6"], {"preserve_thinking": preserve})
        thought = Message("assistant", "b", reasoning="Clouds gather.")
        waiting = template.rendered((user("a"), thought, user("c")), waiting=True)
        assert (
            template.encoder.chat.keeps_thoughts
            == ("Clouds gather." in (waiting or ""))
            == preserve
        )
    assert not Published(TEMPLATES["trl/qwen3"]).encoder.chat.keeps_thoughts


def test_a_rendered_text_keeps_the_arguments_of_its_row():
    if "trl/qwen3" not in TEMPLATES:
        pytest.skip("needs trl, which ships chat templates")
    encoder = Published(TEMPLATES["trl/qwen3"]).encoder
    own = '{"enable_thinking": false}'
    text = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    rendered = encoder.prompt((Message("user", text, template=own),))
    assert rendered == encoder.prompt((Message("user", "Hi", template=own),))
    assert rendered != encoder.prompt((user("Hi"),))
    assert encoder.conversation((Message("user", text, template=own), assistant("yes")))
