"""Further questions on a pair, and the better answers that judges write: from the store to files."""

from __future__ import annotations

import json

import pytest
from sqlalchemy import text
from tests.people.annotation.conftest import filled, people

from tether.core.errors import ConfigError
from tether.core.types import Comparison, Demonstration
from tether.data.rows import record_row
from tether.data.sources import read
from tether.people.annotation.exchange import comparisons, votes
from tether.people.annotation.exporting import demonstrations, export_labels, kept_back
from tether.people.annotation.importing import import_cases, read_cases
from tether.people.annotation.store import Store, StoreError, question_of
from tether.people.annotation.work import Work
from tether.people.labels.agreement import agreement_report
from tether.people.labels.votes import Opinion


def judged(store, *rows):
    """One pair a row, judged by as many people as it has opinions."""
    filled(store, prompts=len(rows), answers=2, needed=len(rows[0]))
    work = Work(store, gold_every=0)
    for place, name in enumerate(people(store, len(rows[0]))):
        for row in rows:
            work.judge(work.next(name).assignment, name, row[place])


def said(choice, **answers):
    return Opinion(
        choice,
        ratings={f"{name}/better/{side}": value for name, (side, value) in answers.items()},
    )


@pytest.mark.parametrize(
    ("ratings", "expected"),
    [
        ({"helpful/better/second": 5}, ("second", None)),
        ({"helpful/better/second": 2}, ("second", 2)),
        ({"helpful/better/tie": 5}, ("tie", None)),
        ({"helpful/first": 2, "helpful/second": 4}, ("second", None)),
        ({"helpful/first": 4, "helpful/second": 4}, ("tie", None)),
        ({"helpful/first": 4}, None),
        ({"kind/better/second": 5}, None),
        ({}, None),
    ],
)
def test_an_opinion_on_a_question_is_its_answer_or_the_higher_rating(ratings, expected):
    answer = Opinion("first", strength=3, ratings=ratings).on("helpful")
    assert (answer and (answer.choice, answer.strength)) == expected
    assert Opinion("first", strength=3, ratings=ratings).on(None).strength == 3


def test_a_recipe_of_questions_is_kept_or_refused(store):
    store.set_guidelines(None, criteria=["kind", " helpful :two", "tone: scale"])
    assert store.guidelines().criteria == ["kind", "helpful: two", "tone: scale"]
    assert question_of("helpful: two") == ("helpful", ["left5", "right5"])
    assert question_of("kind") == ("kind", []) == ("kind", question_of("kind")[1])
    assert [entry[-1] for entry in question_of("tone: scale")[1]] == list("3215123")
    for bad in (["helpful: twoo"], ["a: two", "a"], [": two"], ["x" * 31 + ": two"], ["a:b: two"]):
        with pytest.raises(ConfigError, match="question is written NAME: KIND"):
            store.set_guidelines(None, criteria=bad)


def test_labels_and_agreement_are_those_of_the_question(store, tmp_path):
    judged(
        store,
        (said("first", helpful=("second", 5)), said("first", helpful=("second", 5))),
        (said("second", helpful=("first", 3)), said("second", helpful=("second", 1))),
        (said("tie"), said("tie")),
    )
    overall, helpful = list(comparisons(store)), list(comparisons(store, question="helpful"))
    assert [c.tie for c in overall] == [False, False, True]
    assert len(helpful) == 2 and [c.tie for c in helpful] == [False, True]
    assert (helpful[0].chosen, helpful[0].margin) == (overall[0].rejected, None)
    (soft, even) = comparisons(store, "soft", question="helpful")
    assert (soft.probability, even.probability) == (1.0, 0.5)
    assert [v.choice for v in votes(store, question="helpful")].count("tie") == 0
    report = agreement_report(list(votes(store, question="helpful")))
    assert report["overall"]["raw"]["value"] == 0.5 and report["num_items"] == 2
    for name, target in (("a.jsonl", "jsonl"), ("a.parquet", "parquet")):
        assert export_labels(store, tmp_path / name, target, question="helpful") == 2
        assert len(list(read(tmp_path / name, Comparison))) == 2
    with_ties = kept_back(store, 2, question="helpful")
    assert with_ties == {"without an answer to --question, or below --least": 1}
    assert store.questions() == ["helpful"]
    with pytest.raises(StoreError, match="Answered questions: helpful"):
        export_labels(store, tmp_path / "b.jsonl", question="helpfull")
    assert not (tmp_path / "b.jsonl").exists()


@pytest.mark.parametrize("target", ["jsonl", "parquet", "label-studio", "argilla"])
def test_answers_survive_an_export_and_an_import(store, tmp_path, target):
    judged(store, (said("first", helpful=("second", 2), harmless=("first", 5)),))
    path = tmp_path / ("x.parquet" if target == "parquet" else "x.json")
    export_labels(store, path, target)
    other = Store(tmp_path / "other.db")
    import_cases(other, read_cases(path))
    for question in (None, "helpful", "harmless"):
        (ours,), (theirs,) = (
            comparisons(one, question=question, names=True) for one in (store, other)
        )
        assert (ours.chosen, ours.margin) == (theirs.chosen, theirs.margin)
    other.close()


def test_better_answers_become_demonstrations(store, tmp_path):
    odd = 'Say "no" \u2028 <script>\n\nand 人'
    judged(store, (Opinion("first", correction=odd), Opinion("second")), (Opinion("tie"),) * 2)
    (one,) = demonstrations(store)
    assert (one.messages[-1].content, one.messages[0].content) == (odd, "prompt 0")
    assert one.metadata["annotator"] == "annotator-1"
    assert next(demonstrations(store, names=True)).metadata["annotator"] == "annotator 0"
    assert list(demonstrations(store, round="other")) == []
    path = tmp_path / "sft.jsonl"
    path.write_text(json.dumps(record_row(one)) + "\n")
    (again,) = read(path, Demonstration)
    assert (again.messages, again.id) == (one.messages, one.id)
    Work(store).undo(people(store, 2)[0])  # takes back the tie: the other one stays
    assert len(list(demonstrations(store))) == 1
    Work(store).undo(people(store, 2)[0])
    assert list(demonstrations(store)) == []  # taken back with its judgment
    (back,) = [held.before for held in [Work(store).next(people(store, 2)[0])] if held]
    assert back is not None and back.correction == odd


@pytest.mark.parametrize("correction", ["x" * 20_001, "x\0y"])
def test_a_better_answer_has_bounds(store, correction):
    filled(store)
    work, (name,) = Work(store), people(store, 1)
    held = work.next(name)
    with pytest.raises(StoreError, match="a correction has at most 20000"):
        work.judge(held.assignment, name, Opinion("first", correction=correction))
    work.judge(held.assignment, name, Opinion("first", correction="x" * 20_000))


def test_a_store_from_before_questions_opens_with_all_that_it_holds(tmp_path):
    path = tmp_path / "old.db"
    store = Store(path)
    judged(store, (Opinion("first", comment="so", ratings={"helpful/first": 5}),))
    store.set_guidelines("g", criteria=["helpful"])
    before = list(comparisons(store))
    with store.transaction() as session:  # the table as it was
        session.execute(text("ALTER TABLE judgments DROP COLUMN correction"))
    store.close()
    old = Store(path)
    assert list(comparisons(old)) == before and list(demonstrations(old)) == []
    assert old.guidelines().criteria == ["helpful"]
    filled(old, prompts=2, answers=2)
    (name,) = people(old, 1)
    work = Work(old, gold_every=0)
    work.judge(work.next(name).assignment, name, Opinion("first", correction="better"))
    assert len(list(demonstrations(old))) == 1
    old.close()
