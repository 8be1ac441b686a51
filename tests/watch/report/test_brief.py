"""The verdict on the terminal: three lines, and the KL in words."""

import json
import math
import re

import pytest

from tether.watch.report.narrative import brief
from tether.watch.report.numbers import moved_in_words
from tether.watch.report.reading import read_journey

RATE = {"value": 0.7, "low": 0.6, "high": 0.8, "count": 150}
GAIN = {"value": 1.3, "low": 0.9, "high": 1.7, "count": 150}
OVER = {"win_rate": {**RATE, "value": 0.66}, **GAIN, "policy_temperature": 0.0, "temperature": 0.7}


def run_of(folder, summary, **manifest):
    folder.mkdir()
    steps = [
        {"step": n, "reward/proxy": n % 2 - float(60 - n), "kl/policy_reference_k1": 5.8}
        for n in range(1, 41)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in steps))
    (folder / "summary.json").write_text(json.dumps({"kl": 5.8, **summary}))
    (folder / "config.json").write_text(json.dumps({"grpo": {"reward_source": "function"}}))
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return read_journey(folder)


def test_gold_with_a_control_is_result_interval_control(tmp_path):
    summary = {
        "gold_win_rate": RATE,
        "gold_gain": GAIN,
        "over_best_decoding": OVER,
        "verdict": "better",
    }
    found = brief(
        run_of(tmp_path / "run", summary, judge={"name": "mine.py:good", "says": ""}),
        "a command",
    )
    assert found.headline == (
        "Wins 66.0% [60.0%, 80.0%], each at its best temperature: better than the start model, "
        "judged by mine.py:good."
    )
    interval, control = found.sentences
    kl = found.warnings[0]
    assert "70.0% of 150" in interval and "60.0% to 80.0%" in interval
    assert "greedy, start model 0.7" in control and "66.0%" in control and "+1.30" in control
    assert "5.80 nats" in kl and "rarely give such answers" in kl
    assert all(len(line) < 160 for line in (found.headline, *found.sentences))


def test_few_comparisons_are_counted_once(tmp_path):
    summary = {"gold_win_rate": {"value": 2.5 / 6, "count": 6}}
    first = brief(run_of(tmp_path / "run", summary)).sentences[0]
    assert "2.5 of 6 comparisons" in first


def test_without_a_judge_the_line_that_judges_is_printed(tmp_path):
    found = brief(run_of(tmp_path / "run", {}), "tether run mine.toml evaluate")
    assert re.fullmatch(
        r"Reward \+[\d.]+ \[\S+ \S+\]: it rose, judged by the training's own reward alone\.",
        found.headline,
    )
    assert found.sentences[1].endswith(" if you like: tether run mine.toml evaluate")
    assert brief(read_journey(tmp_path / "run")).sentences[1] == "No held-out answers were judged."


def test_held_out_reward_names_its_judge(tmp_path):
    ends = {
        "before": {"value": -20.0, "count": 16},
        "after": {"value": -5.0, "count": 16},
        "gain": GAIN | {"value": 15.0},
    }
    found = brief(run_of(tmp_path / "run", {"heldout": {"num_prompts": 16, "score": ends}}))
    assert found.headline.endswith("judged by the training's own reward on held-out prompts.")
    assert "16 held-out prompts" in found.sentences[0]
    assert "−20.0 to −5.00" in found.sentences[0]


@pytest.mark.parametrize("nats", [0.02, 0.5, 2.0, 5.8, 25.0])
def test_words_go_with_the_share_of_answers_that_the_start_would_give(nats):
    """After k nats an answer is e^k times as likely as under the start."""
    one_in = math.exp(nats)
    words = moved_in_words(nats)
    expected = {
        1.11: "are those",
        2.72: "nearly those",
        20.1: "could still give",
        22_027: "rarely give",
        math.inf: "never",
    }
    assert next(text for bound, text in expected.items() if one_in < bound) in words


def test_the_loss_before_is_that_before_the_first_update(tmp_path):
    """The first measurement of the log comes after updates; the summary has the one before them."""
    from tether.watch.report.narrative import conclusion

    folder = tmp_path / "run"
    folder.mkdir()
    rows = [{"step": n, "loss": 4.0 - n / 10, "eval_loss": 3.88 - n / 10} for n in range(12)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "summary.json").write_text(json.dumps({"eval_loss_before": 4.31, "eval_loss": 2.78}))
    (folder / "config.json").write_text(json.dumps({"sft": {}}))
    assert "from 4.31 to 2.78 nats" in conclusion(read_journey(folder)).headline


def test_backticks_are_code_on_the_page():
    from tether.watch.report.frame import with_code

    assert str(with_code("Raise `epochs` < 3.")) == "Raise <code>epochs</code> &lt; 3."
    assert str(with_code("a ` alone")) == "a ` alone"
