"""The report on a judge against figures by hand and statsmodels; and a language model as the judge
of a policy.
"""

import json
import math

import numpy as np
import pytest
from statsmodels.stats.inter_rater import cohens_kappa
from tests.judges.planted_judges import Planted, pair
from tests.runner.test_ensemble import recipe

from tether.core.errors import ConfigError, DataError, RewardError
from tether.core.protocols import Verdict
from tether.core.rundir import read_json, read_jsonl
from tether.judges.pairwise import Judgment, PairJudge
from tether.runner.methods.judge_agreement import chosen_is_first, judge_files, judge_report
from tether.runner.run import run_recipe

ROWS = [pair(f"q{n}", f"good {n}", f"bad {n}") for n in range(40)]


def test_the_drawn_order_does_not_know_what_is_chosen():
    drawn = [chosen_is_first(row) for row in ROWS]
    assert [chosen_is_first(row.swap()) for row in ROWS] == [not first for first in drawn]
    assert 8 < sum(drawn) < 32


def test_agreement_and_bias_by_hand():
    judgments = [
        Judgment(3.0 + b, 3.0 - b, 0.8) if n < 30 else Judgment(-1.0 + b, -1.0 - b, 0.6)
        for n, b in enumerate([2.0] * 40)
    ]
    found = judge_report(ROWS, judgments)
    agreement, position = found["agreement"], found["position"]
    assert (
        agreement["accuracy"]["value"] == 0.75 and agreement["accuracy_shown_first"]["value"] == 1.0
    )
    assert agreement["accuracy_shown_second"]["value"] == 0.75
    assert (
        position["bias"]["value"] == pytest.approx(2.0)
        and position["follows_place"]["value"] == 0.25
    )
    assert position["names_first"]["value"] == pytest.approx((30 * 0.5 + 10 * 1.0) / 40)
    assert (
        found["mass"] == pytest.approx(0.75)
        and found["undecided"] == 0.0
        and found["num_judged"] == 40
    )
    drawn = [chosen_is_first(row) for row in ROWS]
    averaged = [first == (n < 30) for n, first in enumerate(drawn)]
    # a wrong one says the first place, as the bias has it
    once = [(n < 30 or first) == first for n, first in enumerate(drawn)]
    for name, answers in (("kappa", averaged), ("kappa_once", once)):
        cells = np.zeros((2, 2))
        for label, answer in zip(drawn, answers, strict=True):
            cells[int(label), int(answer)] += 1
        expected = cohens_kappa(cells, return_results=False)
        assert agreement[name]["value"] == pytest.approx(expected, abs=1e-12), name
    assert agreement["first_share"]["people"]["value"] == sum(drawn) / 40
    assert agreement["first_share"]["averaged"]["value"] == sum(averaged) / 40
    assert agreement["first_share"]["once"]["value"] == sum(once) / 40
    sure, unsure = 1 / (1 + math.exp(-3)), 1 / (1 + math.exp(-1))
    # all of the sure ones are right, none of the others
    by_hand = (30 * (1 - sure) + 10 * unsure) / 40
    assert agreement["calibration_error"] == pytest.approx(by_hand)
    assert json.dumps(found)


def test_a_judge_that_always_says_the_first_is_found_out(tmp_path):
    (tmp_path / "p.jsonl").write_text(
        "".join(
            json.dumps({"prompt": f"q{n}", "chosen": f"a{n}", "rejected": f"b{n}"}) + "\n"
            for n in range(40)
        ),
    )
    labels, report = judge_files(
        PairJudge(Planted(lambda first, second: 5.0), "x"),
        [str(tmp_path / "p.jsonl")],
    )
    found = report["p.jsonl"]
    position, agreement = found["position"], found["agreement"]
    assert position["names_first"]["value"] == position["follows_place"]["value"] == 1.0
    assert position["bias"]["value"] == pytest.approx(5.0) and found["undecided"] == 1.0
    assert (
        agreement["accuracy"]["value"] == 0.5 and agreement["first_share"]["once"]["value"] == 1.0
    )
    assert agreement["first_share"]["averaged"]["value"] == 0.5
    assert (
        agreement["accuracy_shown_first"]["value"] == 1.0
        and agreement["accuracy_shown_second"]["value"] == 0.0
    )
    assert all(label.tie for label in labels)


def test_failures_written_verdicts_and_ties_are_told_apart():
    rows = [*ROWS[:3], pair("t", "x", "y", tie=True, probability=0.5), ROWS[3]]
    failed = Judgment(1.0, None, reason="HTTP 500: later")
    judgments = [
        Judgment(math.inf, math.inf),
        Judgment(math.inf, -math.inf),
        failed,
        Judgment(1.0, 1.0),
        Judgment(2.0, 2.0),
    ]
    found = judge_report(rows, judgments)
    assert (found["num_pairs"], found["num_judged"], found["num_parsed"], found["failures"]) == (
        5,
        4,
        2,
        {"HTTP 500": 1},
    )
    assert found["agreement"]["num_ties"] == 1 and "num_failed" not in found["agreement"]
    assert found["agreement"]["num_pairs"] == 3 and found["agreement"]["accuracy"][
        "value"
    ] == pytest.approx(2.5 / 3)
    assert found["undecided"] == 0.25 and found["position"]["bias"]["count"] == 2
    assert judge_report(ROWS[:1], [failed])["position"] is None
    # one pair and a tie
    assert judge_report(rows[2:4], [Judgment(1.0, 1.0)] * 2)["agreement"] is None
    assert json.dumps(found)


