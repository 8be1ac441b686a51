"""One encoding path: prompts are prefixes, masks mark the assistant and its stop token, whatever
the template.
"""

import json
import re

import pytest
from tokenizers import AddedToken

from tether.core.errors import DataError
from tether.core.types import Message, assistant, user
from tether.data.chat import ChatEncoder
from tether.data.templates import PLAIN_TEMPLATE
from tether.models.tiny import tiny_tokenizer
from tether.rewards.answers import find_answer

FALCON = (  # as falcon-instruct's: nothing ends a reply but the next turn's first word
    "{% for message in messages %}{% if not loop.first %}{{ '\n' }}{% endif %}"
    "{{ {'system': 'System', 'user': 'User', 'assistant': 'Assistant'}[message['role']] + ': ' + "
    "message['content'].strip() }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '\nAssistant:' }}{% endif %}"
)
CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' "
    "%}<|system|>be good<|end|>\n{% endif %}"
    "<|{{ message['role'] }}|>{{ message['content'] }}<|end|>\n{% endfor %}{% if "
    "add_generation_prompt %}<|assistant|>{% endif %}"
)
TEMPLATES = {"own": None, "chatml": CHATML, "plain": PLAIN_TEMPLATE}
TALK = (user("hello"), assistant("hi there"), user("and now?"), assistant("goodbye."))


@pytest.fixture(params=list(TEMPLATES))
def encoder(request):
    return ChatEncoder(tiny_tokenizer(), (1,), TEMPLATES[request.param])


def counted_text(encoder, encoded):
    return encoder.tokenizer.decode(
        [i for i, counts in zip(encoded.ids, encoded.trained, strict=True) if counts],
    )


def test_a_prompt_is_a_prefix_of_prompt_and_response(encoder):
    prompt = encoder.prompt(TALK[:3])
    whole = encoder.conversation(TALK, "last")
    assert whole.ids[: len(prompt)] == prompt
    assert whole.trained == (False,) * len(prompt) + (True,) * (len(whole) - len(prompt))
    assert whole.ids[-1] == 1  # the stop token is an action: kept and trained


@pytest.mark.audit
@pytest.mark.parametrize("turns", [1, 2, 3])
def test_a_stop_token_that_the_template_does_not_write_ends_the_trained_reply_alone(turns):
    """History is the template's text, and each reply is trained behind that, once."""
    encoder = ChatEncoder(tiny_tokenizer(), (1, 3), FALCON)
    talk = tuple(turn for n in range(turns) for turn in (user(f"and {n}?"), assistant(f"{n}.")))
    history = "".join(f"User: and {n}?\nAssistant: {n}.\n" for n in range(turns))
    last = encoder.conversation(talk, "last")
    assert text(encoder, last.ids) == history[:-1] + "<|end|>"
    assert last.prompt == encoder.prompt(talk[:-1])
    assert encoder.conversation(talk) == last
    sequences = encoder.conversations(talk)
    assert [(s.prompt, counted_text(encoder, s)) for s in sequences] == [
        (encoder.prompt(talk[: 2 * n + 1]), f" {n}.<|end|>") for n in reversed(range(turns))
    ]


@pytest.mark.audit
@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_that_end_their_replies_get_no_other_ids(name):
    """Their prompts are the ids of the rendered text and nothing else."""
    encoder = ChatEncoder(tiny_tokenizer(), (1,), TEMPLATES[name])
    rows = [{"role": m.role, "content": m.content} for m in TALK[:3]]
    text = encoder.tokenizer.apply_chat_template(
        rows,
        chat_template=encoder.template,
        tokenize=False,
        add_generation_prompt=True,
    )
    assert encoder.prompt(TALK[:3]) == tuple(
        encoder.tokenizer(text, add_special_tokens=False)["input_ids"],
    )


def test_all_turns_or_the_last(encoder):
    assert counted_text(encoder, encoder.conversation(TALK, "all")) == (
        "hi there<|end|>goodbye.<|end|>"
    )
    assert counted_text(encoder, encoder.conversation(TALK, "last")) == "goodbye.<|end|>"
    assert encoder.conversation(TALK, "all").ids == encoder.conversation(TALK, "last").ids


