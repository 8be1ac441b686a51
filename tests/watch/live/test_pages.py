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

pytest.importorskip("fastapi", reason="needs the extra dashboard")
from tests.watch.live.measured import (
    METRIC,
    SEEDS,
    browsed,
    enter,
    measure_day,
    measure_pages,
    served,
    write_runs,
)
from tests.watch.report.synthetic_sweep import KEY, write_sweep

from tether.core.glossary import EVERY
from tether.stats import Estimate, mean_of_runs
from tether.watch.live.board import NOTES

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
            page.wait_for_selector(f"body:not([data-points='{before}'])")
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


def test_the_table_has_verdicts_and_the_settings_that_differ(tmp_path, browser):
    write_runs(tmp_path, 12, 20)
    config = json.loads((tmp_path / "sweep/run-0/ppo/config.json").read_text())
    config["ppo"]["clip"] = 0.2  # no other run has it, so it is no difference
    (tmp_path / "sweep/run-0/ppo/config.json").write_text(json.dumps(config))
    with served(tmp_path) as (_, address):
        page = enter(browser, address, viewport={"width": 1280, "height": 900})
        problems = listened(page)
        page.wait_for_selector("tbody .state.open >> nth=11")
        heads = [text.replace("\u200b", "") for text in page.locator("th").all_inner_texts()]
        assert heads[3:5] == ["verdict", "win rate"] and heads[7:9] == [
            "ppo.kl.coefficient",
            "seed",
        ]
        cells = page.locator("tbody tr", has_text="run-11").locator("td").all_inner_texts()
        assert [" ".join(cell.split()) for cell in cells[3:5]] == [
            "score rose",
            "56.0% [50.0%, 62.0%]",
        ]
        assert cells[7:9] == ["0.02", "1"]
        for words, number in (("seed=1", 3), ("undecided coefficient=0.01", 5), ("RUN-11", 1)):
            page.fill("#filter", words)
            assert page.locator("tbody tr:visible").count() == number
        assert "runs=RUN-11" in page.url and page.locator("#counts").inner_text().endswith(
            "1 shown",
        )
        page.reload()
        page.wait_for_selector("tbody .state.open >> nth=11", state="attached")
        assert page.locator("tbody tr:visible").count() == 1
        assert problems == []
        page.click("tbody tr:visible a >> text=score rose")
        page.wait_for_selector(".verdict h2")
        assert "more wins are not shown" in page.inner_text(".verdict h2")
        page.click("#theme")  # the script of the report may act
        assert page.get_attribute("html", "data-theme")
        assert problems == []


def test_seeds_are_drawn_as_their_mean_with_the_interval_of_stats(tmp_path, browser):
    files = write_runs(tmp_path, 2 * SEEDS, 40)
    rows = [[json.loads(line)[METRIC] for line in file.read_text().splitlines()] for file in files]
    with served(tmp_path) as (_, address):
        page = enter(browser, address)
        page.wait_for_selector("tbody .state.open >> nth=9")
        page.check("#together")
        page.wait_for_selector("#chart canvas[aria-label*='2 groups']")
        assert "95% intervals" in page.inner_text("#chart h2")
        colours = page.eval_on_selector_all(
            ".swatch",
            "all => all.map((one) => one.style.background)",
        )
        assert len(set(colours)) == 2
        own = [{"x": [*range(1, 41)], "y": values} for values in rows[:SEEDS]]
        own[0] = {"x": own[0]["x"][:30], "y": own[0]["y"][:30]}  # it has not gone on yet
        mean = page.evaluate("(own) => meanOf(own)", own)
    for at in (0, 17, 35):
        values = [one["y"][at] for one in own if at < len(one["y"])]
        nothing = Estimate(0.0, 0.0, 0.0, 0)
        told, _ = mean_of_runs([Estimate(v, v, v, 1) for v in values], nothing)
        drawn = [mean[name][at] for name in ("y", "low", "high")]
        assert drawn == pytest.approx([told.value, told.low, told.high], rel=1e-9)


