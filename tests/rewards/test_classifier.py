"""Sequence classifiers as rewards: their own tokenizer, their own template, the number that the
library itself gives.
"""

import json

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2ForSequenceClassification,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
)

from tether.cli.tools.reward_bench import bench_rewards
from tether.core.errors import ConfigError, MissingFileError, ModelError
from tether.core.types import Message, Prompt, Rollout, Sampling, StopReason, assistant, user
from tether.models.tiny import tiny_model, tiny_tokenizer
from tether.rewards.classifier import ClassifierReward
from tether.runner.run import run_recipe
from tether.settings.reading import build
from tether.settings.recipe import Recipe
from tether.settings.rewards import ClassifierConfig

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *"abcdefgh"]


def encoder_model(folder, num_labels=1):
    """A BERT of one layer whose words are letters."""
    inner = Tokenizer(
        models.WordLevel({word: n for n, word in enumerate(WORDS)}, unk_token="[UNK]"),
    )
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    special = {
        "pad_token": "[PAD]",
        "unk_token": "[UNK]",
        "cls_token": "[CLS]",
        "sep_token": "[SEP]",
    }
    inputs = ["input_ids", "token_type_ids", "attention_mask"]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, model_input_names=inputs, **special)
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 16,
    }
    config = BertConfig(
        vocab_size=len(WORDS),
        num_labels=num_labels,
        initializer_range=0.5,
        **sizes,
    )
    BertForSequenceClassification(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def talks():
    return [
        (user("a b"), assistant("c d e")),
        (user("f"), assistant("g")),
        (user("a"), assistant("b"), user("c"), assistant("d h")),
    ]


@torch.no_grad()
def test_an_encoder_reads_prompt_and_response_as_two_segments(tmp_path):
    reward = ClassifierReward.load(ClassifierConfig(source=encoder_model(tmp_path), batch=2))
    values = [score.value for score in reward.score_conversations(talks())]
    for value, (first, second) in zip(
        values,
        [("a b", "c d e"), ("f", "g"), ("a b c", "d h")],
        strict=True,
    ):
        ids = [2, *(WORDS.index(w) for w in first.split()), 3]
        whole = [*ids, *(WORDS.index(w) for w in second.split()), 3]
        kinds = [0] * len(ids) + [1] * (len(whole) - len(ids))
        alone = reward.model(
            input_ids=torch.tensor([whole]),
            token_type_ids=torch.tensor([kinds]),
        ).logits
        assert value == pytest.approx(float(alone), abs=1e-5)


@torch.no_grad()
def test_a_decoder_reads_its_own_chat_template(tmp_path):
    config = tiny_model().config
    config.num_labels = 1
    torch.manual_seed(1)
    LlamaForSequenceClassification(config).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    reward = ClassifierReward.load(ClassifierConfig(source=str(tmp_path), batch=3))
    for score, messages in zip(reward.score_conversations(talks()), talks(), strict=True):
        text = "".join(f"<|{m.role}|>{m.content}<|end|>" for m in messages)
        ids = tiny_tokenizer()(text, add_special_tokens=False, return_tensors="pt").input_ids
        assert score.value == pytest.approx(float(reward.model(input_ids=ids).logits), abs=1e-5)


SIZES = {
    "vocab_size": 261,
    "num_labels": 1,
    "bos_token_id": None,
    "eos_token_id": 1,
    "initializer_range": 0.3,
}
WIDE = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    **SIZES,
}
LOCAL = {
    "attention_types": [[["global", "local"], 1]],
    "window_size": 8,
    "num_layers": 2,
    "num_heads": 4,
    "hidden_size": 32,
}
DECODERS = {
    "llama": lambda: transformers.LlamaConfig(**WIDE),
    "qwen2": lambda: transformers.Qwen2Config(**WIDE, num_key_value_heads=2),
    # positions are learned
    "gpt2": lambda: transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, **SIZES),
    "gpt_neo": lambda: transformers.GPTNeoConfig(**LOCAL, **SIZES),  # attends to places in the row
}
ODDITIES = {
    "as it should be": (0, {}),
    "the EOS pads": (1, {"pad_token": "<|end|>"}),
    "no padding token": (None, {"pad_token": None}),
    "config names another": (3, {}),
    "left padding": (0, {"padding_side": "left"}),
    "left padding with the EOS": (1, {"pad_token": "<|end|>", "padding_side": "left"}),
}


