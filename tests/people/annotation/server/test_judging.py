"""What annotators and experts can do, by forms alone, as without the script."""

from __future__ import annotations

import re

import pytest
from sqlmodel import select
from tests.people.annotation.conftest import filled, people
from tests.people.annotation.server.conftest import Browser

from tether.core.types import assistant, user
from tether.people.annotation.server.app import create_app
from tether.people.annotation.server.site import SiteConfig
from tether.people.annotation.store import Answer
from tether.people.annotation.tables import AssignmentRow, FlagRow, JudgmentRow, TaskRow
from tether.people.annotation.work import Work
from tether.people.labels.votes import Opinion


def rows(store, table):
    with store.reading() as session:
        return list(session.execute(select(table)).scalars())


def live(store):
    return [j for j in rows(store, JudgmentRow) if j.withdrawn is None]


def sides(page):
    """The texts of both answers as the page shows them, the left one first."""
    return re.findall(
        r'<section class="answer".*?<div class="text" '
        r'dir="auto"><p>(.*?)</p>',
        page.text,
        re.DOTALL,
    )


def test_the_answer_that_stood_on_the_chosen_side_is_kept_with_all_that_was_said(
    come,
    store,
    clock,
):
    version = store.set_guidelines("Look for **kindness**.", "me", ["kind", "true"])
    ann = come()
    ann.get("/judge")
    assert "<strong>kindness</strong>" in ann.page.text and "Answer 1" in ann.page.text
    left, right = sides(ann.page)
    clock.now += 42
    more = {
        "strength": "2",
        "comment": " because\r\nit is ",
        "rating-0-left": "5",
        "rating-1-right": "1",
    }
    ann.send("/judge", choice="right", **more)
    assert ann.page.url.path == "/judge" and "Your judgment is kept." in ann.page.text
    (kept,) = live(store)
    task = next(t for t in rows(store, TaskRow) if t.id == kept.task_id)
    with store.reading() as session:
        from tether.people.annotation.tables import ResponseRow

        texts = {
            r.id: r.messages[0]["content"] for r in session.execute(select(ResponseRow)).scalars()
        }
    chosen, other = (
        (task.first_id, task.second_id)
        if kept.choice == "first"
        else (task.second_id, task.first_id)
    )
    assert (texts[other], texts[chosen]) == (left, right)
    answer = {"first": "second", "second": "first"}
    assert kept.ratings == {f"kind/{answer[kept.choice]}": 5, f"true/{kept.choice}": 1}
    assert (kept.strength, kept.comment, kept.seconds, kept.guidelines) == (
        2,
        "because\nit is",
        42.0,
        version,
    )


@pytest.mark.parametrize(("choice", "kept"), [("tie", "tie"), ("both_bad", "both_bad")])
def test_a_tie_has_no_strength(come, store, choice, kept):
    ann = come()
    ann.get("/judge")
    ann.send("/judge", choice=choice, strength="3")
    assert [(j.choice, j.strength) for j in live(store)] == [(kept, None)]


@pytest.mark.parametrize(
    ("measured", "seconds"),
    [("12.5", 12.5), ("", 60.0), ("nan", 60.0), ("-4", 60.0), ("1e300", 61.0), ("x" * 99, 60.0)],
)
def test_time_is_the_scripts_and_without_it_the_servers(come, store, clock, measured, seconds):
    ann = come()
    ann.get("/judge")
    clock.now += 60
    ann.send("/judge", choice="left", seconds=measured)
    assert [j.seconds for j in live(store)] == [seconds]


def test_undo_brings_the_task_back_with_what_was_said(come, store):
    store.set_guidelines("", criteria=["kind"])
    ann = come()
    ann.get("/judge")
    first, before = ann.assignment, sides(ann.page)
    ann.send("/judge", choice="left", comment="a < b", strength="3", **{"rating-0-left": "4"})
    assert ann.assignment != first
    ann.send("/undo")
    assert ann.assignment == first and sides(ann.page) == before and live(store) == []
    assert (
        ">a &lt; b</textarea>" in ann.page.text
        and ('name="rating-0-left" value="4" checked') in ann.page.text
    )
    assert 'name="strength" value="3" checked' in ann.page.text
    ann.send("/judge", choice="tie")
    ann.send("/undo")
    ann.send("/undo")
    assert "judgment to take back." in ann.page.text


