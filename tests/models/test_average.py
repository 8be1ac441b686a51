"""Averaged roles of every kind of adapter, against a plain model with the mean of the members'
merged weights in float64.
"""

import itertools
import math

import pytest
import torch
import transformers

from tether.cli.tools.export import export_model
from tether.core.errors import ModelError
from tether.core.types import assistant, user
from tether.data.batches import make_batch
from tether.models.average import average_roles
from tether.models.heads import ScalarHead
from tether.models.tiny import tiny_tokenizer
from tether.models.trunk import Role
from tether.runner.assembly.models import open_model
from tether.runner.assembly.roles import encoder_of, load_scorer, new_role, save_trained
from tether.settings.model import LoraConfig, ModelConfig

LLAMA = transformers.LlamaConfig(
    **{
        "vocab_size": 261,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    },
    **{
        "attention_bias": True,
        "max_position_embeddings": 256,
        "eos_token_id": 1,
        "initializer_range": 0.1,
    },
)
GPT2 = transformers.GPT2Config(
    **{
        "vocab_size": 261,
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 256,
        "eos_token_id": 1,
    },
    initializer_range=0.1,
)
KINDS = {
    "plain": {},
    "rslora": {"rslora": True},
    "dora": {"dora": True},
    "both": {"rslora": True, "dora": True},
}
PLACES = [
    (LLAMA, "all-linear", None),
    (LLAMA, "attention", 1),
    (LLAMA, ("embed_tokens", "down_proj"), None),
    (GPT2, "all-linear", None),
    (GPT2, ("wpe", "c_fc"), None),
]
TALKS = [
    (user("one two"), assistant("three four five")),
    (user("six"), assistant("7")),
    (user("a"), assistant("b" * 20)),
]
COUNT, RANK, ALPHA = 3, 2, 6.0


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    made = {}

    def make(config):
        if config.model_type not in made:
            torch.manual_seed(0)
            folder = made[config.model_type] = tmp_path_factory.mktemp(config.model_type)
            transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
            tiny_tokenizer().save_pretrained(folder)
        return str(made[config.model_type])

    return make


