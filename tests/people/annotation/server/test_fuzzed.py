"""Requests with anything in them, by strangers, by pages of other sites and by people who are signed
in: each gets a page, and the store holds only what people judged.
"""

from __future__ import annotations

import random

import pytest
from tests.bad_input.rows import write
from tests.people.annotation.server.conftest import ORIGIN
from tests.people.annotation.server.test_hostile import INJECTION, SCRIPT, dangerous
from tests.people.annotation.test_fuzzed_imports import PAGE, bent
from tests.people.annotation.test_work import check

from tether.core.errors import DataError
from tether.people.annotation.importing import import_cases, read_cases

PATHS = [
    *(
        "/",
        "/join",
        "/judge",
        "/rest",
        "/experts",
        "/admin",
        "/admin/records",
        "/admin/guidelines",
        "/nowhere",
    ),
    *("/leave", "/undo", "/skip", "/flag", "/admin/invite", "/admin/access", "/whole/1/prompt"),
    *("/whole/1/left?turn=0", "/whole/9999999999/left", "/whole/-1/right", "/whole/1/%00"),
    *("/static/judge.js", "/static/../app.py", "/judge?done=kept", f"/judge?done={INJECTION}"),
    *("/admin/guidelines?version=9", "/admin/guidelines?version=x", "//judge", "/judge/", "/%ff"),
]
ODD = [
    *("", "0", "-1", "1", "9" * 400, "NaN", "1e999", "\x00", "\ud800", "left", "right", "tie"),
    *("both_bad", INJECTION, SCRIPT, "x" * 5000, "é\u202e", "../..", "annotator", "admin"),
]
FIELDS = [
    *("token", "assignment", "guidelines", "opened", "seconds", "strength", "choice", "comment"),
    *("rating-0-left", "rating-0-right", "reason", "name", "role", "days", "lock", "text", "code"),
]
HEADERS: dict[str, list[str]] = {
    "host": ["evil.example", "", "127.0.0.1:8765", "localhost", "[::1]", "a\tb", "x" * 9000],
    "origin": ["http://evil.example", "null", ORIGIN, "", "file://"],
    "sec-fetch-site": ["cross-site", "same-origin", "none", "x"],
    "content-type": ["text/plain", "application/json", "multipart/form-data; boundary=x", ""],
    "content-length": ["-1", "x", "99999999999", "0"],
    "x-forwarded-for": ["127.0.0.1", "'"],
    "cookie": ["tether_session=x", "=;=;", "tether_session=" + "y" * 4000],
    "range": ["bytes=0-1,5-,-1"],
    "x-http-method-override": ["DELETE"],
}
METHODS = ["GET", "POST", "POST", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH", "TRACE"]


def sent(draw, browser):
    """The answer to one odd request, half of them with a form as the pages have it."""
    method, path = draw.choice(METHODS), draw.choice(PATHS)
    headers = {"origin": ORIGIN}
    for name in draw.sample([*HEADERS], draw.choice([0, 0, 1, 2])):
        headers[name] = draw.choice(HEADERS[name])
    form = browser.hidden() if browser.page is not None and draw.random() < 0.7 else {}
    if form and draw.random() < 0.5:
        form["choice"] = draw.choice(["left", "right", "tie"])
    for name in draw.sample(FIELDS, draw.choice([0, 1, 3])):
        form[name] = draw.choice(ODD)
    body = {"data": {name: text.encode(errors="replace").decode() for name, text in form.items()}}
    if draw.random() < 0.15:
        body = {"content": draw.choice([b"\xff" * 300, b"a=1&" * 900, b"{", b"x" * (1 << 21), b""])}
    if draw.random() < 0.05:
        body = {"files": {"upload": (SCRIPT, b"\x00" * 100_000, "text/html")}}
    if method in ("GET", "HEAD", "OPTIONS", "TRACE"):
        body = {}
    clean = {name: value.encode() for name, value in headers.items()}
    answer = browser.client.request(method, path, headers=clean, follow_redirects=False, **body)
    if "text/html" in answer.headers.get("content-type", "") and answer.status_code == 200:
        browser.page = answer
    return method, path, headers, body, answer


def attack(app, come, visit, store, folder, count):
    """So many requests by three people and a stranger, over a store of hostile rows."""
    draw = random.Random(count)
    rows = [
        {"prompt": f"{PAGE} {n}", "chosen": PAGE * 40 + str(n), "rejected": SCRIPT + str(n)}
        for n in range(30)
    ]
    import_cases(store, read_cases(write(folder / "pages.jsonl", *rows)))
    for number in range(40):
        path = write(folder / f"{number}.jsonl", *(bent(draw) for _ in range(5)))
        try:
            import_cases(store, read_cases(path))
        except DataError:
            continue
    callers = {
        "stranger": visit(),
        "annotator": come(),
        "expert": come("expert"),
        "admin": come("admin"),
    }
    people = {person.name for person in store.annotators()}
    for number in range(count):
        who = draw.choice([*callers])
        browser = callers[who]
        signed_in = who != "stranger" and draw.random() < 0.3
        if signed_in and browser.get("/judge").url.path == "/join":
            # an earlier request has signed out
            app.state.site.attempts.failed.clear()
            browser = callers[who] = come(who, f"{who} {number}")
        method, path, headers, body, answer = sent(draw, browser)
        about = f"request {number} of {who}: {method} {path} {headers!r:.300} {body!r:.300}"
        assert answer.status_code < 500 or answer.status_code == 501, (about, answer.text[-500:])
        if not path.startswith("/static"):
            assert dangerous(answer.text) == [], about
        assert "content-security-policy" in answer.headers and "Traceback" not in answer.text, about
        if who == "stranger" and not path.startswith("/static"):
            assert PAGE not in answer.text and "Answer 1" not in answer.text, about
            assert answer.status_code != 200 or path.startswith(("/join", "/?")), about
        if who in ("annotator", "expert") and path.startswith("/admin"):
            assert answer.status_code != 200, about
        if method == "POST" and headers.get("origin") in ("http://evil.example", "null", "file://"):
            assert answer.status_code in (307, 400, 401, 403, 404, 405, 413, 421), about
    check(store)
    assert people <= {person.name for person in store.annotators()}


def test_odd_requests_get_a_page_and_leave_the_store_whole(app, come, visit, store, tmp_path):
    attack(app, come, visit, store, tmp_path, 150)


@pytest.mark.slow
def test_five_thousand_odd_requests_get_a_page_and_leave_the_store_whole(
    app,
    come,
    visit,
    store,
    tmp_path,
):
    attack(app, come, visit, store, tmp_path, 5000)
    app.state.site.attempts.failed.clear()
    fresh = come(name="somebody new")
    assert fresh.get("/judge").status_code == 200