def test_skip_and_flag_move_on_and_an_expert_sees_why_without_names(come, store):
    ann, expert = come(name="Ann of Many Words"), come("expert")
    ann.get("/judge")
    skipped = ann.assignment
    ann.send("/skip")
    flagged = ann.assignment
    assert flagged != skipped and "Skipped" in ann.page.text
    ann.send("/flag", reason="both are about something else")
    assert "an expert will look" in ann.page.text and ann.assignment not in (skipped, flagged)
    queue = expert.get("/experts").text
    assert "about something else" in queue and "Ann of Many" not in queue and "Flagged" in queue
    expert.get("/judge")
    assert "about something else" in expert.page.text and "Ann of Many" not in expert.page.text
    assert 'id="flag"' not in expert.page.text
    expert.send("/judge", choice="both_bad")
    assert (
        "Nothing waits for you" in expert.page.text
        and "Nothing waits" in expert.get("/experts").text
    )
    assert store.counts()["tasks_settled"] == 1 and [
        f.resolved is not None for f in rows(store, FlagRow)
    ] == [True]


def test_an_expert_who_skipped_what_waits_is_told_so(come):
    ann, expert = come(), come("expert")
    ann.get("/judge")
    ann.send("/flag", reason="odd")
    expert.get("/judge")
    expert.send("/skip")
    told = " ".join(expert.page.text.split())
    assert "judged, skipped or flagged" in told


def test_an_expert_sees_others_words_by_the_sides_on_the_own_screen(app, come, store):
    names, work = people(store, 2), Work(store, gold_every=0)
    filled(store, prompts=1, answers=2, needed=2, priority=-1.0, round="contested")
    for name, choice in zip(names, ("first", "second"), strict=True):
        held = work.next(name)
        work.judge(held.assignment, name, Opinion(choice, strength=3, comment=f"for the {choice}"))
    expert = come("expert")
    queue = expert.get("/experts").text
    assert all(f"for the {choice}</span>" in queue for choice in ("first", "second"))
    assert "annotator" not in re.sub(r"<[^>]*>", "", queue[queue.index("<ol") :])
    expert.get("/judge")
    left = next(a.left for a in rows(store, AssignmentRow) if str(a.id) == expert.assignment)
    said = dict(
        re.findall(
            r"<li><b>(Answer \d)</b>, by far: <span dir=\"auto\">for the "
            r"(\w+)</span>",
            expert.page.text,
        ),
    )
    assert said == {"Answer 1": left, "Answer 2": "second" if left == "first" else "first"}


def test_pages_of_annotators_hide_gold_and_known_answers(come, store):
    filled(store, prompts=1, answers=2, known="first", priority=-9.0, round="gold")
    page = come().get("/judge").text
    visible = re.sub(r'name="token" value="\w+"|\?v=\w+', "", page)
    assert "gold" not in visible and not re.search(
        r'\b(first|second|known|score|model)\b"',
        visible,
    )


def test_progress_counts_what_is_left_and_a_pause_is_offered(store, come, app):
    app.state.site.settings = SiteConfig(rest_every=5, gold_every=0)
    ann = come()
    seen = []
    for number in range(1, 13):
        ann.get("/judge")
        seen.append(
            tuple(
                int(n)
                for n in re.findall(
                    r"<b>(\d+)</b> (?:judged by "
                    r"you|left)",
                    ann.page.text,
                )
            ),
        )
        ann.send("/judge", choice="left")
        assert (ann.page.url.path == "/rest") == (number in (5, 10))
    assert seen == [(n, 12 - n) for n in range(12)]
    assert "You have judged everything" in ann.page.text
    ann.send("/undo")
    assert "Task 12" in ann.page.text


def test_a_judgment_sent_twice_is_one_and_another_in_its_place_is_explained(come, store):
    ann = come()
    ann.get("/judge")
    fields = ann.hidden()
    for _ in range(2):
        ann.send("/judge", choice="left", **fields)
    assert len(live(store)) == 1
    answer = ann.send("/judge", choice="right", **fields)
    assert answer.status_code == 409 and "is judged already; take" in answer.text


