"""The dashboard in a real browser: hostile folders, killed and deleted runs, buttons, screen
readers.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("uvicorn", reason="needs uvicorn: pip install 'tether-rlhf[dashboard]'")
from benchmarks.live import METRIC, browsed, enter, measure_day, measure_pages, served

from tether.core.glossary import EVERY

pytestmark = pytest.mark.browser
WRITING = Path(__file__).with_name("writing.py")
HOSTILE = (
    "<script>window.hacked = 1</script>",
    "<img src=x onerror='window.hacked = 1'>",
    "</p></main><iframe src='javascript:parent.hacked=1'></iframe>",
    "\x1b]0;owned\x07 \u202e reversed",
    "{{7*7}} ${7*7} [bold]x[/]",
)
VIEWS = [(1280, "light"), (360, "dark")]


@pytest.fixture(scope="module")
def browser(chromium_path):
    with browsed(chromium_path) as browser:
        yield browser


def listened(page):
    """Everything that goes wrong on a page from now on."""
    problems = []
    page.on("console", lambda message: problems.append(message.text))
    page.on("pageerror", lambda error: problems.append(str(error)))
    return problems


def lines(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def hostile(root):
    """A run whose every text means harm, with damaged, long and half-written lines and links."""
    stage = root / "<b>run" / "ppo"
    secret = root.parent / "secret"
    lines(secret / "metrics.jsonl", [{"step": 1, METRIC: 7.0, "secret/metric": 1.0}])
    lines(
        stage / "metrics.jsonl",
        [
            {"step": s, "time": 1e9 + s, METRIC: s / 3, "loss": 1.0, HOSTILE[1]: 1.0}
            for s in range(1, 30)
        ],
    )
    rows = [
        {"step": s, "prompt": text, "response": text, "proxy": s / 9, "stop": text}
        for s, text in enumerate(HOSTILE * 9, 1)
    ]
    lines(
        stage / "samples.jsonl",
        [*rows, {"step": 30, "prompt": "long", "response": "x" * 10_000_000, "proxy": 1}],
    )
    with (stage / "samples.jsonl").open("a") as file:
        file.write("{not json}\n" + '{"step": 31, "response": "half')
    lines(
        stage / "alarms.jsonl",
        [{"step": 2, "detector": text, "message": text, "advice": text} for text in HOSTILE],
    )
    (stage.parent / "command.json").write_text('{"stages": ["ppo"], "config": {}}')
    (stage.parent / "sft").symlink_to(secret)
    (root / "link").symlink_to(secret)
    (root / "up").symlink_to(root.parent)
    os.mkfifo(stage.parent / "summary.json")


@pytest.mark.parametrize(("width", "scheme"), VIEWS)
def test_a_hostile_folder_is_shown_and_nothing_in_it_acts(tmp_path, browser, width, scheme):
    hostile(tmp_path / "runs")
    with served(tmp_path / "runs") as (_, address):
        view = {"width": width, "height": 800}
        page = enter(browser, address, viewport=view, color_scheme=scheme)
        problems = listened(page)
        page.wait_for_selector("tbody a")
        assert page.inner_text("tbody a") == "<b>run" and page.locator("tbody tr").count() == 1
        sizes = [page.evaluate("document.documentElement.scrollWidth - innerWidth")]
        page.click("tbody a")
        page.wait_for_selector("#rollouts article")
        page.click("#others summary")
        page.get_by_role("searchbox", name="Text").fill("owned")
        assert page.locator("#rollouts article").count() == 9
        assert "␛]0;owned␇" in page.inner_text("#rollouts")
        page.get_by_role("searchbox", name="Text").fill("long")
        assert "9,996,000 more characters" in page.inner_text("#rollouts")
        page.click("text=Show all")
        page.get_by_role("spinbutton", name="Step").fill("4")
        assert page.inner_text("#rollouts [role=status]") == "1 rollout"
        text = page.inner_text("body")
        assert "ppo/samples.jsonl: 1 line(s) cannot be read" in text and "secret" not in text
        assert all(word in text for word in (HOSTILE[0], HOSTILE[1], HOSTILE[4]))
        sizes.append(page.evaluate("document.documentElement.scrollWidth - innerWidth"))
        assert page.evaluate("'hacked' in window") is False and max(sizes) <= 0
        assert page.locator("main script, main iframe, main img").count() == 0
        assert problems == []


def test_a_run_is_followed_stopped_killed_and_deleted_on_its_page(tmp_path, browser):
    root = tmp_path / "runs" / "live"
    words = [sys.executable, str(WRITING), str(root), "1000", "0.3"]
    program = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    try:
        assert program.stdout is not None and program.stdout.readline() == "1\n"
        with served(tmp_path / "runs") as (_, address):
            page = enter(browser, address)
            page.wait_for_selector("tbody .running")
            page.click("tbody a")
            page.wait_for_selector("#requests:not([hidden])")
            page.click("text=Stop after this step")
            page.wait_for_selector("#answer:has-text('stops and saves')")
            assert (root / "ppo" / "stop.request").is_file()
            before = int(page.get_attribute("body", "data-points"))
            page.wait_for_selector("#rollouts article:nth-of-type(4)")
            program.kill()
            began = time.monotonic()
            page.wait_for_selector("#state.crashed", timeout=10_000)
            assert time.monotonic() - began < 10 and page.is_hidden("#requests")
            assert "killed, or out of memory" in page.inner_text("#state")
            assert int(page.get_attribute("body", "data-points")) > before
            shutil.rmtree(root)
            page.wait_for_selector("#state:has-text('deleted or moved')", timeout=20_000)
            page.click("text=All runs")
            page.wait_for_selector("#counts:has-text('no runs')")
    finally:
        program.kill()
        program.wait()


def test_scores_are_chosen_by_a_bar_and_a_step_by_a_curve(tmp_path, browser):
    root = tmp_path / "runs" / "one"
    lines(root / "metrics.jsonl", [{"step": s, "time": s, METRIC: s} for s in range(1, 11)])
    (root / "config.json").write_text("{}")
    (root / "manifest.json").write_text("{}")
    rows = [
        {"step": s, "prompt": "p", "response": f"answer {s}", "proxy": s / 10} for s in range(1, 11)
    ]
    lines(root / "samples.jsonl", rows)
    with served(root.parent) as (_, address):
        page = enter(browser, address, viewport={"width": 1280, "height": 900})
        page.click("tbody a")
        page.wait_for_selector("#rollouts article:nth-of-type(10)")
        bars = page.locator(".bars button:not([disabled])")
        assert bars.count() == 10
        bars.last.click()
        assert page.locator("#rollouts article").count() == 1
        assert "answer 10" in page.inner_text("#rollouts")
        page.click("text=Show all")
        page.get_by_role("combobox", name="Order").select_option("low")
        assert "answer 1\n" in page.inner_text("#rollouts article >> nth=0") + "\n"
        low, high = page.evaluate(
            "(range => [range.low, range.high])(bounds([{ points: { x: [1, 2], y: [0.5, 1] } }]))",
        )
        assert 0.45 < low < 0.5 and 1 < high < 1.05  # no line lies on the edge
        assert page.evaluate("tickTexts(ticks(-1, -0.65, 4))") == ["−1.0", "−0.9", "−0.8", "−0.7"]
        assert page.evaluate("ticks(2, 4, 8, 1)") == [2, 3, 4]  # steps are whole
        box = page.locator("#main canvas").first.bounding_box()
        page.mouse.click(box["x"] + box["width"] - 9, box["y"] + 20)
        assert (
            page.get_by_role("spinbutton", name="Step").input_value() == "10"
            and page.inner_text("#rollouts [role=status]") == "1 rollout"
        )


def test_evaluators_have_figures_of_their_own_and_metrics_their_meaning(tmp_path, browser):
    root = tmp_path / "runs" / "one"
    odd = {"diversity/distinct_2": 0.5, "constructor": 1.0, "time/update": 2.0}
    lines(root / "metrics.jsonl", [{"step": s, "time": s, METRIC: s, **odd} for s in range(1, 5)])
    (root / "config.json").write_text("{}")
    (root / "manifest.json").write_text("{}")
    with served(root.parent) as (_, address):
        page = enter(browser, address)
        problems = listened(page)
        page.wait_for_selector("tbody a")
        assert page.inner_text("#chart figcaption") == EVERY[METRIC]
        page.click("tbody a")
        page.wait_for_selector("#evaluated figure")
        assert page.inner_text("#main figcaption") == EVERY[METRIC]
        titles = "all => all.map((one) => one.firstChild.textContent)"
        assert page.eval_on_selector_all("#evaluated figure h3", titles) == [
            "diversity: different word pairs",
        ]
        assert page.inner_text("#evaluated figcaption") == EVERY["diversity/distinct_2"]
        page.click("#others summary")
        assert page.eval_on_selector_all("#more h3", titles) == ["constructor", "time/update"]
        assert page.inner_text("#more figcaption") == EVERY["time/update"]
        assert problems == []


@pytest.mark.parametrize(("width", "scheme"), VIEWS)
def test_nothing_is_in_the_way_of_a_screen_reader(tmp_path, browser, width, scheme):
    """By axe (npm install axe-core), whose axe.min.js TETHER_AXE names."""
    axe = Path(os.environ.get("TETHER_AXE", ""))
    if not axe.is_file():
        pytest.skip("no axe: set TETHER_AXE to the axe.min.js of axe-core")
    hostile(tmp_path / "runs")
    with served(tmp_path / "runs") as (_, address):
        view = {"width": width, "height": 800}
        page = enter(browser, address, viewport=view, color_scheme=scheme, bypass_csp=True)
        for ready in ("tbody a", "#rollouts article"):
            page.wait_for_selector(ready)
            page.evaluate(axe.read_text())
            violations = page.evaluate("axe.run(document)")["violations"]
            assert [(v["id"], v["nodes"][0]["target"]) for v in violations] == []
            if ready == "tbody a":
                page.click(ready)


@pytest.mark.slow
def test_fifty_runs_open_in_a_second_and_a_day_takes_no_memory(chromium_path):
    """On a busy machine: within four times that."""
    shown = measure_pages(chromium_path, 50, 2000, 3)
    assert shown["open"] <= 4 and shown["update"] <= 0.4
    for early, late, elements, more in measure_day(chromium_path, 24).values():
        assert late < 1.5 * early + 1 and more <= elements + 20
