"""Rounds of preferences on the tiny model: what they ask for, what they leave, and how they go
on.
"""

import json
import re
import shutil
import time
from collections import Counter

import pytest
from rich.console import Console
from tests.runner.journeys import DIRECT, FEW, journey, lines

from tether.api.runs import Run
from tether.cli.journeys import _stages
from tether.cli.terminal.results import show_run
from tether.core.errors import ConfigError
from tether.quickstart import judges
from tether.runner.assembly.roles import load_policy
from tether.runner.methods.pairs import comparisons_of
from tether.runner.run import run_recipe
from tether.settings.reading import packaged_recipe
from tether.settings.recipe import read_recipe
from tether.watch.report.figures import loop_figures
from tether.watch.report.page import write_report
from tether.watch.report.reading import read_loop


def summary_of(root):
    return json.loads((root / "summary.json").read_text())


def run(recipe):
    run_recipe(recipe)
    return json.loads(open(f"{recipe.run}/summary.json").read())


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    root = tmp_path_factory.mktemp("rounds") / "run"
    return root, run(journey(root, repeat=2, pairs={"choose": "uncertain"}))


def test_every_round_adds_labels_of_new_answers_and_all_labels_teach(finished):
    root, summary = finished
    first, second = (lines(root / f"round-0{n}" / "pairs" / "chosen.jsonl") for n in (1, 2))
    assert {row["chosen_by"] for row in first} == {"random"} and {
        row["chosen_by"] for row in second
    } == {"uncertain"}
    assert not {row["item"] for row in first} & {row["item"] for row in second}
    labels = [list(comparisons_of(root / f"round-0{n}" / "pairs")) for n in (1, 2)]
    assert [one["labels"] for one in summary["rounds"]] == [len(part) for part in labels]
    assert summary["rounds"][1]["labels_so_far"] == sum(map(len, labels))
    taught = summary_of(root / "round-02" / "reward")
    assert taught["num_pairs"] + taught["num_heldout_pairs"] == sum(map(len, labels))
    noise = [summary_of(root / f"round-0{n}" / "pairs")["noise"] for n in (1, 2)]
    assert noise[0] == noise[1] > 0


def test_the_chosen_pairs_are_those_that_the_reward_model_is_least_sure_of(finished):
    root, _ = finished
    answers = lines(root / "round-02" / "pairs" / "answers.jsonl")
    chosen = [row["place"] for row in lines(root / "round-02" / "pairs" / "chosen.jsonl")]
    gaps = [abs(answers[p]["scores"][a] - answers[p]["scores"][b]) for p, a, b in chosen]
    every = [
        abs(row["scores"][a] - row["scores"][b]) for row in answers for a in range(4) for b in range(a + 1, 4)
        if row["responses"][a] != row["responses"][b]
    ]  # fmt: skip
    assert sum(gaps) / len(gaps) < 0.8 * sum(every) / len(every)


def test_gold_is_that_of_the_judge_and_the_rounds_add_up(finished):
    root, summary = finished
    judge = lambda texts: [sum(c in "aeiou" for c in t.lower()) / max(1, len(t)) for t in texts]  # noqa: E731
    mean = lambda values: sum(values) / len(values)  # noqa: E731
    places = ("evaluate/before", "round-01/evaluate/ppo", "round-02/evaluate/ppo")
    texts = [json.loads((root / place / "answers.json").read_text())["texts"] for place in places]
    gold = [mean(judge(part)) for part in texts]
    for number, one in enumerate(summary["rounds"], 1):
        assert one["gold_before"] == pytest.approx(gold[0]) and one["gold_after"] == pytest.approx(
            gold[number],
        )
        assert one["gold_gain_of_round"]["value"] == pytest.approx(gold[number] - gold[number - 1])
        bought = one["gold_per_100_labels"]
        # Pairs without a majority are paid too.
        assert bought["value"] == pytest.approx((gold[number] - gold[number - 1]) * 100 / 12)
        assert one["asked"] == 12 >= one["labels"]
        if one["gold_gain_of_round"]["low"] is None:
            assert bought["low"] is bought["high"] is None and one["gold_gain_of_round"][
                "reason"
            ].startswith("too few")
        else:
            assert bought["low"] <= bought["value"] <= bought["high"]


