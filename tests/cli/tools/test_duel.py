"""Models against each other: turns, both orders, ties, equal length, places, and intervals over
prompts.
"""

import json
import random
import re
import shutil

import numpy as np
import pytest
import statsmodels.api as sm
from scipy.stats import t as student_t
from tests.evaluation.oracles import equal_length
from typer.testing import CliRunner

from tether.cli import app
from tether.cli.tools import duel as module
from tether.cli.tools.duel import duel, outcome, read_prompts
from tether.core.errors import ConfigError, DataError
from tether.core.protocols import Verdict
from tether.core.rundir import read_jsonl
from tether.core.types import Comparison, Prompt, Sampling, assistant, user
from tether.evaluation import length_controlled
from tether.judges.pairwise import Judgment, PairJudge
from tether.models.saving import save_model
from tether.runner.assembly.models import open_model
from tether.settings.model import ModelConfig

ANSWER = re.compile(r"^\[answer (A|B) \w+\]\n(.*?)(?=\n\n\[)", re.MULTILINE | re.DOTALL)
SHORT = Sampling(4, 1.0)
PROMPTS = [
    Prompt(
        (user(f"Question {n}?"),),
        f"q{n}",
        {"category": ("art", "law")[n % 2], "later_turns": ("And then?",)},
    )
    for n in range(6)
]


class Judge:
    """Speaks core.protocols.ChatModel, by a rule on the two texts that it is shown."""

    name = "stub"

    def __init__(self, prefers):
        self.prefers, self.questions = prefers, []

    def verdicts(self, talks, options, *, told=None):
        verdicts = []
        for place, (turn,) in enumerate(talks):
            self.questions.append(turn.content)
            first, second = (text for _, text in ANSWER.findall(turn.content))
            verdict = self.prefers(first, second)
            verdicts.append(
                Verdict(None, reason="asleep") if verdict is None else Verdict((verdict, 0.0)),
            )
            if told:
                told(place, verdicts[-1])
        return verdicts

    def usage(self):
        return {"questions": len(self.questions)}


def longer(first, second):
    return float(len(first) - len(second))


def model(folder, seed):
    """A tiny model, whose weights have this seed."""
    loaded = open_model(ModelConfig(source="tiny"), seed=seed)
    save_model(loaded.model, loaded.tokenizer, None, folder / f"model-{seed}")
    return str(folder / f"model-{seed}")


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    return model(tmp_path_factory.mktemp("other"), 1)


def whole(figures):
    """The figures of all pairs of two models."""
    (contest,) = figures["contests"]
    return contest["results"]["all"]


def test_wins_are_those_that_the_judge_names_in_both_orders(other):
    judge = Judge(longer)
    figures, rows = duel(("tiny", other), PROMPTS, PairJudge(judge, "longer"), SHORT)
    assert len(rows) == 12 and figures["num_prompts"] == 6
    turn = [row for row in rows if row.metadata["turn"] == 1]
    lengths = [(len(row.chosen[-1].content), len(row.rejected[-1].content)) for row in turn]
    by_hand = [(a > b) + (a == b) / 2 for a, b in lengths]
    assert [row.probability for row in turn] == by_hand
    (contest,) = figures["contests"]
    results = contest["results"]
    assert results["turn 1"]["wins"] == by_hand.count(1)
    assert results["turn 1"]["losses"] == by_hand.count(0)
    every = whole(figures)
    assert every["win_rate"]["value"] == pytest.approx((every["wins"] + every["ties"] / 2) / 12)
    assert set(results) == {"all", "turn 1", "turn 2", "category art", "category law"}
    differing = sum(row.chosen != row.rejected for row in rows)
    assert len(judge.questions) == 2 * differing


def test_the_later_turn_follows_a_models_own_answer(other):
    judge = Judge(longer)
    _, rows = duel(("tiny", other), PROMPTS[:2], PairJudge(judge, "longer"), SHORT)
    first, second = (row for row in rows if row.id.startswith("q0"))
    for side in ("chosen", "rejected"):
        earlier, later = getattr(first, side), getattr(second, side)
        assert [turn.role for turn in later] == ["assistant", "user", "assistant"]
        assert later[:2] == (*earlier, user("And then?"))
    assert any("And then?" in question for question in judge.questions)


def test_equal_answers_are_ties_that_nobody_is_asked_about(tmp_path, other):
    judge, same = Judge(longer), str(shutil.copytree(other, tmp_path / "copy"))
    figures, rows = duel((other, same), PROMPTS, PairJudge(judge, "longer"), SHORT)
    assert all(row.tie and row.probability == 0.5 for row in rows) and not judge.questions
    assert whole(figures)["win_rate"]["value"] == 0.5


