"""Every chat template that an installed package ships: nothing of a conversation is cut, and the
replies alone count.

The oracle is what transformers itself renders. Templates in further folders are tested where
TETHER_TEMPLATES names these.
"""

import os
import random
import re
import sysconfig
from functools import cache
from pathlib import Path

import pytest

from tether.core.errors import DataError
from tether.core.types import Message, assistant, user
from tether.data.chat import ChatEncoder
from tether.models.tiny import tiny_tokenizer

FOLDERS = [
    sysconfig.get_path("purelib"),
    *filter(None, os.environ.get("TETHER_TEMPLATES", "").split(os.pathsep)),
]
SPECIAL = re.compile(
    r"<[|｜][^<>\s'\"]{1,40}[|｜]>|</?s>|<(?:eos|bos|end_of_turn|start_of_turn|turn\||\|turn)>|\[/?[A-Z_]{3,20}\]",
)
WORDS = [
    "alpha",
    "Béta",
    "γάμμα",
    "delta,",
    "E=mc²",
    "\n",
    "  ",
    "1 < 2",
    "{x}",
    "- item",
    "你好",
    "it's",
    "end.",
    '"so"',
    "a/b",
]


def published():
    paths = (path for folder in FOLDERS for path in Path(folder).rglob("*.jinja*"))
    texts = {
        path.read_text(encoding="utf-8", errors="replace"): path
        for path in sorted(paths, reverse=True)
    }
    return {
        f"{path.parent.parent.name}/{path.stem}": text
        for text, path in sorted(texts.items(), key=lambda item: str(item[1]))
        if "add_generation_prompt" in text or "messages" in text
    }


TEMPLATES = published()


@cache
def encoder_of(name):
    """Bytes, and the template's own marks as special tokens; the mark behind a reply ends it."""
    template = TEMPLATES[name]
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"bos_token": "<bos>", "eos_token": "<eos>"})
    tokenizer.chat_template = template
    text = rendered(tokenizer, (user("question"), assistant("answer")), waiting=False)
    tail = text.rpartition("answer")[2]
    marks = sorted({*SPECIAL.findall(template), *SPECIAL.findall(text)})
    tokenizer.add_special_tokens({"additional_special_tokens": marks})
    stop = next(iter(SPECIAL.findall(tail)), "<eos>")
    return ChatEncoder(tokenizer, (tokenizer.convert_tokens_to_ids(stop),))


def rendered(tokenizer, messages, *, waiting):
    """As transformers renders it; templates of models that see images want the text in a list of
    parts.
    """
    rows = [{"role": m.role, "content": m.content} for m in messages]
    parts = [{"role": m.role, "content": [{"type": "text", "text": m.content}]} for m in messages]
    try:
        text = tokenizer.apply_chat_template(rows, tokenize=False, add_generation_prompt=waiting)
    except Exception:  # noqa: BLE001  (a template may raise anything)
        return tokenizer.apply_chat_template(parts, tokenize=False, add_generation_prompt=waiting)
    if messages[-1].content.strip() in text:
        return text
    return tokenizer.apply_chat_template(parts, tokenize=False, add_generation_prompt=waiting)


def talk(draw, *, system):
    """A conversation of one to four exchanges; every turn begins and ends with a word of its
    own.
    """

    def words(number):
        middle = " ".join(draw.choice(WORDS) for _ in range(draw.randrange(6)))
        return f"Q{number}x {middle} x{number}Q"

    turns = [Message("system", words(99))] if system else []
    for number in range(draw.randrange(1, 5)):
        turns += [user(words(2 * number)), assistant(words(2 * number + 1))]
    return tuple(turns)


def runs(encoder, encoded):
    """The texts of the runs of tokens that count."""
    texts, before = [], False
    for i, counts in zip(encoded.ids, encoded.trained, strict=True):
        if counts and not before:
            texts.append([])
        if counts:
            texts[-1].append(i)
        before = counts
    return [encoder.tokenizer.decode(run) for run in texts]