def test_seeds_together_are_a_row_with_their_mean_and_their_links(tmp_path, browser):
    write_runs(tmp_path, 2 * SEEDS + 1, 20)
    for seed, share in enumerate((0.50, 0.52, 0.54, 0.56, 0.58)):
        place = tmp_path / f"sweep/run-{seed}/ppo/summary.json"
        rate = {"value": share, "low": share - 0.1, "high": share + 0.1, "count": 256}
        place.write_text(json.dumps({"gold_win_rate": rate}))
    with served(tmp_path) as (_, address):
        page = enter(browser, address, viewport={"width": 390, "height": 800})
        problems = listened(page)
        page.wait_for_selector("tbody .state.open >> nth=10")
        assert page.locator("tbody tr:visible").count() == 2 * SEEDS + 1
        page.check("#together")
        page.wait_for_selector("tbody tr:visible >> text=5 runs >> nth=1")
        assert page.locator("tbody tr:visible").count() == 3, "two groups, and a run alone"
        group = page.locator("tbody tr:visible", has_text="seed 4").filter(has_text="54.0%")
        # s = √10 points, and Student's t of 4 degrees of freedom is 2.776: 2.776 √(10 / 5) = 3.93
        assert " ".join(group.locator("td >> nth=4").inner_text().split()) == "54.0% [50.1%, 57.9%]"
        assert group.locator("td >> nth=3").inner_text() == "5 undecided"
        assert group.locator("td >> nth=1").inner_text() == "ended"
        links = group.locator("a")
        assert links.all_inner_texts() == [f"seed {seed}" for seed in range(5)]
        assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
        page.fill("#filter", "seed=1")
        page.wait_for_function("document.querySelectorAll('tbody tr:not([hidden])').length === 2")
        page.fill("#filter", "")
        page.uncheck("#together")
        page.wait_for_function("document.querySelectorAll('tbody tr:not([hidden])').length === 11")
        assert page.locator("tbody tr").count() == 2 * SEEDS + 1
        page.check("#together")
        links.first.click()
        page.wait_for_url("**/run/*")
        assert problems == []


def test_a_going_run_is_grouped_by_the_settings_that_it_has(tmp_path, browser):
    """Not with one of two groups that both agree with it, and an ended run with no other kind."""
    lines(tmp_path / "one" / "metrics.jsonl", [{"step": 1, METRIC: 1.0}])
    for name in ("config.json", "manifest.json"):
        (tmp_path / "one" / name).write_text("{}")
    group = """(runs) => groupsOf(runs.map(([ended, settings]) =>
      ({ path: "p", combination: [], ended, settings: new Map(Object.entries(settings)) })))"""
    short, whole = {"sft.epochs": "1"}, {"sft.epochs": "1", "ppo.kl": "2"}
    going = [False, {**short, "seed": "2"}]
    with served(tmp_path) as (_, address):
        page = enter(browser, address)
        page.wait_for_selector("tbody a")
        first = [True, {**whole, "seed": "0"}]
        second = [True, {**whole, "seed": "1"}]
        further = [False, {**short, "reward.epochs": "3", "seed": "3"}]
        names = page.evaluate(group, [first, going, second])
        assert len(set(names)) == 1
        assert len(set(page.evaluate(group, [first, going, [True, {**whole, "ppo.kl": "3"}]]))) == 3
        assert len(set(page.evaluate(group, [first, going, further]))) == 3
        assert len(set(page.evaluate(group, [first, [True, short]]))) == 2
        assert len(set(page.evaluate(group, [first, going, [True, short]]))) == 2
        assert len(set(page.evaluate(group, [first, [False, {}]]))) == 2
        more = [True, {**whole, "reward.epochs": "3"}]
        assert len(set(page.evaluate(group, [more, going, further]))) == 1


def test_curves_are_smoothed_and_axes_logarithmic_by_hand(tmp_path, browser):
    lines(
        tmp_path / "one" / "metrics.jsonl",
        [{"step": s, METRIC: (s - 1) ** 2} for s in range(1, 9)],
    )
    for name in ("config.json", "manifest.json"):
        (tmp_path / "one" / name).write_text("{}")
    with served(tmp_path) as (_, address):
        page = enter(browser, address)
        problems = listened(page)
        page.wait_for_selector("tbody a")
        smooth = "([x, y, weight]) => smoothed({ x, y }, weight).y"
        assert page.evaluate(smooth, [[1, 2, 3], [0, 1, 1], 0.5]) == pytest.approx(
            [0, 2 / 3, 6 / 7],
        )
        # a step of two forgets twice
        assert page.evaluate(smooth, [[1, 2, 4], [0, 1, 1], 0.5]) == pytest.approx(
            [0, 2 / 3, 10 / 11],
        )
        assert page.evaluate("logTicks(0, 3, 8, 0)") == [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000]
        assert page.evaluate("logTicks(-3, 9, 5, 0)")[:3] == [0.001, 1, 1000]
        assert page.evaluate("logTicks(Math.log10(2.1), Math.log10(2.9), 4, 0).length") >= 3
        page.fill("#smooth", "0.5")
        page.check("#log-y")
        assert "1 points at 0 or below" in page.inner_text("#chart figcaption")
        assert page.inner_text("#smooth-value") == "0.50"
        page.wait_for_url("**smooth=0.5&y=log**")
        page.reload()
        page.wait_for_selector("#chart h2:has-text('smoothed')")
        assert page.is_checked("#log-y")
        page.focus("#log-x")
        page.keyboard.press("Space")
        page.wait_for_url("**x=log**")
        page.click("tbody a")
        page.wait_for_selector("#main figure")
        page.check("#log-y")
        assert problems == []


