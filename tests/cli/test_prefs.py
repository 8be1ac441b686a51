"""The commands of a preference store, one after the other, as a person would call them."""

from __future__ import annotations

import json
import math
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from tests.cli.test_commands import tether

from tether.cli import main
from tether.core.types import Comparison, Demonstration
from tether.data.sources import read
from tether.people.annotation.store import Store
from tether.people.annotation.work import Work
from tether.people.labels.votes import Opinion

ROWS = [
    {"prompt": f"p{n}", "chosen": f"good {n}", "rejected": f"bad {n}", "annotations": [
        {"annotator": "Ada", "preference": 1 - 2 * (n == 4)}, {"annotator": "Bo", "preference": 1}]}
    for n in range(12)
]  # fmt: skip


@pytest.fixture
def call(tmp_path, monkeypatch, capsys):
    """Runs a command in this process; returns its exit code, and what it said on both channels."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    rows = [
        {"prompt": f"q{n}", "responses": [f"one {n}", f"two {n}", f"three {n}"]} for n in range(4)
    ]
    (tmp_path / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["tether", "prefs", *arguments])
        try:
            main()
            code = 0
        except SystemExit as stop:
            code = stop.code or 0
        said = capsys.readouterr()
        return code, " ".join(said.out.split()), " ".join(said.err.split())

    return run


def test_from_files_to_labels(call, tmp_path):
    code, out, err = call("import", "p.db", "pairs.jsonl")
    assert (code, err) == (0, "") and "24" in out
    assert call("import", "p.db", "answers.jsonl", "--model", "m")[0] == 0
    assert "5 pairs" in call("ask", "p.db", "--pairs", "5", "--round", "first", "--ask", "2")[1]
    code, out, _ = call("stats", "p.db")
    assert (
        code == 0
        and "Ada" in out
        and "imported" in out
        and re.search(r"tasks open . 5", out.replace("│", "."))
    )
    code, out, _ = call("agree", "p.db", "--names", "--output", "agree.json")
    assert (
        code == 0
        and "24 judgments of 12" in out
        and "by 2 people" in out
        and "Krippendorff" in out
        and "Bo" in out
    )
    found = json.loads((tmp_path / "agree.json").read_text())
    assert (
        found["overall"]["raw"]["value"] == pytest.approx(11 / 12) and len(found["annotators"]) == 2
    )
    code, out, _ = call("export", "p.db", "out.jsonl", "--unfinished")
    assert code == 0 and "12 rows in out.jsonl" in out
    assert sum(c.probability == 0.5 for c in read(tmp_path / "out.jsonl", Comparison)) == 1
    assert (
        "11 rows"
        in call("export", "p.db", "out.parquet", "--format", "parquet", "--how", "majority")[1]
    )
    code, out, _ = call("export", "p.db", "tasks.json", "--format", "label-studio", "--unfinished")
    assert "17 rows" in out and "<Pairwise" in (tmp_path / "tasks.xml").read_text()
    assert "17" in call("import", "other.db", "tasks.json")[1]


def test_questions_better_answers_and_a_search(call, tmp_path):
    call("import", "p.db", "pairs.jsonl", "--ask", "3")
    _, out, _ = call("find", "p.db", "GOOD 1", "--annotator", "Bo", "--state", "open")
    assert "good 1" not in out and "p11" in out and "Ada: " in out and "3 pairs, 3 shown" in out
    assert call("find", "p.db", "--tag", "none")[1] == "0 pairs, 0 shown"
    assert "state" in call("find", "p.db", "--state", "lost")[2]
    call("invite", "p.db", "Cy")
    store = Store(tmp_path / "p.db")
    store.set_guidelines("", criteria=["helpful: three"])
    work = Work(store)
    for place in range(4):
        opinion = Opinion("first", correction="mine", ratings={"helpful/better/tie": 5})
        work.judge(work.next(3).assignment, 3, opinion if place else Opinion("second"))
    store.close()
    out = call("agree", "p.db", "-o", "agree.json")[1]
    assert "helpful: the same choice" in out
    report = json.loads((tmp_path / "agree.json").read_text())
    assert report["questions"]["helpful"]["raw"]["reason"].startswith("no item has votes from two")
    out = call("export", "p.db", "out.jsonl", "--question", "helpful", "--unfinished")[1]
    assert "3 rows in out.jsonl, of 12 pairs" in out and "3 better answers" in out
    assert all(c.tie for c in read(tmp_path / "out.jsonl", Comparison))
    out = call("export", "p.db", "out.jsonl", "--demonstrations", "sft.jsonl")[1]
    assert "3 better answers that people wrote: sft.jsonl" in out
    assert {d.messages[-1].content for d in read(tmp_path / "sft.jsonl", Demonstration)} == {"mine"}
    assert "Answered questions: helpful" in call("export", "p.db", "x", "--question", "halpful")[2]


def test_the_screen_names_people_and_a_file_numbers_them(call, tmp_path):
    call("import", "p.db", "pairs.jsonl")
    assert "Bo" in call("agree", "p.db")[1]
    _, out, _ = call("agree", "p.db", "--output", "agree.json")
    assert "Bo" not in out and "annotator-2" in out
    assert '"Bo"' not in (tmp_path / "agree.json").read_text()


def test_people_and_guidelines(call, tmp_path):
    code, out, _ = call("invite", "p.db", "Ada", "--address", "https://judge.example.org/")
    assert code == 0 and out.startswith("https://judge.example.org/join#")
    store = Store(tmp_path / "p.db")
    session = store.enter(out.partition("#")[2])
    assert store.who(session).role == "annotator"
    assert call("lock-out", "p.db", "Ada")[0] == 0 and store.who(session) is None
    assert call("lock-out", "p.db", "Ada", "--undo")[0] == 0 and store.who(session) is not None
    assert "no guidelines" in call("guidelines", "p.db")[1]
    (tmp_path / "g.md").write_text("# Be kind\n")
    assert "1 is in force" in call("guidelines", "p.db", "g.md")[1]
    assert call("guidelines", "p.db", "--version", "1")[1] == "version 1 # Be kind"
    assert "no version 2" in call("guidelines", "p.db", "--version", "2")[2]


def test_gold_questions_are_asked_and_known(call, tmp_path):
    assert call("import", "p.db", "pairs.jsonl", "--gold")[0] == 0
    call("invite", "p.db", "Ada")
    store = Store(tmp_path / "p.db")
    work = Work(store, gold_every=1)
    held = work.next(1)
    right = "first" if held.first[0].content.startswith("good") else "second"
    work.judge(held.assignment, 1, Opinion(right))
    store.close()
    code, out, _ = call("agree", "p.db", "--names")
    assert code == 0 and "100% of 1" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["stats", "no.db"], "there is no preference store at no.db"),
        (["export", "p.db", "x.jsonl"], "nothing to export"),
        (
            ["export", "p.db", "x.jsonl", "--how", "mean"],
            "labels are made by majority, soft, dawid-skene",
        ),
        (
            ["export", "p.db", "x.jsonl", "--format", "xlsx"],
            "exported as jsonl, parquet, label-studio, argilla",
        ),
        (["agree", "p.db"], "no annotator has judged any of these pairs"),
        (["ask", "p.db", "--strategy", "clever"], "strategy"),
        (["ask", "p.db", "--strategy", "ranking", "--per-prompt", "2"], "per_prompt has no effect"),
        (["invite", "p.db", "Ada", "--role", "king"], "annotator, expert, admin"),
        (["lock-out", "p.db", "Eve"], "nobody here is called 'Eve'"),
        (["import", "p.db", "answers.jsonl", "--ask", "2"], "--ask has no effect on answers"),
        (["import", "p.db", "pairs.jsonl", "--model", "m"], "--model has no effect on comparisons"),
        (["import", "p.db", "pairs.jsonl", "answers.jsonl"], "one after the other"),
        (["import", "p.db", "pairs.jsonl", "--fields", "a,b"], "names three fields"),
        (["import", "p.db", "pairs.jsonl", "--gold", "--labels", "x"], "one of them"),
        (["import", "p.db", "nowhere.jsonl"], "data file not found"),
        (["guidelines", "p.db", "nowhere.md"], "no guidelines at"),
    ],
)
def test_mistakes_are_one_clear_message(call, tmp_path, arguments, message):
    Store(tmp_path / "p.db").close()
    code, _, err = call(*arguments)
    assert code == 2 and message in err and "Traceback" not in err


@pytest.mark.parametrize(
    "arguments",
    [["export", "p.db", "x.jsonl"], ["agree", "p.db"], ["rank", "p.db"], ["escalate", "p.db", "1"]],
    ids=lambda arguments: arguments[0],
)
def test_a_round_that_does_not_exist_is_told_with_those_that_do(call, arguments):
    call("import", "p.db", "pairs.jsonl", "--round", "May")
    code, _, err = call(*arguments, "--round", "Mai")
    assert code == 2 and "no round 'Mai'" in err and "'May'" in err
    assert call(*arguments, "--round", "May")[0] == 0


def test_an_empty_export_says_why(call):
    call("import", "p.db", "pairs.jsonl")
    call("import", "p.db", "answers.jsonl")
    call("ask", "p.db", "--round", "new")
    asked = ("export", "p.db", "x.jsonl", "--round", "new")
    for more in ((), ("--unfinished",), ("--least", "0.4")):
        assert "nothing to export: 12 not judged yet" in call(*asked, *more)[2]
    Path("one.jsonl").write_text(json.dumps(ROWS[4]))
    call("import", "q.db", "one.jsonl")
    decided = call("export", "q.db", "x.jsonl", "--how", "majority")
    assert "nothing to export: 1 waiting for an expert" in decided[2]
    unsure = call("export", "q.db", "x.jsonl", "--unfinished", "--least", "0.6")
    assert "nothing to export: 1 with a label below --least" in unsure[2]
    for command, who in (("agree", "no annotator"), ("rank", "nobody")):
        assert f"{who} has judged any" in call(command, *asked[1:2], *asked[3:])[2]


def test_an_export_accounts_for_every_pair(call, tmp_path):
    """Eight pairs for two people: both judge three alike and one otherwise, one judges one, both
    skip two, and one is a gold question.
    """
    rows = ROWS[1:5]  # in the last of them both say otherwise
    rows.append({**ROWS[5], "annotations": ROWS[5]["annotations"][:1]})  # one judgment of two
    rows += [{**ROWS[n], "annotations": []} for n in (6, 7)]
    (tmp_path / "some.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "gold.jsonl").write_text(json.dumps(ROWS[8]) + "\n")
    call("import", "p.db", "some.jsonl", "--ask", "2")
    call("import", "p.db", "gold.jsonl", "--gold", "--ask", "2")
    store = Store(tmp_path / "p.db")
    work = Work(store, gold_every=0)
    people = [person.id for person in store.annotators()]
    for person in people:
        while held := work.next(person):
            work.skip(held.assignment, person)

    def left_out(*options):
        code, out, _ = call("export", "p.db", "out.jsonl", *options)
        written, of = re.search(r"(\d+) rows in out.jsonl, of (\d+) pairs", out).groups()
        rows = re.findall(r"│ ([a-z -]+?) │ (\d+) │", out)
        assert code == 0 and int(of) == int(written) + sum(int(number) for _, number in rows) == 8
        assert len((tmp_path / "out.jsonl").read_text().splitlines()) == int(written)
        return int(written), {why: int(number) for why, number in rows}

    waits = {"waiting for an expert": 1, "with too few judgments": 1}
    never = {"gold questions": 1, "skipped by everybody": 2}
    assert left_out("--how", "majority") == (3, never | waits)
    assert left_out() == (4, never | {"with too few judgments": 1})
    assert left_out("--unfinished") == (5, never)
    assert left_out("--unfinished", "--least", "0.6") == (
        4,
        never | {"with a label below --least": 1},
    )
    store.invite("Cy")  # who can judge what the others have skipped
    assert left_out("--unfinished") == (5, {"gold questions": 1, "not judged yet": 2})
    store.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--address", "judge.example.org/x"], "such as https://judge.example.org"),
        (["--role", "boss"], "annotator, expert, admin"),
    ],
)
def test_an_invitation_that_is_refused_makes_no_store(call, tmp_path, options, message):
    code, out, err = call("invite", "new.db", "Ada", *options)
    assert (code, out) == (2, "") and message in err
    assert not (tmp_path / "new.db").exists()


def test_rows_that_cannot_be_used_are_told_and_strict_says_so_by_its_exit(call, tmp_path):
    (tmp_path / "bad.jsonl").write_text(json.dumps(ROWS[0]) + "\n{broken\n")
    code, _, err = call("import", "p.db", "bad.jsonl")
    assert code == 0 and "out: malformed JSON (1)" in err
    assert call("import", "p.db", "bad.jsonl", "--strict")[0] == 2


def test_an_import_says_which_of_a_persons_judgments_counts(call, tmp_path):
    rows = [
        {
            "fields": {"prompt": "q", "response1": "x", "response2": "y"},
            "responses": {"preference": [{"value": choice, "user_id": "u", "status": "submitted"}]},
        }
        for choice in ("response1", "response2")
    ]
    (tmp_path / "records.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    code, out, _ = call("import", "p.db", "records.jsonl")
    assert code == 0 and "without times the first" in out
    assert call("export", "p.db", "out.jsonl")[0] == 0
    (label,) = read(tmp_path / "out.jsonl", Comparison)
    assert label.chosen[0].content == "x"


def test_as_a_program_of_its_own(tmp_path):
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    done = tether("prefs", "import", "p.db", "pairs.jsonl", cwd=tmp_path)
    assert done.returncode == 0 and "new judgments" in done.stdout, done.stderr


def test_a_file_without_a_usable_row_leaves_no_store(call, tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}\n')
    code, _, told = call("import", "new.db", "rows.jsonl")
    assert code == 2 and "rows.jsonl" in told and not (tmp_path / "new.db").exists()


def test_an_invitation_names_the_port_and_an_empty_store_says_what_to_do(call, tmp_path):
    code, out, errors = call("invite", "p.db", "Ada", "--port", "8799")
    assert (
        code == 0
        and out.startswith("http://127.0.0.1:8799/join#")
        and "serve p.db --port 8799" in errors
    )
    code, out, _ = call("stats", "p.db")
    assert (
        code == 0
        and "no judgments yet" in out
        and not re.search(r"│ +0 │", out.partition("guidelines")[0])
    )


def duelled(generator, count):
    """Pairs of two models' answers with a judge's verdicts, either model first, and people's."""
    people = generator.choice([0.0, 0.5, 1.0], count, p=[0.3, 0.1, 0.6])
    judge = np.where(generator.random(count) < 0.75, people, generator.choice([0.5, 1.0], count))
    rows = []
    for number, verdict in enumerate(judge):
        models, sides = ["ours", "theirs"], [f"mine {number}", f"yours {number}"]
        step = 1 if number % 3 else -1
        rows.append(
            {
                "prompt": f"question {number}",
                **dict(zip(["chosen", "rejected"], sides[::step], strict=True)),
                "probability": float(verdict if number % 3 else 1 - verdict),
                "metadata": dict(
                    zip(["chosen_model", "rejected_model"], models[::step], strict=True),
                ),
            },
        )
    return rows, judge, people


