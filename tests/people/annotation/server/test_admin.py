"""What administrators see and do; every figure of the overview by hand."""

from __future__ import annotations

import html
import re

import pytest
from sqlmodel import select
from tests.people.annotation.conftest import filled, people

from tether.core.errors import ConfigError
from tether.core.types import assistant, user
from tether.people.annotation.server.figures import Overview, Remembered
from tether.people.annotation.server.site import SiteConfig
from tether.people.annotation.store import Answer, checked_criteria
from tether.people.annotation.tables import TaskRow
from tether.people.annotation.work import Work
from tether.people.labels.votes import Opinion


def judged(store, clock, said):
    """Tasks judged by three people as `said` (a letter a person: f, s, t, b or - for skipped), each
    a minute after the other.
    """
    names, work = people(store, 3), Work(store, gold_every=0)
    letters = {"f": "first", "s": "second", "t": "tie", "b": "both_bad"}
    for row in said:
        for seconds, (name, letter) in enumerate(zip(names, row, strict=True), 1):
            held = work.next(name)
            clock.now += 60
            if letter == "-":
                work.skip(held.assignment, name)
            else:
                work.judge(held.assignment, name, Opinion(letters[letter], seconds=10.0 * seconds))
    return names


def test_the_overview_by_hand(store, clock):
    filled(store, prompts=4, answers=2, needed=3)
    judged(store, clock, ["fff", "ffs", "tbs", "ss-"])
    found = Overview(store)
    # Pairs of equal verdicts by task: 3 of 3, 1 of 3, 1 of 3 (both_bad is a tie), 1 of 1.
    assert found.raw.value == pytest.approx(6 / 10)
    # Coincidences: each ordered pair weighs 1 / (votes - 1). Observed disagreement: 0 + 4/2 + 4/2 +
    # 0 of 11 votes; the margins are 5 first, 4 second, 2 ties, so that 11 * 10 * expected = 2 *
    # (5*4 + 5*2 + 4*2) / 11.
    assert found.alpha.value == pytest.approx(1 - (4 / 11) / (2 * 38 / (11 * 10)))
    assert [p.judged for p in found.people] == [4, 4, 3] and [p.seconds for p in found.people] == [
        10.0,
        20.0,
        30.0,
    ]
    assert [str(p.agrees) for p in found.people] == ["71% of 7", "71% of 7", "33% of 6"]
    assert (
        sum(number for _, number in found.hours) == 11 == found.days[-1][1]
        and len(found.days) == 14
    )
    assert found.counts["tasks_done"] == 3 and found.counts["open_judgments"] == 1


def test_gold_and_sides_by_hand_and_gold_is_not_in_the_agreement(store, clock):
    filled(store, prompts=3, answers=2, known="first")
    names, work = people(store, 2), Work(store, gold_every=1)
    lefts = []
    for name in names:
        for choice in ("first", "second", "first"):
            held = work.next(name)
            lefts.append(choice == held.left)
            work.judge(held.assignment, name, Opinion(choice))
    found = Overview(store)
    assert [str(p.gold) for p in found.people] == ["67% of 3"] * 2 and found.raw.value is None
    assert [p.left.count for p in found.people] == [
        sum(lefts[:3]),
        sum(lefts[3:]),
    ] and found.people[0].left.total == 3


def test_withdrawn_judgments_and_experts_are_not_in_the_agreement(store, clock):
    filled(store, prompts=1, answers=2, needed=2)
    work, (first, second) = Work(store, gold_every=0), people(store, 2)
    (expert,) = people(store, 1, "expert")
    for name, choice in ((first, "first"), (second, "second")):
        work.judge(work.next(name).assignment, name, Opinion(choice))
    work.judge(work.next(expert).assignment, expert, Opinion("first"))
    assert Overview(store).raw.value == 0.0 and Overview(store).people[2].judged == 1
    other = people(store, 3)[2]
    filled(store, prompts=1, answers=2, round="again")
    work.judge(work.next(other).assignment, other, Opinion("tie"))
    work.undo(other)
    assert Overview(store).people[3].judged == 0


def test_an_invitation_is_shown_once_and_lets_in(come, visit, store):
    admin = come("admin")
    admin.get("/admin")
    page = admin.send("/admin/invite", name="  Bob ", role="expert", days="3").text
    link = page.split('value="http://127.0.0.1:8765/join#')[1].split('"')[0]
    assert visit().join(link).url.path == "/experts" and link not in admin.get("/admin").text
    assert [(a.name, a.role) for a in store.annotators()] == [
        ("some admin", "admin"),
        ("Bob", "expert"),
    ]
    admin.get("/admin")
    for fields in (
        {"role": "king"},
        {"days": "0"},
        {"days": "x"},
        {"name": ""},
        {"name": "x" * 81},
        {"name": "some admin"},
    ):
        answer = admin.send(
            "/admin/invite",
            **{"name": "Eve", "role": "annotator", "days": "3", **fields},
        )
        assert answer.status_code in (400, 409), fields
        admin.get("/admin")
    assert len(store.annotators()) == 2


def test_locking_out_ends_a_session_at_once_and_not_ones_own(come, store):
    ann, admin = come(name="Ann"), come("admin")
    ann.get("/judge")
    admin.get("/admin")
    assert (
        "Locked out" in admin.send("/admin/access", name="Ann", lock="1").text
        and "Let in" in admin.page.text
    )
    assert ann.send("/judge", choice="left").status_code == 401 and store.counts()["judgments"] == 0
    admin.send("/admin/access", name="Ann", lock="0")
    assert ann.get("/judge").status_code == 200 and "Which answer" in ann.page.text
    admin.get("/admin")
    assert admin.send("/admin/access", name="some admin", lock="1").status_code == 409
    admin.get("/admin")
    assert admin.send("/admin/access", name="nobody", lock="1").status_code == 409


