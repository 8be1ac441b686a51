"""Every stage, cut and resumed, ends with the same bits as in one go; a planted difference is
found.
"""

import json
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from tether.cli.tools.prove import compare, prove
from tether.core.errors import ConfigError, TrainingError
from tether.settings.reading import build
from tether.settings.recipe import Recipe
from tether.stages.learner.determinism import deterministic

FAST = {"optimizer": {"learning_rate": 1e-2}}
SAMPLED = {"steps": 8, "prompts_per_step": 3, "samples_per_prompt": 2, "max_new_tokens": 6, **FAST}
WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight"]
CLOCK = """
import time
from pathlib import Path
def reward(prompts, responses):
    with Path(__file__).with_name("calls").open("a") as calls:
        calls.write("called\\n")
    return [time.perf_counter() % 1 + len(response) for response in responses]
"""

SWITCH = """
import torch
from pathlib import Path
def reward(prompts, responses):
    with Path(__file__).with_name("seen").open("a") as seen:
        seen.write(f"{torch.are_deterministic_algorithms_enabled()}\\n")
    return [float(len(response)) for response in responses]
"""


def lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"path": str(path)}


@pytest.fixture(scope="module")
def values(tmp_path_factory):
    folder = tmp_path_factory.mktemp("prove")
    pairs = [{"prompt": w, "chosen": w + "!", "rejected": "no " + w} for w in WORDS]
    steps = [
        {"prompt": w, "completions": [w, "so"], "labels": [True, n % 2 == 0]}
        for n, w in enumerate(WORDS)
    ]
    verdicts = [
        {"prompt": w, "completion": w + end, "label": end == "!"}
        for w in WORDS
        for end in ("!", "?")
    ]
    talks = [
        {"messages": [{"role": "user", "content": w}, {"role": "assistant", "content": w}]}
        for w in WORDS
    ]
    prompts, again = (
        lines(folder / "prompts.jsonl", [{"prompt": w} for w in WORDS]),
        lines(folder / "pairs.jsonl", pairs),
    )
    (folder / "clock.py").write_text(CLOCK)
    held = {"heldout_fraction": 0.25}
    return folder, {
        "run": str(folder / "run"),
        "model": {"source": "tiny", "dtype": "float32"},
        "sft": {"data": lines(folder / "sft.jsonl", talks), "epochs": 8, "batch_size": 4, **FAST},
        "reward": {"data": again, **held, "prompts_per_update": 2, "epochs": 4, **FAST},
        "process": {
            "data": lines(folder / "steps.jsonl", steps),
            "delimiters": ["\n"],
            **held,
            **FAST,
            "epochs": 8,
        },
        "direct": {"data": again, "heldout_fraction": 0.0, **FAST, "epochs": 8},
        "kto": {"data": lines(folder / "verdicts.jsonl", verdicts), **held, **FAST, "epochs": 8},
        "ppo": {
            "data": prompts,
            **SAMPLED,
            "epochs": 2,
            "ema_decay": 0.9,
            "evaluate": {"every": 2, "prompts": 4},
        },
        "grpo": {"data": prompts, **SAMPLED, "algorithm": "dapo", "reward_source": "random"},
        "reinforce": {"data": prompts, **SAMPLED, "algorithm": "rloo", "reward_source": "random"},
        "best_of_n": {"data": prompts, **SAMPLED, "reward_source": "random"},
        "online_direct": {"data": prompts, **SAMPLED, "reward_source": "random"},
    }


def recipe(values, *sections, **more):
    return build(Recipe, {key: values[1][key] for key in ("run", "model", *sections)} | more)


LATER = ("process", "direct", "kto", "reinforce", "best_of_n", "online_direct")
"""Whose resume test_exact_resume.py has, too."""


@pytest.mark.parametrize(
    "stage",
    ["sft", "reward", "grpo", *(pytest.param(name, marks=pytest.mark.slow) for name in LATER)],
)
def test_an_interrupted_stage_ends_with_the_same_bits(values, tmp_path, stage):
    found = prove(recipe(values, stage), tmp_path)
    assert {row.what for row in found} >= {"weights and optimizer", "metrics.jsonl"} and all(
        row.count for row in found
    )
    assert [row for row in found if row.difference] == []


def test_a_folder_with_a_proof_is_refused(values, tmp_path):
    """What went on from there would have other steps."""
    (tmp_path / "sft-whole").mkdir()
    with pytest.raises(ConfigError, match="holds a proof of sft"):
        prove(recipe(values, "sft"), tmp_path)


