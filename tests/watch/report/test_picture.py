"""The first screen of a page: what decides, on one axis with no difference, and three answers."""

import json
import re
import shutil
import xml.etree.ElementTree as ElementTree
from itertools import combinations
from pathlib import Path

import pytest
from PIL import Image
from tests.watch.report.synthetic_run import estimate, write, write_lines
from tests.watch.report.synthetic_sweep import BETAS, KEY, write_sweep
from tests.watch.report.test_report import HOSTILE, Page

from tether.cli.tools.doctor_run import examine_run
from tether.watch import report
from tether.watch.live.board import Board
from tether.watch.monitoring.doctor import Finding
from tether.watch.report.duel import write_duel
from tether.watch.report.narrative import brief, conclusion
from tether.watch.report.numbers import SENTENCES, bracketed, percent
from tether.watch.report.overlay import write_overlay
from tether.watch.report.page import write_report
from tether.watch.report.picture import WIDTH, picture_lines, rods
from tether.watch.report.plotting import PALETTE
from tether.watch.report.reading import read_journey
from tether.watch.report.rollouts import three_answers
from tether.watch.report.sweep import sweep_brief
from tether.watch.report.sweeps import read_sweep

RATES = {"best": (0.57, 0.51, 0.63), "one": (0.71, 0.65, 0.77), "length": (0.63, 0.55, 0.7)}
LONG = "longer than reward.max_length = 512 tokens; 1024 would keep it"
SVG = "{http://www.w3.org/2000/svg}"


def strokes(page, chart="decides"):
    """The strokes of a chart's rows: their classes, and their ends in the units of the axis."""
    across = page.scale(chart, "x")
    lines = [
        (str(a["class"]), [across(float(x)) for x in re.findall(r"(\d+) \d+", str(a["d"]))])
        for tag, a, _ in page.charts[chart]
        if tag == "path" and "line" in str(a.get("class")) and "1000" not in str(a["d"])
    ]
    return [line for line in lines if len(line[1]) == 2]


def told(page, chart="decides"):
    """Row and number of each row of a chart, as its titles have them."""
    return [text.split("\n")[:2] for text in page.texts(chart, "title")]


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
    assert [number for _, number in told(page)] == [
        "57.0% [51.0%, 63.0%]",
        "71.0% [65.0%, 77.0%]",
        "63.0% [55.0%, 70.0%]",
        "46.0% [39.0%, 53.0%]",
    ]
    for (_, ends), (_, *bounds) in zip(strokes(page)[-4:], RATES.values(), strict=False):
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


def test_the_png_shows_the_strokes_of_the_svg(run):
    """A viewer without `vector-effect` and variables of CSS once made a black picture of it."""
    write_report(run)
    pixels = Image.open(run / "report.png").convert("RGB")
    root = ElementTree.parse(run / "report.svg").getroot()
    assert pixels.size == (2 * int(root.attrib["width"]), 2 * int(root.attrib["height"]))
    strokes = [path for path in root.iter(f"{SVG}path") if "mark" in path.attrib["class"]]
    assert len(strokes) == 5, "four numbers, and the held-out scores"
    dots = re.findall(r"M([\d.]+) ([\d.]+)h0", " ".join(path.attrib["d"] for path in strokes))
    for x, y in dots:
        assert pixels.getpixel((round(2 * float(x)), round(2 * float(y)))) in {
            (0, 114, 178),
            (91, 98, 112),
            (0, 158, 115),
        }
    assert pixels.getpixel((4, 4)) == (255, 255, 255)


def test_colours_of_the_picture_are_those_of_the_page():
    folder = Path(report.__file__).parent
    of_page, of_picture = (
        set(re.findall(r"#[0-9a-f]{6}", (folder / name).read_text()))
        for name in ("page.css", "picture.svg")
    )
    assert of_picture < of_page


def test_without_a_font_there_is_no_png_and_a_line_names_it(run, monkeypatch, caplog):
    monkeypatch.setattr(
        "tether.watch.report.frame.svg_to_bytes",
        lambda svg, **_: b"the same without letters",
    )
    write_report(run)
    assert (run / "report.svg").is_file() and not (run / "report.png").exists()
    (line,) = caplog.messages
    assert str(run / "report.png") in line and "no font" in line


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


