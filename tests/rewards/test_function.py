"""Reward functions that misbehave: what they spoil is left out, counted and named; too much of it
ends the run in order.
"""

import json
import math
import sys
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
import torch

from tether.core.errors import ConfigError, MissingFileError, RewardError
from tether.core.rundir import read_json, read_jsonl
from tether.core.types import Prompt, Rollout, Sampling, Score, StopReason, user
from tether.rewards.control import RandomReward
from tether.rewards.function import FunctionReward
from tether.rewards.limit import FailureLimit
from tether.rewards.loading import load_function, load_object
from tether.rewards.returned import scores_of, whole_groups
from tether.runner.assembly.online import online_stage
from tether.runner.run import run_recipe
from tether.settings.reading import build
from tether.settings.recipe import Recipe

ASKED = [
    Rollout(
        (1,),
        (n + 2,),
        (0.0,),
        StopReason.STOP_TOKEN,
        f"answer {n}",
        0,
        0,
        Sampling(),
        Prompt((user(f"q{n}"),)),
    )
    for n in range(6)
]


def hangs(prompts, responses):
    time.sleep(60)


def raises(prompts, responses):
    raise SystemExit("no more")


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (raises, "raised SystemExit: no more"),
        (hangs, "gave no answer within 0.2 s, it was in hangs (test_function.py, line "),
        (lambda p, r: [1.0], r"returned 1 scores for 3 responses"),
        (lambda p, r: 1.0, "returned a float, not a list of numbers"),
        (lambda p, r: ["good"] * len(r), "returned a str, not a number"),
        (lambda p, r: [math.nan] * len(r), "returned nan"),
        (lambda p, r: [-math.inf] * len(r), "returned -inf"),
        (lambda p, r: [None] * len(r), "gave no score"),
        (lambda p, r: [[1.0]] * len(r), "returned a list, not a number"),
        (lambda p, r: ["0.5"] * len(r), "returned a str, not a number"),
        (lambda p, r: [b"1"] * len(r), "returned a bytes, not a number"),
        (lambda p, r: [Score("2")] * len(r), "returned a str, not a number"),
        (lambda p, r: dict.fromkeys(range(len(r)), 1.0), "returned a dict, not a list of numbers"),
        (lambda p, r: {0.1, 0.2, 0.3}, "returned a set, not a list of numbers"),
        (lambda p, r: frozenset({0.1, 0.2, 0.3}), "returned a frozenset, not a list of numbers"),
        (lambda p, r: "123", "returned a str, not a list of numbers"),
        (lambda p, r: b"123", "returned a bytes, not a list of numbers"),
        (lambda p, r: bytearray(b"123"), "returned a bytearray, not a list of numbers"),
        (lambda p, r: np.array(1.0), "returned a float, not a list of numbers"),
    ],
)
def test_an_unusable_result_is_a_failed_score_with_its_reason(function, reason):
    def sometimes(prompts, responses):
        return (
            function(prompts, responses)
            if responses[0] == "answer 0"
            else [len(r) for r in responses]
        )

    scores = FunctionReward(sometimes, batch=3, time_limit=0.2).score(ASKED)
    assert [s.value for s in scores] == [None, None, None, 8.0, 8.0, 8.0]
    assert all(reason in s.reason for s in scores[:3])


def test_lists_arrays_tensors_and_generators_are_read_in_their_order():
    forms = (
        list,
        tuple,
        np.array,
        torch.tensor,
        iter,
        lambda numbers: dict(enumerate(numbers)).values(),
    )
    for form in forms:
        assert [s.value for s in scores_of(form([3.0, 1.0, 2.0]), 3)] == [3.0, 1.0, 2.0]


@pytest.mark.parametrize(
    ("sizes", "batch", "calls"),
    [
        ((6, 6, 6), 8, [6, 6, 6]),
        ((12, 12), 8, [12, 12]),
        ((4, 4, 4), 8, [8, 4]),
        ((3, 3, 3, 3), 8, [6, 6]),
        ((1,) * 10, 4, [4, 4, 2]),
        ((2, 9, 2, 2), 4, [2, 9, 4]),
    ],
)
def test_a_call_holds_all_answers_to_its_prompts(sizes, batch, calls):
    """The prompts are all the same: groups are told apart by the numbers of their samples."""
    seen = []
    rollouts = [replace(ASKED[0], sample_index=i) for size in sizes for i in range(size)]
    scores = FunctionReward(lambda p, r: seen.append(len(r)) or [1.0] * len(r), batch=batch).score(
        rollouts,
    )
    assert seen == calls
    assert len(scores) == sum(sizes)
    assert [len(part) for part in whole_groups(rollouts, batch)] == calls


