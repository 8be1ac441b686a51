"""A browser on the dashboard of invented runs, and how fast its pages are."""

from __future__ import annotations

import contextlib
import json
import random
import secrets
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tether.people.annotation.server.address import Address, listen
from tether.watch.live.board import Board
from tether.watch.live.server import dashboard_app

METRIC = "reward/proxy"
SEEDS = 5
"""Runs that differ in nothing else."""
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-precise-memory-info", "--js-flags=--expose-gc"]  # fmt: skip
READY = "body[data-points='{points}']"
PAINTED = """(points) => {
  const look = () => {
    if (document.body && document.body.dataset.points === String(points)) {
      requestAnimationFrame(() => setTimeout(() => { window.painted = performance.now(); }));
    } else requestAnimationFrame(look);
  };
  look();
}"""
WAIT_FOR_PAINT = """() => new Promise((found) => {
  const look = () => (window.painted ? found(window.painted) : setTimeout(look, 5));
  look();
})"""
FEED = """() => {
  const made = [];
  window.EventSource = class { constructor(url) { made.push(this); } close() {} addEventListener() {} };
  window.feed = (data, id) => made[made.length - 1].onmessage({ data: JSON.stringify(data), lastEventId: String(id) });
}"""
DAY = """([first, hours]) => {
  const name = document.body.dataset.page;
  for (let event = first; event < first + hours * 360; event++) {
    const x = [], y = [];
    for (let i = 1; i <= 10; i++) { x.push(event * 10 + i); y.push(Math.sin(event / 50) + Math.random()); }
    const status = { name: "a", condition: "running", stage: "ppo", step: x[9], steps: 864000,
      left: 5, newest: 1, alarms: event, notes: [] };
    const curve = (key) => ({ stage: "ppo", key, anew: event === 0, x, y });
    const runs = { a: { ...status, curves: [curve("reward/proxy")] } };
    if (name === "overview") window.feed({ runs, ids: ["a"], note: "" }, event + 1);
    else window.feed({ ...status, means: "", reset: [], curves: ["reward/proxy", "loss", "time/step"].map(curve),
      rollouts: [{ step: x[9], stage: "ppo", prompt: "p", response: "word ".repeat(40) + event, proxy: y[0] }],
      alarm_rows: [{ step: x[9], stage: "ppo", detector: "kl", message: "m", advice: "a" }] }, event + 1);
  }
  window.gc();
  return [performance.memory.usedJSHeapSize, document.getElementsByTagName("*").length];
}"""


def row(step: int, draw: random.Random) -> str:
    """A row of metrics of the size that a PPO step writes."""
    metrics = {f"metric/{number}": draw.random() for number in range(38)}
    values = {METRIC: draw.gauss(step / 1000, 0.1), "loss": draw.random()}
    return json.dumps({"step": step, "time": 1e9 + step, **values, **metrics}) + "\n"


