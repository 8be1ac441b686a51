"""Conversations that a template wrote into one text: its marks cut them into turns again.

ChatML, Llama 2 (https://huggingface.co/blog/llama2#how-to-prompt-llama-2), Llama 3, Gemma, Zephyr
and Phi, Alpaca (https://github.com/tatsu-lab/stanford_alpaca#data-release), Guanaco
(https://huggingface.co/datasets/timdettmers/openassistant-guanaco), Vicuna, Glaive
(https://huggingface.co/datasets/glaiveai/glaive-function-calling-v2) and plain transcripts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from tether.core.errors import DataError
from tether.core.types import (
    ChatRole,
    Conversation,
    Demonstration,
    Message,
    Prompt,
    Row,
    assistant,
    user,
)
from tether.data.formats.fields import (
    checked_prompt,
    system_turn,
    text,
    until_reply,
    up_to_reply,
    with_input,
)
from tether.data.formats.messages import ROLES
from tether.data.formats.table import LISTS

TEXTS = LISTS["texts"]
_BAIZE = "[|Human|]"
_MARKS = (
    r"<\|im_start\|>[ ]*(?P<who>\w+)\n",
    r"<\|start_header_id\|>(?P<who>\w+)<\|end_header_id\|>\s*",
    r"<start_of_turn>(?P<who>\w+)\n",
    r"<\|(?P<who>system|user|assistant|prompter|tool|observation)\|>\s*",
    r"###\s*(?P<who>System|Human|User|Instruction|Input|Question|Assistant|Response|Output|Answer)\s*:",
    r"(?:\A|(?<=\s)|(?<=</s>)|(?<=<\|endoftext\|>))(?P<who>SYSTEM|USER|ASSISTANT|FUNCTION "
    r"RESPONSE):(?=\s)",
    r"(?m:^)[^\S\n]*(?P<who>Human|User|Assistant|AI|Bot|GPT):",
    r"\[\|(?P<who>Human|AI)\|\]",
)
_WORDS: dict[str, ChatRole] = {
    **ROLES,
    **dict.fromkeys(("instruction", "input", "question"), "user"),
    **dict.fromkeys(("response", "output", "answer"), "assistant"),
    "function response": "tool",
}
_ASKED = "[INST]"
_ANSWERED = "[/INST]"
_LLAMA_SYSTEM = re.compile(r"\s*<<SYS>>(.*?)<</SYS>>", re.DOTALL)
_ENDS = re.compile(
    r"</?s>|<\|(?:im_end|eot_id|eom_id|end|endoftext|end_of_text|begin_of_text)\|>|<end_of_turn>|<bos>|<eos>"
    r"|\[/?SYSTEM_PROMPT\]",
)


def read_text(row: Row) -> Demonstration:
    """Turns after the last reply are left out.

    Raises:
        DataError: the text has no turns.
    """
    demonstration = up_to_reply(_conversation(row), row)
    checked_prompt(demonstration.messages[:-1])
    return demonstration


def read_text_opening(row: Row) -> Prompt:
    """The turns before the last reply."""
    return Prompt(until_reply(_conversation(row), row))


def has_text(row: Row) -> bool:
    """True if one of the columns holds a text; a list does not count."""
    return bool(_column(row))


def _column(row: Row) -> str:
    """The column of the text; `input` only where it has Baize's marks, for it may be a mere
    prompt.
    """
    texts = ((name, dict.get(row, name)) for name in TEXTS)
    return next(
        (
            name
            for name, words in texts
            if isinstance(words, str) and (name != "input" or _BAIZE in words)
        ),
        "",
    )


def _conversation(row: Row) -> Conversation:
    name = _column(row) or TEXTS[0]
    messages = turns_of_text(text(row, name))
    if not messages:
        raise DataError(
            f"plain text: column {name} has no marks of turns. A demonstration needs a prompt and "
            "a reply: write messages, or "
            "name both columns by data.columns. A text that is a prompt goes by data.columns = "
            f'{{ prompt = "{name}" }}',
        )
    if messages[0].role == "system":
        return messages
    before = system_turn(row)
    return (
        *(Message("system", re.sub(r"\ASYSTEM:\s*", "", turn.content).strip()) for turn in before),
        *messages,
    )


def turns_of_text(words: str) -> Conversation:
    """The turns that the marks of a template show; nothing for a plain text. A reply that is still
    empty is no turn.
    """
    if blocks := [*_blocks(words)]:
        turns = _llama_2(words.partition(_ASKED)[0], blocks)
    else:
        styles = (list(re.finditer(mark, words)) for mark in _MARKS)
        # without a user it is a single word with a colon
        spoken = (s for s in styles if "user" in {_WORDS.get(m["who"].lower()) for m in s})
        turns = next((_cut(words, marks) for marks in spoken), ())
    return turns[:-1] if turns and turns[-1].is_empty else turns


def _cut(words: str, marks: list[re.Match[str]]) -> Conversation:
    """The texts between marks as turns; a text before the first one is the system's, `input` goes
    below its instruction.
    """
    preamble = _bare(words[: marks[0].start()])
    turns = [Message("system", preamble)] if preamble else []
    for mark, after in zip(marks, [*marks[1:], None], strict=True):
        spoken = _bare(words[mark.end() : after.start() if after else None])
        role = _WORDS.get(mark["who"].lower())
        if role is None:
            raise DataError(f"unknown role: {mark['who']!r:.40} in a text of turns")
        if mark["who"] == "Input" and turns and turns[-1].role == "user":
            turns[-1] = user(with_input(turns[-1].content, spoken))
        elif spoken or role != "system":
            turns.append(Message(role, spoken))
    return tuple(turns)


def _blocks(words: str) -> Iterator[tuple[str, str]]:
    """The questions and replies of Llama 2's marks, in time that grows with the text alone."""
    begin = words.find(_ASKED)
    while begin >= 0 and (middle := words.find(_ANSWERED, begin)) >= 0:
        after = words.find(_ASKED, middle)
        reply = words[middle + len(_ANSWERED) : None if after < 0 else after]
        yield words[begin + len(_ASKED) : middle], reply
        begin = after


def _llama_2(preamble: str, blocks: list[tuple[str, str]]) -> Conversation:
    system = _bare(preamble)
    turns = [Message("system", system)] if system else []
    for question, reply in blocks:
        if not turns and (system := _LLAMA_SYSTEM.match(question)):
            turns.append(Message("system", system[1].strip()))
            question = question[system.end() :]
        turns += [user(question.strip()), assistant(_bare(reply))]
    return tuple(turns)


def _bare(words: str) -> str:
    """The text without the tokens that begin and end turns, and without white space around it."""
    return _ENDS.sub("", words).strip()
