"""All rollouts of a run on its page, the trace of its phases, and how to run it again."""

import base64
import gzip
import json
import os
import random
from pathlib import Path

import pytest

from tether.watch.report.figures import write_trace
from tether.watch.report.page import write_report
from tether.watch.report.reading import read_journey
from tether.watch.report.rollouts import packed_rollouts

FLAGS = ["--headless", "--no-sandbox", "--disable-gpu"]


def rows(steps, each=4):
    """Groups of answers to one prompt a step; scores rise with the step."""
    return [
        {
            "step": step,
            "prompt": f"prompt {step}",
            "response": f"answer {step}.{place} " * 5,
            "proxy": step + place / 10,
            "stop": "length" if place else "stop_token",
        }
        for step in range(1, steps + 1)
        for place in range(each)
    ]


def unpacked(text):
    return json.loads(gzip.decompress(base64.b64decode(text)))


def test_every_recorded_rollout_is_packed(tmp_path, synthetic):
    run = synthetic.write_quickstart(tmp_path / "run")
    synthetic.write_lines(run / "ppo" / "samples.jsonl", rows(50))
    (run / "ppo" / "samples.jsonl").open("a").write(
        "{damaged\n" + '{"step": null, "response": 3}\n',
    )
    packed = packed_rollouts(read_journey(run).stages)
    assert packed is not None
    value = unpacked(packed.text)
    mine = [row for row in value["rows"] if row[0] == "ppo"]
    assert [(r[1], r[3], r[4], r[5], r[6]) for r in mine] == [
        (r["step"], r["response"], r["proxy"], r["stop"], None) for r in rows(50)
    ]
    assert {value["prompts"][row[2]] for row in mine} == {f"prompt {s}" for s in range(1, 51)}
    assert packed.sentence.startswith("All ")


def test_rollouts_beyond_a_page_are_counted_and_spread_over_steps(tmp_path, synthetic):
    run = synthetic.write_quickstart(tmp_path / "run")
    synthetic.write_lines(run / "ppo" / "samples.jsonl", rows(300))
    packed = packed_rollouts(read_journey(run).stages, most=4000)
    assert packed is not None and len(packed.text) <= 4000
    steps = {row[1] for row in unpacked(packed.text)["rows"] if row[0] == "ppo"}
    assert {1, 300} <= steps and len(steps) > 2
    assert "samples.jsonl" in packed.sentence
    shown = len(unpacked(packed.text)["rows"])
    assert packed.sentence.startswith(f"{shown} of ")


def test_each_stage_keeps_its_first_and_its_last_step(tmp_path, synthetic):
    run = synthetic.write_quickstart(tmp_path / "run")
    synthetic.write_lines(run / "ppo" / "samples.jsonl", rows(300))
    short = [{**row, "step": 2 * row["step"]} for row in rows(10)]
    synthetic.write_lines(run / "ppo-beta0" / "samples.jsonl", short)
    packed = packed_rollouts(read_journey(run).stages, most=4000)
    steps = {}
    for row in unpacked(packed.text)["rows"]:
        steps.setdefault(row[0], set()).add(row[1])
    assert {1, 300} <= steps.pop("ppo")
    assert {2, 20} <= max(steps.values(), key=len)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("most", "shown"), [(900, True), (10, False)])
def test_two_steps_that_are_too_large_lose_rows(tmp_path, synthetic, most, shown):
    run = tmp_path / "run"
    draw = random.Random(0)
    many = [
        {"step": step, "prompt": "p", "response": draw.randbytes(60).hex(), "proxy": 0.0}
        for step in (1, 2)
        for _ in range(40)
    ]
    synthetic.write_lines(run / "ppo" / "metrics.jsonl", synthetic.ppo_rows(2, 1.0, seed=0))
    synthetic.write_lines(run / "ppo" / "samples.jsonl", many)
    packed = packed_rollouts(read_journey(run).stages, most=most)
    assert (packed is not None) == shown
    assert packed is None or 0 < len(packed.text) <= most


