"""A recipe with several reward models, from pairs to a policy trained on the most cautious of them;
and their average.
"""

import json
import shutil
import statistics
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.rewards.test_other_tokenizer import renumbered
from transformers import LlamaConfig, LlamaForCausalLM

import tether
from tether.core.errors import ConfigError, DataError, ModelError
from tether.core.rundir import read_json, read_jsonl
from tether.core.types import Comparison, Prompt, Sampling, assistant, user
from tether.data.sources import Quarantine
from tether.models.trunk import Role
from tether.rewards.learned import LearnedReward
from tether.rollout.conversations import as_rollout
from tether.rollout.local import LocalEngine
from tether.runner.assembly import manifest
from tether.runner.assembly.data.rows import load_rows
from tether.runner.assembly.models import open_model
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
    "steps": 2,
    "prompts_per_step": 3,
    "samples_per_prompt": 2,
    "max_new_tokens": 8,
    "engine_rows": 8,
    **FAST,
}
WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
SETTINGS = ModelConfig(source="tiny", dtype="float32")


def recipe(folder, reward, **sections):
    pairs, prompts = folder / "pairs.jsonl", folder / "prompts.jsonl"
    pairs.write_text(
        "".join(
            json.dumps({"prompt": w, "chosen": w + "!", "rejected": "no " + w}) + "\n"
            for w in WORDS
        ),
    )
    prompts.write_text("".join(json.dumps({"prompt": w}) + "\n" for w in WORDS))
    values = {
        "run": str(folder / "run"),
        "model": {"source": "tiny", "dtype": "float32"},
        "reward": {
            "data": {"path": str(pairs)},
            "heldout_fraction": 0.4,
            "epochs": 3,
            "lora": {"rank": 4, "last_layers": 1},
            **FAST,
            **reward,
        },
        **{
            name: {"data": {"path": str(prompts)}, **SAMPLED, **values}
            for name, values in sections.items()
        },
    }
    return build(Recipe, values)


@pytest.fixture(scope="module")
def ensemble(tmp_path_factory):
    made = recipe(
        tmp_path_factory.mktemp("ensemble"),
        {"members": 3},
        grpo={"reward_combine": "worst"},
        best_of_n={"reward_combine": "uncertainty", "uncertainty_weight": 0.5, "roles": "separate"},
        ppo={},
    )
    return made, run_recipe(made, ("reward", "grpo", "best_of_n", "ppo"))


def rollouts(role, loaded):
    engine = LocalEngine(role, encoder_of(loaded), max_rows=8, context_length=256)
    groups = engine.generate(
        [Prompt((user(w),)) for w in WORDS[:3]],
        Sampling(max_new_tokens=6),
        num_samples=2,
    )
    return [rollout for group in groups for rollout in group.rollouts]


def sampled():
    loaded = open_model(SETTINGS)
    return rollouts(Role(loaded.model), loaded)


def test_a_test_that_nothing_can_be_measured_on_is_refused_before_the_training(tmp_path):
    ties = tmp_path / "ties.jsonl"
    ties.write_text(json.dumps({"prompt": "q", "chosen": "a", "rejected": "b", "tie": True}))
    rows = [{"prompt": f"q{n}", "chosen": "yes " * (n + 1), "rejected": "no"} for n in range(8)]
    with pytest.raises(DataError, match=r"no pair of reward\.test\.ties can be scored"):
        tether.reward(
            {"source": "tiny"},
            rows,
            run=str(tmp_path / "run"),
            test={"ties": {"path": str(ties)}},
            epochs=1,
            progress=False,
        )
    assert not (tmp_path / "run/reward/metrics.jsonl").exists()


def test_the_summary_says_what_each_member_and_all_together_are_worth(ensemble):
    made, results = ensemble
    found = results["reward"]
    assert found["members"] == len(found["member_accuracy"]) == 3
    assert 0 <= found["heldout_accuracy"]["low"] <= found["heldout_accuracy"]["value"] <= 1
    assert (
        found["heldout_accuracy"]["count"]
        == found["num_heldout_pairs"]
        == len(WORDS) - found["num_pairs"]
        == 3
    )
    assert (
        found["spread"] > 0.01
        and -1 <= found["correlation"]["lowest"] <= found["correlation"]["mean"] < 1
    )
    for number in range(3):
        member = read_json(f"{made.run}/reward/member-{number}/summary.json")
        assert member["heldout_accuracy"]["value"] == found["member_accuracy"][number]
    weights = [
        load_file(f"{made.run}/reward/member-{n}/model/head.safetensors")["linear.weight"]
        for n in range(3)
    ]
    assert not torch.equal(weights[0], weights[1]) and not torch.equal(weights[1], weights[2])