@pytest.mark.parametrize("bounded", [True, False])
def test_numbers_without_an_interval_do_not_look_large(tmp_path, bounded):
    """A win rate of 12 prompts once stood at the far end of an axis from 50% to 54%, above the words
    "95% intervals".
    """
    rate = estimate(0.54, *((0.49, 0.59) if bounded else (None, None)), count=12)
    write_lines(tmp_path / "ppo" / "metrics.jsonl", [{"step": 1, "reward/proxy": 1.0}])
    write(tmp_path / "ppo" / "summary.json", {"gold_win_rate": rate})
    (plot,) = rods(read_journey(tmp_path / "ppo")).plots()
    assert plot.x.title == ("strokes: 95% intervals" if bounded else "no 95% intervals")
    away = (plot.x.at(0.54) - plot.x.at(0.5)) / 1000
    assert away > 0.3 if bounded else away < 0.1


def test_the_held_out_curve_begins_where_the_headline_does(tmp_path):
    """Before the first step; the metrics of the steps do not have that loss."""
    rows = [{"step": step, "loss": 6.0 - 0.1 * step} for step in range(1, 9)]
    rows[3]["eval_loss"], rows[7]["eval_loss"] = 5.3, 4.65
    write_lines(tmp_path / "sft" / "metrics.jsonl", rows)
    write(tmp_path / "sft" / "summary.json", {"eval_loss_before": 5.72, "eval_loss": 4.65})
    page = Page(write_report(tmp_path / "sft"))
    assert "the held-out loss from 5.72 to 4.65 nats" in page.text
    steps, losses = page.line("first-heldout-loss", 0)
    assert steps == pytest.approx([0, 4, 8], abs=0.02)
    assert losses == pytest.approx([5.72, 5.3, 4.65], abs=0.02)
    assert list(page.charts)[:2] == ["first-loss", "first-heldout-loss"]


def test_the_loss_of_a_policy_gradient_is_not_in_the_picture(tmp_path):
    rows = [{"step": n, "reward/proxy": 0.1 * n, "loss": -1e-9} for n in (1, 2)]
    write_lines(tmp_path / "grpo" / "metrics.jsonl", rows)
    write(tmp_path / "grpo" / "config.json", {"grpo": {}})
    write(tmp_path / "grpo" / "summary.json", {"proxy_gain": estimate(0.1, 0.0, 0.2)})
    charts = list(Page(write_report(tmp_path / "grpo")).charts)
    assert charts[:2] == ["decides", "first-reward"] and "first-loss" not in charts


@pytest.mark.parametrize("finished", [True, False])
def test_what_is_not_finished_says_so_beside_its_headline(tmp_path, finished):
    name = f"Größe 日本語 {'und noch ein Wort ' * 9}".strip()
    run = tmp_path / name
    write_lines(run / "sft" / "metrics.jsonl", [{"step": n, "loss": 6.0 - n} for n in range(1, 6)])
    write(run / "sft" / "config.json", {"sft": {}})
    if finished:
        write(run / "sft" / "summary.json", {"train_loss": 1.0})
    texts = [Page(write_report(run)).text]
    root = ElementTree.parse(run / "report.svg").getroot()
    texts.append(" ".join("".join(text.itertext()) for text in root.iter(f"{SVG}text")))
    for text in texts:
        assert ("sft not finished: step 5" in text) == (not finished)
        assert "more characters" not in text and "Größe 日本語 und noch ein" in text
    assert name in texts[0] and f"{name[:60]}" in texts[1]


def test_a_reward_model_without_held_out_pairs_has_a_true_headline(tmp_path):
    write_lines(tmp_path / "reward" / "metrics.jsonl", [{"step": 1, "loss": 0.7, "margin": 0.0}])
    write(tmp_path / "reward" / "summary.json", {"num_pairs": 9})
    write(tmp_path / "reward" / "config.json", {"reward": {}})
    headline = conclusion(read_journey(tmp_path / "reward")).headline
    assert headline == (
        "No policy was trained on a reward or on preferences yet, so no answers were judged"
    )
    write_lines(tmp_path / "direct" / "metrics.jsonl", [{"step": 1, "loss": 0.7}])
    write(tmp_path / "direct" / "summary.json", {"num_pairs": 9})
    write(tmp_path / "direct" / "config.json", {"direct": {}})
    texts = " ".join(conclusion(read_journey(tmp_path / "direct")).sentences)
    assert "too few to show a course" in texts and "no losses" not in texts