@torch.no_grad()
def trained(role, seed):
    """A role as if it had learned: lengths of DoRA have changed by a fifth, all else is random."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in role.model.named_parameters():
        if role.adapter in name.split("."):
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(parameter * (1 + 0.2 * noise) if "magnitude" in name else 0.3 * noise)
    for parameter in role.head.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator))
    role.head.offset.fill_(0.1 * seed)
    role.head.scale.fill_(1 + 0.5 * seed)
    return role


def opened(source, lora, **model):
    """A loaded model, and members on it."""
    loaded = open_model(ModelConfig(source=source, **{"dtype": "float32", **model}))
    width = Role(loaded.model).width
    roles = [
        new_role(loaded, f"reward-{k}", lora, seed=k, head=ScalarHead(width)) for k in range(COUNT)
    ]
    return loaded, [
        trained(Role(loaded.model, role.adapter, role.head), seed)
        for seed, role in enumerate(roles)
    ]


def merged(layer, adapter, lora):
    """The weight that an adapter makes of a layer, in float64, by the formulas of the papers;
    outputs come first.
    """
    base = layer.get_base_layer()
    weight = base.weight.double()
    if not isinstance(base, torch.nn.Linear):  # an embedding, or GPT-2's transposed product
        weight = weight.T
    if adapter in layer.lora_A:
        down, up = layer.lora_A[adapter].weight.double(), layer.lora_B[adapter].weight.double()
    else:
        down, up = (
            layer.lora_embedding_A[adapter].double(),
            layer.lora_embedding_B[adapter].double(),
        )
    changed = weight + ALPHA / (math.sqrt(RANK) if lora.rslora else RANK) * up @ down
    if lora.dora:
        changed = (
            layer.lora_magnitude_vector[adapter].weight.double()[:, None]
            * changed
            / changed.norm(dim=1, keepdim=True)
        )
    return changed if isinstance(base, torch.nn.Linear) else changed.T


@torch.no_grad()
def mean_scores(source, roles, lora, encoder):
    """Scores of a plain model, in float64, whose weights and head are the means."""
    plain = transformers.AutoModelForCausalLM.from_pretrained(source).double().eval()
    touched = 0
    for name, layer in roles[0].causal_model.named_modules():
        if hasattr(layer, "lora_A") and "reward-0" in {*layer.lora_A, *layer.lora_embedding_A}:
            mean = torch.stack([merged(layer, role.adapter, lora) for role in roles]).mean(0)
            plain.get_submodule(name).weight.copy_(mean)
            touched += 1
    assert touched
    weight = torch.stack([r.head.linear.weight.double() * r.head.scale for r in roles]).mean(0)[0]
    bias = torch.stack(
        [(r.head.linear.bias.double() - r.head.offset) * r.head.scale for r in roles],
    ).mean(0)
    ids = [encoder.conversation(talk).ids for talk in TALKS]
    states = [plain.base_model(torch.tensor([row])).last_hidden_state[0, -1] for row in ids]
    return torch.stack([weight @ state + bias[0] for state in states])


@torch.no_grad()
def scores(role, encoder):
    return role.scores(make_batch([encoder.conversation(talk) for talk in TALKS], 0)).double()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("config", "targets", "last_layers"), PLACES)
def test_the_average_is_the_mean_of_merged_weights_and_stays_so_on_disk(
    folder_of,
    tmp_path,
    config,
    targets,
    last_layers,
    kind,
):
    lora = LoraConfig(
        rank=RANK,
        alpha=ALPHA,
        targets=targets,
        last_layers=last_layers,
        **KINDS[kind],
    )
    loaded, roles = opened(folder_of(config), lora)
    encoder = encoder_of(loaded)
    expected = mean_scores(folder_of(config), roles, lora, encoder)
    own = [scores(role, encoder) for role in roles]
    assert all((a - b).abs().max() > 0.1 for a, b in itertools.combinations(own, 2)), (
        "the members are alike"
    )
    averaged = average_roles(roles, "reward", lora)
    torch.testing.assert_close(scores(averaged, encoder), expected, atol=2e-5, rtol=1e-5)
    for role, before in zip(roles, own, strict=True):
        assert torch.equal(scores(role, encoder), before), "averaging changed a member"
    save_trained(averaged, loaded, tmp_path / "model", kind="reward")
    (again,), _ = load_scorer(tmp_path / "model")
    torch.testing.assert_close(scores(again, encoder), expected, atol=2e-5, rtol=1e-5)
    written = export_model(str(tmp_path / "model"), tmp_path / "out", dtype="float32")
    foreign = transformers.AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "out",
        dtype=torch.float32,
    ).eval()
    with torch.no_grad():
        ids = [torch.tensor([encoder.conversation(talk).ids]) for talk in TALKS]
        outside = torch.cat([foreign(row).logits[0] for row in ids]).double() + written["constant"]
    torch.testing.assert_close(outside, expected, atol=1e-4, rtol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize(
    ("model", "tolerance"),
    [({"dtype": "bfloat16"}, 2**-7), ({"quantize": "nf4"}, 1e-5)],
)
@pytest.mark.parametrize("kind", KINDS)
def test_rounded_weights_are_averaged_as_they_are_held(folder_of, kind, model, tolerance):
    """In bfloat16 the average is as exact as its own type; over four bits the base is the one that
    these say.
    """
    from bitsandbytes import functional

    lora = LoraConfig(rank=RANK, alpha=ALPHA, targets=("v_proj", "down_proj"), **KINDS[kind])
    _, roles = opened(folder_of(LLAMA), lora, **model)
    averaged = average_roles(roles, "reward", lora)
    adapters = {
        name: layer
        for name, layer in averaged.causal_model.named_modules()
        if name.endswith(lora.targets)
    }
    assert len(adapters) == 4
    for layer in adapters.values():
        held, effective = layer.get_base_layer().weight, []
        base = (
            functional.dequantize_4bit(held.data, held.quant_state) if "quantize" in model else held
        )
        for adapter in (*(role.adapter for role in roles), "reward"):
            down, up = layer.lora_A[adapter].weight.double(), layer.lora_B[adapter].weight.double()
            changed = base.double() + layer.scaling[adapter] * up @ down
            if lora.dora:
                lengths = layer.lora_magnitude_vector[adapter].weight.double()[:, None]
                changed = lengths * changed / changed.norm(dim=1, keepdim=True)
            effective.append(changed)
        mean = torch.stack(effective[:-1]).mean(0)
        assert (effective[-1] - mean).abs().max() < tolerance * mean.abs().max()


@torch.no_grad()
def test_factors_that_cancel_out_are_refused(folder_of):
    lora = LoraConfig(rank=RANK, alpha=ALPHA, targets=("v_proj",), dora=True)
    _, roles = opened(folder_of(LLAMA), lora)
    layer = roles[0].decoder.layers[1].self_attn.v_proj
    for role, sign in zip(roles[:2], (1, -1), strict=True):
        layer.lora_A[role.adapter].weight.copy_(layer.lora_A["reward-0"].weight)
        layer.lora_B[role.adapter].weight.copy_(layer.lora_B["reward-0"].weight)
        layer.lora_magnitude_vector[role.adapter].weight.fill_(sign)
    with pytest.raises(ModelError, match=r"DoRA factors cancel out.*lora\.dora = false"):
        average_roles(roles[:2], "reward", lora)
