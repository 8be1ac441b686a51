"""Who gets in, what a session may do, and from where forms may come."""

from __future__ import annotations

import re
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.people.annotation.conftest import filled

from tether.people.annotation.server.guard import Attempts
from tether.people.annotation.store import DAY


def test_a_forged_or_run_out_invitation_lets_nobody_in(visit, store, clock):
    secret = store.invite("Ann", days=2)
    for wrong in ("forged", "", secret[:-1], secret + "x", "x" * 5000, "' OR 1=1 --"):
        browser = visit()
        assert browser.join(wrong).status_code == 403 and "not valid" in browser.page.text
        assert browser.get("/judge", follow_redirects=False).headers["location"] == "/join"
    clock.now += 2 * DAY + 1
    assert visit().join(secret).status_code == 403


def test_a_whole_link_can_be_pasted_and_a_session_ends(visit, store, clock):
    filled(store)
    browser = visit()
    assert browser.join(f"http://127.0.0.1:8765/join#{store.invite('Ann')}").url.path == "/judge"
    old = dict(browser.client.cookies)
    fields = browser.hidden()
    browser.send("/leave")
    for name, value in old.items():
        browser.client.cookies.set(name, value)
    assert browser.get("/judge").url.path == "/join"
    answer = browser.client.post("/judge", data={**fields, "choice": "left"})
    assert answer.status_code == 401 and store.counts()["judgments"] == 0
    again = visit()
    again.join(store.invite("Ann"))
    clock.now += 7 * DAY + 1
    assert again.get("/judge").url.path == "/join"


def test_guessing_is_slowed_down_by_address(visit, store):
    secret, browser = store.invite("Ann"), visit()
    assert [browser.join(f"wrong {n}").status_code for n in range(12)] == [403] * 10 + [429] * 2
    assert browser.join(secret).status_code == 429 and browser.page.headers["retry-after"] == "60"


def test_forty_attempts_at_once_are_no_more_than_ten():
    attempts, together = Attempts(10), threading.Barrier(40)

    def attempt(number):
        together.wait()
        return attempts.take("a")

    with ThreadPoolExecutor(40) as pool:
        assert sum(pool.map(attempt, range(40))) == 10
    attempts.give_back("a")
    assert attempts.take("a") and not attempts.take("a")


def test_attempts_are_forgotten_after_a_minute_and_memory_is_bounded():
    now = [0.0]
    attempts = Attempts(2, capacity=3, clock=lambda: now[0])
    assert [attempts.take(who) for who in "aaab"] == [True, True, False, True]
    now[0] = 61
    assert [attempts.take("a") for _ in range(3)] == [True, True, False]
    for n in range(99):
        attempts.take(str(n))
    assert len(attempts.failed) == 3


def test_the_session_cookie_is_out_of_reach_of_scripts_and_other_sites(visit, store):
    secret, browser = store.invite("Ann"), visit()
    browser.get("/join")
    cookies = browser.send("/join", code=secret, follow=False).headers.get_list("set-cookie")
    (session,) = [c for c in cookies if c.startswith("tether_session=")]
    assert {"HttpOnly", "SameSite=strict", "Path=/"} <= {
        part.strip() for part in session.split(";")
    } and "Secure" not in session


def test_behind_https_cookies_are_secure(store):
    from tests.people.annotation.server.conftest import Browser

    from tether.people.annotation.server.app import create_app
    from tether.people.annotation.server.site import SiteConfig

    site = "https://judge.example.org"
    browser = Browser(create_app(store, SiteConfig(address=site)))
    browser.client.base_url, browser.client.headers["origin"] = site, site
    browser.get("/join")
    sent = browser.send("/join", code=store.invite("Ann", "admin"), follow=False)
    assert sent.status_code == 303 and all(
        "Secure" in c for c in sent.headers.get_list("set-cookie") if "session=" in c
    )
    browser.get("/admin")
    assert f'value="{site}/join#' in browser.send("/admin/invite", name="Bob", days="2").text
    browser.close()


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("https://Judge.Example.org", "https://judge.example.org"),
        ("https://judge.example.org:443/", "https://judge.example.org"),
        ("HTTPS://judge.example.org:8443", "https://judge.example.org:8443"),
        ("http://[2001:DB8::1]:80", "http://[2001:db8::1]"),
    ],
)
def test_an_address_may_be_written_otherwise_than_browsers_say_it(store, address, said):
    from tests.people.annotation.server.conftest import Browser

    from tether.people.annotation.server.app import create_app
    from tether.people.annotation.server.site import SiteConfig

    browser = Browser(create_app(store, SiteConfig(address=address)))
    # a proxy that does not tell that people came by https
    browser.client.base_url = said.replace("https:", "http:")
    browser.client.headers["origin"] = said
    browser.get("/join")
    token = browser.hidden()["token"]
    cookies = "; ".join(f"{name}={value}" for name, value in browser.client.cookies.items())

    def post():
        return browser.client.post(
            "/join",
            data={"code": "x", "token": token},
            headers={"cookie": cookies},
        )

    assert "not valid" in post().text
    browser.client.headers["origin"] = said.replace("judge", "other").replace("2001", "2002")
    assert "not sent from a" in post().text
    browser.close()


@pytest.mark.parametrize(
    "rest",
    [
        "judge.example.org:99999",
        "judge.example.org:0",
        "me@judge.example.org",
        "judge.example.org/a",
    ],
)
def test_an_address_that_no_browser_would_say_is_refused(rest):
    from tether.people.annotation.server.site import SiteConfig

    with pytest.raises(ValueError, match="address is what people open"):
        SiteConfig(address=f"https://{rest}")


