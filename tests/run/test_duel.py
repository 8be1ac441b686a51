"""Two models against each other: turns, both orders, ties, and an interval over prompts."""

import json
import re

import pytest
from typer.testing import CliRunner

from tether.build.models import open_model
from tether.cli import app
from tether.core.errors import ConfigError, DataError
from tether.core.protocols import Verdict
from tether.core.types import Comparison, Prompt, Sampling, assistant, user
from tether.judges.pairwise import Judgment, PairJudge
from tether.models.saving import save_model
from tether.settings.model import ModelConfig
from tether.tools import duel as module
from tether.tools.duel import duel, outcome, read_prompts

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


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """Another tiny model, whose weights have another seed."""
    folder = tmp_path_factory.mktemp("other") / "model"
    loaded = open_model(ModelConfig(source="tiny"), seed=1)
    save_model(loaded.model, loaded.tokenizer, None, folder)
    return str(folder)


def test_wins_are_those_that_the_judge_names_in_both_orders(other):
    judge = Judge(longer)
    figures, rows = duel(("tiny", other), PROMPTS, PairJudge(judge, "longer"), SHORT)
    assert len(rows) == 12 and figures["num_prompts"] == 6
    lengths = [
        (len(row["first"][-1]["content"]), len(row["second"][-1]["content"]))
        for row in rows
        if row["turn"] == 1
    ]
    by_hand = ["first" if a > b else "second" if a < b else "tie" for a, b in lengths]
    assert [row["verdict"] for row in rows if row["turn"] == 1] == by_hand
    results = figures["results"]
    assert results["turn 1"]["wins"] == by_hand.count("first") and results["turn 1"][
        "losses"
    ] == by_hand.count("second")
    whole = results["all"]
    assert whole["win_rate"]["value"] == pytest.approx((whole["wins"] + whole["ties"] / 2) / 12)
    assert set(results) == {"all", "turn 1", "turn 2", "category art", "category law"}
    differing = sum(row["first"] != row["second"] for row in rows)
    assert len(judge.questions) == 2 * differing


def test_the_later_turn_follows_a_models_own_answer(other):
    judge = Judge(longer)
    _, rows = duel(("tiny", other), PROMPTS[:2], PairJudge(judge, "longer"), SHORT)
    first, second = (row for row in rows if row["id"].startswith("q0"))
    for side in ("first", "second"):
        assert [turn["role"] for turn in second[side]] == ["assistant", "user", "assistant"]
        assert second[side][:2] == [*first[side], {"role": "user", "content": "And then?"}]
    assert any("And then?" in question for question in judge.questions)


def test_equal_answers_are_ties_that_nobody_is_asked_about():
    judge = Judge(longer)
    figures, rows = duel(("tiny", "tiny"), PROMPTS, PairJudge(judge, "longer"), SHORT)
    assert {row["verdict"] for row in rows} == {"tie"} and not judge.questions
    assert figures["results"]["all"]["win_rate"]["value"] == 0.5


def test_a_judge_that_names_a_place_makes_ties(other):
    figures, _ = duel(("tiny", other), PROMPTS, PairJudge(Judge(lambda *_: 3.0), "first"), SHORT)
    assert figures["results"]["all"]["ties"] == 12 and figures["position"]["bias"][
        "value"
    ] == pytest.approx(3.0)


def test_a_pair_without_a_verdict_is_counted_by_its_reason(other):
    def sleepy(first, second):
        return None if min(first, second) < "M" else longer(first, second)

    figures, rows = duel(("tiny", other), PROMPTS, PairJudge(Judge(sleepy), "longer"), SHORT)
    failed = [row for row in rows if row["verdict"] is None]
    counted = figures["results"]["all"]
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

    def rows(turns):
        return [
            Comparison((user("q"),), (assistant("a"),), (assistant("b"),), group=str(prompt))
            for prompt in range(10)
            for _ in range(turns)
        ]

    wins = [1.0, 1.0, 1.0, 0.0, 0.5, 1.0, 0.0, 1.0, 1.0, 0.0]
    once = module._figures(rows(1), wins, range(10))["win_rate"]
    twice = module._figures(rows(2), [win for win in wins for _ in range(2)], range(20))["win_rate"]
    assert twice["value"] == once["value"] == 0.65
    assert twice["high"] - twice["low"] == pytest.approx(once["high"] - once["low"], rel=0.25)


def test_a_prompt_that_one_model_cannot_answer_is_left_out_and_named(other):
    prompts = [*PROMPTS[:2], Prompt((user("x" * 2000),), "long")]
    figures, rows = duel(("tiny", other), prompts, PairJudge(Judge(longer), "longer"), SHORT)
    assert figures["num_prompts"] == 2 and len(rows) == 4
    assert (
        list(figures["unanswered"]["first"].values()) == [1] and figures["left_out"]["count"] == 2
    )


def test_the_command_writes_all_of_it(tmp_path, other, monkeypatch):
    path = tmp_path / "questions.jsonl"
    lines = [
        {"question_id": n, "category": "math", "turns": [f"What is {n}?", "Twice?"]}
        for n in (1, 2, 2)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    monkeypatch.setattr("tether.cli.judge._opened", lambda *_, **__: Judge(longer))
    words = ["judge", "tiny", other, "--prompts", str(path), "--max-new-tokens", "4"]
    words += ["--report", str(tmp_path / "figures.json"), "-o", str(tmp_path / "answers.jsonl")]
    result = CliRunner().invoke(
        app,
        [*words, "--judge", "anyone", "--page", str(tmp_path / "page.html")],
    )
    assert result.exit_code == 0, result.output
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["results"]["all"]["pairs"] == 4 and figures["repeated_prompts"] == 1
    assert len((tmp_path / "answers.jsonl").read_text().splitlines()) == 4
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert all(
        word in page
        for word in ("tiny against", "What is 1?", "Who wins", "95% intervals over prompts")
    )
    assert isinstance(CliRunner().invoke(app, words).exception, ConfigError)
    assert isinstance(
        CliRunner().invoke(app, ["judge", "tiny", str(path), "--judge", "anyone"]).exception,
        ConfigError,
    )


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
    assert figures["results"]["all"]["pairs"] == 7


def test_the_page_escapes_what_models_wrote(tmp_path):
    from tether.report.duel import write_duel

    figures = {
        "models": {"first": "a", "second": "b"},
        "judge": "stub",
        "num_prompts": 1,
        "failures": {},
        "position": None,
        "words": {"first": 1.0, "second": 1.0},
        "unanswered": {"first": {"too long": 2}, "second": {}},
        "results": {"all": {"pairs": 1, "wins": 1, "ties": 0, "losses": 0, "win_rate": None}},
    }
    said = [{"role": "assistant", "content": "<script>alert(1)</script>"}]
    write_duel(
        tmp_path / "p.html",
        figures,
        [{"prompt": said, "first": said, "second": said, "verdict": "first"}],
    )
    page = (tmp_path / "p.html").read_text(encoding="utf-8")
    assert "<script>alert" not in page and "&lt;script&gt;alert" in page
    assert (
        "not answered by a: too long" in page and "Pairs that a wins" in page and "Ties" not in page
    )
