"""`tether judge` and `tether constitution` as they are typed, with a tiny model and with a
server.
"""

import json
import re
import sqlite3

import pytest
from tests.judges.answering import Server, completion, refusal
from typer.testing import CliRunner

from tether.cli import app
from tether.cli.terminal.results import _agreement_rows
from tether.core.errors import ConfigError, DataError, MissingFileError, ModelError
from tether.core.types import Comparison, Demonstration
from tether.data.sources import read

KEY = "sk-secret-of-the-command-line"


@pytest.fixture
def project(tmp_path, monkeypatch):
    monkeypatch.setenv("TETHER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "200")
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    rows = [
        {"prompt": f"question {n}", "chosen": f"good {n}", "rejected": f"bad {n}"} for n in range(6)
    ]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "prompts.txt").write_text("".join(row["prompt"] + "\n" for row in rows))
    (tmp_path / "rubric.md").write_text("Be kind.")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def serve():
    servers = []

    def start(behaviour):
        servers.append(Server(behaviour))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def tether(*arguments):
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=True)
    return result, " ".join(result.output.split())


def fair(request, number):
    """Prefers what is good, and the first place by the same amount as it prefers it."""
    first_is_good = (
        re.search(r"\[answer A \w+\]\n(good|bad)", request["messages"][0]["content"])[1] == "good"
    )
    return completion("A", [{"A": 0.8, "B": 0.2} if first_is_good else {"A": 0.5, "B": 0.5}])


def test_a_local_model_judges_and_is_not_asked_twice(project):
    arguments = (
        "judge",
        "tiny",
        "pairs.jsonl",
        "--rubric",
        "rubric.md",
        "-o",
        "labels.jsonl",
        "--report",
        "report.json",
    )
    result, shown = tether(*arguments)
    assert result.exit_code == 0, result.output
    assert "6 of 6 pairs" in shown and "12 questions" in shown and "from a coin" in shown
    labels = list(read("labels.jsonl", Comparison, strict=True))
    assert len(labels) == 6 and all(label.probability >= 0.5 for label in labels)
    report = json.loads((project / "report.json").read_text())
    assert report["files"]["pairs.jsonl"]["agreement"]["num_pairs"] == 6 and report[
        "judge"
    ].startswith("tiny@")
    again, shown = tether(*arguments, "--limit", "4")
    assert again.exit_code == 0 and "asked: 8 recalled" in shown and "questions" not in shown
    assert list(read("labels.jsonl", Comparison)) == labels[:4]


def test_files_of_one_name_are_all_labelled(project):
    (project / "sub").mkdir()
    rows = (project / "pairs.jsonl").read_text()
    (project / "sub/pairs.jsonl").write_text(rows.replace("question", "other question"))
    files = ("judge", "tiny", "sub/pairs.jsonl", "pairs.jsonl", "-o", "labels.jsonl")
    result, shown = tether(*files, "--rubric", "rubric.md")
    assert result.exit_code == 0, result.output
    assert len(list(read("labels.jsonl", Comparison, strict=True))) == 12
    assert "pairs.jsonl (2)" in shown


def test_reasons_come_before_verdicts_where_they_are_asked_for(project, serve):
    server = serve(
        lambda request, number: (
            completion("A is kind.")
            if "Do not reply yet" in request["messages"][-1]["content"]
            else fair(request, number)
        ),
    )
    result, shown = tether(
        "judge",
        "m",
        "pairs.jsonl",
        "--url",
        server.url,
        "--reasoning-tokens",
        "30",
        "--report",
        "report.json",
    )
    assert result.exit_code == 0 and "6 of 6 pairs" in shown, result.output
    assert [len(request["messages"]) for request in server.requests].count(3) == 12 and len(
        server.requests,
    ) == 24
    assert all(
        request["messages"][1]["content"] == "A is kind."
        for request in server.requests
        if len(request["messages"]) == 3
    )
    assert "reasons of 30 tokens" in json.loads((project / "report.json").read_text())["judge"]


def test_a_server_judges_within_its_budget_and_a_second_start_asks_the_rest(
    project,
    serve,
    monkeypatch,
):
    monkeypatch.setenv("MY_KEY", KEY)
    server = serve(fair)
    arguments = [
        "judge",
        "m",
        "pairs.jsonl",
        "--url",
        server.url,
        "--key-variable",
        "MY_KEY",
        "--concurrency",
        "1",
        "-o",
        "l.jsonl",
    ]
    result, shown = tether(*arguments, "--max-requests", "7", "--report", "r.json")
    assert result.exit_code == 0 and len(server.requests) == 7, result.output
    assert (
        "3 of 6 pairs" in shown
        and "not judged: budget spent" in shown
        and "3 pairs have no" in shown
    )
    result, shown = tether(*arguments, "--report", "r.json")
    assert result.exit_code == 0 and len(server.requests) == 12 and "7 recalled" in shown
    labels = list(read("l.jsonl", Comparison))
    # log-odds log 4 and 0, on average log 2
    assert [label.probability for label in labels] == pytest.approx([2 / 3] * 6)
    assert all(label.chosen[0].content.startswith("good") for label in labels)
    written = b"".join(path.read_bytes() for path in project.rglob("*") if path.is_file())
    assert (
        KEY not in result.output
        and KEY.encode() not in written
        and set(server.keys) == {f"Bearer {KEY}"}
    )