def test_few_votes_correct_a_judge_of_many_pairs(call, tmp_path):
    """The estimate and its variance by the equations of PPI++, written out here."""
    rows, judge, people = duelled(np.random.default_rng(8), 600)
    voted = np.zeros(600, dtype=bool)
    voted[np.random.default_rng(9).permutation(600)[:150]] = True
    ballots = [
        {
            "prompt": row["prompt"],
            # the other way round than the judge's file has them
            "chosen": row["rejected"],
            "rejected": row["chosen"],
            "annotations": [
                {"annotator": "Ada", "preference": (2 * vote - 1) * (-1 if number % 3 else 1)},
            ],
        }
        for number, (row, vote, chosen) in enumerate(zip(rows, people, voted, strict=True))
        if chosen
    ]
    for name, lines in (("judged", rows), ("votes", ballots)):
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (tmp_path / f"{name}.jsonl").write_text(text)
    assert call("correct", "p.db", "judged.jsonl")[0] == 2
    assert call("import", "p.db", "votes.jsonl")[0] == 0
    code, out, err = call("correct", "p.db", "judged.jsonl", "-o", "out.json")
    assert code == 0, err
    (found,) = json.loads((tmp_path / "out.json").read_text())["contests"]
    assert {found["first"], found["second"]} == {"ours", "theirs"}
    turned = found["first"] != "ours"
    y, f, g = people[voted], judge[voted], judge[~voted]
    together = np.cov(y, f, ddof=0)[0, 1]
    weight = together / ((1 + len(y) / len(g)) * np.concatenate([f, g]).var(ddof=1))
    value = (y - weight * f).mean() + weight * g.mean()
    error = math.sqrt((y - weight * f).var() / len(y) + weight**2 * g.var() / len(g))
    assert found["weight"] == pytest.approx(weight, abs=1e-9)
    assert found["voted"] == 150 and found["pairs"] == 600
    assert found["judge"]["value"] == pytest.approx(abs(turned - judge.mean()))
    assert found["people"]["value"] == pytest.approx(abs(turned - y.mean()))
    corrected = found["corrected"]
    assert corrected["value"] == pytest.approx(abs(turned - value), abs=1e-9)
    width = corrected["high"] - corrected["low"]
    assert width == pytest.approx(2 * 1.96 * error, rel=0.03)
    assert width < 0.9 * (found["people"]["high"] - found["people"]["low"])
    assert "corrected" in out and "150" in out
    (tmp_path / "plain.jsonl").write_text(json.dumps(ROWS[0]) + "\n")
    code, _, err = call("correct", "p.db", "plain.jsonl")
    assert code == 2 and "metadata.chosen_model" in err
