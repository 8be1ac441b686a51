"""QLoRA: a base in four bits under adapters, and AdamW with moments in eight."""

import importlib.util
import json

import pytest
import torch
from safetensors.torch import load_file
from tests.every_stage import differences, recipe, results
from torch import nn

from tether.cli.tools.doctor import examine_stage
from tether.cli.tools.export import export_model
from tether.core.errors import ConfigError, ModelError
from tether.core.types import Prompt, assistant, user
from tether.data.batches import make_batch
from tether.models.loading import add_adapter
from tether.models.quantized import dequantized, is_quantized, quantize
from tether.models.tiny import tiny_model
from tether.models.trunk import Role
from tether.runner.assembly.models import open_model
from tether.runner.assembly.online import online_stage
from tether.runner.assembly.roles import encoder_of, load_policy
from tether.runner.run import run_recipe
from tether.settings.learner import OptimizerConfig
from tether.settings.model import LoraConfig, ModelConfig
from tether.settings.reading import build
from tether.settings.recipe import Recipe
from tether.settings.stages import STAGES
from tether.stages.learner.checkpoint import load_checkpoint, save_checkpoint
from tether.stages.learner.local import LocalLearner
from tether.stages.learner.planner import held_bytes, shape_model, training_bytes, weight_bytes
from tether.watch.monitoring.doctor import Healthy

NF4 = ModelConfig(source="tiny", dtype="float32", quantize="nf4")
TALK = (user("how are you?"), assistant("well, and yourself?"))
LEVELS = (-1.0, -0.6961928, -0.52507305, -0.3949175, -0.28444138, -0.18477343, -0.09105004, 0.0)
LEVELS += (0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0)
"""The sixteen numbers of NF4 (the paper's appendix E)."""


def trained_role(seed=0, **config):
    """A policy whose adapter says something."""
    loaded = open_model(NF4.model_copy(update=config), seed=seed)
    role = Role(add_adapter(loaded.model, "policy", LoraConfig(rank=4)), "policy")
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(seed)
        for parameter in role.parameters():
            parameter.copy_(0.1 * torch.randn_like(parameter))
    return role, loaded


def logprobs(role, encoder):
    return role.logprobs(make_batch([encoder.conversation(TALK)], 0))[0]


def test_every_weight_is_a_level_of_nf4_near_what_it_was():
    """By hand: the nearest of sixteen levels times the largest weight of 64, that constant itself
    in 8 bits.
    """
    plain, held = open_model(NF4.model_copy(update={"quantize": None})), open_model(NF4)
    assert (
        held.digest == plain.digest and is_quantized(held.model) and not is_quantized(plain.model)
    )
    before = plain.model.get_submodule("model.layers.1.mlp.up_proj").weight.view(-1, 64)
    layer = held.model.get_submodule("model.layers.1.mlp.up_proj")
    assert layer.weight.dtype == torch.uint8 and layer.weight.numel() == before.numel() // 2
    after = (
        dequantized(Role(held.model))
        .causal_model.get_submodule("model.layers.1.mlp.up_proj")
        .weight.view(-1, 64)
    )
    largest, levels = before.abs().amax(1, keepdim=True), torch.tensor(LEVELS)
    nearest = levels[(before / largest)[..., None].sub(levels).abs().argmin(-1)] * largest
    assert torch.allclose(after, nearest, atol=float(0.01 * largest.max()))
    assert torch.equal(held.model.lm_head.weight, plain.model.lm_head.weight)


@pytest.mark.parametrize("adapter", [True, False])
def test_dequantised_a_role_computes_the_same(adapter):
    role, loaded = trained_role()
    role = role if adapter else Role(open_model(NF4).model)
    encoder = encoder_of(loaded)
    with torch.no_grad():
        held = logprobs(role, encoder)
        plain = dequantized(role)
        assert torch.allclose(logprobs(plain, encoder), held, atol=1e-4)
        assert not any(parameter.dtype == torch.uint8 for parameter in plain.model.parameters())
        if adapter:
            merged = Role(plain.model.merge_and_unload())
            assert torch.allclose(logprobs(merged, encoder), held, atol=1e-4)
    assert dequantized(plain) is plain


def test_the_gradient_of_an_adapter_is_that_over_the_weights_that_are_used():
    """A pass without gradients before it changes nothing, and checkpointed layers neither; the
    frozen base has none.
    """
    role, loaded = trained_role()
    encoder = encoder_of(loaded)
    with torch.no_grad():
        logprobs(role, encoder)

    def gradients(role):
        parameters = [p.requires_grad_(True) for p in role.parameters()]
        return torch.autograd.grad(logprobs(role, encoder).sum(), parameters)

    held = gradients(role)
    role.causal_model.recompute = True
    again = gradients(role)
    role.causal_model.recompute = False
    assert all(torch.equal(one, other) for one, other in zip(held, again, strict=True))
    assert not any(
        p.requires_grad
        for name, p in role.model.named_parameters()
        if "policy" not in name.split(".")
    )
    plain = gradients(dequantized(role))
    assert len(held) == len(plain) == 28
    assert all(
        torch.allclose(one, other, atol=1e-4, rtol=1e-3)
        for one, other in zip(held, plain, strict=True)
    )


