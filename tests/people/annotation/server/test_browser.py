"""In a real browser: an annotator, an expert and an administrator; what they judge trains a reward
model.
"""

from __future__ import annotations

import re
import threading
import time
from typing import Any

import pytest
from sqlmodel import select
from tests.people.annotation.conftest import filled

from tether.core.types import assistant, user
from tether.people.annotation.exchange import cases
from tether.people.annotation.exporting import export_labels
from tether.people.annotation.server.address import listen
from tether.people.annotation.server.app import create_app
from tether.people.annotation.server.site import SiteConfig
from tether.people.annotation.store import Answer, Store
from tether.people.annotation.tables import JudgmentRow, TaskRow

pytestmark = pytest.mark.browser
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
         "--disable-component-update", "--disable-sync"]  # fmt: skip
READY = "body[data-ready]"
WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
CONTRAST = """() => {
  const parse = (c) => (c.match(/[\\d.]+/g) || []).map(Number);
  const linear = (v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  const luminance = (rgb) => rgb.slice(0, 3).map((v) => linear(v / 255))
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const ground = (e) => { for (; e; e = e.parentElement) { const c = parse(getComputedStyle(e).backgroundColor);
    if (c.length === 3 || c[3] === 1) return c; } return [255, 255, 255]; };
  const found = [], walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const e = walker.currentNode.parentElement, style = getComputedStyle(e);
    if (!walker.currentNode.textContent.trim() || !e.offsetParent || style.clipPath !== "none") continue;
    const [a, b] = [luminance(parse(style.color)), luminance(ground(e))].sort((x, y) => y - x);
    found.push([(a + 0.05) / (b + 0.05), `${e.tagName}.${e.className}: ${walker.currentNode.textContent.trim().slice(0, 30)}`]);
  }
  return found;
}"""


class Visits:
    """Browser pages of people with sessions of their own, and everything that goes wrong on
    them.
    """

    def __init__(self, browser: Any, store: Store, origin: str) -> None:
        self.browser, self.store, self.origin = browser, store, origin
        self.problems: list[str] = []

    def come(self, name: str, role: Any = "annotator", **context: Any) -> Any:
        page = self.browser.new_context(**context).new_page()
        page.set_default_timeout(20_000)
        page.on("console", lambda message: self.problems.append(message.text))
        page.on("pageerror", lambda error: self.problems.append(str(error)))
        page.on(
            "request",
            lambda r: r.url.startswith((self.origin, "data:")) or self.problems.append(r.url),
        )
        secret = self.store.invite(name, role)
        page.goto(f"{self.origin}/join#{secret}")
        page.wait_for_url(re.compile(r"/(judge|experts|admin)$"))
        assert secret not in page.url and page.evaluate("document.referrer").count(secret) == 0
        return page


@pytest.fixture(scope="module")
def browser(chromium_path: str) -> Any:
    from playwright.sync_api import sync_playwright

    with (
        sync_playwright() as driver,
        driver.chromium.launch(executable_path=chromium_path, args=FLAGS) as browser,
    ):
        yield browser


@pytest.fixture
def visits(tmp_path: Any, browser: Any) -> Any:
    import uvicorn

    store = Store(tmp_path / "prefs.db")
    opened, settings = listen(SiteConfig(port=0, gold_every=0))
    server = uvicorn.Server(
        uvicorn.Config(create_app(store, settings), log_level="warning", log_config=None),
    )
    thread = threading.Thread(target=server.run, kwargs={"sockets": [opened]})
    thread.start()
    made = Visits(browser, store, settings.origin)
    yield made
    for context in browser.contexts:
        context.close()
    server.should_exit = True
    thread.join()
    store.close()
    assert made.problems == []


def words(store: Store, needed: int) -> None:
    """Ten prompts, each with a good answer that ends in `!` and a bad one that begins with `no`."""
    pairs = [
        [Answer((user(w),), (assistant(text),)) for text in (f"{w}!", f"no {w}")] for w in WORDS
    ]
    store.add_answers([answer for pair in pairs for answer in pair])
    store.add_tasks(
        [
            TaskRow(prompt_id=a.prompt_id, first_id=a.id, second_id=b.id, needed=needed)
            for a, b in pairs
        ],
    )


def send(page: Any, button: str) -> None:
    """Click a button that sends a form, and wait for the page that answers."""
    with page.expect_navigation():
        page.click(button)


