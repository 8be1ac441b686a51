"""The planner against sums done by hand and against torch's own record of what real passes
allocate.
"""

import json
import sys
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from transformers import LlamaConfig, LlamaForCausalLM

from tether.core.types import Sampling
from tether.models.loading import add_adapter
from tether.models.trunk import GROUPED, Role
from tether.rollout.decoding import TreeDecoder
from tether.rollout.sampling import sample_tokens
from tether.runner.planning.devices import gpu
from tether.runner.planning.plan import SHAPES, plan
from tether.runner.planning.shaped_model import prefill_bytes, sampler_bytes
from tether.settings.model import LoraConfig
from tether.settings.reading import build
from tether.settings.recipe import Recipe
from tether.stages.learner.planner import (
    TILED,
    LiveBytes,
    measure_pass,
    shape_adapter,
    shape_answers,
    shape_batch,
    shape_model,
    training_bytes,
)

SIZES = {
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "vocab_size": 3000,
}


def test_counts_what_lives_at_once():
    with LiveBytes() as live:
        first = torch.empty(1000, device="meta")
        second = first + 1
        view = second[:10]
        del first
        third = torch.empty(100, dtype=torch.bfloat16, device="meta")
        assert live.current == 4000 + 200
        del second
        assert live.current == 4000 + 200  # a view keeps its storage
        del view, third
        assert live.current == 0
    assert live.peak == 8000


def test_activations_of_a_linear_chain_by_hand():
    """Each of three layers of a learned chain keeps its input for its weight's gradient."""
    with torch.device("meta"):
        layers = torch.nn.Sequential(*(torch.nn.Linear(50, 50, bias=False) for _ in range(3)))
        given = torch.empty(8, 50)
    with LiveBytes([*layers.parameters(), given]) as live:
        out = layers(given)
        assert live.current == 3 * 8 * 50 * 4
        del out


