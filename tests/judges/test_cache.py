"""What was asked once is not asked again: over calls, runs, and a process that was killed."""

import hashlib
import json
import math
import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from tests.judges.planted_judges import Planted, pair

from tether.core.errors import DataError
from tether.core.protocols import ChatModel, Reply, Verdict
from tether.core.types import Message, Sampling, user
from tether.judges.cache import CachedModel
from tether.judges.pairwise import PairJudge
from tether.judges.verdicts import read_verdict

ROWS = [pair(f"q{n}", f"good {n}", f"bad {n}") for n in range(4)]


def fair(name="planted"):
    return Planted(lambda first, second: 1.0 if first.startswith("good") else -1.0, name=name)


def test_a_second_run_asks_nothing_and_says_the_same(tmp_path):
    first, second = fair(), fair()
    before = PairJudge(CachedModel(first, tmp_path / "c.sqlite"), "x").judge(ROWS)
    again = CachedModel(second, tmp_path / "c.sqlite")
    assert PairJudge(again, "x").judge(ROWS) == before
    assert len(first.questions) == 8 and second.questions == [] and again.usage()["recalled"] == 8
    assert isinstance(again, ChatModel)


def test_another_model_rubric_or_pair_is_asked_anew(tmp_path):
    path = tmp_path / "c.sqlite"
    PairJudge(CachedModel(fair(), path), "x").judge(ROWS)
    for model, rubric, rows in (
        (fair("other"), "x", ROWS),
        (fair(), "y", ROWS),
        (fair(), "x", [pair("q0", "good 0", "bad  0")]),
    ):
        PairJudge(CachedModel(model, path), rubric).judge(rows)
        assert len(model.questions) == 2 * len(rows)
    swapped = fair()  # the same two questions, in the other order
    PairJudge(CachedModel(swapped, path), "x").judge([row.swap() for row in ROWS])
    assert swapped.questions == []


def test_equal_questions_are_asked_once_and_told_to_all(tmp_path):
    model, told = fair(), {}
    conversation = (user("[answer A 123456]\ngood\n\n[answer B 123456]\nbad\n\n[end 123456]\n\n"),)
    found = CachedModel(model, tmp_path / "c.sqlite").verdicts(
        [conversation] * 3,
        ("A", "B"),
        told=told.__setitem__,
    )
    assert len(model.questions) == 1 and told == dict(enumerate(found)) and len(found) == 3


def test_failures_are_asked_again_and_certainty_is_kept(tmp_path):
    said = [Verdict(None, reason="HTTP 500"), Verdict((0.0, -math.inf), parsed=True)] * 2
    answers = iter(said)
    model = Planted(lambda first, second: next(answers))
    asked = CachedModel(model, tmp_path / "c.sqlite")
    conversation = (user("[answer A 123456]\ngood\n\n[answer B 123456]\nbad\n\n[end 123456]\n\n"),)
    assert [asked.verdicts([conversation], ("A", "B"))[0] for _ in range(4)] == [
        said[0],
        said[1],
        said[1],
        said[1],
    ]
    assert len(model.questions) == 2


def test_a_reply_without_an_option_is_kept_and_what_is_no_number_is_not(tmp_path):
    conversation = (user("[answer A 123456]\ngood\n\n[answer B 123456]\nbad\n\n[end 123456]\n\n"),)
    wordy, broken, fine = (
        read_verdict("Sure, both are", [], ("A", "B")),
        Verdict((math.nan, math.nan)),
        Verdict((-1.0, -0.5)),
    )
    for name, said in (("wordy", [wordy]), ("broken", [broken, fine])):
        answers = iter(said)
        model = Planted(lambda first, second, answers=answers: next(answers), name=name)
        asked = CachedModel(model, tmp_path / "c.sqlite")
        found = [asked.verdicts([conversation], ("A", "B"))[0] for _ in range(3)]
        assert found[1:] == [said[-1]] * 2 and len(model.questions) == len(said)


def test_a_nan_in_an_older_cache_is_asked_again(tmp_path):
    path = tmp_path / "c.sqlite"
    before = PairJudge(CachedModel(fair(), path), "x").judge(ROWS)
    with sqlite3.connect(path) as file:
        file.execute("UPDATE answers SET answer = '[[NaN, NaN], 1.0, false, \"\"]'")
    model = fair()
    assert (
        PairJudge(CachedModel(model, path), "x").judge(ROWS) == before and len(model.questions) == 8
    )


def test_tools_and_names_of_turns_belong_to_the_question(tmp_path):
    model = Planted(write=lambda talk, ordinal: Reply(f"{len(model.replied)}", True))
    asked = CachedModel(model, tmp_path / "c.sqlite")
    turns = [user("a"), *(Message("user", "a", tools=json.dumps([{"n": n}])) for n in range(2))]
    turns += [Message("user", "a", name="Ann"), Message("user", "a", tool_call_id="Ann")]
    for _ in range(2):
        talks = [(turn,) for turn in turns]
        assert len(set(asked.replies(talks, Sampling(4), seed=1, ordinals=[1] * 5))) == 5
    assert len(model.replied) == 5
    plain = ["reply", "planted", [["user", "a"]], "more"]
    former = hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()
    assert asked._key("reply", (user("a"),), "more") == former


def test_replies_are_known_by_their_sampling_seed_and_ordinal(tmp_path):
    model = Planted(
        write=lambda conversation, ordinal: Reply(
            f"{conversation[-1].content} {ordinal}",
            ordinal != 2,
        ),
    )
    asked = CachedModel(model, tmp_path / "c.sqlite")
    conversations = [(user("a"),), (user("a"),), (user("b"),)]
    first = asked.replies(conversations, Sampling(4), seed=1, ordinals=[1, 2, 1])
    assert first == [("a 1", True, ""), ("a 2", False, ""), ("b 1", True, "")]
    assert (
        asked.replies(conversations, Sampling(4), seed=1, ordinals=[1, 2, 1]) == first
        and len(model.replied) == 3
    )
    asked.replies(conversations[:1], Sampling(5), seed=1, ordinals=[1])
    asked.replies(conversations[:1], Sampling(4), seed=2, ordinals=[1])
    assert len(model.replied) == 5


SLOW = """
import sys, time
from tests.judges.planted_judges import Planted
from tests.judges.test_cache import ROWS
from tether.judges.pairwise import PairJudge
from tether.judges.cache import CachedModel

def odds(first, second):
    print(first, flush=True)
    if len(model.questions) == 4:
        time.sleep(60)
    return 1.5

model = Planted(odds)
PairJudge(CachedModel(model, sys.argv[1]), "x").judge(ROWS)
"""


def test_a_killed_process_loses_only_what_was_under_way(tmp_path):
    path, root = tmp_path / "c.sqlite", Path(__file__).resolve().parents[2]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), *sys.path])}
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW, str(path)],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    assert process.stdout is not None
    begun = [process.stdout.readline() for _ in range(4)]
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert all(begun)
    model = Planted(lambda first, second: 1.5)
    judgments = PairJudge(CachedModel(model, path), "x").judge(ROWS)
    assert len(model.questions) == 8 - 3  # three were answered, the fourth was not
    assert all(j.shown_first == pytest.approx(1.5) for j in judgments)


def test_a_file_of_another_kind_is_left_alone(tmp_path):
    path = tmp_path / "c.sqlite"
    path.write_text("not a database at all, but long enough to look at " * 40)
    with pytest.raises(DataError, match=r"c\.sqlite cannot keep answers"):
        CachedModel(fair(), path)
    assert path.read_text().startswith("not a database")