def test_a_call_that_hangs_leaves_its_stacks_and_says_where_it_is_once(tmp_path, caplog):
    def deep(prompts, responses):
        gate.acquire()  # the innermost line of the user's own file
        return [1.0] * len(responses)

    gate = threading.Lock()
    gate.acquire()
    source = FunctionReward(deep, batch=3, time_limit=0.3, dump_after=0.1)
    source.watchdog.path = tmp_path / "run" / "stacks.txt"
    first, *_ = source.score(ASKED)
    line = deep.__code__.co_firstlineno + 1
    assert first.value is None and first.reason.endswith(
        f"within 0.3 s, it was in deep (test_function.py, line {line})",
    )
    (said,) = [record.message for record in caplog.records]
    assert (
        f"has taken 0.1 s so far, in deep (test_function.py, line {line}); all stacks: "
        f"{source.watchdog.path}"
    ) in said
    stacks = source.watchdog.path.read_text()
    assert (
        stacks.count("== ") == 2
        and f"line {line} in deep" in stacks
        and "test_function.py" in stacks
    )
    gate.release()


def test_a_slow_call_is_dumped_and_still_counts(tmp_path):
    source = FunctionReward(
        lambda p, r: time.sleep(0.3) or [1.0] * len(r),
        time_limit=20,
        dump_after=0.1,
    )
    FailureLimit(source, 0.5).keep_stacks(tmp_path / "stacks.txt")
    assert [score.value for score in source.score(ASKED)] == [1.0] * 6 and (
        tmp_path / "stacks.txt"
    ).exists()
    quick = FunctionReward(lambda p, r: [1.0] * len(r), dump_after=0.1)
    quick.watchdog.path = tmp_path / "none.txt"
    assert quick.score(ASKED)[0].value == 1.0 and not quick.watchdog.path.exists()


def test_scores_and_their_parts_come_through_in_order():
    def function(prompts, responses):
        assert [p.text[1:] for p in prompts] == [r.split()[1] for r in responses]
        return [Score(float(r.split()[1]), {"kind": 1.0}) for r in responses]

    scores = FunctionReward(function, batch=4).score(ASKED)
    assert [s.value for s in scores] == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0] and scores[0].parts == {
        "kind": 1.0,
    }


def summed(first, second, calls=("a.py:first", "b.py:second"), weights=(1.0, 0.5)):
    """Scores of one answer by two functions that return these values."""
    functions = {
        call: lambda p, r, value=v: [value] for call, v in zip(calls, (first, second), strict=True)
    }
    source = FunctionReward(functions, dict(zip(calls, weights, strict=True)))
    (score,) = source.score([replace(ASKED[0], response_ids=(3, 4, 5))])
    return score


def test_a_sum_keeps_parts_and_steps_of_its_functions():
    score = summed(
        Score(1.0, {"kind": 3.0}, steps=((0, 0.25), (2, 0.5))),
        Score(2.0, {"kind": 4.0}, steps=((2, 1.0),)),
    )
    assert score.value == 2.0 and score.steps == ((0, 0.25), (2, 1.0))
    assert score.parts == {"first": 1.0, "first/kind": 3.0, "second": 2.0, "second/kind": 4.0}
    assert summed(Score(1.0, steps=((0, 0.25),)), None).steps == ((0, 0.25),)
    assert summed(Score(1.0, steps=((0, 0.25),)), 2.0).steps == ()


@pytest.mark.parametrize("unusable", [math.nan, "good", Score(None, reason="away")])
def test_a_sum_fails_with_what_one_function_spoils_and_takes_none_for_no_opinion(unusable):
    spoiled, alone = summed(1.0, unusable), summed(1.0, None)
    assert spoiled.value is None and any(word in spoiled.reason for word in ("nan", "str", "away"))
    assert (alone.value, alone.parts) == (1.0, {"first": 1.0})
    assert summed(None, None).value is None


def test_functions_of_one_name_have_parts_of_their_own():
    assert summed(1.0, 2.0, ("a.py:f", "b.py:f")).parts == {"a.py:f": 1.0, "b.py:f": 2.0}
    assert summed(1.0, 2.0, ("a@b/c.py:f", "python:g@12")).parts == {"f": 1.0, "g": 2.0}
    assert summed(1.0, 2.0, ("a.py:score", "b.py:f")).parts == {"a.py:score": 1.0, "f": 2.0}


