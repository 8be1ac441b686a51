"""The report shows the numbers of the files, survives what is missing, and nothing a model wrote
can act in it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.watch.report.synthetic_sweep import write_sweep

from tether.core.errors import MissingFileError, RunError, TetherError
from tether.stats import grouped_share, side, wilson_interval
from tether.watch.report.figures import timeline_figures
from tether.watch.report.gains import gold_parts
from tether.watch.report.narrative import brief, conclusion, loop_conclusion
from tether.watch.report.numbers import bracketed, decimal, has_interval, percent, signed
from tether.watch.report.page import write_report
from tether.watch.report.plotting import Trace, axis, envelope, framed
from tether.watch.report.reading import LoopRun, estimate, printable, read_journey, series
from tether.watch.report.rollouts import answer_groups

HOSTILE = (
    "<script>window.hacked=1</script>",
    "</textarea></pre></p><img src=x onerror='window.hacked=1'>",
    "{{ 7*7 }}{% raw %}",
    '" onmouseover="window.hacked=1" \'',
    "</script><script>window.hacked=1</script><!--",
    "a\x00b\x1b[31m\x7f",
    "\u202etxt.exe\u2066",
    "\ud800 alone",
    "<a href='https://example.org'>click</a>",
    "<style>body{display:none}</style>",
    "long " * 20_000,
)
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


class Page(HTMLParser):
    """The elements and the text of a page, and its charts as they are drawn."""

    def __init__(self, path: Path) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.stack: list[str] = []
        self.pieces: list[str] = []
        self.scripts: list[str] = []
        self.charts: dict[str, list[tuple[str, dict[str, str | None], str]]] = {}
        self.chart: list[tuple[str, dict[str, str | None], str]] | None = None
        self.source = path.read_text(encoding="utf-8")
        self.feed(self.source)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in {"meta", "link", "br", "img", "input"}:
            self.stack.append(tag)
        if tag == "script":
            self.scripts.append("")
        if tag == "figure":
            self.chart = self.charts.setdefault(str(dict(attrs)["id"]), [])
        elif self.chart is not None:
            self.chart.append((tag, dict(attrs), ""))

    def handle_endtag(self, tag: str) -> None:
        assert self.stack.pop() == tag, f"unbalanced </{tag}>"
        if tag == "figure":
            self.chart = None

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if self.chart is not None:
            self.chart.append((tag, dict(attrs), ""))

    def handle_data(self, data: str) -> None:
        if self.stack and self.stack[-1] == "script":
            self.scripts[-1] += data
        elif not self.stack or self.stack[-1] != "style":
            self.pieces.append(data)
        if self.chart and "li" in self.stack:
            self.chart.append(("name", {}, data))
        elif self.chart:
            tag, attributes, text = self.chart[-1]
            self.chart[-1] = (tag, attributes, text + data)

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", " ".join(self.pieces))

    @property
    def skeleton(self) -> list[tuple[str, tuple[str, ...]]]:
        return [(tag, tuple(attributes)) for tag, attributes in self.elements]

    def texts(self, chart: str, tag: str) -> list[str]:
        return [text.strip() for name, _, text in self.charts[chart] if name == tag]

    def scale(self, chart: str, side: str) -> Any:
        """From the drawing's units to values, by what the ticks of an axis say and where they
        stand.
        """
        ticks = [
            (str(a["style"]), text)
            for tag, a, text in self.charts[chart]
            if tag == "span" and a.get("class") == side
        ]
        values = [
            (float(style.split(":")[1].rstrip("%")) * 10, _number(text)) for style, text in ticks
        ]
        (at, low), (end, high) = values[0], values[-1]
        return lambda units: low + (units - at) * (high - low) / (end - at)

    def line(self, chart: str, place: int, side: str = "y") -> tuple[list[float], list[float]]:
        """The values of a chart's line, read off its drawing."""
        paths = [
            str(a["d"])
            for tag, a, _ in self.charts[chart]
            if tag == "path" and " line" in str(a.get("class")) and "stroke" not in a
        ]
        drawn = [path for path in paths if path != "M1 4h22"][place]
        units = [float(number) for number in re.findall(r"-?\d+", drawn)]
        across, up = self.scale(chart, "x"), self.scale(chart, side)
        return [across(x) for x in units[::2]], [up(1000 - y) for y in units[1::2]]


def _number(text: str) -> float:
    return float(text.replace("−", "-").replace(",", "").rstrip("%")) * (
        0.01 if text.endswith("%") else 1
    )


def report(run: Path) -> Page:
    return Page(write_report(run, run.parent / "out" / "page.html"))


def test_numbers_of_the_page_are_those_of_the_files(tmp_path: Path, synthetic: Any) -> None:
    page = report(synthetic.write_quickstart(tmp_path / "run"))
    assert "71.3% of 200 comparisons" in page.text
    assert "64.6% to 77.1%)" in page.text
    assert "+0.322" in page.text and "+0.260 to +0.384" in page.text
    assert "one question back (+0.430)" in page.text
    assert "topic (+0.310), kind (+0.070)" in page.text
    assert "got worse: brief (−0.140)." in page.text
    assert "clear change: grammar (+0.001)" in page.text
    assert "13.7 nats of KL" in page.text
    tiles = ("2,150", "74.2%", "80.5%", "0.213", "0.187", "0.048", "73.1%", "1.96 GB", "16 min")
    for shown in (*tiles, "38.0% [32.0%, 45.0%]", "71.2"):
        assert shown in page.text, shown


def test_drawings_carry_the_metrics(tmp_path: Path, synthetic: Any) -> None:
    """What a reader measures on the page with the ticks of its axes is what the files say."""
    run = synthetic.write_quickstart(tmp_path / "run", arms=False)
    page = report(run)
    rows = [json.loads(line) for line in (run / "ppo" / "metrics.jsonl").read_text().splitlines()]
    steps, proxy = page.line("reward-kl", 0)
    assert steps == pytest.approx([row["step"] for row in rows], abs=0.5)
    assert proxy == pytest.approx([row["reward/proxy"] for row in rows], abs=0.01)
    assert page.line("reward-kl", 1, "right")[1] == pytest.approx(
        [row["kl/policy_reference_k1"] for row in rows],
        abs=0.05,
    )
    scored = [row for row in rows if "gold/score" in row]
    distance, gold = page.line("goodhart-distance", 0, "right")
    assert distance == pytest.approx(
        [max(0.0, row["kl/policy_reference_k1"]) ** 0.5 for row in scored],
        abs=0.01,
    )
    assert gold == pytest.approx([row["gold/score"] for row in scored], abs=0.005)
    hovered = page.texts("goodhart-steps", "title")
    assert any(
        text.startswith("step 160") and (f"gold: {rows[-1]['gold/score']:.4g}") in text
        for text in hovered
    )
    accuracy = page.texts("reward-accuracy", "title")
    assert (
        "model, held-out labels\nreward model: 74.2% [68.1%, 79.5%]" in accuracy
        and len(accuracy) == 5
    )
    assert (
        page.texts("reliability", "title")[0]
        == "predicted probability of preference 54.0%\nreward model: right in 51.0% of 61 pairs"
    )