def test_a_trace_lays_the_phases_of_each_step_before_its_end(tmp_path, synthetic):
    run = tmp_path / "run"
    synthetic.write_lines(
        run / "metrics.jsonl",
        [
            {
                "step": 1,
                "time": 110.0,
                "time/step": 4.0,
                "time/rollout": 1.0,
                "time/reward": 0.5,
                "time/update": 2.0,
                "reward/proxy": 1.0,
            },
        ],
    )
    synthetic.write_lines(
        run / "engine" / "work.jsonl",
        [{"step": 1, "servers": {"a": [[-3.5, -3.0], ["x", 1]]}}],
    )
    assert write_trace(read_journey(run), tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    laid = [(e["name"], e["tid"], e["ts"] / 1e6, e["dur"] / 1e6) for e in events if e["ph"] == "X"]
    assert laid == [
        ("step 1", 0, 106.0, 4.0),
        ("rollout", 1, 106.0, 1.0),
        ("reward", 1, 107.0, 0.5),
        ("update", 1, 107.5, 2.0),
        ("samples", 2, 106.5, 0.5),
    ]
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert names == {0: "steps", 1: "phases", 2: "a"}


def test_a_run_without_times_has_no_trace(tmp_path, synthetic):
    synthetic.write_lines(tmp_path / "run" / "metrics.jsonl", [{"step": 1, "loss": 1.0}])
    write_report(tmp_path / "run")
    assert not (tmp_path / "run" / "trace.json").exists()


@pytest.mark.parametrize(
    ("argv", "command"),
    [
        (["tether", "sft", "my recipe.toml"], "tether sft &#39;my recipe.toml&#39;"),
        (["__main__.py", "run", "a.toml"], "tether run a.toml"),
        (["mine.py", "3"], "python mine.py 3"),
    ],
)
def test_the_page_says_how_to_run_it_again(tmp_path, synthetic, argv, command):
    run = tmp_path / "run"
    synthetic.write_lines(run / "metrics.jsonl", [{"step": 1, "loss": 1.0}])
    synthetic.write(run / "manifest.json", {"argv": argv, "cwd": "/home/me"})
    assert f"cd /home/me &amp;&amp; {command}" in write_report(run).read_text()


@pytest.mark.browser
@pytest.mark.parametrize("width", [1280, 360])
def test_rollouts_are_searched_filtered_and_compared(tmp_path, synthetic, chromium, width):
    playwright = pytest.importorskip("playwright.sync_api")
    run = synthetic.write_quickstart(tmp_path / "run")
    mean = [
        *rows(20),
        {
            "step": 3,
            "prompt": "<img src=x onerror='window.hacked=1'>",
            "response": "<script>window.hacked=1</script>",
            "proxy": -9.0,
        },
    ]
    synthetic.write_lines(run / "ppo" / "samples.jsonl", mean)
    synthetic.write_lines(
        run / "ppo" / "alarms.jsonl",
        [{"step": 7, "detector": "kl_jump", "message": "m", "advice": "a"}],
    )
    tokens = {"step": 5, "sample": 1, "tokens": ["<b>a", " mask"], "counted": 1}
    synthetic.write_lines(
        run / "ppo" / "tokens.jsonl",
        [{**tokens, "kl": [0.5, -0.25], "advantage": [1.0]}],
    )
    path, problems = write_report(run), []
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=FLAGS)
        page = browser.new_context(
            viewport={"width": width, "height": 900},
            offline=True,
        ).new_page()
        page.on("console", lambda message: problems.append(message.text))
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.goto(path.as_uri())
        page.wait_for_selector("#rollouts article")
        part, count = page.locator("#rollouts"), page.locator("#rollouts [role=status]")
        part.get_by_label("Text").fill("answer 7.2")
        assert count.inner_text() == "1 rollout, 1 cut off at the token limit"
        assert part.locator("article header").inner_text().startswith("step 7 · cut off")
        part.get_by_text("The 4 answers to this prompt").click()
        assert count.inner_text() == "The 4 answers to one prompt at step 7, side by side"
        part.get_by_label("Tokens").select_option("kl")
        assert count.inner_text().startswith("The 4 answers to one prompt at step 7")
        part.get_by_label("Tokens").select_option("")
        part.get_by_text("Show all").click()
        part.get_by_label("Alarm").select_option(label="kl jump")
        assert count.inner_text() == "4 rollouts, 3 cut off at the token limit"
        marks = ["step 7 · cut off" in text for text in part.locator("article").all_inner_texts()]
        assert marks == [False, True, True, True]
        part.get_by_text("Show all").click()
        part.get_by_label("Score from").fill("20.05")
        assert count.inner_text() == "3 rollouts, 3 cut off at the token limit"
        part.get_by_text("Show all").click()
        part.locator(".bars button:not([disabled])").first.click()
        assert (
            count.inner_text() == "1 rollout" and "<script>" in part.locator("article").inner_text()
        )
        part.get_by_text("Show all").click()
        part.get_by_label("Tokens").select_option("kl")
        assert count.inner_text() == "1 rollout, 1 cut off at the token limit"
        assert "0.500, “mask” −0.250. 1" in part.inner_text()
        shades = part.locator(".token").evaluate_all(
            "all => all.map(e => [e.className, e.style.getPropertyValue('--share'), e.title])",
        )
        assert shades == [
            ["token", "50%", "kl 0.500"],
            ["token below masked", "25%", "kl −0.250"],
        ]
        part.get_by_label("Tokens").select_option("advantage")
        assert count.inner_text() == "No rollout fits."
        part.get_by_label("Tokens").select_option("")
        page.locator("#reward-kl .hit").nth(4).hover()
        page.locator("#reward-kl .hit").nth(4).click()
        assert part.get_by_role("spinbutton", name="Step").input_value() != ""
        overflow = page.evaluate("document.documentElement.scrollWidth - innerWidth")
        assert page.evaluate("'hacked' in window") is False and overflow == 0
        browser.close()
    assert problems == []


