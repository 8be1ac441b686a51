"""What goes into a store: votes of named people, pairs to be judged, gold questions; twice is once,
and nothing breaks.
"""

from __future__ import annotations

import json
from collections import Counter

import pytest
from sqlalchemy import select
from tests.people.annotation.conftest import filled, people
from tests.people.annotation.test_work import check

from tether.core.errors import DataError
from tether.core.types import Comparison, assistant, user
from tether.data.sources import Quarantine, read
from tether.people.annotation.exchange import (
    Case,
    cases,
    comparisons,
    gold_answers,
    votes,
    workload,
)
from tether.people.annotation.exporting import export_labels
from tether.people.annotation.importing import import_cases, json_safe, read_cases
from tether.people.annotation.store import Answer, Store, StoreError
from tether.people.annotation.tables import ResponseRow, TaskRow
from tether.people.annotation.work import Work
from tether.people.labels.votes import Opinion


def said(**preferences):
    return [{"annotator": name, "preference": value} for name, value in preferences.items()]


VOTED = [
    {"prompt": "p", "chosen": "a", "rejected": "b", "annotations": said(Ada=1, Bo=0.3)},
    {"prompt": "p", "chosen": "c", "rejected": "a", "annotations": said(Ada=-1, Bo=1)},
    {
        "prompt": "q",
        "chosen": "d",
        "rejected": "e",
        "topic": "law",
        "chosen_model": "m1",
        "rejected_model": "m2",
    },
]


def lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_votes_become_judgments_and_pairs_without_any_are_asked(store, tmp_path):
    path = lines(tmp_path / "pairs.jsonl", VOTED)
    found = import_cases(store, read_cases(path))
    assert (
        found["rows"],
        found["answers"],
        found["tasks"],
        found["judgments"],
        found["repeated"],
    ) == (3, 5, 3, 4, 0)
    assert {w.name: w.judged for w in workload(store)} == {"Ada": 2, "Bo": 2} and {
        w.access for w in workload(store)
    } == {"imported"}
    check(store)
    done, even = comparisons(store, "soft", names=True)
    assert done.chosen == (assistant("a"),) and done.probability == 1.0 and done.id == "pairs:1"
    assert {a.annotator: a.preference for a in done.annotations} == {
        "Ada": 1.0,
        "Bo": pytest.approx(1 / 3),
    }
    assert store.counts()["tasks_expert"] == 1  # Ada and Bo differ
    assert even.tie and even.probability == 0.5 and even.metadata["state"] == "expert"
    work, (name,) = Work(store), [row.id for row in store.annotators() if row.name == "Ada"]
    store.invite("Ada")
    held = work.next(name)
    assert {m.content for side in held.sides for m in side} == {"d", "e"}
    work.judge(held.assignment, name, Opinion("first"))
    (asked,) = [c for c in comparisons(store) if c.prompt == (user("q"),)]
    assert asked.metadata["topic"] == "law" and {
        asked.metadata["chosen_model"],
        asked.metadata["rejected_model"],
    } == {"m1", "m2"}
    assert asked.metadata["chosen_model"] == ("m1" if asked.chosen == (assistant("d"),) else "m2")


def test_the_same_file_twice_changes_nothing_and_new_votes_join(store, tmp_path):
    path = lines(tmp_path / "pairs.jsonl", VOTED)
    import_cases(store, read_cases(path))
    before, again = store.counts(), import_cases(store, read_cases(path))
    assert store.counts() == before and (again["tasks"], again["judgments"], again["repeated"]) == (
        0,
        0,
        4,
    )
    other = [
        {
            **VOTED[0],
            "chosen": "b",
            "rejected": "a",
            "annotations": [
                {"annotator": "Cy", "preference": 1},
                {"annotator": "Di", "preference": 1},
            ],
        },
    ]
    joined = import_cases(store, read_cases(lines(tmp_path / "more.jsonl", other)))
    assert (joined["tasks"], joined["judgments"]) == (0, 2)
    check(store)
    assert store.counts()["tasks_expert"] == 2  # two for a, two for b


