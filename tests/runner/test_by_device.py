"""Sizes of passes that a recipe leaves open: a card's, a CPU's, and those of a run that goes on."""

import json

import pytest
import torch
from tests.runner.journeys import VALUES

from tether.runner import by_device
from tether.runner.by_device import PLAN_SHARE, sized
from tether.runner.by_device import by_device as for_device
from tether.runner.planning.devices import gpu
from tether.runner.planning.plan import plan
from tether.settings.reading import build
from tether.settings.recipe import Recipe

POLICY = {"reward_source": "random", "prompts_per_step": 64, "samples_per_prompt": 4}
SMALL = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 8000,
}


@pytest.fixture
def shape(tmp_path):
    """A model of two layers, whose plans are quick."""
    path = tmp_path / "shape" / "config.json"
    path.parent.mkdir()
    path.write_text(json.dumps(SMALL))
    return str(path.parent)


def recipe(folder, **sections):
    values = {"run": str(folder / "run"), "model": {"source": "tiny"}, **sections}
    return build(Recipe, values)


def chosen(folder, memory, **sections):
    made = recipe(folder, **sections)
    return sized(made, made.stages, gpu(memory), {}, shape=str(folder / "shape"))


@pytest.mark.usefixtures("shape")
def test_a_large_card_takes_large_passes(tmp_path):
    made = chosen(
        tmp_path,
        80,
        sft={"row_tokens": 1024},
        direct={},
        grpo=POLICY,
        evaluate=VALUES["evaluate"],
    )
    assert made.sft.rows_per_micro_batch * made.sft.row_tokens == 8192
    assert made.direct.micro_batch_tokens == made.grpo.micro_batch_tokens == 8192
    assert made.grpo.engine_rows == made.evaluate.engine_rows == 256


@pytest.mark.parametrize(("tokens", "least"), [(8192, 8192), (4096, 4096), (4096, 2048)])
def test_the_largest_that_fits_is_chosen(tmp_path, shape, tokens, least):
    """On a card that has just room for the plan of so many tokens, and on one that has not."""
    alone = recipe(tmp_path, direct={"micro_batch_tokens": tokens})
    peak = plan(alone, gpu(80), shape=shape).peak / 1e9
    memory = peak / PLAN_SHARE * (1.001 if least == tokens else 0.999)
    assert chosen(tmp_path, memory, direct={}).direct.micro_batch_tokens == least


@pytest.mark.usefixtures("shape")
def test_named_sizes_stay_and_arms_follow_their_stage(tmp_path):
    made = chosen(
        tmp_path,
        80,
        grpo={**POLICY, "engine_rows": 32},
        arms={"long": {"grpo": {"max_new_tokens": 128}}},
    )
    assert (made.grpo.engine_rows, made.grpo.micro_batch_tokens) == (32, 8192)
    arm = made.section("grpo-long")
    assert (arm.engine_rows, arm.micro_batch_tokens, arm.max_new_tokens) == (32, 8192, 128)
    served = chosen(tmp_path, 80, grpo={**POLICY, "engine": {"kind": "served"}})
    assert (served.grpo.engine_rows, served.grpo.micro_batch_tokens) == (64, 8192)
    ranks = chosen(tmp_path, 80, grpo=POLICY, learner={"ranks": 2})
    assert (ranks.grpo.engine_rows, ranks.grpo.micro_batch_tokens) == (256, 2048)


def test_a_cpu_keeps_the_defaults(tmp_path):
    made = recipe(tmp_path, grpo=POLICY)
    assert for_device(made, made.stages) is made


@pytest.mark.parametrize(
    ("home", "sections"),
    [
        ("", {}),
        ("round-01", {"pairs": VALUES["pairs"], "repeat": 2}),
        ("sweep/seed=1", {"sweep": {"seed": [0, 1]}}),
        (
            "sweep/seed=1/round-01",
            {"pairs": VALUES["pairs"], "repeat": 2, "sweep": {"seed": [0, 1]}},
        ),
    ],
)
def test_a_run_that_goes_on_keeps_what_it_began_with(tmp_path, monkeypatch, home, sections):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(by_device, "sized", None)
    made = recipe(tmp_path, grpo=POLICY, **sections)
    folder = tmp_path / "run" / home / "grpo"
    folder.mkdir(parents=True)
    noted = {"grpo": {"engine_rows": 128, "micro_batch_tokens": 4096}}
    (folder / "config.json").write_text(json.dumps(noted))
    again = for_device(made, ["grpo"])
    assert (again.grpo.engine_rows, again.grpo.micro_batch_tokens) == (128, 4096)
    assert made.grpo.engine_rows == 64