def test_a_stage_on_others_brings_them_along(values, tmp_path):
    found = prove(recipe(values, "sft", "reward", "ppo"), tmp_path, ["ppo"], cuts=(1, 2))
    assert {row.what for row in found} >= {
        "weights and optimizer",
        "metrics.jsonl",
        "samples.jsonl",
        "heldout.jsonl",
    }
    assert [row for row in found if row.difference] == [] and {row.stage for row in found} == {
        "ppo",
    }
    assert (tmp_path / "ground" / "reward" / "summary.json").is_file()


def test_a_reward_that_asks_the_clock_is_found(values, tmp_path):
    section = {
        **values[1]["grpo"],
        "reward_source": "function",
        "function": {"call": f"{values[0]}/clock.py:reward"},
    }
    found = {
        row.what: row.difference
        for row in prove(recipe(values, grpo=section), tmp_path, cuts=(1, 1))
    }
    assert "state.safetensors" in found["weights and optimizer"]
    assert (values[0] / "calls").read_text().count("called") == 4, (
        "two steps each: the second run went on, not from the start"
    )
    assert found["metrics.jsonl"].startswith("row 1, ") and "row 1, " in found["samples.jsonl"]


def test_a_cpu_is_proved_with_the_kernels_of_a_run(values, tmp_path):
    """torch's switch for deterministic kernels is on only where the recipe has it on."""
    (tmp_path / "switch.py").write_text(SWITCH)
    section = {
        **values[1]["grpo"],
        "reward_source": "function",
        "function": {"call": f"{tmp_path}/switch.py:reward"},
    }
    for on in (False, True):
        prove(recipe(values, grpo=section, deterministic=on), tmp_path / str(on), cuts=(1, 1))
        assert set((tmp_path / "seen").read_text().split()) == {str(on)}
        (tmp_path / "seen").unlink()


def test_one_bit_of_one_weight_is_found(tmp_path):
    weights = torch.arange(8.0).reshape(2, 4)
    for name, changed in (
        ("a", weights),
        ("b", torch.nextafter(weights, weights + (weights == 5))),
    ):
        (tmp_path / name).mkdir()
        save_file(
            {"w": changed, "v": torch.tensor([torch.nan, 0.0])},
            tmp_path / name / "state.safetensors",
        )
    # not-a-number is itself here
    assert compare("sft", tmp_path / "a", tmp_path / "a")[0].difference == ""
    assert compare("sft", tmp_path / "a", tmp_path / "b")[0].difference == "state.safetensors: w"
    save_file(
        {"w": weights, "v": torch.tensor([torch.nan, -0.0])},
        tmp_path / "b" / "state.safetensors",
    )
    # equal, but other bits
    assert compare("sft", tmp_path / "a", tmp_path / "b")[0].difference == "state.safetensors: v"


def test_a_stage_that_the_recipe_lacks_cannot_be_proved(values, tmp_path):
    with pytest.raises(ConfigError, match=r"'ppo'.*it has: sft"):
        prove(recipe(values, "sft"), tmp_path, ["ppo"])


def test_a_kernel_without_a_deterministic_variant_is_named_and_all_is_as_before():
    source = SimpleNamespace(index=torch.tensor([0, 0]), value=torch.tensor([1.0, 2.0]))
    with (
        pytest.raises(
            TrainingError,
            match=(
                r"put_ .*has no deterministic "
                r"variant"
            ),
        ),
        deterministic(),
    ):
        torch.zeros(3).put_(source.index, source.value)
    assert not torch.are_deterministic_algorithms_enabled()
    with pytest.raises(RuntimeError, match="mine"), deterministic():
        raise RuntimeError("mine")


def test_a_proof_takes_the_sizes_that_the_run_would_have_on_its_device(
    values,
    tmp_path,
    monkeypatch,
):
    def smaller(given, names):
        assert names == ["sft"]
        sft = given.sft.model_copy(update={"batch_size": 2})
        return given.model_copy(update={"sft": sft})

    monkeypatch.setattr("tether.cli.tools.prove.by_device", smaller)
    prove(recipe(values, "sft"), tmp_path, ["sft"], cuts=(1, 1))
    config = json.loads((tmp_path / "sft-whole" / "config.json").read_text())
    assert config["sft"]["batch_size"] == 2