def press_better(page: Any) -> str:
    """Judge by the keyboard as one who likes `!`; returns the prompt."""
    page.wait_for_selector(READY)
    prompt = page.inner_text(".conversation .text")
    left = page.inner_text("section.answer >> nth=0 >> .text")
    with page.expect_navigation():
        page.keyboard.press("1" if left.endswith("!") else "2")
    return prompt


def test_people_judge_by_keys_an_expert_settles_and_a_reward_model_learns_it(
    visits: Visits,
    tmp_path: Any,
) -> None:
    store = visits.store
    words(store, needed=2)
    store.set_guidelines("Prefer what **ends** well.", criteria=["kind"])
    ann, bob = visits.come("Ann"), visits.come("Bob")
    for _ in range(3):
        last = press_better(ann)
    ann.wait_for_selector(READY)
    assert (
        ann.inner_text("#said") == "Your judgment is kept."
        and ann.evaluate("document.activeElement.id") == "task"
    )
    with ann.expect_navigation():
        ann.keyboard.press("u")
    ann.wait_for_selector(READY)
    assert ann.inner_text(".conversation .text") == last and store.counts()["judgments"] == 2
    ann.keyboard.press("c")
    ann.keyboard.type("120 s b")  # letters and digits that are keys elsewhere
    ann.keyboard.press("Escape")
    ann.keyboard.press("m")
    ann.keyboard.press("m")
    ann.check("input[name=rating-0-left][value='4']", force=True)
    press_better(ann)
    ann.wait_for_selector(READY)
    ann.keyboard.press("f")
    ann.keyboard.type("what is this about?")
    with ann.expect_navigation():
        ann.keyboard.press("Tab")
        ann.keyboard.press("Enter")
    while ann.url.endswith(("judge", "#task")) and ann.query_selector("#verdict"):
        press_better(ann)
    for turn in range(9):
        bob.wait_for_selector(READY)
        if turn:
            press_better(bob)
        else:
            with bob.expect_navigation():
                bob.keyboard.press("0")
    assert "everything there is" in bob.inner_text("h1")
    expert = visits.come("Eve", "expert")
    assert expert.locator(".queue > li").count() == 2 and (
        "what is this about?"
    ) in expert.inner_text("main")
    send(expert, "text=Settle the next one")
    for _ in range(2):
        press_better(expert)
    assert "Nothing waits" in expert.inner_text("h1")
    admin = visits.come("Ada", "admin")
    figures = admin.locator(".tile", has_text="raw agreement").inner_text()
    # Bob's tie is the one of nine on which they differ
    assert "0.89" in figures and "9 tasks" in figures
    with store.reading() as session:
        judged = list(session.execute(select(JudgmentRow)).scalars())
    kept = [j for j in judged if j.comment == "120 s b"]
    assert [(j.strength, list(j.ratings.values())) for j in kept] == [(2, [4])] and all(
        0.2 < j.seconds < 60 for j in judged
    )
    assert learned(store, tmp_path) > 0.9


def learned(store: Store, folder: Any) -> float:
    """The share of held-out pairs that a tiny reward model, trained on what was judged, ranks as
    the people did.
    """
    from tether.runner.run import run_recipe
    from tether.settings.reading import build
    from tether.settings.recipe import Recipe

    # what people agree on and what an expert settled
    assert export_labels(store, folder / "pairs.jsonl", how="majority") == 10
    reward = {
        "data": {"path": str(folder / "pairs.jsonl")},
        "epochs": 6,
        "heldout_fraction": 0.4,
        "lora": {"rank": 4, "last_layers": 1},
        "optimizer": {"learning_rate": 1e-2},
    }
    made = build(
        Recipe,
        {
            "run": str(folder / "run"),
            "model": {"source": "tiny", "dtype": "float32"},
            "reward": reward,
        },
    )
    return run_recipe(made, ("reward",))["reward"]["heldout_accuracy"]["value"]


