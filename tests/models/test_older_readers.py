"""What tether saves, as transformers 4 reads it: the same rotary settings, a tokenizer that exists
there, the same numbers.

With TETHER_TRANSFORMERS_4 naming a Python that has transformers 4.57, log-probabilities are
compared, too.
"""

import json
import os
import subprocess

import pytest
import torch
import transformers

from tether.cli.tools.export import export_model
from tether.models.loading import save_model
from tether.models.older_readers import with_older_names
from tether.models.tiny import TEMPLATE, tiny_model, tiny_tokenizer

SIZES = {
    **{
        "vocab_size": 270,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    },
    **{
        "max_position_embeddings": 2048,
        "initializer_range": 0.1,
        "eos_token_id": 1,
        "pad_token_id": 0,
        "bos_token_id": None,
    },
}
GROUPED = {**SIZES, "num_key_value_heads": 2}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}
YARN = {"factor": 4.0, "original_max_position_embeddings": 512}
BY_LAYER = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 3e3},
    "full_attention": {"rope_type": "linear", "rope_theta": 7e5, "factor": 4.0},
}
MODELS = {
    "llama": ("Llama", GROUPED, {"rope_type": "default", "rope_theta": 5e5}),
    "llama3": ("Llama", GROUPED, {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}),
    "yarn": ("Qwen2", GROUPED, {"rope_type": "yarn", "rope_theta": 1e6, **YARN}),
    "qwen3": ("Qwen3", {**GROUPED, "head_dim": 16}, {"rope_type": "default", "rope_theta": 1e6}),
    "mistral": (
        "Mistral",
        {**GROUPED, "sliding_window": None},
        {"rope_type": "default", "rope_theta": 1e6},
    ),
    "phi3": (
        "Phi3",
        GROUPED,
        {"rope_type": "default", "rope_theta": 3e4, "partial_rotary_factor": 0.5},
    ),
    "gpt_neox": (
        "GPTNeoX",
        SIZES,
        {"rope_type": "default", "rope_theta": 3e4, "partial_rotary_factor": 0.5},
    ),
    "gemma2": (
        "Gemma2",
        {**GROUPED, "head_dim": 16, "sliding_window": 64},
        {"rope_type": "default", "rope_theta": 3e4},
    ),
    "gemma3": (
        "Gemma3Text",
        {**GROUPED, "head_dim": 16, "sliding_window": 64, "num_hidden_layers": 6},
        BY_LAYER,
    ),
}
READ_IN_4 = """
import json, sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
folder, ids = sys.argv[1], json.loads(sys.argv[2])
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
with torch.no_grad():
    row = torch.tensor([ids])
    logprobs = model(row).logits[0, :-1].log_softmax(-1).gather(1, row[0, 1:, None])[:, 0]
talk = [{"role": "user", "content": "Hi, 1 2"}]
shown = tokenizer.apply_chat_template(talk, add_generation_prompt=True, tokenize=True)
print(json.dumps({"logprobs": logprobs.tolist(), "ids": shown, "eos": tokenizer.eos_token_id}))
"""
OLDER = os.environ.get("TETHER_TRANSFORMERS_4", "")


def saved(kind, folder):
    family, sizes, rotary = MODELS[kind]
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**sizes, rope_parameters=rotary)
    model = transformers.AutoModelForCausalLM.from_config(config)
    save_model(model, tiny_tokenizer(), TEMPLATE, folder)
    return model.eval(), json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize("kind", MODELS)
def test_rotary_settings_stand_under_their_older_names_and_newer_readers_see_no_change(
    tmp_path,
    kind,
):
    model, written = saved(kind, tmp_path / "m")
    rotary = MODELS[kind][2]
    flat = rotary.get("full_attention", rotary)
    assert written["rope_theta"] == flat["rope_theta"]
    assert written.get("partial_rotary_factor") == flat.get("partial_rotary_factor")
    scaling = (
        {k: v for k, v in flat.items() if k != "rope_theta"}
        if flat["rope_type"] != "default"
        else {}
    )
    assert scaling.items() <= written.get("rope_scaling", {}).items() and bool(scaling) == (
        "rope_scaling" in written
    )
    assert written["torch_dtype"] == "float32"
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "m")
    assert again.config.rope_parameters == model.config.rope_parameters
    for name, tensor in model.named_buffers():
        assert torch.equal(tensor, again.get_buffer(name)), name


def test_families_with_names_of_their_own_have_these(tmp_path):
    assert saved("gemma3", tmp_path / "gemma")[1]["rope_local_base_freq"] == 3e3
    written = saved("gpt_neox", tmp_path / "neox")[1]
    assert (written["rotary_emb_base"], written["rotary_pct"]) == (3e4, 0.5)


def test_a_part_of_a_model_has_them_and_what_is_null_stays():
    text = {"rope_parameters": {"rope_type": "default", "rope_theta": 5e4}, "sliding_window": None}
    written = with_older_names(
        {"model_type": "x", "text_config": text, "vision_config": {"depth": 2}},
    )
    assert (
        written["text_config"]["rope_theta"] == 5e4
        and written["text_config"]["sliding_window"] is None
    )
    assert written["vision_config"] == {"depth": 2} and "rope_theta" not in written


def test_tokenizers_have_a_class_that_exists_there_and_the_model_of_sentencepiece(tmp_path):
    tiny_model(0).save_pretrained(tmp_path / "base")
    tiny_tokenizer().save_pretrained(tmp_path / "base")
    (tmp_path / "base" / "tokenizer.model").write_bytes(b"a model of SentencePiece")
    export_model(str(tmp_path / "base"), tmp_path / "out")
    values = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert values["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert values["additional_special_tokens"] == ["<|system|>", "<|user|>", "<|assistant|>"]
    assert "extra_special_tokens" not in values
    assert (tmp_path / "out" / "tokenizer.model").read_bytes() == b"a model of SentencePiece"
    read = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    text = "<|user|>Hi, 1 2<|end|>"
    assert read(text)["input_ids"] == tiny_tokenizer()(text)["input_ids"]
    assert set(read.all_special_tokens) == set(tiny_tokenizer().all_special_tokens)


@pytest.mark.slow
@pytest.mark.skipif(
    not OLDER,
    reason="TETHER_TRANSFORMERS_4 names no Python with transformers 4.57",
)
@pytest.mark.parametrize("kind", MODELS)
def test_transformers_4_computes_the_same(tmp_path, kind):
    model, _ = saved(kind, tmp_path / "m")
    ids = torch.randint(5, 200, (1, 1500), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logprobs = model(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
    command = [OLDER, "-c", READ_IN_4, str(tmp_path / "m"), json.dumps(ids[0].tolist())]
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        command,
        check=False,
        capture_output=True,
        text=True,
        env=environment,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    read = json.loads(done.stdout.splitlines()[-1])
    torch.testing.assert_close(torch.tensor(read["logprobs"]), logprobs, atol=2e-3, rtol=0)
    talk = [{"role": "user", "content": "Hi, 1 2"}]
    assert (
        read["ids"]
        == tiny_tokenizer().apply_chat_template(talk, add_generation_prompt=True)["input_ids"]
    )
    assert read["eos"] == 1
