"""The user's own columns reach a function in TRL's form as they are, whatever the format of the
rows reads of them.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

import tether
from tether.core.errors import RewardError
from tether.core.once import once
from tether.core.types import (
    Message,
    Problem,
    Prompt,
    Rollout,
    Sampling,
    Score,
    StopReason,
    user,
)
from tether.data.sources import Quarantine
from tether.rewards.forms import LastReply, plain
from tether.rewards.function import FunctionReward
from tether.rewards.servers import ROLLOUTS
from tether.rewards.verifiable import problem_prompt
from tether.runner.assembly.data.rows import load_rows
from tether.settings.evaluation import EvaluationSection
from tether.settings.sampling import PolicySection
from tether.settings.section import DataConfig, calls_functions

MESSAGES = [{"role": "user", "content": "2+3?"}]
ROWS: dict[str, dict[str, Any]] = {
    "math": {"problem": "What is 2+3?", "solution": "It is $\\boxed{5}$.", "level": 1},
    "question_answer": {"prompt": "What is 2+3?", "answer": " 5 ", "solution": "It is 5"},
    "gsm8k": {"question": "What is 2+3?", "answer": "2 + 3 = 5\n#### 5"},
    "prompt_response": {"prompt": "Say hi", "response": "hi", "output": "ho", "completion": "ha"},
    "alpaca": {"instruction": "Say hi", "input": "now", "output": "hi"},
    "names": {"prompt": "Say hi", "id": 7, "task_id": "t7", "system": "Be brief.", "target": None},
    "metadata": {"prompt": "Say hi", "metadata": {"target": "hi"}, "target": "ho"},
    "verl": {
        "prompt": MESSAGES,
        "reward_model": {"style": "rule", "ground_truth": None},
        "extra_info": {"index": 0},
    },
    "messages": {
        "messages": [*MESSAGES, {"role": "assistant", "content": "5"}],
        "ground_truth": "5",
    },
    "comparison": {"prompt": "Say hi", "chosen": "hi", "rejected": "ho", "margin": 2},
    "ranking": {"prompt": "Say hi", "responses": ["hi", "ho"], "scores": [1, 2]},
    "steps": {"prompt": "Say hi", "steps": ["a", "b"], "labels": [True, False]},
    "feedback": {"prompt": "Say hi", "completion": "hi", "label": False},
    "trainer": {"prompt": "Say hi", "completion_ids": [1], "trainer_state": "mine"},
}


def rows_of(path: Path, rows: list[dict[str, Any]], kind: type = Prompt, **how: Any) -> list[Any]:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_rows(DataConfig(path=str(path), **how), kind, Quarantine(), whole=True)


def arguments(prompts: list[Prompt]) -> dict[str, Any]:
    """What a function in TRL's form is called with."""
    seen: dict[str, Any] = {}

    def reward(completions, **columns):
        seen.update(columns)
        return [0.0] * len(completions)

    plain(reward)(prompts, [LastReply("said")] * len(prompts))
    return seen


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_every_column_arrives_as_the_user_wrote_it(tmp_path, row):
    seen = arguments(rows_of(tmp_path / "rows.jsonl", [row, row]))
    assert {name: seen[name] for name in row} == {
        name: [value, value] for name, value in row.items()
    }


def test_derived_columns_come_with_those_of_the_row(tmp_path):
    seen = arguments(rows_of(tmp_path / "a.jsonl", [{"turns": ["One", "Two"], "category": "x"}]))
    assert (
        seen["later_turns"] == [("Two",)]
        and seen["turns"] == [["One", "Two"]]
        and seen["category"] == ["x"]
    )
    seen = arguments(
        rows_of(tmp_path / "b.jsonl", [{"prompt": "Say hi", "metadata": {"inner": 1}}]),
    )
    assert seen["metadata"] == [{"inner": 1}] and seen["inner"] == [1]


def test_a_column_that_some_rows_lack_is_none_there_in_every_call(tmp_path):
    rows = [{"prompt": "One"}, {"prompt": "Two", "tests": ["x"]}]
    prompts = rows_of(tmp_path / "rows.jsonl", rows)

    def reward(completions, tests):
        return [1.0 if one else 0.0 for one in tests]

    assert [plain(reward)([prompt], [LastReply("said")]) for prompt in prompts] == [[0.0], [1.0]]


