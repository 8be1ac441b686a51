"""Folders with an adapter of peft: the model is base and adapter together, as peft itself computes
it, or one sentence.
"""

import json
import shutil

import pytest
import torch
import transformers
from peft import IA3Config, LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file

import tether
from tether.cli.tools.export import export_model
from tether.core.errors import ModelError
from tether.core.types import assistant, user
from tether.data.batches import make_batch
from tether.models.tiny import tiny_model, tiny_tokenizer
from tether.models.trunk import Role
from tether.rewards.classifier import ClassifierReward
from tether.runner.assembly.engines import _base
from tether.runner.assembly.models import open_model
from tether.runner.assembly.roles import encoder_of, load_policy
from tether.settings.model import ModelConfig
from tether.settings.rewards import ClassifierConfig


def lora(**settings):
    return LoraConfig(
        **{"r": 4, "target_modules": ["q_proj", "down_proj"], "task_type": "CAUSAL_LM", **settings},
    )


TIED = {
    "embedding": lora(target_modules=["embed_tokens", "q_proj"]),
    "embedding, dora": lora(target_modules=["embed_tokens"], use_dora=True),
    "output layer": lora(target_modules=["lm_head", "q_proj"]),
    "output layer, whole": lora(modules_to_save=["lm_head"]),
    "both, whole": lora(modules_to_save=["embed_tokens", "lm_head"]),
    "some tokens": lora(trainable_token_indices=[5, 6, 7]),
}
"""Adapters at an embedding and an output layer that share one weight in the base."""
KINDS = TIED | {
    "plain": lora(),
    "rslora": lora(target_modules="all-linear", use_rslora=True),
    "dora": lora(target_modules=["v_proj"], use_dora=True),
    "modules_to_save": lora(target_modules=["q_proj"], modules_to_save=["norm"]),
    "some layers": lora(target_modules=["q_proj"], layers_to_transform=[1]),
    "patterns": lora(rank_pattern={"q_proj": 2}, alpha_pattern={"down_proj": 32}),
    "biases": lora(bias="all"),
    "pissa": lora(init_lora_weights="pissa"),
    "olora": lora(init_lora_weights="olora"),
}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    tiny_model(1).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def adapter(base, folder, settings):
    model = get_peft_model(transformers.AutoModelForCausalLM.from_pretrained(base), settings)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.2 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return folder


def beside(base, folder, settings):
    """Whole weights and an adapter in one folder."""
    shutil.copytree(base, folder)
    adapter(base, folder, settings)
    return folder


@torch.no_grad()
def logits(model):
    return model(input_ids=torch.arange(5, 60)[None]).logits


@pytest.mark.parametrize("place", [adapter, beside])
@pytest.mark.parametrize("kind", KINDS)
def test_the_adapter_counts_as_peft_computes_it(base, tmp_path, kind, place):
    folder = place(base, tmp_path / "folder", KINDS[kind])
    whole = transformers.AutoModelForCausalLM.from_pretrained(base)
    expected = logits(PeftModel.from_pretrained(whole, folder).eval())
    assert (
        expected - logits(transformers.AutoModelForCausalLM.from_pretrained(base))
    ).abs().max() > 0.1
    loaded = open_model(ModelConfig(source=str(folder), dtype="float32"))
    torch.testing.assert_close(logits(loaded.model), expected, atol=1e-4, rtol=0)
    assert not [name for name, _ in loaded.model.named_parameters() if "lora" in name]


@pytest.mark.parametrize("kind", TIED)
def test_ends_that_an_adapter_sets_apart_stay_so_in_exports_and_servers(base, tmp_path, kind):
    """A merged weight of one end is not the other end's, also after the model was written and read
    again.
    """
    folder = adapter(base, tmp_path / "folder", KINDS[kind])
    expected = logits(
        PeftModel.from_pretrained(
            transformers.AutoModelForCausalLM.from_pretrained(base),
            folder,
        ).eval(),
    )
    loaded = open_model(ModelConfig(source=str(folder), dtype="float32"))
    shared = (
        loaded.model.get_input_embeddings().weight is loaded.model.get_output_embeddings().weight
    )
    assert shared == (kind == "some tokens")
    export_model(str(folder), tmp_path / "out", dtype="float32")
    for written in (tmp_path / "out", _base(loaded, tmp_path / "engine", 0)):
        read = transformers.AutoModelForCausalLM.from_pretrained(written, dtype=torch.float32)
        torch.testing.assert_close(logits(read.eval()), expected, atol=1e-3, rtol=0)