def allocated_peak(work) -> int:
    """The most bytes alive at once while `work` ran, from the allocator's own events."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        work()
    current = peak = 0
    events = [e for e in recorded.profiler.kineto_results.events() if e.name() == "[memory]"]
    for event in sorted(events, key=lambda e: e.start_ns()):
        current += event.nbytes()
        peak = max(peak, current)
    return peak


@pytest.mark.parametrize(("attention", "shapes"), [("eager", "eager"), (GROUPED, TILED)])
@pytest.mark.parametrize("recompute", [False, True])
def test_shapes_need_what_a_real_pass_allocates(attention, shapes, recompute):
    config = LlamaConfig(**SIZES, num_key_value_heads=2)
    lora = LoraConfig(rank=4, targets="attention")
    peaks = []
    for real in (True, False):
        if real:
            model = (
                LlamaForCausalLM._from_config(config, attn_implementation="eager")
                .eval()
                .requires_grad_(False)
            )
            model.set_attn_implementation(attention)
            model = add_adapter(model, "policy", lora)
        else:
            model = shape_adapter(shape_model(config, torch.float32, shapes), "policy", lora)
        model.get_base_model().recompute = recompute
        role = Role(model, "policy")
        for parameter in role.parameters():
            parameter.requires_grad_(True)
        batch = shape_batch([s for one in shape_answers(4, 100, 1, 156) for s in one])
        if real:
            zeros = torch.zeros(batch.ids.shape, dtype=torch.long)
            order = torch.arange(batch.ids.shape[1]).expand_as(zeros)
            predict = torch.cat([torch.arange(99, 255) + 256 * row for row in range(4)])
            moved = {
                "ids": zeros,
                "positions": order,
                "predict": predict,
                "targets": torch.zeros_like(predict),
            }
            batch = replace(batch, **moved)
            peaks.append(allocated_peak(lambda: role.logprobs(batch)[0].sum().backward()))  # noqa: B023
        else:
            peaks.append(measure_pass(model, lambda: role.logprobs(batch)[0].sum().backward()))  # noqa: B023
    assert peaks[1] == pytest.approx(peaks[0], rel=0.1)


def test_training_bytes_by_hand():
    half, full = (
        torch.nn.Parameter(torch.empty(10, dtype=torch.bfloat16)),
        torch.nn.Parameter(torch.empty(7)),
    )
    # no gradient between updates
    assert training_bytes([half, full]) == 10 * (4 + 8) + 7 * 8


BASE = {"run": "run", "model": {"source": "tiny"}}
LORA = {"rank": 16, "alpha": 32, "targets": "attention"}
SFT = {"rows_per_micro_batch": 2, "row_tokens": 1024, "lora": LORA}
PPO = {
    "reward_source": "random",
    "micro_batch_tokens": 2048,
    "max_new_tokens": 256,
    "engine_rows": 32,
    "lora": LORA,
}


def peaks(device=None, shape="llama-2-7b", **sections):
    made = plan(
        build(Recipe, {**BASE, **sections}, [], where="test"),
        device or gpu(80),
        shape=shape,
    )
    return {stage.name: stage.peak for stage in made.stages}, made


@pytest.fixture(scope="module")
def shallow(tmp_path_factory):
    """A folder for a well-known shape with four of its layers: as wide, and measured in a fraction
    of the time.
    """

    def folder(name):
        path = tmp_path_factory.mktemp("shape")
        shape = {**SHAPES[name], "num_hidden_layers": 4, "model_type": "llama"}
        (path / "config.json").write_text(json.dumps(shape))
        return str(path)

    return folder


def test_ppo_with_four_roles_needs_little_more_than_one_fine_tuning():
    found, made = peaks(sft=SFT, ppo=PPO)
    assert made.parameters == 6_738_415_616
    assert found["sft"] > 2 * made.parameters
    assert found["ppo"] < 1.15 * found["sft"]
    apart, _ = peaks(ppo={**PPO, "roles": "separate"})
    # reference and value are whole models then
    assert apart["ppo"] > found["ppo"] + 2 * 2 * made.parameters
    offloaded, made = peaks(ppo={**PPO, "roles": "separate", "offload": True})
    # the reference's layers
    assert apart["ppo"] - offloaded["ppo"] == pytest.approx(2 * made.parameters * 31 / 32, rel=0.05)


def test_states_that_are_kept_are_planned_for():
    reward = {"lora": {"rank": 16, "last_layers": 4}}
    without, kept = (
        peaks(reward={**reward, "keep_states_gb": size})[0]["reward"] for size in (0, 3)
    )
    assert kept - without == 3_000_000_000


def test_advice_for_a_plan_that_does_not_fit_lowers_its_peak(shallow):
    _, made = peaks(gpu(16), shallow("llama-2-7b"), sft={**SFT, "lora": False, "row_tokens": 4096})
    assert not made.fits  # 16 bytes a weight
    advice = dict(made.advice)
    assert min(advice.values()) < made.peak
    assert any("recompute" in change for change in advice) and any(
        "lora" in change for change in advice
    )
    assert all(after <= made.peak for after in advice.values())


def test_a_reference_that_is_asked_before_training_takes_no_room(shallow):
    direct = {"lora": False, "reference_logprobs": "precomputed"}
    made = plan(
        build(Recipe, {**BASE, "direct": direct}, [], where="test"),
        gpu(1),
        shape=shallow("llama-2-7b"),
    )
    assert "reference" not in made.stages[0].phases[0].bytes
    for change, _ in made.advice:
        build(
            Recipe,
            {**BASE, "direct": direct},
            change.replace("={}", "={rank=4}").split(),
            where="test",
        )


@pytest.mark.parametrize(
    "sections",
    [
        {"ppo": {**PPO, "roles": "separate"}},
        {"ppo": {**PPO, "roles": "separate", "offload": True}},
        {"direct": {"lora": False, "offload": True}},
        {"direct": {"lora": False}},
    ],
)
def test_every_change_that_is_proposed_is_a_recipe_that_is_taken(sections, shallow):
    recipe = build(Recipe, {**BASE, **sections}, [], where="test")
    proposed = dict(plan(recipe, gpu(1), shape=shallow("llama-2-7b")).advice)
    assert any("offload=true" in change for change in proposed) == (
        not next(iter(sections.values())).get("offload", False)
    )
    for change in proposed:
        build(
            Recipe,
            {**BASE, **sections},
            change.replace("={}", "={rank=4}").split(),
            where="test",
        )


@pytest.mark.slow
def test_a_quantized_trunk_is_proposed_on_a_gpu_where_all_stages_have_adapters():
    def planned(device, model=None, **sections):
        recipe = build(
            Recipe,
            {"run": "x", "model": {"source": "tiny", **(model or {})}, **sections},
        )
        return plan(recipe, device, shape="llama-2-7b", advise=True)

    sft = {"data": {"path": "tether:demonstrations"}}
    whole, held = planned(gpu(16), sft=sft), planned(gpu(16), {"quantize": "nf4"}, sft=sft)
    assert dict(whole.advice)["model.quantize=nf4"] == held.peak < whole.peak - 8e9
    assert "model.quantize=nf4" not in dict(planned(gpu(16), sft={**sft, "lora": False}).advice)
    assert "model.quantize=nf4" not in dict(planned(replace(gpu(16), gpu=False), sft=sft).advice)


SMALL = {
    "prompts_per_step": 4,
    "samples_per_prompt": 2,
    "micro_batch_tokens": 1024,
    "max_new_tokens": 64,
    "engine_rows": 8,
}


def served_phases(shape, device, top=(), **more):
    grpo = {
        "data": {"path": "tether:prompts"},
        "reward_source": "random",
        "lora": {"rank": 16},
        **SMALL,
        **more,
    }
    recipe = build(Recipe, {**BASE, **dict(top), "grpo": grpo}, [], where="test")
    return {phase.name: phase for phase in plan(recipe, device, shape=shape).stages[-1].phases}


def test_servers_are_planned_beside_the_learner(shallow):
    """Rank 16 on seven projections of each of four layers: 16 * (in + out) numbers each, by
    hand.
    """
    one = shallow("llama-3.2-1b")
    servers = {"kind": "vllm", "servers": 4, "python": sys.executable}
    local, served = served_phases(one, gpu(80)), served_phases(one, gpu(80), engine=servers)
    ahead = served_phases(one, gpu(80), engine=servers, max_staleness=2, importance="truncate")
    hidden, inner, values = 2048, 8192, 512  # keys and values of 8 heads of 64
    # in bfloat16
    adapter = 4 * 16 * (2 * 2 * hidden + 2 * (hidden + values) + 3 * (hidden + inner)) * 2
    server = served["server, each of 4"]
    assert server.bytes["3 adapters"] == 3 * adapter
    assert ahead["server, each of 4"].bytes["5 adapters"] == 5 * adapter
    assert (
        server.bytes["cache"] == local["rollout"].bytes["cache"]
        and "cache" not in served["rollout"].bytes
    )
    sending = 5 * adapter / 2e9 + 4 * 0.005
    assert served["rollout"].seconds == pytest.approx(
        local["rollout"].seconds / 4 + sending,
        rel=1e-6,
    )
    assert served["update"].bytes == local["update"].bytes


def test_a_trunk_that_is_cut_over_ranks_and_cards_is_planned_by_its_parts(shallow):
    """Of four layers in bfloat16 the one that runs is whole, the other three are cut in four."""
    one = shallow("llama-3.2-1b")
    engine = {"kind": "vllm", "servers": 2, "python": sys.executable}
    cut = {"learner": {"ranks": 4, "shard": True}}
    whole = served_phases(one, gpu(80), engine=engine)
    shared = served_phases(one, gpu(80), cut, engine={**engine, "resources": {"GPU": 4}})
    layer = 2 * 2048 * (2048 + 512) + 3 * 2048 * 8192 + 2 * 2048
    less = whole["update"].bytes["trunk"] - shared["update"].bytes["trunk"]
    assert less == 3 * layer * 2 * 3 // 4
    for part in ("trunk", "cache"):
        server, quarter = (phases["server, each of 2"].bytes[part] for phases in (whole, shared))
        assert quarter == server // 4


def test_whole_weights_of_servers_are_planned(shallow):
    """All parameters of Llama 3.2 1B but for twelve of its layers, in bfloat16, written once and
    read by each server.
    """
    one = shallow("llama-3.2-1b")
    served = served_phases(
        one,
        gpu(200),
        engine={"kind": "vllm", "servers": 4, "python": sys.executable},
        lora=False,
        roles="separate",
    )
    local = served_phases(one, gpu(200), lora=False, roles="separate")
    # projections of attention and MLP, two norms
    layer = 2 * 2048 * (2048 + 512) + 3 * 2048 * 8192 + 2 * 2048
    whole = (1_235_814_400 - 12 * layer) * 2
    assert served["server, each of 4"].bytes["trunk"] == whole
    assert not any("adapters" in name for name in served["server, each of 4"].bytes)
    sending = 5 * whole / 2e9 + 4 * 0.005
    assert served["rollout"].seconds == pytest.approx(
        local["rollout"].seconds / 4 + sending,
        rel=1e-6,
    )


def test_reward_servers_are_planned_beside_the_learner(shallow):
    one = shallow("llama-3.2-1b")

    def phases_of(device, **more):
        top = {"reward": {"data": {"path": "tether:comparisons"}, "lora": {"rank": 16}}}
        return served_phases(one, device, top, reward_source="learned", **more)

    servers, processor = {"reward_servers": {"servers": 3}}, replace(gpu(80), gpu=False)
    local, served = phases_of(gpu(80)), phases_of(gpu(80), **servers)
    server = served["reward server, each of 3"]
    assert "reward" in local["update"].bytes and "reward" not in served["update"].bytes
    assert (
        server.bytes["reward"]
        == local["update"].bytes["trunk"] + local["update"].bytes["policy adapter"]
    )
    assert (
        server.bytes["activations"] == local["reward"].bytes["activations"]
        and "activations" not in served["reward"].bytes
    )
    assert served["reward"].seconds == pytest.approx(local["reward"].seconds / 3)
    here = phases_of(processor, **servers)
    assert here["update"].bytes["3 reward servers"] == 3 * here["reward server, each of 3"].total
    assert here["reward"].seconds == pytest.approx(phases_of(processor)["reward"].seconds)


def test_servers_on_a_processor_share_its_memory(shallow):
    one = shallow("llama-3.2-1b")
    engine, here = {"kind": "served", "servers": 2}, replace(gpu(80), gpu=False)
    for on, shared in (("local", True), ("ray", False)):
        phases = served_phases(one, here, {"on": on}, engine=engine)
        server = phases["server, each of 2"].total
        for phase in ("rollout", "update"):  # they live on while the learner learns
            assert phases[phase].bytes.get("2 servers", 0) == (2 * server if shared else 0)


def test_a_prefill_pass_and_a_draw_need_what_the_allocator_gives(monkeypatch):
    config = LlamaConfig(**SIZES, num_key_value_heads=2)
    model = (
        LlamaForCausalLM._from_config(config, attn_implementation="eager")
        .eval()
        .requires_grad_(False)
    )
    real, shapes = Role(model), Role(shape_model(config, torch.float32, "eager"))
    decoder, ids = TreeDecoder(real, packed=False), torch.zeros(8, 120, dtype=torch.long)
    with torch.no_grad():
        expected = allocated_peak(lambda: decoder.prefill(ids, []))
    assert prefill_bytes(shapes, 8, 120) == pytest.approx(expected, rel=0.1)
    # more prompts make more passes
    assert prefill_bytes(shapes, 10**6, 120) == prefill_bytes(shapes, 4096 // 120, 120)
    # a CPU takes strips, a GPU all rows
    monkeypatch.setattr("tether.rollout.sampling.CPU_STRIP_ELEMENTS", 2**30)
    logits, uniforms = torch.randn(512, 8000), torch.rand(512, dtype=torch.float64)
    for sampling in (Sampling(), Sampling(top_p=0.9, temperature=0.7)):
        expected = logits.nbytes + allocated_peak(
            partial(sample_tokens, logits, uniforms, sampling, cpu_kernels=False),
        )
        assert sampler_bytes(512, 8000, torch.float32, sampling) == pytest.approx(expected, rel=0.1)


def test_a_plan_for_a_gpu_counts_prefill_and_draw():
    grpo = {
        "prompts_per_step": 16,
        "samples_per_prompt": 8,
        "max_new_tokens": 512,
        "reward_source": "random",
    }
    made = build(Recipe, {"run": "x", "model": {"source": "tiny"}, "grpo": grpo})
    (stage,) = plan(made, gpu(name="rtx4090"), shape="llama-3.1-8b", prompt_tokens=256).stages
    rollout = next(phase for phase in stage.phases if phase.name == "rollout")
    assert 1e9 < rollout.bytes["prefill and draw"] < 1.5e9
    # masters and moments of float32, of an adapter in bfloat16
    assert rollout.bytes["policy optimizer"] == 6 * rollout.bytes["policy adapter"]
