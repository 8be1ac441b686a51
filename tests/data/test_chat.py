"""One encoding path: prompts are prefixes, masks mark the assistant and its stop token, whatever
the template.
"""

import pytest

from tether.core.errors import DataError
from tether.core.types import Message, assistant, user
from tether.data.chat import ChatEncoder
from tether.data.templates import PLAIN_TEMPLATE
from tether.models.tiny import tiny_tokenizer

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
def test_a_prompt_is_a_prefix_where_the_template_writes_no_stop_token(turns):
    """The policy is prompted with the history that it, the reward model and SFT were trained on,
    stop tokens included.
    """
    encoder = ChatEncoder(tiny_tokenizer(), (1, 3), FALCON)
    talk = tuple(turn for n in range(turns) for turn in (user(f"and {n}?"), assistant(f"{n}.")))
    prompt, whole = encoder.prompt(talk[:-1]), encoder.conversation(talk, "last")
    assert whole.ids[: len(prompt)] == prompt and whole.trained.index(True) == len(prompt)
    assert prompt.count(1) == turns - 1 and whole.ids.count(1) == turns and 3 not in whole.ids
    # | is the stop token
    text = "".join(
        f"User: and {n}?\nAssistant: {n}.|" + "\n" * (n < turns - 1) for n in range(turns)
    )
    assert encoder.tokenizer.decode(list(whole.ids)).replace("<|end|>", "|") == text


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


def test_what_is_scored_is_what_the_reward_model_was_trained_on(encoder):
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


def test_a_reply_without_a_thought_follows_what_prompt_and_rendering_share():
    encoder = ChatEncoder(tiny_tokenizer(), (1,), OPENED)
    encoded = encoder.conversation((user("q"), assistant("42")))
    assert (
        text(encoder, encoded.ids) == "<|user|>q<|end|><|assistant|>42<|end|>"
        and counted_text(encoder, encoded) == "42<|end|>"
    )


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
            (pair,) = read_transcripts(json.loads(line))
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