def test_the_constitution_of_a_served_model(project, serve):
    def write(request, number):
        asked = request["messages"][-1]["content"]
        if asked.startswith("You compare"):
            return completion("B", [{"B": 0.7, "A": 0.3}])
        return completion(
            f"answer {request['seed']} to {asked[:20]}",
            finish="length" if asked == "question 3" else "stop",
        )

    server = serve(write)
    arguments = [
        "constitution",
        "m",
        "prompts.txt",
        "--url",
        server.url,
        "-o",
        "d.jsonl",
        "--comparisons",
        "c.jsonl",
    ]
    arguments += ["--rounds", "2"]
    result, shown = tether(*arguments)
    assert result.exit_code == 0, result.output
    assert "5 of 6 prompts" in shown and "did not end in" in shown
    made = list(read("d.jsonl", Demonstration, strict=True))
    assert len(made) == 5 and all(len(d.metadata["steps"]) == 2 for d in made)
    pairs = list(read("c.jsonl", Comparison, strict=True))
    assert len(pairs) == 5 and all(pair.tie for pair in pairs)  # it always says B
    assert all(pair.metadata["position_bias"] < -0.8 for pair in pairs)
    count, before = len(server.requests), (project / "d.jsonl").read_bytes()
    assert tether(*arguments)[0].exit_code == 0
    assert len(server.requests) == count and (project / "d.jsonl").read_bytes() == before


def test_a_judge_that_prefers_what_people_reject_is_told_from_a_coin(project, serve):
    rows = [{"prompt": f"q {n}", "chosen": f"good {n}", "rejected": f"bad {n}"} for n in range(12)]
    (project / "more.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def unfair(request, number):
        first_is_good = (
            re.search(r"\[answer A \w+\]\n(good|bad)", request["messages"][0]["content"])[1]
            == "good"
        )
        return completion("B" if first_is_good else "A")

    result, shown = tether(
        "judge",
        "m",
        "more.jsonl",
        "--url",
        serve(unfair).url,
        "--report",
        "r.json",
    )
    assert result.exit_code == 0, result.output
    assert (
        "worse than a coin" in shown
        and "prefers what people reject" in shown
        and ("cannot be told from a coin") not in shown
    )
    # written verdicts, which no temperature mends
    assert "calibration error" in shown and "--temperature" not in shown
    assert (
        json.loads((project / "r.json").read_text())["files"]["more.jsonl"]["agreement"][
            "temperature"
        ]
        is None
    )


def test_replies_that_name_no_option_are_paid_once_and_told_so(project, serve):
    def wordy(request, number):
        return (
            completion("Both are fine.")
            if "question 4" in request["messages"][0]["content"]
            else fair(request, number)
        )

    server = serve(wordy)
    arguments = [
        "judge",
        "m",
        "pairs.jsonl",
        "--url",
        server.url,
        "--concurrency",
        "1",
        "--max-requests",
    ]
    result, shown = tether(*arguments, "10")
    assert result.exit_code == 0 and len(server.requests) == 10, result.output
    assert "option at the beginning" in shown and "1 pairs get no" in shown
    assert "Give the same command" in shown
    result, shown = tether(*arguments, "99")
    assert len(server.requests) == 12 and "10 recalled" in shown and "5 of 6 pairs" in shown
    assert "1 pairs get no" in shown and "Give the same command again" not in shown


def thinking(request, number):
    """A model that thinks for 40 tokens and mentions both answers, then prefers what is good; cut
    off as servers do it.
    """
    first_is_good = (
        re.search(r"\[answer A \w+\]\n(good|bad)", request["messages"][0]["content"])[1] == "good"
    )
    thought = [*["<think>", "A", " or", " B", "?"], *[" hm"] * 34, "</think>"]
    tokens = [
        *({token: 1.0} for token in thought),
        {"A": 0.8, "B": 0.2} if first_is_good else {"A": 0.5, "B": 0.5},
    ]
    kept = tokens[: request["max_tokens"]]
    finish = "stop" if len(kept) == len(tokens) else "length"
    return completion("".join(next(iter(token)) for token in kept), kept, finish=finish)


def test_a_judge_that_thinks_is_told_to_be_cut_off_and_heard_with_a_greater_length(project, serve):
    server = serve(lambda request, number: (thinking if number >= 2 else fair)(request, number))
    arguments = (
        "judge",
        "m",
        "pairs.jsonl",
        "--url",
        server.url,
        "--concurrency",
        "1",
        "-o",
        "l.jsonl",
    )
    result, shown = tether(*arguments)
    assert result.exit_code == 0 and {request["max_tokens"] for request in server.requests} == {
        8,
    }, result.output
    assert "while it was thinking" in shown
    assert "5 pairs" in shown and "length: give --reply-tokens" in shown
    assert "Give the same command again" not in shown
    result, shown = tether(*arguments, "--reply-tokens", "41", "--time-limit", "60")
    assert (
        "6 of 6 pairs" in shown
        and "cut off" not in shown
        and server.requests[-1]["max_tokens"] == 41
    )
    labels = list(read("l.jsonl", Comparison))
    # log-odds log 4 and 0 after the thought
    assert [label.probability for label in labels] == pytest.approx([2 / 3] * 6)


def test_a_judge_that_is_always_cut_off_ends_the_command_in_a_sentence(project, serve):
    server = serve(thinking)
    result, _ = tether("judge", "m", "pairs.jsonl", "--url", server.url)
    assert isinstance(result.exception, DataError), result.output
    assert "judged none of 6" in str(result.exception)
    assert "thinking: raise reply_tokens" in str(result.exception)


def test_the_constitution_tells_why_comparisons_have_no_label(project, serve):
    def write(request, number):
        asked = request["messages"][-1]["content"]
        if asked.startswith("You compare"):
            return completion("Both are fine.") if "question 4" in asked else fair(request, number)
        return completion(f"{('good', 'bad')[request['seed'] % 2]} {request['seed']}")

    arguments = [
        "constitution",
        "m",
        "prompts.txt",
        "--url",
        serve(write).url,
        "-o",
        "d.jsonl",
        "--comparisons",
        "c.jsonl",
    ]
    result, shown = tether(*arguments)
    assert result.exit_code == 0, result.output
    assert (
        "comparisons" in shown and "option at the beginning" in shown and "5 of 6 prompts" in shown
    )


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        (
            ["judge", "tiny", "pairs.jsonl", "--rubric", "nowhere"],
            MissingFileError,
            "no rubric named nowhere",
        ),
        (["judge", "tiny", "nothing.jsonl"], MissingFileError, "nothing.jsonl"),
        (
            ["judge", "tiny", "pairs.jsonl", "--max-requests", "5"],
            ConfigError,
            "--max-requests has no effect",
        ),
        (
            ["judge", "tiny", "pairs.jsonl", "--reply-tokens", "9"],
            ConfigError,
            "--reply-tokens has no effect",
        ),
        (
            ["constitution", "tiny", "prompts.txt", "-o", "d", "--time-limit", "9"],
            ConfigError,
            "--time-limit has no effect",
        ),
        (
            ["judge", "m", "pairs.jsonl", "--url", "http://u:p@127.0.0.1/v1"],
            ConfigError,
            "key_variable",
        ),
        (
            [
                "judge",
                "m",
                "pairs.jsonl",
                "--url",
                "http://127.0.0.1:9/v1",
                "--key-variable",
                "NOT_SET",
            ],
            ConfigError,
            "NOT_SET",
        ),
        (["judge", "neither-nor", "pairs.jsonl"], ConfigError, "neither"),
        (["judge", "tiny", "prompts.txt", "--rubric", "rubric.md"], DataError, "not preferences"),
        (
            ["constitution", "tiny", "prompts.txt", "-o", "d.jsonl", "--principles", "rubric.md"],
            ConfigError,
            "not a valid TOML",
        ),
    ],
)
def test_mistakes_are_told(project, arguments, kind, message):
    result, _ = tether(*arguments)
    assert result.exit_code != 0 and message in str(result.exception)
    assert isinstance(result.exception, kind)