@pytest.mark.parametrize(("ask", "states"), [(None, "done"), (1, "done"), (2, "done"), (3, "open")])
def test_ask_says_how_many_judge_a_pair_its_judges_included(store, tmp_path, ask, states):
    import_cases(store, read_cases(lines(tmp_path / "x.jsonl", VOTED[:1])), ask=ask)
    (case,) = cases(store)
    assert case.state == states and case.needed == max(ask or 0, 2)
    check(store)


def test_labels_of_a_file_count_as_judgments_or_as_known_answers(store, tmp_path):
    rows = [
        {"prompt": f"p{n}", "chosen": f"good {n}", "rejected": f"bad {n}", "tie": n == 3}
        for n in range(20)
    ]
    path = lines(tmp_path / "pairs.jsonl", rows)
    import_cases(store, read_cases(path, labels="the data set"))
    found = list(comparisons(store))
    assert len(found) == 20 and [c.tie for c in found] == [n == 3 for n in range(20)]
    assert all("good" in c.chosen[0].content for c in found if not c.tie)
    sides = Counter(case.opinions[0].choice for case in cases(store))
    # which side is better cannot be told from where it lies
    assert sides["first"] > 3 < sides["second"]
    import_cases(store, read_cases(path, gold=True), round="gold")
    known = gold_answers(store)
    assert (
        Counter(known.values()) == Counter(vote.choice for vote in votes(store))
        and len(known) == 20
    )
    assert all(known[vote.item] == vote.choice for vote in votes(store))


def test_facts_on_the_two_sides_turn_with_the_verdict(store, tmp_path):
    """People prefer what the file calls rejected, and what the file says of the sides follows."""
    rows = [
        {
            "prompt": f"p{n}",
            "chosen": f"good {n}",
            "rejected": f"bad {n}",
            "chosen_source": "book",
            "rejected_source": "web",
            "gold_difference": 2.5,
            "annotations": said(Ada=1 if n % 2 else -1),
        }
        for n in range(20)
    ]
    import_cases(store, read_cases(lines(tmp_path / "pairs.jsonl", rows)))
    found = list(comparisons(store))
    kept = [c for c in found if c.chosen[0].content.startswith("good")]
    assert len(found) == 20 and len(kept) == 10
    for comparison in found:
        facts = [comparison.metadata[name] for name in ("chosen_source", "rejected_source")]
        is_kept = comparison in kept
        assert facts == (["book", "web"] if is_kept else ["web", "book"])
        assert comparison.metadata["gold_difference"] == (2.5 if is_kept else -2.5)


def test_columns_of_another_file_are_not_taken_for_a_stores_own(store, tmp_path):
    """They go in as facts, come out as facts, and nothing of ours stands in their place."""
    foreign = {"verdict": "clear", "round": 3, "state": "Ohio", "settled_by": "a court"}
    row = {"prompt": "p", "chosen": "a", "rejected": "b", "annotations": said(Ada=1), **foreign}
    import_cases(store, read_cases(lines(tmp_path / "pairs.jsonl", [row])))
    (case,) = cases(store)
    assert case.round == "" and case.details["metadata"] == foreign
    (out,) = comparisons(store)
    expected = {"imported_verdict": "clear", "round": 3, "state": "Ohio", "settled_by": "a court"}
    assert out.metadata == {**expected, "verdict": "chosen", "strategy": "imported"}


