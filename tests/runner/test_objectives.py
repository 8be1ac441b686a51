"""A recipe with two objectives, from their pairs to policies held to one of them."""

import json
import statistics
from pathlib import Path

import pytest

from tether.core.errors import ConfigError, DataError, ModelError
from tether.core.rundir import read_json, read_jsonl, write_json
from tether.core.types import Comparison
from tether.data.sources import Quarantine
from tether.runner.assembly import manifest
from tether.runner.assembly.checks import check_inputs
from tether.runner.assembly.data.rows import load_rows
from tether.runner.assembly.rewards import learned_reward
from tether.runner.assembly.roles import encoder_of, load_scorer
from tether.runner.methods import sampling as online
from tether.runner.run import run_recipe
from tether.settings.model import ModelConfig
from tether.settings.reading import build
from tether.settings.recipe import Recipe
from tether.stages.reward import RewardModeling

FAST = {"optimizer": {"learning_rate": 1e-2}}
SAMPLED = {
    "steps": 4,
    "prompts_per_step": 3,
    "samples_per_prompt": 2,
    "max_new_tokens": 8,
    "engine_rows": 8,
    **FAST,
}
WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
SETTINGS = ModelConfig(source="tiny", dtype="float32")
ASKED = {"helpful": {"weight": 1.0}, "safe": {"at_least": 3.0, "rate": 0.2}}


def rows(path, made):
    path.write_text("".join(json.dumps(row) + "\n" for row in made))
    return {"path": str(path)}


def recipe(folder, reward=None, **sections):
    kind = rows(
        folder / "helpful.jsonl",
        [{"prompt": w, "chosen": w + "!", "rejected": "no " + w} for w in WORDS],
    )
    safe = rows(
        folder / "safe.jsonl",
        [{"prompt": w, "chosen": "no " + w, "rejected": "zzz"} for w in WORDS],
    )
    prompts = rows(folder / "prompts.jsonl", [{"prompt": w} for w in WORDS])
    learned = {
        "objectives": {"helpful": kind, "safe": safe},
        "heldout_fraction": 0.4,
        "epochs": 2,
        **FAST,
    }
    learned |= {"lora": {"rank": 4, "last_layers": 1}, **(reward or {})}
    values = {
        "run": str(folder / "run"),
        "model": {"source": "tiny", "dtype": "float32"},
        "reward": learned,
    }
    for name, section in sections.items():
        values[name] = {"data": prompts, "objectives": ASKED, **SAMPLED, **section}
        values[name] = {key: value for key, value in values[name].items() if value is not None}
    return build(Recipe, values)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("objectives")
    made = recipe(folder, grpo={"checkpoint_every": 2}, best_of_n={"roles": "separate", "steps": 2})
    return made, run_recipe(made, ("reward", "grpo", "best_of_n"))


def course(run, stage="grpo"):
    return list(read_jsonl(f"{run}/{stage}/metrics.jsonl"))


def test_each_objective_is_a_reward_stage_of_its_own_comparisons(whole):
    made, results = whole
    for name in ("helpful", "safe"):
        own = read_json(f"{made.run}/reward/{name}/summary.json")
        assert (
            own["heldout_accuracy"] == results["reward"][f"{name}/heldout_accuracy"]
            and own["num_pairs"] == 7
        )
        assert read_json(f"{made.run}/reward/{name}/config.json")["reward"]["data"][
            "path"
        ].endswith(f"{name}.jsonl")
    assert (Path(made.run) / "reward" / "model" / "objectives.json").is_file()