def test_phases_of_a_step_are_lines_of_the_first_policy(tmp_path: Path, synthetic: Any) -> None:
    run = synthetic.write_quickstart(tmp_path / "run")
    page, rows = (
        report(run),
        [json.loads(line) for line in (run / "ppo" / "metrics.jsonl").read_text().splitlines()],
    )
    names = ["rollout", "reward", "evaluate", "update", "step"]
    assert page.texts("phases", "name") == [*names[:4], "the whole step"]
    for place, name in enumerate(names):
        assert page.line("phases", place)[1] == pytest.approx(
            [row[f"time/{name}"] for row in rows],
            abs=0.02,
        ), name


@pytest.mark.parametrize(
    ("values", "zero", "ticks"),
    [
        ([1, 2], False, ["1", "2"]),
        ([1, 4], False, ["1", "2", "3", "4"]),
        ([1, 160], False, ["50", "100", "150"]),
        ([7], False, ["7"]),
        ([3, 5000], True, ["0", "1,000", "2,000", "3,000", "4,000", "5,000"]),
        ([0.5, 0.52], False, ["0.500", "0.505", "0.510", "0.515", "0.520"]),
        ([-0.3, 0.4], False, ["−0.2", "0.0", "0.2", "0.4"]),
    ],
)
def test_ticks_are_round_and_those_of_steps_whole(
    values: list[float],
    zero: bool,
    ticks: list[str],
) -> None:
    assert [text for _, text in axis("step", values, zero=zero, snug=True).ticks] == ticks


@given(low=st.floats(-10, 10), spread=st.floats(1e-6, 1e3), ticks=st.sampled_from([3, 5, 7]))
def test_an_axis_has_two_ticks_at_least_and_few(low: float, spread: float, ticks: int) -> None:
    """One tick gives no scale."""
    drawn = axis("", [low, low + spread], ticks=ticks)
    assert 2 <= len(drawn.ticks) <= max(5, ticks + 1)
    (first, _), (second, _), *_ = drawn.ticks
    digits = f"{second - first:.6e}".partition("e")[0]
    assert float(digits) in (1, 2, 5)


def test_a_value_that_never_changes_has_room_around_it_and_nothing_below_zero() -> None:
    ends = {
        value: (axis("", [value, value]).low, axis("", [value, value]).high)
        for value in (0.0, 0.25, -2.0)
    }
    assert (
        ends[0.0] == (0, 1)
        and ends[-2.0] == (-3, -1)
        and 0 < ends[0.25][0] < 0.25 < ends[0.25][1] < 0.5
    )


@pytest.mark.parametrize("percent", [False, True])
@pytest.mark.parametrize("values", [[0.2, 1.0], [-3.0, 0.0], [0.0, 1.0], [-0.01, 80.0], [7, 4000]])
def test_no_line_lies_on_the_edge_of_its_plot(values: list[float], percent: bool) -> None:
    """Only an axis that begins at 0 has a line there; a small noise below 0 opens no empty band."""
    for zero in (False, True):
        drawn = axis("", values, zero=zero, percent=percent, ticks=7)
        low, high = min(values), max(values)
        if zero and low >= 0:
            assert drawn.low == 0
        else:
            assert 0.03 < (low - drawn.low) / (high - low) < 0.1
        assert 0.03 < (drawn.high - max(high, 0 if zero else high)) / (high - low) < 0.1
        places = [place for place, _ in drawn.ticks]
        assert 3 <= len(places) <= 8 and drawn.low <= min(places) and max(places) <= drawn.high


@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize("right", [[0.0, 0.31], [0.02, 7.4], [12.0, 13.0], [0.0, 940.0]])
@pytest.mark.parametrize("left", [[0.21, 0.97], [-3.2, 1.1], [4.0, 4.0], [-0.4, 870.0]])
def test_ticks_of_both_axes_lie_on_the_same_lines(
    left: list[float],
    right: list[float],
    zero: bool,
) -> None:
    frame = {"id": "two", "title": "", "caption": "", "right": "other", "zero": ["right"] * zero}
    (plot,) = framed(frame, [Trace([1, 2], left), Trace([1, 2], right, right=True)])
    other = plot.right
    assert other is not None and len(other.ticks) >= 2
    assert [other.at(value) for value, _ in other.ticks] == pytest.approx(
        [plot.y.at(value) for value, _ in plot.y.ticks],
        abs=1,
    )
    step = other.ticks[1][0] - other.ticks[0][0]
    assert f"{step:.9e}"[:11] in ("1.000000000", "2.000000000", "5.000000000")
    values = [float(text.replace(",", "").replace("−", "-")) for _, text in other.ticks]
    assert values == pytest.approx([value for value, _ in other.ticks])
    assert other.low <= min(right) and max(right) <= other.high
    if zero:
        assert values[0] == 0


def test_every_region_of_a_page_has_a_name_of_its_own(tmp_path: Path, synthetic: Any) -> None:
    run = synthetic.write_quickstart(tmp_path / "run")
    for stage in ("ppo", "sft"):
        record = {"evaluator": "kl", "moment": "after", "step": 9, "rows": {}}
        figures = {"figures": {"kl": {"value": 1.0, "low": 0.9, "high": 1.1, "count": 9}}}
        synthetic.write_lines(run / stage / "evaluations.jsonl", [{**record, **figures}])
    for page in (report(run), Page(write_report(write_sweep(tmp_path / "sweep")))):
        names = [a["aria-label"] for _, a in page.elements if a.get("role") == "region"]
        assert len(names) == len({*names}) > 0


def test_the_list_of_contents_has_each_section_in_order(tmp_path: Path, synthetic: Any) -> None:
    journey = report(synthetic.write_quickstart(tmp_path / "run"))
    sweep = Page(write_report(write_sweep(tmp_path / "sweep")))
    for page in (journey, sweep):
        ids = [a["id"] for tag, a in page.elements if tag == "section" and "id" in a]
        links = re.findall(r'<li><a href="#([^"]+)">', page.source)
        assert len(ids) > 4 and links == 2 * ids
    assert "Seeds and settings</a>" in sweep.source and "Reward model</a>" in journey.source
    synthetic.write_lines(tmp_path / "small" / "metrics.jsonl", [{"step": 1, "loss": 1.0}])
    assert "<nav" not in Page(write_report(tmp_path / "small")).source


def test_every_axis_and_every_line_of_several_has_a_name(tmp_path: Path, synthetic: Any) -> None:
    page = report(synthetic.write_quickstart(tmp_path / "run"))
    assert len(page.charts) > 20
    for name, elements in page.charts.items():
        labels = [
            text
            for tag, attributes, text in elements
            if tag == "span" and attributes.get("class") in ("y", "x", "right")
        ]
        assert len(labels) >= 3 and all(labels), name
        assert any(a.get("class") == "xlabel" and text for _, a, text in elements), name
        lines = {
            str(a.get("class"))
            for tag, a, _ in elements
            if tag == "path" and " line" in str(a.get("class"))
        }
        assert len(lines) < 2 or page.texts(name, "name"), name