def test_a_name_of_metadata_that_some_prompts_lack_is_none_there_in_every_call(tmp_path):
    rows = [{"prompt": "One", "metadata": {}}, {"prompt": "Two", "metadata": {"hint": "x"}}]
    prompts = rows_of(tmp_path / "rows.jsonl", rows)

    def reward(completions, hint):
        return [1.0 if one else 0.0 for one in hint]

    assert [plain(reward)([prompt], [LastReply("said")]) for prompt in prompts] == [[0.0], [1.0]]
    assert [prompt.metadata for prompt in prompts] == [{}, {"hint": "x"}]


def test_renamed_columns_arrive_under_both_names(tmp_path):
    row = {"input": {"text": "What is 2+3?"}, "reward_model": {"ground_truth": "2 + 3\n#### 5"}}
    columns = {"prompt": "input.text", "answer": "reward_model.ground_truth"}
    (prompt,) = rows_of(tmp_path / "rows.jsonl", [row], columns=columns)
    assert prompt.text == "What is 2+3?"
    seen = arguments([prompt])
    assert (
        seen["answer"] == ["2 + 3\n#### 5"]
        and seen["reward_model"] == [row["reward_model"]]
        and seen["input"] == [row["input"]]
    )


def test_a_column_under_a_name_that_is_taken_is_named_in_the_log(tmp_path, caplog):
    (prompt,) = rows_of(tmp_path / "rows.jsonl", [{"prompt": "Say hi", "completions": ["mine"]}])
    once.cache_clear()
    with caplog.at_level(logging.WARNING, "tether.rewards"):
        seen: list[Any] = []

        def reward(prompts, completions):
            seen.extend([prompts, completions])
            return [0.0]

        plain(reward)([prompt], [LastReply("said")])
    assert seen == [["Say hi"], ["said"]]
    assert "column completions, which is not passed" in caplog.text and prompt.row[
        "completions"
    ] == ["mine"]


def test_an_argument_without_a_column_is_refused_with_the_columns_that_there_are(tmp_path):
    (prompt,) = rows_of(tmp_path / "rows.jsonl", [{"prompt": "Say hi", "answer": "5"}])

    def reward(completions, anwser, completion_ids=None):
        return [0.0]

    with pytest.raises(
        RewardError,
        match=("needs 'anwser', and the rows have no such column; they have: answer, completions"),
    ):
        plain(reward)([prompt], [LastReply("said")])


def test_checked_answers_are_derived_and_the_row_is_as_it_was(tmp_path):
    row = {"question": "What is 2+3?", "answer": "2 + 3 = 5\n#### 5"}
    (problem,) = rows_of(tmp_path / "rows.jsonl", [row], Problem)
    prompt = problem_prompt(problem)
    assert prompt.metadata["answer"] == "5" and prompt.row == row
    assert arguments([prompt])["answer"] == [row["answer"]]


def test_rows_are_kept_for_functions_alone(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "Say hi", "answer": "5"}\n')
    (prompt,) = load_rows(DataConfig(path=str(path)), Prompt, Quarantine())
    assert prompt.row == {}
    data = {"path": str(path)}
    judged = {"evaluate": {"judge": {"call": "m:f"}}}
    assert calls_functions(
        PolicySection.model_validate({"data": data, "function": {"call": "m:f"}}),
    )
    assert calls_functions(
        PolicySection.model_validate({"data": data, "reward_source": "random", **judged}),
    )
    assert calls_functions(
        EvaluationSection.model_validate({"data": data, "judge": {"call": "m:f"}}),
    )
    assert not calls_functions(
        PolicySection.model_validate({"data": data, "reward_source": "random"}),
    )