CALL = {"id": "0", "function": {"name": "multiply", "arguments": {"a": 2, "b": 3}}}
EPISODE = {
    "step": 4,
    "prompt": "What is 2 x 3?",
    "response": "[assistant] multiply",
    "proxy": 1.25,
    "stop": "turns",
    "turns": [
        {"role": "assistant", "content": "", "tool_calls": [CALL], "reward": 0.25},
        {"role": "tool", "name": "multiply", "content": "<b>6"},
        {"role": "assistant", "content": "It is 6.", "reasoning_content": "So 6", "reward": 1.0},
    ],
}
FAILED = {
    "step": 4,
    "prompt": "p",
    "response": "hm",
    "proxy": None,
    "stop": "stop_token",
    "reason": "the disk is gone",
    "turns": [{"role": "assistant", "content": "hm"}],
}
NOTED = {
    "step": 4,
    "sample": 0,
    "tokens": ["call", "<end>", "6", "It", " is"],
    "counted": 5,
    "kl": [0.5, -0.25, None, 0.0, 1.0],
    "advantage": [1, 1, None, 1, 1],
}


@pytest.mark.browser
@pytest.mark.parametrize("width", [1280, 390])
def test_an_episode_is_shown_turn_by_turn_and_token_by_token(tmp_path, synthetic, chromium, width):
    playwright = pytest.importorskip("playwright.sync_api")
    run = synthetic.write_quickstart(tmp_path / "run")
    synthetic.write_lines(run / "ppo" / "samples.jsonl", [EPISODE, FAILED])
    synthetic.write_lines(run / "ppo" / "tokens.jsonl", [NOTED])
    path, problems = write_report(run), []
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=FLAGS)
        view = {"width": width, "height": 900}
        page = browser.new_context(viewport=view, offline=True).new_page()
        page.on("console", lambda message: problems.append(message.text))
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.goto(path.as_uri())
        part = page.locator("#rollouts")
        part.get_by_label("Step").fill("4")
        one, failed = part.locator("article").all()
        assert (
            one.locator("header").inner_text().startswith("step 4 · out of turns after 2 replies")
        )
        turns = [turn.locator("p").all_inner_texts() for turn in one.locator("li").all()]
        assert turns == [
            ["assistant · reward 0.250", 'multiply({"a": 2, "b": 3})'],
            ["tool multiply", "<b>6"],
            ["assistant · reward 1.00", "So 6", "It is 6."],
        ]
        assert "ended after 1 reply" in failed.inner_text()
        assert "No score: the disk is gone" in failed.inner_text()
        if folder := os.environ.get("TETHER_PICTURES"):
            one.screenshot(path=f"{folder}/turns-{width}.png")
        part.get_by_label("Tokens").select_option("kl")
        tokens = "all => all.map(e => [e.textContent, e.className, e.title])"
        assert part.locator(".token").evaluate_all(tokens) == [
            ["call", "token", "kl 0.500"],
            ["<end>", "token below", "kl −0.250"],
            ["6", "token read", "read, not trained"],
            ["It", "token", "kl 0"],
            [" is", "token", "kl 1.00"],
        ]
        assert "4 of 5 tokens were sampled" in part.inner_text()
        if folder:
            part.locator("article").screenshot(path=f"{folder}/tokens-{width}.png")
        assert page.evaluate("document.documentElement.scrollWidth - innerWidth") == 0
        if axe := os.environ.get("TETHER_AXE"):
            page.evaluate(Path(axe).read_text())
            assert page.evaluate("axe.run(document)")["violations"] == []
        browser.close()
    assert problems == []


def test_a_kl_without_an_interval_is_not_called_0(tmp_path, synthetic):
    run = synthetic.write_quickstart(tmp_path / "run", arms=False)
    judged = run / "evaluate" / "summary.json"
    whole = json.loads(judged.read_text())
    for noise, vague in ((None, False), (9.0, True)):
        ppo = {**whole["policies"]["ppo"], "kl": 1.5, "kl_noise": noise}
        synthetic.write(judged, {**whole, "policies": {"ppo": ppo}})
        assert ("reference, indistinguishable from 0" in write_report(run).read_text()) == vague
