"""The page shows each evaluator's figures before, along and after a training, with intervals."""

from __future__ import annotations

import json
import re

import pytest
from tests.watch.report.test_report import HOSTILE, Page, report

from tether.watch.report.evaluators import evaluator_rows, figure_words
from tether.watch.report.reading import read_journey


def estimate(value, low, high, count=40, **more):
    return {"value": value, "low": low, "high": high, "count": count, **more}


def record(moment, step, figures, evaluator="multiple_choice", **more):
    rows = {name: {"a": 1.0} for name in figures}
    return {"evaluator": evaluator, "moment": moment, "step": step, "figures": figures,
            "rows": rows, **more}  # fmt: skip


def change(value, low, high, *, paired=True):
    return {"difference": estimate(value, low, high), "paired": paired}


LINES = [
    record("before", 0, {"acc": estimate(0.5, 0.35, 0.65), "ece": estimate(0.1, None, None, reason="too few rows: 40")}),
    record("along", 10, {"acc": estimate(0.6, 0.45, 0.75)}, change={"acc": change(0.1, -0.02, 0.22)}),
    record("along", 20, {"acc": estimate(0.4, 0.25, 0.55)}, change={"acc": change(-0.1, -0.22, 0.02)}),
    record("after", 30, {"acc": estimate(0.375, 0.22, 0.53), "ece": estimate(0.2, 0.1, 0.3)},
           change={"acc": change(-0.125, -0.25, -0.01), "ece": change(0.1, -0.1, 0.3, paired=False)}),
    record("before", 0, {"distinct_1": estimate(0.75, 0.7, 0.8)}, evaluator="diversity"),
]  # fmt: skip


@pytest.fixture
def run(tmp_path, synthetic):
    folder = tmp_path / "run"
    synthetic.write_lines(folder / "ppo" / "metrics.jsonl", synthetic.ppo_rows(30))
    synthetic.write(folder / "ppo" / "summary.json", synthetic.ppo_summary())
    synthetic.write_lines(folder / "ppo" / "evaluations.jsonl", LINES)
    return folder


def cells(page: Page, heading: str) -> list[list[str]]:
    """The rows of the table whose first cell of the head is `heading`, read off the page."""
    rows, source = [], page.source
    table = next(part for part in source.split("<table>")[1:] if f">{heading}</th>" in part)
    for row in table.partition("</table>")[0].split("<tr>")[2:]:
        cells = (cell.partition("</td>")[0] for cell in row.split("<td>")[1:])
        rows.append([re.sub(r"<[^>]+>", "", cell) for cell in cells])
    return rows


def test_the_table_has_every_figure_with_its_interval_and_change(run):
    assert cells(report(run), "figure") == [
        ["multiple choice, right", "0.500 [0.350, 0.650]", "0.400 [0.250, 0.550], step 20",
         "0.375 [0.220, 0.530]", "−0.125 [−0.250, −0.010]"],
        ["multiple choice, calibration error", "0.100 [too few]", "–", "0.200 [0.100, 0.300]",
         "+0.100 [−0.100, +0.300], not paired"],
        ["diversity, different words", "0.750 [0.700, 0.800]", "–", "–", "–"],
    ]  # fmt: skip


def test_the_tax_is_in_points_and_per_nat_of_the_runs_own_kl(run, synthetic):
    """−0.125 [−0.250, −0.010] of a share for 2.5 nats; the other evaluator measures no ability."""
    synthetic.write(
        run / "ppo" / "summary.json",
        {**synthetic.ppo_summary(), "kl": 2.5, "kl_noise": None},
    )
    assert cells(report(run), "ability") == [
        ["multiple choice, right", "2.50 [too few]", "50.0%", "37.5%", "−12.5 [−25.0, −1.00]", "−5.00 [−10.0, −0.400]"],
        ["multiple choice, calibration error", "2.50 [too few]", "10.0%", "20.0%", "+10.0 [−10.0, +30.0]",
         "+4.00 [−4.00, +12.0]"],
    ]  # fmt: skip
    synthetic.write(
        run / "ppo" / "summary.json",
        {**synthetic.ppo_summary(), "kl": 0.05, "kl_noise": None},
    )
    assert [row[-1] for row in cells(report(run), "ability")] == ["–", "–"]