def test_a_judge_that_names_a_place_makes_ties(other):
    figures, _ = duel(("tiny", other), PROMPTS, PairJudge(Judge(lambda *_: 3.0), "first"), SHORT)
    assert whole(figures)["ties"] == 12
    assert figures["position"]["bias"]["value"] == pytest.approx(3.0)


def test_a_pair_without_a_verdict_is_counted_by_its_reason(other):
    def sleepy(first, second):
        return None if min(first, second) < "M" else longer(first, second)

    figures, rows = duel(("tiny", other), PROMPTS, PairJudge(Judge(sleepy), "longer"), SHORT)
    failed = [row for row in rows if "failed" in row.metadata]
    counted = whole(figures)
    assert figures["failures"].get("asleep", 0) == len(failed)
    assert counted["wins"] + counted["ties"] + counted["losses"] == 12 - len(failed)
    with pytest.raises(DataError, match=r"stub judged none of \d+ pairs: asleep"):
        duel(("tiny", other), PROMPTS, PairJudge(Judge(lambda *_: None), "longer"), SHORT)


@pytest.mark.parametrize(
    ("orders", "right"),
    [
        ((1.0, 2.0), 1.0),
        ((-1.0, -2.0), 0.0),
        ((1.0, -2.0), 0.5),
        ((0.0, 2.0), 0.5),
        ((float("inf"), float("-inf")), 0.5),
    ],
)
def test_outcomes_by_hand(orders, right):
    assert outcome(Judgment(*orders)) == right


def test_the_interval_counts_prompts_and_not_turns():
    """Turns of a prompt that agree tell no more than one of them: the interval stays as wide."""

    wins = [1.0, 1.0, 1.0, 0.0, 0.5, 1.0, 0.0, 1.0, 1.0, 0.0]

    def rate(turns):
        rows = [
            Comparison(
                (user("q"),),
                (assistant("a"),),
                (assistant("b"),),
                group=str(prompt),
                probability=win,
            )
            for prompt, win in enumerate(wins)
            for _ in range(turns)
        ]
        return module._figures(rows)["win_rate"]

    once, twice = rate(1), rate(2)
    assert twice["value"] == once["value"] == 0.65
    assert twice["high"] - twice["low"] == pytest.approx(once["high"] - once["low"], rel=0.25)


def test_a_prompt_that_one_model_cannot_answer_is_left_out_and_named(other):
    prompts = [*PROMPTS[:2], Prompt((user("x" * 2000),), "long")]
    figures, rows = duel(("tiny", other), prompts, PairJudge(Judge(longer), "longer"), SHORT)
    assert figures["num_prompts"] == 2 and len(rows) == 4
    assert list(figures["unanswered"]["tiny"].values()) == [1] and figures["left_out"]["count"] == 2


class Taste:
    """The taste of a judge: length, and some quality of a text that is drawn from its letters."""

    def __call__(self, first, second):
        return (len(first) - len(second)) / 8 + self.quality(first) - self.quality(second)

    def quality(self, text):
        return random.Random(text).gauss(0, 1.5)


@pytest.fixture
def command(tmp_path, monkeypatch):
    """`tether duel` on prompts of a file; gives its figures, its pairs of answers, and its page."""

    def run(*models, prompts, code=0):
        path = tmp_path / "questions.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in prompts), encoding="utf-8")
        monkeypatch.setattr("tether.cli.judge._opened", lambda *_, **__: Judge(Taste()))
        words = ["duel", *models, "--prompts", str(path), "--max-new-tokens", "4"]
        words += ["--judge", "anyone", "--temperature", "1", "-o", str(tmp_path / "answers.jsonl")]
        words += ["--report", str(tmp_path / "figures.json"), "--page", str(tmp_path / "page.html")]
        result = CliRunner().invoke(app, words)
        if code:
            return result.exception
        assert result.exit_code == 0, result.output
        figures = json.loads((tmp_path / "figures.json").read_text())
        rows = [*read_jsonl(tmp_path / "answers.jsonl")]
        return figures, rows, (tmp_path / "page.html").read_text(encoding="utf-8"), result.output

    return run


def test_the_command_writes_all_of_it(command, other):
    lines = [
        {"question_id": n, "category": "math", "turns": [f"What is {n}?", "Twice?"]}
        for n in (1, 2, 2)
    ]
    figures, rows, page, _ = command("tiny", other, prompts=lines)
    assert whole(figures)["pairs"] == 4 and figures["repeated_prompts"] == 1
    assert len(rows) == 4 and figures["ranking"]["standings"] == []
    assert all(
        word in page
        for word in ("tiny against", "What is 1?", "Who wins", "95% intervals over prompts")
    )
    for models in (["tiny"], ["tiny", other, "tiny"]):
        assert isinstance(command(*models, prompts=lines, code=2), ConfigError)


