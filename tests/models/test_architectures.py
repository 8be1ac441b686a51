"""Architectures from a folder: what loads, what is refused in one sentence, and what an adapter
reaches.
"""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tests.models.architectures import small_config, small_folder

import tether
from tether.core.errors import DataError, ModelError
from tether.core.types import assistant, user
from tether.models.loading import add_adapter
from tether.models.tiny import tiny_tokenizer
from tether.models.trunk import Role
from tether.runner.assembly.models import open_model
from tether.settings.model import LoraConfig, ModelConfig

FLOAT32 = {"dtype": "float32"}


def opened(folder):
    return open_model(ModelConfig(source=str(folder), **FLOAT32))


def test_a_model_that_is_causal_whatever_its_configuration_says_is_opened(tmp_path):
    folder = small_folder("gpt_neox", tmp_path)
    assert not transformers.AutoConfig.from_pretrained(folder).is_decoder
    assert opened(folder).context_length == 256


@pytest.mark.parametrize("kind", ["bert", "roberta", "xlnet"])
def test_a_model_that_sees_later_tokens_is_refused(kind, tmp_path):
    folder = small_folder(kind, tmp_path)
    with pytest.raises(ModelError, match="reads both ways"):
        opened(folder)


def test_an_added_token_without_an_embedding_harms_nothing_until_a_text_needs_it(tmp_path):
    """As Gemma 3 is published: one token more in the tokenizer than rows in the embedding."""
    folder = small_folder("gemma3_text", tmp_path)
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens([transformers.AddedToken("<image>", special=True)], special_tokens=True)
    tokenizer.add_special_tokens({"pad_token": "<image>"})
    tokenizer.save_pretrained(folder)
    workbench = tether.load_model(str(folder), **FLOAT32)
    encoder = workbench.encoder
    assert len(encoder.tokenizer) == 262 and encoder.vocabulary == 261 and encoder.pad_id == 1
    assert encoder.conversation((user("hi"), assistant("there")))
    with pytest.raises(DataError, match="the token '<image>'"):
        encoder.conversation((user("hi <image>"), assistant("there")))


def test_a_tokenizer_of_another_model_is_refused(tmp_path):
    folder = small_folder("llama", tmp_path, vocab_size=200)
    with pytest.raises(ModelError, match="do not belong together"):
        opened(folder)


@pytest.mark.parametrize(
    "stored",
    [
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
        {"load_in_4bit": True},
        {"quant_method": "gptq", "bits": 4},
        {"quant_method": "awq", "bits": 4},
        {"quant_method": "fp8"},
        {"quant_method": "compressed-tensors"},
    ],
)
def test_weights_that_were_stored_in_few_bits_are_refused_with_what_to_do(stored, tmp_path):
    folder = small_folder("llama", tmp_path)
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**values, "quantization_config": stored}))
    with pytest.raises(
        ModelError,
        match=r"quantised by .*stored.*nf4",
    ):
        opened(folder)


def test_experts_that_are_stored_in_four_bits_by_gpt_oss_are_unpacked(tmp_path):
    """MXFP4: two numbers a byte, and an exponent for 32 of them; 0x22 and 2**-3 are 1.0 / 8 (OCP's
    table of E2M1).
    """
    folder = small_folder("gpt_oss", tmp_path, intermediate_size=32)
    weights = load_file(folder / "model.safetensors")
    for name in [name for name in weights if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = weights.pop(name).shape
        weights[f"{name}_blocks"] = torch.full(
            (experts, outputs, inputs // 32, 16),
            0x22,
            dtype=torch.uint8,
        )
        weights[f"{name}_scales"] = torch.full(
            (experts, outputs, inputs // 32),
            127 - 3,
            dtype=torch.uint8,
        )
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps({**values, "quantization_config": {"quant_method": "mxfp4"}}),
    )
    loaded = opened(folder)
    assert loaded.model.model.layers[0].mlp.experts.down_proj.unique().tolist() == [0.125]
    loaded.model.save_pretrained(tmp_path / "again")
    tiny_tokenizer().save_pretrained(tmp_path / "again")
    assert opened(tmp_path / "again").digest == loaded.digest


@pytest.mark.parametrize(
    ("kind", "reached"),
    [
        ("gpt2", {"c_attn", "c_proj", "c_fc"}),
        # its router is a linear layer that gives a pair
        ("phimoe", {"q_proj", "k_proj", "v_proj", "o_proj"}),
        ("mamba", {"in_proj", "x_proj"}),
    ],
)
def test_the_default_adapter_reaches_layers_that_can_have_one(kind, reached, tmp_path):
    loaded = opened(small_folder(kind, tmp_path))
    role = Role(add_adapter(loaded.model, "policy", LoraConfig(rank=2)), "policy")
    named = {
        name.split(".lora_")[0].rpartition(".")[2]
        for name, _ in role.model.named_parameters()
        if ".lora_" in name
    }
    assert named == reached


def test_a_layer_that_takes_no_adapter_is_refused_by_name(tmp_path):
    loaded = opened(small_folder("phimoe", tmp_path))
    with pytest.raises(ModelError, match="router"):
        add_adapter(loaded.model, "policy", LoraConfig(targets=("router",)))


def test_a_head_is_as_wide_as_the_last_state(tmp_path):
    """OPT-350m projects its states to half the width before its output layer."""
    config = small_config("opt-350m")
    assert (config.hidden_size, config.word_embed_proj_dim) == (32, 16)
    folder = small_folder("opt-350m", tmp_path)
    pairs = [{"prompt": f"Say {i}.", "chosen": f"{i}!", "rejected": f"no {i}"} for i in range(8)]
    run = tether.reward({"source": str(folder), **FLOAT32}, pairs, epochs=1, run=tmp_path / "run")
    assert run.reward_model.source.role.head.linear.in_features == 16
    assert all(score is not None for score in run.reward_model.score(["Say 1."], ["1!"]))