def test_a_store_copied_through_a_file_says_the_same(store, tmp_path):
    import_cases(
        store,
        read_cases(lines(tmp_path / "pairs.jsonl", [*VOTED, {**VOTED[2], "prompt": "r"}])),
        ask=2,
    )
    work = Work(store)
    for name in people(store, 2):
        while held := work.next(name):
            work.judge(
                held.assignment,
                name,
                Opinion(
                    "first" if held.task % 2 else "both_bad",
                    strength=2 if held.task % 2 else None,
                ),
            )
    for name in people(store, 1, "expert")[:1]:
        while held := work.next(name):
            work.judge(held.assignment, name, Opinion("second"))
    export_labels(store, tmp_path / "one.jsonl", names=True)
    other = Store(tmp_path / "other.db")
    import_cases(other, read_cases(tmp_path / "one.jsonl"))
    check(other)
    export_labels(other, tmp_path / "two.jsonl", names=True)
    one, two = (
        sorted(read(tmp_path / f"{n}.jsonl", Comparison), key=lambda c: c.id)
        for n in ("one", "two")
    )
    assert [
        (c.chosen if not c.tie else None, c.probability, c.tie, c.margin, c.annotations)
        for c in one
    ] == [
        (c.chosen if not c.tie else None, c.probability, c.tie, c.margin, c.annotations)
        for c in two
    ]
    assert [c.metadata.get("settled_by") for c in one] == [
        c.metadata.get("settled_by") for c in two
    ]
    assert [c.metadata["verdict"] for c in one] == [c.metadata["verdict"] for c in two]
    assert other.counts()["tasks_settled"] == store.counts()["tasks_settled"] > 0


def everything(store, names=True):
    """All that a store says, by pair and person, the sides by their texts."""
    found = {}
    for case in cases(store, names=names):
        text = {"first": case.first.response, "second": case.second.response}
        for s in case.opinions:
            rated = {
                (name.rpartition("/")[0], text.get(name.rpartition("/")[2])): value
                for name, value in s.ratings.items()
            }
            beside = (
                s.strength,
                rated,
                s.seconds,
                s.guidelines,
                text.get(s.left),
                s.at,
                s.role,
                case.state,
                case.needed,
            )
            found[case.item, s.annotator] = (text.get(s.choice, s.choice), *beside)
    return found


def worked(store, clock):
    """Six pairs of two people and an expert, with all that a judgment can have."""
    rows = [{"prompt": f"p{n}", "chosen": f"a {n}", "rejected": f"b {n}"} for n in range(6)]
    sides = [
        [
            Answer((user(r["prompt"]),), (assistant(r[s]),), sampling={"t": 1})
            for s in ("chosen", "rejected")
        ]
        for r in rows
    ]
    store.add_answers(side for pair in sides for side in pair)
    store.add_tasks(
        TaskRow(prompt_id=a.prompt_id, first_id=a.id, second_id=b.id, needed=2) for a, b in sides
    )
    store.invite("Zoe", "expert")  # so that numbers and names are not in one order
    work, names = Work(store), people(store, 2)
    for turn, name in enumerate(names):
        while held := work.next(name):
            clock.now += 10.5
            choice = ("first", "both_bad", "second", "tie")[
                (held.task + turn * (held.task % 3)) % 4
            ]
            rated = {"kind/first": held.task % 5 + 1, "kind/second": turn + 1, "true": 2}
            sure = held.task % 3 + 1 if choice in ("first", "second") else None
            work.judge(
                held.assignment,
                name,
                Opinion(choice, strength=sure, ratings=rated, seconds=2.5 + turn, guidelines=turn),
            )
    expert = next(row.id for row in store.annotators() if row.name == "Zoe")
    held = work.next(expert)
    work.judge(held.assignment, expert, Opinion("first", strength=3, ratings={"kind/second": 5}))
    return work


TARGETS = ["jsonl", "parquet", "label-studio", "argilla"]


@pytest.mark.parametrize("target", TARGETS)
def test_an_export_read_back_into_its_store_adds_nothing(store, clock, tmp_path, target):
    worked(store, clock)
    before, counts = everything(store), store.counts()
    path = tmp_path / ("out.parquet" if target == "parquet" else "out.json")
    export_labels(store, path, target, unfinished=True)
    found = import_cases(store, read_cases(path), prefix="tool-")
    assert (found["tasks"], found["judgments"], found["repeated"]) == (0, 0, 13) and counts[
        "judgments"
    ] == 13
    assert store.counts() == counts and everything(store) == before
    check(store)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("names", [False, True])
