"""What texts, fields, paths, bodies and names may hold without anything running, leaking or
breaking.
"""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest
from sqlalchemy import text as sql

from tether.core.types import Message, assistant, user
from tether.people.annotation.store import Answer
from tether.people.annotation.tables import TaskRow

SCRIPT = "<script>window.hacked = 1</script><img src=x onerror='hacked=1'>\"'><svg onload=hacked=1>"
HOSTILE_MARKDOWN = (
    SCRIPT + "\n\n[a](javascript:alert(1)) [b](JaVaScRiPt&#58;alert(1)) [c](data:text/html,x) "
    "[d](/admin/access) "
    '![e](http://evil.example/x.png) ![<b>](x) [f](http://ok.example/"onmouseover=alert(1)) '
    "<http://ok.example/>\n\n"
    '# heading\n\n```"><script>\n</code></pre><script>x</script>\n```\n\n<!-- -->'
)
INJECTION = "'); DROP TABLE judgments; --"


ALLOWED = re.compile(
    "a|article|aside|b|blockquote|body|button|code|dd|details|div|dl|dt|em|fieldset|figcaption|figure|form|h1|h2|h3|h4|h5|h6|head|header|html|hr|br|input|kbd|label|legend"
    "|li|line|link|main|meta|nav|ol|option|p|pre|progress|rect|s|script|section|select|small|span|strong|summary|svg|table|tbody|td|textarea|th|thead|title|tr|ul",
)