def test_one_function_twice_is_refused(tmp_path):
    calls = [f"{tmp_path}/mine.py:reward"] * 2
    with pytest.raises(ConfigError, match="call names a function twice"):
        recipe(tmp_path, GOOD, function={"call": calls})


class Failing:
    name = "failing"

    def __init__(self, plan):
        self.plan = iter(plan)

    def score(self, rollouts):
        bad = next(self.plan)
        return [
            Score(None, reason="broken") if n < bad else Score(1.0) for n in range(len(rollouts))
        ]


def test_the_limit_is_on_the_last_ten_calls():
    source = FailureLimit(Failing([0, 6, 3, *[0] * 10, 6, 6]), 0.5)
    for _ in range(14):
        source.score(ASKED)
    assert source.reasons == {"broken": 15}
    strict = FailureLimit(Failing([0, 1]), 0.0)
    strict.score(ASKED)
    with pytest.raises(
        RewardError,
        match=(
            r"1 of the last 12 scores failed, more than max_failed "
            r"= 0: broken \(1 times\)"
        ),
    ):
        strict.score(ASKED)


class Judged(Failing):
    def judge(self, rollouts):
        return self.score(rollouts)


def test_the_words_of_the_limit_count_the_last_calls_alone():
    class Changing:
        name = "changing"
        reasons = iter(["old", *[""] * 10, "new"])

        def score(self, rollouts):
            reason = next(self.reasons)
            return [Score(None, reason=reason) if reason else Score(1.0) for _ in rollouts]

    source = FailureLimit(Changing(), 1.0)
    for _ in range(11):
        source.score(ASKED)
    source.share = 0.01
    with pytest.raises(RewardError, match=r"6 of the last 60 scores failed.*: new \(6 times\)\. M"):
        source.score(ASKED)
    assert source.reasons == {"old": 6}  # the step that was stopped is asked once more


def test_measurements_by_another_score_of_the_source_count_for_the_limit():
    source = FailureLimit(Judged([0, 2, 6]), 0.5)
    source.score(ASKED)
    assert [score.value for score in source.judge(ASKED)] == [None, None, 1.0, 1.0, 1.0, 1.0]
    again = FailureLimit(Judged([6]), 0.4)
    again.load_state(json.loads(json.dumps(source.state())))
    assert again.reasons == {"broken": 2}
    with pytest.raises(RewardError, match=r"8 of the last 18 scores .* broken \(8 times\)"):
        again.judge(ASKED)


def test_a_training_that_learns_from_steps_needs_them():
    """Whatever scores: a function, or servers."""
    values = [Score(1.0, steps=((0, 0.5),)), Score(None, reason="away"), Score(1.0), 1.0]
    source = FunctionReward(lambda prompts, responses: values)
    first, away, *others = FailureLimit(source, 0.8, needs_steps=True).score(ASKED[:4])
    assert first == values[0] and away.reason == "away"
    assert all("gave no steps, and step_rewards = true" in score.reason for score in others)


@pytest.mark.parametrize("step_rewards", [False, True])
def test_a_reward_from_servers_without_steps_fails_where_steps_are_needed(tmp_path, step_rewards):
    made = recipe(tmp_path, GOOD, step_rewards=step_rewards)
    stage, _ = online_stage(made.grpo, made.model, None, 0, reward=Failing([0]))
    stage.reward.share = 1.0
    assert {score.value for score in stage.reward.score(ASKED)} == {None if step_rewards else 1.0}


def test_scores_missing_altogether_are_an_error():
    class Short(RandomReward):
        def score(self, rollouts):
            return super().score(rollouts)[1:]

    with pytest.raises(AssertionError):
        FailureLimit(Short(), 0.5).score(ASKED)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        ("nothing", ConfigError, "module:name"),
        ("no.such.module:f", ConfigError, "cannot be imported: ModuleNotFoundError"),
        ("math:nothing", ConfigError, "no function 'nothing'"),
        ("math:pi", ConfigError, "no function 'pi'"),
        ("not/there.py:f", MissingFileError, "not there"),
    ],
)
def test_names_that_lead_nowhere(call, error, message):
    with pytest.raises(error, match=message):
        load_function(call)


