"""What votes lead to: sure labels alone, the others to the experts, and answers and models in an
order.
"""

from __future__ import annotations

import itertools
import json
import math

import pytest
from scipy.optimize import minimize
from tests.people.annotation.conftest import people

from tether.core.types import Comparison, assistant, user
from tether.data.sources import read
from tether.people.annotation.exchange import comparisons
from tether.people.annotation.exporting import export_labels
from tether.people.annotation.rankings import escalate, ranked, standings
from tether.people.annotation.store import Answer, Store
from tether.people.annotation.tables import TaskRow
from tether.people.annotation.work import Work
from tether.people.labels.votes import Opinion

CHOICES = (
    ("first", "first", "first"),
    ("first", "first", "second"),
    ("first", "tie", "both_bad"),
    ("second", "second", "tie"),
)


@pytest.fixture
def judged(tmp_path):
    """Four pairs, each judged by three people, in the order of CHOICES."""
    store = Store(tmp_path / "p.db")
    pairs = [
        [Answer((user(f"q{n}"),), (assistant(f"{k} {n}"),)) for k in "ab"]
        for n in range(len(CHOICES))
    ]
    store.add_answers(answer for pair in pairs for answer in pair)
    store.add_tasks(
        TaskRow(prompt_id=a.prompt_id, first_id=a.id, second_id=b.id, needed=3) for a, b in pairs
    )
    work = Work(store)
    for place, name in enumerate(people(store, 3)):
        while held := work.next(name):
            work.judge(held.assignment, name, Opinion(CHOICES[held.task - 1][place]))
    yield store
    store.close()


def test_labels_with_little_behind_them_can_be_left_out(judged, tmp_path):
    def said(least):
        return sorted(c.prompt[0].content for c in comparisons(judged, "soft", least=least))

    assert [said(least) for least in (0.0, 0.6, 0.67)] == [
        ["q0", "q1", "q2", "q3"],
        ["q0", "q1", "q2", "q3"],
        ["q0"],
    ]
    assert export_labels(judged, tmp_path / "sure.jsonl", least=0.67) == 1


def test_pairs_that_people_do_not_agree_on_go_to_the_experts_and_come_back_settled(judged):
    assert escalate(judged, 0.6) == 0 and judged.counts()["tasks_expert"] == 0
    assert (
        escalate(judged, 0.67) == 3
        and judged.counts()["tasks_expert"] == 3
        and escalate(judged, 0.67) == 0
    )
    (eve,) = people(judged, 1, "expert")
    work = Work(judged)
    for _ in range(3):
        work.judge(work.next(eve).assignment, eve, Opinion("second"))
    labels = list(comparisons(judged, "soft", least=0.99))
    assert len(labels) == 4 and sum(c.metadata.get("settled_by") is not None for c in labels) == 3
    assert escalate(judged, 1.0) == 0


def test_an_escalation_is_also_of_pairs_that_wait_for_an_expert_already(judged):
    """Of 1 to 1 with a tie no soft label goes out from there on."""
    pair = [Answer((user("q4"),), (assistant(f"{k} 4"),)) for k in "ab"]
    judged.add_answers(pair)
    sides = {"first_id": pair[0].id, "second_id": pair[1].id}
    judged.add_tasks([TaskRow(prompt_id=pair[0].prompt_id, needed=3, **sides)])
    work = Work(judged)
    for name, choice in zip(people(judged, 3), ("first", "second", "tie"), strict=True):
        work.judge(work.next(name).assignment, name, Opinion(choice))
    assert judged.counts()["tasks_expert"] == 1
    assert [label.tie for label in comparisons(judged, "soft")][-1]
    assert escalate(judged, 0.5) == 1 and judged.counts()["tasks_expert"] == 1
    assert len(list(comparisons(judged, "soft"))) == 4


def test_an_escalated_pair_waits_for_an_expert_although_people_judge_it_again(judged):
    assert escalate(judged, 0.67) == 3
    work, last = Work(judged), judged.counts()["annotators"]
    for choice in ("tie", "second"):  # the majority of the fourth pair stays what it was
        held = work.undo(last)
        work.judge(held.assignment, last, Opinion(choice))
        assert held.task == 4 and judged.counts()["tasks_expert"] == 3
    (eve,) = people(judged, 1, "expert")
    for _ in range(3):
        work.judge(work.next(eve).assignment, eve, Opinion("first"))
    assert judged.counts()["tasks_settled"] == 3 and judged.counts()["tasks_expert"] == 0


def test_answers_and_models_are_ordered_by_the_penalised_likelihood(tmp_path):
    """Against the likelihood itself, maximised by another program: each answer has a tie with an
    imaginary one.
    """
    store = Store(tmp_path / "p.db")
    names = ("weak", "middle", "strong")
    answers = [
        Answer((user(f"q{n}"),), (assistant(f"{k} of {n}"),), model=k)
        for n in range(2)
        for k in names
    ]
    store.add_answers(answers)
    pairs = [
        pair for n in range(2) for pair in itertools.combinations(answers[3 * n : 3 * n + 3], 2)
    ]
    store.add_tasks(
        TaskRow(prompt_id=a.prompt_id, first_id=a.id, second_id=b.id, needed=4) for a, b in pairs
    )
    work, wins = Work(store), {}
    for place, name in enumerate(people(store, 4)):
        while held := work.next(name):
            a, b = pairs[held.task - 1]
            better = (
                "second" if place < 3 or held.task == 2 else "first" if held.task != 5 else "tie"
            )
            work.judge(held.assignment, name, Opinion(better))
            for winner, loser in {"first": [(a, b)], "second": [(b, a)], "tie": [(a, b), (b, a)]}[
                better
            ]:
                key = answers.index(winner), answers.index(loser)
                wins[key] = wins.get(key, 0.0) + (0.5 if better == "tie" else 1.0)

    def fitted(keys, counts):
        def loss(s):
            at = dict(zip(keys, s, strict=True))
            games = sum(w * math.log1p(math.exp(at[b] - at[a])) for (a, b), w in counts.items())
            return games + sum(
                0.5 * (math.log1p(math.exp(-x)) + math.log1p(math.exp(x))) for x in s
            )

        best = minimize(loss, [0.0] * len(keys), tol=1e-12).x
        return {key: value - sum(best) / len(best) for key, value in zip(keys, best, strict=True)}

    rows = {row["prompt"][0]["content"]: row for row in ranked(store)}
    for n in range(2):
        mine = list(range(3 * n, 3 * n + 3))
        expected = fitted(mine, {pair: w for pair, w in wins.items() if pair[0] in mine})
        row = rows[f"q{n}"]
        assert row["models"] == ["strong", "middle", "weak"] and row["scores"] == sorted(
            row["scores"],
            reverse=True,
        )
        by_text = {answers[a].response[0].content: value for a, value in expected.items()}
        assert row["scores"] == pytest.approx(
            [by_text[text] for text in row["responses"]],
            abs=1e-4,
        )
    totals = {}
    for (a, b), count in wins.items():
        models = answers[a].model, answers[b].model
        totals[models] = totals.get(models, 0.0) + count
    table = {one.model: one for one in standings(store)}
    expected = fitted(list(names), totals)
    assert {name: one.score for name, one in table.items()} == pytest.approx(expected, abs=1e-4)
    assert sum(one.won for one in table.values()) == sum(one.lost for one in table.values()) == 23
    assert [table[name].tied for name in names] == [1, 0, 1]
    path = tmp_path / "ranked.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows.values()))
    found = list(read(str(path), Comparison))
    assert len(found) >= 2 and all(
        c.chosen[0].content.startswith(("strong", "middle")) for c in found
    )