def test_objectives_speak_on_one_scale(whole):
    """Mean 0 and deviation 1 over the held-out responses of each, whatever each learned."""
    made, _ = whole
    for known in read_json(f"{made.run}/reward/model/objectives.json")["members"]:
        (role,), loaded = load_scorer(Path(made.run) / "reward" / known["name"] / "model", SETTINGS)
        stage = RewardModeling(made.reward, role, encoder_of(loaded))
        pairs = load_rows(made.reward.objectives[known["name"]], Comparison, Quarantine(None))
        values = [
            (v - known["mean"]) / known["deviation"]
            for row in stage.scores(stage.split(pairs).test)
            for v in row
        ]
        assert statistics.fmean(values) == pytest.approx(0, abs=1e-4) and statistics.pstdev(
            values,
        ) == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize("stage", ["grpo", "best_of_n"])
def test_the_multiplier_follows_the_violations_of_the_steps_before(whole, stage):
    """Their sum times the rate; and a step's reward is the Lagrangian of its means."""
    found, violations = course(whole[0].run, stage), 0.0
    for row in found:
        multiplier = row["objective/safe_multiplier"]
        assert multiplier == pytest.approx(0.2 * violations)
        mean = (row["objective/helpful"] + multiplier * row["objective/safe"]) / (1 + multiplier)
        assert row["reward/proxy"] == pytest.approx(mean)
        violations += 3.0 - row["objective/safe"]
    assert found[-1]["objective/safe_multiplier"] > found[0]["objective/safe_multiplier"] == 0


def test_a_killed_run_goes_on_with_the_same_multipliers_to_the_bit(whole, tmp_path):
    made = recipe(tmp_path, grpo={"checkpoint_every": 2})

    def killer(name):
        def progress(done, total, metrics):
            if name == "grpo" and done == 3:
                raise KeyboardInterrupt

        return progress

    with pytest.raises(KeyboardInterrupt):
        run_recipe(made, ("reward", "grpo"), killer)
    saved = read_json(tmp_path / "run" / "grpo" / "checkpoints" / "step-000002" / "state.json")
    assert saved["reward"]["multipliers"]["safe"] > 0
    run_recipe(made, ("grpo",))
    keys = ("objective/safe_multiplier", "objective/safe", "objective/helpful", "reward/proxy")
    ours, theirs = (
        [[row[key] for key in keys] for row in course(run)] for run in (made.run, whole[0].run)
    )
    assert ours == theirs and len(ours) == 4


def test_measurements_on_held_out_prompts_move_no_multiplier(whole, tmp_path):
    data = rows(tmp_path / "others.jsonl", [{"prompt": w + " more"} for w in WORDS[:3]])
    made = recipe(tmp_path, grpo={"evaluate": {"every": 1, "data": data}})
    results = run_recipe(made, ("reward", "grpo"))
    key = "objective/safe_multiplier"
    assert [row[key] for row in course(made.run)] == [row[key] for row in course(whole[0].run)]
    assert {"helpful", "safe"} <= results["grpo"]["heldout"].keys()
    assert all("heldout/safe" in row for row in course(made.run))
    assert all(
        row["heldout/score"] == pytest.approx(row["heldout/helpful"]) for row in course(made.run)
    )


def test_started_again_it_costs_nothing(whole, monkeypatch):
    made, results = whole
    monkeypatch.setattr(manifest, "open_model", None)
    monkeypatch.setattr(online, "online_stage", None)
    assert run_recipe(made, tuple(results)) == {
        n: read_json(f"{made.run}/{n}/summary.json") for n in results
    }


def test_a_policy_may_be_trained_later_on_what_the_run_has(whole):
    values = whole[0].model_dump(mode="json", exclude_unset=True)
    del values["reward"]
    check_inputs(build(Recipe, values))
    values["grpo"]["objectives"] = {"helpful": {"weight": 1.0}, "polite": {"weight": 1.0}}
    with pytest.raises(
        ConfigError,
        match=r"helpful, polite.*helpful, safe",
    ):
        check_inputs(build(Recipe, values))


def test_a_stage_of_one_reward_refuses_several_objectives(whole):
    with pytest.raises(
        ConfigError,
        match=r"one reward.*\[reward.objectives\]",
    ):
        learned_reward(Path(whole[0].run) / "reward" / "model", SETTINGS)