@pytest.mark.parametrize("oddity", ODDITIES)
@pytest.mark.parametrize("kind", DECODERS)
@torch.no_grad()
def test_a_decoders_score_stands_at_the_last_token_whatever_pads(tmp_path, kind, oddity):
    padding, changes = ODDITIES[oddity]
    config = DECODERS[kind]()
    config.pad_token_id = padding
    torch.manual_seed(0)
    transformers.AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path)
    tokenizer = tiny_tokenizer()
    for name, value in changes.items():
        setattr(tokenizer, name, value)
    tokenizer.save_pretrained(tmp_path)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path).eval()
    expected = []
    for messages in talks():
        text = "".join(f"<|{m.role}|>{m.content}<|end|>" for m in messages)
        ids = tiny_tokenizer()(text, add_special_tokens=False, return_tensors="pt").input_ids
        states = getattr(model, model.base_model_prefix)(input_ids=ids).last_hidden_state
        expected.append(float(model.score(states[0, -1])))
    assert max(expected) - min(expected) > 0.1
    for batch in (1, 3):
        reward = ClassifierReward.load(ClassifierConfig(source=str(tmp_path), batch=batch))
        values = [score.value for score in reward.score_conversations(talks())]
        assert values == pytest.approx(expected, abs=1e-4)


def test_a_longer_conversation_than_the_model_reads_is_cut_at_its_beginning(tmp_path):
    config = DECODERS["gpt2"]()
    config.n_positions = 32
    transformers.AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    reward = ClassifierReward.load(ClassifierConfig(source=str(tmp_path)))
    long, end = (user("x" * 100), assistant("y" * 40)), (user("z" * 90), assistant("y" * 40))
    values = [score.value for score in reward.score_conversations([long, end])]
    assert values[0] == pytest.approx(values[1], abs=1e-5)


def test_rollouts_are_judged_by_their_text(tmp_path):
    reward = ClassifierReward.load(ClassifierConfig(source=encoder_model(tmp_path)))
    prompt = Prompt((Message("user", "a b"),))
    rollout = Rollout((9,), (8, 7), (), StopReason.STOP_TOKEN, "c d e", 0, 0, Sampling(), prompt)
    assert reward.score([rollout])[0].value == pytest.approx(
        reward.score_conversations(talks()[:1])[0].value,
    )


def test_one_of_several_outputs_has_to_be_chosen(tmp_path):
    source = encoder_model(tmp_path, num_labels=3)
    with pytest.raises(ModelError, match=r"has 3 outputs \(LABEL_0, LABEL_1, LABEL_2\). Set label"):
        ClassifierReward.load(ClassifierConfig(source=source))
    with pytest.raises(ModelError, match="no output 'good'; it has LABEL_0"):
        ClassifierReward.load(ClassifierConfig(source=source, label="good"))
    by_name, by_number = (
        ClassifierReward.load(ClassifierConfig(source=source, label=label))
        for label in ("LABEL_2", 2)
    )
    assert by_name.output == by_number.output == 2
    with pytest.raises(MissingFileError, match=r"no config\.json"):
        ClassifierReward.load(ClassifierConfig(source=str(tmp_path / "nothing")))


def test_a_policy_can_be_trained_on_it_and_it_can_be_examined(tmp_path):
    source = encoder_model(tmp_path / "judge")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": w}) + "\n" for w in ("a b", "c", "d e f")))
    grpo = {
        "data": {"path": str(prompts)},
        "steps": 2,
        "prompts_per_step": 2,
        "samples_per_prompt": 2,
        "max_new_tokens": 6,
    }
    grpo |= {"classifier": {"source": source}}  # the table says that it is the reward
    values = {"run": str(tmp_path / "run"), "model": {"source": "tiny", "dtype": "float32"}}
    assert run_recipe(build(Recipe, {**values, "grpo": grpo}), ["grpo"])["grpo"]["steps"] == 2
    with pytest.raises(ConfigError, match="a table named classifier belong together"):
        build(Recipe, {**values, "grpo": {**grpo, "reward_source": "random"}})
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text(
        "".join(
            json.dumps({"prompt": "a", "chosen": c, "rejected": r}) + "\n"
            for c, r in ("bc", "de", "fg")
        ),
    )
    found = bench_rewards(source, [str(pairs)])["pairs.jsonl"]
    reward = ClassifierReward.load(ClassifierConfig(source=source))
    sides = [
        [s.value for s in reward.score_conversations([(user("a"), assistant(w)) for w in pair])]
        for pair in ("bc", "de", "fg")
    ]
    assert found["accuracy"]["value"] == pytest.approx(sum(c > r for c, r in sides) / 3)


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_score_does_not_depend_on_its_neighbours_whatever_side_the_tokenizer_pads(tmp_path, side):
    """Learned positions: with padding on the left a short text would stand at the places of a long
    one.
    """
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=261,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=256,
        num_labels=1,
        pad_token_id=0,
        initializer_range=0.3,
    )
    GPT2ForSequenceClassification(config).save_pretrained(tmp_path)
    tokenizer = tiny_tokenizer()
    tokenizer.padding_side = side
    tokenizer.save_pretrained(tmp_path)
    reward = ClassifierReward.load(ClassifierConfig(source=str(tmp_path)))
    together = [score.value for score in reward.score_conversations(talks())]
    own = ClassifierReward.load(ClassifierConfig(source=str(tmp_path), batch=1))
    assert together == pytest.approx(
        [score.value for score in own.score_conversations(talks())],
        abs=1e-5,
    )
    assert max(together) - min(together) > 1e-3