def test_ids_are_those_of_the_rendered_text(encoder):
    rows = [{"role": m.role, "content": m.content} for m in TALK]
    text = encoder.tokenizer.apply_chat_template(
        rows,
        chat_template=encoder.template,
        tokenize=False,
    )
    ids = encoder.tokenizer(text, add_special_tokens=False)["input_ids"]
    ours = list(encoder.conversation(TALK).ids)
    # all that is left out is what follows the last stop token
    assert ids[: len(ours)] == ours and len(ids) - len(ours) <= 2


def test_scored_tokens_are_those_of_the_reward_models_training(encoder):
    """Rule: the score of a rollout uses exactly the ids of the comparison's side, stop token
    included, finished or not.
    """
    prompt = encoder.prompt(TALK[:1])
    trained = encoder.conversation((TALK[0], assistant("fine.")), "last")
    response = trained.ids[len(prompt) :]
    assert encoder.rollout_for_scoring(prompt, response).ids == trained.ids
    assert encoder.rollout_for_scoring(prompt, response[:-1]).ids == trained.ids
    assert encoder.rollout(prompt, response[:-1]).ids == trained.ids[:-1]


def test_system_prompt_is_a_default_only():
    encoder = ChatEncoder(tiny_tokenizer(), (1,), None, "short.")
    assert "short." in encoder.tokenizer.decode(list(encoder.prompt((user("q"),))))
    own = encoder.tokenizer.decode(list(encoder.prompt((Message("system", "mine"), user("q")))))
    assert "mine" in own and "short." not in own


def test_a_template_that_rewrites_history_is_refused():
    forgetful = (
        "{% for m in messages %}{% if loop.last or m['role'] == 'user' %}"
        "<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endif %}{% endfor %}"
    )
    encoder = ChatEncoder(tiny_tokenizer(), (1,), forgetful)
    with pytest.raises(DataError, match="earlier turns"):
        encoder.conversation(TALK)


@pytest.mark.parametrize("messages", [(), (user("q"),), (user("q"), assistant("  "))])
def test_conversations_without_a_reply_are_refused(messages):
    with pytest.raises(DataError):
        ChatEncoder(tiny_tokenizer(), (1,)).conversation(messages)


MARKED = {  # what templates write before and behind the thought of a reply
    "Magistral": ("[THINK]", "[/THINK]"),
    "gpt-oss": (
        "<|channel|>analysis<|message|>",
        "<|eom|><|start|>assistant<|channel|>final<|message|>",
    ),
    "Command A": ("<|START_THINKING|>", "<|END_THINKING|>"),
}


