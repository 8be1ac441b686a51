"""Texts that a chat template has rendered already are read as turns, under the model's own marks
and under published ones.
"""

import logging

import pytest

from tether.core.errors import DataError
from tether.core.types import Message, assistant, user
from tether.data.chat import ChatEncoder
from tether.data.formats.rendered import turns_of_text
from tether.data.rendered import FAMILIES, family_of
from tether.data.templates import PLAIN_TEMPLATE
from tether.models.tiny import tiny_tokenizer

TALKS = [
    (user("What is 2 < 3?"),),
    (Message("system", "Be brief."), user("Hello")),
    (user("First"), assistant("one\n\ntwo"), user("and then?")),
]
OWN = (  # marks that no published template has
    "{% for m in messages %}{{ {'user': '<<ASK>> ', 'assistant': '<<SAY>> ', 'system': '<<SYS!>> "
    "'}[m.role] }}{{ m.content }}"
    "{{ eos_token }}{% endfor %}{% if add_generation_prompt %}<<SAY>> {% endif %}"
)
BY_HAND = {
    "ChatML": ("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n", "Yes<|im_end|>\n"),
    "Llama 3": (
        "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
        "Yes<|eot_id|>",
    ),
    "Llama 2 and Mistral": ("<s>[INST] Hi [/INST]", " Yes</s>"),
    "Gemma": (
        "<bos><start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\n",
        "Yes<end_of_turn>\n",
    ),
    "Zephyr and Phi": ("<|user|>\nHi</s>\n<|assistant|>\n", "Yes</s>"),
    "DeepSeek": (
        "<｜begin▁of▁sentence｜><｜User｜>Hi<｜Assistant｜><think>\n",
        "Yes<｜end▁of▁sentence｜>",
    ),
    "Command R": (
        "<BOS_TOKEN><|START_OF_TURN_TOKEN|><|USER_TOKEN|>Hi<|END_OF_TURN_TOKEN|><|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
        "Yes<|END_OF_TURN_TOKEN|>",
    ),
    "Guanaco": ("### Human: Hi\n### Assistant:", " Yes"),
    "Alpaca": (
        "Below is an instruction that describes a task. Write a response that appropriately "
        "completes the request.\n\n"
        "### Instruction:\nHi\n\n### Response:",
        " Yes",
    ),
}


def encoder(template=None, rendered="auto"):
    return ChatEncoder(tiny_tokenizer(), (1,), template, None, rendered)


def text_of(chat, messages):
    rows = [{"role": m.role, "content": m.content} for m in messages]
    return chat.tokenizer.apply_chat_template(
        rows,
        chat_template=chat.template,
        tokenize=False,
        add_generation_prompt=True,
    )


@pytest.mark.parametrize(
    "template",
    [None, OWN, PLAIN_TEMPLATE],
    ids=["tiny", "own marks", "plain"],
)
@pytest.mark.parametrize("talk", TALKS, ids=["one turn", "system", "three turns"])
def test_a_prompt_that_the_template_rendered_is_the_prompt_itself(template, talk):
    if template is PLAIN_TEMPLATE and talk[0].role == "system":
        pytest.skip("a plain text that begins with System: proves nothing")
    chat = encoder(template)
    rendered = text_of(chat, talk)
    assert chat.prompt((user(rendered),)) == chat.prompt(talk)
    whole = chat.conversation((*talk, assistant("fine.")), "last")
    assert chat.conversation((user(rendered), assistant("fine.")), "last") == whole
    assert chat.conversation((user(rendered), assistant("fine.<|end|>")), "last") == whole


@pytest.mark.parametrize("name", BY_HAND)
def test_marks_of_other_models_are_read_too(name):
    prompt, reply = BY_HAND[name]
    chat = encoder(PLAIN_TEMPLATE)
    assert family_of(prompt).name == name
    assert chat.prompt((user(prompt),)) == chat.prompt((user("Hi"),))
    (turn,) = (marks for marks in FAMILIES if marks.name == name)
    assert turn.turns(prompt.removesuffix("<think>\n") + reply)[-1].content.strip() == "Yes"


def test_llama_2_writes_the_system_prompt_into_the_first_turn():
    chat = encoder()
    text = "<s>[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\nHi [/INST]"
    assert chat.prompt((user(text),)) == chat.prompt((Message("system", "Be brief."), user("Hi")))