def test_a_round_judges_the_same_answers_once(tmp_path, monkeypatch):
    judged, letters, root = [], judges.letters, tmp_path / "run"
    monkeypatch.setattr(
        judges,
        "letters",
        lambda prompts, texts: judged.append([*texts]) or letters(prompts, texts),
    )
    run_recipe(journey(root, repeat=2))
    places = ("evaluate/before", "round-01/evaluate/ppo", "round-02/evaluate/ppo")
    answers = [json.loads((root / place / "answers.json").read_text())["texts"] for place in places]
    # Once in each round that compares with them.
    counts = Counter(text for call in judged for text in call)
    assert [counts[texts[0]] for texts in answers] == [2, 2, 1]


@pytest.mark.slow
def test_it_goes_on_where_it_was_interrupted_and_more_rounds_may_follow(tmp_path):
    root = tmp_path / "run"
    summary = run(journey(root, repeat=2))
    for gone in ("round-02/summary.json", "round-02/evaluate", "round-02/ppo"):
        path = root / gone
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    again = run(journey(root, repeat=2))
    for one, other in zip(again["rounds"], summary["rounds"], strict=True):
        assert one["gold_after"] == other["gold_after"] and one["labels"] == other["labels"]
    longer = run(journey(root, repeat=3))
    assert len(longer["rounds"]) == 3 and longer["rounds"][:2] == again["rounds"]


def test_started_again_nothing_is_made_twice(finished, monkeypatch):
    root, summary = finished
    before = {path: path.stat().st_mtime_ns for path in root.rglob("*.jsonl")}
    monkeypatch.setattr("tether.runner.methods.pairs.load_policy", None)
    monkeypatch.setattr("tether.runner.assembly.manifest.open_model", None)
    monkeypatch.setattr("tether.runner.methods.evaluate.load_policy", None)
    assert run(journey(root, repeat=2, pairs={"choose": "uncertain"})) == summary
    assert {path: path.stat().st_mtime_ns for path in root.rglob("*.jsonl")} == before


def test_direct_learning_takes_the_same_road(tmp_path):
    summary = run(journey(tmp_path / "run", repeat=2, reward=None, ppo=None, direct=DIRECT))
    assert len(summary["rounds"]) == 2 and "reward" not in summary["rounds"][1]
    assert all(one["kl"]["value"] > 0 for one in summary["rounds"])


@pytest.mark.slow
def test_direct_learning_may_go_on_for_more_rounds_with_pairs_that_a_reward_model_chose(tmp_path):
    root, changes = (
        tmp_path / "run",
        {"ppo": None, "direct": DIRECT, "pairs": {"choose": "uncertain"}},
    )
    for rounds in (2, 3):
        run_recipe(journey(root, repeat=rounds, **changes))
    assert {row["chosen_by"] for row in lines(root / "round-03" / "pairs" / "chosen.jsonl")} == {
        "uncertain",
    }
    assert all(
        row["scores"][0] is not None for row in lines(root / "round-03" / "pairs" / "answers.jsonl")
    )


def test_no_prompt_is_answered_twice_in_a_round(tmp_path):
    only_pairs = {"sft": None, "reward": None, "ppo": None, "evaluate": None}
    # 12 prompts, 8 a round: the second crosses the list's end
    run_recipe(journey(tmp_path / "run", repeat=2, **only_pairs))
    asked = [
        [row["id"] for row in lines(tmp_path / "run" / f"round-0{n}" / "pairs" / "answers.jsonl")]
        for n in (1, 2)
    ]
    assert [len(set(part)) for part in asked] == [8, 8] and len({*asked[0], *asked[1]}) == 12


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"repeat": 0}, "repeat"),
        ({"repeat": 2, "direct": DIRECT}, r"one policy a round"),
        (
            {"repeat": 2, "ppo": None, "reward": None},
            "evaluate has no effect without a stage that makes a policy",
        ),
        ({"pairs": {"choose": "uncertain"}}, r"needs repeat and \[reward\]"),
        (
            {
                "repeat": 2,
                "reward": None,
                "ppo": None,
                "direct": DIRECT,
                "pairs": {"choose": "uncertain"},
            },
            r"needs repeat and \[reward\]",
        ),
        ({"repeat": 2, "pairs": {"choose": "disagreement"}}, "reward.members"),
        (
            {
                "repeat": 2,
                "pairs": {"choose": "uncertain"},
                "reward": {"objectives": {"a": FEW["prompts"], "b": FEW["prompts"]}},
                "ppo": {"objectives": {"a": {"weight": 1.0}, "b": {"weight": 1.0}}},
            },
            "of one score, without objectives",
        ),
        ({"repeat": 2, "pairs": {"choose": "information"}}, "reward.members"),
    ],
)
def test_a_choice_without_what_it_needs_is_refused(tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message):
        journey(tmp_path / "run", **changes)
    assert not (tmp_path / "run").exists()