def test_several_models_get_places_and_win_rates_at_equal_length(
    command,
    other,
    tmp_path,
    monkeypatch,
):
    """Strengths as statsmodels has them with a prompt's pairs as one cluster, and the rates at equal
    length as scipy has them.
    """
    monkeypatch.setattr(length_controlled, "REPLICATES", 20)
    for place in (length_controlled, equal_length):  # a strong penalty would hold all at one half
        monkeypatch.setattr(place, "STRENGTHS", np.array([100.0]))
    third = model(tmp_path, 2)
    prompts = [{"prompt": f"Question {n}?", "id": f"q{n}"} for n in range(52)]
    figures, rows, page, shown = command("tiny", other, third, prompts=prompts)
    assert len(rows) == 156
    names = ["tiny", other, third]
    sides = [(row["metadata"]["chosen_model"], row["metadata"]["rejected_model"]) for row in rows]
    design = np.array([[(n == a) - (n == b) for n in names] for a, b in sides], float)
    wins = np.array([row["probability"] for row in rows])
    groups = [int(row["group"]) for row in rows]
    fit = sm.GLM(wins, design[:, 1:], family=sm.families.Binomial()).fit(
        cov_type="cluster",
        cov_kwds={"groups": groups, "use_correction": False},
    )
    centred = np.eye(3)[:, 1:] - np.full((3, 2), 1 / 3)
    strengths = dict(zip(names, centred @ fit.params, strict=True))
    errors = dict(zip(names, np.sqrt(np.diag(centred @ fit.cov_params() @ centred.T)), strict=True))
    standings = figures["ranking"]["standings"]
    assert [one["name"] for one in standings] == sorted(names, key=strengths.get, reverse=True)
    for one in standings:
        strength = one["strength"]
        assert strength["value"] == pytest.approx(strengths[one["name"]], abs=1e-6)
        half = (strength["high"] - strength["low"]) / 2
        assert half == pytest.approx(student_t(51).ppf(0.975) * errors[one["name"]], rel=0.06)
    assert "Places" in page and "strength in nats" in shown
    lengths = [[len(row[side][-1]["content"]) for row in rows] for side in ("rejected", "chosen")]
    differences = np.subtract(*lengths, dtype=float)
    for contest in figures["contests"]:
        own = [names == (contest["first"], contest["second"]) for names in sides]
        controlled = contest["results"]["all"]["at_equal_length"]
        assert controlled["value"] == pytest.approx(
            equal_length.at_equal_length(wins[own], differences[own]),
            abs=1e-4,
        )
        assert controlled["low"] < controlled["value"] < controlled["high"]


def test_published_questions_are_read(tether_data, other):
    prompts, left_out = read_prompts([str(tether_data / "mt_bench" / "mt-bench-questions.jsonl")])
    assert len(prompts) == 80 and all(
        len(prompt.metadata["later_turns"]) == 1 for prompt in prompts
    )
    assert left_out["repeated_prompts"] == left_out["quarantine"]["count"] == 0
    truthful, more = read_prompts([str(tether_data / "instructgpt" / "truthful_qa_samples.csv")])
    assert more["repeated_prompts"] > 0 and len({p.messages for p in truthful}) == len(truthful)
    alpaca, _ = read_prompts(
        [str(tether_data / "alpaca_eval" / "instructions-with-davinci003.jsonl.gz")],
        3,
    )
    figures, _ = duel(
        ("tiny", other),
        [*prompts[:2], *alpaca],
        PairJudge(Judge(longer), "longer"),
        SHORT,
    )
    assert whole(figures)["pairs"] == 7


def test_the_page_escapes_what_models_wrote(tmp_path):
    from tether.watch.report.duel import write_duel

    part = {"pairs": 1, "wins": 1, "ties": 0, "losses": 0, "win_rate": None}
    figures = {
        "models": ["a", "b"],
        "judge": "stub",
        "num_prompts": 1,
        "failures": {},
        "position": None,
        "words": {"a": 1.0, "b": 1.0},
        "unanswered": {"a": {"too long": 2}, "b": {}},
        "contests": [
            {"first": "a", "second": "b", "results": {"all": {**part, "at_equal_length": None}}},
        ],
        "ranking": {"standings": [], "reason": ""},
    }
    said = (assistant("<script>alert(1)</script>"),)
    facts = {"chosen_model": "a", "rejected_model": "b"}
    row = Comparison((user("q"),), said, said, probability=1.0, metadata=facts)
    write_duel(tmp_path / "p.html", figures, [row])
    page = (tmp_path / "p.html").read_text(encoding="utf-8")
    assert "<script>alert" not in page and "&lt;script&gt;alert" in page
    assert "not answered by a:" in page and "Pairs that a wins" in page and "Ties" not in page