def measured(key, rate, **more):
    """What a training's own held-out measurement writes, with its control of decoding."""
    ends = {"before": 0.2, "after": 0.5, "gain": 0.3}
    moved = {name: estimate(value, value - 0.1, value + 0.1) for name, value in ends.items()}
    moved["win_rate"] = estimate(0.71, 0.65, 0.77)
    over = {**estimate(0.1, -0.1, 0.3), "win_rate": estimate(rate, rate - 0.04, rate + 0.04)}
    temperatures = {"policy_temperature": 0.5, "temperature": 0.0}
    control = {"by_temperature": {"1": moved}, "over_best_decoding": {**over, **temperatures}}
    return {"num_prompts": 150, key: moved, "verdict": "better", **control, **more}


JUDGED_IN_TRAINING = [
    ("heldout", "score", "", "Reward +0.300 [+0.200, +0.400]: it rose", "the training's own reward on held-out prompts"),
    ("heldout", "correct", "58.0% [54.0%, 62.0%]", "Wins 58.0% [54.0%, 62.0%], each at", "whether answers are right"),
    ("test", "score", "58.0% [54.0%, 62.0%]", "Wins 58.0% [54.0%, 62.0%], each at", "the test model"),
    ("gold", "score", "58.0% [54.0%, 62.0%]", "Wins 58.0% [54.0%, 62.0%], each at", "mine.py:f"),
]  # fmt: skip


@pytest.mark.parametrize(("block", "key", "rate", "headline", "judge"), JUDGED_IN_TRAINING)
def test_picture_headline_and_dashboard_have_one_judge(tmp_path, block, key, rate, headline, judge):
    """A training's own reward on answers that it does not check decides no wins."""
    settings = {"evaluate": {"judge": "test"}} if block == "test" else {}
    write(tmp_path / "ppo" / "config.json", {"ppo": settings, "model": {}, "seed": 0})
    write(tmp_path / "ppo" / "manifest.json", {"judge": {"name": judge}} if block == "gold" else {})
    write(tmp_path / "ppo" / "summary.json", {block: measured(key, 0.58)})
    write_lines(tmp_path / "ppo" / "metrics.jsonl", [{"step": 1, "reward/proxy": 1.0}])
    journey = read_journey(tmp_path / "ppo")
    verdict = brief(journey)
    assert verdict.headline.startswith(headline) and verdict.headline.endswith(
        f", judged by {judge}.",
    )
    shown = rods(journey)
    if rate:
        assert shown.title == f"Wins against the start model's answers, judged by {judge}"
        assert bracketed(shown.numbers[0].value, percent) == rate
        assert "best temperature" in verdict.sentences[1]
    else:
        assert shown.title == "Change of the held-out reward" and len(shown.numbers) == 1
        assert len(verdict.sentences) == 2, "the same reward at the better temperatures"
    page = Page(write_report(tmp_path / "ppo")).text
    assert "judged by gold" not in page and "What decoding alone gives" in page
    assert ("the training's own reward judges" in page) == (not rate)
    board = Board(tmp_path)
    for _ in range(2):
        board.look()
    (run,) = board.runs.values()
    assert run.about["verdict"]["rate"] == rate


def test_a_control_by_the_reward_is_none_of_a_judge_that_measured_none(tmp_path):
    """[evaluate] compared answers at one temperature; the training's own control is of its reward."""
    write_lines(tmp_path / "ppo" / "metrics.jsonl", [{"step": 1, "reward/proxy": 1.0}])
    write(tmp_path / "ppo" / "summary.json", {"heldout": measured("correct", 0.9)})
    policy = {"gold_win_rate": estimate(0.5, 0.4, 0.6), "gold_gain": estimate(0.0, -0.1, 0.1)}
    write(tmp_path / "evaluate" / "summary.json", {"policies": {"ppo": policy}})
    write(tmp_path / "evaluate" / "config.json", {"evaluate": {}})
    journey = read_journey(tmp_path)
    assert conclusion(journey).headline.startswith("Wins 50.0% [40.0%, 60.0%], both at one")
    assert [rod.name for rod in rods(journey).numbers] == ["both at one temperature"]


def test_a_judge_of_the_training_gives_its_intervals_without_a_control(tmp_path):
    write_lines(tmp_path / "ppo" / "metrics.jsonl", [{"step": 1, "gold/score": 0.2}])
    block = {key: value for key, value in measured("score", 0.5).items() if key == "score"}
    write(tmp_path / "ppo" / "summary.json", {"gold": block})
    headline = conclusion(read_journey(tmp_path / "ppo")).headline
    assert headline.startswith("Wins 71.0% [65.0%, 77.0%], both at one temperature: better")


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