@pytest.mark.parametrize("name", MARKED)
def test_marks_of_a_thought_are_decoded_though_they_are_special_tokens(name):
    opened, ended = MARKED[name]
    tokenizer = tiny_tokenizer()
    marks = re.findall(r"<\|\w+\|>|\[/?THINK\]", opened + ended)
    tokenizer.add_tokens([AddedToken(mark, special=True) for mark in [*marks, "<|other|>"]])
    template = (
        "{% for m in messages %}<|{{ m.role }}|>{% if m.reasoning_content %}"
        + f"{opened}{{{{ m.reasoning_content }}}}{ended}"
        + "{% endif %}{{ m.content }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    encoder = ChatEncoder(tokenizer, (1,), template)
    talk = (user("7 + 9?"), Message("assistant", "16", reasoning="7 + 9 = 16"))
    reply = encoder.chat.reply(talk[:1], talk[1])[1]
    assert reply == f"{opened}7 + 9 = 16{ended}16<|end|>"
    ids = encoder.conversation(talk).ids[len(encoder.prompt(talk[:1])) :]
    # of special tokens, the marks alone are text
    unspoken = ("<|end|>", "<|eom|>", "<|start|>", "<|other|>")
    expected = "".join(part for part in re.split(r"(<\|\w+\|>)", reply) if part not in unspoken)
    other = tokenizer.convert_tokens_to_ids("<|other|>")
    said = encoder.decode((*ids[:-1], other, *ids[-1:]))
    assert (said, find_answer(said, ["whole"])) == (expected, "16")
    # a template that writes no thought has no marks
    plain = ChatEncoder(tokenizer, (1,), "{% for m in messages %}{{ m.content }}{% endfor %}")
    assert "7 + 9 = 16" in plain.decode(ids) and marks[0] not in plain.decode(ids)


CHANNELS = (  # as gpt-oss's: it refuses a text with channels, and has the thought apart
    "{% for m in messages %}{% if '<|channel|>' in m.content ~ (m.thinking or '') %}"
    "{{ raise_exception('channels') }}{% endif %}<|start|>{{ m.role }}{% if m.role == 'assistant' %}"
    "{% if m.thinking and loop.last %}<|channel|>analysis<|message|>{{ m.thinking }}<|end|><|start|>"
    "assistant{% endif %}<|channel|>final<|message|>{% else %}<|message|>{% endif %}{{ m.content }}"
    "{{ '<|return|>' if m.role == 'assistant' and loop.last else '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)


def channel_encoder():
    tokenizer = tiny_tokenizer()
    marks = ("start", "end", "message", "channel", "return")
    tokenizer.add_tokens([AddedToken(f"<|{mark}|>", special=True) for mark in marks])
    stops = (tokenizer.convert_tokens_to_ids("<|return|>"),)
    return ChatEncoder(tokenizer, stops, CHANNELS)


@pytest.mark.parametrize(
    "sampled",
    [
        "<|channel|>analysis<|message|>7 + 9 = 16<|end|><|start|>assistant<|channel|>final<|message|>16",
        "<|channel|>analysis<|message|>I am an assistant<|end|><|start|>assistant"
        "<|channel|>final<|message|>16\nis it",
        "<|channel|>final<|message|>16",
    ],
)
def test_a_sampled_reply_of_two_channels_is_encoded_as_it_was_sampled(sampled):
    """What is decoded for a pair gets the ids again that the model drew."""
    encoder = channel_encoder()
    ids = encoder.tokenizer(f"{sampled}<|return|>", add_special_tokens=False)["input_ids"]
    said = encoder.decode(ids)
    encoded = encoder.conversation((user("7 + 9?"), assistant(said)))
    assert list(encoded.ids[encoded.prompt_length :]) == ids
    later = encoder.prompt((user("7 + 9?"), assistant(said), user("sure?")))
    answer = sampled.rpartition("<|message|>")[2]
    assert f"<|channel|>final<|message|>{answer}<|end|>" in text(encoder, later)


def test_a_reply_of_more_channels_is_refused_and_not_read_as_one_thought():
    encoder = channel_encoder()
    between = "assistant<|channel|>commentary<|message|>Let me see."
    said = f"<|channel|>analysis<|message|>a{between}assistant<|channel|>final<|message|>16"
    with pytest.raises(DataError, match="refuses"):
        encoder.conversation((user("7 + 9?"), assistant(said)))


def test_special_tokens_do_not_reach_people():
    encoder = ChatEncoder(tiny_tokenizer(), (1,))
    assert encoder.decode([*encoder.tokenizer("fine")["input_ids"], 1]) == "fine"


THINKING = (  # as Qwen3's: the last reply alone has a thought, if an empty one
    "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' and loop.last "
    "%}<think>\n{{ m.reasoning_content or '' }}"
    "\n</think>\n\n{% endif %}{{ m.content.split('</think>')[-1].strip() }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
OPENED = (  # as DeepSeek-R1's: the prompt opens a thought, and replies are rendered without theirs
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content.split('</think>')[-1].strip() "
    "}}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|><think>\n{% endif %}"
)


def text(encoder, ids):
    return encoder.tokenizer.decode(list(ids))


def test_each_reply_is_trained_once_behind_its_own_prompt():
    encoder = ChatEncoder(tiny_tokenizer(), (1,), THINKING)
    sequences = encoder.conversations(TALK)
    assert [counted_text(encoder, s) for s in sequences] == [
        "<think>\n\n</think>\n\ngoodbye.<|end|>",
        "<think>\n\n</think>\n\nhi there<|end|>",
    ]
    assert [s.prompt for s in sequences] == [encoder.prompt(TALK[:3]), encoder.prompt(TALK[:1])]
    assert text(encoder, sequences[0].ids) == (
        "<|user|>hello<|end|>\n<|assistant|>hi there<|end|>\n<|user|>and now?<|end|>\n"
        "<|assistant|><think>\n\n</think>\n\ngoodbye.<|end|>"
    )
    assert encoder.conversations(TALK, "last") == sequences[:1]


def test_a_template_that_keeps_replies_needs_one_sequence(encoder):
    assert encoder.conversations(TALK) == [encoder.conversation(TALK)]


def test_a_thought_is_written_as_the_model_would_generate_it():
    for template in (THINKING, OPENED):
        encoder = ChatEncoder(tiny_tokenizer(), (1,), template)
        apart = encoder.conversation((user("q"), Message("assistant", "42", reasoning="because")))
        assert apart.prompt == encoder.prompt((user("q"),))
        assert text(encoder, apart.ids).endswith(
            "<|assistant|><think>\nbecause\n</think>\n\n42<|end|>",
        )
    inline = encoder.conversation((user("q"), assistant("<think>\nbecause\n</think>\n\n42")))
    assert text(encoder, inline.ids).endswith(
        "<|assistant|><think>\nbecause\n</think>\n\n42<|end|>",
    )


def test_a_reply_without_a_thought_follows_the_thought_that_the_prompt_opens():
    """What is trained and scored stands behind the prompt that is sampled from."""
    encoder = ChatEncoder(tiny_tokenizer(), (1,), OPENED)
    encoded = encoder.conversation((user("q"), assistant("42")))
    assert encoded.prompt == encoder.prompt((user("q"),))
    assert text(encoder, encoded.ids) == "<|user|>q<|end|><|assistant|><think>\n42<|end|>"


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (Message("assistant", "42", reasoning="because"), "reasoning"),
        (assistant("<think>because</think>42"), "reasoning"),
    ],
)
def test_a_template_that_drops_the_thought_of_its_reply_refuses_the_row(message, reason):
    forgetful = (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content.split('</think>')[-1] "
        "}}<|end|>{% endfor %}"
    )
    encoder = ChatEncoder(tiny_tokenizer(), (1,), forgetful)
    with pytest.raises(DataError, match=reason):
        encoder.conversation((user("q"), message))


@pytest.mark.parametrize(
    "turn",
    [Message("system", "rules"), user("a question"), assistant("an answer")],
)
def test_a_template_that_leaves_out_a_turn_refuses_the_row(turn):
    forgetful = (
        "{% for m in messages %}{% if m.content not in ('rules', 'a question', 'an answer') %}"
        "<|{{ m.role }}|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    )
    encoder = ChatEncoder(tiny_tokenizer(), (1,), forgetful)
    talk = (user("hello"), turn, user("q")) if turn.role == "assistant" else (turn, user("q"))
    for ask in (encoder.prompt, lambda talk: encoder.conversation((*talk, assistant("yes")))):
        with pytest.raises(DataError, match=r"leaves out|rewrites"):
            ask(talk)


def test_turns_that_are_not_to_be_trained_stand_in_the_context_alone(encoder):
    talk = (TALK[0], Message("assistant", "a mistake", train=False), *TALK[2:])
    assert counted_text(encoder, encoder.conversation(talk)) == "goodbye.<|end|>"
    assert encoder.conversations(talk) == [encoder.conversation(talk)]
    assert "a mistake" in text(encoder, encoder.conversation(talk).ids)
    with pytest.raises(DataError, match="not to be trained"):
        encoder.conversations((user("q"), Message("assistant", "bad", train=False)))


def test_a_reply_ends_with_the_first_stop_token_behind_its_content():
    """Phi-3 closes a turn with one stop token and the conversation with another: sampling ends at
    the first.
    """
    template = (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% else %}<|pad|>{% endif %}"
    )
    encoder = ChatEncoder(tiny_tokenizer(), (0, 1), template)
    assert counted_text(encoder, encoder.conversation(TALK)) == "hi there<|end|>goodbye.<|end|>"
    literal = encoder.conversation((user("q"), assistant("say <|end|> twice")))
    assert counted_text(encoder, literal) == "say <|end|> twice<|end|>"


def test_named_templates_are_the_default_and_one_for_tools():
    tools = '[{"type": "function", "function": {"name": "weather"}}]'
    named = {
        "default": TEMPLATES["chatml"],
        "tool_use": "{{ tools | tojson }}" + TEMPLATES["chatml"],
    }
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = named
    encoder = ChatEncoder(tokenizer, (1,))
    assert encoder.prompt((user("q"),)) == ChatEncoder(tokenizer, (1,), named["default"]).prompt(
        (user("q"),),
    )
    assert text(encoder, encoder.prompt((Message("user", "q", tools=tools),))).startswith(
        '[{"type": "function"',
    )
    assert ChatEncoder.described(tokenizer, encoder.describe()).templates == named


def test_templates_of_models_that_see_images_get_the_text_in_a_part():
    template = (
        "{% for m in messages %}<|{{ m.role }}|>{% for part in m.content %}{% if part.type == "
        "'text' %}{{ part.text }}{% endif %}"
        "{% endfor %}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    chat, plain = ChatEncoder(tiny_tokenizer(), (1,), template), ChatEncoder(tiny_tokenizer(), (1,))
    assert chat.conversation(TALK) == plain.conversation(TALK)


ROLES_END = (  # as GLM 4.5's: the next role's mark ends a reply
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% if m.tool_calls %}"
    "<call>{{ m.tool_calls[0].function | tojson }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
LATE_END = (  # as Apertus': the end mark comes with the next turn
    "{% for m in messages %}{% if m.role == 'user' %}{% if not loop.first %}<|end|>{% endif %}"
    "<|user|>{{ m.content }}{% else %}<|assistant|>{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
BLOCKS = (  # as GigaChat 3's: a call is a block of its own, behind the end of the words
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% if m.tool_calls %}"
    "<|call|>{{ m.tool_calls[0].function | tojson }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
OPEN_RESULT = (  # as Bielik 3's with a system turn: a result is closed where it is the last turn
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{{ m.tool_calls }}"
    "{% if loop.last or m.role != 'tool' %}<|end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
CLOSED = (  # as DeepSeek V3.2's: the prompt opens and closes a thought, a reply closes it
    "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}</think>{% endif %}"
    "{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|><think></think>{% endif %}"
)
EITHER = (  # as Ministral 3's: a turn needs words or calls
    "{% for m in messages %}{% if not m.content and not m.tool_calls %}"
    "{{ raise_exception('a turn needs words or calls') }}{% endif %}<|{{ m.role }}|>{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<call>{{ call.function | tojson }}{% endfor %}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
CALL = '{"function": {"name": "f", "arguments": {"x": "<|end|>"}}}'
FUNCTION = CALL.removeprefix('{"function": ').removesuffix("}")
CALLED = (user("q"), Message("assistant", "", tool_calls=(CALL,)))
RESULT = (*CALLED, Message("tool", "r"), assistant("a"))


@pytest.mark.parametrize(
    ("template", "talk", "trained"),
    [
        (ROLES_END, TALK, "goodbye.<|user|>"),
        (ROLES_END, TALK[:2], "hi there<|user|>"),
        (ROLES_END, CALLED, f"<call>{FUNCTION}<|tool|>"),
        (ROLES_END, RESULT, "a<|user|>"),
        (LATE_END, TALK, "goodbye.<|end|>"),
        (BLOCKS, CALLED, f"<|end|><|call|>{FUNCTION}<|end|>"),
        (BLOCKS, RESULT, "a<|end|>"),
        (OPEN_RESULT, RESULT, "a<|end|>"),
        (CLOSED, TALK, "goodbye.<|end|>"),
        (EITHER, CALLED, f"<call>{FUNCTION}<|end|>"),
        (EITHER, RESULT, "a<|end|>"),
    ],
)
def test_a_reply_is_what_follows_the_prompt_up_to_the_stop_that_ends_it(template, talk, trained):
    tokenizer = tiny_tokenizer()
    stops = ["<|pad|>", "<|user|>", "<|tool|>"] if template == ROLES_END else ["<|pad|>", "<|end|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": stops})
    encoder = ChatEncoder(tokenizer, tuple(tokenizer.convert_tokens_to_ids(stops)), template)
    rows = [message.as_row() for message in talk]
    prompt = tokenizer.apply_chat_template(
        rows[:-1],
        chat_template=template,
        tokenize=False,
        add_generation_prompt=True,
    )
    assert text(encoder, encoder.prompt(talk[:-1])) == prompt
    encoded = encoder.conversation(talk, "last")
    assert text(encoder, encoded.ids) == prompt + trained
    assert counted_text(encoder, encoded) == trained
    if not talk[-1].tool_calls:  # a reward model gives an unfinished reply the same end
        cut = encoded.ids[len(encoded.prompt) : -1]
        assert encoder.rollout_for_scoring(encoded.prompt, cut).ids == encoded.ids


@pytest.mark.parametrize(
    ("template", "calls"),
    [(BLOCKS, (CALL, CALL)), (ROLES_END, (CALL, CALL)), (CHATML, (CALL,))],
)
def test_a_template_that_drops_one_of_the_calls_refuses_the_row(template, calls):
    encoder = ChatEncoder(tiny_tokenizer(), (1,), template)
    talk = (user("q"), Message("assistant", "words", tool_calls=calls))
    for messages in (talk, (*talk, Message("tool", "r"), assistant("a"))):
        with pytest.raises(DataError, match="leaves out tool calls"):
            encoder.conversation(messages, "last")
    with pytest.raises(DataError, match="leaves out tool calls"):
        encoder.prompt((*talk, Message("tool", "r")))


@pytest.mark.parametrize("words", ["", "words"])
def test_a_template_that_knows_its_arguments_trains_the_whole_call(words):
    """A comparison with other arguments fails under it, which says nothing against the row."""
    strict = BLOCKS.replace(
        "{% if m.tool_calls %}",
        "{% if m.tool_calls %}{% if not m.tool_calls[0].function.arguments.x %}"
        "{{ raise_exception('x is missing') }}{% endif %}",
    )
    encoder = ChatEncoder(tiny_tokenizer(), (1,), strict)
    called = Message("assistant", words, tool_calls=(CALL.replace("<|end|>", "1"),))
    trained = counted_text(encoder, encoder.conversation((user("q"), called)))
    assert trained == f'{words}<|end|><|call|>{{"name": "f", "arguments": {{"x": "1"}}}}<|end|>'
    result = (user("q"), called, Message("tool", "r"))
    assert trained in text(encoder, encoder.prompt(result))


def test_no_thought_follows_a_prompt_that_has_ended_it():
    template = OPENED.replace("<think>\n{% endif %}", "<think>\n\n</think>\n\n{% endif %}").replace(
        "{{ m.content",
        "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
        "{{ m.content",
    )
    encoder = ChatEncoder(tiny_tokenizer(), (1,), template)
    encoded = encoder.conversation((user("q"), assistant("42")))
    assert counted_text(encoder, encoded) == "42<|end|>"
    assert encoded.prompt == encoder.prompt((user("q"),))
    with pytest.raises(DataError, match="no thought can follow"):
        encoder.conversation((user("q"), Message("assistant", "42", reasoning="because")))


def merging_tokenizer():
    """Bytes, of which two line breaks, and a letter with the blank before it, are one token."""
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    tokenizer = tiny_tokenizer()
    made = json.loads(tokenizer.backend_tokenizer.to_str())
    for one, two in (("Ċ", "Ċ"), ("Ġ", "a")):
        made["model"]["vocab"][one + two] = len(made["model"]["vocab"])
        made["model"]["merges"].append([one, two])
    inner = Tokenizer.from_str(json.dumps(made))
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|end|>")


@pytest.mark.parametrize(
    ("template", "reply"),
    [
        (CHATML.replace("<|assistant|>{%", "<|assistant|>\n{%").replace("|>{{", "|>\n{{"), "\nyes"),
        (PLAIN_TEMPLATE, "an answer"),
        (PLAIN_TEMPLATE, "\n\nyes"),
        (CHATML, " an answer"),
    ],
)
def test_a_prompt_keeps_its_ids_where_a_token_would_lie_across_its_end(template, reply):
    """The ids of prompt and reply are those that a model reads and writes: prompt, then reply."""
    tokenizer = merging_tokenizer()
    encoder = ChatEncoder(tokenizer, (1,), template)
    talk = (user("q"), assistant(reply), user("and a\n\nb?"), assistant(reply))
    sequences = encoder.conversations(talk)
    for turns in (talk[:2], talk):
        prompt = tokenizer.apply_chat_template(
            [m.as_row() for m in turns[:-1]],
            chat_template=template,
            tokenize=False,
            add_generation_prompt=True,
        )
        ids = tuple(tokenizer(prompt, add_special_tokens=False)["input_ids"])
        assert encoder.prompt(turns[:-1]) == ids
        whole = encoder.conversation(turns, "last")
        assert whole.prompt == ids and counted_text(encoder, whole) == f"{reply}<|end|>"
        places = [i for s in sequences for i in range(len(s)) if s.ids[:i] == ids]
        assert any(s.ids[: len(whole)] == whole.ids and s.trained[len(ids)] for s in sequences), (
            places
        )
    assert sum(counted_text(encoder, s).count(reply) for s in sequences) == 2


def bpe_tokenizer(*, bos):
    """Bytes, with a BOS before every text where `bos` is set; no chat template."""
    from tokenizers.processors import TemplateProcessing

    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    tokenizer.add_special_tokens({"bos_token": "<|system|>"})
    if bos:
        processor = TemplateProcessing(single="<|system|> $A", special_tokens=[("<|system|>", 2)])
        tokenizer.backend_tokenizer.post_processor = processor
    return tokenizer


@pytest.mark.parametrize("bos", [True, False])
def test_a_model_without_template_begins_texts_as_its_tokenizer_does(bos):
    tokenizer = bpe_tokenizer(bos=bos)
    encoder = ChatEncoder(tokenizer, (1,))
    begins = tokenizer("x")["input_ids"][0] == 2
    assert begins is bos
    assert (encoder.prompt((user("q"),))[0] == 2) is bos and encoder.prompt((user("q"),)).count(
        2,
    ) == bos
    assert encoder.conversation(TALK).ids.count(2) == bos


def sentencepiece_tokenizer():
    """Words with SentencePiece's mark for a space, one of which it puts before every text."""
    from tokenizers import Tokenizer, decoders, normalizers
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast

    letters = sorted(set("▁Theanswr:uaq\n"))
    vocabulary = {
        token: index
        for index, token in enumerate(["<unk>", "<s>", "</s>", *letters, "▁T", "he", "▁The"])
    }
    inner = Tokenizer(
        BPE(vocab=vocabulary, merges=[("▁", "T"), ("h", "e"), ("▁T", "he")], unk_token="<unk>"),
    )
    inner.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")],
    )
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
    )


def test_a_reply_gets_no_space_that_the_rendered_text_has_not():
    tokenizer = sentencepiece_tokenizer()
    template = (
        "{% for m in messages %}{{ m.role[0] }}:\n{{ m.content }}{{ eos_token }}\n{% endfor %}"
        "{% if add_generation_prompt %}a:\n{% endif %}"
    )
    encoder = ChatEncoder(tokenizer, (2,), template)
    assert tokenizer.convert_ids_to_tokens(
        tokenizer("The", add_special_tokens=False)["input_ids"],
    ) == ["▁The"]
    encoded = encoder.conversation((user("q"), assistant("The answer")))
    reply = tokenizer.convert_ids_to_tokens(
        [i for i, counts in zip(encoded.ids, encoded.trained, strict=True) if counts],
    )
    assert reply[0] != "▁The" and "".join(reply) == "The▁answer</s>"
    assert encoded.ids[: len(encoder.prompt((user("q"),)))] == encoder.prompt((user("q"),))


@pytest.mark.parametrize("name", ["qwen3", "phi3"])
def test_public_conversations_are_whole_under_templates_that_rewrite_history(name, tether_data):
    """Of helpful-base's test pairs, every character of every turn is trained on, scored and sampled
    from.
    """
    import gzip
    import json
    import sysconfig
    from pathlib import Path

    from tether.data.formats.pairs import read_transcripts

    path = Path(sysconfig.get_path("purelib")) / "trl" / "chat_templates" / f"{name}.jinja"
    if not path.is_file():
        pytest.skip("needs trl, which ships the template")
    encoder = ChatEncoder(tiny_tokenizer(), (1,), path.read_text(encoding="utf-8"))
    rows, cut = 0, 0
    with gzip.open(
        Path(tether_data) / "hh" / "helpful-base.test.jsonl.gz",
        "rt",
        encoding="utf-8",
    ) as file:
        lines = file.readlines()
    for line in lines:
        try:
            pair = read_transcripts(json.loads(line))
        except DataError:
            continue
        rows += 1
        for side in (pair.chosen, pair.rejected):
            talk = (*pair.prompt, *side)
            encodings = [(encoder.conversation(talk, "last").ids, talk)]
            if talk[-2].role == "user":
                encodings.append((encoder.prompt(talk[:-1]), talk[:-1]))
            for ids, turns in encodings:
                rendered, place = text(encoder, ids), 0
                for turn in turns:
                    place = rendered.find(turn.content.strip(), place)
                    cut += place < 0
                headers = rendered.count("<|im_start|>user\n" if name == "qwen3" else "<|user|>\n")
                cut += headers != sum(turn.role == "user" for turn in turns)
    assert rows == 499 and cut == 0
