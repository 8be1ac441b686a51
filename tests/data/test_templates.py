"""Every chat template that an installed package ships, against transformers' own rendering: prompts,
and what is trained behind them. TETHER_TEMPLATES names folders with further templates.
"""

import random

import pytest
from benchmarks.templates import TALKS, Published, prefixes, published

from tether.core.types import Message, assistant, user

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
TEMPLATES = published()


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


def converse(name, talks):
    """Check every reply of the conversations, alone and among the others."""
    template = Published(TEMPLATES[name])
    for messages in talks:
        template.check_all(messages)
        for prefix in prefixes(messages):
            template.check(prefix)


def random_talks(name, trials):
    draw = random.Random(name)
    return [talk(draw, system=trial % 3 == 2) for trial in range(trials)]


def test_many_templates_are_installed():
    if not any("trl" in name for name in TEMPLATES):
        pytest.skip("needs trl, which ships chat templates")
    assert len(TEMPLATES) >= 50


@pytest.mark.parametrize("name", TEMPLATES)
def test_prompts_and_replies_are_what_transformers_renders(name):
    converse(name, [*TALKS.values(), *random_talks(name, 2)])


@pytest.mark.slow
@pytest.mark.parametrize("name", TEMPLATES)
def test_replies_are_what_transformers_renders_in_two_hundred_conversations(name):
    converse(name, random_talks(name, 200))