def test_stages_engines_and_exports_stand_on_the_merged_model(base, tmp_path):
    folder = beside(base, tmp_path / "folder", KINDS["plain"])
    expected = logits(open_model(ModelConfig(source=str(folder), dtype="float32")).model)
    export_model(str(folder), tmp_path / "out")
    torch.testing.assert_close(
        logits(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")),
        expected,
        atol=1e-4,
        rtol=0,
    )
    pairs = [{"prompt": f"Q{i}", "chosen": "yes", "rejected": "no"} for i in range(8)]
    model = {"source": str(folder), "dtype": "float32"}
    tether.dpo(
        model,
        pairs,
        optimizer={"learning_rate": 1e-9},
        heldout_fraction=0.0,
        run=str(tmp_path / "run"),
    )
    role, _ = load_policy(str(tmp_path / "run"))
    torch.testing.assert_close(logits(role.causal_model), expected, atol=1e-3, rtol=0)
    loaded = open_model(ModelConfig(source=str(folder), dtype="float32"))
    served = _base(loaded, tmp_path / "engine", 0)
    torch.testing.assert_close(
        logits(transformers.AutoModelForCausalLM.from_pretrained(served)),
        expected,
        atol=1e-4,
        rtol=0,
    )


def test_an_adapters_tokenizer_and_bfloat16_are_used(base, tmp_path):
    folder = adapter(base, tmp_path / "folder", KINDS["plain"])
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}>{{ m.content }}<|end|>{% endfor %}"
    tokenizer.save_pretrained(folder)
    loaded = open_model(ModelConfig(source=str(folder), dtype="bfloat16"))
    assert (
        loaded.tokenizer.chat_template == tokenizer.chat_template
        and loaded.model.dtype == torch.bfloat16
    )
    batch = make_batch([encoder_of(loaded).conversation((user("a"), assistant("b")))], 0)
    assert Role(loaded.model).logprobs(batch)[0].isfinite().all()


def rewrite(path, **changes):
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def drop_a_tensor(folder):
    tensors = load_file(folder / "adapter_model.safetensors")
    save_file(dict(sorted(tensors.items())[1:]), folder / "adapter_model.safetensors")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda f: rewrite(f / "adapter_config.json", base_model_name_or_path="./sft/model"),
            r"whose base cannot be loaded",
        ),
        (
            lambda f: rewrite(f / "adapter_config.json", base_model_name_or_path=None),
            r"names no base \(base_model_name_or_path\)",
        ),
        (
            lambda f: (f / "adapter_model.safetensors").unlink(),
            r"adapter_model.safetensors is "
            r"missing",
        ),
        (drop_a_tensor, r"1 tensors are missing in adapter_model.safetensors, such as"),
        (
            lambda f: rewrite(f / "adapter_config.json", r=8),
            r"cannot be merged into its base: "
            r".*size mismatch",
        ),
        (
            lambda f: rewrite(f / "adapter_config.json", init_lora_weights="pissa_niter_4"),
            r"took "
            r"a random part out of the base",
        ),
        (
            lambda f: adapter(f.parent / "base", f, lora(layer_replication=[[0, 2], [1, 2]])),
            r"merged weights compute other logits than base and adapter",
        ),
    ],
)
def test_an_adapter_that_cannot_be_merged_is_one_message(base, tmp_path, damage, message):
    (tmp_path / "base").symlink_to(base)
    folder = adapter(base, tmp_path / "folder", KINDS["plain"])
    damage(folder)
    with pytest.raises(ModelError, match=message):
        open_model(ModelConfig(source=str(folder)))


def test_other_adapters_and_classifiers_under_one_are_refused_or_merged(base, tmp_path):
    folder = adapter(
        base,
        tmp_path / "ia3",
        IA3Config(target_modules=["k_proj"], feedforward_modules=[], task_type="CAUSAL_LM"),
    )
    whole = transformers.AutoModelForCausalLM.from_pretrained(base)
    expected = logits(PeftModel.from_pretrained(whole, folder).eval())
    torch.testing.assert_close(
        logits(open_model(ModelConfig(source=str(folder), dtype="float32")).model),
        expected,
        atol=1e-4,
        rtol=0,
    )
    with pytest.raises(ModelError, match=r"an adapter.*classifier"):
        ClassifierReward.load(ClassifierConfig(source=str(folder)))
