"""Model folders to be damaged, what may be done to them, and what is asked of them then."""

import json
import shutil

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tether.cli.tools.reward_bench import bench_rewards
from tether.core.errors import TetherError
from tether.core.types import Prompt, Sampling, user
from tether.models.heads import ScalarHead
from tether.models.loading import add_adapter, load_model, save_model
from tether.models.saving import save_ensemble
from tether.models.tiny import TEMPLATE, tiny_model, tiny_tokenizer
from tether.models.trunk import Role
from tether.rewards.classifier import ClassifierReward
from tether.runner.assembly.models import open_model
from tether.runner.assembly.online import online_stage
from tether.runner.assembly.roles import encoder_of, load_policy, local_engine, save_trained
from tether.runner.run import run_recipe
from tether.settings.model import LoraConfig, ModelConfig
from tether.settings.reading import build
from tether.settings.recipe import Recipe
from tether.settings.rewards import ClassifierConfig

PAIRS = [
    {"prompt": "a", "chosen": "b!", "rejected": "c"},
    {"prompt": "d", "chosen": "e!", "rejected": "f"},
]


def make(root):
    """A model, a classifier, roles on the model, an ensemble of one of them, and rows."""
    save_model(tiny_model(1), tiny_tokenizer(), TEMPLATE, root / "model")
    config = tiny_model(1).config
    config.num_labels = 1
    transformers.LlamaForSequenceClassification(config).save_pretrained(root / "classifier")
    tiny_tokenizer().save_pretrained(root / "classifier")
    for kind in ("policy", "reward"):
        loaded = load_model(ModelConfig(source=str(root / "model"), dtype="float32"))
        role = Role(
            add_adapter(loaded.model, kind, LoraConfig(rank=2)),
            kind,
            ScalarHead(64, zero=False) if kind == "reward" else None,
        )
        save_trained(role, loaded, root / kind, kind=kind)
    shutil.copytree(root / "reward", root / "members" / "first")
    edited(root / "members" / "first" / "role.json", base="../../model")
    save_ensemble(root / "members", [root / "members" / "first"])
    (root / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in PAIRS))
    return root


def edited(path, *without, **values):
    """A file of JSON with other values, and without some."""
    old = json.loads(path.read_text())
    path.write_text(json.dumps({k: v for k, v in {**old, **values}.items() if k not in without}))


def cut(path, share=0.5):
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])


def tensors(path, change):
    """A file of tensors, changed in place."""
    found = load_file(path)
    change(found)
    save_file(found, path, metadata={"format": "pt"})


def tokenizer(folder, **values):
    made = tiny_tokenizer()
    for name, value in values.items():
        setattr(made, name, value)
    made.save_pretrained(folder)


def encoder_only(folder):
    config = transformers.BertConfig(
        vocab_size=300,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
    )
    transformers.BertForMaskedLM(config).save_pretrained(folder)


def several_labels(folder):
    config = tiny_model().config
    config.id2label = {0: "good", 1: "bad"}
    transformers.LlamaForSequenceClassification(config).save_pretrained(folder)


def shards(folder, *lost):
    (folder / "model.safetensors").unlink()
    tiny_model().save_pretrained(folder, max_shard_size="50KB")
    for name in sorted(path.name for path in folder.glob("model-*"))[: len(lost)]:
        (folder / name).unlink()


def pickled(folder):
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def own_code(folder):
    edited(
        folder / "config.json",
        model_type="homemade",
        auto_map={"AutoConfig": "code.C", "AutoModelForCausalLM": "code.M"},
    )
    (folder / "code.py").write_text("raise SystemExit('ran')\n")


def load(folder, **values):
    return open_model(
        build(ModelConfig, {"source": str(folder), "dtype": "float32", **values}, where="model"),
    )


def answer(folder, text="hi", new=8, **values):
    loaded = load(folder, **values)
    return local_engine(Role(loaded.model), loaded).generate(
        [Prompt((user(text),), "p7")],
        Sampling(max_new_tokens=new),
    )


def encode(folder):
    return encoder_of(load(folder))


def classify(folder, **values):
    return ClassifierReward.load(ClassifierConfig(source=str(folder), **values))


def bench(folder):
    return bench_rewards(str(folder), [str(folder.parent / "pairs.jsonl")])


def grpo(folder):
    rows = folder.parent / "pairs.jsonl"
    section = {
        "data": {"path": str(rows)},
        "steps": 1,
        "reward_source": "classifier",
        "classifier": {"source": str(folder)},
    }
    values = {
        "run": str(folder.parent / "run"),
        "model": {"source": "tiny", "dtype": "float32"},
        "grpo": section,
    }
    return run_recipe(build(Recipe, values), ["grpo"])


def ask_steps(folder):
    section = {"reward_source": "process", "max_new_tokens": 4}
    (folder.parent / "process").mkdir()
    shutil.copytree(folder, folder.parent / "process" / "model")
    values = {
        "run": str(folder.parent),
        "model": {"source": str(folder.parent / "model"), "dtype": "float32"},
        "grpo": section,
    }
    recipe = build(Recipe, values)
    return online_stage(recipe.grpo, recipe.model, folder, 0)


def refused_folder(made, place, what, damage, use, message):
    """Use a damaged copy of one of the folders that `make` made: one line that says what, and
    where.
    """
    for name in {"model", "pairs.jsonl", what}:
        (shutil.copytree if (made / name).is_dir() else shutil.copy)(made / name, place / name)
    if damage is not None:
        damage(place / what)
    with pytest.raises(TetherError, match=message) as told:
        use(str(place / what) if use is load_policy else place / what)
    text = str(told.value)
    assert "\n" not in text and len(text) < 700
    assert str(place / what) in text or what == "model" or damage is None