def test_each_members_part_is_the_score_of_its_folder_loaded_alone(ensemble):
    made, _ = ensemble
    given = sampled()
    found = learned_reward(Path(made.run) / "reward" / "model", SETTINGS).score(given)
    for number in range(3):
        (role,), loaded = load_scorer(
            Path(made.run) / "reward" / f"member-{number}" / "model",
            SETTINGS,
        )
        expected = [s.value for s in LearnedReward(role, encoder_of(loaded)).score(given)]
        assert [s.parts[f"member_{number}"] for s in found] == pytest.approx(expected, abs=1e-4)


def test_members_speak_on_one_scale(ensemble):
    """Mean 0 and deviation 1 over the responses that all members were trained on, whatever each
    learned.
    """
    made, _ = ensemble
    rows = load_rows(made.reward.data, Comparison, Quarantine(None))
    scales = []
    for number in range(3):
        (role,), loaded = load_scorer(
            Path(made.run) / "reward" / f"member-{number}" / "model",
            SETTINGS,
        )
        stage = RewardModeling(made.reward, role, encoder_of(loaded))
        values = [value for row in stage.scores(stage.split(rows).train) for value in row]
        assert statistics.fmean(values) == pytest.approx(0, abs=1e-4) and statistics.pstdev(
            values,
        ) == pytest.approx(1, abs=1e-4)
        scales.append(float(role.head.scale))
    assert len(set(scales)) == 3


def test_the_policy_is_trained_on_the_combination_and_the_spread_is_recorded(ensemble):
    made, results = ensemble
    for method in ("grpo", "ppo"):
        rows = list(read_jsonl(f"{made.run}/{method}/metrics.jsonl"))
        assert len(rows) == 2 and all(row["reward/spread"] > 0 for row in rows)
    worst, mean = (
        next(read_jsonl(f"{made.run}/{method}/metrics.jsonl"))["reward/proxy"]
        for method in ("grpo", "ppo")
    )
    assert worst < mean  # of the same samples: the first step's policy is the model itself
    assert results["best_of_n"]["steps"] == 2


def test_started_again_it_costs_nothing(ensemble, monkeypatch):
    made, results = ensemble
    monkeypatch.setattr(manifest, "open_model", None)
    monkeypatch.setattr(online, "online_stage", None)
    again = run_recipe(made, tuple(results))
    assert again == {name: read_json(f"{made.run}/{name}/summary.json") for name in results}


def test_a_stage_that_was_killed_goes_on_with_the_member_it_was_at(ensemble, tmp_path):
    whole, results = ensemble
    made = recipe(tmp_path, {"members": 3})
    total = results["reward"]["updates"]
    seen = []

    def killer(name):
        def progress(done, count, metrics):
            assert count == 3 * total
            seen.append(done)
            if done == total + 1:
                raise KeyboardInterrupt

        return progress

    with pytest.raises(KeyboardInterrupt):
        run_recipe(made, ("reward",), killer)
    first = (tmp_path / "run" / "reward" / "member-0" / "summary.json").stat().st_mtime_ns
    again = run_recipe(made, ("reward",))["reward"]
    assert (tmp_path / "run" / "reward" / "member-0" / "summary.json").stat().st_mtime_ns == first
    assert again["heldout_accuracy"] == results["reward"]["heldout_accuracy"]
    assert again["correlation"]["mean"] == pytest.approx(
        results["reward"]["correlation"]["mean"],
        abs=1e-5,
    )
    for number in range(3):
        ours, theirs = (
            load_file(f"{r.run}/reward/member-{number}/model/adapter/adapter_model.safetensors")
            for r in (made, whole)
        )
        assert ours.keys() == theirs.keys() and all(torch.equal(ours[k], theirs[k]) for k in ours)


def test_one_member_is_what_it_always_was_and_the_first_of_several(ensemble, tmp_path):
    made = recipe(tmp_path, {}, grpo={})
    found = run_recipe(made, ("reward", "grpo"))
    folder = tmp_path / "run" / "reward"
    assert {p.name for p in folder.iterdir() if not p.name.startswith("quarantine")} - {
        "alarms.jsonl",
    } == {*("config.json", "manifest.json", "metrics.jsonl", "model", "summary.json")}
    assert {p.name for p in (folder / "model").iterdir()} == {
        "adapter",
        "head.safetensors",
        "role.json",
        "trained_prompts.txt",
    }
    assert not {"members", "spread", "member_accuracy"} & found["reward"].keys()
    assert not any(
        "reward/spread" in row for row in read_jsonl(folder.parent / "grpo" / "metrics.jsonl")
    )
    first = f"{ensemble[0].run}/reward/member-0"
    assert not Path(first, "checkpoints").exists()
    assert [r["loss"] for r in read_jsonl(folder / "metrics.jsonl")] == [
        r["loss"] for r in read_jsonl(f"{first}/metrics.jsonl")
    ]
    ours, theirs = (
        load_file(f"{f}/model/adapter/adapter_model.safetensors") for f in (folder, first)
    )
    assert all(torch.equal(ours[k], theirs[k]) for k in ours)


