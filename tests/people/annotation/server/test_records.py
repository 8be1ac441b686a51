"""The administrator's records, further questions and better answers, by forms alone."""

from __future__ import annotations

import html
import re

import pytest
from tests.people.annotation.conftest import filled
from tests.people.annotation.server.test_judging import live

from tether.people.annotation.exchange import cases
from tether.people.annotation.exporting import demonstrations
from tether.people.annotation.tables import TaskRow

SCRIPT = "<script>alert(1)</script>"


def text_of(page):
    return html.unescape(" ".join(re.sub(r"<[^>]*>", " ", page.text).split()))


def test_questions_are_asked_kept_and_demanded(come, store):
    store.set_guidelines("", "me", ["kind", "helpful: scale", f"{SCRIPT[:20]}: two"])
    ann = come(name="Ann")
    assert SCRIPT[:20] not in ann.get("/judge").text
    assert 'name="question-1"' in ann.page.text and 'name="rating-0-left"' in ann.page.text
    left = re.search(r'id="h-left".*?<p>(.*?)</p>', ann.page.text, re.DOTALL)[1]
    for bad in ({}, {"question-1": "0"}, {"question-1": "7", "question-2": "0"},
                {"question-1": "0", "question-2": "x"}):  # fmt: skip
        refused = ann.send("/judge", choice="left", **bad)
        assert refused.status_code == 400 and live(store) == []
        ann.get("/judge")
    ann.send("/judge", choice="left", correction=SCRIPT, **{"question-1": "4", "question-2": "0"})
    (kept,) = live(store)
    (case,) = cases(store, TaskRow.id == kept.task_id)
    sides = {"left": "first" if case.first.response[0].content == left else "second"}
    other = {"first": "second", "second": "first"}[sides["left"]]
    assert kept.ratings == {
        f"helpful/better/{other}": 1,
        f"{SCRIPT[:20]}/better/{sides['left']}": 5,
    }
    ann.send("/undo")
    chosen = r'name="question-1" value="4"[^>]* checked'
    assert re.search(chosen, ann.page.text) and html.escape(SCRIPT) in ann.page.text
    ann.send("/judge", choice="left", **{"question-1": "3", "question-2": "0"})
    assert live(store)[0].ratings["helpful/better/tie"] == 5 and live(store)[0].correction == ""


def test_records_are_filtered_and_say_what_people_said(come, store):
    store.set_guidelines("", "me", ["helpful: scale"])
    ann, admin = come(name="Ann & Bea"), come("admin")
    ann.get("/judge")
    ann.send("/judge", choice="both_bad", comment=SCRIPT, correction="mine", **{"question-0": "6"})
    ann.get("/judge")
    ann.send("/flag", reason="look <here>")
    whole = text_of(admin.get("/admin/records"))
    assert "12 pairs" in whole
    seen = text_of(admin.get("/admin/records?annotator=Ann+%26+Bea"))
    assert "1 pair " in seen and "Both bad; helpful: Answer" in seen and "by far" in seen
    assert "Better answer: mine" in seen and SCRIPT in seen and SCRIPT not in admin.page.text
    flagged = text_of(admin.get("/admin/records?state=expert"))
    assert "1 pair " in flagged and "Flagged : look <here>" in flagged
    assert "2 pairs" in text_of(admin.get("/admin/records?text=ANSWER%200%20to%201"))
    assert "0 pairs" in text_of(admin.get(f"/admin/records?text={SCRIPT}&tag=%25"))
    assert SCRIPT not in admin.page.text


@pytest.mark.parametrize(
    "query",
    [
        "state=lost",
        "after=-1",
        "after=x",
        "words=x",
        "text=" + "x" * 201,
        "text=a%00b",
        "tag=" + "x" * 60_000,
    ],
)
def test_an_odd_search_is_refused_in_a_sentence(come, query):
    page = come("admin").get(f"/admin/records?{query}")
    assert page.status_code == 409 and "The search" in page.text and len(page.text) < 10_000


def test_a_better_answer_of_a_megabyte_is_refused_and_the_task_stays(come, store):
    ann = come()
    ann.get("/judge")
    assert ann.send("/judge", choice="left", correction="x" * 2**20).status_code == 413
    ann.get("/judge")
    long = ann.send("/judge", choice="left", correction="x" * 20_001)
    assert long.status_code == 409 and "20000" in long.text and live(store) == []
    ann.get("/judge")
    ann.send("/judge", choice="left", correction="x" * 20_000)
    assert len(next(demonstrations(store)).messages[-1].content) == 20_000


def test_pages_of_records_follow_each_other_with_their_filter(come, store, visit):
    filled(store, prompts=20, answers=3, round="more")
    admin = come("admin")
    seen = re.findall(r"Pair (\d+)", admin.get("/admin/records?tag=more&text=answer").text)
    while link := re.search(r'href="(\?[^"]*)">Next', admin.page.text):
        page = admin.get(f"/admin/records{html.unescape(link[1])}")
        seen += re.findall(r"Pair (\d+)", page.text)
        assert 'value="more"' in page.text
    assert len(seen) == len(set(seen)) == 60
