"""Tasks are lent and judged: as often as asked, once by everybody, and nothing that was
acknowledged is lost.
"""

from __future__ import annotations

import random
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
from sqlmodel import select
from tests.people.annotation.conftest import filled, people

from tether.people.annotation.exchange import comparisons, gold_answers, votes, workload
from tether.people.annotation.server.figures import Overview
from tether.people.annotation.store import Store, StoreError
from tether.people.annotation.tables import AssignmentRow, JudgmentRow, TaskRow
from tether.people.annotation.work import Work
from tether.people.labels.votes import Opinion, answer_on, more_than_half


def judgments(store):
    with store.reading() as session:
        return list(
            session.execute(select(JudgmentRow).where(JudgmentRow.withdrawn.is_(None))).scalars(),
        )


def task(store, number):
    with store.reading() as session:
        return session.get_one(TaskRow, number)


def check(store):
    """Every column that is kept beside the judgments is what they say."""
    with store.reading() as session:
        tasks = list(session.execute(select(TaskRow)).scalars())
        leases = Counter(
            a.task_id
            for a in session.execute(select(AssignmentRow)).scalars()
            if a.state == "leased" and a.counted
        )
    counted = Counter(j.task_id for j in judgments(store))
    for row in tasks:
        if row.known is None and row.state != "settled":
            assert row.judged == counted[row.id]
            assert row.taken == counted[row.id] + leases[row.id] <= row.needed
    said = [(j.task_id, j.annotator_id) for j in judgments(store)]
    assert len(said) == len(set(said))


def test_everybody_gets_each_task_once_and_each_task_as_many_people_as_asked(store):
    filled(store, needed=2)
    work, names = Work(store), people(store, 3)
    seen = {name: [] for name in names}
    for turn in range(40):
        name = names[turn % 3]
        if assigned := work.next(name):
            assert work.next(name) == assigned  # the same one, until it is judged
            work.judge(assigned.assignment, name, Opinion("first", seconds=1.0))
            seen[name].append(assigned.task)
        check(store)
    assert all(len(tasks) == len(set(tasks)) for tasks in seen.values())
    assert Counter(j.task_id for j in judgments(store)) == dict.fromkeys(range(1, 13), 2)
    assert store.counts()["tasks_done"] == 12 and store.counts()["open_judgments"] == 0


@pytest.mark.parametrize("threads", [8])
def test_many_at_once_never_judge_more_than_asked(store, threads):
    filled(store, prompts=10, needed=3)
    work, names = Work(store), people(store, threads)

    draws = {name: random.Random(name) for name in names}

    def person(name):
        draw, count = draws[name], 0
        while assigned := work.next(name):
            match draw.randrange(12):
                case 0:
                    work.skip(assigned.assignment, name)
                case 1:
                    work.judge(assigned.assignment, name, Opinion("tie"))
                    work.undo(name)
                case _:
                    work.judge(assigned.assignment, name, Opinion(draw.choice(("first", "second"))))
                    count += 1
        return count

    with ThreadPoolExecutor(threads) as pool:
        counts = list(pool.map(person, names))
    check(store)
    assert len(judgments(store)) == sum(counts) <= 90
    # places that were given back after everybody had left
    while sum(more := [person(name) for name in names]):
        counts += more
    check(store)
    assert len(judgments(store)) == sum(counts) == 90


def test_a_lease_runs_out_and_its_place_goes_to_another(store, clock):
    filled(store, prompts=1, answers=2)
    work, (first, second) = Work(store, lease=60), people(store, 2)
    held = work.next(first)
    assert work.next(second) is None
    clock.now += 61
    taken = work.next(second)
    assert taken.task == held.task
    with pytest.raises(StoreError, match="ran out"):
        work.judge(held.assignment, first, Opinion("first"))
    work.skip(taken.assignment, second)
    work.judge(held.assignment, first, Opinion("first"))  # late, but the place is free again
    check(store)
    assert task(store, held.task).state == "done"


def test_a_clock_that_is_set_back_keeps_tasks_and_loses_no_judgment(store, clock):
    filled(store, prompts=1, answers=2)
    work, (first, second) = Work(store, lease=60), people(store, 2)
    held = work.next(first)
    clock.now -= 3600
    assert work.next(second) is None
    clock.now += 3600 - 1  # an hour later, which is right before the lease runs out
    assert work.next(second) is None
    work.judge(held.assignment, first, Opinion("first"))
    check(store)
    assert task(store, held.task).state == "done" and len(judgments(store)) == 1