def test_averaged_members_score_as_one_model_that_anything_can_load(tmp_path):
    made = recipe(
        tmp_path,
        {"members": 3, "average": True, "keep_checkpoints": 2, "checkpoint_every": 1},
        ppo={"value_init": "reward"},
    )
    found = run_recipe(made, ("reward", "ppo"))
    folder = tmp_path / "run" / "reward"
    assert len(list((folder / "member-1" / "checkpoints").iterdir())) == 2
    assert not (folder / "model" / "ensemble.json").exists()
    assert read_json(folder / "model" / "adapter" / "adapter_config.json")["r"] == 12
    assert (
        found["reward"]["heldout_accuracy"]["count"] == 3
        and len(found["reward"]["ensemble"]["member_accuracy"]) == 3
    )
    (role,), loaded = load_scorer(folder / "model", SETTINGS)
    base = open_model(SETTINGS).model
    for number in range(3):  # the mean of the members' weights, put into a model without adapters
        (member,), _ = load_scorer(folder / f"member-{number}" / "model", SETTINGS)
        for name, layer in member.causal_model.named_modules():
            if hasattr(layer, "get_delta_weight"):
                base.get_submodule(name).weight.data += layer.get_delta_weight("reward") / 3
    plain = LearnedReward(Role(base, None, role.head), encoder_of(loaded)).score(sampled())
    assert [
        s.value for s in LearnedReward(role, encoder_of(loaded)).score(sampled())
    ] == pytest.approx([s.value for s in plain], abs=1e-4)
    rows = list(read_jsonl(f"{made.run}/ppo/metrics.jsonl"))
    assert len(rows) == 2 and "reward/spread" not in rows[0]


@pytest.mark.parametrize("kind", ["rslora", "dora"])
def test_an_average_that_was_killed_between_members_is_the_average_of_the_whole_run(tmp_path, kind):
    """Members that are read from their folders count as those that have just been trained, in every
    kind of adapter.
    """
    section = {
        "members": 2,
        "average": True,
        "disentangle_length": 1.0,
        "lora": {"rank": 2, kind: True},
        "epochs": 1,
    }
    (tmp_path / "whole").mkdir()
    (tmp_path / "cut").mkdir()
    whole, cut = (recipe(tmp_path / name, section) for name in ("whole", "cut"))
    results = run_recipe(whole, ("reward",))["reward"]

    def killer(name):
        def progress(done, count, metrics):
            if done > count // 2:
                raise KeyboardInterrupt

        return progress

    with pytest.raises(KeyboardInterrupt):
        run_recipe(cut, ("reward",), killer)
    assert Path(cut.run, "reward", "member-0", "summary.json").is_file()
    assert run_recipe(cut, ("reward",))["reward"]["heldout_accuracy"] == results["heldout_accuracy"]
    for name in ("adapter/adapter_model.safetensors", "head.safetensors"):
        ours, theirs = (load_file(f"{made.run}/reward/model/{name}") for made in (cut, whole))
        assert ours.keys() == theirs.keys() and all(
            torch.allclose(ours[k], theirs[k], atol=1e-6) for k in ours
        )


@pytest.mark.parametrize("combine", ["mean", pytest.param("worst", marks=pytest.mark.slow)])
def test_a_student_says_what_its_teachers_said_together(tmp_path, combine):
    made = recipe(
        tmp_path,
        {"members": 3, "distill": combine, "epochs": 40, "heldout_fraction": 0.2},
        ppo={},
    )
    found = run_recipe(made, ("reward", "ppo"))
    folder = tmp_path / "run" / "reward"
    assert (
        not (folder / "model" / "ensemble.json").exists()
        and len(found["reward"]["ensemble"]["member_accuracy"]) == 3
    )
    rollouts = [
        as_rollout((user(w), assistant(t)), encoder_of(open_model(SETTINGS)))
        for w in WORDS
        for t in (w + "!", "no " + w)
    ]

    def scores(path):
        return torch.tensor([s.value for s in learned_reward(path, SETTINGS).score(rollouts)])

    teachers = torch.stack([scores(folder / f"member-{n}" / "model") for n in range(3)])
    together = teachers.mean(0) if combine == "mean" else teachers.amin(0)
    student = scores(folder / "model")
    off = (student - together).abs()  # of two held-out words a student may know less
    assert float(off.median()) < 0.05 and float(off.sort().values[:14].mean()) < 0.1


