"""The gold judge's parts, with an embedder made by hand: every part must move with what it names,
and only with that.
"""

import pytest
import torch

from tether.core.errors import ConfigError
from tether.core.types import Prompt, user
from tether.quickstart import judges
from tether.quickstart.gold import ANCHORS, WEIGHTS, GoldJudge


class WordEmbedder:
    """Bag of words over a fixed random basis: texts that share words are near."""

    def embed(self, texts):
        rows = []
        for text in texts:
            vector = torch.zeros(256)
            for word in (
                text.lower()
                .replace(".", " ")
                .replace(",", " ")
                .replace("!", " ")
                .replace("?", " ")
                .split()
            ):
                generator = torch.Generator().manual_seed(
                    sum(ord(c) * 31**i for i, c in enumerate(word)) % 2**31,
                )
                vector += torch.randn(256, generator=generator)
            rows.append(torch.nn.functional.normalize(vector + 1e-6, dim=0))
        return torch.stack(rows)


BACKGROUND = [
    Prompt((user(text),), text, {"kind": kind})
    for kind in ANCHORS
    for text in (f"about {kind} one", f"about {kind} two")
]
PROMPT = Prompt((user("My grandmother sold her old piano yesterday."),), "p", {"kind": "bad_news"})


@pytest.fixture(scope="module")
def judge():
    usual = [
        "That's sad.",
        "That's so good!",
        "That's it.",
        *(f"{word} it is." for word in ("many", "words", "open", "these", "replies")),
    ]
    return GoldJudge(
        WordEmbedder(),
        lambda prompts, texts: [-3.0 - 3.0 * t.count("@") for t in texts],
        BACKGROUND,
        usual,
    )


def parts(judge, text, prompt=PROMPT):
    return judge.score_texts([prompt], [text])[0].parts


def test_the_value_is_the_weighted_sum(judge):
    score = judge.score_texts([PROMPT], ["I'm so sorry about the piano. It must hurt."])[0]
    assert score.value == pytest.approx(sum(WEIGHTS[k] * v for k, v in score.parts.items()))
    assert set(score.parts) == set(WEIGHTS) and all(0 <= v <= 1 for v in score.parts.values())


def test_a_cheerful_condolence_has_the_wrong_tone(judge):
    sorry, cheerful = (
        "I'm so sorry to hear that. It must hurt a lot.",
        ("Congratulations, that's wonderful news!"),
    )
    assert parts(judge, sorry)["tone"] > 0.8 > 0.2 > parts(judge, cheerful)["tone"]
    good = Prompt(PROMPT.messages, "g", {"kind": "good_news"})
    assert parts(judge, cheerful, good)["tone"] > 0.8 > 0.2 > parts(judge, sorry, good)["tone"]


def test_topic_needs_this_message(judge):
    assert (
        parts(judge, "Her old piano is sold.")["on_topic"]
        > parts(judge, "That is a pity indeed.")["on_topic"]
    )


@pytest.mark.parametrize(
    ("text", "part", "low", "high"),
    [
        ("This one is finished properly today and it shows.", "finished", 1, 1),
        ("This one just stops in the", "finished", 0, 0),
        ("one two three four five six seven eight nine ten", "fresh", 1, 1),
        ("so sad so sad so sad so sad so sad", "fresh", 0, 0),
        ("Grandmother sold her old piano yesterday, I hear that.", "fresh", 0, 0.4),
        ("Sorry.", "length", 0, 0),
        ("word " * 61, "length", 0, 0),
        ("word " * 20, "length", 1, 1),
        ("1. First thing\n2. Second thing", "plain", 0, 0),
        ("As an AI I cannot feel.", "plain", 0, 0),
        ("Sorry 🐦🐦🐦", "plain", 0, 0),
        ("Plain, honest words.", "plain", 1, 1),
        ("Words that follow.", "fluent", 0.8, 0.8),
        ("@ that words follow @.", "fluent", 0, 0),
    ],
)
def test_form(judge, text, part, low, high):
    assert low <= parts(judge, text)[part] <= high


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("It must hurt. Did your grandmother sell her old piano?", 1.0),
        ("It must hurt. You could ask who has her old piano now.", 1.0),
        ("It must hurt. And maybe visit her old piano yesterday.", 1.0),
        ("It must hurt. She sold her old piano yesterday.", 0.0),
        ("Did your grandmother sell her old piano?", 0.0),  # nothing but a question
        ("It must hurt. You could ask who has her old piano", 0.0),  # cut off
        ("What? Did your grandmother sell her old piano?", 0.5),  # an interrogation
        ("Who? Why? Did your grandmother sell her old piano?", 1 / 3),
        ("It must hurt. Would zebras dance?", 0.0),  # of something else
    ],
)
def test_a_next_step_asks_or_suggests_one_thing_about_the_message(judge, text, value):
    assert parts(judge, text)["next_step"] == pytest.approx(value, abs=0.02)


def test_an_opening_that_too_many_share_is_worth_nothing(judge):
    assert parts(judge, "That's a pity about the piano.")["opening"] == 0.0
    assert parts(judge, "A pity about the piano. That's sad.")["opening"] == 1.0
    assert GoldJudge(WordEmbedder(), lambda prompts, texts: [-3.0], BACKGROUND).usual == {}


def test_an_empty_reply_scores_nothing(judge):
    assert judge.score_texts([PROMPT], ["  "])[0].value == 0.0


def test_prompts_of_ones_own_are_told_that_they_need_another_judge():
    with pytest.raises(
        ConfigError,
        match=r"'mine' says none \(`kind`\)",
    ):
        judges.gold([PROMPT, Prompt((user("What is 2 and 2?"),), "mine")], ["yes", "four"])