def test_guidelines_and_criteria_have_versions_that_travel_with_judgments(come, store):
    ann, admin = come(), come("admin")
    for text, criteria in (("be *kind*", "kind\r\n\r\n true "), ("be true", "true")):
        admin.get("/admin/guidelines")
        assert "in force" in admin.send("/admin/guidelines", text=text, criteria=criteria).text
        if store.guidelines().version == 1:
            ann.get("/judge")  # with the first version beside it
    assert [(g.text, g.criteria, g.author) for g in store.all_guidelines()] == [
        ("be *kind*", ["kind", "true"], "some admin"), ("be true", ["true"], "some admin")]  # fmt: skip
    ann.send("/judge", choice="left", **{"rating-1-left": "2"})
    assert "be true" in ann.page.text
    ann.send("/judge", choice="left")
    with store.reading() as session:
        from tether.people.annotation.tables import JudgmentRow

        kept = list(session.execute(select(JudgmentRow)).scalars())
    assert [j.guidelines for j in kept] == [1, 2] and [
        n.split("/")[0] for n in kept[0].ratings
    ] == ["true"]
    old = admin.get("/admin/guidelines?version=1").text
    assert "former version" in old and "be <em>kind</em>" in old
    assert admin.get("/admin/guidelines?version=9").status_code == 404
    admin.get("/admin/guidelines")
    assert admin.send("/admin/guidelines", text="x" * 50_001, criteria="").status_code == 409
    admin.get("/admin/guidelines")
    assert admin.send("/admin/guidelines", text="x", criteria="same\nsame").status_code == 409
    assert len(store.all_guidelines()) == 2


def test_guidelines_without_criteria_given_keep_the_former_ones(store):
    store.set_guidelines("a", criteria=["kind"])
    store.set_guidelines("b")
    assert store.guidelines().criteria == ["kind"]


@pytest.mark.parametrize(
    "names",
    [["x"] * 2, [str(n) for n in range(11)], ["x" * 31], ["a\u202eb"]],
)
def test_criteria_that_no_form_could_hold_are_refused(names):
    with pytest.raises(ConfigError, match="criteria"):
        checked_criteria(names)


@pytest.mark.parametrize(
    "wrong",
    [{"host": "0.0.0.0"}, {"host": "::"}, {"address": "judge.example.org"}, {"address": "http://x/path"}, {"address": "ftp://x"},
     {"port": 70000}, {"rest_every": -1}, {"lease_minutes": 0}, {"colour": "red"}],
)  # fmt: skip
def test_settings_that_cannot_work_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        SiteConfig(**wrong)


def test_a_big_store_is_not_summed_up_at_every_visit(monkeypatch):
    calls, clock = [], [0.0]

    def summed(seconds):
        calls.append(1)
        clock[0] += seconds
        return len(calls)

    monkeypatch.setattr("tether.people.annotation.server.figures.time.monotonic", lambda: clock[0])
    remembered = Remembered(patience=20, quick=0.5)
    visit = lambda seconds: remembered.of("all", lambda: summed(seconds))  # noqa: E731
    assert [visit(0.4), visit(1.0), visit(1.0)] == [1, 2, 2]
    clock[0] += 19
    assert visit(1.0) == 2
    clock[0] += 2
    assert visit(1.0) == 3


def test_the_queue_comes_in_pages(come, store):
    prompts = [(user(f"dispute {n}"),) for n in range(60)]
    answers = [[Answer(p, (assistant(mark),)) for mark in "ab"] for p in prompts]
    store.add_answers([a for pair in answers for a in pair])
    store.add_tasks(
        [TaskRow(prompt_id=a.prompt_id, first_id=a.id, second_id=b.id) for a, b in answers],
    )
    with store.transaction() as session:
        session.execute(TaskRow.__table__.update().values(state="expert"))
    expert = come("expert")
    seen = re.findall(r"Pair (\d+)", expert.get("/experts").text)
    assert len(seen) == 20 and "72 tasks" in expert.page.text
    while link := re.search(r'href="(\?[^"]*)">Next pairs', expert.page.text):
        more = re.findall(r"Pair (\d+)", expert.get(f"/experts{html.unescape(link[1])}").text)
        assert 0 < len(more) <= 20
        seen += more
    assert len(seen) == len(set(seen)) == 72


def test_an_annotator_of_one_side_is_named_on_the_overview(come, store):
    """Two judge by the answers, a third always left; who is named is that one."""
    filled(store, prompts=60, answers=2, needed=3)
    names, work = people(store, 3), Work(store, gold_every=0)
    for place, name in enumerate(names):
        while held := work.next(name):
            work.judge(
                held.assignment,
                name,
                Opinion(held.left if place == 2 else "first", seconds=5.0),
            )
    assert {one.annotator for one in Overview(store).suspects} == {"annotator 2"}
    page = come("admin").get("/admin").text
    assert "Look at what they" in page and page.index("annotator 2", page.index("Look at what")) > 0


def test_a_new_link_keeps_the_role_unless_told_otherwise(come, store):
    store.invite("Eve", "expert")
    admin = come("admin")
    admin.get("/admin")
    assert "as an expert" in admin.send("/admin/invite", name="Eve", role="", days="3").text
    admin.get("/admin")
    assert "as an annotator" in admin.send("/admin/invite", name="Ann", role="", days="3").text
    assert {row.name: row.role for row in store.annotators() if row.name in ("Eve", "Ann")} == {
        "Eve": "expert",
        "Ann": "annotator",
    }
