"""The first screen of a page: what decides, on one axis with no difference, and three answers."""

import json
import re
import xml.etree.ElementTree as ElementTree

import pytest
from tests.watch.report.test_report import HOSTILE, Page

from tether.cli.tools.doctor_run import examine_run
from tether.watch.monitoring.doctor import Finding
from tether.watch.report.answers import three_answers
from tether.watch.report.narrative import conclusion
from tether.watch.report.page import write_report
from tether.watch.report.picture import WIDTH, picture_lines, rods
from tether.watch.report.reading import read_journey

RATES = {"best": (0.57, 0.51, 0.63), "one": (0.71, 0.65, 0.77), "length": (0.63, 0.55, 0.7)}
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def run(tmp_path, synthetic):
    folder = synthetic.write_quickstart(tmp_path / "polite", arms=False)
    found = {name: synthetic.estimate(*bounds) for name, bounds in RATES.items()}
    chosen = {"4": {"win_rate": synthetic.estimate(0.46, 0.39, 0.53)}}
    policy = {
        "gold_win_rate": found["one"],
        "gold_win_rate_at_equal_length": found["length"],
        "over_best_decoding": {**synthetic.estimate(0.2, 0.1, 0.3), "win_rate": found["best"]},
        "gold": {"best_of_n": chosen},
    }
    synthetic.write(folder / "evaluate" / "summary.json", {"policies": {"ppo": policy}})
    return folder


def test_the_number_that_decides_is_the_first_row_of_the_first_chart(run):
    page = Page(write_report(run))
    assert list(page.charts)[:4] == ["decides", "first-reward", "first-kl", "first-heldout"]
    told = page.texts("decides", "title")
    assert [text.split("\n")[1] for text in told] == [
        "57.0% [51.0%, 63.0%]",
        "71.0% [65.0%, 77.0%]",
        "63.0% [55.0%, 70.0%]",
        "46.0% [39.0%, 53.0%]",
    ]
    across = page.scale("decides", "x")
    lines = [
        [across(float(x)) for x in re.findall(r"(\d+) \d+", str(a["d"]))]
        for tag, a, _ in page.charts["decides"]
        if tag == "path" and "line" in str(a.get("class")) and "1000" not in str(a["d"])
    ]
    drawn = [line for line in lines if len(line) == 2]
    for ends, (_, *bounds) in zip(drawn[-4:], RATES.values(), strict=False):
        assert ends == pytest.approx(bounds, abs=0.002)
    assert page.source.index('id="decides"') < page.source.index('id="at-three"')
    assert page.source.index('id="at-three"') < page.source.index('class="about"')


def test_a_terminal_has_the_same_bars(run):
    first, best, one, length, chosen, reward = picture_lines(read_journey(run))
    assert "judged by gold" in first and "(':' is 50.0%, no difference)" in first
    start = best.index("each at its best temperature") + len("each at its best temperature") + 2
    bars = [line[start : start + WIDTH] for line in (best, one, length, chosen)]
    dots = [bar.index("●") for bar in bars]
    assert dots[3] < dots[0] < dots[2] < dots[1]
    assert bars[0].index(":") < bars[0].index("|"), "the interval lies above one half"
    ends = [place for place, sign in enumerate(bars[3]) if sign == "|"]
    assert ends[0] < bars[3].index(":") < ends[1], "this one contains it"
    assert best.endswith(" 57.0% [51.0%, 63.0%]") and "▁" in reward and "█" in reward


def test_three_answers_are_the_median_the_best_and_the_worst():
    rows = [
        {"before": "b", "after": "a", "id": change, "gold_before": 0.0, "gold_after": change}
        for change in (0.1, -0.7, 0.3, 0.9, 0.2)
    ]
    assert [row["id"] for _, row in three_answers(rows)] == [0.2, 0.9, -0.7]
    assert three_answers(rows[:2]) == []


def test_the_picture_is_a_file_of_its_own_in_which_nothing_can_act(run, synthetic):
    write_report(run)
    root = ElementTree.parse(run / "report.svg").getroot()
    texts = ["".join(text.itertext()) for text in root.iter(f"{SVG}text")]
    assert {"polite", "57.0%", "71.0%", "63.0%", "46.0%", "50%"} <= set(texts)
    assert any(text.startswith("Wins 57.0% [51.0%, 63.0%]") for text in texts)
    plain = [element.tag for element in root.iter()]
    for text in HOSTILE[:5]:
        judge = {"judge": {"name": text, "says": text}}
        synthetic.write(run / "evaluate" / "manifest.json", judge)
        write_report(run)
        found = ElementTree.parse(run / "report.svg").getroot()
        assert [element.tag for element in found.iter()] == plain


@pytest.mark.parametrize(
    ("summary", "even", "name"),
    [
        ({"heldout": "correct"}, 0.0, "share of right answers"),
        ({"heldout": "score"}, 0.0, "held-out reward"),
        ({"gold_gain": {"value": 0.2, "low": 0.1, "high": 0.3}}, 0.0, "gold score"),
    ],
)
def test_without_a_win_rate_the_gain_decides_beside_0(tmp_path, synthetic, summary, even, name):
    if part := summary.get("heldout"):
        ends = {key: synthetic.estimate(0.2, 0.1, 0.3) for key in ("before", "after", "gain")}
        summary = {"heldout": {"num_prompts": 64, part: ends}}
    synthetic.write_lines(tmp_path / "ppo" / "metrics.jsonl", [{"step": 1, "reward/proxy": 1.0}])
    (tmp_path / "ppo" / "summary.json").write_text(json.dumps(summary))
    found = rods(read_journey(tmp_path / "ppo"))
    assert found is not None and found.even == even and name in found.title
    assert found.numbers[0][1].value == 0.2


def test_rows_that_do_not_train_are_a_doubt_and_a_finding(run, synthetic):
    skipped = {"longer than sft.max_length = 512 tokens; 1024 would keep it": 71}
    summary = {"eval_loss": 2.0, "skipped": skipped, "updates": 90}
    said = "71 of 120 rows (59%) do not train"
    synthetic.write(run / "sft" / "summary.json", summary)
    for rows, seen in ((120, True), (12_000, False)):
        synthetic.write(run / "sft" / "manifest.json", {"rows": rows})
        warnings = conclusion(read_journey(run)).warnings
        assert any(said in line and "1,024 would keep all" in line for line in warnings) == seen
        findings = [one for one in examine_run(run)["sft"] if isinstance(one, Finding)]
        assert any(said in one.message for one in findings) == seen