def _everywhere(text: str, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every text of the rows, and the names of the parts and arms, replaced."""

    def replace(value: Any) -> Any:
        if isinstance(value, dict):
            return {
                (text if " " in key or key.startswith("ppo-") else key): replace(v)
                for key, v in value.items()
            }
        return text if isinstance(value, str) else value

    return [replace(row) for row in rows]


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_text_makes_no_element(tmp_path: Path, synthetic: Any, text: str) -> None:
    def write(run: Path, inserted: str) -> Page:
        synthetic.write_quickstart(run, arms=False)
        synthetic.write_lines(
            run / "evaluate" / "answers.jsonl",
            _everywhere(inserted, synthetic.answer_rows(30)),
        )
        summary = synthetic.ppo_summary(gold_parts={inserted: {"before": 0.2, "after": 0.4}})
        synthetic.write(run / "ppo" / "summary.json", summary)
        synthetic.write(run / "config.json", {inserted: inserted})
        return report(run)

    plain, hostile = (
        write(tmp_path / "a" / "run", "harmless text"),
        write(tmp_path / "b" / "run", text),
    )
    assert hostile.skeleton == plain.skeleton
    assert hostile.scripts == plain.scripts and len(plain.scripts) == 1
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f\u202a-\u202e\u2066-\u2069]", hostile.source)
    shown = printable(text)
    assert re.sub(r"\s+", " ", shown).strip() in hostile.text
    assert len(hostile.source) - len(plain.source) < 1_500_000


def test_hostile_folder_names_make_no_element(tmp_path: Path, synthetic: Any) -> None:
    name = "<img src=x onerror=alert(1)>"
    run = synthetic.write_quickstart(tmp_path / "run", arms=False)
    synthetic.write_lines(run / name / "metrics.jsonl", synthetic.ppo_rows(20))
    page = report(run.rename(tmp_path / name))
    assert "img" not in [tag for tag, _ in page.elements]
    assert any("<img" in name for name in page.texts("reward-kl", "name"))
    assert all(
        not re.search(r"[\s<>]", str(attributes.get("id", ""))) for _, attributes in page.elements
    )


def test_long_texts_are_cut_and_counted() -> None:
    assert printable("x" * 100_000) == "x" * 4000 + " … [96,000 more characters]"
    assert printable("a\r\nb\x00\x07") == "a\nb␀␇"
    assert printable([{"role": "user", "content": "hi"}]) == "user: hi"
    assert printable(None) == ""


@pytest.mark.parametrize("stage", ["sft", "reward", "ppo"])
def test_a_single_stage(tmp_path: Path, synthetic: Any, stage: str) -> None:
    """A folder that no command of tether began tells of itself alone."""
    run = synthetic.write_quickstart(tmp_path / "run", arms=False)
    page = Page(write_report(run / stage))
    drawn = set(page.charts)
    expected = {"sft": "loss-sft", "reward": "reliability", "ppo": "reward-kl"}[stage]
    assert expected in drawn
    assert not drawn & ({"loss-sft", "reliability", "reward-kl"} - {expected})
    if stage == "ppo":
        assert "Samples from training" in page.text
        assert "proxy reward" in page.texts("reward-kl", "name")
    else:
        assert "No policy was trained" in page.text


@pytest.mark.parametrize("section", ["direct", "kto"])
def test_direct_methods_are_no_reward_models(tmp_path: Path, synthetic: Any, section: str) -> None:
    run = synthetic.write_quickstart(tmp_path / "run", arms=False) / "reward"
    synthetic.write(
        run / "config.json",
        {section: {"beta": 0.1}, "model": {"source": "tiny"}, "seed": 0},
    )
    synthetic.write(
        run / "summary.json",
        {"heldout_accuracy": synthetic.estimate(0.64, 0.58, 0.7)} if section == "direct" else {},
    )
    page = Page(write_report(run))
    assert {"loss-reward", "accuracy-reward"} <= set(
        page.charts,
    ) and "reliability" not in page.charts
    assert "reward model" not in page.text.casefold()
    said = (
        "ranks 64.0% of held-out pairs as people did (95% interval 58.0% to 70.0%)"
        if section == "direct"
        else "No rows were held out"
    )
    assert said in page.text


def test_every_supervised_stage_of_a_run_has_its_losses(tmp_path: Path, synthetic: Any) -> None:
    run = synthetic.write_quickstart(tmp_path / "run", arms=False)
    for name, section in (
        ("process", "process"),
        ("kto", "kto"),
        ("direct", "direct"),
        ("again", "direct"),
    ):
        shutil.copytree(run / "reward", run / name)
        synthetic.write(
            run / name / "config.json",
            {section: {}, "model": {"source": "tiny"}, "seed": 0},
        )
    page = Page(write_report(run))
    drawn = {name for name in page.charts if name.startswith("loss-")}
    assert drawn == {
        f"loss-{name}" for name in ("sft", "reward", "process", "kto", "direct", "again")
    }
    ids = [
        attributes["id"]
        for tag, attributes in page.elements
        if tag == "section" and "id" in attributes
    ]
    stages = [name.removeprefix("stage-") for name in map(str, ids) if name.startswith("stage-")]
    assert stages[0] == "ppo" and stages[-3:] == ["reward", "pairs", "sft"]
    assert set(stages[1:-3]) == {"again", "direct", "kto", "process"}
    linked = {str(attributes["href"])[1:] for tag, attributes in page.elements if tag == "a"}
    assert linked == set(ids) and "process: config" in page.text


@pytest.mark.parametrize(
    ("part", "low", "headline", "sentence"),
    [
        (
            "correct",
            0.03,
            "Right answers +0.100 [+0.030, +0.200], both at one temperature: better than the start",
            "the share of right answers went from 20.0% to 30.0%. The change is +0.100 (95% interval +0.030 "
            "to +0.200)",
        ),
        (
            "correct",
            -0.01,
            "Right answers +0.100 [−0.010, +0.200], both at one temperature: not shown to be better",
            "The change is +0.100 (95% interval −0.010 to +0.200)",
        ),
        (
            "score",
            0.03,
            "Reward +0.100 [+0.030, +0.200]: it rose",
            "the reward that training maximised went from 0.200 to 0.300",
        ),
    ],
)
def test_held_out_prompts_are_told_and_only_checked_answers_judge(
    tmp_path: Path,
    synthetic: Any,
    part: str,
    low: float,
    headline: str,
    sentence: str,
) -> None:
    run = synthetic.write_quickstart(tmp_path / "run", arms=False) / "ppo"
    rows = [
        {k: v for k, v in row.items() if not k.startswith("gold")} for row in synthetic.ppo_rows()
    ]
    rows[-1]["heldout/score"] = 0.3
    synthetic.write_lines(run / "metrics.jsonl", rows)
    found = {
        "before": synthetic.estimate(0.2, 0.1, 0.3),
        "after": synthetic.estimate(0.3, 0.2, 0.4),
    }
    found["gain"] = synthetic.estimate(0.1, low, 0.2)
    synthetic.write(run / "summary.json", {"heldout": {"num_prompts": 128, part: found}, "kl": 3.0})
    page = Page(write_report(run))
    assert headline in page.text and sentence in page.text
    assert "curve-heldout-score" in page.charts


def test_alarms_stand_on_the_page_with_their_texts(tmp_path: Path, synthetic: Any) -> None:
    run = synthetic.write_quickstart(tmp_path / "run", arms=False)
    alarm = {
        "detector": "length_gaming",
        "step": 7,
        "value": 2.0,
        "threshold": 1.5,
        "message": "mean length went from 20 to 40",
    }
    rows = [
        {**alarm, "advice": "Look at it", "evidence": ["<b>long</b> answer"]},
        {"detector": 3, "evidence": "none"},
    ]
    synthetic.write_lines(run / "ppo" / "alarms.jsonl", rows)
    page = Page(write_report(run))
    assert "length gaming" in page.text and "step 7" in page.text and "from 20 to 40" in page.text
    assert "<b>long</b> answer" in page.text
    warning = "Alarm of length gaming at step 7: mean length went from 20 to 40. Look at it"
    assert warning in conclusion(read_journey(run)).warnings
    assert (
        "Alarms"
        not in Page(write_report(synthetic.write_quickstart(tmp_path / "calm", arms=False))).text
    )


def test_warnings_of_the_training_come_from_its_alarms_alone(
    tmp_path: Path,
    synthetic: Any,
) -> None:
    rows = synthetic.ppo_rows(40)
    for place, row in enumerate(rows):
        row.update(
            {
                "response/length": 20.0 + 5 * place,
                "policy/entropy": 3.0 / (1 + place),
                "response/stop_rate": 0.1,
            },
        )
    synthetic.write_lines(tmp_path / "ppo" / "metrics.jsonl", rows)
    synthetic.write(
        tmp_path / "ppo" / "summary.json",
        {"kl": 3.0, "gold_gain": synthetic.estimate(0.0, -0.1, 0.1)},
    )
    assert conclusion(read_journey(tmp_path / "ppo")).warnings == []
    alarms = [
        {"detector": "entropy_collapse", "step": step, "message": "the entropy fell"}
        for step in (21, 22)
    ]
    synthetic.write_lines(tmp_path / "ppo" / "alarms.jsonl", alarms)
    assert conclusion(read_journey(tmp_path / "ppo")).warnings == [
        "Alarm of entropy collapse at step 21: the entropy fell.",
    ]


@pytest.mark.parametrize(
    "part",
    [
        "config.json",
        "manifest.json",
        "summary.json",
        "sft/metrics.jsonl",
        "sft/summary.json",
        "pairs/summary.json",
        "reward/metrics.jsonl",
        "reward/summary.json",
        "ppo/metrics.jsonl",
        "ppo/summary.json",
        "ppo/samples.jsonl",
        "evaluate/answers.jsonl",
        "evaluate/summary.json",
    ],
)
@pytest.mark.parametrize("damage", ["missing", "damaged", "foreign"])
def test_any_part_may_be_missing_or_damaged(
    tmp_path: Path,
    synthetic: Any,
    part: str,
    damage: str,
) -> None:
    run = synthetic.write_quickstart(tmp_path / "run")
    if damage == "missing":
        (run / part).unlink()
    else:
        contents = {
            "damaged": b'{"step": 1, "loss"\n\xff\n',
            "foreign": b'[1, null, "text", {"value": []}]\n',
        }
        (run / part).write_bytes(contents[damage])
    page = report(run)
    assert page.charts
    if damage == "damaged":
        assert Path(part).name in page.text
        assert "damaged" in page.text


def test_wrong_types_and_nulls_are_left_out(tmp_path: Path, synthetic: Any) -> None:
    rows = synthetic.ppo_rows(30)
    for index, row in enumerate(rows):
        row["policy/entropy"] = None
        row["response/length"] = "many"
        row["reward/proxy"] = None if index in (3, 4) else row["reward/proxy"]
        row["gold/score"] = None
    run = tmp_path / "ppo"
    synthetic.write_lines(run / "metrics.jsonl", rows)
    nested = {
        "gold_gain": {"value": None},
        "gold_win_rate": "high",
        "gold_parts": {"kind": 3},
        "kl": [1],
        "seconds": None,
    }
    synthetic.write(run / "summary.json", nested)
    page = report(run)
    drawn = page.line("reward-kl", 0)[0]
    assert [round(step) for step in drawn] == [step for step in range(1, 31) if step not in (4, 5)]
    paths = [
        str(a["d"])
        for tag, a, _ in page.charts["reward-kl"]
        if tag == "path" and a.get("class") == "c0 line "
    ]
    assert paths[-1].count("M") == 2  # a gap, and no line across it
    assert not {"curve-policy-entropy", "curve-response-length", "goodhart-steps"} & set(
        page.charts,
    )
    assert "Only the training's own" in page.text
    assert "NaN" not in page.source and "nan" not in " ".join(page.texts("reward-kl", "title"))


def test_empty_foreign_and_missing_folders_are_errors(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "foreign" / "src").mkdir(parents=True)
    (tmp_path / "foreign" / "summary.json").write_text('{"users": 3}')
    (tmp_path / "foreign" / "metrics.jsonl").write_text('{"latency": 3}\n')
    for name in ("empty", "foreign"):
        with pytest.raises(RunError, match="holds no results of tether") as error:
            write_report(tmp_path / name)
        assert isinstance(error.value, TetherError)
        assert not (tmp_path / name / "report.html").exists()
    with pytest.raises(MissingFileError, match="not found"):
        write_report(tmp_path / "nowhere")
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize(
    ("rate", "gain", "headline", "sentence"),
    [
        (
            (0.56, 0.49, 0.63),
            (0.02, -0.01, 0.05),
            "Wins 56.0% [49.0%, 63.0%], both at one temperature: not shown to be better than the "
            "start model",
            "won 56.0% of 200",
        ),
        (
            (0.71, 0.65, 0.77),
            (0.3, 0.2, 0.4),
            "Wins 71.0% [65.0%, 77.0%], both at one temperature: better than the start model",
            "won 71.0% of 200",
        ),
        (
            (0.38, 0.32, 0.45),
            (-0.1, -0.2, -0.05),
            "Wins 38.0% [32.0%, 45.0%], both at one temperature: worse than the start model",
            "won 38.0% of 200",
        ),
        (
            (0.48, 0.41, 0.55),
            (-0.01, -0.05, 0.02),
            "Wins 48.0% [41.0%, 55.0%], both at one temperature: not shown to be better than the "
            "start model",
            "won 48.0% of 200",
        ),
    ],
)
def test_verdict_follows_the_interval(
    tmp_path: Path,
    synthetic: Any,
    rate: Any,
    gain: Any,
    headline: str,
    sentence: str,
) -> None:
    summary = synthetic.ppo_summary(
        gold_win_rate=synthetic.estimate(*rate),
        gold_gain=synthetic.estimate(*gain),
    )
    synthetic.write_lines(tmp_path / "ppo" / "metrics.jsonl", synthetic.ppo_rows(40))
    synthetic.write(tmp_path / "ppo" / "summary.json", summary)
    found = conclusion(read_journey(tmp_path / "ppo"))
    assert found.headline == headline
    assert sentence in " ".join(found.sentences)
    assert any("Distrust the proxy" in warning for warning in found.warnings) == (gain[2] < 0)


ABOVE, AROUND, BELOW = (0.66, 0.58, 0.74), (0.51, 0.42, 0.6), (0.34, 0.26, 0.42)
ROSE, LEVEL, FELL = (0.3, 0.1, 0.5), (0.02, -0.1, 0.14), (-0.3, -0.5, -0.1)
BETTER, WORSE = "better than the start model", "worse than the start model"
HIGHER = "a higher score; more wins are not shown"
LOWER = "a lower score; more losses are not shown"
OPEN = "not shown to be better than the start model"
SHOWN = [
    (rate, gain, *expected)
    for rate, of_gains in (
        (ABOVE, [("good", BETTER)] * 3),
        (BELOW, [("bad", WORSE)] * 3),
        (AROUND, [("open", HIGHER), ("open", OPEN), ("bad", LOWER)]),
        (None, [("open", HIGHER), ("open", OPEN), ("bad", LOWER)]),
    )
    for gain, expected in zip((ROSE, LEVEL, FELL), of_gains, strict=True)
]


@pytest.mark.parametrize(("rate", "gain", "tone", "headline"), SHOWN)
@pytest.mark.parametrize("control", [False, True])
def test_a_verdict_is_what_win_rate_and_gain_show_whatever_word_is_stored(
    tmp_path: Path,
    synthetic: Any,
    rate: Any,
    gain: Any,
    tone: str,
    headline: str,
    control: bool,
) -> None:
    """The win rate decides; the mean score speaks only for itself. The page, the terminal and the
    rounds of a loop say the same.
    """
    found = synthetic.estimate(*gain)
    rates = {} if rate is None else {"win_rate": synthetic.estimate(*rate)}
    summary: dict[str, Any] = {"gold_gain": found, **{f"gold_{k}": v for k, v in rates.items()}}
    if control:
        opposite = synthetic.estimate(*BELOW if rate == ABOVE else ABOVE)
        summary = {
            "gold_gain": synthetic.estimate(*ROSE),
            "gold_win_rate": opposite,
            "over_best_decoding": {**found, **rates},
            "verdict": "worse" if tone == "good" else "better",
        }
    if headline == BETTER:
        tone = tone if control else "open"
    numbers = [f"wins {rate[0]:.1%} [{rate[1]:.1%}, {rate[2]:.1%}]"] if rate else []
    if headline in (HIGHER, LOWER) or not rate:
        numbers.append(f"mean score {gain[0]:+.3f} [{gain[1]:+.3f}, {gain[2]:+.3f}]")
    where = "each at its best temperature" if control else "both at one temperature"
    headline = f"{', '.join(numbers)}, {where}: {headline}".replace("-", "−")
    headline = headline[0].upper() + headline[1:]
    run = tmp_path / "ppo"
    synthetic.write_lines(run / "metrics.jsonl", [{"step": 1, "reward/proxy": 1.0}])
    synthetic.write(run / "summary.json", summary)
    journey = read_journey(run)
    told = conclusion(journey)
    assert (told.tone, told.headline) == (tone, headline)
    assert brief(journey).headline.startswith(headline)
    loop = loop_conclusion(LoopRun("run", [{"labels_so_far": 8, **summary}], journey.judged, []))
    assert loop.tone == tone and loop.headline.endswith(headline[0].lower() + headline[1:])


@pytest.mark.parametrize(
    ("verdict_of", "over", "won", "tone", "headline"),
    [
        (
            "better",
            ROSE,
            ABOVE,
            "good",
            BETTER,
        ),
        ("better", ROSE, AROUND, "open", HIGHER),
        ("sharper", LEVEL, AROUND, "open", "a lower temperature may explain the gain"),
        ("sharper", ROSE, AROUND, "open", HIGHER),
        ("undecided", LEVEL, AROUND, "open", OPEN),
        ("worse", FELL, BELOW, "bad", WORSE),
    ],
)
def test_the_verdict_follows_the_best_decoding_of_the_start(
    tmp_path: Path,
    synthetic: Any,
    verdict_of: str,
    over: Any,
    won: Any,
    tone: str,
    headline: str,
) -> None:
    rate, row = (
        synthetic.estimate(0.87, 0.81, 0.91),
        {"before": synthetic.estimate(5.6, 5.4, 5.8), "after": synthetic.estimate(6.7, 6.5, 6.9)},
    )
    row |= {"gain": synthetic.estimate(1.1, 0.9, 1.3), "win_rate": rate}
    best = {
        **synthetic.estimate(*over),
        "win_rate": synthetic.estimate(*won),
        "temperature": 0.0,
        "policy_temperature": 0.5,
    }
    control = {
        "gold_by_temperature": {"1": row, "0": row},
        "over_best_decoding": best,
        "verdict": verdict_of,
    }
    synthetic.write_lines(tmp_path / "ppo" / "metrics.jsonl", synthetic.ppo_rows(40))
    synthetic.write(
        tmp_path / "ppo" / "summary.json",
        synthetic.ppo_summary(gold_win_rate=rate, gold_gain=row["gain"], **control),
    )
    found = conclusion(read_journey(tmp_path / "ppo"))
    assert found.tone == tone
    assert found.headline.startswith(f"Wins {won[0]:.1%} [{won[1]:.1%}, {won[2]:.1%}]")
    assert found.headline.endswith(f", each at its best temperature: {headline}")
    assert "(policy 0.5, start model" in " ".join(found.sentences)
    assert not any("at one temperature" in warning for warning in found.warnings)
    page = write_report(tmp_path / "ppo").read_text()
    assert (
        "What decoding alone gives" in page
        and "best against best" in page
        and "<td>greedy</td>" in page
    )


def test_a_gain_without_the_control_says_so(tmp_path: Path, synthetic: Any) -> None:
    synthetic.write_lines(tmp_path / "ppo" / "metrics.jsonl", synthetic.ppo_rows(40))
    summary = synthetic.ppo_summary(
        gold_win_rate=synthetic.estimate(0.8, 0.7, 0.9),
        gold_gain=synthetic.estimate(1.0, 0.8, 1.2),
    )
    synthetic.write(tmp_path / "ppo" / "summary.json", summary)
    found = conclusion(read_journey(tmp_path / "ppo"))
    assert (found.tone, found.headline) == (
        "open",
        "Wins 80.0% [70.0%, 90.0%], both at one temperature: better than the start model",
    )
    assert "A lower temperature often" in " ".join(
        found.warnings,
    )
    assert "What decoding alone gives" not in write_report(tmp_path / "ppo").read_text()


def test_verdict_tells_of_a_gold_that_has_turned_down(tmp_path: Path, synthetic: Any) -> None:
    for turn, warned in ((0.5, True), (2.0, False)):
        run = tmp_path / str(turn) / "ppo"
        synthetic.write_lines(run / "metrics.jsonl", synthetic.ppo_rows(gold_turn=turn))
        synthetic.write(run / "summary.json", synthetic.ppo_summary())
        assert (
            any(
                "Distrust the last steps" in warning
                for warning in conclusion(read_journey(run)).warnings
            )
            == warned
        )


def test_a_part_within_the_noise_of_its_answers_is_no_change(
    tmp_path: Path,
    synthetic: Any,
) -> None:
    run = synthetic.write_quickstart(tmp_path / "run", arms=False)
    rows = [
        {"parts_before": {"kind": 0.5}, "parts_after": {"kind": 0.57 + (0.9 if i % 2 else -0.9)}}
        for i in range(100)
    ]
    synthetic.write_lines(run / "evaluate" / "answers.jsonl", rows)
    sentences = " ".join(conclusion(read_journey(run)).sentences)
    # half the interval is 1.96 · 0.9 / √100 ≈ 0.18
    assert "clear change: kind (+0.070)" in sentences


def test_samples_of_one_prompt_are_not_independent(tmp_path: Path, synthetic: Any) -> None:
    run = synthetic.write_quickstart(tmp_path / "run", arms=False)
    verdict = {"policies": {"ppo": {"gold_parts": {"kind": {"before": 0.0, "after": 0.05}}}}}
    synthetic.write(run / "evaluate" / "summary.json", verdict)
    changes = [0.5 if i % 2 else -0.4 for i in range(20)]
    rows = [
        {"id": str(i), "parts_before": {"kind": 0.0}, "parts_after": {"kind": c}}
        for i, c in enumerate(changes)
    ] * 20
    synthetic.write_lines(run / "evaluate" / "answers.jsonl", rows)
    journey = read_journey(run)
    (part,) = gold_parts(journey.stage("policy"), journey.answers)
    assert part.change == pytest.approx(0.05)
    # ten of twenty rose, by 0.9 more; Student's quantile of 19 is 2.093, as of 17.5 prompts
    trials = 20 * (1.96 / 2.093) ** 2
    expected = 0.9 * (wilson_interval(trials / 2, trials)[1] - 0.5)
    assert part.noise == pytest.approx(expected, rel=0.01)
    assert part.direction == 0


def test_gold_found_by_the_whole_run_is_added_to_each_arm(tmp_path: Path, synthetic: Any) -> None:
    run = synthetic.write_quickstart(tmp_path / "run")
    for arm in ("ppo", "ppo-beta0", "ppo-random"):
        synthetic.write(run / arm / "summary.json", {"steps": 160, "kl": 5.5})
    shares = (("ppo", 0.64), ("ppo-beta0", 0.37))
    policies = {
        name: {"gold_win_rate": synthetic.estimate(v, v - 0.05, v + 0.05)} for name, v in shares
    }
    synthetic.write(run / "evaluate" / "summary.json", {"policies": policies})
    arms = {arm.name: arm.summary for arm in read_journey(run).arms}
    assert [arms[name]["steps"] for name in ("ppo", "ppo-beta0", "ppo-random")] == [160, 160, 160]
    assert arms["ppo"]["gold_win_rate"]["value"] == 0.64
    assert arms["ppo-beta0"]["gold_win_rate"]["value"] == 0.37
    assert "gold_win_rate" not in arms["ppo-random"]


def test_answers_are_ranked_by_the_change_of_gold() -> None:
    answer = {"prompt": "p", "before": "b", "after": "a", "gold_before": 0.0}
    rows = [{**answer, "id": str(i), "gold_after": float(i)} for i in range(100)]
    rows += [{**answer, "id": "unscored", "gold_before": None, "gold_after": 1.0}]
    text, (best, median, worst) = answer_groups(rows)
    assert [answer["id"] for answer in best[1]] == [str(i) for i in range(99, 91, -1)]
    assert [answer["id"] for answer in median[1]] == [str(i) for i in range(53, 45, -1)]
    assert [answer["id"] for answer in worst[1]] == [str(i) for i in range(8)]
    assert "100 pairs of answers" in text
    assert "1 without a gold" in text
    assert [answer["id"] for answer in answer_groups(rows[:3])[1][0][1]] == ["2", "1", "0"]


def test_series_keeps_gaps_and_skips_absent_keys() -> None:
    rows = [
        {"step": 1, "a": 1},
        {"step": 2, "a": None},
        {"step": 3},
        {"step": 4, "a": True},
        {"step": None, "a": 2.5},
    ]
    assert series(rows, "a") == [(1.0, 1.0), (2.0, None), (4.0, None), (4.0, 2.5)]
    assert series([{"step": 1, "b": None}], "b") == []


def test_a_long_line_keeps_its_spikes_its_gaps_and_its_end() -> None:
    ys: list[float | None] = [0.0] * 5001
    ys[1234], ys[4000], ys[3000:3200] = 9.0, -5.0, [None] * 200
    points = envelope(list(range(5001)), ys, 400)
    assert len(points) <= 402 and points[-1][0] == 5000
    assert (1234, 9.0) in points and (4000, -5.0) in points and any(y is None for _, y in points)
    assert [x for x, _ in points] == sorted(x for x, _ in points if x is not None)
    assert envelope([], []) == [] and envelope([1, 2], [None, None]) == [(1, None), (2, None)]


def test_of_many_points_those_told_on_hover_are_spread_and_have_most_to_tell() -> None:
    frame = {"id": "a", "title": "A", "caption": "", "y": "b"}
    often, rarely = (
        Trace(range(1, 1001), [0.5] * 1000, "often"),
        Trace([500, 1000], [2.0, 3.0], "rarely"),
    )
    (plot,) = framed(frame, [often, rarely])
    texts = [text for _, text in plot.hits]
    assert (
        35 <= len(texts) <= 40
        and "step 500\noften: 0.5\nrarely: 2" in texts
        and "step 1,000\noften: 0.5\nrarely: 3" in texts
    )


def test_a_reward_of_ones_own_is_no_proxy(tmp_path: Path, synthetic: Any) -> None:
    for source, gold in (("function", False), ("learned", False), ("function", True)):
        run = tmp_path / f"{source}-{gold}"
        rows = [
            {k: v for k, v in row.items() if gold or not k.startswith("gold")}
            for row in synthetic.ppo_rows()
        ]
        synthetic.write_lines(run / "grpo" / "metrics.jsonl", rows)
        synthetic.write(
            run / "grpo" / "config.json",
            {"grpo": {"reward_source": source}, "seed": 3},
        )
        synthetic.write(run / "grpo" / "summary.json", {"kl": -0.02})
        synthetic.write(run / "command.json", {"command": "stages", "config": {"grpo": {}}})
        page = Page(write_report(run))
        assert ("proxy" not in page.text.casefold()) == (source == "function" and not gold)
        assert "Not judged by gold" not in page.text
        assert ("Gold is a judge whose scores nothing is trained on" in page.text) == gold
        assert "may be negative" in page.text
    synthetic.write(run / "command.json", {"config": {"evaluate": {"judge": {"call": "a:b"}}}})
    synthetic.write_lines(
        run / "grpo" / "metrics.jsonl",
        [{k: v for k, v in row.items() if k[:4] != "gold"} for row in rows],
    )
    assert "Not judged by a:b" in Page(write_report(run)).text


def test_one_prompt_is_one(tmp_path: Path, synthetic: Any) -> None:
    run = synthetic.write_quickstart(tmp_path / "run", arms=False)
    rate = synthetic.estimate(1.0, 0.2, 1.0, count=1)
    synthetic.write(run / "evaluate" / "config.json", {"evaluate": {}})
    summary = {"num_prompts": 1, "policies": {"ppo": {"gold_win_rate": rate}}}
    synthetic.write(run / "evaluate" / "summary.json", summary)
    page = report(run).text
    assert "1 prompt compared" in page and "Only 1 comparison: too few to tell" in page


def test_few_are_counted_and_no_percentages(tmp_path: Path, synthetic: Any) -> None:
    for count, shown in (
        (2, "ranks 2 of 2 held-out pairs"),
        (200, "ranks 100.0% of held-out pairs"),
    ):
        run = tmp_path / str(count) / "direct"
        synthetic.write_lines(
            run / "metrics.jsonl",
            [{"step": i, "loss": 0.5, "accuracy": 0.9, "margin": 0.1} for i in (1, 2)],
        )
        synthetic.write(run / "config.json", {"direct": {"loss": "dpo"}})
        synthetic.write(
            run / "summary.json",
            {"heldout_accuracy": synthetic.estimate(1.0, 0.5, 1.0, count)},
        )
        page = Page(write_report(run))
        assert ("100.0%" in page.text) == (
            count == 200
        ) and "Direct preference optimisation (DPO)" in page.text
        assert shown in page.text
        assert not re.search("gold|supervised", page.text.casefold())


def test_facts_stand_at_the_top_and_the_judge_is_named(tmp_path: Path, synthetic: Any) -> None:
    run = synthetic.write_quickstart(tmp_path / "run", arms=False)
    manifest = {
        "model": {"source": "tiny-model", "dtype": "float32", "device": "cpu"},
        "data": {"a/train.jsonl": "0"},
        "rows": 1234,
    }
    manifest |= {
        "processor": "Some CPU",
        "cpu_count": 8,
        "memory_bytes": 64 * 10**9,
        "started": "2026-01-02T03:04:05Z",
        "tether": "0.1",
    }
    synthetic.write(run / "sft" / "manifest.json", manifest)
    synthetic.write(
        run / "evaluate" / "manifest.json",
        {"judge": {"name": "mine.py:score", "says": "One for please."}},
    )
    synthetic.write(run / "evaluate" / "config.json", {"evaluate": {}})
    synthetic.write(run / "evaluate" / "summary.json", {"num_prompts": 8})
    page = Page(write_report(run))
    for words in (
        "tiny-model",
        "sft: a/train.jsonl (1,234 rows)",
        "Some CPU · 8 cores · 64 GB · float32",
        "2026-01-02 03:04:05 UTC",
    ):
        assert words in page.text, words
    said = "The judge is mine.py:score, which says of itself: “One for please.” Nothing is trained"
    assert said in page.text


def test_a_stage_of_a_run_is_told_of_on_the_runs_page(tmp_path: Path, synthetic: Any) -> None:
    run = synthetic.write_quickstart(tmp_path / "run", arms=False)
    synthetic.write(run / "command.json", {"command": "stages", "stages": ["sft"], "config": {}})
    assert (
        write_report(run / "sft") == run / "report.html"
        and not (run / "sft" / "report.html").exists()
    )
    assert 'id="stage-sft"' in (run / "report.html").read_text()
    assert (
        write_report(run / "sft", tmp_path / "other.html").read_text()
        == (run / "report.html").read_text()
    )


def test_numbers_for_people() -> None:
    shown = [decimal(x) for x in (0.0, 0.26, -0.14, 2.013, 13.72, 1234.5, 0.00056, 0.000012)]
    assert shown == ["0", "0.260", "−0.140", "2.01", "13.7", "1,234", "0.0006", "1.2e-05"]
    assert decimal(0.5, signed=True) == "+0.500" and decimal(-4.3e-19, signed=True) == "0"
    assert estimate(10**400) is None
    assert estimate(True) is None
    assert estimate({"value": 0.5, "count": 3}) is not None


def test_estimates_are_read_and_printed_alike() -> None:
    stored = {"value": 0.5, "low": 0.4, "high": 0.6, "count": 10}
    assert (
        bracketed(stored, percent)
        == bracketed(estimate(stored), percent)
        == ("50.0% [40.0%, 60.0%]")
    )
    assert (
        bracketed(0.5, signed)
        == bracketed({"value": 0.5, "low": None, "high": None}, signed)
        == "+0.500"
    )
    assert bracketed(None) == bracketed({}) == bracketed({"value": None}) == ""
    bare, whole = estimate({"value": 0.5, "low": None, "high": None}), estimate(stored)
    assert bare is not None and whole is not None and has_interval(whole) and not has_interval(bare)
    assert whole.as_dict() == stored and bare.as_dict() == {
        "value": 0.5,
        "low": None,
        "high": None,
        "count": 0,
    }
    assert [side(whole, point) for point in (0.3, 0.5, 0.7)] == [1, 0, -1] and side(bare, 0.0) == 0


def test_report_loads_no_torch() -> None:
    code = (
        "import sys, tether.watch.report.page; print(*(m for m in ('torch', 'transformers', 'numpy', "
        "'pandas') if m in sys.modules))"
    )
    loaded = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    assert not {"torch", "transformers"} & set(loaded)


@pytest.mark.browser
@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (360, "dark")])
def test_page_in_a_browser(
    tmp_path: Path,
    synthetic: Any,
    chromium: str,
    width: int,
    scheme: Any,
) -> None:
    playwright = pytest.importorskip("playwright.sync_api")
    run = synthetic.write_quickstart(tmp_path / "run")
    rows = synthetic.answer_rows(30)
    for index, row in enumerate(rows):
        row["after"] = row["prompt"] = HOSTILE[index % len(HOSTILE)]
    synthetic.write_lines(run / "evaluate" / "answers.jsonl", rows)
    parts = {text: {"before": 0.1, "after": 0.3} for text in HOSTILE}
    synthetic.write(run / "ppo" / "summary.json", synthetic.ppo_summary(gold_parts=parts))
    path = write_report(run)
    problems: list[str] = []
    requests: list[str] = []
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=FLAGS)
        context = browser.new_context(
            viewport={"width": width, "height": 900},
            color_scheme=scheme,
            offline=True,
        )
        page = context.new_page()
        page.on("console", lambda message: problems.append(message.text))
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("request", lambda request: requests.append(request.url))
        page.goto(path.as_uri())
        page.evaluate("for (const d of document.querySelectorAll('details')) d.open = true")
        page.click("#theme")
        empty = page.evaluate(
            "[...document.querySelectorAll('figure[id]')].filter(f => "
            "!f.querySelector('.hit')).map(f => f.id)",
        )
        page.locator("#reward-kl .area").hover()
        told = page.inner_text("#hover")
        overflow = page.evaluate("document.documentElement.scrollWidth - innerWidth")
        holes = page.evaluate(
            "[...document.querySelectorAll('.figures')].filter(grid => Math.abs("
            "grid.lastElementChild.getBoundingClientRect().right - "
            "grid.getBoundingClientRect().right) > 1).map(grid => grid.children.length)",
        )
        wide = (
            "e => (r => r.width && (r.left < 0 || r.right > innerWidth))(e.getBoundingClientRect())"
        )
        cut = page.evaluate(
            "[...document.querySelectorAll('.area span, .legend li, th, "
            f"figcaption')].filter({wide}).length",
        )
        named = page.evaluate(
            "[...document.querySelectorAll('.picture > :not(.rows) .xlabel')].map(e => "
            "getComputedStyle(e).display !== 'none')",
        )
        hacked = page.evaluate("'hacked' in window")
        shown = page.evaluate(
            "['.sticky', '.folded'].map(n => "
            "getComputedStyle(document.querySelector(n)).display !== 'none')",
        )
        links = page.evaluate(
            "[...document.querySelectorAll('a')].filter(a => "
            "!document.getElementById(a.hash.slice(1))).length",
        )
        browser.close()
    assert problems == []
    assert requests == [path.as_uri()]
    assert path.stat().st_size < 1.5e6
    assert re.match(r"step \d+\n.*proxy reward: ", told)
    assert (empty, overflow, cut, hacked, links, holes) == ([], 0, 0, False, 0, [])
    assert named == [False, False, True], "the curves of the picture share the name of their axis"
    assert shown == ([True, False] if width == 1280 else [False, True])


@pytest.mark.browser
def test_nothing_is_in_the_way_of_a_screen_reader(
    tmp_path: Path,
    synthetic: Any,
    chromium: str,
) -> None:
    """By axe (npm install axe-core), whose axe.min.js TETHER_AXE names."""
    playwright = pytest.importorskip("playwright.sync_api")
    axe = Path(os.environ.get("TETHER_AXE", ""))
    if not axe.is_file():
        pytest.skip("no axe: set TETHER_AXE to the axe.min.js of axe-core")
    path = write_report(synthetic.write_quickstart(tmp_path / "run"))
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=FLAGS)
        for width, scheme in ((1280, "light"), (360, "dark")):
            context = browser.new_context(
                viewport={"width": width, "height": 900},
                color_scheme=scheme,
                bypass_csp=True,
            )
            page = context.new_page()
            page.goto(path.as_uri())
            page.evaluate("document.querySelectorAll('details').forEach((one) => one.open = true)")
            page.evaluate(axe.read_text())
            violations = page.evaluate("axe.run(document)")["violations"]
            assert [(v["id"], v["nodes"][0]["target"]) for v in violations] == []
        browser.close()


def test_set_aside_rows_and_left_out_steps_are_warnings(tmp_path, synthetic):
    run = synthetic.write_quickstart(tmp_path / "run")
    assert not any(
        "set aside" in w or "left out" in w for w in conclusion(read_journey(run)).warnings
    )
    for stage, more in (
        ("reward", {"quarantine": {"count": 20, "reasons": {}}}),
        ("ppo", {"steps_left_out": 3}),
        ("sft", {"updates": 1}),
    ):
        path = run / stage / "summary.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **more}))
    told = " ".join(conclusion(read_journey(run)).warnings)
    assert "reward: 20 rows" in told and "ppo: in 3 steps" in told
    assert "sft: only 1 update." in told


def test_a_run_with_servers_shows_who_waits_for_whom(tmp_path, synthetic):
    run = tmp_path / "run" / "grpo"
    rows = [
        {**row, "engine/busy": 0.95, "engine/wait": 0.6 + row["step"] / 1e4}
        for row in synthetic.ppo_rows(8)
    ]
    synthetic.write_lines(run / "metrics.jsonl", rows)
    synthetic.write(run / "summary.json", {"steps": 8})
    drawn = Page(write_report(run.parent)).line("health-engine", 1)[1]
    assert drawn == pytest.approx([row["engine/wait"] for row in rows], abs=0.01)


def test_a_loop_of_an_earlier_revision_without_gold_ends_in_a_sentence(tmp_path, synthetic):
    synthetic.write(
        tmp_path / "run" / "summary.json",
        {"rounds": [{"labels_so_far": 8, "labels": 8}], "policy": "round-01/ppo/policy"},
    )
    with pytest.raises(RunError, match="holds no results"):
        write_report(tmp_path / "run")


def test_the_timeline_of_a_step_of_median_length(tmp_path, synthetic):
    run = tmp_path / "run" / "grpo"
    times = {"time/rollout": 1.0, "time/reward": 0.0, "time/evaluate": 0.0, "time/update": 2.0}
    rows = [{**row, **times, "time/step": 3.0 + 0.1 * row["step"]} for row in synthetic.ppo_rows(3)]
    synthetic.write_lines(run / "metrics.jsonl", rows)
    synthetic.write(run / "config.json", {"grpo": {}})
    spans = {
        "server-0": [[-9, -8], [-4, -2.2], [-0.2, 0]],
        "server-1": [[-3.2, -2.2], "damaged", [None, 1], [1]],
        "server-2": None,
    }
    work = [
        {"step": 2, "servers": {"server-0": [[-1, 0]]}},
        {"step": 2, "servers": spans},
        {"step": 7, "servers": {"a": [[-1, 0]]}},
    ]
    synthetic.write_lines(run / "engine" / "work.jsonl", work)
    (plot,) = timeline_figures(read_journey(run.parent).arms[0])
    assert plot.title == "Step 2, who worked when" and list(plot.y.names) == [
        "learner",
        "server-0",
        "server-1",
        "server-2",
    ]
    bars = {(trace.name, trace.ys[0]): [*trace.xs] for trace in plot.traces if trace.xs}
    assert bars.pop(("samples", 1)) == pytest.approx(
        [0, 1.0, None, 3.0, 3.2, None],
        nan_ok=True,
    )  # what lay before the step is cut
    assert bars == {
        ("waits for samples", 0): [0, 1, None],
        ("learns", 0): [1, 3, None],
        ("samples", 2): [0, 1, None],
    }
    assert "server-0\nsamples: 1.00 s\nsamples: 0.20 s" in [text for _, text in plot.hits]
    assert "who worked when" in Page(write_report(run.parent)).text


@pytest.mark.parametrize("section", ["reward", "direct"])
@pytest.mark.parametrize(
    ("longer", "count", "told"), [(0.8, 200, "in 80.0% of its pairs, the "
                                             "longer"), (0.2, 200, "80.0% of its pairs, the "
                                                                   "shorter"),
                                 (0.8, 5, ""), (0.6, 200, ""), (0.5, 200, "")],
)  # fmt: skip
def test_pairs_that_length_decides_are_told(tmp_path, synthetic, section, longer, count, told):
    run = tmp_path / "run" / section
    synthetic.write_lines(
        run / "metrics.jsonl",
        [{"step": i, "loss": 0.5, "accuracy": 0.9, "margin": 0.1} for i in (1, 2)],
    )
    synthetic.write(run / "config.json", {section: {"loss": "dpo"} if section == "direct" else {}})
    synthetic.write(
        run / "summary.json",
        {
            "longer_chosen": grouped_share(
                (np.arange(count) < longer * count).astype(float),
                None,
            ).as_dict(),
        },
    )
    warnings = [
        w for w in conclusion(read_journey(run.parent)).warnings if "of its pairs, the" in w
    ]
    assert len(warnings) == bool(told) and told in "".join(warnings)