@pytest.mark.parametrize(
    ("settings", "key", "reason", "advice"),
    [
        ({}, "skipped", LONG, "Raise the key, or split the rows."),
        ({}, "cut", LONG, "Raise the key, or split the rows."),
        ({"labels": "given"}, "skipped", "tie", 'Ties with votes train with labels = "votes".'),
        ({"labels": "votes"}, "skipped", "tie", ""),
        ({}, "skipped", "tie", ""),
        ({}, "skipped", "nothing to learn", ""),
        ({}, "skipped", "longer than the model's context of 512 tokens", ""),
    ],
)
def test_rows_that_do_not_train_get_the_advice_for_their_reason(
    settings,
    key,
    reason,
    advice,
    run,
    synthetic,
):
    stage = run / "reward"
    synthetic.write(stage / "config.json", {"reward": settings})
    summary = json.loads((stage / "summary.json").read_text())
    synthetic.write(stage / "summary.json", {**summary, key: {reason: 12}})
    synthetic.write(stage / "manifest.json", {"rows": 100})
    (results,) = [of for name, of in examine_run(run).items() if name == "reward"]
    (one,) = [one for one in results if one.check == "rows"]
    assert one.message.startswith("12 of 100 rows (12%)") and one.advice == advice


def test_a_sweep_begins_with_its_settings_on_one_axis_and_the_kl_that_they_took(tmp_path):
    keys = {KEY: BETAS[:3], "seed": (0,)}
    run, rates = write_sweep(tmp_path / "run", keys), {}
    for place, beta in enumerate(keys[KEY]):
        share = 0.45 + 0.1 * place
        rates[f"{beta:g}"] = (share, share - 0.05, share + 0.06)
        over = {"win_rate": estimate(*rates[f"{beta:g}"]), **estimate(0.2, 0.1, 0.3)}
        policies = {"policies": {"ppo": {"over_best_decoding": over}}}
        write(run / f"sweep/{KEY}={beta},seed=0/evaluate/summary.json", policies)
    page = Page(write_report(run))
    assert list(page.charts)[:2] == ["by-rate-at-best", "by-kl"]
    assert page.source.index('id="by-kl"') < page.source.index('class="slider"')
    assert list(page.charts).count("by-kl") == 1 and "by-gold" in page.charts
    shown = told(page, "by-rate-at-best")
    assert shown == [[name, f"{v:.1%} [{a:.1%}, {b:.1%}]"] for name, (v, a, b) in rates.items()]
    drawn = strokes(page, "by-rate-at-best")
    for place, ((classes, ends), (_, *bounds)) in enumerate(
        zip(drawn, rates.values(), strict=True),
    ):
        assert ends == pytest.approx(bounds, abs=0.002) and f"s{place}" in classes.split()


def test_a_sweep_that_nothing_judged_begins_with_its_losses_the_least_as_the_best(tmp_path):
    table = []
    for name, loss in (("a", 2.0), ("b", 1.5), ("c", 1.75)):
        place = f"sweep/sft.schedule={name}/sft"
        losses = [{"step": step, "loss": 3.0, "eval_loss": loss} for step in (1, 2)]
        write_lines(tmp_path / place / "metrics.jsonl", losses)
        table.append({"values": {"sft.schedule": name}, "stages": {"sft": place}})
    write(tmp_path / "sweep.json", {"combinations": table})
    page = Page(write_report(tmp_path))
    assert next(iter(page.charts)) == "by-loss"
    assert [*told(page, "by-loss")] == [["a", "2.00"], ["b", "1.50"], ["c", "1.75"]]
    assert "Best: sft.schedule = b, 1.50." in page.text


OPEN = ", each at its best temperature: not shown to be better than the start model"
WON = ", each at its best temperature: better than the start model"
ROSE = ": a higher score; more wins are not shown"
LEVEL = (0.0, -0.1, 0.1)
RATES_OF_SWEEPS = [
    # all win rates hold one half, and the mean score rises in one setting
    ((0.55, 0.52), (0.1, 0.05, 0.15), f"With {KEY} = 0, mean score +0.100 [+0.050, +0.150]{ROSE}", "higher"),
    ((0.55, 0.52), (0.1, -0.05, 0.25), f"Most wins with {KEY} = 0, 55.0% [45.0%, 65.0%]{OPEN}", "undecided"),
    # a shown win rate decides, whatever the mean score does
    ((0.55, 0.75), (0.1, 0.05, 0.15), f"With {KEY} = 0.01, wins 75.0% [65.0%, 85.0%]{WON}", "better"),
]  # fmt: skip