def test_another_seed_in_the_same_folder_is_refused(finished):
    root, _ = finished
    with pytest.raises(Exception, match=r"seed was 3 and is now 4"):
        run_recipe(journey(root, repeat=2, seed=4, pairs={"choose": "uncertain"}))


def test_the_packaged_recipe_is_one():
    assert packaged_recipe("loop").is_file()
    recipe = read_recipe("loop")
    assert recipe.repeat == 3 and recipe.policies == ["ppo"]


def test_the_page_tells_every_round_and_chat_finds_the_last_policy(finished):
    root, summary = finished
    page = write_report(root).read_text(encoding="utf-8")
    total = summary["rounds"][-1]["labels_so_far"]
    assert (
        f"2 rounds, {total} labels" in page
        and "Gold over labels" in page
        and "Samples from the last" in page
    )
    drawn = loop_figures(read_loop(root))[0].traces[0]
    first, last = summary["rounds"]
    assert drawn.xs == [0, first["labels_so_far"], total]
    assert drawn.ys == pytest.approx(
        [first["gold_before"], first["gold_after"], last["gold_after"]],
        rel=1e-4,
    )
    role, _ = load_policy(str(root))
    other, _ = load_policy(str(root / "round-02" / "ppo"))
    pairs = zip(role.model.state_dict().values(), other.model.state_dict().values(), strict=True)
    assert role.adapter == "policy" and all((a == b).all() for a, b in pairs)


def test_the_terminal_tells_every_round(finished, capsys):
    root, summary = finished
    show_run(Console(), root)
    words = " ".join(capsys.readouterr().out.split())
    for one in summary["rounds"]:
        assert f"{one['labels']} of 12 pairs" in words
    headline = r"2 rounds, \d+ labels: "
    assert re.search(headline, words) and "gold per 100 labels" in words
    assert re.search(headline, Run(root)._repr_html_())  # as a notebook shows it


def test_the_terminal_shows_rounds_that_nobody_compares(tmp_path, monkeypatch, capsys):
    made = journey(tmp_path / "run", repeat=1)
    monkeypatch.chdir(tmp_path)
    _stages(made, ["sft", "pairs", "reward"], time.monotonic(), ["run", "loop.toml"])
    assert "reward" in capsys.readouterr().out


def test_a_folder_of_rounds_as_they_lay_before_still_gives_a_page(finished, tmp_path):
    """Labels, answers and pairs of a round once lay in its folder itself, and the summary in the
    run's.
    """
    root, summary = finished
    old = tmp_path / "old"
    for number in (1, 2):
        shutil.copytree(root / f"round-0{number}" / "ppo", old / f"round-0{number}" / "ppo")
        (old / f"round-0{number}" / "summary.json").write_text(
            json.dumps(summary["rounds"][number - 1]),
        )
        (old / f"round-0{number}" / "comparisons.jsonl").write_text("")
    (old / "summary.json").write_text(json.dumps(summary))
    page = write_report(old).read_text(encoding="utf-8")
    assert (
        f"2 rounds, {summary['rounds'][-1]['labels_so_far']} labels" in page
        and "Samples from the last" in page
    )
    assert load_policy(str(old / "round-02" / "ppo"))[0].adapter == "policy"
