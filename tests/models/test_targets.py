"""Layers that get an adapter: what is trained is what samples and what is saved, or the setting is
refused.
"""

import logging

import pytest
import torch
import transformers

from tether.cli.tools.export import export_model
from tether.core.errors import ModelError
from tether.core.once import once
from tether.core.types import Prompt, Sampling, assistant, user
from tether.data.batches import make_batch
from tether.models.tiny import tiny_tokenizer
from tether.models.trunk import Role
from tether.rewards.classifier import ClassifierReward
from tether.runner.assembly.models import open_model
from tether.runner.assembly.roles import encoder_of, local_engine, new_head, new_role, save_trained
from tether.settings.model import LoraConfig, ModelConfig
from tether.settings.rewards import ClassifierConfig

SMALL = {
    "vocab_size": 261,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
}
ENDS = {"eos_token_id": 1, "pad_token_id": 0, "bos_token_id": None, "initializer_range": 0.1}
WIDE = {**SMALL, **ENDS, "intermediate_size": 64, "num_key_value_heads": 2}
GPT2 = {
    "vocab_size": 261,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 256,
    "initializer_range": 0.1,
    "eos_token_id": 1,
}
EXPERTS = {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
}
MODELS = {
    "tied": lambda: transformers.LlamaConfig(**WIDE, tie_word_embeddings=True),
    "apart": lambda: transformers.LlamaConfig(**WIDE, tie_word_embeddings=False),
    "gpt2": lambda: transformers.GPT2Config(**GPT2),
    "experts": lambda: transformers.Qwen3MoeConfig(**WIDE, **EXPERTS),
    "latent": lambda: transformers.DeepseekV3Config(
        **{**WIDE, **LATENT, "num_key_value_heads": 4},
        first_k_dense_replace=2,
        n_routed_experts=4,
    ),
}
TALK = (user("one two"), assistant("three four five"))


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    made = {}

    def make(kind):
        if kind not in made:
            torch.manual_seed(0)
            made[kind] = tmp_path_factory.mktemp(kind)
            transformers.AutoModelForCausalLM.from_config(MODELS[kind]()).save_pretrained(
                made[kind],
            )
            tiny_tokenizer().save_pretrained(made[kind])
        return str(made[kind])

    return make


def opened(folder):
    return open_model(ModelConfig(source=folder, dtype="float32"))


def moved(role):
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(1)
        for parameter in role.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    role.train_mode(False)
    return role


@torch.no_grad()
def logprobs(role, encoder):
    return role.logprobs(make_batch([encoder.conversation(TALK)], 0))[0]


@pytest.mark.parametrize(
    ("kind", "lora", "message"),
    [
        (
            "apart",
            {"targets": ("q_prj",)},
            r"no layer of LlamaForCausalLM is called 'q_prj'. "
            r"Nearest is 'q_proj'",
        ),
        (
            "apart",
            {"targets": ("q_proj", "attn")},
            r"is called 'attn'. There are down_proj, "
            r"embed_tokens, gate_proj",
        ),
        (
            "gpt2",
            {"targets": ("q_proj",)},
            r"no layer of GPT2LMHeadModel is called 'q_proj'. "
            r"Nearest is 'c_proj'",
        ),
        ("apart", {"targets": ("lm_head",)}, r"'lm_head' is the output layer.*lora = false"),
        ("apart", {"targets": ("q_proj", "lm_head")}, r"'lm_head' is the output layer"),
        (
            "tied",
            {"targets": ("embed_tokens", "q_proj")},
            r"'embed_tokens' is also the output "
            r"layer of this model \(tied",
        ),
        ("gpt2", {"targets": ("wte",)}, r"'wte' is also the output layer"),
        (
            "apart",
            {"targets": ("mlp",)},
            r"'model.layers.0.mlp' is a LlamaMLP, which takes no "
            r"adapter",
        ),
        ("apart", {"targets": ("norm",)}, r"is a LlamaRMSNorm, which takes no adapter"),
        ("experts", {"targets": ("gate_up_proj",)}, r"is called 'gate_up_proj'"),
        (
            "apart",
            {"targets": ("embed_tokens",), "last_layers": 1},
            r"in no numbered layer, so lora.last_layers = 1 leaves it out",
        ),
    ],
)
def test_a_target_without_effect_is_refused_before_training(folder_of, kind, lora, message):
    with pytest.raises(ModelError, match=message):
        new_role(opened(folder_of(kind)), "policy", LoraConfig(**lora), seed=0)