def refused_by_itself(encoder, messages):
    """True if the template itself raises an error for, or leaves a turn out of, a part of the
    conversation.
    """
    for length in range(1, len(messages) + 1):
        if messages[length - 1].role != "system":
            part = messages[:length]
            try:
                text = rendered(encoder.tokenizer, part, waiting=part[-1].role != "assistant")
            except Exception:  # noqa: BLE001  (a template may raise anything)
                return True
            if any(content_of(message) not in text for message in part):
                return True
    return False


def content_of(message):
    return message.content.strip()


def check(name, messages):
    """The properties of one conversation under one template; the reason where it is refused."""
    encoder = encoder_of(name)
    tokenizer = encoder.tokenizer
    try:
        prompt = encoder.prompt(messages[:-1])
        sequences = encoder.conversations(messages)
        last = encoder.conversation(messages, "last")
    except DataError as error:
        return str(error)
    waiting = rendered(tokenizer, messages[:-1], waiting=True)
    adds = encoder.adds_stops
    stop = tokenizer.decode([encoder.stop_ids[0]])
    if not adds:
        assert tokenizer.decode(list(prompt)) == waiting
    text = tokenizer.decode(list(last.ids))
    position = 0
    for message in messages:
        if message.role == "system":
            assert content_of(message) in text
        else:
            position = text.index(content_of(message), position) + len(content_of(message))
    if last.ids[: len(prompt)] != prompt:
        assert waiting.endswith("<think>\n") and text.startswith(
            waiting.removesuffix("<think>\n"),
        ), "cut within the turns"
    else:
        assert last.prompt == prompt
    assert last.ids[: len(prompt)] == prompt or name.partition("/")[2] in OPEN_A_THOUGHT
    counted = [run for sequence in sequences for run in runs(encoder, sequence)]
    replies = [message for message in messages if message.role == "assistant"]
    assert len(counted) == len(replies)
    for reply in replies:
        (own,) = (run for run in counted if content_of(reply) in run)
        assert own.count(stop) == 1 and own.endswith(stop)
        assert not any(
            content_of(m) in own for m in messages if m is not reply and m.role != "system"
        )
    for sequence in sequences:
        # what stands before the first reply of its own is what transformers gives a model that is
        # to write it
        whole = tokenizer.decode(list(sequence.ids))
        final = max(
            k for k, m in enumerate(messages) if m.role == "assistant" and content_of(m) in whole
        )
        before = rendered(tokenizer, messages[:final], waiting=True)
        if not adds and last.ids[: len(prompt)] == prompt:
            assert whole.startswith(before)
    return ""


def test_many_templates_are_installed():
    if not any("trl" in name for name in TEMPLATES):
        pytest.skip("needs trl, which ships chat templates")
    assert len(TEMPLATES) >= 50


OPEN_A_THOUGHT = {
    "deepseek_r1_distill",
    "deepseek_r1_distill_training",
    "deepseekv3",
    "deepseekv3_training",
}
"""Templates whose prompt opens a thought that their rendering of a reply without one does not begin
with.
"""
NAMED = re.compile(r"refuses this conversation|leaves out")


@pytest.mark.parametrize("name", TEMPLATES)
def test_nothing_is_cut_and_replies_alone_count(name):
    converse(name, 12)


def converse(name, trials):
    """Check so many random conversations, a third of them with a system turn."""
    draw = random.Random(name)
    for trial in range(trials):
        messages = talk(draw, system=trial % 3 == 2)
        reason = check(name, messages)
        if reason:
            assert NAMED.search(reason), reason
            assert refused_by_itself(encoder_of(name), messages), reason


@pytest.mark.slow
@pytest.mark.parametrize("name", TEMPLATES)
def test_nothing_is_cut_in_a_thousand_conversations(name):
    converse(name, 1000)