@pytest.mark.parametrize("path", ["/judge", "/skip", "/flag", "/whole"])
def test_nobody_touches_anothers_task(come, store, path):
    ann, bob = come(name="Ann"), come(name="Bob")
    ann.get("/judge")
    bob.get("/judge")
    before, theirs = store.counts(), ann.assignment
    if path == "/whole":
        assert (
            bob.get(f"/whole/{theirs}/left").status_code == 404
            and ann.get(f"/whole/{theirs}/left").status_code == 200
        )
        return
    answer = bob.send(path, choice="left", reason="mine", assignment=theirs)
    assert (
        answer.status_code == 409 and "was not given to" in answer.text and store.counts() == before
    )


CROSS_SITE = [
    {"origin": "http://evil.example"},
    {"origin": "null"},
    {"origin": "http://127.0.0.1:8766"},
    {"origin": "https://127.0.0.1:8765"},
    {"sec-fetch-site": "cross-site"},
    {"sec-fetch-site": "same-site"},
    {"origin": "http://evil.example", "sec-fetch-site": "same-origin"},
]


@pytest.mark.parametrize("headers", CROSS_SITE)
def test_a_form_from_another_site_is_refused_even_with_the_token(come, store, headers):
    ann = come()
    ann.get("/judge")
    assert (
        ann.send("/judge", choice="left", headers=headers).status_code == 403
        and store.counts()["judgments"] == 0
    )


def test_a_form_without_any_origin_or_with_a_foreign_token_is_refused(come, visit, store):
    ann, bob = come(name="Ann"), come(name="Bob")
    bob.get("/judge")
    ann.get("/judge")
    fields = {**ann.hidden(), "choice": "left"}
    for token in (None, "", "x", "ä", bob.hidden()["token"]):
        answer = ann.client.post(
            "/judge",
            data={k: v for k, v in {**fields, "token": token}.items() if v is not None},
        )
        assert answer.status_code == 403 and "older visit" in answer.text
    del ann.client.headers["origin"]
    assert ann.client.post("/judge", data=fields).status_code == 403
    stranger = visit()
    assert (
        stranger.client.post("/join", data={"code": store.invite("Eve"), "token": "x"}).status_code
        == 403
    )
    assert store.counts()["judgments"] == 0
    assert (
        ann.client.post(
            "/judge",
            data=fields,
            headers={"sec-fetch-site": "same-origin"},
        ).status_code
        == 200
    )
    assert store.counts()["judgments"] == 1


def test_every_form_of_every_page_has_a_token(come):
    admin = come("admin")
    for path in (
        "/judge",
        "/experts",
        "/admin",
        "/admin/records",
        "/admin/guidelines",
        "/join",
        "/rest",
    ):
        forms = re.findall(r'<form[^>]*method="post".*?</form>', admin.get(path).text, re.DOTALL)
        assert forms and all('name="token" value="' in form for form in forms), path


@pytest.mark.parametrize("role", ["annotator", "expert"])
def test_pages_of_others_are_closed(come, store, role):
    somebody = come(role)
    somebody.get("/judge")
    posts = {"/admin/invite": {"name": "Eve", "role": "admin", "days": "9"}, "/admin/access": {"name": "x", "lock": "1"},
             "/admin/guidelines": {"text": "cheat", "criteria": ""}}  # fmt: skip
    gets = [
        "/admin",
        "/admin/records",
        "/admin/guidelines",
        *(["/experts"] if role == "annotator" else []),
    ]
    assert [somebody.get(path).status_code for path in gets] == [403] * len(gets)
    somebody.get("/rest")
    assert [somebody.send(path, **fields).status_code for path, fields in posts.items()] == [
        403,
    ] * 3
    assert len(store.annotators()) == 1 and store.all_guidelines() == []


def test_a_link_that_is_followed_again_from_elsewhere_lets_in(visit, store):
    """A browser sends no cookies to a page that another site links to, and sends them with that
    page's form.
    """
    store.invite("Ann")
    assert visit().join(f"/join#{store.invite('Ann')}").status_code == 200
    browser = visit()
    secret = store.invite("Ann")
    browser.join(f"/join#{secret}")
    kept = dict(browser.client.cookies)
    browser.client.cookies.clear()
    browser.get("/join")
    browser.client.cookies.update(kept)
    assert browser.send("/join", code=f"/join#{secret}").status_code == 200
    assert browser.get("/judge").status_code == 200


def leaves(routes):
    """The routes of an application, those of included routers too."""
    for route in routes:
        inner = getattr(getattr(route, "original_router", route), "routes", ())
        yield from [route] if hasattr(route, "path") else leaves(inner)


def test_a_program_that_is_not_signed_in_gets_the_door_alone_at_every_path(app, come, visit):
    """Another user of the machine, a page of another site, and a name of another site that leads
    here.
    """
    come()
    asked = [
        (method, route.path) for route in leaves(app.routes) for method in route.methods or ["GET"]
    ]
    assert len(asked) > 15
    for method, path in asked:
        if path != "/join" and not path.startswith("/static"):
            for headers in ({}, {"origin": "http://evil.example"}):
                answer = visit().client.request(
                    method,
                    path,
                    headers=headers,
                    follow_redirects=False,
                )
                refused = (303, "/join") if method == "GET" else (401, None)
                assert (answer.status_code, answer.headers.get("location")) == refused, (
                    method,
                    path,
                )
        assert (
            visit().client.request(method, path, headers={"host": "evil.example"}).status_code
            == 421
        )
