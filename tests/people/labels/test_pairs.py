import itertools
import math
import random
from collections import Counter

import pytest
from scipy.stats import binomtest, entropy

from tether.core.errors import ConfigError, DataError
from tether.people.labels.pairs import PairsConfig, Response, choose_pairs, shown_left

SCORED = ["uncertain", "information", "disagreement"]


def pool(prompts=30, responses=5, seed=0):
    draw = random.Random(seed)
    members = lambda: tuple(draw.gauss(0, 1) for _ in range(4))  # noqa: E731
    return {
        f"prompt-{p}": [
            Response(
                f"r{k}",
                "word " * draw.randint(1, 60) + str(k),
                draw.gauss(0, 1),
                draw.uniform(0.1, 1),
                members=members(),
            )
            for k in range(responses)
        ]
        for p in range(prompts)
    }


def settings(strategy="random", **more):
    return PairsConfig.model_validate({"strategy": strategy, **more})


def response(id, text="words", **more):
    return Response(id, f"{text} {id}", **more)


@pytest.mark.parametrize("strategy", ["random", *SCORED, "length_matched", "ranking"])
def test_pairs_depend_on_the_seed_and_on_no_order(strategy):
    responses, draw = pool(), random.Random(1)
    config = settings(strategy, num_pairs=20, seed=5, shared_share=0.25, shared_overlap=3)
    pairs = choose_pairs(responses, config)
    turned = {name: draw.sample(responses[name], 5) for name in draw.sample(sorted(responses), 30)}
    assert choose_pairs(turned, config) == pairs and len(pairs) == 20
    assert len({pair.item for pair in pairs}) == 20 and all(
        pair.first < pair.second for pair in pairs
    )
    if strategy not in SCORED:
        other = choose_pairs(responses, settings(strategy, num_pairs=20, seed=6))
        assert {pair.item for pair in other} != {pair.item for pair in pairs}
    values = [pair.value for pair in pairs]
    assert values == sorted(values, reverse=True)


@pytest.mark.parametrize("strategy", ["random", "ranking"])
def test_another_prompt_changes_no_draw(strategy):
    config = settings(strategy, num_pairs=1000)
    few, many = ([p.item for p in choose_pairs(pool(prompts=n), config)] for n in (10, 11))
    assert [item for item in many if not item.startswith("prompt-10/")] == few


def test_equal_and_empty_texts_are_never_paired():
    texts = ["one", " one\n", "", "  ", "two", "two three", "two  three"]
    responses = {"p": [Response(f"r{k}", text) for k, text in enumerate(texts)]}
    for strategy in ("random", "ranking"):
        pairs = choose_pairs(responses, settings(strategy))
        assert {(pair.first, pair.second) for pair in pairs} == {
            ("r0", "r4"),
            ("r0", "r5"),
            ("r4", "r5"),
        }
    assert choose_pairs({"p": responses["p"][:4], "q": []}, settings()) == []
    with pytest.raises(DataError, match="one id"):
        choose_pairs({"p": [Response("r", "x"), Response("r", "y")]}, settings())


def test_uncertain_takes_those_nearest_one_half():
    responses = {
        "p": [
            response(name, score=score) for name, score in zip("abc", (0.0, 0.3, 2.0), strict=True)
        ],
    }
    pairs = choose_pairs(responses, settings("uncertain"))
    assert [(pair.first, pair.second) for pair in pairs] == [("a", "b"), ("b", "c"), ("a", "c")]
    for pair, difference in zip(pairs, (0.3, 1.7, 2.0), strict=True):
        chance = 1 / (1 + math.exp(-difference))
        assert pair.value == pytest.approx(entropy([chance, 1 - chance], base=2))