@pytest.mark.parametrize(
    ("path", "fields", "status"),
    [
        ("/judge", {"choice": "first"}, 409),
        ("/judge", {}, 409),
        ("/judge", {"choice": "left", "assignment": "9" * 30}, 400),
        ("/judge", {"choice": "left", "assignment": "-1"}, 400),
        ("/judge", {"choice": "left", "assignment": "²"}, 400),
        ("/judge", {"choice": "left", "guidelines": "one"}, 400),
        ("/judge", {"choice": "left", "strength": "4"}, 400),
        ("/judge", {"choice": "left", "rating-0-left": "6"}, 400),
        ("/judge", {"choice": "left", "comment": "x" * 4001}, 409),
        ("/flag", {"reason": "  "}, 409),
        ("/flag", {"reason": "x" * 4001}, 409),
        ("/skip", {"assignment": "77"}, 409),
    ],
)
def test_a_form_with_nonsense_is_refused_in_a_sentence_and_nothing_is_kept(
    come,
    store,
    path,
    fields,
    status,
):
    store.set_guidelines("", criteria=["kind"])
    ann = come()
    ann.get("/judge")
    before = store.counts()
    answer = ann.send(path, **fields)
    assert answer.status_code == status and "Traceback" not in answer.text and "<h1" in answer.text
    assert store.counts() == before


def test_long_and_many_turned_texts_are_shown_in_part_and_whole_on_request(come, store):
    turns = tuple(
        message for n in range(30) for message in (user(f"question {n}"), assistant(f"reply {n}"))
    )
    prompt = (*turns, user("last question"))
    answers = [
        Answer(prompt, (assistant(f"**{mark}** " + "word " * 3000 + (f"end of {mark}")),))
        for mark in "ab"
    ]
    store.add_answers(answers)
    store.add_tasks(
        [
            TaskRow(
                prompt_id=answers[0].prompt_id,
                first_id=answers[0].id,
                second_id=answers[1].id,
                priority=-5.0,
            ),
        ],
    )
    ann = come()
    page = ann.get("/judge").text
    assert "21 earlier turns" in page and "question 0" not in page and "last question" in page
    assert "end of a" not in page and "Show all 15,0" in page
    whole = ann.get(re.search(r'href="(/whole/\d+/left[^"]*)"', page)[1].replace("&amp;", "&")).text
    assert re.search(r"<strong>[ab]</strong>", whole) and re.search("end of [ab]", whole)
    conversation = ann.get(re.search(r'href="(/whole/\d+/prompt)"', page)[1]).text
    assert "question 0" in conversation and "last question" in conversation
    for path in (
        "/whole/1/elsewhere",
        "/whole/1/left?turn=7",
        "/whole/99/left",
        "/whole/x/left",
        "/whole/1/left?turn=-1",
    ):
        assert ann.get(path).status_code in (400, 404), path


def test_a_time_that_ran_out_is_explained(come, store, clock, app):
    ann, bob = come(name="Ann"), come(name="Bob")
    ann.get("/judge")
    clock.now += 3600
    bob.get("/judge")
    bob.send("/judge", choice="left")
    answer = ann.client.post("/judge", data={**ann.hidden(), "choice": "left"})
    assert answer.status_code == 409 and "task ran out" in answer.text


def test_a_store_on_which_nothing_can_be_written_is_told_and_loses_nothing(
    come,
    store,
    app,
    monkeypatch,
):
    from sqlalchemy.exc import OperationalError

    ann = come()
    ann.get("/judge")

    def full(*_):
        raise OperationalError("INSERT secret words", {}, Exception("database or disk is full"))

    monkeypatch.setattr(app.state.site.work, "judge", full)
    answer = ann.send("/judge", choice="left")
    assert (
        answer.status_code == 503
        and "nothing was kept" in answer.text
        and "secret words" not in answer.text
    )


def test_create_app_is_usable_without_settings(store):
    assert create_app(store).state.site.settings == SiteConfig()


def test_a_page_says_that_the_quota_is_reached_and_counts_down_to_it(store):
    filled(store)
    browser = Browser(create_app(store, SiteConfig(gold_every=0, quota=2)))
    assert "<b>2</b> left" in browser.join(store.invite("Ada")).text
    assert "<b>1</b> left" in browser.send("/judge", choice="left").text
    page = browser.send("/judge", choice="left").text
    assert "as many as you may" in page and "everything there is" not in page
    browser.close()