def test_a_judgment_twice_is_one_and_another_in_its_place_is_refused(store):
    filled(store)
    work, (name, other) = Work(store), people(store, 2)
    held = work.next(name)
    for _ in range(2):
        work.judge(held.assignment, name, Opinion("second", comment="clear"))
    with pytest.raises(StoreError, match="judged already"):
        work.judge(held.assignment, name, Opinion("first"))
    with pytest.raises(StoreError, match="not given to you"):
        work.judge(held.assignment, other, Opinion("first"))
    assert [j.choice for j in judgments(store)] == ["second"]


def test_undo_goes_back_one_by_one_and_keeps_what_was_said(store):
    filled(store)
    work, (name,) = Work(store), people(store, 1)
    tasks = []
    for choice in ("first", "second", "tie"):
        held = work.next(name)
        work.judge(held.assignment, name, Opinion(choice))
        tasks.append(held.task)
    assert [work.undo(name).task for _ in range(3)] == tasks[::-1]
    assert work.undo(name) is None and judgments(store) == []
    check(store)
    with store.reading() as session:
        said = session.execute(select(JudgmentRow).order_by(JudgmentRow.id)).scalars()
        assert [j.choice for j in said] == ["first", "second", "tie"]
    answered = set()
    while held := work.next(name):
        work.judge(held.assignment, name, Opinion("first"))
        answered.add(held.task)
    assert len(answered) == 12


def test_nobody_gives_more_judgments_than_the_quota(store, clock):
    filled(store, prompts=3, answers=2)
    (ada, bo), work = people(store, 2), Work(store, gold_every=0, quota=1, lease=60)
    late = work.next(ada)
    clock.now += 61
    other = work.next(bo)  # what Ada had, since her time has run out
    assert other.task == late.task
    work.judge(work.next(ada).assignment, ada, Opinion("first"))
    work.skip(other.assignment, bo)
    assert work.next(ada) is None
    with pytest.raises(StoreError, match="ran out"):  # its place is free, but she has judged one
        work.judge(late.assignment, ada, Opinion("first"))
    assert Work(store, gold_every=0, quota=2).next(ada) is not None
    assert work.next(bo) is not None


def test_disagreement_and_flags_go_to_an_expert_who_settles_them(store):
    filled(store, prompts=1, needed=2)
    work, (first, second), (expert, other) = (
        Work(store),
        people(store, 2),
        people(store, 2, "expert"),
    )
    for name, choice in ((first, "first"), (second, "second")):
        held = work.next(name)
        work.judge(held.assignment, name, Opinion(choice, comment=f"says {choice}"))
    flagged = work.next(first)
    work.flag(flagged.assignment, first, "both are about something else")
    assert work.next(second).task not in (held.task, flagged.task)
    disputed = work.next(expert)
    assert disputed.task == held.task and {o.choice for o in disputed.others} == {"first", "second"}
    assert work.next(other).flags == ("both are about something else",)
    work.judge(disputed.assignment, expert, Opinion("both_bad"))
    assert task(store, held.task).state == "settled"
    with pytest.raises(StoreError, match="expert"):
        work.undo(second)
    assert work.undo(expert).task == held.task and task(store, held.task).state == "expert"
    check(store)


def test_gold_questions_come_at_their_rate_to_everybody_and_take_no_place(store):
    filled(store, prompts=20, answers=2)
    gold = filled(store, prompts=3, answers=4, known="first")
    work, names = Work(store, gold_every=5), people(store, 2)
    kinds = {name: [] for name in names}
    for _ in range(10):
        for name in names:
            held = work.next(name)
            kinds[name].append(task(store, held.task).known is not None)
            work.judge(held.assignment, name, Opinion("first"))
    assert [sum(k) for k in kinds.values()] == [2, 2] and kinds[names[0]] != kinds[names[1]]
    assert len(gold) > 4 and all(sum(k[:5]) == 1 for k in kinds.values())
    check(store)


