"""The report shows the numbers of the files, survives what is missing, and nothing a model wrote can act in it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import pytest

from tether.core.errors import MissingFileError, RunError, TetherError
from tether.report import write_report
from tether.report.answers import answer_groups
from tether.report.narrative import decimal, gold_parts, verdict
from tether.report.plotting import thin
from tether.report.reading import estimate, printable, read_journey, series

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
    """The elements, the text and the embedded drawings of a page."""

    def __init__(self, path: Path) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.stack: list[str] = []
        self.pieces: list[str] = []
        self.scripts: list[str] = []
        self.source = path.read_text(encoding="utf-8")
        self.feed(self.source)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in {"meta", "link", "br", "img"}:
            self.stack.append(tag)
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.stack.pop() == tag, f"unbalanced </{tag}>"

    def handle_data(self, data: str) -> None:
        if self.stack and self.stack[-1] == "script":
            self.scripts[-1] += data
        elif not self.stack or self.stack[-1] != "style":
            self.pieces.append(data)

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", " ".join(self.pieces))

    @property
    def drawings(self) -> dict[str, Any]:
        return json.loads(self.scripts[0])

    @property
    def skeleton(self) -> list[tuple[str, tuple[str, ...]]]:
        return [(tag, tuple(attributes)) for tag, attributes in self.elements]


@pytest.fixture(autouse=True)
def _short_plotly(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Five megabytes of plotly.js are written and parsed only where a browser runs them."""
    if "chromium" not in request.fixturenames:
        monkeypatch.setattr("tether.report.page.get_plotlyjs", lambda: "/* plotly.js */")


def report(run: Path) -> Page:
    return Page(write_report(run, run.parent / "out" / "page.html"))


def test_numbers_of_the_page_are_those_of_the_files(tmp_path: Path, synthetic: Any) -> None:
    page = report(synthetic.write_quickstart(tmp_path / "run"))
    assert "the trained model's answers beat those from before in 71.3% of 200 comparisons on held-out prompts" in page.text
    assert "(interval 64.6% to 77.1%; 50% is no difference)" in page.text
    assert "The gold score changed by +0.322 (interval +0.260 to +0.384)" in page.text
    assert "one question back (+0.430), on topic (+0.310), kind (+0.070)" in page.text
    assert "What got worse: brief (−0.140)." in page.text
    assert "No clear change: grammar (+0.001)" in page.text
    assert "13.7 nats of KL per response" in page.text
    tiles = ("2,150", "74.2%", "80.5%", "0.213", "0.187", "0.048", "73.1%", "1.96 GB", "16 min")
    for shown in (*tiles, "38.0% (32.0% to 45.0%)", "71.2"):
        assert shown in page.text, shown


def test_drawings_carry_the_metrics(tmp_path: Path, synthetic: Any) -> None:
    run = synthetic.write_quickstart(tmp_path / "run")
    drawings = report(run).drawings
    rows = [json.loads(line) for line in (run / "ppo" / "metrics.jsonl").read_text().splitlines()]
    lines = {trace["name"]: trace for trace in drawings["reward-kl"]["data"]}
    assert lines["ppo: proxy reward"]["y"] == pytest.approx([row["reward/proxy"] for row in rows], rel=1e-5)
    assert lines["ppo: KL"]["y"] == pytest.approx([row["kl/policy_reference_k1"] for row in rows], rel=1e-5)
    assert lines["ppo: KL"]["yaxis"] == "y2"
    gold = next(t for t in drawings["goodhart-distance"]["data"] if t["name"] == "ppo: gold")
    scored = [row for row in rows if "gold/score" in row]
    assert gold["x"] == pytest.approx([max(0.0, row["kl/policy_reference_k1"]) ** 0.5 for row in scored], rel=1e-5)
    assert gold["y"] == pytest.approx([row["gold/score"] for row in scored], rel=1e-5)
    phases = {trace["name"]: sum(trace["y"]) for trace in drawings["phases"]["data"]}
    assert sum(phases.values()) == pytest.approx(sum(row["time/step"] for row in rows), rel=1e-3)
    assert phases["rollout"] == pytest.approx(sum(row["time/rollout"] for row in rows), rel=1e-3)
    reliability = next(t for t in drawings["reliability"]["data"] if t["type"] == "bar")
    assert reliability["y"] == [61, 52, 44, 37, 21]
    accuracy = drawings["reward-accuracy"]["data"][0]
    assert accuracy["x"] == [0.7419, 0.8047]
    assert accuracy["error_x"]["array"] == pytest.approx([0.0534, 0.0465])
    assert accuracy["error_x"]["arrayminus"] == pytest.approx([0.0608, 0.0556])