def judged(number: int) -> dict[str, object]:
    """The summary of a policy that wins against its start, more or less clearly."""
    share, gain = 0.5 + 0.03 * (number // SEEDS), 0.1 * (number // SEEDS)
    rate = {"value": share, "low": share - 0.06, "high": share + 0.06, "count": 256}
    return {
        "gold_win_rate": rate,
        "gold_gain": {**rate, "value": gain, "low": gain - 0.1, "high": gain + 0.1},
    }


def write_runs(root: Path, runs: int, points: int) -> list[Path]:
    """Folders of runs with so many steps each; their files of metrics."""
    files = []
    for number in range(runs):
        stage, draw = root / f"sweep/run-{number}" / "ppo", random.Random(number)
        stage.mkdir(parents=True)
        (stage.parent / "command.json").write_text('{"stages": ["ppo"], "config": {}}')
        (stage / "manifest.json").write_text(json.dumps({"steps": points * 2}))
        setting = {"ppo": {"kl": {"coefficient": 0.01 * (number // SEEDS)}}, "seed": number % SEEDS}
        (stage / "config.json").write_text(json.dumps(setting))
        (stage / "summary.json").write_text(json.dumps(judged(number)))
        files.append(stage / "metrics.jsonl")
        files[-1].write_text("".join(row(step, draw) for step in range(1, points + 1)))
    return files


def add_step(files: list[Path], step: int) -> None:
    """One row more in each file."""
    for path in files:
        with path.open("a") as file:
            file.write(row(step, random.Random(step)))


@contextlib.contextmanager
def served(folder: Path) -> Iterator[tuple[Board, str]]:
    """A board that looks each second, and the address that lets a browser in."""
    import uvicorn

    board, token = Board(folder), secrets.token_urlsafe(16)
    opened, settings = listen(Address(port=0))
    app = dashboard_app(board, settings, token)
    server = uvicorn.Server(
        uvicorn.Config(app, log_level="warning", log_config=None, timeout_graceful_shutdown=1),
    )
    threads = [
        threading.Thread(target=board.watch),
        threading.Thread(target=server.run, kwargs={"sockets": [opened]}),
    ]
    for thread in threads:
        thread.start()
    try:
        yield board, f"{settings.origin}/open?token={token}"
    finally:
        board.over.set()
        server.should_exit = True
        for thread in threads:
            thread.join()


@contextlib.contextmanager
def browsed(chromium: str) -> Iterator[Any]:
    """A Chromium."""
    from playwright.sync_api import sync_playwright

    with (
        sync_playwright() as driver,
        driver.chromium.launch(executable_path=chromium, args=FLAGS) as browser,
    ):
        yield browser


def enter(browser: Any, address: str, **context: Any) -> Any:
    """A page that has been let in."""
    page = browser.new_context(**context).new_page()
    page.set_default_timeout(120_000)
    page.goto(address)
    page.wait_for_url("**/")
    return page


def measure_pages(chromium: str, runs: int, points: int, updates: int) -> dict[str, float]:
    """Seconds until the overview and a run's page show all points, and of an update; medians."""
    with tempfile.TemporaryDirectory() as folder:
        files = write_runs(Path(folder), runs, points)
        began = time.perf_counter()
        with served(Path(folder)) as (board, address), browsed(chromium) as browser:
            while not board.tick:
                time.sleep(0.01)
            cold = time.perf_counter() - began
            page = enter(browser, address)
            page.add_init_script(f"({PAINTED})({runs * points})")
            opened = [_opened(page, address, runs * points) for _ in range(3)]
            took = []
            for number in range(1, updates + 1):
                add_step(files, points + number)
                page.wait_for_selector(
                    READY.format(points=runs * (points + number)),
                    state="attached",
                )
                took.append(float(page.evaluate("document.body.dataset.took")) / 1000)
            page.click("tbody a")
            page.wait_for_selector("body[data-page='run'][data-points]", state="attached")
            run = page.evaluate("performance.now()") / 1000
    return {
        "first_look": cold,
        "open": statistics.median(opened),
        "update": statistics.median(took),
        "slowest_update": max(took),
        "open_run": run,
    }


def _opened(page: Any, address: str, points: int) -> float:
    page.goto(f"{address.partition('/open')[0]}/")
    page.wait_for_selector(READY.format(points=points), state="attached")
    # asking costs up to half a second, which is no time of the page
    return page.evaluate(WAIT_FOR_PAINT) / 1000


def measure_day(chromium: str, hours: int) -> dict[str, list[float]]:
    """Megabytes and elements of each page after two hours and after `hours` of a step a second."""
    sizes = {}
    with tempfile.TemporaryDirectory() as folder:
        write_runs(Path(folder), 1, 2)
        with served(Path(folder)) as (board, address), browsed(chromium) as browser:
            page = enter(browser, address)
            place = f"run/{next(iter(board.runs))}"
            page.add_init_script(f"({FEED})()")
            for name in ("", place):
                page.goto(f"{address.partition('/open')[0]}/{name}")
                early = page.evaluate(DAY, [0, 3])
                late = page.evaluate(DAY, [3 * 360, hours - 3])
                shown = [early[0] / 1e6, late[0] / 1e6, early[1], late[1]]
                sizes[name.partition("/")[0] or "overview"] = shown
    return sizes