@pytest.mark.parametrize(("rates", "first", "headline", "word"), RATES_OF_SWEEPS)
def test_a_sweep_is_judged_by_the_number_of_its_picture(tmp_path, rates, first, headline, word):
    keys = {KEY: BETAS[:2], "seed": (0,)}
    run = write_sweep(tmp_path / "run", keys)
    for beta, share, gain in zip(keys[KEY], rates, (first, LEVEL), strict=True):
        won = {"win_rate": estimate(share, share - 0.1, share + 0.1), **estimate(*gain)}
        policy = {"over_best_decoding": won, "gold_gain": estimate(*gain)}
        place = run / f"sweep/{KEY}={beta},seed=0/evaluate/summary.json"
        write(place, {"policies": {"ppo": policy}})
    verdict = sweep_brief(read_sweep(run)).verdict
    assert verdict.headline == headline
    page = Page(write_report(run))
    assert verdict.headline in page.text and next(iter(page.charts)) == "by-rate-at-best"
    board = Board(tmp_path)
    for _ in range(2):
        board.look()
    own = next(one for one in board.runs.values() if one.name == "run")
    assert own.about["verdict"]["headline"] == verdict.headline
    assert own.about["verdict"]["word"] == word
    # a sweep over seeds has no stage in its own folder
    shutil.rmtree(run / "sft")
    board = Board(tmp_path)
    for _ in range(2):
        board.look()
    own = next(one for one in board.runs.values() if one.name == "run")
    assert own.about["verdict"]["headline"] == verdict.headline


def drawn(path):
    """The texts of a picture, which has a PNG of its own size."""
    root = ElementTree.parse(path).getroot()
    pixels = Image.open(path.with_suffix(".png"))
    assert pixels.size == tuple(2 * int(root.attrib[side]) for side in ("width", "height"))
    return {"".join(text.itertext()) for text in root.iter(f"{SVG}text")}


def test_every_page_has_its_picture_as_files(run, tmp_path, synthetic):
    sweep = write_sweep(tmp_path / "sweep", {KEY: BETAS[:3], "seed": (0,)})
    write_report(sweep)
    assert {"Win rate, best against best", "KL, nats", "0.05", "60.0%", KEY} <= drawn(
        sweep / "report.svg",
    )
    other = synthetic.write_quickstart(tmp_path / "other", arms=False)
    write_overlay([run, other])
    texts = drawn(run / "comparison.svg")
    assert {"polite", "57.0%", "KL, nats per response"} <= texts
    assert any("not measured in the same way: other." in text for text in texts)
    write_duel(tmp_path / "duel.html", duelled(["a", "b"], [(0.6, 0.52, 0.68)]), [])
    assert {"a against b", "judged by stub", "wins, ties half", "60.0%"} <= drawn(
        tmp_path / "duel.svg",
    )