def test_a_reward_models_adapter_may_stand_on_tied_embeddings(folder_of, tmp_path):
    """Its head reads the states alone, so the output layer's part in a merge changes no score."""
    loaded = opened(folder_of("tied"))
    lora = LoraConfig(rank=4, targets=("embed_tokens", "q_proj"))
    role = moved(new_role(loaded, "reward", lora, seed=0, head=new_head(loaded, zero=False)))
    with torch.no_grad():
        (score,) = role.scores(make_batch([encoder_of(loaded).conversation(TALK)], 0)).tolist()
    save_trained(role, loaded, tmp_path / "model", kind="reward")
    assert (
        export_model(str(tmp_path / "model"), tmp_path / "out", dtype="float32")["difference"]
        < 1e-3
    )
    reward = ClassifierReward.load(ClassifierConfig(source=str(tmp_path / "out")))
    assert reward.score_conversations([TALK])[0].value == pytest.approx(score, abs=1e-3)
    with pytest.raises(ModelError, match="is the output layer"):
        new_role(
            loaded,
            "other",
            LoraConfig(targets=("lm_head",)),
            seed=0,
            head=new_head(loaded, zero=False),
        )


def test_names_are_checked_on_a_model_that_has_adapters_already(folder_of):
    loaded = opened(folder_of("apart"))
    new_role(loaded, "reward", LoraConfig(targets=("q_proj",)), seed=0)
    new_role(loaded, "policy", LoraConfig(targets=("q_proj", "v_proj")), seed=0)
    with pytest.raises(ModelError, match="Nearest is 'v_proj'"):
        new_role(loaded, "value", LoraConfig(targets=("v_prj",)), seed=0)


@pytest.mark.parametrize("kind", ["plain", "rslora", "dora", "last_layers"])
@pytest.mark.parametrize(
    ("model", "targets"),
    [
        ("gpt2", "all-linear"),
        ("gpt2", "attention"),
        ("gpt2", ("wpe", "c_fc")),
        ("apart", ("embed_tokens", "q_proj")),
        ("tied", "all-linear"),
        ("latent", "attention"),
        ("experts", "all-linear"),
    ],
)
def test_trained_targets_sample_and_are_exported(folder_of, tmp_path, model, targets, kind):
    if kind == "last_layers" and {"wpe", "embed_tokens"} & {*targets}:
        pytest.skip("an embedding is in no numbered layer")
    loaded = opened(folder_of(model))
    encoder, how = (
        encoder_of(loaded),
        {} if kind == "plain" else {kind: 1 if kind == "last_layers" else True},
    )
    policy = moved(
        new_role(loaded, "policy", LoraConfig(rank=4, alpha=8.0, targets=targets, **how), seed=0),
    )
    trained = logprobs(policy, encoder)
    assert (trained - logprobs(Role(loaded.model), encoder)).abs().max() > 1e-2, (
        "the adapter does nothing"
    )

    engine = local_engine(policy, loaded)
    # the adapters are off now, as they are after a pass of the reference
    logprobs(Role(loaded.model), encoder)
    (group,) = engine.generate(
        [Prompt(TALK[:1])],
        Sampling(temperature=1.0, max_new_tokens=8),
        num_samples=2,
    )
    for rollout in group.rollouts:
        batch = make_batch([encoder.rollout(rollout.prompt_ids, rollout.response_ids)], 0)
        with torch.no_grad():
            torch.testing.assert_close(
                policy.logprobs(batch)[0],
                torch.tensor(rollout.logprobs),
                atol=2e-4,
                rtol=0,
            )

    save_trained(policy, loaded, tmp_path / "policy", kind="policy")
    export_model(str(tmp_path / "policy"), tmp_path / "out", dtype="float32")
    read = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out",
        dtype=torch.float32,
    ).eval()
    torch.testing.assert_close(logprobs(Role(read), encoder), trained, atol=2e-4, rtol=0)


def test_weights_of_experts_without_an_adapter_are_named(folder_of, caplog):
    once.cache_clear()
    with caplog.at_level(logging.WARNING, logger="tether"):
        new_role(opened(folder_of("experts")), "policy", LoraConfig(), seed=0)
    assert "get no adapter" in caplog.text