def test_another_store_gets_all_that_belongs_to_a_judgment(store, clock, tmp_path, target, names):
    worked(store, clock)
    path = tmp_path / ("out.parquet" if target == "parquet" else "out.json")
    export_labels(store, path, target, unfinished=True, names=names)
    other = Store(tmp_path / "other.db")
    other.invite("Somebody else")  # number 1 here
    found = import_cases(other, read_cases(path))
    check(other)
    assert found["judgments"] == 13 and everything(other) == everything(store, names)
    with other.reading() as session:
        assert not any(
            "store" in task.details for task in session.execute(select(TaskRow)).scalars()
        )
    export_labels(other, tmp_path / "again.jsonl", unfinished=True)
    assert store.id not in (tmp_path / "again.jsonl").read_text()


def test_one_vote_that_cannot_be_read_leaves_the_others(store, clock, tmp_path):
    worked(store, clock)
    export_labels(store, tmp_path / "out.jsonl", unfinished=True, names=True)
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    wrongs = (
        {"choice": "up"},
        {"ratings": {"x": 9}},
        {"at": "noon"},
        {"left": 5},
        {"seconds": -1},
        {},
    )
    for row, wrong in zip(rows, wrongs, strict=True):
        row["annotations"][0] |= wrong
    rows[5]["annotations"] = [{"choice": "chosen"}]
    other, bad = Store(tmp_path / "other.db"), Quarantine()
    found = import_cases(other, read_cases(lines(tmp_path / "bad.jsonl", rows), quarantine=bad))
    assert (
        found["rows"] == 5
        and bad.count == 5
        and found["judgments"] == sum(len(row["annotations"]) for row in rows) - 5
    )
    assert bad.reasons == {"not a text": 1} | {
        f"one judgment only, {reason}": 1
        for reason in ("no verdict", "impossible rating", "not a number", "impossible number")
    }


def test_more_people_may_be_asked_of_pairs_that_are_there(store, tmp_path):
    path = lines(tmp_path / "pairs.jsonl", VOTED)
    import_cases(store, read_cases(path))
    assert states(store) == {"done": 1, "expert": 1, "open": 1}
    again = import_cases(store, read_cases(path), ask=3)
    assert (again["widened"], again["tasks"], again["repeated"]) == (3, 0, 4) and states(store) == {
        "open": 3,
        "that_nobody_can_take": 2,  # Ada and Bo have judged these
    }
    assert store.counts()["open_judgments"] == 1 + 1 + 3
    check(store)
    work, name = Work(store), people(store, 1)[-1]
    while held := work.next(name):
        work.judge(held.assignment, name, Opinion("first"))
    assert states(store)["open"] == 1 and store.counts()["open_judgments"] == 2
    assert (
        import_cases(store, read_cases(path), ask=2)["widened"] == 0 and states(store)["open"] == 1
    )
    check(store)


def test_tasks_of_an_expert_stay_the_experts_when_more_are_asked(store, tmp_path):
    path = lines(tmp_path / "pairs.jsonl", VOTED)
    import_cases(store, read_cases(path))
    work, name, (expert,) = Work(store), people(store, 1)[-1], people(store, 1, "expert")
    held = work.next(expert)
    work.judge(held.assignment, expert, Opinion("first"))
    work.flag(work.next(name).assignment, name, "look")
    assert states(store) == {"done": 1, "settled": 1, "expert": 1}
    assert import_cases(store, read_cases(path), ask=3)["widened"] == 2
    assert states(store) == {"open": 1, "settled": 1, "expert": 1}
    check(store)


def test_pairs_that_nobody_has_judged_become_gold_questions(store, tmp_path):
    rows = [{"prompt": f"p{n}", "chosen": f"good {n}", "rejected": f"bad {n}"} for n in range(6)]
    turned = [{**row, "chosen": row["rejected"], "rejected": row["chosen"]} for row in rows]
    import_cases(store, read_cases(lines(tmp_path / "turned.jsonl", turned)))
    work, (name,) = Work(store), people(store, 1)
    held = work.next(name)
    work.judge(held.assignment, name, Opinion("tie"))
    path = lines(tmp_path / "pairs.jsonl", rows)
    for _ in range(2):
        found = import_cases(store, read_cases(path, gold=True))
        assert (found["tasks"], found["not_gold"]) == (0, 1)
        assert store.counts()["gold_questions"] == 5 and store.counts()["tasks"] == 1
    known = gold_answers(store)
    with store.reading() as session:
        for task in session.execute(select(TaskRow)).scalars():
            first, second = (
                session.get(ResponseRow, side).messages[0]["content"]
                for side in (task.first_id, task.second_id)
            )
            assert (task.known is None) == (task.id == held.task)
            assert task.known is None or {"first": first, "second": second}[task.known].startswith(
                "good",
            )
    assert len(known) == 5
    check(store)


