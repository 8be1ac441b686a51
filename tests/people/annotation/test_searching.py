"""What a search finds is what a walk through all pairs finds."""

from __future__ import annotations

import random

import pytest
from tests.people.annotation.conftest import people

from tether.core.errors import ConfigError
from tether.core.types import assistant, user
from tether.people.annotation.exchange import cases
from tether.people.annotation.searching import PAGE, Search, search
from tether.people.annotation.store import Answer
from tether.people.annotation.tables import TaskRow
from tether.people.annotation.work import Work
from tether.people.labels.votes import Opinion
from tether.settings.reading import build

TEXTS = ["100% sure_thing", 'say "hi"', "back\\slash / % _", "Grüße 人", "}]", "role user content"]
TOPICS = ["code", "a=b", 'quo"te', "metadata"]


@pytest.fixture
def mixed(store):
    """Sixty pairs of many texts, tags and states."""
    draw = random.Random(0)
    for n in range(60):
        prompt = (user(f"{draw.choice(TEXTS)} {n}"), assistant("ok"), user(draw.choice(TEXTS)))
        sides = [Answer(prompt, (assistant(f"{draw.choice(TEXTS)} {k}"),), prompt_details={"topic": draw.choice(TOPICS)})
                 for k in range(2)]  # fmt: skip
        store.add_answers(sides)
        details = {"metadata": {"tags": [draw.choice(TOPICS)]}}
        store.add_tasks(
            [
                TaskRow(
                    prompt_id=sides[0].prompt_id,
                    first_id=sides[0].id,
                    second_id=sides[1].id,
                    round=draw.choice(["", "pilot"]),
                    details=details,
                ),
            ],
        )
    work = Work(store, gold_every=0)
    for number, name in enumerate(people(store, 2)):
        for _ in range(10 + number):
            held = work.next(name)
            if draw.random() < 0.3:
                work.flag(held.assignment, name, "odd")
            else:
                work.judge(held.assignment, name, Opinion("first"))
    return store


def walked(store, fits):
    return [case.number for case in cases(store, names=True) if fits(case)]


def all_found(store, **wanted):
    numbers = []
    after = 0
    while True:
        total, rows = search(store, Search(**wanted, after=after))
        numbers += [case.number for case in rows]
        if len(rows) < PAGE:
            assert total == len(numbers)
            return numbers
        after = numbers[-1]


@pytest.mark.parametrize(
    "text",
    [*TEXTS, "%", "_", "\\", "role", "user", "SURE", "grüße", '"', "ok", "no such", "'; DROP"],
)
def test_a_text_is_found_as_it_stands(mixed, text):
    def lower(word):
        return "".join(c.lower() if c.isascii() else c for c in word)

    def fits(case):
        turns = (*case.first.prompt, *case.first.response, *case.second.response)
        return any(lower(text) in lower(turn.content) for turn in turns)

    assert all_found(mixed, text=text) == walked(mixed, fits)


@pytest.mark.parametrize("state", TaskRow.STATES)
@pytest.mark.parametrize("annotator", ["", "annotator 1", "nobody"])
def test_states_and_people(mixed, state, annotator):
    found = all_found(mixed, state=state, annotator=annotator)
    assert found == walked(
        mixed,
        lambda case: (
            case.state == state
            and (not annotator or annotator in [one.annotator for one in case.opinions])
        ),
    )


@pytest.mark.parametrize("tag", [*TOPICS, "pilot", "imported", "cod", "%"])
def test_tags_are_whole_and_name_their_fact(mixed, tag):
    def fits(case):
        facts = [case.round, case.first.prompt_details["topic"], *case.details["metadata"]["tags"]]
        keys = ["topic", "metadata", "tags"]
        return tag in [*facts, *keys]

    assert all_found(mixed, tag=tag) == walked(mixed, fits)
    named = all_found(mixed, tag=f"topic={tag}")
    assert named == walked(mixed, lambda case: case.first.prompt_details["topic"] == tag)


@pytest.mark.parametrize(
    "wanted",
    [{"text": "x" * 201}, {"text": "a\0b"}, {"state": "lost"}, {"after": -1}, {"words": "x"}],
)
def test_a_search_has_bounds(wanted):
    with pytest.raises(ConfigError, match="the search"):
        build(Search, wanted, where="the search")