def test_runs_side_by_side_begin_with_the_number_that_decides_of_each(run, tmp_path, synthetic):
    """A run whose number is of another kind has no row; colours are those of its curves."""
    folders = [tmp_path / name for name in ("near", "sft", "far")]
    for folder, at_one in ((folders[0], 0.6), (folders[2], 0.8)):
        synthetic.write_quickstart(folder, arms=False)
        policy = {"gold_win_rate": synthetic.estimate(at_one, at_one - 0.1, at_one + 0.1)}
        best = synthetic.estimate(at_one - 0.1, at_one - 0.2, at_one)
        policy["over_best_decoding"] = {**synthetic.estimate(0.2, 0.1, 0.3), "win_rate": best}
        synthetic.write(folder / "evaluate" / "summary.json", {"policies": {"ppo": policy}})
    losses = [{"step": step, "loss": 3 / step} for step in range(1, 9)]
    synthetic.write_lines(folders[1] / "sft" / "metrics.jsonl", losses)
    page = Page(write_overlay(folders, tmp_path / "page.html"))
    assert list(page.charts)[:3] == ["decides", "first-reward", "first-kl"]
    assert told(page) == [
        ["near", "50.0% [40.0%, 60.0%]"],
        ["far", "70.0% [60.0%, 80.0%]"],
    ]
    assert "Best: far, 70.0% [60.0%, 80.0%]." in page.text
    near, far = (PALETTE[place] for place in (0, 2))
    assert [name.split()[0] for name, _ in strokes(page)] == [near, far]
    kinds = [str(a.get("class")) for tag, a, _ in page.charts["first-kl"] if tag == "path"]
    assert [name.split()[0] for name in kinds if " line" in name][-2:] == [near, far]
    assert "not measured in the same way: sft." in page.text
    # a win rate at one temperature is no greater than one of best against best
    synthetic.write(folders[2] / "evaluate" / "summary.json", {"policies": {"ppo": {}}})
    summary = synthetic.ppo_summary(gold_win_rate=synthetic.estimate(0.8, 0.7, 0.9))
    synthetic.write(folders[2] / "ppo" / "summary.json", summary)
    page = Page(write_overlay(folders, tmp_path / "page.html"))
    assert told(page) == [["near", "50.0% [40.0%, 60.0%]"]] and "Best:" not in page.text
    assert "not measured in the same way: sft, far." in page.text
    # nor is one by another judge
    best = {**synthetic.estimate(0.2, 0.1, 0.3), "win_rate": synthetic.estimate(0.9, 0.8, 1.0)}
    policy = {"over_best_decoding": best, "gold_gain": 1.0}
    synthetic.write(folders[2] / "evaluate" / "summary.json", {"policies": {"ppo": policy}})
    synthetic.write(folders[2] / "evaluate" / "manifest.json", {"judge": {"name": "mine.py:f"}})
    page = Page(write_overlay(folders, tmp_path / "page.html"))
    assert [name for name, _ in told(page)] == ["near"]


def duelled(models, rates, standings=()):
    """The figures of a duel in which the pairs of models have these win rates."""
    counts = {"pairs": 64, "wins": 20, "ties": 30, "losses": 14}
    results = [
        {
            **counts,
            "win_rate": rate and estimate(*rate),
            "at_equal_length": rate and estimate(*rate),
        }
        for rate in rates
    ]
    pairs = [*combinations(models, 2)]
    return {
        "models": models,
        "judge": "stub",
        "num_prompts": 64,
        "failures": {},
        "position": None,
        "words": dict.fromkeys(models, 1.0),
        "unanswered": {name: {} for name in models},
        "contests": [
            {"first": first, "second": second, "results": {"all": part}}
            for (first, second), part in zip(pairs, results, strict=True)
        ],
        "ranking": {"standings": standings, "reason": "" if standings else "too few"},
    }


@pytest.mark.parametrize(
    ("rate", "key"),
    [
        ((0.6, 0.52, 0.68), "1"),
        ((0.4, 0.32, 0.48), "-1"),
        ((0.6, 0.49, 0.7), "0"),
        (None, "0"),
    ],
)
def test_a_duel_begins_with_the_win_rate_and_what_it_shows(tmp_path, rate, key):
    write_duel(tmp_path / "page.html", duelled(["a", "b"], [rate]), [])
    page = Page(tmp_path / "page.html")
    shown = bracketed(rate and estimate(*rate), percent) or "–"
    assert SENTENCES["duel"][key].format(first="a", second="b", rate=shown) in page.text
    assert [*page.charts] == (["decides"] if rate else [])
    if rate:
        assert [number for _, number in told(page)] == [shown] * 2
        assert strokes(page)[-1][1] == pytest.approx(rate[1:], abs=0.002)


def test_a_duel_of_several_models_begins_with_their_strengths(tmp_path):
    strengths = {"a": (0.4, 0.1, 0.7), "b": (0.3, 0.0, 0.6), "c": (-0.7, -1.0, -0.4)}
    standings = [
        {"name": name, "best": 1 if place < 2 else 3, "worst": 3, "strength": estimate(*strength)}
        for place, (name, strength) in enumerate(strengths.items())
    ]
    rates = [(0.5, 0.4, 0.6)] * 3
    write_duel(tmp_path / "page.html", duelled([*strengths], rates, standings), [])
    page = Page(tmp_path / "page.html")
    assert "First of 3 models: a and b" in page.text
    assert [name for name, _ in told(page)] == ["a", "b", "c"]
    for (_, ends), (_, *bounds) in zip(strokes(page), strengths.values(), strict=True):
        assert ends == pytest.approx(bounds, abs=0.01)
    write_duel(tmp_path / "page.html", duelled([*strengths], rates), [])
    page = Page(tmp_path / "page.html")
    assert not page.charts and page.text.count("too few")
