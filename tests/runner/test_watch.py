"""The detectors in a training: their alarms are written down, and a run does what its recipe says
when one fires.
"""

import pytest

from tether.core.errors import ConfigError
from tether.core.rundir import read_jsonl
from tether.runner.methods import sampling as online
from tether.runner.run import run_recipe
from tether.settings.reading import build
from tether.settings.recipe import Recipe

FAILING = """
def reward(prompts, responses):
    return [None if number % 4 == 0 else float(len(text)) for number, text in enumerate(responses)]
"""


def recipe(folder, **section):
    """A fourth of all scores fails, which the detector `reward_failures` notices as soon as its
    window is full.
    """
    folder.mkdir(exist_ok=True)
    (folder / "mine.py").write_text(FAILING)
    (folder / "prompts.jsonl").write_text("".join(f'{{"prompt": "p{n}"}}\n' for n in range(12)))
    values = {
        **{
            "data": {"path": str(folder / "prompts.jsonl")},
            "steps": 8,
            "prompts_per_step": 4,
            "samples_per_prompt": 4,
        },
        **{
            "max_new_tokens": 6,
            "checkpoint_every": 2,
            "reward_source": "function",
            "optimizer": {"learning_rate": 1e-3},
        },
        **{"function": {"call": f"{folder}/mine.py:reward", "batch": 16}, **section},
    }
    return build(
        Recipe,
        {
            "run": str(folder / "run"),
            "model": {"source": "tiny", "dtype": "float32"},
            "grpo": values,
        },
    )


def coefficients(made):
    return [row["kl/coefficient"] for row in read_jsonl(f"{made.run}/grpo/metrics.jsonl")]


def test_an_alarm_is_written_down_and_training_goes_on(tmp_path):
    made = recipe(tmp_path / "a")
    summary = run_recipe(made, ["grpo"])["grpo"]
    (alarm,) = [a for a in summary["alarms"] if a["detector"] == "reward_failures"]
    assert summary["steps"] == 8 and alarm["value"] == 0.25 and alarm["step"] == 3
    assert list(read_jsonl(f"{made.run}/grpo/alarms.jsonl")) == summary["alarms"]
    rows = list(read_jsonl(f"{made.run}/grpo/metrics.jsonl"))
    assert sum(row["alarms"] for row in rows) == len(summary["alarms"])


def test_an_alarm_may_end_the_training(tmp_path):
    summary = run_recipe(
        recipe(tmp_path / "a", watch={"act": {"reward_failures": "stop"}}),
        ["grpo"],
    )["grpo"]
    assert summary["steps"] == 3


def test_an_alarm_may_raise_the_kl(tmp_path):
    made = recipe(
        tmp_path / "a",
        kl={"coefficient": 0.1},
        watch={"act": {"reward_failures": "raise_kl"}},
    )
    run_recipe(made, ["grpo"])
    assert coefficients(made) == [0.1] * 3 + [0.2] * 5


def test_an_interrupted_run_gives_the_same_alarms_once(tmp_path, monkeypatch):
    settings = {"kl": {"coefficient": 0.1}, "watch": {"act": {"reward_failures": "raise_kl"}}}
    whole, cut = (recipe(tmp_path / name, **settings) for name in ("whole", "cut"))
    run_recipe(whole, ["grpo"])
    observe = online.Guard.observe

    def stops(self, step, *rest):
        if step == 4:
            raise KeyboardInterrupt
        return observe(self, step, *rest)

    monkeypatch.setattr(online.Guard, "observe", stops)
    with pytest.raises(KeyboardInterrupt):
        run_recipe(cut, ["grpo"])
    monkeypatch.setattr(online.Guard, "observe", observe)
    run_recipe(cut, ["grpo"])
    alarms = [list(read_jsonl(f"{made.run}/grpo/alarms.jsonl")) for made in (whole, cut)]
    assert alarms[0] == alarms[1] and alarms[0]
    assert coefficients(cut) == coefficients(whole)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"watch": {"act": {"length": "stop"}}}, "'length', which is no detector"),
        (
            {"watch": {"silent": ["repetition"], "act": {"repetition": "stop"}}},
            "'repetition', which is no detector that is asked",
        ),
        ({"watch": {"act": {"repetition": "raise_kl"}}}, "doubles kl.coefficient, which is 0"),
        ({"watch": {"thresholds": {"repetitions": 0.5}}}, "did you mean 'repetition'"),
    ],
)
def test_actions_that_cannot_be_taken(tmp_path, section, message):
    with pytest.raises(ConfigError, match=message):
        recipe(tmp_path / "a", **section)


def test_a_stage_without_a_tether_cannot_raise_it(tmp_path):
    values = {"reward_source": "random", "watch": {"act": {"repetition": "raise_kl"}}}
    with pytest.raises(ConfigError, match="KL coefficient: use 'stop'"):
        build(Recipe, {"run": str(tmp_path), "model": {"source": "tiny"}, "best_of_n": values})
