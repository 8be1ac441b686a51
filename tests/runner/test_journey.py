"""Every stage of a recipe on the tiny model, from rows on disk to a policy that can be loaded, and
started again for free.
"""

import json

import pytest
import torch

from tether.core.errors import ConfigError
from tether.core.rundir import read_json, read_jsonl
from tether.core.types import Prompt, Sampling, user
from tether.runner.assembly import manifest
from tether.runner.assembly.checks import check_inputs
from tether.runner.assembly.roles import encoder_of, load_policy, local_engine
from tether.runner.methods import sampling as online
from tether.runner.planning.devices import gpu
from tether.runner.planning.plan import plan
from tether.runner.run import run_recipe
from tether.settings.reading import build
from tether.settings.recipe import Recipe
from tether.settings.stages import STAGES, making
from tether.watch.report.narrative import conclusion
from tether.watch.report.reading import read_journey

FAST = {"optimizer": {"learning_rate": 1e-2}}
SAMPLED = {"steps": 2, "prompts_per_step": 3, "samples_per_prompt": 2, "max_new_tokens": 8, **FAST}


def lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"path": str(path)}


LETTERS = {"call": "tether.quickstart.judges:letters"}


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    """One section of every stage, each on rows of the kind that it reads."""
    folder = tmp_path_factory.mktemp("journey")
    words = ["one", "two", "three", "four", "five", "six"]
    pairs = [{"prompt": w, "chosen": w + "!", "rejected": "no " + w} for w in words]
    verdicts = [
        {"prompt": w, "completion": w + end, "label": end == "!"}
        for w in words
        for end in ("!", "?")
    ]
    steps = [
        {"prompt": w, "completions": [w, "so", "end"], "labels": [True, n % 2 == 0, n % 2 == 0]}
        for n, w in enumerate(words)
    ]
    problems = [{"question": w, "answer": str(n)} for n, w in enumerate(words)]
    prompts = lines(folder / "prompts.jsonl", [{"prompt": w} for w in words])
    talks = [
        {"messages": [{"role": "user", "content": w}, {"role": "assistant", "content": w}]}
        for w in words
    ]
    held = {"heldout_fraction": 0.0}
    values = {
        "run": str(folder / "run"),
        "model": {"source": "tiny", "dtype": "float32"},
        "sft": {"data": lines(folder / "sft.jsonl", talks), "epochs": 1, **FAST},
        "reward": {"data": lines(folder / "pairs.jsonl", pairs), **held, **FAST},
        "process": {
            "data": lines(folder / "steps.jsonl", steps),
            "delimiters": ["\n"],
            "heldout_fraction": 0.3,
            **FAST,
        },
        "direct": {
            "data": lines(folder / "again.jsonl", pairs),
            "reference_logprobs": "precomputed",
            **held,
            **FAST,
        },
        "kto": {"data": lines(folder / "verdicts.jsonl", verdicts), **held, **FAST},
        "ppo": {
            "data": prompts,
            **SAMPLED,
            "reward_source": "process",
            "step_rewards": True,
            "process_aggregate": "product",
        },
        "grpo": {
            "data": lines(folder / "problems.jsonl", problems),
            "algorithm": "dapo",
            **SAMPLED,
            "reward_source": "verifiable",
            "verifiable": {"kind": "exact", "format_pattern": ".*[a-z].*"},
        },
        "reinforce": {"data": prompts, "algorithm": "rloo", **SAMPLED},
        "distill": {"data": prompts, **SAMPLED, "teacher": {"model": "start", "system": "shout"}},
        "best_of_n": {"data": prompts, **SAMPLED, "reward_source": "random"},
        "online_direct": {"data": prompts, **SAMPLED},
        "pairs": {"data": prompts, "judge": LETTERS, "samples_per_prompt": 2, "max_new_tokens": 8},
        "evaluate": {"data": prompts, "judge": LETTERS, "temperatures": []},
        "rounds": {
            "data": prompts,
            "rounds": 2,
            "samples_per_prompt": 2,
            "max_new_tokens": 8,
            "direct": {**held, **FAST},
        },
    }
    return build(Recipe, values)


def test_every_stage_runs_and_leaves_what_can_be_loaded(recipe, monkeypatch):
    assert tuple(recipe.stages) == tuple(STAGES)
    results = run_recipe(recipe, list(STAGES))
    assert set(results) == set(STAGES) and all(r["peak_rss_bytes"] > 0 for r in results.values())
    base, loaded = load_policy(f"{recipe.run}/sft", recipe.model)
    prompt, sampling = Prompt((user("one"),)), Sampling(max_new_tokens=6, temperature=0.0)
    seen = local_engine(base, loaded).generate([prompt], sampling)[0].rollouts[0].logprobs
    for name in (*making("policy"), "direct", "kto", "rounds"):
        policy, own = load_policy(f"{recipe.run}/{name}")
        assert own.digest == loaded.digest
        told = local_engine(policy, own).generate([prompt], sampling)[0].rollouts[0].logprobs
        assert told != seen, f"{name} has learned nothing"
        assert encoder_of(own).describe() == encoder_of(loaded).describe()
    monkeypatch.setattr(manifest, "open_model", None)
    monkeypatch.setattr(online, "online_stage", None)
    assert run_recipe(recipe, list(STAGES)) == {
        n: read_json(f"{recipe.run}/{n}/summary.json") for n in STAGES
    }


