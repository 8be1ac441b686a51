"""How a model was taught to speak goes with it: stop tokens, system message and type, in every
place that reads a result.
"""

import json

import pytest
import torch
import transformers

import tether
from tether.cli.tools.export import export_model
from tether.core.errors import ModelError
from tether.core.types import user
from tether.models.speech import declare_ends
from tether.models.tiny import TEMPLATE, tiny_model, tiny_tokenizer
from tether.runner.assembly.engines import _base
from tether.runner.assembly.models import open_model
from tether.runner.assembly.roles import encoder_of, load_policy
from tether.settings.model import ModelConfig

CHATML = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
ROWS = [{"prompt": f"Say {i}", "response": "yes"} for i in range(16)]
SYSTEM = 'Be "brief".'


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    """A base whose EOS is <|end|>, tuned to end turns with <|im_end|>."""
    folder = tmp_path_factory.mktemp("tuned")
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens(
        {"additional_special_tokens": ["<|system|>", "<|user|>", "<|assistant|>", "<|im_end|>"]},
    )
    tokenizer.chat_template = CHATML
    tiny_model(0, vocab=270).save_pretrained(folder / "base")
    tokenizer.save_pretrained(folder / "base")
    model = {
        "source": str(folder / "base"),
        "stop_tokens": ["<|im_end|>"],
        "dtype": "float32",
        "system_prompt": SYSTEM,
    }
    how = {"lora": False, "optimizer": {"learning_rate": 5e-3}, "heldout_fraction": 0.0}
    return tether.sft(model, ROWS, epochs=20, run=str(folder / "run"), **how), folder


def end_of(tokenizer):
    return tokenizer.convert_tokens_to_ids("<|im_end|>")


def test_whoever_loads_the_result_speaks_as_it_was_taught(tuned, monkeypatch):
    run, folder = tuned
    monkeypatch.setenv("TETHER_CPU_DTYPE", "bfloat16")  # a machine whose own choice is another type
    for path in (folder / "run", folder / "run" / "sft", folder / "run" / "sft" / "model"):
        role, loaded = load_policy(str(path))
        assert loaded.stop_ids == (end_of(loaded.tokenizer),)
        assert loaded.system_prompt == SYSTEM
        assert role.model.dtype == torch.float32
    assert run.policy.generate("Say 3", temperature=0.0, max_new_tokens=24) == "yes"


def test_later_stages_of_other_recipes_begin_with_the_same_encoding(tuned):
    _, folder = tuned
    taught = encoder_of(load_policy(str(folder / "run"))[1]).describe()
    loaded = open_model(ModelConfig(source=str(folder / "run" / "sft" / "model")))
    assert encoder_of(loaded).describe() == taught
    pairs = [{"prompt": f"Say {i}", "chosen": "yes", "rejected": "no"} for i in range(4)]
    later = tether.dpo(
        str(folder / "run" / "sft" / "model"),
        pairs,
        heldout_fraction=0.0,
        run=str(folder / "later"),
    )
    assert (
        json.loads((folder / "later" / "direct" / "policy" / "role.json").read_text())["encoding"]
        == taught
    )
    assert later.policy.generate("Say 3", temperature=0.0, max_new_tokens=24) == "yes"
    own = ModelConfig(
        source=str(folder / "run" / "sft" / "model"),
        stop_tokens=("<|end|>",),
        system_prompt="Other.",
    )
    assert (open_model(own).stop_ids, open_model(own).system_prompt) == ((1,), "Other.")


@pytest.mark.parametrize("source", ["run", "run/sft/model"])
def test_strangers_stop_where_the_turn_ends(tuned, tmp_path, source):
    _, folder = tuned
    export_model(str(folder / source), tmp_path / "out")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    end = end_of(tokenizer)
    assert model.generation_config.eos_token_id == [end, 1], (
        "the base's EOS stays, after the new one"
    )
    assert model.config.eos_token_id == [end, 1] and tokenizer.eos_token == "<|im_end|>"
    assert model.dtype == torch.float32
    talk = [{"role": "user", "content": "Say 3"}]
    ids = tokenizer.apply_chat_template(
        talk,
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    assert SYSTEM in tokenizer.decode(ids["input_ids"][0])
    out = model.generate(**ids, max_new_tokens=24, do_sample=False)[0][ids["input_ids"].shape[1] :]
    assert tokenizer.decode(out) == "yes<|im_end|>"


def test_a_base_for_engine_servers_declares_the_same_ends(tuned, tmp_path):
    _, folder = tuned
    loaded = open_model(ModelConfig(source=str(folder / "run" / "sft" / "model")))
    served = _base(loaded, tmp_path, 0)
    assert transformers.GenerationConfig.from_pretrained(served).eos_token_id == [
        end_of(loaded.tokenizer),
        1,
    ]


def test_a_policy_trained_whole_declares_them_too(tuned):
    _, folder = tuned
    pairs = [{"prompt": f"Say {i}", "chosen": "yes", "rejected": "no"} for i in range(4)]
    base = {"source": str(folder / "base"), "stop_tokens": ["<|im_end|>"]}
    tether.dpo(base, pairs, lora=False, heldout_fraction=0.0, run=str(folder / "whole"))
    place = folder / "whole" / "direct" / "policy" / "model"
    end = end_of(transformers.AutoTokenizer.from_pretrained(place))
    assert transformers.GenerationConfig.from_pretrained(place).eos_token_id == [end, 1]


def test_a_template_that_writes_the_eos_keeps_its_text():
    model, tokenizer = tiny_model(0, vocab=270), tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_end|>"]})
    template = TEMPLATE.replace("<|end|>", "{{ eos_token }}")
    declare_ends(model, tokenizer, (end_of(tokenizer),), template)
    assert tokenizer.eos_token == "<|end|>" and model.generation_config.eos_token_id == [
        end_of(tokenizer),
        1,
    ]


def test_an_end_of_turn_that_is_a_plain_token_changes_no_tokenizer():
    model, tokenizer = tiny_model(0), tiny_tokenizer()
    (newline,) = tokenizer("\n", add_special_tokens=False)["input_ids"]
    declare_ends(model, tokenizer, (newline,), TEMPLATE)
    assert tokenizer.eos_token == "<|end|>" and model.generation_config.eos_token_id == [newline, 1]


def test_nothing_new_changes_no_setting_of_the_model():
    model, tokenizer = tiny_model(0), tiny_tokenizer()
    declare_ends(model, tokenizer, (1,), TEMPLATE)
    assert model.generation_config.eos_token_id == [1] and model.config.eos_token_id == 1


def test_a_file_of_another_program_is_refused(tuned, tmp_path):
    tiny_model(0).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "tether_encoding.json").write_text('{"bpe": 1}')
    with pytest.raises(ModelError, match=r"tether_encoding.json is not"):
        open_model(ModelConfig(source=str(tmp_path)))
    assert encoder_of(open_model(ModelConfig(source="tiny"))).prompt((user("a"),))