def test_an_objective_that_was_changed_is_noticed(whole, tmp_path):
    known = read_json(f"{whole[0].run}/reward/model/objectives.json")["members"]
    moved = [{**k, "folder": f"{whole[0].run}/reward/{k['name']}/model"} for k in known]
    write_json(
        tmp_path / "objectives.json",
        {"members": [{**moved[0], "digest": moved[1]["digest"]}, moved[1]]},
    )
    with pytest.raises(ModelError, match="helpful/model has changed"):
        load_scorer(tmp_path, SETTINGS)


def test_objectives_without_held_out_rows_are_refused_before_training(tmp_path):
    made = recipe(tmp_path, {"heldout_fraction": 0.001})
    with pytest.raises(DataError, match=r"reward\.objectives\.helpful: no row"):
        run_recipe(made, ("reward",))
    assert not (tmp_path / "run" / "reward" / "helpful").exists()


@pytest.mark.parametrize(
    ("reward", "grpo", "message"),
    [
        (
            {},
            {"objectives": None},
            r"\[grpo\] takes one reward, and \[reward.objectives\] has "
            r"several",
        ),
        (
            {"objectives": None, "data": {"path": "."}},
            {},
            "names helpful, safe, and .* has none",
        ),
        (
            {},
            {"objectives": {"helpful": {"weight": 1.0}, "polite": {"weight": 1.0}}},
            "has helpful, safe",
        ),
        ({}, {"objectives": {"helpful": {"weight": 1.0}}}, "at least 2 items"),
        (
            {},
            {"objectives": {n: {"at_least": 0.0} for n in ("helpful", "safe")}},
            "leave nothing to raise",
        ),
        (
            {},
            {"objectives": {"helpful": {"weight": 1.0, "at_least": 0.0}, "safe": {"weight": 1.0}}},
            "give one of both",
        ),
        ({}, {"reward_combine": "mean"}, "reward_combine has no effect on objectives"),
        ({}, {"reward_source": "random"}, "objectives has no effect without"),
        ({}, {"step_rewards": True}, "a sum of objectives scores whole responses"),
        ({}, {"evaluate": {"keep": "best"}}, "see the weighted sum alone"),
        ({}, {"evaluate": {"stop": True}}, "see the weighted sum alone"),
        ({"data": {"path": "."}}, {}, "data has no effect with objectives"),
        ({"test": {"a": {"path": "."}}}, {}, "test has no effect with objectives"),
        ({"members": 2}, {}, "members and objectives do not go together"),
        ({"lora": False}, {}, "adapters on one trunk"),
        ({"test_share": 0.2}, {}, "test_share has no effect with objectives"),
        ({"heldout_fraction": 0.0}, {}, "heldout_fraction must be above 0"),
        (
            {"objectives": {"score": {"path": "."}, "safe": {"path": "."}}},
            {},
            "cannot be called 'score'",
        ),
        ({"objectives": {"../x": {"path": "."}, "safe": {"path": "."}}}, {}, "match pattern"),
    ],
)
def test_options_without_effect_are_errors(tmp_path, reward, grpo, message):
    if reward.get("objectives", ()) is None:
        reward = {"data": reward["data"], "objectives": None}
    with pytest.raises(ConfigError, match=message):
        recipe(tmp_path, reward, grpo=grpo)


def test_a_value_cannot_start_as_a_copy_of_several_models_nor_rounds_be_ordered_by_them(tmp_path):
    with pytest.raises(ConfigError, match="value_init = 'reward' copies"):
        recipe(tmp_path, ppo={"value_init": "reward", "samples_per_prompt": None})
    with pytest.raises(ConfigError, match=r"\[rounds\] takes one reward"):
        build(
            Recipe,
            {**recipe(tmp_path).model_dump(mode="json", exclude_unset=True), "rounds": {}},
        )
