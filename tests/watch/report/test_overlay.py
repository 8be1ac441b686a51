"""Several runs on one page: each under its own name, its curves as they are, its verdict, and what
it was run with.
"""

from __future__ import annotations

import html
import re

import pytest
from tests.watch.report.test_report import Page

from tether.core.errors import ConfigError, MissingFileError
from tether.watch.report.figures import charts
from tether.watch.report.narrative import conclusion
from tether.watch.report.overlay import told_apart, write_overlay
from tether.watch.report.plotting import PALETTE
from tether.watch.report.reading import SubRun, read_journey


@pytest.fixture
def runs(tmp_path, synthetic):
    """Three policies, one with an SFT stage, at KL coefficients of their own."""
    folders = []
    for name, speed in (("slow", 0.5), ("fast", 1.5), ("middle", 1.0)):
        folder = tmp_path / name
        rows = synthetic.ppo_rows(24, speed, seed=len(name))
        synthetic.write_lines(folder / "ppo" / "metrics.jsonl", rows)
        synthetic.write(folder / "ppo" / "summary.json", synthetic.ppo_summary(kl=14 * speed))
        settings = {"steps": 24, "kl": {"coefficient": 0.1 / speed}, "reward_source": "learned"}
        synthetic.write(
            folder / "ppo" / "config.json",
            {"ppo": settings, "model": {"source": "tiny"}, "seed": 0},
        )
        folders.append(folder)
    losses = [{"step": step, "loss": 2 / step, "eval_loss": 3 / step} for step in range(1, 9)]
    synthetic.write_lines(folders[0] / "sft" / "metrics.jsonl", losses)
    synthetic.write(
        folders[0] / "sft" / "config.json",
        {"sft": {"epochs": 2}, "model": {"source": "tiny"}, "seed": 0},
    )
    return folders


def cells(source):
    """The tables of a page, row by row."""
    tables = re.findall(r"<table>(.*?)</table>", source, re.DOTALL)
    plain = lambda text: html.unescape(re.sub(r"<[^>]+>", "", text)).strip()  # noqa: E731
    rows = [re.findall(r"<tr>(.*?)</tr>", table, re.DOTALL) for table in tables]
    return [
        [[plain(cell) for cell in re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row)] for row in table]
        for table in rows
    ]


def test_every_run_is_drawn_with_its_own_numbers_under_its_own_name(runs, tmp_path):
    page = Page(write_overlay(runs, tmp_path / "page.html"))
    chart = "overlay-kl-policy"
    assert page.texts(chart, "name") == ["slow", "fast", "middle"]
    for place, folder in enumerate(runs):
        rows = read_journey(folder).arms[0].metrics
        steps, values = page.line(chart, place)
        assert steps == pytest.approx([row["step"] for row in rows], abs=0.1)
        assert values == pytest.approx([row["kl/policy_reference_k1"] for row in rows], abs=0.05)
    held_out = {name for name, chart in page.charts.items() if name.startswith("overlay-gold")}
    assert held_out == {"overlay-gold-policy"} and page.texts("overlay-gold-policy", "name") == [
        "slow",
        "fast",
        "middle",
    ]
    # of the only run that has an SFT stage
    assert page.texts("loss-sft", "name") == ["training", "held-out"]


def test_the_table_has_the_verdict_of_each_run_and_the_other_what_they_differ_in(runs, tmp_path):
    verdicts, differences = cells(write_overlay(runs, tmp_path / "page.html").read_text())
    head, *rows = verdicts
    assert [row[0] for row in rows] == ["slow", "fast", "middle"]
    for row, folder, kl in zip(rows, runs, (7.0, 21.0, 14.0), strict=True):
        shown = dict(zip(head, row, strict=True))
        assert (
            shown["verdict"] == conclusion(read_journey(folder)).headline and shown["steps"] == "24"
        )
        assert float(shown["KL, nats"].split()[0]) == kl
    assert differences[0] == ["setting", "slow", "fast", "middle"]
    assert {row[0]: row[1:] for row in differences[1:]} == {
        "ppo.kl.coefficient": ["0.2", "0.0666667", "0.1"],
        "sft.epochs": ["2", "–", "–"],
    }


def test_names_are_the_shortest_that_tell_folders_apart(tmp_path):
    places = [tmp_path / "a" / "run", tmp_path / "b" / "run", tmp_path / "c"]
    assert told_apart(places) == ["a/run", "b/run", f"{tmp_path.name}/c"]
    long = [tmp_path / f"{'ppo.learning_rate=0.0001,' * 4}seed={seed}" for seed in (1, 2)]
    assert told_apart(long) == [one.name for one in long]
    with pytest.raises(ConfigError, match="is given twice"):
        told_apart([tmp_path / "c", tmp_path / "a" / ".." / "c"])


def test_more_runs_than_colours_have_lines_of_their_own():
    rows = [{"step": step, "reward/proxy": float(step)} for step in range(40)]
    arms = [SubRun(f"run {n}", rows) for n in range(len(PALETTE) + 3)]
    (plot,) = charts("overlay", arms)
    looks = [(trace.colour, trace.dash) for trace in plot.traces]
    assert len(looks) == len(arms) == len({*looks}) and [trace.name for trace in plot.legend] == [
        arm.name for arm in arms
    ]


def test_the_default_place_and_a_run_that_is_not_there(runs, tmp_path):
    assert write_overlay(runs[:2]) == runs[0] / "comparison.html"
    with pytest.raises(MissingFileError, match="nowhere"):
        write_overlay([runs[0], tmp_path / "nowhere"])


def test_names_of_folders_cannot_act_on_the_page(runs, tmp_path):
    hostile = runs[0].rename(tmp_path / "<img src=x onerror=1>")
    page = Page(write_overlay([hostile, runs[1]], tmp_path / "page.html"))
    assert (
        not any(tag == "img" for tag, _ in page.elements) and ("<img src=x onerror=1>") in page.text
    )


@pytest.mark.parametrize("first", ["learned", "function"])
def test_runs_by_different_kinds_of_reward_stand_on_one_page(runs, tmp_path, synthetic, first):
    kinds = [first, "function" if first == "learned" else "learned"]
    for folder, kind in zip(runs[1:], kinds, strict=True):
        settings = {"steps": 24, "reward_source": kind}
        steps = [
            {key: value for key, value in row.items() if not key.startswith("gold")}
            for row in synthetic.ppo_rows(24, 1.0, seed=0)
        ]
        synthetic.write_lines(folder / "ppo" / "metrics.jsonl", steps)
        gain = {"value": 0.5, "low": 0.4, "high": 0.6, "count": 32}
        synthetic.write(
            folder / "ppo" / "summary.json",
            {"steps": 24, "proxy_gain": gain, "kl": 3.0},
        )
        synthetic.write(
            folder / "ppo" / "config.json",
            {"ppo": settings, "model": {"source": "tiny"}, "seed": 0},
        )
    page = write_overlay(runs[1:], tmp_path / "page.html").read_text()
    (table,) = [table for table in cells(page) if table[0][:2] == ["run", "verdict"]]
    head, *rows = table
    gains = [name for name in head if name in ("reward gain", "proxy gain")]
    assert sorted(gains) == ["proxy gain", "reward gain"]
    for row in rows:
        assert sum(row[head.index(name)] not in ("", "–") for name in gains) == 1
