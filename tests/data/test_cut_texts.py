"""Rendered texts are cut as their marks say, in time that grows with the text alone."""

import random
import re
import time

import pytest

from tether.core.types import Message, assistant, user
from tether.data.formats.rendered import turns_of_text

LLAMA_2 = re.compile(r"\[INST\](.*?)\[/INST\](.*?)(?=\[INST\]|\Z)", re.DOTALL)


def test_questions_and_replies_of_llama_2_are_those_of_its_marks():
    draw, cut = random.Random(1), 0
    for _ in range(3000):
        words = "".join(
            draw.choice(["[INST]", "[/INST]", "a", "b\n", " ", "["])
            for _ in range(draw.randrange(12))
        )
        turns = [
            turn(text.strip())
            for question, reply in LLAMA_2.findall(words)
            for turn, text in ((user, question), (assistant, reply))
        ]
        expected = turns[:-1] if turns and not turns[-1].content else turns
        # what is written before the first question is the system turn
        head = words.partition("[INST]")[0].strip()
        expected = [Message("system", head), *expected] if head and expected else expected
        assert list(turns_of_text(words)) == expected, words
        cut += len(turns) > 1
    assert cut > 300


def test_a_speaker_begins_a_line_whatever_white_space_is_before_it():
    words = "\n \n\t Human: one\r\n\n  Assistant: two Human: three\n\nHuman: four"
    expected = (user("one"), assistant("two Human: three"), user("four"))
    assert turns_of_text(words) == expected


@pytest.mark.parametrize("unit", ["[INST]", "\n", "\n ", "### ", "<|user|>", "[INST] a [/INST] "])
def test_a_long_text_of_marks_takes_no_time(unit):
    start = time.process_time()
    turns_of_text(unit * 100_000)
    assert time.process_time() - start < 5