def test_a_curve_has_the_measured_values_and_intervals(run):
    page = report(run)
    assert [name for name in page.charts if name.startswith("evaluator")] == [
        "evaluator-0",
        "evaluator-1",
    ]
    xs, ys = page.line("evaluator-0", 1)
    assert xs == pytest.approx([0, 10, 20, 30], abs=0.2)
    assert ys == pytest.approx([0.5, 0.6, 0.4, 0.375], abs=0.005)
    xs, ys = page.line("evaluator-0", 0)
    assert xs == pytest.approx([0, 0, 10, 10, 20, 20, 30, 30], abs=0.2)
    assert ys == pytest.approx([0.35, 0.65, 0.45, 0.75, 0.25, 0.55, 0.22, 0.53], abs=0.005)
    assert any("0.400 [0.250, 0.550]" in text for text in page.texts("evaluator-0", "title"))


def test_policies_that_a_stage_compares_have_rows_of_their_own(run, synthetic):
    lines = [
        {**LINES[0], "policy": "before"},
        *({**record("after", 0, {"acc": estimate(value, 0.1, 0.9)}), "policy": name}
          for name, value in (("ppo", 0.25), ("ppo-random", 0.75))),
    ]  # fmt: skip
    synthetic.write_lines(run / "evaluate" / "evaluations.jsonl", lines)
    synthetic.write(run / "evaluate" / "summary.json", {"policies": {}})
    stage = next(stage for stage in read_journey(run).stages if stage.name == "evaluate")
    assert [row[0:1] + row[3:4] for row in evaluator_rows(stage)] == [
        ["ppo: multiple choice, right", "0.250 [0.100, 0.900]"],
        ["ppo: multiple choice, calibration error", ""],
        ["ppo-random: multiple choice, right", "0.750 [0.100, 0.900]"],
    ]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (("multiple_choice", "acc"), "multiple choice, right"),
        (("decoding", "0.5/score"), "other temperatures, score at 0.5"),
        (("best_of_n", "best_of_4"), "best of n, best of 4"),
        (("decoding", "0/answer_tokens"), "other temperatures, length, tokens at 0"),
        (("lm_eval", "arc_easy/acc"), "lm-eval, arc_easy/acc"),
        (("my_own", "my_figure"), "my_own, my_figure"),
    ],
)
def test_names_are_words_and_names_of_users_stay(name, words):
    assert ", ".join(figure_words(*name)) == words


@pytest.mark.parametrize("text", HOSTILE)
def test_a_hostile_name_is_text(run, synthetic, text):
    """An evaluator of lm-eval's shares too, whose figures have names of tasks."""
    pages = []
    for name, figure in (
        ("mine", "share"),
        (text, text),
        ("lm_eval", "task/acc"),
        ("lm_eval", f"{text}/acc"),
    ):
        lines = json.loads(
            json.dumps(LINES).replace("multiple_choice", "NAME").replace('"acc"', '"FIGURE"'),
        )
        for line in lines:
            line["evaluator"] = name if line["evaluator"] == "NAME" else line["evaluator"]
            for key in ("figures", "rows", "change"):
                if key in line:
                    line[key] = {figure if k == "FIGURE" else k: v for k, v in line[key].items()}
        synthetic.write_lines(run / "ppo" / "evaluations.jsonl", lines)
        pages.append(report(run))
    plain, hostile, task, hostile_task = pages
    assert hostile.skeleton == plain.skeleton
    assert hostile_task.skeleton == task.skeleton
    assert 'id="at-tax"' in hostile_task.source and 'id="at-tax"' not in hostile.source


def test_damaged_lines_leave_the_others(run):
    path = run / "ppo" / "evaluations.jsonl"
    odd = ['{"evaluator": 3, "figures": []}', "[1]", '{"figures": {"x": {"value": "y"}}}', "{"]
    path.write_text(path.read_text() + "\n".join(odd) + "\n")
    page = report(run)
    assert "0.375 [0.220, 0.530]" in page.text
    assert "evaluations.jsonl: 2 damaged line(s)" in page.text


def test_a_run_without_evaluators_has_no_such_section(run):
    (run / "ppo" / "evaluations.jsonl").unlink()
    assert "at-measured" not in report(run).source
