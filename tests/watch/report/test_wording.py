"""A judge that is not called gold is named in every sentence that would say gold."""

import json

from tests.watch.report.test_brief import GAIN, OVER, RATE, run_of
from tests.watch.report.test_report import Page

from tether.watch.report.about import Judge, judge_of_all
from tether.watch.report.narrative import brief
from tether.watch.report.page import write_report
from tether.watch.report.reading import read_journey

SUMMARY = {
    "gold_win_rate": RATE,
    "gold_gain": GAIN,
    "over_best_decoding": OVER,
    "verdict": "better",
    "gold_parts": {"short": {"before": 0.25, "after": 0.5}},
}


def judged_run(tmp_path, judge, reward="other.py:f", **summary):
    """A run of GRPO whose answers a function judged."""
    run = tmp_path / "run"
    row = {"id": "a", "prompt": "hi", "before": "yes", "after": "no"}
    answers = {"gold_before": 0.25, "gold_after": 0.5}
    for name, files in {
        "grpo": {
            "config.json": {"grpo": {"reward_source": "function", "function": {"call": reward}}},
            "summary.json": {},
        },
        "evaluate": {
            "config.json": {"evaluate": {}},
            "manifest.json": {"judge": {"name": judge, "says": ""}},
            "summary.json": {"policies": {"grpo": SUMMARY}, "num_prompts": 1, **summary},
        },
    }.items():
        (run / name).mkdir(parents=True)
        for file, values in files.items():
            (run / name / file).write_text(json.dumps(values))
    steps = [
        {"step": n, "gold/score": n / 10, "gold/proxy": n / 5, "reward/proxy": n / 5, "kl": n}
        for n in range(1, 6)
    ]
    (run / "grpo" / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    (run / "evaluate" / "answers.jsonl").write_text(json.dumps({**row, **answers}) + "\n")
    (run / "summary.json").write_text(json.dumps({"grpo": SUMMARY}))
    return run


def test_phrases_by_hand():
    text = "The {judge:score}, judged by {judge}"
    mine = Judge("mine.py:good")
    assert text.format(judge=mine) == "The score by mine.py:good, judged by mine.py:good"
    assert text.format(judge=mine.label) == "The score by the judge, judged by the judge"
    for name in ("", "gold", "tether.quickstart.judges:gold", "gold.py:score"):
        for judge in (Judge(name), Judge(name).label):
            assert text.format(judge=judge) == "The gold score, judged by gold"
    assert not Judge("golden").is_gold


def test_a_judge_of_ones_own_is_nowhere_called_gold(tmp_path):
    page = Page(write_report(judged_run(tmp_path, "mine.py:good"))).text
    shown = page.replace('"gold', "")  # keys of summaries
    assert "gold" not in shown.casefold().split("{")[0]
    assert "mine.py:good" in shown and "by the judge" in shown


def test_gold_stays_gold(tmp_path):
    page = Page(write_report(judged_run(tmp_path, "tether.quickstart.judges:gold"))).text
    assert "Gold is a judge" in page and "model's answers, judged by gold" in page


def test_a_judge_that_is_the_reward_is_called_so(tmp_path):
    run = judged_run(tmp_path, "mine.py:good", reward="mine.py:good")
    found = brief(read_journey(run))
    assert found.headline.endswith("judged by the training's own reward (mine.py:good).")
    assert any("is the reward that training maximised" in line for line in found.warnings)
    assert "Nothing is trained on its scores" not in Page(write_report(run)).text


def test_a_function_of_python_goes_by_its_name(tmp_path):
    """Not by the digest of its code."""
    run = judged_run(tmp_path, "python:good@0123456789ab", reward="python:good@0123456789ab")
    found = brief(read_journey(run))
    assert found.headline.endswith("judged by the training's own reward (good).")
    assert not any("@0123" in line for line in (*found.sentences, *found.warnings))


def test_prompts_that_were_trained_on_are_not_called_held_out(tmp_path):
    shared = {"count": 30, "total": 40, "stages": ["grpo"]}
    run = judged_run(tmp_path, "mine.py:good", trained_on=shared)
    found = brief(read_journey(run))
    assert "30 of 40 prompts" in found.sentences[0]
    assert "eld-out" not in found.sentences[0]
    assert any("among the rows of [grpo]" in line for line in found.warnings)
    page = Page(write_report(run)).text
    assert "to the same prompts" in page and "on held-out prompts (" not in page
    alone = brief(read_journey(judged_run(tmp_path / "own", "mine.py:good")))
    assert alone.sentences[0].startswith("On held-out prompts, the policy won")


def test_a_single_stage_names_its_judge(tmp_path):
    summary = {"gold_gain": GAIN}
    found = brief(run_of(tmp_path / "run", summary, judge={"name": "mine.py:good", "says": ""}))
    assert found.sentences[0].startswith("The score by mine.py:good of held-out answers changed")


def test_a_run_without_a_judge_leaves_the_word_to_the_others(tmp_path):
    mine = read_journey(judged_run(tmp_path / "mine", "mine.py:good"))
    gold = read_journey(judged_run(tmp_path / "gold", "gold.py:score"))
    alone = run_of(tmp_path / "alone", {})
    assert judge_of_all([alone, gold]).is_gold
    assert judge_of_all([alone, gold, mine]).name == "mine.py:good"