class Dangers(HTMLParser):
    """Collects tags and attributes that no page of ours has; text, whatever it says, is none."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag, attrs):
        ours = re.compile(r"/|#|data:,$|http://ok\.example/")
        for name, value in attrs:
            if (
                name.startswith("on")
                or name == "style"
                or (name in ("src", "href", "action") and not ours.match(value or ""))
            ):
                self.found.append(f"{tag} {name}={value}")
        if not ALLOWED.fullmatch(tag) or (
            tag == "script" and not (dict(attrs).get("src") or "").startswith("/static/judge.js?v=")
        ):
            self.found.append(tag)


def dangerous(page):
    parser = Dangers()
    parser.feed(page)
    return parser.found


def test_nothing_that_models_or_people_write_runs(come, store, visit):
    prompt = (Message("system", HOSTILE_MARKDOWN), user(HOSTILE_MARKDOWN))
    answers = [Answer(prompt, (assistant(HOSTILE_MARKDOWN + mark),), model=SCRIPT) for mark in "ab"]
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
    store.set_guidelines(HOSTILE_MARKDOWN, SCRIPT, ["<b>kind</b>"])
    ann, expert, admin = come(name=SCRIPT[:80]), come("expert"), come("admin")
    pages = [
        ann.get("/judge").text,
        ann.send("/flag", reason=HOSTILE_MARKDOWN).text,
        expert.get("/experts").text,
    ]
    pages += [expert.get("/judge").text]
    for part in ("prompt", "left?turn=0", "prompt?turn=1"):
        pages.append(expert.get(f"/whole/{expert.get('/judge') and expert.assignment}/{part}").text)
    expert.get("/judge")
    expert.send("/judge", choice="left", comment=SCRIPT)
    pages += [
        expert.send("/undo").text,
        admin.get("/admin").text,
        admin.send("/admin/invite", name=SCRIPT[:70], days="3").text,
    ]
    pages += [
        admin.get("/admin/guidelines").text,
        admin.get(f"/admin/guidelines?version={SCRIPT}").text,
    ]
    pages += [
        ann.get(f"/judge?done={SCRIPT}").text,
        ann.get(f"/{SCRIPT}").text,
        visit().join(SCRIPT).text,
    ]
    assert [dangerous(page) for page in pages] == [[]] * len(pages)
    assert sum("&lt;script&gt;" in page for page in pages) > 8
    assert dangerous(pages[0] + "<img src=x>" + "<p onclick=x>" + '<a href="javascript:x">') != []
    assert (
        'href="http://ok.example/' in pages[0]
        and "[image: e]" in pages[0]
        and "evil.example" not in pages[0]
    )


def test_an_answer_of_a_million_characters_is_a_small_page_and_whole_on_request(come, store):
    prompt = (user("long"),)
    answers = [
        Answer(prompt, (assistant(text),))
        for text in ("[" * 1_000_000, ("\ud800\x00 half a pair ") + "x" * 50_000)
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
    page = ann.get("/judge")
    assert (
        page.status_code == 200
        and len(page.content) < 60_000
        and ("Show all 1,000,000 characters") in page.text
    )
    sizes = [
        ann.get(f"/whole/{ann.get('/judge') and ann.assignment}/{side}")
        for side in ("left", "right")
    ]
    assert max(answer.text.count("[") for answer in sizes) == 1_000_000 and {
        s.status_code for s in sizes
    } == {200}


def test_sql_in_every_field_is_only_text(come, store):
    store.set_guidelines("x", criteria=["kind"])
    ann, admin = come(name=INJECTION), come("admin")
    ann.get("/judge")
    for field in (
        "assignment",
        "guidelines",
        "opened",
        "seconds",
        "strength",
        "rating-0-left",
        "choice",
    ):
        ann.get("/judge")
        assert ann.send("/judge", **{"choice": "left", field: INJECTION}).status_code in (
            200,
            400,
            409,
        )
    ann.get("/judge")
    ann.send("/judge", choice="left", comment=INJECTION)
    ann.send("/flag", reason=INJECTION)
    ann.get(f"/judge?done={INJECTION}")
    ann.get(f"/whole/{INJECTION}/{INJECTION}?turn={INJECTION}")
    admin.get(f"/admin/guidelines?version={INJECTION}")
    admin.get("/admin/guidelines")
    admin.send("/admin/guidelines", text=INJECTION, criteria=INJECTION)
    for fields in (
        {"name": INJECTION + "2", "role": "annotator", "days": "3"},
        {"name": "n", "role": INJECTION, "days": "3"},
    ):
        admin.get("/admin")
        admin.send("/admin/invite", **fields)
    admin.get("/admin")
    admin.send("/admin/access", name=INJECTION, lock="1")
    with store.reading() as session:
        assert (
            session.execute(
                sql("SELECT count(*) FROM judgments WHERE comment = :c"),
                {"c": INJECTION},
            ).scalar()
            == 1
        )
        assert (
            session.execute(
                sql("SELECT count(*) FROM flags WHERE reason = :c"),
                {"c": INJECTION},
            ).scalar()
            == 1
        )
    assert store.guidelines().text == INJECTION and store.guidelines().criteria == [INJECTION]
    assert {a.name: a.disabled for a in store.annotators()}[INJECTION]
    assert ann.get("/judge").url.path == "/join"


PATHS = ["/static/../app.py", "/static/..%2fapp.py", "/static/%2e%2e/app.py", "/static//etc/passwd", "/static/....//app.py",
         "/static/..%5capp.py", "/static/judge.css%00.py", "/static/", "/static"]  # fmt: skip


@pytest.mark.parametrize("path", PATHS)
def test_no_path_leads_out_of_the_static_files(visit, path):
    answer = visit().get(path)
    assert (
        answer.status_code == 404 and "create_app" not in answer.text and "root:" not in answer.text
    )


def test_a_huge_or_strange_body_is_refused_before_it_is_read(come, store):
    ann = come()
    ann.get("/judge")
    fields, parts = ann.hidden(), iter([b"x" * 65536] * 64)
    assert ann.send("/judge", choice="left", comment="x" * (1 << 20)).status_code == 413
    form = {"content-type": "application/x-www-form-urlencoded"}
    # of no announced length
    assert ann.client.post("/judge", content=parts, headers=form).status_code == 413
    assert (
        ann.client.post(
            "/judge",
            content=b"&".join(b"a%d=1" % n for n in range(1000)),
            headers=form,
        ).status_code
        == 400
    )
    assert ann.client.post("/judge", json=fields).status_code == 415
    assert ann.client.post("/judge", files={"a": b"x"}, data=fields).status_code == 415
    assert ann.client.post("/judge", content=b"\xff\xfe%ff%", headers=form).status_code == 403
    assert store.counts()["judgments"] == 0


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "127.0.0.1.evil.example",
        "evil.example:8765",
        "",
        "127.0.0.1@evil.example",
        "[::2]",
        "[",
        "a/b",
    ],
)
def test_a_name_that_is_not_ours_gets_nothing(come, host):
    ann = come()
    answer = ann.get("/judge", headers={"host": host})
    assert answer.status_code == 421 and "Answer" not in answer.text
    assert [
        ann.get("/judge", headers={"host": good}).status_code
        for good in ("127.0.0.1:8765", "localhost", "[::1]:1")
    ] == [200] * 3


def test_every_response_carries_the_headers(come, app, monkeypatch, visit):
    ann = come()
    pages = [
        ann.get("/judge"),
        ann.get("/nope"),
        ann.get("/admin"),
        visit().get("/join"),
        ann.client.put("/judge"),
    ]
    pages += [
        ann.get("/judge", headers={"host": "evil.example"}),
        ann.get("/judge", follow_redirects=False),
    ]
    monkeypatch.setattr(app.state.site.work, "next", lambda _: 1 / 0)
    pages.append(ann.get("/judge"))
    assert [page.status_code for page in pages] == [200, 404, 403, 200, 405, 421, 200, 500]
    for page in pages:
        policy = page.headers["content-security-policy"]
        assert (
            "default-src 'none'" in policy
            and "frame-ancestors 'none'" in policy
            and "unsafe" not in policy
        )
        assert (
            page.headers["x-content-type-options"] == "nosniff"
            and page.headers["cache-control"] == "no-store"
        )
        assert (
            page.headers["referrer-policy"] == "same-origin"
            and page.headers["x-frame-options"] == "DENY"
        )
    assert "ZeroDivision" not in pages[-1].text and "log says more" in pages[-1].text
    assert "max-age" in ann.get("/static/judge.js").headers["cache-control"]


def test_documentation_of_the_interface_is_not_served(visit):
    assert {visit().get(path).status_code for path in ("/docs", "/redoc", "/openapi.json")} == {404}