def test_a_smaller_student_learns_the_scores_of_a_teacher_with_other_tokens(tmp_path):
    large, small = tmp_path / "large", tmp_path / "small-base"
    large.mkdir()
    run_recipe(recipe(large, {"epochs": 30}), ("reward",))
    tokenizer = open_model(SETTINGS).tokenizer
    renumbered().save_pretrained(small)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(small)
    settings = ModelConfig(source=str(small), dtype="float32")
    how = {"teacher": str(large / "run"), "epochs": 60, "lora": False, "heldout_fraction": 0.0}
    made = recipe(tmp_path, how, ppo={"steps": 1, "roles": "separate"}).model_copy(
        update={"model": settings},
    )
    found = run_recipe(made, ("reward", "ppo"))
    assert found["reward"]["unscored"] == 0

    def scores(path, model):
        rows = [
            as_rollout((user(w), assistant(t)), encoder_of(open_model(model)))
            for w in WORDS
            for t in (w + "!", "no " + w)
        ]
        return torch.tensor([s.value for s in learned_reward(path, model).score(rows)])

    taught = scores(large / "run" / "reward" / "model", SETTINGS)
    off = (taught - scores(tmp_path / "run" / "reward" / "model", settings)).abs()
    assert float(taught.std()) > 0.5
    assert float(off.mean()) < 0.2 * float(taught.std())


def test_a_teacher_that_is_not_there_is_refused_before_the_first_stage(tmp_path):
    with pytest.raises(ConfigError, match=r"reward.teacher = '.*nowhere'"):
        run_recipe(recipe(tmp_path, {"teacher": str(tmp_path / "nowhere")}), ("reward",))


@pytest.mark.parametrize("keep", [1, 2])
def test_a_students_checkpoint_goes_when_its_model_is_saved(tmp_path, keep):
    """Several were asked for, and stay."""
    how = {"members": 2, "distill": "mean", "epochs": 1, "checkpoint_every": 1}
    run_recipe(recipe(tmp_path, {**how, "keep_checkpoints": keep}), ("reward",))
    left = {path.parent.name for path in (tmp_path / "run" / "reward").rglob("checkpoints")}
    assert (tmp_path / "run" / "reward" / "student" / "summary.json").is_file()
    assert left == (set() if keep == 1 else {"student", "member-0", "member-1"})


def test_a_member_that_was_changed_is_noticed(ensemble, tmp_path):
    copied = tmp_path / "reward"
    shutil.copytree(f"{ensemble[0].run}/reward", copied)
    assert len(load_scorer(copied / "model", SETTINGS)[0]) == 3
    shutil.copy(
        copied / "member-0" / "model" / "head.safetensors",
        copied / "member-1" / "model" / "head.safetensors",
    )
    with pytest.raises(ModelError, match="member-1/model has changed"):
        load_scorer(copied / "model", SETTINGS)


@pytest.mark.parametrize(
    ("reward", "grpo", "message"),
    [
        ({}, {"reward_combine": "worst"}, "reward_combine has no effect on one reward model"),
        (
            {"members": 2, "average": True},
            {"reward_combine": "worst"},
            "reward_combine has no effect on one reward model",
        ),
        ({"members": 2}, {"uncertainty_weight": 0.2}, "uncertainty_weight has no effect without"),
        (
            {"members": 2},
            {"reward_combine": "mean", "reward_source": "random"},
            "reward_combine has no effect without",
        ),
        ({"average": True}, {}, "average has no effect on one model"),
        ({"members": 2, "lora": False}, {}, "adapters on one trunk"),
        ({"distill": "mean"}, {}, "distill has no effect on one model"),
        ({"members": 2, "distill": "mean", "average": True}, {}, "choose one"),
        ({"members": 2, "distill": "mean", "disentangle_length": 1.0}, {}, "no second head"),
        ({"members": 2, "teacher": "large"}, {}, "learned by one model"),
        (
            {"members": 2, "distill": "worst"},
            {"reward_combine": "worst"},
            "reward_combine has no effect on one reward model",
        ),
        ({}, {"reward_per_token": True}, "needs reward_source = 'learned' and step_rewards"),
        ({}, {"reward_per_token": True, "step_rewards": True}, "has its own baseline"),
        ({}, {"step_rewards": True}, "reward_source = 'learned' scores whole responses"),
        (
            {},
            {"step_rewards": True, "reward_source": "random"},
            "reward_source = 'random' scores whole responses, so that step_rewards finds no steps",
        ),
        ({"disentangle_length": 1.0, "head_dropout": 0.1}, {}, "scores every response twice"),
    ],
)
def test_options_without_effect_are_errors(tmp_path, reward, grpo, message):
    with pytest.raises(ConfigError, match=message):
        recipe(tmp_path, reward, grpo=grpo)


def test_a_value_cannot_start_as_a_copy_of_several_models(tmp_path):
    with pytest.raises(ConfigError, match=r"ppo.value_init = 'reward'"):
        recipe(tmp_path, {"members": 2}, ppo={"value_init": "reward"})