def test_the_left_side_is_drawn_for_each_person_and_recorded(store):
    filled(store, prompts=40, needed=5)
    work, names = Work(store), people(store, 5)
    lefts = Counter()
    for name in names:
        for _ in range(40):
            held = work.next(name)
            lefts[held.left] += 1
            left, right = held.sides
            assert (
                answer_on("left", held.left) == ("first" if left == held.first else "second")
                and right != left
            )
            work.judge(held.assignment, name, Opinion(answer_on("left", held.left)))
    assert 70 < lefts["first"] < 130
    with store.reading() as session:
        rows = {a.id: a.left for a in session.execute(select(AssignmentRow)).scalars()}
    assert all(rows[j.assignment_id] == j.choice for j in judgments(store))


@pytest.mark.parametrize(
    ("verdict", "message"),
    [
        (Opinion("left"), "a choice is one of"),
        (Opinion("first", strength=4), "strength"),
        (Opinion("first", ratings={"helpful": 6}), "ratings"),
        (Opinion("first", comment="x" * 4001), "4000"),
        (Opinion("first", comment="x\0y"), "null character"),
    ],
)
def test_a_verdict_out_of_range_is_refused_and_nothing_is_kept(store, verdict, message):
    filled(store)
    work, (name,) = Work(store), people(store, 1)
    held = work.next(name)
    with pytest.raises(StoreError, match=message):
        work.judge(held.assignment, name, verdict)
    assert judgments(store) == [] and work.next(name) == held


def test_a_store_opened_again_goes_on(tmp_path):
    one = Store(tmp_path / "p.db")
    filled(one)
    (name,) = people(one, 1)
    held = Work(one).next(name)
    two = Store(tmp_path / "p.db")  # another process, say
    Work(two).judge(held.assignment, name, Opinion("first"))
    assert [j.task_id for j in judgments(one)] == [held.task]


@pytest.mark.parametrize(
    ("choices", "expected"),
    [
        ((), None),
        (("first",), "first"),
        (("first", "second"), None),
        (("tie", "both_bad", "first"), "tie"),
    ],
)
def test_majority(choices, expected):
    assert more_than_half(choices) == expected


def test_a_judgment_keeps_the_role_in_which_it_was_given(store):
    """Two annotators and an expert judge, then all change places."""
    filled(store, prompts=1, answers=2, needed=2)
    ada, bob = people(store, 2)
    (eve,) = people(store, 1, "expert")
    work = Work(store)
    for name, choice in ((ada, "first"), (bob, "second"), (eve, "first")):
        work.judge(work.next(name).assignment, name, Opinion(choice))
    before, said = list(comparisons(store)), list(votes(store))
    assert before[0].metadata["settled_by"] == f"annotator-{eve}" and len(said) == 2
    store.invite("annotator 0", "expert")
    store.invite("expert 0", "annotator")
    assert list(comparisons(store)) == before and list(votes(store)) == said
    store.invite("annotator 0")  # a new link alone changes no role
    assert [row.role for row in store.annotators()] == ["expert", "annotator", "annotator"]
    assert {row.name: str(row.agrees) for row in workload(store)}["annotator 0"] == "0% of 1"
    with pytest.raises(StoreError, match="decided"):
        work.undo(ada)  # an expert now, but this was said as an annotator


@pytest.mark.parametrize(("before", "after"), [("annotator", "expert"), ("expert", "annotator")])
def test_a_task_that_is_held_goes_back_when_its_holder_changes_roles(store, before, after):
    filled(store, prompts=1, answers=2, needed=2)
    names, work = people(store, 2), Work(store)
    for name, choice in zip(names, ("first", "second"), strict=True) if before == "expert" else ():
        work.judge(work.next(name).assignment, name, Opinion(choice))
    (who,) = people(store, 1, "expert") if before == "expert" else [names[0]]
    held = work.next(who)
    store.invite(next(row.name for row in store.annotators() if row.id == who), after)
    check(store)
    if before == "expert":
        with pytest.raises(StoreError, match="ran out"):
            work.judge(held.assignment, who, Opinion("first"))
    else:
        with pytest.raises(StoreError, match="ran out"):  # there is nothing to settle yet
            work.judge(held.assignment, who, Opinion("first"))
    check(store)
    assert task(store, held.task).state == ("expert" if before == "expert" else "open")


def test_nobody_sees_two_answers_again_in_another_round_or_as_a_gold_question(store):
    questions = filled(store, prompts=2, answers=2)
    store.add_tasks(TaskRow(**q.model_dump() | {"round": "again"}) for q in questions[:1])
    store.add_tasks(
        TaskRow(**q.model_dump() | {"round": "gold", "known": "first"}) for q in questions[1:]
    )
    ada, bob = people(store, 2)
    work, pairs = Work(store, gold_every=2), {ada: [], bob: []}
    for name in (ada, bob):
        while assigned := work.next(name):
            pairs[name].append(task(store, assigned.task).pair)
            work.judge(assigned.assignment, name, Opinion("first"))
    assert all(len(seen) == len(set(seen)) == 2 for seen in pairs.values())