def test_the_row_goes_to_reward_servers_with_its_prompt(tmp_path):
    row = {"prompt": "Say hi", "reward_model": {"ground_truth": None, "of": [1, {"deep": True}]}}
    (prompt,) = rows_of(tmp_path / "rows.jsonl", [row])
    rollout = Rollout((1,), (2,), (0.0,), StopReason.LENGTH, "said", 0, 0, Sampling(), prompt)
    (sent,) = ROLLOUTS.validate_python(json.loads(ROLLOUTS.dump_json([rollout])))
    seen: list[Any] = []

    def reward(completions, reward_model):
        seen.extend(reward_model)
        return [1.0]

    assert FunctionReward(plain(reward)).score([sent])[0].value == 1.0 and seen == [
        row["reward_model"],
    ]


def test_a_reward_and_a_judge_of_held_out_prompts_get_the_columns_of_their_own_rows(tmp_path):
    """Through the front door: training rows in memory, held-out rows of a file."""
    rows = [{"question": f"What is {n}+3?", "answer": f"... #### {n + 3}"} for n in range(2)]
    (tmp_path / "other.jsonl").write_text(
        "".join((f'{{"prompt": "Say {n}.", "response": "said {n}"}}\n') for n in range(2)),
    )
    trained, judged = [], []

    def reward(completions, answer, **columns):
        trained.extend(answer)
        return [0.0] * len(completions)

    def judge(completions, response, **columns):
        judged.extend(response)
        return [0.0] * len(completions)

    held_out = {
        "data": {"path": str(tmp_path / "other.jsonl")},
        "prompts": 2,
        "every": 1,
        "judge": judge,
    }
    few: Any = {"steps": 1, "prompts_per_step": 2, "samples_per_prompt": 2, "max_new_tokens": 2}

    def both(completions, answer=None, **columns):
        return reward(completions, [text for text in answer or () if text is not None])

    tether.grpo("tiny", prompts=rows, reward=both, evaluate=held_out, run=tmp_path / "run", **few)
    assert {*trained} == {row["answer"] for row in rows} and {*judged} == {"said 0", "said 1"}


CALL = {"id": "1", "type": "function", "function": {"name": "double", "arguments": {"x": 2}}}
TURNS = (
    Message("assistant", "", tool_calls=(json.dumps(CALL),)),
    Message("tool", "4", name="double"),
    Message("assistant", "It is 4."),
)


def episode(**outcome):
    return Rollout(
        (1,),
        (2, 3, 4),
        (),
        StopReason.STOP_TOKEN,
        "It is 4.",
        0,
        0,
        Sampling(),
        Prompt((user("2 + 2?"),), row={"answer": 4}),
        spans=((0, 1), (2, 3)),
        turns=(user("What the environment says first."), *TURNS),
        outcome=Score(0.5, {"unread_calls": 2}) if outcome else None,
    )


def test_a_reward_gets_the_whole_episode_in_each_form():
    seen = []

    def own(prompts, responses):
        seen.extend([*responses, *(response.turns for response in responses)])
        return [1.0 - 0.1 * sum("tool_calls" in turn for turn in responses[0].turns)]

    def messages(completions, answer):
        seen.append(completions)
        return [float(str(answer[0]) in completions[0][1]["content"])]

    def rollout_reward_fn(outcome):
        seen.append(vars(outcome))
        return None if outcome.timed_out else outcome.env_reward - outcome.tool_call_count

    rollout = episode(value=0.5)
    rows = [turn.as_row() for turn in TURNS]
    scores = [
        FunctionReward(plain(function, "messages")).score([rollout])[0].value
        for function in (own, messages, rollout_reward_fn)
    ]
    assert scores == [0.9, 1.0, -0.5]
    assert seen[:3] == ["It is 4.", rows, [rows]]
    assert seen[3] == {
        "env_reward": 0.5,
        "completion": rows,
        "trace": [],
        "tool_call_count": 1,
        "tool_failure_count": 2,
        "tool_calls_by_name": {"double": 1},
        "timed_out": False,
    }


def test_without_an_environment_s_reward_an_outcome_has_none():
    (score,) = FunctionReward(plain(lambda outcome: outcome.env_reward)).score([episode()])
    assert score.value is None


def test_a_single_reply_is_one_message():
    reward = FunctionReward(plain(lambda completions: [len(completions[0])], "messages"))
    assert reward.score_texts([Prompt((user("a"),))], ["b"])[0].value == 1
