"""Prompts with several answers, in the forms in which they come; and the pairs that are asked
about.
"""

from __future__ import annotations

import itertools

import pytest
from tests.people.annotation.conftest import people
from tests.people.annotation.test_importing import lines

from tether.core.errors import ConfigError, DataError
from tether.core.types import assistant, user
from tether.data.sources import Quarantine
from tether.people.annotation.answers import ask_pairs, import_answers, read_answers
from tether.people.annotation.exchange import comparisons, votes
from tether.people.annotation.importing import format_of
from tether.people.annotation.rankings import ranked
from tether.people.annotation.work import Work
from tether.people.labels.pairs import PairsConfig
from tether.people.labels.votes import Opinion

SAMPLING = {"temperature": 0.7}
OBJECT = {"text": "b", "model": "other", "score": 2, "seed": 5}
ASKED = [{"role": "user", "content": "q"}]
ROWS = [
    {"prompt": "p", "responses": ["a", OBJECT, " "], "model": "m", "sampling": SAMPLING},
    {
        "messages": ASKED,
        "responses": ["c", "d"],
        "scores": [0.5, None],
        "members": [[1, 3], [2, 2]],
        "kind": "x",
        "id": "p7",
    },
    {"id": "p3", "responses": ["e"]},
    {"prompt": "r", "response": "f", "stop": "length", "id": "p0"},
    {"prompt": "r", "responses": ["x", "y"], "scores": [1]},
    {"prompt": "r"},
]


def test_every_form_of_row_gives_its_answers(tmp_path):
    prompts, bad = lines(tmp_path / "prompts.jsonl", [{"id": "p3", "prompt": "s"}]), Quarantine()
    a, b, c, d, e, f = read_answers(
        lines(tmp_path / "a.jsonl", ROWS),
        prompts=prompts,
        quarantine=bad,
        model="default",
    )
    assert [x.response for x in (a, b, c, d, e, f)] == [(assistant(t),) for t in "abcdef"]
    assert [x.prompt for x in (a, c, e, f)] == [(user(t),) for t in "pqsr"]
    assert [x.model for x in (a, b, c)] == [
        "m",
        "other",
        "default",
    ] and a.sampling == SAMPLING == b.sampling
    assert (b.score, b.details, a.score) == (2.0, {"seed": 5}, None)
    assert (c.score, c.spread, c.details["members"]) == (0.5, 1.0, [1.0, 3.0]) and (
        d.score,
        d.spread,
    ) == (2.0, 0.0)
    assert c.prompt_details == {"kind": "x"} and c.details["id"] == "p7" and e.prompt_details == {}
    assert f.details == {"stop": "length", "id": "p0"}
    assert bad.reasons == {"uneven lists": 1, "no answer": 1}


def test_rows_that_name_an_unknown_prompt_or_hold_none_are_refused(tmp_path):
    path = lines(tmp_path / "a.jsonl", [{"id": "p9", "responses": ["x", "y"]}])
    with pytest.raises(DataError, match="--prompts"):
        list(read_answers(path))
    assert format_of(path) == "answers"
    assert (
        format_of(lines(tmp_path / "b.jsonl", [{"prompt": "p", "responses": ["x"], "scores": [1]}]))
        == "auto"
    )


def test_scores_given_again_replace_and_everything_else_stays(store, tmp_path):
    rows = [
        {"prompt": f"p{n}", "responses": [f"{k} {n}" for k in range(3)], "model": "m"}
        for n in range(4)
    ]
    path = lines(tmp_path / "a.jsonl", rows)
    assert import_answers(store, read_answers(path))["answers"] == 12
    with pytest.raises(ConfigError, match="needs score"):
        ask_pairs(store, PairsConfig(strategy="uncertain"))
    scored = [{**row, "model": "n", "scores": [0.0, 0.1 * n, 9.0]} for n, row in enumerate(rows)]
    assert import_answers(store, read_answers(lines(tmp_path / "b.jsonl", scored)))["answers"] == 0
    assert (
        ask_pairs(store, PairsConfig(strategy="uncertain", num_pairs=2, overlap=2), round="r") == 2
    )
    work, (name,) = Work(store), people(store, 1)
    shown = []
    while held := work.next(name):
        shown.append({m.content for side in held.sides for m in side})
        work.judge(held.assignment, name, Opinion("first"))
    assert shown == [{"0 0", "1 0"}, {"0 1", "1 1"}]  # the nearest scores, the nearest first


def test_a_score_that_is_given_alone_replaces_the_members_before(store, tmp_path):
    rows = [{"prompt": f"p{n}", "responses": [f"{k} {n}" for k in range(2)]} for n in range(2)]
    for scores in (
        ({"members": [[0, 0], [0, 0]]}, {"members": [[0, 0], [1, 1]]}),
        ({"scores": [0, 9]}, {"scores": [4, 4]}),
    ):
        told = [{**row, **some} for row, some in zip(rows, scores, strict=True)]
        import_answers(store, read_answers(lines(tmp_path / "a.jsonl", told)))
    ask_pairs(store, PairsConfig(strategy="uncertain", num_pairs=1))
    held = Work(store).next(people(store, 1)[0])
    assert held.prompt == (user("p1"),)  # the members said p0
    with pytest.raises(ConfigError, match="needs members"):
        ask_pairs(store, PairsConfig(strategy="information"))


def test_the_id_of_a_row_makes_no_group_of_its_own(store, tmp_path):
    rows = [
        {"id": f"row {n}", "prompt": f"p{n}", "responses": ["x", "y"], "topic": "law"}
        for n in range(3)
    ]
    import_answers(store, read_answers(lines(tmp_path / "a.jsonl", rows)))
    ask_pairs(store, PairsConfig(num_pairs=3))
    work, (name,) = Work(store), people(store, 1)
    while held := work.next(name):
        work.judge(held.assignment, name, Opinion("first"))
    assert [vote.slices for vote in votes(store)] == [{"strategy": "random", "topic": "law"}] * 3
    assert {row.metadata["chosen_details"]["id"] for row in comparisons(store)} == {
        "row 0",
        "row 1",
        "row 2",
    }


def test_answers_that_are_calls_are_asked_about_and_ranked_whole(store, tmp_path):
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {}}}
    other = {**call, "function": {"name": "g", "arguments": {}}}
    responses = [
        [{"role": "assistant", "content": "", "tool_calls": [one]}] for one in (call, other)
    ]
    path = lines(tmp_path / "a.jsonl", [{"prompt": "p", "responses": responses}])
    import_answers(store, read_answers(path))
    assert ask_pairs(store, PairsConfig(num_pairs=5), round="1") == 1
    store.invite("Ada")
    work = Work(store)
    (ada,) = store.annotators()
    work.judge(work.next(ada.id).assignment, ada.id, Opinion("first"))
    (row,) = ranked(store)
    assert all(one[0]["tool_calls"] for one in row["responses"]) and len(row["responses"]) == 2


def test_no_pair_is_asked_twice_and_in_the_end_there_are_none_left(store, tmp_path):
    rows = [{"prompt": f"p{n}", "responses": [f"{k} {n}" for k in range(3)]} for n in range(4)]
    import_answers(store, read_answers(lines(tmp_path / "a.jsonl", rows)))
    counts = [ask_pairs(store, PairsConfig(num_pairs=5, seed=n), round=str(n)) for n in range(4)]
    assert counts == [5, 5, 2, 0] and store.counts()["tasks"] == 4 * len(
        list(itertools.combinations(range(3), 2)),
    )
