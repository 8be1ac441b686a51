"""One encoding path: prompts are prefixes, masks mark the assistant and its stop token, whatever the template."""

import pytest

from tether.core.errors import DataError
from tether.core.types import Message, assistant, user
from tether.data.chat import PLAIN_TEMPLATE, ChatEncoder
from tether.models.tiny import tiny_tokenizer

FALCON = (  # as falcon-instruct's: nothing ends a reply but the next turn's first word
    "{% for message in messages %}{% if not loop.first %}{{ '\n' }}{% endif %}"
    "{{ {'system': 'System', 'user': 'User', 'assistant': 'Assistant'}[message['role']] + ': ' + message['content'].strip() }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '\nAssistant:' }}{% endif %}"
)
CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}<|system|>be good<|end|>\n{% endif %}"
    "<|{{ message['role'] }}|>{{ message['content'] }}<|end|>\n{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TEMPLATES = {"own": None, "chatml": CHATML, "plain": PLAIN_TEMPLATE}
TALK = (user("hello"), assistant("hi there"), user("and now?"), assistant("goodbye."))


@pytest.fixture(params=list(TEMPLATES))
def encoder(request):
    return ChatEncoder(tiny_tokenizer(), (1,), TEMPLATES[request.param])


def counted_text(encoder, encoded):
    return encoder.tokenizer.decode([i for i, counts in zip(encoded.ids, encoded.trained, strict=True) if counts])


def test_a_prompt_is_a_prefix_of_prompt_and_response(encoder):
    prompt = encoder.prompt(TALK[:3])
    whole = encoder.conversation(TALK, "last")
    assert whole.ids[: len(prompt)] == prompt
    assert whole.trained == (False,) * len(prompt) + (True,) * (len(whole) - len(prompt))
    assert whole.ids[-1] == 1  # the stop token is an action: kept and trained


@pytest.mark.audit
@pytest.mark.parametrize("turns", [1, 2, 3])
def test_a_prompt_is_a_prefix_where_the_template_writes_no_stop_token(turns):
    """The policy is prompted with the history that it, the reward model and SFT were trained on, stop tokens included."""
    encoder = ChatEncoder(tiny_tokenizer(), (1, 3), FALCON)
    talk = tuple(turn for n in range(turns) for turn in (user(f"and {n}?"), assistant(f"{n}.")))
    prompt, whole = encoder.prompt(talk[:-1]), encoder.conversation(talk, "last")
    assert whole.ids[: len(prompt)] == prompt and whole.trained.index(True) == len(prompt)
    assert prompt.count(1) == turns - 1 and whole.ids.count(1) == turns and 3 not in whole.ids
    text = "".join(f"User: and {n}?\nAssistant: {n}.|" + "\n" * (n < turns - 1) for n in range(turns))  # | is the stop token
    assert encoder.tokenizer.decode(list(whole.ids)).replace("<|end|>", "|") == text


@pytest.mark.audit
@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_that_end_their_replies_get_no_other_ids(name):
    """Their prompts are the ids of the rendered text and nothing else."""
    encoder = ChatEncoder(tiny_tokenizer(), (1,), TEMPLATES[name])
    rows = [{"role": m.role, "content": m.content} for m in TALK[:3]]
    text = encoder.tokenizer.apply_chat_template(rows, chat_template=encoder.template, tokenize=False, add_generation_prompt=True)
    assert encoder.prompt(TALK[:3]) == tuple(encoder.tokenizer(text, add_special_tokens=False)["input_ids"])


def test_all_turns_or_the_last(encoder):
    assert counted_text(encoder, encoder.conversation(TALK, "all")) == "hi there<|end|>goodbye.<|end|>"
    assert counted_text(encoder, encoder.conversation(TALK, "last")) == "goodbye.<|end|>"
    assert encoder.conversation(TALK, "all").ids == encoder.conversation(TALK, "last").ids


def test_ids_are_those_of_the_rendered_text(encoder):
    rows = [{"role": m.role, "content": m.content} for m in TALK]
    text = encoder.tokenizer.apply_chat_template(rows, chat_template=encoder.template, tokenize=False)
    ids = encoder.tokenizer(text, add_special_tokens=False)["input_ids"]
    ours = list(encoder.conversation(TALK).ids)
    assert ids[: len(ours)] == ours and len(ids) - len(ours) <= 2  # all that is left out is what follows the last stop token


def test_what_is_scored_is_what_the_reward_model_was_trained_on(encoder):
    """Rule: the score of a rollout uses exactly the ids of the comparison's side, stop token included, finished or not."""
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