def states(store):
    return {
        k.removeprefix("tasks_"): n
        for k, n in store.counts().items()
        if k.startswith("tasks_") and n
    }


def test_bad_rows_are_set_aside_and_the_rest_goes_in(store, tmp_path):
    rows = [
        *VOTED,
        {"prompt": "same", "chosen": "x", "rejected": "x", "tie": True},
        {"prompt": "p", "chosen": ""},
    ]
    quarantine = Quarantine()
    found = import_cases(
        store,
        read_cases(lines(tmp_path / "pairs.jsonl", rows), quarantine=quarantine),
    )
    assert (
        found["rows"] == 3
        and quarantine.count == 2
        and set(quarantine.reasons) == {"equal responses", "missing text"}
    )
    with pytest.raises(DataError, match="answers and no comparisons"):
        list(read_cases(lines(tmp_path / "a.jsonl", [{"prompt": "p", "responses": ["x", "y"]}])))
    with pytest.raises(DataError, match="neither"):
        list(read_cases(tmp_path / "pairs.jsonl", fields=("a", "b", "c")))


def test_a_name_that_is_empty_is_refused_and_a_prefix_keeps_people_apart(store):
    sides = [Answer((user("p"),), (assistant(str(k)),)) for k in range(2)]
    nobody = Case(sides[0], sides[1], (Opinion("first", annotator=" "),))
    with pytest.raises(StoreError, match="no name"):
        import_cases(store, [nobody])
    named = Case(sides[0], sides[1], (Opinion("first", annotator="Ada"),))
    import_cases(store, [named])
    import_cases(store, [named], prefix="lab-")
    assert {w.name for w in workload(store)} == {"Ada", "lab-Ada"}
    check(store)


def test_people_whose_long_names_begin_alike_stay_apart(store, tmp_path):
    """An annotator's name has at most 80 characters in a store."""
    names = {f"{'x' * 79}{end}" for end in ("a", "b", "bc", "bd")}
    row = {**VOTED[0], "annotations": [{"annotator": name, "preference": 1} for name in names]}
    found = import_cases(store, read_cases(lines(tmp_path / "a.jsonl", [row])))
    assert found["judgments"] == len(names)
    there = {person.name for person in store.annotators()}
    assert len(there) == len(names) and max(map(len, there)) <= 80
    assert {f"{'x' * 79}a", f"{'x' * 79}b"} < there
    again = import_cases(store, read_cases(tmp_path / "a.jsonl"))
    assert again["judgments"] == 0 and len(store.annotators()) == len(names)


def test_an_import_beside_people_at_work_keeps_every_place(store):
    sides = [
        [Answer((user(f"p{n}"),), (assistant(f"{k} {n}"),)) for k in range(2)] for n in range(6)
    ]
    store.add_answers(side for pair in sides for side in pair)
    store.add_tasks(
        TaskRow(prompt_id=a.prompt_id, first_id=a.id, second_id=b.id, needed=2) for a, b in sides
    )
    work, (ada, bo) = Work(store), people(store, 2)
    held = work.next(ada)  # a lease that is out while judgments arrive
    work.judge(work.next(bo).assignment, bo, Opinion("first"))
    import_cases(
        store,
        [
            Case(a, b, (Opinion("first", annotator="Cy"), Opinion("first", annotator="Di")))
            for a, b in sides
        ],
    )
    work.judge(held.assignment, ada, Opinion("first"))
    check(store)
    assert store.counts()["tasks_done"] == 6


