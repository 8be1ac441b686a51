"""What goes into a store: votes of named people, pairs to be judged, gold questions; twice is once, and nothing breaks."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from tests.preferences.conftest import people
from tests.preferences.test_work import check

from tether.core.errors import DataError
from tether.core.types import Comparison, assistant, user
from tether.data.sources import Quarantine, read
from tether.preferences.exchange import Case, Said, cases, comparisons, gold_answers, votes, workload
from tether.preferences.exporting import export
from tether.preferences.importing import import_cases, plain, read_cases
from tether.preferences.store import Answer, Question, Store, StoreError
from tether.preferences.work import Verdict, Work


def said(**preferences):
    return [{"annotator": name, "preference": value} for name, value in preferences.items()]


VOTED = [
    {"prompt": "p", "chosen": "a", "rejected": "b", "annotations": said(Ada=1, Bo=0.3)},
    {"prompt": "p", "chosen": "c", "rejected": "a", "annotations": said(Ada=-1, Bo=1)},
    {"prompt": "q", "chosen": "d", "rejected": "e", "topic": "law", "chosen_model": "m1", "rejected_model": "m2"},
]


def lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_votes_become_judgments_and_pairs_without_any_are_asked(store, tmp_path):
    path = lines(tmp_path / "pairs.jsonl", VOTED)
    found = import_cases(store, read_cases(path))
    assert (found.rows, found.answers, found.tasks, found.judgments, found.repeated) == (3, 5, 3, 4, 0)
    assert {w.name: w.judged for w in workload(store)} == {"Ada": 2, "Bo": 2} and {w.access for w in workload(store)} == {
        "imported"
    }
    check(store)
    (done,) = comparisons(store, "soft", names=True)
    assert done.chosen == (assistant("a"),) and done.probability == 1.0 and done.id == "pairs:1"
    assert {a.annotator: a.preference for a in done.annotations} == {"Ada": 1.0, "Bo": pytest.approx(1 / 3)}
    assert store.counts()["tasks_expert"] == 1  # Ada and Bo differ
    work, (name,) = Work(store), [row.id for row in store.annotators() if row.name == "Ada"]
    store.invite("Ada")
    held = work.next(name)
    assert {m.content for side in held.sides for m in side} == {"d", "e"}
    work.judge(held.assignment, name, Verdict("first"))
    (asked,) = [c for c in comparisons(store) if c.prompt == (user("q"),)]
    assert asked.metadata["topic"] == "law" and {asked.metadata["chosen_model"], asked.metadata["rejected_model"]} == {"m1", "m2"}
    assert asked.metadata["chosen_model"] == ("m1" if asked.chosen == (assistant("d"),) else "m2")


def test_the_same_file_twice_changes_nothing_and_new_votes_join(store, tmp_path):
    path = lines(tmp_path / "pairs.jsonl", VOTED)
    import_cases(store, read_cases(path))
    before, again = store.counts(), import_cases(store, read_cases(path))
    assert store.counts() == before and (again.tasks, again.judgments, again.repeated) == (0, 0, 4)
    other = [
        {
            **VOTED[0],
            "chosen": "b",
            "rejected": "a",
            "annotations": [{"annotator": "Cy", "preference": 1}, {"annotator": "Di", "preference": 1}],
        }
    ]
    joined = import_cases(store, read_cases(lines(tmp_path / "more.jsonl", other)))
    assert (joined.tasks, joined.judgments) == (0, 2)
    check(store)
    assert store.counts()["tasks_expert"] == 2  # two for a, two for b


@pytest.mark.parametrize(("ask", "states"), [(None, "done"), (1, "done"), (2, "done"), (3, "open")])
def test_ask_says_how_many_judge_a_pair_its_judges_included(store, tmp_path, ask, states):
    import_cases(store, read_cases(lines(tmp_path / "x.jsonl", VOTED[:1])), ask=ask)
    (case,) = cases(store, states=("open", "done"))
    assert case.state == states and case.needed == max(ask or 0, 2)
    check(store)


def test_labels_of_a_file_count_as_judgments_or_as_known_answers(store, tmp_path):
    rows = [{"prompt": f"p{n}", "chosen": f"good {n}", "rejected": f"bad {n}", "tie": n == 3} for n in range(20)]
    path = lines(tmp_path / "pairs.jsonl", rows)
    import_cases(store, read_cases(path, labels="the data set"))
    found = list(comparisons(store))
    assert len(found) == 20 and [c.tie for c in found] == [n == 3 for n in range(20)]
    assert all("good" in c.chosen[0].content for c in found if not c.tie)
    sides = Counter(case.said[0].choice for case in cases(store))
    assert sides["first"] > 3 < sides["second"]  # which side is better cannot be told from where it lies
    import_cases(store, read_cases(path, gold=True), round="gold")
    known = gold_answers(store)
    assert Counter(known.values()) == Counter(vote.choice for vote in votes(store)) and len(known) == 20
    assert all(known[vote.item] == vote.choice for vote in votes(store))


def test_a_store_copied_through_a_file_says_the_same(store, tmp_path):
    import_cases(store, read_cases(lines(tmp_path / "pairs.jsonl", [*VOTED, {**VOTED[2], "prompt": "r"}])), ask=2)
    work = Work(store)
    for name in people(store, 2):
        while held := work.next(name):
            work.judge(
                held.assignment, name, Verdict("first" if held.task % 2 else "both_bad", strength=2 if held.task % 2 else None)
            )
    for name in people(store, 1, "expert")[:1]:
        while held := work.next(name):
            work.judge(held.assignment, name, Verdict("second"))
    export(store, tmp_path / "one.jsonl", names=True)
    other = Store(tmp_path / "other.db")
    import_cases(other, read_cases(tmp_path / "one.jsonl"))
    check(other)
    export(other, tmp_path / "two.jsonl", names=True)
    one, two = (sorted(read(tmp_path / f"{n}.jsonl", Comparison), key=lambda c: c.id) for n in ("one", "two"))
    # A tie has no better side, and that both were bad is more than a preference of 0 says.
    assert [(c.chosen if not c.tie else None, c.probability, c.tie, c.margin, c.annotations) for c in one] == [
        (c.chosen if not c.tie else None, c.probability, c.tie, c.margin, c.annotations) for c in two
    ]
    assert [c.metadata.get("settled_by") for c in one] == [c.metadata.get("settled_by") for c in two]
    assert other.counts()["tasks_settled"] == store.counts()["tasks_settled"] > 0


def test_bad_rows_are_set_aside_and_the_rest_goes_in(store, tmp_path):
    rows = [*VOTED, {"prompt": "same", "chosen": "x", "rejected": "x", "tie": True}, {"prompt": "p", "chosen": ""}]
    quarantine = Quarantine()
    found = import_cases(store, read_cases(lines(tmp_path / "pairs.jsonl", rows), quarantine=quarantine))
    assert found.rows == 3 and quarantine.count == 2 and set(quarantine.reasons) == {"equal responses", "missing text"}
    with pytest.raises(DataError, match="answers and no comparisons"):
        list(read_cases(lines(tmp_path / "a.jsonl", [{"prompt": "p", "responses": ["x", "y"]}])))
    with pytest.raises(DataError, match="neither"):
        list(read_cases(tmp_path / "pairs.jsonl", fields=("a", "b", "c")))


def test_a_name_that_is_empty_is_refused_and_a_prefix_keeps_people_apart(store):
    sides = [Answer((user("p"),), (assistant(str(k)),)) for k in range(2)]
    nobody = Case(sides[0], sides[1], (Said(" ", "first"),))
    with pytest.raises(StoreError, match="no name"):
        import_cases(store, [nobody])
    named = Case(sides[0], sides[1], (Said("Ada", "first"),))
    import_cases(store, [named])
    import_cases(store, [named], prefix="lab-")
    assert {w.name for w in workload(store)} == {"Ada", "lab-Ada"}
    check(store)


def test_an_import_beside_people_at_work_keeps_every_place(store):
    sides = [[Answer((user(f"p{n}"),), (assistant(f"{k} {n}"),)) for k in range(2)] for n in range(6)]
    store.add_answers(side for pair in sides for side in pair)
    store.add_questions(Question(a.prompt_id, a.id, b.id, needed=2) for a, b in sides)
    work, (ada, bo) = Work(store), people(store, 2)
    held = work.next(ada)  # a lease that is out while judgments arrive
    work.judge(work.next(bo).assignment, bo, Verdict("first"))
    import_cases(store, [Case(a, b, (Said("Cy", "first"), Said("Di", "first"))) for a, b in sides])
    work.judge(held.assignment, ada, Verdict("first"))
    check(store)
    assert store.counts()["tasks_done"] == 6


def test_values_that_json_lacks_become_texts_or_null():
    assert plain({"a": float("nan"), 2: (1, "x"), "b": {3}, "c": b"x"}) == {"a": None, "2": [1, "x"], "b": [3], "c": "b'x'"}


def test_published_votes_give_the_published_shares(store, tether_data):
    path = next((tether_data / "pandalm").glob("*.json*"))
    wanted = {}
    for row in read(path, Comparison):
        wanted.setdefault((row.prompt, frozenset((row.chosen, row.rejected))), row)
    found = import_cases(store, read_cases(path))
    check(store)
    assert found.judgments > 2000
    for row in comparisons(store, "soft", unfinished=True):
        published = wanted[row.prompt, frozenset((row.chosen, row.rejected))]
        share = published.probability if published.chosen == row.chosen else 1 - published.probability
        assert row.probability == pytest.approx(share) and row.tie == published.tie