def test_plotly_knows_every_attribute_of_the_drawings(tmp_path: Path, synthetic: Any) -> None:
    drawings = report(synthetic.write_quickstart(tmp_path / "run")).drawings
    assert len(drawings) > 20
    for name, drawing in drawings.items():
        themed = json.loads(re.sub(r'"@\w+"', '"#888888"', json.dumps(drawing)))
        go.Figure(themed)  # raises ValueError for an attribute that plotly.js would ignore
        for key, value in drawing["layout"].items():
            if key.startswith(("xaxis", "yaxis")) and value.get("visible", True) and not value.get("ticktext"):
                assert value["title"]["text"], f"{name} {key} has no title"


def _everywhere(text: str, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every text of the rows, and the names of the parts and arms, replaced."""

    def replace(value: Any) -> Any:
        if isinstance(value, dict):
            return {(text if " " in key or key.startswith("ppo-") else key): replace(v) for key, v in value.items()}
        return text if isinstance(value, str) else value

    return [replace(row) for row in rows]


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_text_makes_no_element(tmp_path: Path, synthetic: Any, text: str) -> None:
    def write(run: Path, inserted: str) -> Page:
        synthetic.write_quickstart(run, arms=False)
        synthetic.write_lines(run / "evaluation" / "answers.jsonl", _everywhere(inserted, synthetic.answer_rows(30)))
        summary = synthetic.ppo_summary(gold_parts={inserted: {"before": 0.2, "after": 0.4}})
        synthetic.write(run / "ppo" / "summary.json", summary)
        synthetic.write(run / "config.json", {inserted: inserted})
        return report(run)

    plain, hostile = write(tmp_path / "a" / "run", "harmless text"), write(tmp_path / "b" / "run", text)
    assert hostile.skeleton == plain.skeleton
    assert len(hostile.scripts) == 3
    assert hostile.scripts[1:] == plain.scripts[1:]
    ours = hostile.source.replace(hostile.scripts[1], "")
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f\u202a-\u202e\u2066-\u2069]", ours)
    assert "</" not in hostile.scripts[0]
    assert "<" not in hostile.drawings["gold-parts"]["layout"]["yaxis"]["ticktext"][0]
    shown = printable(text)
    assert re.sub(r"\s+", " ", shown).strip() in hostile.text
    assert len(hostile.source) - len(plain.source) < 1_500_000


def test_hostile_folder_names_make_no_element(tmp_path: Path, synthetic: Any) -> None:
    name = "<img src=x onerror=alert(1)>"
    run = synthetic.write_quickstart(tmp_path / "run", arms=False)
    synthetic.write_lines(run / name / "metrics.jsonl", synthetic.ppo_rows(20))
    page = report(run.rename(tmp_path / name))
    assert "img" not in [tag for tag, _ in page.elements]
    assert any("&lt;img" in trace["name"] for trace in page.drawings["reward-kl"]["data"])


def test_long_texts_are_cut_and_counted() -> None:
    assert printable("x" * 100_000) == "x" * 4000 + " … [96,000 more characters]"
    assert printable("a\r\nb\x00\x07") == "a\nb␀␇"
    assert printable([{"role": "user", "content": "hi"}]) == "user: hi"
    assert printable(None) == ""


@pytest.mark.parametrize("stage", ["sft", "reward", "ppo"])
def test_a_single_stage(tmp_path: Path, synthetic: Any, stage: str) -> None:
    run = synthetic.write_quickstart(tmp_path / "run", arms=False)
    page = Page(write_report(run / stage))
    drawn = set(page.drawings)
    expected = {"sft": "loss-sft", "reward": "reliability", "ppo": "reward-kl"}[stage]
    assert expected in drawn
    assert not drawn & ({"loss-sft", "reliability", "reward-kl"} - {expected})
    if stage == "ppo":
        assert "Samples from training" in page.text
        assert "proxy reward" in {trace["name"] for trace in page.drawings["reward-kl"]["data"]}
    else:
        assert "no reinforcement learning stage here" in page.text


@pytest.mark.parametrize("section", ["direct", "kto"])
def test_direct_methods_are_no_reward_models(tmp_path: Path, synthetic: Any, section: str) -> None:
    run = synthetic.write_quickstart(tmp_path / "run", arms=False) / "reward"
    synthetic.write(run / "config.json", {section: {"beta": 0.1}, "model": {"source": "tiny"}, "seed": 0})
    synthetic.write(
        run / "summary.json", {"heldout_accuracy": synthetic.estimate(0.64, 0.58, 0.7)} if section == "direct" else {}
    )
    page = Page(write_report(run))
    assert {f"loss-{section}", f"accuracy-{section}"} <= set(page.drawings)
    assert not {"loss-reward", "reliability"} & set(page.drawings)
    assert "reward model" not in page.text.casefold()
    said = (
        "ranks 64.0% of held-out pairs as people did (interval 58.0% to 70.0%)" if section == "direct" else "nothing was held out"
    )
    assert said in page.text


def test_every_supervised_stage_of_a_run_has_its_losses(tmp_path: Path, synthetic: Any) -> None:
    run = synthetic.write_quickstart(tmp_path / "run", arms=False)
    for name, section in (("process", "process"), ("kto", "kto"), ("direct", "direct"), ("again", "direct")):
        shutil.copytree(run / "reward", run / name)
        synthetic.write(run / name / "config.json", {section: {}, "model": {"source": "tiny"}, "seed": 0})
    page = Page(write_report(run))
    drawn = {name for name in page.drawings if name.startswith("loss-")}
    assert drawn == {"loss-sft", "loss-reward", "loss-process", "loss-kto", "loss-direct-3", "loss-direct-4"}
    assert "Direct optimisation (again) loss" in page.text and "process: config" in page.text


@pytest.mark.parametrize(
    ("part", "low", "headline", "sentence"),
    [
        ("correct", 0.03, "Better", "answers that are right went from 20.0% to 30.0%; change +0.100 (interval +0.030 to +0.200)"),
        ("correct", -0.01, "Not shown to be better", "The interval contains 0"),
        ("score", 0.03, "Not judged by gold", "the reward that training maximised went from 0.200 to 0.300"),
    ],
)
def test_held_out_prompts_are_told_and_only_checked_answers_judge(
    tmp_path: Path, synthetic: Any, part: str, low: float, headline: str, sentence: str
) -> None:
    run = synthetic.write_quickstart(tmp_path / "run", arms=False) / "ppo"
    rows = [{k: v for k, v in row.items() if not k.startswith("gold")} for row in synthetic.ppo_rows()]
    rows[-1]["heldout/score"] = 0.3
    synthetic.write_lines(run / "metrics.jsonl", rows)
    found = {"before": synthetic.estimate(0.2, 0.1, 0.3), "after": synthetic.estimate(0.3, 0.2, 0.4)}
    found["gain"] = synthetic.estimate(0.1, low, 0.2)
    synthetic.write(run / "summary.json", {"heldout": {"num_prompts": 128, part: found}, "kl": 3.0})
    page = Page(write_report(run))
    assert headline in page.text and sentence in page.text
    assert "curve-heldout-score" in page.drawings


def test_alarms_stand_on_the_page_with_their_texts(tmp_path: Path, synthetic: Any) -> None:
    run = synthetic.write_quickstart(tmp_path / "run", arms=False)
    alarm = {"detector": "length_gaming", "step": 7, "value": 2.0, "threshold": 1.5, "message": "mean length went from 20 to 40"}
    rows = [{**alarm, "advice": "Look at it", "evidence": ["<b>long</b> answer"]}, {"detector": 3, "evidence": "none"}]
    synthetic.write_lines(run / "ppo" / "alarms.jsonl", rows)
    page = Page(write_report(run))
    assert "length gaming" in page.text and "step 7" in page.text and "Mean length went from 20 to 40. Look at it" in page.text
    assert "<b>long</b> answer" in page.text
    assert "Alarms" not in Page(write_report(synthetic.write_quickstart(tmp_path / "calm", arms=False))).text


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
        "evaluation/answers.jsonl",
    ],
)
@pytest.mark.parametrize("damage", ["missing", "damaged", "foreign"])
def test_any_part_may_be_missing_or_damaged(tmp_path: Path, synthetic: Any, part: str, damage: str) -> None:
    run = synthetic.write_quickstart(tmp_path / "run")
    if damage == "missing":
        (run / part).unlink()
    else:
        contents = {"damaged": b'{"step": 1, "loss"\n\xff\n', "foreign": b'[1, null, "text", {"value": []}]\n'}
        (run / part).write_bytes(contents[damage])
    page = report(run)
    assert page.drawings
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
    nested = {"gold_gain": {"value": None}, "gold_win_rate": "high", "gold_parts": {"kind": 3}, "kl": [1], "seconds": None}
    synthetic.write(run / "summary.json", nested)
    page = report(run)
    proxy = page.drawings["reward-kl"]["data"][0]["y"]
    assert [i for i, value in enumerate(proxy) if value is None] == [3, 4]
    assert "curve-policy-entropy" not in page.drawings
    assert "curve-response-length" not in page.drawings
    assert "goodhart-steps" not in page.drawings
    assert "No gold score was recorded" in page.text
    assert "NaN" not in page.scripts[0]


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
        ((0.56, 0.49, 0.63), (0.02, -0.01, 0.05), "Not shown to be better", "The interval contains 50%"),
        ((0.71, 0.65, 0.77), (0.3, 0.2, 0.4), "Better, at one temperature", "beat those from before in 71.0%"),
        ((0.38, 0.32, 0.45), (-0.1, -0.2, -0.05), "Worse", "beat those from before in 38.0%"),
        ((0.48, 0.41, 0.55), (-0.01, -0.05, 0.02), "Not shown to be better", "The interval contains 50%"),
    ],
)
def test_verdict_follows_the_interval(tmp_path: Path, synthetic: Any, rate: Any, gain: Any, headline: str, sentence: str) -> None:
    summary = synthetic.ppo_summary(gold_win_rate=synthetic.estimate(*rate), gold_gain=synthetic.estimate(*gain))
    synthetic.write_lines(tmp_path / "ppo" / "metrics.jsonl", synthetic.ppo_rows(40))
    synthetic.write(tmp_path / "ppo" / "summary.json", summary)
    found = verdict(read_journey(tmp_path / "ppo"))
    assert found.headline == headline
    assert sentence in " ".join(found.sentences)
    assert any("Distrust the proxy" in warning for warning in found.warnings) == (gain[2] < 0)


@pytest.mark.parametrize(
    ("verdict_of", "over", "tone", "headline", "sentence"),
    [
        ("better", (0.3, 0.1, 0.5), "good", "Better than any decoding of the model before", "No temperature gives that"),
        ("sharper", (0.02, -0.1, 0.14), "open", "Sharper, not better", "what a lower temperature of the model before gives"),
        ("undecided", (0.02, -0.1, 0.14), "open", "Not shown to be better", "does not show a difference"),
        ("worse", (-0.3, -0.5, -0.1), "bad", "Worse", "if it is decoded well"),
    ],
)
def test_the_verdict_follows_the_best_decoding_of_the_start(
    tmp_path: Path, synthetic: Any, verdict_of: str, over: Any, tone: str, headline: str, sentence: str
) -> None:
    rate, row = (
        synthetic.estimate(0.87, 0.81, 0.91),
        {"before": synthetic.estimate(5.6, 5.4, 5.8), "after": synthetic.estimate(6.7, 6.5, 6.9)},
    )
    row |= {"gain": synthetic.estimate(1.1, 0.9, 1.3), "win_rate": rate}
    best = {
        **synthetic.estimate(*over),
        "win_rate": synthetic.estimate(0.51, 0.42, 0.6),
        "temperature": 0.0,
        "policy_temperature": 0.5,
    }
    control = {"gold_by_temperature": {"1": row, "0": row}, "over_best_decoding": best, "verdict": verdict_of}
    synthetic.write_lines(tmp_path / "ppo" / "metrics.jsonl", synthetic.ppo_rows(40))
    synthetic.write(
        tmp_path / "ppo" / "summary.json", synthetic.ppo_summary(gold_win_rate=rate, gold_gain=row["gain"], **control)
    )
    found = verdict(read_journey(tmp_path / "ppo"))
    assert (found.tone, found.headline) == (tone, headline)
    assert sentence in " ".join(found.sentences) and "at temperature 0.5 against the model before greedy" in " ".join(
        found.sentences
    )
    assert not any("at one temperature" in warning for warning in found.warnings)
    page = write_report(tmp_path / "ppo").read_text()
    assert "What decoding alone gives" in page and "best against best" in page and "<td>greedy</td>" in page


def test_a_gain_without_the_control_says_so(tmp_path: Path, synthetic: Any) -> None:
    synthetic.write_lines(tmp_path / "ppo" / "metrics.jsonl", synthetic.ppo_rows(40))
    summary = synthetic.ppo_summary(gold_win_rate=synthetic.estimate(0.8, 0.7, 0.9), gold_gain=synthetic.estimate(1.0, 0.8, 1.2))
    synthetic.write(tmp_path / "ppo" / "summary.json", summary)
    found = verdict(read_journey(tmp_path / "ppo"))
    assert (found.tone, found.headline) == ("open", "Better, at one temperature")
    assert "A lower one often makes the model before better for nothing" in " ".join(found.warnings)
    assert "What decoding alone gives" not in write_report(tmp_path / "ppo").read_text()


def test_verdict_tells_of_a_gold_that_has_turned_down(tmp_path: Path, synthetic: Any) -> None:
    for turn, warned in ((0.5, True), (2.0, False)):
        run = tmp_path / str(turn) / "ppo"
        synthetic.write_lines(run / "metrics.jsonl", synthetic.ppo_rows(gold_turn=turn))
        synthetic.write(run / "summary.json", synthetic.ppo_summary())
        assert any("Distrust the last steps" in warning for warning in verdict(read_journey(run)).warnings) == warned


def test_a_part_within_the_noise_of_its_answers_is_no_change(tmp_path: Path, synthetic: Any) -> None:
    run = synthetic.write_quickstart(tmp_path / "run", arms=False)
    rows = [{"parts_before": {"kind": 0.5}, "parts_after": {"kind": 0.57 + (0.9 if i % 2 else -0.9)}} for i in range(100)]
    synthetic.write_lines(run / "evaluation" / "answers.jsonl", rows)
    sentences = " ".join(verdict(read_journey(run)).sentences)
    assert "No clear change: kind (+0.070)" in sentences  # half the interval is 1.96 · 0.9 / √100 ≈ 0.18


def test_samples_of_one_prompt_are_not_independent(tmp_path: Path, synthetic: Any) -> None:
    run = synthetic.write_quickstart(tmp_path / "run", arms=False)
    (run / "ppo" / "summary.json").unlink()
    (run / "summary.json").unlink()
    changes = [0.5 if i % 2 else -0.4 for i in range(20)]
    rows = [{"id": str(i), "parts_before": {"kind": 0.0}, "parts_after": {"kind": c}} for i, c in enumerate(changes)] * 20
    synthetic.write_lines(run / "evaluation" / "answers.jsonl", rows)
    (part,) = gold_parts(read_journey(run))
    assert part.change == pytest.approx(0.05)
    assert part.noise == pytest.approx(1.96 * (20 * 0.45**2 / 19) ** 0.5 / 20**0.5)
    assert part.direction == 0


def test_gold_found_by_the_whole_run_is_added_to_each_arm(tmp_path: Path, synthetic: Any) -> None:
    run = synthetic.write_quickstart(tmp_path / "run")
    for arm in ("ppo", "ppo-beta0", "ppo-random"):
        synthetic.write(run / arm / "summary.json", {"steps": 160, "kl": 5.5})
    win = {name: {"gold_win_rate": synthetic.estimate(v, v - 0.05, v + 0.05)} for name, v in (("ppo", 0.64), ("beta0", 0.37))}
    synthetic.write(run / "summary.json", {"ppo": win["ppo"], "arms": win})
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
    assert [answer.title for answer in best.answers] == [str(i) for i in range(99, 91, -1)]
    assert [answer.title for answer in median.answers] == [str(i) for i in range(53, 45, -1)]
    assert [answer.title for answer in worst.answers] == [str(i) for i in range(8)]
    assert "100 pairs of answers" in text
    assert "1 without a gold score" in text
    assert [answer.title for answer in answer_groups(rows[:3])[1][0].answers] == ["2", "1", "0"]


def test_series_keeps_gaps_and_skips_absent_keys() -> None:
    rows = [{"step": 1, "a": 1}, {"step": 2, "a": None}, {"step": 3}, {"step": 4, "a": True}, {"step": None, "a": 2.5}]
    assert series(rows, "a") == ([1.0, 2.0, 4.0, 4.0], [1.0, None, None, 2.5])
    assert series([{"step": 1, "b": None}], "b") == ([], [])


def test_thin_keeps_the_last_point() -> None:
    xs, ys = thin(list(range(5001)), list(range(5001)), 2000)
    assert len(xs) <= 2000
    assert xs[-1] == ys[-1] == 5000
    assert thin([], []) == ([], [])


def test_numbers_for_people() -> None:
    shown = [decimal(x) for x in (0.0, 0.26, -0.14, 2.013, 13.72, 1234.5, 0.00056, 0.000012)]
    assert shown == ["0", "0.260", "−0.140", "2.01", "13.7", "1,234", "0.0006", "1.2e-05"]
    assert decimal(0.5, signed=True) == "+0.500"
    assert estimate(10**400) is None
    assert estimate(True) is None
    assert estimate({"value": 0.5, "count": 3}) is not None


def test_report_loads_no_torch() -> None:
    code = "import sys, tether.report; print(*(m for m in ('torch', 'transformers', 'numpy', 'pandas') if m in sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "transformers"} & set(loaded)


@pytest.mark.browser
@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
def test_page_in_a_browser(tmp_path: Path, synthetic: Any, chromium: str, width: int, scheme: Any) -> None:
    playwright = pytest.importorskip("playwright.sync_api")
    run = synthetic.write_quickstart(tmp_path / "run")
    rows = synthetic.answer_rows(30)
    for index, row in enumerate(rows):
        row["after"] = row["prompt"] = HOSTILE[index % len(HOSTILE)]
    synthetic.write_lines(run / "evaluation" / "answers.jsonl", rows)
    parts = {text: {"before": 0.1, "after": 0.3} for text in HOSTILE}
    synthetic.write(run / "ppo" / "summary.json", synthetic.ppo_summary(gold_parts=parts))
    path = write_report(run)
    problems: list[str] = []
    requests: list[str] = []
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=FLAGS)
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme, offline=True)
        page = context.new_page()
        page.on("console", lambda message: problems.append(message.text))
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("request", lambda request: requests.append(request.url))
        page.goto(path.as_uri())
        page.wait_for_selector("#reward-kl .scatterlayer .trace path.js-line", state="attached")
        page.evaluate("for (const d of document.querySelectorAll('details')) d.open = true")
        page.wait_for_selector("#health-grad_norm .scatterlayer .trace", state="attached")
        page.click("#theme")
        empty = page.evaluate("[...document.querySelectorAll('.plot')].filter(p => !p.querySelector('.trace')).map(p => p.id)")
        overflow = page.evaluate("document.documentElement.scrollWidth - innerWidth")
        wide = "p => p.querySelector('svg').clientWidth > p.clientWidth + 1"
        clipped = page.evaluate(f"[...document.querySelectorAll('.plot')].filter({wide}).map(p => p.id)")
        hacked = page.evaluate("'hacked' in window")
        links = page.evaluate("document.querySelectorAll('a, .plot a').length")
        browser.close()
    assert problems == []
    assert requests == [path.as_uri()]
    assert 4e6 < path.stat().st_size < 7e6
    assert (empty, clipped, overflow, hacked, links) == ([], [], 0, False, 0)


def test_what_was_not_learned_from_is_a_warning(tmp_path, synthetic):
    run = synthetic.write_quickstart(tmp_path / "run")
    assert not any("set aside" in w or "left out" in w for w in verdict(read_journey(run)).warnings)
    for stage, more in (("reward", {"quarantine": {"count": 20, "reasons": {}}}), ("ppo", {"steps_left_out": 3})):
        path = run / stage / "summary.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **more}))
    told = " ".join(verdict(read_journey(run)).warnings)
    assert "reward: 20 rows of its data could not be used" in told and "ppo: in 3 steps an update was left out" in told