def test_a_person_who_let_a_pair_go_back_unjudged_brings_a_judgment_of_it(store, clock):
    filled(store, prompts=1, answers=2, needed=2)
    ada, bob = people(store, 2)
    held = Work(store).next(ada)
    answers = [Answer(held.prompt, side) for side in (held.first, held.second)]
    brought = Case(*answers, (Opinion("first", annotator="annotator 0", at=7.0, left="second"),))
    on_screen = import_cases(store, [brought])
    assert (on_screen["judgments"], on_screen["repeated"], on_screen["held"]) == (0, 0, 1)
    clock.now += 4000
    found = import_cases(store, [brought])
    assert (found["judgments"], found["repeated"], found["held"]) == (1, 0, 0)
    check(store)
    assert Work(store).next(bob).task == held.task and Work(store).next(ada) is None
    (case,) = cases(store, names=True)
    assert [(o.annotator, o.choice, o.at, o.left) for o in case.opinions] == [
        ("annotator 0", "first", 7.0, "second"),
    ]
    again = import_cases(store, [brought])
    assert (again["judgments"], again["repeated"], again["held"]) == (0, 1, 0)


@pytest.mark.parametrize("how", ["skip", "flag", "undo"])
def test_a_pair_that_a_person_gave_up_or_took_back_gets_no_judgment_of_theirs(store, clock, how):
    filled(store, prompts=1, answers=2, needed=2)
    (ada,) = people(store, 1)
    work = Work(store)
    held = work.next(ada)
    if how == "undo":
        work.judge(held.assignment, ada, Opinion("first"))
        work.undo(ada)
        clock.now += 4000
    elif how == "flag":
        work.flag(held.assignment, ada, "odd")
    else:
        work.skip(held.assignment, ada)
    answers = [Answer(held.prompt, side) for side in (held.first, held.second)]
    found = import_cases(store, [Case(*answers, (Opinion("first", annotator="annotator 0"),))])
    assert (found["judgments"], found["repeated"], found["held"]) == (0, 0, 1)
    check(store)
    assert list(votes(store)) == []


def test_answers_that_differ_in_a_thought_alone_are_set_aside(store, tmp_path):
    """The store names an answer by what people see: one such row keeps no other out."""
    thinks = [
        {"role": "assistant", "content": "42", "reasoning_content": thought} for thought in "AB"
    ]
    rows = [{"prompt": "p", "chosen": thinks[:1], "rejected": thinks[1:]}, VOTED[2]]
    quarantine = Quarantine()
    path = lines(tmp_path / "pairs.jsonl", rows)
    found = import_cases(store, read_cases(path, quarantine=quarantine))
    assert found["rows"] == 1 and set(quarantine.reasons) == {"equal responses"}


def test_prompts_that_differ_in_their_tools_are_two(store, tmp_path):
    tools = [
        [{"type": "function", "function": {"name": name, "description": "", "parameters": {}}}]
        for name in ("one", "two")
    ]
    rows = [
        {
            "prompt": "w?",
            "chosen": f"a{n}",
            "rejected": f"b{n}",
            "tools": own,
            "annotations": said(Ada=1),
        }
        for n, own in enumerate(tools)
    ]
    import_cases(store, read_cases(lines(tmp_path / "pairs.jsonl", rows)))
    read_back = [json.loads(one.prompt[0].tools) for one in comparisons(store)]
    assert sorted(one[0]["function"]["name"] for one in read_back) == ["one", "two"]


def test_values_that_json_lacks_become_texts_or_null():
    assert json_safe({"a": float("nan"), 2: (1, "x"), "b": {3}, "c": b"x"}) == {
        "a": None,
        "2": [1, "x"],
        "b": [3],
        "c": "b'x'",
    }


def test_published_votes_give_the_published_shares(store, tether_data):
    path = next((tether_data / "pandalm").glob("*.json*"))
    wanted = {}
    for row in read(path, Comparison):
        wanted.setdefault((row.prompt, frozenset((row.chosen, row.rejected))), row)
    found = import_cases(store, read_cases(path))
    check(store)
    assert found["judgments"] > 2000
    for row in comparisons(store, "soft", unfinished=True):
        published = wanted[row.prompt, frozenset((row.chosen, row.rejected))]
        share = (
            published.probability if published.chosen == row.chosen else 1 - published.probability
        )
        assert row.probability == pytest.approx(share) and row.tie == (share == 0.5)