def test_a_server_that_refuses_the_key_is_one_message_and_nothing_is_lost(
    project,
    serve,
    monkeypatch,
):
    monkeypatch.setenv("MY_KEY", KEY)
    server = serve(
        lambda request, number: (
            fair(request, number) if number < 3 else refusal(401, f"bad key {KEY}")
        ),
    )
    result, _ = tether(
        "judge",
        "m",
        "pairs.jsonl",
        "--url",
        server.url,
        "--key-variable",
        "MY_KEY",
        "--concurrency",
        "1",
    )
    assert (
        isinstance(result.exception, ModelError)
        and KEY not in str(result.exception)
        and "HTTP 401" in str(result.exception)
    )
    with sqlite3.connect(project / "cache" / "answers.sqlite") as kept:
        assert kept.execute("SELECT count(*) FROM answers").fetchone() == (3,)


def test_no_absurd_temperature_is_advised():
    estimate = {"value": 0.5, "low": 0.4, "high": 0.6}
    agreement = {
        "accuracy": estimate,
        "kappa": estimate,
        "length_only": estimate,
        "annotators": None,
        "calibration_error": 0.17,
    }
    agreement |= {
        f"accuracy_{name}": estimate for name in ("once", "shown_first", "shown_second")
    } | {"kappa_once": estimate}
    result = {
        "num_judged": 9,
        "num_pairs": 9,
        "failures": {},
        "num_parsed": 0,
        "position": None,
        "mass": None,
    }
    for temperature, text in ((999.99, "by no temperature"), (2.5, "0.010 by --temperature 2.50")):
        told = {**agreement, "temperature": temperature, "calibration_error_after": 0.01}
        assert text in dict(_agreement_rows({**result, "agreement": told}))["  mended"]