def recipe(tmp_path, body, **section):
    (tmp_path / "mine.py").write_text(body)
    (tmp_path / "prompts.jsonl").write_text("".join(f'{{"prompt": "p{n}"}}\n' for n in range(12)))
    values = {
        **{
            "data": {"path": str(tmp_path / "prompts.jsonl")},
            "steps": 4,
            "prompts_per_step": 4,
            "samples_per_prompt": 4,
        },
        **{
            "max_new_tokens": 6,
            "checkpoint_every": 2,
            "reward_source": "function",
            "optimizer": {"learning_rate": 1e-2},
        },
        **{
            "function": {"call": f"{tmp_path}/mine.py:reward", "batch": 4, "time_limit": 0.5},
            **section,
        },
    }
    return build(
        Recipe,
        {
            "run": str(tmp_path / "run"),
            "model": {"source": "tiny", "dtype": "float32"},
            "grpo": values,
        },
    )


GOOD = "def reward(prompts, responses):\n    return [float(len(r)) for r in responses]\n"
COUNTING = """
from pathlib import Path
CALLS = Path(__file__).with_name("calls")
def reward(prompts, responses):
    CALLS.write_text(str(int(CALLS.read_text()) + 1 if CALLS.exists() else 1))
    if int(CALLS.read_text()) {when}:
        raise ValueError("the judge is away")
    return [float(len(r)) for r in responses]
"""


def test_a_run_goes_on_without_the_scores_that_failed(tmp_path):
    made = recipe(tmp_path, COUNTING.format(when="% 4 == 0"))  # a fourth of every step
    summary = run_recipe(made, ["grpo"])["grpo"]
    rows = list(read_jsonl(f"{made.run}/grpo/metrics.jsonl"))
    assert [row["reward/failed"] for row in rows] == [4.0] * 4 and summary["failed_rewards"] == 16
    assert summary["failed_rewards_by_reason"] == {
        "the reward function reward (mine.py) raised ValueError: the judge is away": 16,
    }


class CutError(Exception):
    """The end of a process, as far as a test can bring it about."""


@pytest.mark.parametrize("cut_after", [None, 2])
def test_an_interrupted_run_stops_at_the_step_at_which_an_uninterrupted_one_does(
    tmp_path,
    cut_after,
):
    """The reward fails from the third step on: 16 of 48 scores failed then, and 32 of 64 a step
    later.
    """
    made = recipe(tmp_path, COUNTING.format(when="> 8"), max_failed=0.4)

    def bar(done, total, metrics):
        if metrics is not None and done == cut_after:
            raise CutError

    if cut_after is not None:
        with pytest.raises(CutError):
            run_recipe(made, ["grpo"], lambda phase: bar)
    with pytest.raises(
        RewardError,
        match=(
            r"32 of the last 64 scores failed.*the judge is away "
            r"\(32 times\)"
        ),
    ):
        run_recipe(made, ["grpo"])
    assert [row["step"] for row in read_jsonl(f"{made.run}/grpo/metrics.jsonl")] == [1, 2, 3]


def test_too_many_failures_end_it_with_a_checkpoint_from_which_it_goes_on(tmp_path):
    how = {"max_failed": 0.3, "checkpoint_every": 100}
    with pytest.raises(
        RewardError,
        match=(
            r"16 of the last 48 scores failed, more than max_failed "
            r"= 0.3: .* the judge is away"
        ),
    ):
        run_recipe(recipe(tmp_path, COUNTING.format(when="> 8"), **how), ["grpo"])
    (state,) = (tmp_path / "run" / "grpo" / "checkpoints").glob("step-*")
    assert read_json(state / "state.json")["step"] == 2 and (state / "COMPLETE").is_file()
    mended = recipe(tmp_path, GOOD, **how)
    run_recipe(mended, ["grpo"])
    assert [row["step"] for row in read_jsonl(f"{mended.run}/grpo/metrics.jsonl")] == [1, 2, 3, 4]


def test_a_file_may_define_dataclasses(tmp_path):
    """They look their module up by its name."""
    file = tmp_path / "json.py"
    file.write_text(
        "from __future__ import annotations\n"
        "from dataclasses import dataclass\n"
        "@dataclass\n"
        "class Pair:\n"
        "    first: int\n"
        "def reward(prompts, responses):\n"
        "    return [Pair(len(one)).first for one in responses]\n",
        encoding="utf-8",
    )
    before = sys.modules["json"]
    assert load_object(f"{file}:reward", "reward")([], ["four"]) == [4]
    assert sys.modules["json"] is before