MISTRAL_7 = (  # a system prompt of its own where none is given
    "<s>{% set given = messages[0].role == 'system' %}[SYSTEM_PROMPT]"
    "{{ messages[0].content if given else 'Be good.' }}[/SYSTEM_PROMPT]"
    "{% for m in messages[1 if given else 0:] %}{% if m.role == 'user' %}[INST]{{ m.content }}"
    "[/INST]{% else %}{{ m.content }}</s>{% endif %}{% endfor %}"
)


@pytest.mark.parametrize("template", [None, MISTRAL_7], ids=["another model's", "its own"])
@pytest.mark.parametrize(
    "talk",
    [TALKS[1], (*TALKS[1], assistant("Yes"), user("and then?"))],
    ids=["one turn", "three turns"],
)
def test_a_rendered_text_of_mistral_7_keeps_its_system_turn(template, talk):
    chat, mistral = encoder(template), encoder(MISTRAL_7)
    text = text_of(mistral, talk)
    assert text.startswith("<s>[SYSTEM_PROMPT]Be brief.[/SYSTEM_PROMPT][INST]Hello[/INST]")
    assert chat.prompt((user(text),)) == chat.prompt(talk)
    whole, told = (*talk, assistant("fine.")), (user(text), assistant("fine."))
    assert chat.conversation(told, "last") == chat.conversation(whole, "last")
    assert turns_of_text(f"{text} fine.</s>") == whole


def test_an_alpaca_input_belongs_to_the_instruction():
    chat = encoder()
    text = "### Instruction:\nTranslate.\n\n### Input:\nGood morning\n\n### Response:\n"
    assert chat.prompt((user(text),)) == chat.prompt((user("Translate.\n\nGood morning"),))


def test_a_reply_that_repeats_its_whole_conversation_loses_the_repetition():
    chat = encoder()
    whole = "<|user|>Hi<|end|><|assistant|>Yes<|end|>"
    assert chat.conversation((user("Hi"), assistant(whole))) == chat.conversation(
        (user("Hi"), assistant("Yes")),
    )
    with pytest.raises(DataError, match="does not begin with its prompt"):
        chat.conversation((user("Another question"), assistant(whole)))


def test_a_repeated_conversation_keeps_its_system_prompt_and_the_flags_of_the_reply():
    chat = encoder()
    whole = "<|system|>Be brief<|end|><|user|>Hi<|end|><|assistant|>Yes<|end|>"
    talk = (Message("system", "Be brief"), user("Hi"))
    assert chat.conversation((*talk, assistant(whole))) == chat.conversation(
        (*talk, assistant("Yes")),
    )
    # the prompt knows no such system turn
    with pytest.raises(DataError, match="does not begin with its prompt"):
        chat.conversation((user("Hi"), assistant(whole)))
    with pytest.raises(DataError, match="not to be trained"):
        chat.conversation((*talk, Message("assistant", whole, train=False)))


@pytest.mark.parametrize(
    "text",
    [
        "Explain what <|user|> and <|assistant|> mean in a prompt.",
        "User: is a word that begins this question. What is Assistant: then?",
        "[INST] without an end",
        "The mark ### Response: stands in many prompts",
    ],
)
def test_a_question_about_marks_stays_a_question(text):
    chat, kept = encoder(), encoder(rendered="keep")
    assert chat.prompt((user(text),)) == kept.prompt((user(text),))


def test_keep_and_split_force_either_reading():
    rendered = "<|user|>Hi<|end|><|assistant|>"
    assert (
        encoder(rendered="keep")
        .tokenizer.decode(list(encoder(rendered="keep").prompt((user(rendered),))))
        .count("<|user|>")
        == 2
    )
    loose = "<|user|>Hi"  # no assistant's header follows
    assert encoder(rendered="auto").prompt((user(loose),)) != encoder().prompt((user("Hi"),))
    assert encoder(rendered="split").prompt((user(loose),)) == encoder().prompt((user("Hi"),))


def test_the_log_says_so_once(caplog):
    chat = encoder(OWN)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            chat.prompt((user(text_of(chat, TALKS[0])),))
    assert sum("rendered by a chat template already" in message for message in caplog.messages) <= 1