def test_a_run_of_a_sweep_has_its_combination_as_its_name(tmp_path, browser):
    root = write_sweep(tmp_path / "run", {KEY: [0.01, 0.2], "seed": [0, 1, 2]}, prompts=0)
    table = json.loads((root / "sweep.json").read_text())
    first = table["combinations"][0]["stages"]  # the recipe's own values keep the folder of the run
    shutil.copytree(root / first["ppo"], root / "ppo")
    shutil.rmtree((root / first["ppo"]).parent)
    first["ppo"] = "ppo"
    (root / "sweep.json").write_text(json.dumps(table))
    with served(tmp_path) as (_, address):
        page = enter(browser, address)
        page.wait_for_selector("tbody a >> text=seed=2 >> nth=1")
        names = page.locator("tbody td:first-child > a").all_inner_texts()
        assert sorted(names) == [
            f"run · {KEY}={b}, seed={s}" for b in (0.01, 0.2) for s in (0, 1, 2)
        ]
        page.check("#together")
        page.wait_for_selector("#chart canvas[aria-label*='2 groups']")


def test_tags_and_a_note_are_kept_from_the_page_of_a_run(tmp_path, browser):
    write_runs(tmp_path, 1, 5)
    with served(tmp_path) as (_, address):
        page = enter(browser, address, viewport={"width": 390, "height": 800})
        problems = listened(page)
        page.click("tbody a")
        page.wait_for_selector("#headline.open")
        page.get_by_label("Tags").fill("keep, <img src=x onerror='window.hacked=1'>")
        page.get_by_label("Note").fill(HOSTILE[0])
        page.get_by_label("Note").press("Tab")
        page.keyboard.press("Enter")
        page.wait_for_selector("#kept:has-text('Saved')")
        assert json.loads((tmp_path / "sweep/run-0" / NOTES).read_text())["note"] == HOSTILE[0]
        page.click("text=All runs")
        page.wait_for_selector(".tag >> nth=1")
        assert page.locator(".tag").all_inner_texts()[0] == "keep"
        assert page.inner_text(".said") == HOSTILE[0]
        assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
        assert page.evaluate("'hacked' in window") is False and problems == []


@pytest.mark.parametrize(("width", "scheme"), VIEWS)
def test_nothing_is_in_the_way_of_a_screen_reader(tmp_path, browser, width, scheme):
    """By axe (npm install axe-core), whose axe.min.js TETHER_AXE names."""
    axe = Path(os.environ.get("TETHER_AXE", ""))
    if not axe.is_file():
        pytest.skip("no axe: set TETHER_AXE to the axe.min.js of axe-core")
    hostile(tmp_path / "runs")
    write_runs(tmp_path / "runs", 2 * SEEDS + 1, 5)
    (tmp_path / "runs/sweep/run-0" / NOTES).write_text('{"tags": "keep", "note": "a note"}')
    with served(tmp_path / "runs") as (_, address):
        view = {"width": width, "height": 800}
        page = enter(browser, address, viewport=view, color_scheme=scheme, bypass_csp=True)
        page.wait_for_selector("tbody .state.open >> nth=10")
        for ready in ("tbody a", "#rollouts article"):
            page.wait_for_selector(ready)
            page.evaluate(axe.read_text())
            violations = page.evaluate("axe.run(document)")["violations"]
            assert [(v["id"], v["nodes"][0]["target"]) for v in violations] == []
            if ready == "tbody a":
                page.click("tbody a >> text=<b>run")


@pytest.mark.slow
def test_fifty_runs_open_in_a_second_and_a_day_takes_no_memory(chromium_path):
    """On a busy machine: within four times that."""
    shown = measure_pages(chromium_path, 50, 2000, 3)
    assert shown["open"] <= 4 and shown["update"] <= 0.4
    for early, late, elements, more in measure_day(chromium_path, 24).values():
        assert late < 1.5 * early + 1 and more <= elements + 20
