"""The control of agreement, against groups counted by hand."""

import html
import json

import pytest

from tether.core.errors import ConfigError
from tether.core.rundir import RunDirectory
from tether.core.types import Prompt, Rollout, Sampling, StopReason, user
from tether.rewards.control import CheckedControl, RandomReward
from tether.rewards.limit import FailureLimit
from tether.rewards.majority import MajorityReward
from tether.rewards.verifiable import VerifiableReward
from tether.runner.run import run_recipe
from tether.settings.reading import build
from tether.settings.recipe import Recipe
from tether.settings.rewards import VerifiableConfig
from tether.watch.report.about import control_lines
from tether.watch.report.page import write_report
from tether.watch.report.reading import read_journey


def rollouts(texts, number=0, answer="7"):
    prompt = Prompt((user(f"question {number}"),), str(number), {"answer": answer})
    how = (StopReason.STOP_TOKEN,)
    return [Rollout((number,), (1,), (0.0,), *how, t, 0, 0, Sampling(), prompt) for t in texts]


def agreement(kind, texts, **more):
    with VerifiableReward(VerifiableConfig(kind=kind, **more)) as check:
        return [s.value for s in MajorityReward(check.config, check).score(rollouts(texts))]


@pytest.mark.parametrize(
    ("texts", "values"),
    [
        (["#### 4", "#### 4.0", "#### 5", "none"], [1, 1, 0, 0]),
        (["#### 4", "#### 5", "#### 4", "#### 5", "#### 6"], [1, 1, 1, 1, 0]),
        (["none", "nothing", "silence"], [0, 0, 0]),
        (["#### 1,000", "the answer is 1000 apples", "#### 7"], [1, 1, 0]),
    ],
)
def test_numbers_agree_by_value(texts, values):
    """The known answer 7 has no part in it."""
    assert agreement("numeric", texts) == values


def test_zero_is_a_number_as_any_other():
    answers = MajorityReward(VerifiableConfig(kind="gsm8k"), RandomReward(0))
    assert [answers._answer(f"#### {text}") for text in ("0", "0.0", "$0", "7.0")] == [0, 0, 0, 7]


def test_words_agree_as_the_check_folds_them():
    assert agreement("exact", ["Yes", " yes ", "no"]) == [1, 1, 0]


def test_mathematics_agree_as_the_check_says():
    texts = [r"\\boxed{\\frac12}", r"\\boxed{0.5}", r"\\boxed{x+1}", r"\\boxed{2}"]
    assert agreement("math", [text.replace("\\\\", "\\") for text in texts]) == [1, 1, 0, 0]


def test_each_prompt_has_its_own_plurality_wherever_its_answers_stand():
    first = rollouts(["#### 1", "#### 1", "#### 2"], 1)
    second = rollouts(["#### 2", "#### 2", "#### 1"], 2)
    mixed = [rollout for pair in zip(first, second, strict=True) for rollout in pair]
    with VerifiableReward(VerifiableConfig(kind="numeric")) as check:
        scores = MajorityReward(check.config, check).score(mixed)
    assert [score.value for score in scores] == [1, 1, 1, 1, 0, 0]


def test_the_format_keeps_its_weight():
    values = agreement(
        "numeric",
        ["a\n#### 4", "#### 4", "b\n#### 5"],
        format="hashes",
        format_weight=0.5,
    )
    assert values == [1.5, 1.0, 0.5]


def test_measurements_are_judged_by_the_known_answer():
    with VerifiableReward(VerifiableConfig(kind="numeric")) as check:
        control = FailureLimit(CheckedControl(MajorityReward(check.config, check), check), 0.5)
        asked = rollouts(["#### 4", "#### 4", "#### 7"])
        assert [score.value for score in control.score(asked)] == [1, 1, 0]
        assert [score.value for score in control.judge(asked)] == [0, 0, 1]


@pytest.mark.parametrize(
    ("section", "sentence"),
    [
        ({"reward_source": "majority"}, "compares checked answers"),
        ({"reward_source": "majority", "samples_per_prompt": 2}, "samples_per_prompt = 3 or more"),
        (
            {"reward_source": "majority", "verifiable": {"kind": "code"}},
            "cannot compare two programs",
        ),
    ],
)
def test_settings_without_a_majority_are_refused(section, sentence):
    given = {"verifiable": {"kind": "numeric"}, **section}
    if "samples_per_prompt" not in section and "verifiable" not in section:
        del given["verifiable"]
    with pytest.raises(ConfigError, match=sentence):
        build(Recipe, {"run": "x", "model": {"source": "tiny"}, "grpo": given})


@pytest.mark.parametrize("control", ["random", "majority"])
def test_an_arm_takes_one_key(control):
    recipe = build(
        Recipe,
        {
            "run": "x",
            "model": {"source": "tiny"},
            "grpo": {"verifiable": {"kind": "numeric"}},
            "arms": {control: {"grpo": {"reward_source": control}}},
        },
    )
    assert recipe.section(f"grpo-{control}").reward_source == control


def test_an_arm_is_measured_by_the_known_answers_and_the_page_says_what_it_lacks(tmp_path):
    data = tmp_path / "problems.jsonl"
    rows = [{"question": f"say {n}", "answer": "e"} for n in range(12)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    values = {
        "data": {"path": str(data)},
        "steps": 1,
        "prompts_per_step": 2,
        "samples_per_prompt": 4,
        "max_new_tokens": 4,
        "verifiable": {"kind": "exact"},
        "evaluate": {"prompts": 4, "temperatures": [], "best_of": []},
    }
    arms = {name: {"grpo": {"reward_source": name}} for name in ("random", "majority")}
    run = tmp_path / "run"
    model = {"source": "tiny", "dtype": "float32"}
    run_recipe(build(Recipe, {"run": str(run), "model": model, "grpo": values, "arms": arms}))
    measured = {
        name: RunDirectory(run / name).held_out()[0]
        for name in ("grpo", "grpo-random", "grpo-majority")
    }
    assert measured["grpo"] == measured["grpo-random"] == measured["grpo-majority"]
    assert "correct" in measured["grpo"]
    majority, random = sorted(control_lines(read_journey(run).compared))
    assert majority.startswith("grpo-majority takes away the known answer")
    assert random.startswith("grpo-random takes away all that the reward says")
    page = html.unescape(write_report(run).read_text())
    assert majority in page and random in page