def test_the_engine_samples_from_the_policy_that_is_trained(tmp_path):
    values = recipe(tmp_path, tmp_path / "run")
    values["ppo"] |= {"reward_source": "random"}
    section = build(Recipe, {**values, "model": {**values["model"], "quantize": "nf4"}}).section(
        "ppo",
    )
    stage, _ = online_stage(section, NF4, None, 0)
    checks = examine_stage(stage, [Prompt((user("one"),), "a"), Prompt((user("two"),), "b")])
    assert "temperature" in {result.check for result in checks if isinstance(result, Healthy)}


@pytest.mark.slow
def test_every_stage_trains(tmp_path):
    """With moments in 8 bits too."""
    values = {
        **recipe(tmp_path, tmp_path / "whole"),
        "model": {"source": "tiny", "dtype": "float32", "quantize": "nf4"},
    }
    for name in STAGES_THAT_LEARN:
        section = values[name] if name != "rounds" else values[name]["direct"]
        section["optimizer"] = {**section["optimizer"], "kind": "adamw8bit"}
    run_recipe(build(Recipe, values))
    for name in STAGES_THAT_LEARN:
        assert (tmp_path / "whole" / name / "summary.json").is_file()
    role = json.loads((tmp_path / "whole" / "ppo" / "policy" / "role.json").read_text())
    assert role["quantize"] == "nf4"
    policy, loaded = load_policy(str(tmp_path / "whole" / "ppo"))
    assert is_quantized(policy.causal_model) and loaded.config.quantize == "nf4"
    for name in ("ppo", "reward"):
        made = export_model(str(tmp_path / "whole" / name), tmp_path / "exported" / name)
        assert made["difference"] < 1e-3 and made["same_ids"]


STAGES_THAT_LEARN = [
    name for name, kind in STAGES.items() if kind.makes not in ("pairs", "verdict")
]


@pytest.mark.parametrize("stage", ["sft", "reward", "ppo"])
def test_a_killed_stage_ends_as_if_nothing_had_happened(tmp_path, stage):
    """To the bit, with NF4 under an adapter whose tensors are large enough for moments in 8
    bits.
    """
    for name in ("whole", "cut"):
        values = {
            **recipe(tmp_path, tmp_path / name),
            "model": {"source": "tiny", "dtype": "float32", "quantize": "nf4"},
        }
        values |= {"lora": {"rank": 64}, stage: {**values[stage], "lora": {"rank": 64}}}
        values[stage]["optimizer"] = {"learning_rate": 1e-2, "kind": "adamw8bit"}
        if stage == "ppo":
            values[stage]["reward_source"] = "random"
        if stage != "sft":
            del values["sft"]
        made = build(Recipe, values)
        if name == "cut":
            for lives in (2, 1):
                with pytest.raises(Killed):
                    run_recipe(made, [stage], dying_after(lives))
            saved = next((tmp_path / name / stage / "checkpoints").glob("step-*"))
            kinds = {
                tensor.dtype
                for key, tensor in load_file(saved / "state.safetensors").items()
                if "state1" in key
            }
            assert torch.uint8 in kinds
        run_recipe(made, [stage])
    assert differences(*(results(tmp_path / name / stage) for name in ("whole", "cut"))) == []


class Killed(BaseException):
    """No handler of ours catches it."""


def dying_after(calls):
    left = [calls]

    def bar(*_):
        left[0] -= 1
        if left[0] == 0:
            raise Killed

    return lambda phase: bar


def bowl(**settings):
    """A learner on a bfloat16 matrix and a small vector, each drawn to a target."""
    torch.manual_seed(0)
    matrix, vector = (
        nn.Parameter(torch.zeros(64, 128, dtype=torch.bfloat16)),
        nn.Parameter(torch.zeros(8)),
    )
    targets = torch.randn(64, 128), torch.randn(8)
    config = OptimizerConfig(
        learning_rate=0.05,
        schedule="constant",
        warmup_fraction=0.0,
        max_grad_norm=1e9,
        **settings,
    )
    learner = LocalLearner([matrix, vector], config, 200)

    def loss():
        pairs = zip((matrix, vector), targets, strict=True)
        return sum(((parameter.float() - target) ** 2).mean() for parameter, target in pairs)

    def update():
        learner.backward(loss())
        learner.step()
        return float(loss().detach())

    return learner, update


def test_moments_in_eight_bits_learn_as_those_in_thirty_two():
    (_, exact), (_, coarse) = bowl(kind="adamw"), bowl(kind="adamw8bit")
    losses = [(exact(), coarse()) for _ in range(150)]
    start, last = losses[0][0], losses[-1][0]
    assert last < 0.01 * start
    assert all(abs(one - other) < 0.02 * start for one, other in losses)