def test_information_and_disagreement_look_at_the_members():
    responses = {
        "split": [response("a", members=(3.0, -3.0)), response("b", members=(0.0, 0.0))],
        "unsure": [response("a", members=(0.1, 0.1)), response("b", members=(0.0, 0.0))],
        "moved": [response("a", members=(5.0, -5.0)), response("b", members=(5.0, -5.0))],
    }
    told = {pair.prompt: pair.value for pair in choose_pairs(responses, settings("information"))}
    chance = 1 / (1 + math.exp(-3))
    assert told["split"] == pytest.approx(1 - entropy([chance, 1 - chance], base=2))
    assert told["unsure"] == pytest.approx(0, abs=1e-12) and told["moved"] == pytest.approx(
        0,
        abs=1e-12,
    )
    # Members that differ about both responses in the same way do not differ about which is better.
    spread = {pair.prompt: pair.value for pair in choose_pairs(responses, settings("disagreement"))}
    assert spread == pytest.approx({"split": 3.0, "unsure": 0.0, "moved": 0.0})
    (alone,) = choose_pairs(
        {"p": [response("a", spread=0.3), response("b", spread=0.4)]},
        settings("disagreement"),
    )
    assert alone.value == pytest.approx(0.5)
    for strategy in SCORED:
        with pytest.raises(ConfigError, match="p lacks them"):
            choose_pairs({"p": [response("a", score=1.0), response("b")]}, settings(strategy))


def test_length_cannot_decide_between_matched_pairs():
    responses = {"p": [Response(f"r{length}", "x" * length) for length in (100, 109, 112, 200)]}
    pairs = choose_pairs(responses, settings("length_matched"))
    assert {(pair.first, pair.second) for pair in pairs} == {("r109", "r112"), ("r100", "r109")}
    assert (
        len(
            choose_pairs(
                responses,
                settings("length_matched", length_difference=0.11, per_prompt=9),
            ),
        )
        == 3
    )


def test_no_prompt_takes_all_and_what_was_asked_is_not_asked_again():
    responses = pool()
    pairs = choose_pairs(responses, settings(num_pairs=60, per_prompt=2))
    assert set(Counter(pair.prompt for pair in pairs).values()) == {2} and len(pairs) == 60
    asked = {pair.item for pair in pairs}
    again = choose_pairs(responses, settings(num_pairs=60, per_prompt=2), asked=asked)
    assert len(again) == 60 and not asked & {pair.item for pair in again}


def test_a_ranking_is_whole():
    pairs = choose_pairs(pool(), settings("ranking", num_pairs=20, ranked=4))
    by_prompt = {
        prompt: [*group] for prompt, group in itertools.groupby(pairs, key=lambda pair: pair.prompt)
    }
    assert len(by_prompt) == 3 and sum(map(len, by_prompt.values())) == 18
    for group in by_prompt.values():
        names = {name for pair in group for name in (pair.first, pair.second)}
        assert len(names) == 4 and {(pair.first, pair.second) for pair in group} == set(
            itertools.combinations(sorted(names), 2),
        )


def test_sides_are_fair_and_always_the_same():
    left = [
        shown_left(0, f"item-{n}", f"person-{k}") == "first" for n in range(500) for k in range(4)
    ]
    assert binomtest(sum(left), len(left)).pvalue > 0.01
    assert left == [
        shown_left(0, f"item-{n}", f"person-{k}") == "first" for n in range(500) for k in range(4)
    ]
    changed = sum(
        shown_left(1, f"item-{n}", "person-0") != shown_left(0, f"item-{n}", "person-0")
        for n in range(500)
    )
    assert binomtest(changed, 500).pvalue > 0.01


def test_every_pair_gets_its_people():
    config = settings(num_pairs=50, overlap=2, shared_share=0.2, shared_overlap=4)
    pairs = choose_pairs(pool(), config)
    assert Counter(pair.people for pair in pairs) == {2: 40, 4: 10}
    # Those judged by many are drawn from all, whatever their value: agreement on them is to stand
    # for the rest.
    shared = {"num_pairs": 50, "shared_share": 0.2, "shared_overlap": 4}
    plans = [choose_pairs(pool(), settings("uncertain", seed=seed, **shared)) for seed in range(20)]
    drawn = [n for plan in plans for n, pair in enumerate(plan) if pair.people == 4]
    assert len(drawn) == 200 and binomtest(sum(n < 25 for n in drawn), 200).pvalue > 0.01


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strategy": "random", "ranked": 3}, "ranked has no effect"),
        ({"strategy": "ranking", "per_prompt": 3}, "per_prompt has no effect"),
        ({"strategy": "random", "length_difference": 0.2}, "length_difference has no effect"),
        ({"shared_overlap": 3}, "shared_overlap has no effect"),
        ({"shared_share": 0.1, "overlap": 3, "shared_overlap": 3}, "above overlap"),
    ],
)
def test_options_without_effect_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        PairsConfig(**options)
