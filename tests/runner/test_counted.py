"""Plans for a GPU beside bytes that the stages' own code holds, counted on shapes.

The count itself reproduces what an H100 reported of the same passes.
"""

import pytest
import torch
from tests.runner import counted
from transformers import LlamaConfig

from benchmarks import gpu
from tether.core.types import Prompt, Sampling, user
from tether.models.trunk import Role
from tether.rollout.local import LocalEngine
from tether.runner.planning.plan import SHAPES
from tether.runner.planning.speeds import RowSizes
from tether.settings.model import LoraConfig
from tether.stages.learner.planner import shape_adapter, shape_model

SHALLOW = {
    name: {**SHAPES[name], "num_hidden_layers": 2}
    for name in ("qwen2.5-1.5b", "llama-2-7b", "llama-3.1-8b")
}
ROWS = RowSizes(prompt=128, answer=128)
CASES = {
    "sft": ("qwen2.5-1.5b", 80, "sft", {}),
    "sft, single rows": (
        "qwen2.5-1.5b",
        80,
        "sft",
        {"sft": {"packing": False, "rows_per_micro_batch": 16}},
    ),
    "sft, all weights": ("qwen2.5-1.5b", 80, "sft", {"sft": {"lora": False}}),
    "reward": ("llama-2-7b", 24, "reward", {}),
    "direct": ("llama-3.1-8b", 24, "direct", {"direct": {"prompts_per_update": 32}}),
    "ppo": ("llama-3.1-8b", 80, "ppo", {}),
    "grpo": ("llama-3.1-8b", 24, "grpo", {"grpo": {"prompts_per_step": 64, "engine_rows": 512}}),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_plan_counts_what_the_stage_holds(case):
    shape, card, name, sections = CASES[case]
    made, planned, there = counted.planned_beside_counted(
        counted.recipe_of(card, **sections),
        name,
        SHALLOW[shape],
        ROWS,
        card,
    )
    assert max(planned.values()) == pytest.approx(max(there.values()), rel=0.02)
    if "rollout" in there:
        assert there["rollout"] <= 1.001 * planned["rollout"] <= 1.05 * there["rollout"]
    assert made.fits


@pytest.mark.slow
def test_a_plan_of_a_small_card_counts_the_rows_that_its_cache_has_room_for():
    """512 answers of 144 places: 4 kB a place and layer of an 8B model, two layers: 0.6 GB, of
    which a card of 4.5 GB gives 1.5, and one of 1.2 gives 0.4.
    """
    grpo = {"grpo": {"prompts_per_step": 64, "engine_rows": 512}}
    caches = []
    for card in (4.5, 1.2):
        made, _, _ = counted.planned_beside_counted(
            counted.recipe_of(card, **grpo),
            "grpo",
            SHALLOW["llama-3.1-8b"],
            ROWS,
            card,
        )
        caches.append(made.stages[0].phases[0].bytes["cache"])
    assert caches[0] == 512 * 144 * 2 * 4096
    assert caches[1] == pytest.approx(0.4e9, rel=0.01)


@pytest.mark.slow
def test_the_longest_rows_decide():
    """A long conversation has a row of its own, a long prompt makes all slots of the cache long."""
    shape, long = SHALLOW["llama-2-7b"], RowSizes(prompt=128, answer=128, longest=(700, 200))
    for name, part in (("sft", "activations"), ("grpo", "cache")):
        sizes = []
        for rows in (ROWS, long):
            recipe = counted.recipe_of(80)
            made, *_ = counted.planned_beside_counted(recipe, name, shape, rows, 80)
            sizes.append(made.stages[0].phases[0].bytes[part])
        assert sizes[1] > 1.5 * sizes[0]


@pytest.mark.slow
def test_a_prefix_of_all_prompts_makes_a_prefill_no_larger():
    """24 prompts of which 600 of 620 tokens are common: six take their turn together."""
    widths = []

    def generate(words):
        with counted.pretended_card(80e9) as live:
            model = shape_model(LlamaConfig(**SHALLOW["llama-2-7b"]), torch.bfloat16, "sdpa")
            role = Role(model)
            engine = LocalEngine(role, gpu.encoder_of(), max_rows=24)
            prompts = [Prompt((user(text),), text) for text in words]
            live.peak = live.current
            engine.generate(prompts, Sampling(max_new_tokens=2))
            widths.append(live.peak)

    generate([f"{'a' * 600}{number:017}" for number in range(24)])
    generate([f"{number:017}{'a' * 600}" for number in range(24)])
    assert widths[0] < 1.1 * widths[1]


@pytest.mark.slow
def test_the_count_is_what_an_h100_reported():
    """Peaks of torch.cuda.max_memory_allocated in GB (torch 2.11): an update of 16 x 1,024 tokens of
    28 layers had 48.7, fine-tuning on 2 x 1,024 tokens of 7 billion weights 25.7.
    """
    sft = {"rows_per_micro_batch": 16, "row_tokens": 1024, "heldout_fraction": 0.0}
    recipe = counted.recipe_of(80, sft=sft)
    rows = RowSizes(prompt=512, answer=512)
    peaks = counted.count(recipe, "sft", SHAPES["qwen2.5-1.5b"], rows, 80e9)
    assert peaks["update"] / 1e9 == pytest.approx(48.7, rel=0.01)
    with counted.pretended_card(80e9) as live:
        model = shape_model(LlamaConfig(**SHAPES["llama-2-7b"]), torch.bfloat16, "sdpa")
        step = gpu.fine_tuning(shape_adapter(model, "policy", LoraConfig()), 1024, 256)
        step()
        step()
    assert live.peak / 1e9 == pytest.approx(25.7, rel=0.01)