def test_moments_in_eight_bits_are_a_quarter_and_come_back_to_the_bit(tmp_path):
    learner, update = bowl(kind="adamw8bit")
    for _ in range(3):
        update()
    tensors, values = learner.state()
    assert (
        tensors["state1.0"].dtype == torch.uint8 and tensors["absmax1.0"].numel() == 64 * 128 // 256
    )
    assert tensors["state1.1"].dtype == torch.float32  # a small tensor
    assert learner.masters[0].dtype == torch.float32
    moments = [
        tensor
        for key, tensor in tensors.items()
        if key.endswith(".0") and not key.startswith("master")
    ]
    assert sum(tensor.numel() * tensor.element_size() for tensor in moments) < 2.05 * 64 * 128
    other, again = bowl(kind="adamw8bit")
    other.load_state(*load_checkpoint(save_checkpoint(tmp_path, 3, tensors, values)))
    assert [update() for _ in range(5)] == [again() for _ in range(5)]
    assert all(
        torch.equal(one, two) for one, two in zip(learner.masters, other.masters, strict=True)
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model": {"source": "tiny", "quantize": "nf4"}},
            r"model\.quantize needs bitsandbytes, "
            r".* pip install",
        ),
        (
            {"kto": {"optimizer": {"kind": "adamw8bit"}}},
            r"kto\.optimizer\.kind = 'adamw8bit' "
            r"needs bitsandbytes",
        ),
        (
            {"rounds": {"direct": {"optimizer": {"kind": "adamw8bit"}}}},
            r"rounds\.optimizer\.kind "
            r"= 'adamw8bit' needs",
        ),
    ],
)
def test_without_the_library_nothing_is_loaded(tmp_path, monkeypatch, changes, message):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    values = recipe(tmp_path, tmp_path / "run")
    values = {**values, **{key: {**values[key], **change} for key, change in changes.items()}}
    with pytest.raises(ConfigError, match=message):
        run_recipe(build(Recipe, values))
    assert not (tmp_path / "run").exists()
    with pytest.raises(ConfigError, match="bitsandbytes"):
        open_model(NF4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lora": False}, r"ppo\.lora = false trains the whole model, and model\.quantize"),
        ({"roles": "separate", "offload": True}, r"ppo\.offload moves layers of 16 bits"),
    ],
)
def test_settings_that_exclude_quantization_are_refused(tmp_path, changes, message):
    values = recipe(tmp_path, tmp_path / "run")
    roles = {"roles": "separate"} if "lora" in changes else {}
    values |= {
        "model": {"source": "tiny", "quantize": "nf4"},
        "ppo": {**values["ppo"], **roles, **changes},
    }
    with pytest.raises(ConfigError, match=message):
        build(Recipe, values)


def test_a_model_without_linear_layers_is_refused():
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=32, n_head=2, vocab_size=50))
    with pytest.raises(ModelError, match=r"model\.quantize .*GPT2Model"):
        quantize(model, torch.device("cpu"))


def test_an_adapter_stays_on_the_weights_that_it_was_trained_on(tmp_path):
    """A reward model that was trained over 16 bits is not put over 4."""
    values = recipe(tmp_path, tmp_path / "run")
    del values["sft"]
    run_recipe(build(Recipe, values), ["reward"])
    section = build(Recipe, values).section("ppo")
    with pytest.raises(
        ModelError,
        match=r"model\.quantize = None.*'nf4'",
    ):
        online_stage(section, NF4, tmp_path / "run" / "reward" / "model", 0)


def test_the_plan_counts_what_is_held():
    """Of a trunk in 4 bits: codes, constants and what stays in 16; of moments in 8 bits what a
    checkpoint holds of them.
    """
    model = tiny_model(0, dim=256)
    shape = shape_model(model.config, torch.float32, "eager")
    largest = 4 * max(p.numel() for n, p in model.named_parameters() if "layers" in n)
    assert held_bytes(shape, None) == weight_bytes(model.parameters())
    quantize(model, torch.device("cpu"))
    states = [p.quant_state for p in model.parameters() if p.dtype == torch.uint8]
    constants = weight_bytes([t for s in states for t in (s.absmax, s.state2.absmax)])
    assert held_bytes(shape, "nf4") - largest == pytest.approx(
        weight_bytes(model.parameters()) + constants,
        rel=1e-3,
    )
    weight = nn.Parameter(torch.zeros(256, 256, dtype=torch.bfloat16))
    learner = LocalLearner([weight], OptimizerConfig(learning_rate=0.1, kind="adamw8bit"), 2)
    learner.backward(weight.float().sum())
    learner.step()
    held = sum(tensor.nbytes for key, tensor in learner.state()[0].items() if key != "step.0")
    assert training_bytes([weight], "adamw8bit") == held