def test_a_verdict_that_says_more_is_not_taken_for_the_same(store):
    filled(store, prompts=1, answers=2)
    (ada,) = people(store, 1)
    work = Work(store)
    held = work.next(ada)
    work.judge(held.assignment, ada, Opinion("first", seconds=2.0))
    work.judge(held.assignment, ada, Opinion("first", seconds=3.0))  # sent twice
    for more in ({"strength": 3}, {"comment": "because"}, {"ratings": {"true/first": 1}}):
        with pytest.raises(StoreError, match="take the judgment back first"):
            work.judge(held.assignment, ada, Opinion("first", **more))
    assert len(judgments(store)) == 1


def test_tasks_that_nobody_can_take_are_counted_and_gold_apart(store):
    questions = filled(store, prompts=1, answers=2, needed=2)
    store.add_tasks(
        TaskRow(**q.model_dump() | {"round": "gold", "known": "first"}) for q in questions
    )
    ada, bob = people(store, 2)
    work = Work(store, gold_every=0)
    work.judge(work.next(ada).assignment, ada, Opinion("first"))
    assert store.counts()["tasks_that_nobody_can_take"] == 0
    work.skip(work.next(bob).assignment, bob)
    assert (
        store.counts()["tasks_that_nobody_can_take"]
        == store.counts()["tasks_open"]
        == store.counts()["tasks"]
        == 1
    )
    assert store.counts()["gold_questions"] == 1
    store.invite("a third")
    assert store.counts()["tasks_that_nobody_can_take"] == 0


def test_pairs_that_want_more_people_than_there_are_count_as_pairs_that_nobody_can_take(store):
    filled(store, prompts=2, answers=2, needed=3)
    ada, bob = people(store, 2)
    work = Work(store, gold_every=0)
    assert store.counts()["tasks_that_nobody_can_take"] == 0
    for person in (ada, bob, ada):
        work.judge(work.next(person).assignment, person, Opinion("first"))
    assert store.counts()["tasks_that_nobody_can_take"] == 1
    work.judge(work.next(bob).assignment, bob, Opinion("first"))
    assert work.next(ada) is None and work.next(bob) is None
    assert store.counts()["tasks_that_nobody_can_take"] == store.counts()["tasks_open"] == 2
    store.invite("a third")
    assert store.counts()["tasks_that_nobody_can_take"] == 0


def test_a_flag_leaves_the_votes_on_a_gold_question_out_of_the_agreement(store):
    filled(store, prompts=1, answers=2, known="first")
    ada, bob, cy = people(store, 3)
    work = Work(store, gold_every=1)
    for person in (ada, bob):
        work.judge(work.next(person).assignment, person, Opinion("first"))
    before = [(str(one.agrees), str(one.gold)) for one in workload(store)]
    assert before == [("–", "100% of 1"), ("–", "100% of 1"), ("–", "–")]
    work.flag(work.next(cy).assignment, cy, "both are right")
    assert [(str(one.agrees), str(one.gold)) for one in workload(store)] == [("–", "–")] * 3
    overview = Overview(store)
    assert overview.raw.num_items == 0 and overview.raw.value is None
    assert [str(one.agrees) for one in overview.people] == ["–"] * 3


def test_an_expert_may_overrule_a_gold_question(store):
    (question,) = filled(store, prompts=1, answers=2, known="first")
    ada, bob = people(store, 2)
    (eve,) = people(store, 1, "expert")
    work = Work(store, gold_every=1)
    work.judge(work.next(ada).assignment, ada, Opinion("second"))
    (item,) = gold_answers(store)
    turned = question.first_id > question.second_id

    def right(choice):
        return {item: {"first": "second", "second": "first"}[choice] if turned else choice}

    assert gold_answers(store) == right("first")
    work.flag(work.next(bob).assignment, bob, "the other one is right")
    assert gold_answers(store) == {}
    work.judge(work.next(eve).assignment, eve, Opinion("second"))
    assert gold_answers(store) == right("second")
    assert {row.name: str(row.gold) for row in workload(store)}["annotator 0"] == "100% of 1"