def test_the_temperature_that_is_told_is_the_one_to_set():
    """Where a share s of the pairs has log-odds +d and the others -d, the best T gives sigma(d / T)
    = s.
    """
    judgments = [Judgment(3.0, 3.0) if n < 30 else Judgment(-3.0, -3.0) for n in range(40)]
    by_hand = 3.0 / math.log(0.75 / 0.25)
    for temperature in (0.5, 1.0, 4.0, by_hand):
        agreement = judge_report(ROWS, judgments, temperature)["agreement"]
        assert agreement["temperature"] == pytest.approx(by_hand, rel=1e-3)
    assert agreement["calibration_error"] == pytest.approx(0.0, abs=1e-9)


def test_no_temperature_mends_verdicts_that_were_mostly_written():
    written, soft = Judgment(math.inf, math.inf), Judgment(1.0, 1.0)
    mostly = judge_report(ROWS, [written] * 21 + [soft] * 19)["agreement"]
    assert (
        mostly["temperature"] is mostly["calibration_error_after"] is mostly["loss_after"] is None
    )
    assert mostly["calibration_error"] is not None
    assert judge_report(ROWS, [written] * 20 + [soft] * 20)["agreement"]["temperature"] > 0


def test_failures_that_asking_again_does_not_mend_are_counted():
    said = [
        "no option at the beginning: 'Sure'",
        "cannot be asked: 2000 tokens",
        "not a number: nan",
        "no reasons were written",
    ]
    said += ["HTTP 500", "budget spent", "no answer in time", "no word in the reply"]
    found = judge_report(ROWS[: len(said)], [Judgment(1.0, None, reason=reason) for reason in said])
    assert (
        found["num_judged"] == 0
        and found["num_lasting"] == 4
        and sum(found["failures"].values()) == 8
    )


def test_soft_labels_stand_the_likelier_way_round(tmp_path):
    rows = [
        {"prompt": f"q{n}", "chosen": "bad", "rejected": "good", "probability": 0.2}
        for n in range(2)
    ]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    judge = PairJudge(Planted(lambda first, second: 1.0 if first == "good" else -1.0), "x")
    labels, report = judge_files(judge, [str(tmp_path / "p.jsonl")])
    assert (
        report["p.jsonl"]["agreement"]["accuracy"]["value"] == 1.0
        and labels[0].chosen[0].content == "good"
    )


def test_files_apart_and_together_and_a_judge_that_says_nothing(tmp_path):
    for name, count in (("a", 2), ("b", 3)):
        rows = [
            json.dumps({"prompt": f"{name}{n}", "chosen": "good", "rejected": "bad"}) + "\n"
            for n in range(count)
        ]
        (tmp_path / f"{name}.jsonl").write_text("".join(rows))
    files, bars = [str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")], []
    judge = PairJudge(Planted(lambda first, second: 1.0 if first == "good" else -1.0), "x")
    labels, report = judge_files(
        judge,
        files,
        limit=2,
        announce=lambda name: lambda done, total, _: bars.append((name, done, total)),
    )
    assert {name: r["num_pairs"] for name, r in report.items()} == {
        "a.jsonl": 2,
        "b.jsonl": 2,
        "all": 4,
    }
    assert bars[-1] == ("b.jsonl", 2, 2) and len(labels) == 4
    with pytest.raises(DataError, match=r"none of 5.*refused"):
        judge_files(
            PairJudge(
                Planted(lambda first, second: Verdict(None, reason=("no connection: refused"))),
                "x",
            ),
            files,
        )


def judged_recipe(tmp_path, **judge):
    (tmp_path / "rubric.md").write_text("Be kind.")
    section = {"rubric": str(tmp_path / "rubric.md"), **judge}
    return recipe(
        tmp_path,
        {"heldout_fraction": 0.0},
        grpo={"evaluate": {"every": 2, "prompts": 3, "judge": section}},
    )


def test_a_language_model_judges_a_policy(tmp_path):
    made = judged_recipe(tmp_path, model="tiny", cache=str(tmp_path / "answers.sqlite"))
    run_recipe(made, ("reward", "grpo"))
    rows = [
        row
        for row in read_jsonl(tmp_path / "run/grpo/heldout.jsonl")
        if not row.keys() & {"temperature", "best_of"}
    ]
    assert [row["name"] for row in rows] == ["gold"] * 2 and {"score", "proxy"} <= set(
        rows[0]["scores"],
    )
    assert all(1.0 < value < 9.0 for row in rows for value in row["scores"]["score"])
    assert read_json(tmp_path / "run/grpo/summary.json")["gold"]["num_prompts"] == 3
    assert (tmp_path / "answers.sqlite").is_file()


def test_a_judge_that_cannot_answer_stops_the_run(tmp_path):
    (tmp_path / "rubric.md").write_text("long " * 400)
    made = judged_recipe(tmp_path, model="tiny")
    (tmp_path / "rubric.md").write_text("long " * 400)
    with pytest.raises(RewardError, match=r"none of 3.*cannot be asked"):
        run_recipe(made, ("reward", "grpo"))


@pytest.mark.parametrize(
    ("judge", "message"),
    [
        ({}, "either a model or a server"),
        (
            {"model": "tiny", "server": {"url": "http://127.0.0.1:1/v1", "model": "m"}},
            "either a model or a server",
        ),
        ({"model": "tiny", "rubric": "constitution"}, "holds principles"),
        ({"model": "tiny", "rubric": "nowhere"}, "no rubric named nowhere"),
    ],
)
def test_bad_judges_are_refused_before_anything_runs(tmp_path, judge, message):
    with pytest.raises((ConfigError, FileNotFoundError), match=message):
        run_recipe(judged_recipe(tmp_path, **judge))
    assert not (tmp_path / "run").exists()
