"""What an adapter reaches: all that learns from text, and nothing else, in models that take images
or sounds beside text, choose by an indexer, or have layers that a decoder alone never calls.
"""

import pytest
import torch
import transformers
from tests.models.architectures import small_folder, small_multimodal

import tether
from tether.cli.tools.export import export_model
from tether.core.errors import ModelError
from tether.core.types import assistant, user
from tether.data.batches import make_batch
from tether.models.loading import add_adapter
from tether.models.tiny import tiny_tokenizer
from tether.models.trunk import Role
from tether.runner.assembly.models import open_model
from tether.runner.assembly.roles import encoder_of
from tether.settings.model import LoraConfig, ModelConfig

FLOAT32 = {"dtype": "float32"}
SEVERAL = (
    *("fuyu", "gemma3", "gemma4", "git", "glm4v", "idefics3", "internvl", "kimi_k25", "llama4"),
    *("llava_onevision", "mistral3", "qwen2_5_vl", "qwen3_5", "qwen3_vl", "voxtral"),
)
"""Model types that take images or sounds beside text."""
MORE = (
    *("aria", "exaone4_5", "gemma4_unified", "glm_ocr", "got_ocr2", "granite_docling", "idefics2"),
    *("lfm2_vl", "llava", "llava_next", "minimax_m3_vl", "paligemma", "phi4_multimodal"),
    *("qwen2_audio", "qwen2_vl", "qwen3_5_moe", "qwen3_omni_moe_thinker", "qwen3_vl_moe"),
    *("smolvlm", "video_llava"),
)
TEXT = (
    "bart",
    "deepseek_v32",
    "deepseek_v4",
    "falcon",
    "hy_v4",
    "longcat_flash",
    "trocr",
    "zamba2",
)
TOWERS = ("vision", "visual", "image", "audio", "multi_modal", "vit", "aligner", "indexer")


def saved(kind, folder):
    if kind in TEXT:
        return small_folder(kind, folder)
    small_multimodal(kind).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    "kind",
    [*SEVERAL, *TEXT, *(pytest.param(kind, marks=pytest.mark.slow) for kind in MORE)],
)
def test_every_adapter_gets_a_gradient_from_text_and_no_tower_has_one(kind, tmp_path):
    loaded = open_model(ModelConfig(source=str(saved(kind, tmp_path)), **FLOAT32))
    role = Role(add_adapter(loaded.model, "policy", LoraConfig(rank=2)), "policy")
    for parameter in role.parameters():
        parameter.requires_grad_(True)
    talk = encoder_of(loaded).conversation((user("Say one."), assistant("One! Two, and three.")))
    role.logprobs(make_batch([talk], 0))[0].sum().backward()
    ups = {n: p for n, p in role.model.named_parameters() if ".lora_B." in n}
    idle = [n for n, p in ups.items() if (p.grad is None or not p.grad.any()) and "expert" not in n]
    assert len(ups) >= 8 and not idle
    assert not [n for n in ups if any(tower in n.lower() for tower in TOWERS)]
    # of each kind of attention's inputs, all layers have one
    for end in {n.split(".lora_B")[0].rpartition(".")[2] for n in ups if "self_attn" in n}:
        own = [
            n
            for n, module in role.decoder.named_modules()
            if n.endswith(f"self_attn.{end}") and not any(tower in n for tower in TOWERS)
        ]
        assert len(own) == sum(f"self_attn.{end}." in n for n in ups)


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "gemma4"])
def test_a_model_of_images_is_trained_on_text_sampled_from_and_exported_whole(kind, tmp_path):
    small = small_multimodal(kind)
    small.save_pretrained(tmp_path / "base")
    tiny_tokenizer().save_pretrained(tmp_path / "base")
    source = {"source": str(tmp_path / "base"), **FLOAT32}
    run = tether.grpo(
        source,
        prompts=[f"Say {n}." for n in range(4)],
        reward=lambda prompts, responses: [float(len(text) % 5) for text in responses],
        lora={"rank": 2, "last_layers": 1},
        steps=2,
        prompts_per_step=2,
        samples_per_prompt=4,
        max_new_tokens=4,
        run=tmp_path / "run",
    )
    role = run.policy.role
    adapted = {n.split(".lora_")[0] for n, _ in role.model.named_parameters() if ".lora_" in n}
    assert adapted and all(".layers.1." in name for name in adapted)
    export_model(str(tmp_path / "run"), tmp_path / "out")
    again = transformers.AutoModelForMultimodalLM.from_pretrained(tmp_path / "out")
    assert type(again) is type(small)
    theirs, ours = small.state_dict(), again.state_dict()
    changed = {name for name in theirs if not torch.equal(theirs[name], ours[name])}
    assert changed and all(".layers.1." in name and "vision" not in name for name in changed)


def test_a_named_layer_of_a_tower_is_left_out_or_refused(tmp_path):
    source = str(saved("gemma3", tmp_path))
    model = open_model(ModelConfig(source=source, **FLOAT32)).model
    with pytest.raises(ModelError, match="takes no adapter here"):
        add_adapter(model, "policy", LoraConfig(targets=("fc1",)))
    adapted = add_adapter(model, "policy", LoraConfig(targets=("q_proj",)))
    names = [name for name, _ in adapted.named_parameters() if ".lora_B." in name]
    assert len(names) == 2 and all("language_model" in name for name in names)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("clip", "no model of the type 'clip' that continues a text"),
        ("blip-2", "cannot be run on token ids alone"),
        ("pix2struct", "reads both ways"),
    ],
)
def test_a_model_of_another_task_is_refused_by_its_kind(kind, words, tmp_path):
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if kind == "clip":
        CONFIG_MAPPING[kind]().save_pretrained(tmp_path)
        (tmp_path / "model.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}")
    else:
        small_multimodal(kind).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=words):
        open_model(ModelConfig(source=str(tmp_path), **FLOAT32))