def test_further_questions_and_a_better_answer_by_keys(visits: Visits, tmp_path: Any) -> None:
    store = visits.store
    words(store, needed=1)
    store.set_guidelines("", criteria=["harmless: two", "kind", "helpful: scale"])
    ann = visits.come("Ann")
    ann.wait_for_selector(READY)
    prompt = ann.inner_text(".conversation .text")
    left = ann.inner_text("section.answer >> nth=0 >> .text")
    ann.keyboard.press("1")  # no judgment without answers: the first question has the focus
    harmless, helpful = (f"document.activeElement.name == 'question-{place}'" for place in (0, 2))
    ann.wait_for_selector("[name=question-0]:focus")
    assert store.counts()["judgments"] == 0
    ann.keyboard.press("Escape")
    ann.keyboard.press("q")
    assert ann.evaluate(harmless)
    ann.keyboard.press("2")
    assert ann.evaluate(helpful)
    ann.keyboard.press("3")
    assert ann.evaluate("document.activeElement.id") == "task"
    ann.keyboard.press("w")
    ann.keyboard.type("1 of mine")
    ann.keyboard.press("Escape")
    with ann.expect_navigation():
        ann.keyboard.press("2")
    (case,) = cases(store, TaskRow.judged > 0)
    (one,) = case.opinions
    names = {left: "left"}
    places = [names.get(side.response[0].content, "right") for side in (case.first, case.second)]
    seen = one.placed(dict(zip(("first", "second"), places, strict=True)))
    assert (seen.choice, seen.correction) == ("right", "1 of mine")
    assert seen.ratings == {"harmless/better/right": 5, "helpful/better/left": 1}
    admin = visits.come("Ada", "admin")
    admin.goto(visits.origin + "/admin/records")
    admin.fill("#text", prompt)
    send(admin, "text=Filter")
    assert admin.locator(".queue > li").count() == 1
    listed = admin.inner_text(".queue")
    assert "1 of mine" in listed and "helpful: Answer" in listed and "slightly" in listed
    admin.fill("#text", "<script>nothing")
    send(admin, "text=Filter")
    assert "0 pairs" in admin.inner_text("main") and admin.input_value("#text").startswith("<sc")


OTHERS = [pytest.param(*pair, marks=pytest.mark.slow) for pair in ((360, "light"), (1280, "dark"))]


@pytest.mark.parametrize(("width", "scheme"), [(360, "dark"), (1280, "light"), *OTHERS])
def test_every_page_fits_reads_well_and_has_its_landmarks(
    visits: Visits,
    width: int,
    scheme: Any,
) -> None:
    filled(visits.store)
    visits.store.set_guidelines(
        "# A\n\ntext `code` [link](https://a.example)\n\n> quote",
        criteria=["a criterion of some length", "a question of some length: scale", "kind: two"],
    )
    page = visits.come(
        "Ada with a long name that goes on",
        "admin",
        viewport={"width": width, "height": 740},
        color_scheme=scheme,
    )
    ann = visits.come("Ann", viewport={"width": width, "height": 740}, color_scheme=scheme)
    ann.wait_for_selector(READY)
    ann.keyboard.press("f")
    ann.keyboard.type("see")
    for path in (
        "/admin",
        "/admin/records",
        "/admin/guidelines",
        "/experts",
        "/judge",
        "/rest",
        "/join",
        "/nowhere",
        "ann",
    ):
        if path == "ann":
            page = ann
        else:
            page.goto(visits.origin + path)
        assert page.evaluate("document.documentElement.scrollWidth - innerWidth") == 0, path
        poor = [what for ratio, what in page.evaluate(CONTRAST) if ratio < 4.5]
        assert poor == [] and len(page.evaluate(CONTRAST)) > 2, path
        facts = page.evaluate("""() => [document.querySelectorAll('main').length, document.querySelectorAll('h1').length,
          [...document.querySelectorAll('input:not([type=hidden]), select, textarea')].filter((e) => !e.labels.length).length,
          [...document.querySelectorAll('button')].filter((e) => !e.textContent.trim()).length,
          [...document.querySelectorAll('button, .button, summary')].filter((e) => e.offsetParent && !e.closest('td')
            && e.getBoundingClientRect().height < 24).length]""")
        assert facts == [1, 1, 0, 0, 0], path
    visits.problems[:] = [p for p in visits.problems if "404" not in p]