def test_a_stage_may_take_the_process_models_steps(recipe):
    rows = list(read_jsonl(f"{recipe.run}/ppo/metrics.jsonl"))
    assert rows and all(torch.isfinite(torch.tensor(row["reward/proxy"])) for row in rows)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"ppo": {}}, r"ppo.reward_source = 'learned' needs a \[reward\] section"),
        ({"grpo": {"reward_source": "process"}}, r"needs a \[process\] section"),
        ({"grpo": {"reward_source": "verifiable"}}, "a table named verifiable belong together"),
        (
            {"grpo": {"reward_source": "random", "process_aggregate": "min"}},
            "process_aggregate has no effect",
        ),
        (
            {"grpo": {"reward_source": "random", "task": {"name": "x"}}},
            "task makes prompts of reasoning-gym",
        ),
        ({"grpo": {"reward_source": "random", "lora": False}}, "needs adapters"),
        ({"grpo": {"reward_source": "random", "offload": True}}, "there are none"),
        ({"grpo": {"reward_source": "random", "value_init": "reward"}}, "needs a critic"),
        ({"direct": {"offload": True}}, "offload moves a reference of its own"),
        (
            {"direct": {"offload": True, "lora": False, "loss": "simpo"}},
            "offload moves a reference of its own",
        ),
        ({"reinforce": {"algorithm": "ppo"}}, "key 'reinforce.algorithm'"),
    ],
)
def test_sections_that_contradict_each_other_are_one_message(tmp_path, section, message):
    with pytest.raises(ConfigError, match=message):
        check_inputs(build(Recipe, {"run": str(tmp_path), "model": {"source": "tiny"}, **section}))


@pytest.mark.audit
@pytest.mark.parametrize(
    "stage",
    ["direct", "kto", "ppo", "grpo", "reinforce", "best_of_n", "online_direct", "rounds"],
)
def test_dropout_is_refused_where_it_would_never_act(tmp_path, stage):
    section = {} if stage in ("direct", "kto", "rounds") else {"reward_source": "random"}
    if stage == "rounds":
        section = {"method": "spin"}
    values = {"run": str(tmp_path), "model": {"source": "tiny"}}
    assert build(Recipe, {**values, stage: {**section, "lora": {"rank": 4}}})
    with pytest.raises(ConfigError, match=r"lora\.dropout has no effect here"):
        build(Recipe, {**values, stage: {**section, "lora": {"dropout": 0.1}}})
    assert build(
        Recipe,
        {**values, "sft": {"lora": {"dropout": 0.1}}, "reward": {"lora": {"dropout": 0.1}}},
    )


@pytest.mark.audit
@pytest.mark.parametrize(
    ("section", "message"),
    [
        (
            {"reward": {"disentangle_length": 1.0, "lora": {"dropout": 0.1}}},
            "with lora.dropout they would differ",
        ),
        (
            {
                "reward": {},
                "ppo": {"value_init": "reward", "step_rewards": True, "reward_per_token": True},
            },
            "value_init = 'reward' knows whole scores",
        ),
    ],
)
def test_settings_that_would_mislead_are_refused(tmp_path, section, message):
    with pytest.raises(ConfigError, match=message):
        build(Recipe, {"run": str(tmp_path), "model": {"source": "tiny"}, **section})


@pytest.mark.slow
def test_every_stage_can_be_planned(recipe):
    """Memory and time of all sections, for a shape of 135 million parameters on a GPU that no test
    has.
    """
    made = plan(recipe, gpu(80), shape="smollm2-135m")
    assert [stage.name for stage in made.stages] == list(STAGES)
    assert all(
        3e8 < phase.total < 20e9 and phase.seconds > 0
        for stage in made.stages
        for phase in stage.phases
    )


@pytest.mark.parametrize(("longer", "told"), [(True, True), (False, False)])
def test_pairs_that_length_decides_are_told_after_training(tmp_path, longer, told):
    rows = []
    for n in range(40):
        sides = ["yes it is so", "no"] if longer or n % 2 else ["no", "yes it is so"]
        rows.append({"prompt": f"Is it {n}?", "chosen": sides[0], "rejected": sides[1]})
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    section = {"data": {"path": str(tmp_path / "pairs.jsonl")}, "epochs": 1, "loss": "dpo"}
    values = {
        "run": str(tmp_path / "run"),
        "model": {"source": "tiny", "dtype": "float32"},
        "direct": section,
    }
    summary = run_recipe(build(Recipe, values))["direct"]
    assert (
        summary["longer_chosen"]["value"] == (1.0 if longer else 0.5)
        and summary["longer_chosen"]["count"] == 40
    )
    assert (
        any(
            "the longer answer is the preferred one" in w
            for w in conclusion(read_journey(tmp_path / "run")).warnings
        )
        == told
    )