@pytest.mark.audit
@pytest.mark.parametrize("size", [(1280, 740), (390, 844)])
def test_nobody_sees_what_is_hidden(visits: Visits, size: tuple[int, int]) -> None:
    filled(visits.store)
    for script in (True, False):
        page = visits.browser.new_context(
            viewport={"width": size[0], "height": size[1]},
            java_script_enabled=script,
        ).new_page()
        page.goto(f"{visits.origin}/join#{visits.store.invite('Ann')}")
        if script:
            page.wait_for_selector(READY)
        else:
            page.fill("#code", visits.store.invite("Ann"))
            send(page, "text=Come in >> nth=-1")
        assert page.locator("#verdict").count() == 1 and page.is_visible("button.choice.left")
        hidden = page.locator("[hidden]").all()
        assert len(hidden) >= 1 and [e.text_content() for e in hidden if e.is_visible()] == []
        assert "sends nothing" not in page.inner_text("body")


def test_everything_works_without_the_script(visits: Visits) -> None:
    filled(visits.store)
    page = visits.browser.new_context(java_script_enabled=False).new_page()
    page.goto(f"{visits.origin}/join#{visits.store.invite('Ann')}")
    page.fill("#code", visits.store.invite("Ann"))
    send(page, "text=Come in >> nth=-1")
    assert not page.is_visible("#keys") and not page.is_visible("kbd >> nth=0")
    page.focus('input[name="strength"] >> nth=1')
    page.keyboard.press("Enter")
    page.wait_for_timeout(100)
    assert visits.store.counts()["judgments"] == 0
    send(page, "button.choice.right")
    send(page, "button:has-text('Undo')")
    send(page, "button:has-text('Skip')")
    page.click("#flag summary")
    page.fill("#reason", "odd")
    send(page, "text=Send it to an expert")
    assert (
        "an expert will look" in page.inner_text("#said")
        and visits.store.counts()["open_flags"] == 1
    )
    send(page, "text=Leave")
    assert page.url.endswith("/join")


def test_keys_can_be_turned_off_and_stay_off(visits: Visits) -> None:
    filled(visits.store)
    page = visits.come("Ann")
    for _ in range(2):
        page.wait_for_selector(READY)
        page.set_checked("#keys", False)
        page.keyboard.press("1")
        page.keyboard.press("s")
        page.wait_for_timeout(200)
        assert visits.store.counts()["judgments"] == 0 and visits.store.counts()["assignments"] == 1
        page.reload()
        page.wait_for_selector(READY)
        assert not page.is_checked("#keys")
    page.check("#keys")
    with page.expect_navigation():
        page.keyboard.press("b")
    assert visits.store.counts()["judgments"] == 1


def test_keys_in_a_rating_rate_and_never_judge(visits: Visits) -> None:
    filled(visits.store)
    visits.store.set_guidelines("Be true.", criteria=["true"])
    page = visits.come("Ann")
    page.wait_for_selector(READY)
    page.focus('input[name="rating-0-right"][value="5"]')
    page.keyboard.press("Space")
    page.keyboard.press("Enter")
    page.keyboard.press("2")
    page.wait_for_timeout(200)
    assert visits.store.counts()["judgments"] == 0
    assert page.is_checked('input[name="rating-0-right"][value="2"]')
    with page.expect_navigation():
        page.keyboard.press("b")
    with visits.store.reading() as session:
        (judged,) = session.execute(select(JudgmentRow)).scalars()
    assert judged.choice == "both_bad" and list(judged.ratings.values()) == [2]


def test_a_million_characters_neither_run_nor_hang(visits: Visits) -> None:
    hostile = "<script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'> "
    prompt = (user(hostile),)
    answers = [
        Answer(prompt, (assistant((hostile + "word ") * (1_000_000 // len(hostile)) + mark),))
        for mark in "ab"
    ]
    visits.store.add_answers(answers)
    visits.store.add_tasks(
        [TaskRow(prompt_id=answers[0].prompt_id, first_id=answers[0].id, second_id=answers[1].id)],
    )
    page = visits.come("Ann")
    page.wait_for_selector(READY)
    started = time.monotonic()
    page.click("a.whole >> nth=0")
    page.wait_for_selector("pre.plain >> nth=40", state="attached")
    page.evaluate("new Promise(requestAnimationFrame)")
    assert time.monotonic() - started < 15
    assert page.evaluate("document.querySelector('.answer .text').textContent.length") > 1_000_000
    assert page.evaluate("'hacked' in window") is False and page.locator("img").count() == 0
    send(page, "button.choice.left")
    assert visits.store.counts()["judgments"] == 1
