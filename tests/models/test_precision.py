"""A model in bfloat16 is the one that transformers itself loads in bfloat16: the same tensors, the
same log-probabilities.

The measure of a difference is what bfloat16 costs transformers itself, against the same weights in
float32.
"""

import pytest
import torch
import transformers
from safetensors.torch import load_file

from tether.cli.tools.export import export_model
from tether.core.errors import ModelError
from tether.core.types import Prompt, Sampling, user
from tether.data.batches import make_batch
from tether.data.chat import Encoded
from tether.models.heads import ScalarHead
from tether.models.loading import load_model, plain_attention, with_dtype_of_base
from tether.models.precision import cast
from tether.models.tiny import tiny_tokenizer
from tether.models.trunk import Role
from tether.runner.assembly.models import open_model
from tether.runner.assembly.roles import local_engine, new_role
from tether.settings.model import LoraConfig, ModelConfig

SIZES = {
    **{
        "vocab_size": 261,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
    },
    **{"num_key_value_heads": 2, "max_position_embeddings": 4096, "initializer_range": 0.1},
    **{"eos_token_id": 1, "pad_token_id": 0, "bos_token_id": None},
}
EXPERTS = {"moe_intermediate_size": 32, "num_experts_per_tok": 2}
ROUTED = {
    **EXPERTS,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
STRETCHED = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
LATENT = {
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
}
KINDS = {
    "llama": ("Llama", {}),
    "llama3": (
        "Llama",
        {"rope_parameters": {**STRETCHED, "original_max_position_embeddings": 1024}},
    ),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "gemma2": ("Gemma2", {"head_dim": 16, "sliding_window": 64}),
    "gemma3": ("Gemma3Text", {"head_dim": 16, "sliding_window": 64}),
    "mistral": ("Mistral", {"sliding_window": 64}),
    "phi3": ("Phi3", {}),
    "olmo2": ("Olmo2", {}),
    "qwen3_moe": ("Qwen3Moe", {**EXPERTS, "head_dim": 16, "num_experts": 8}),
    "glm4_moe": ("Glm4Moe", {**ROUTED, "head_dim": 16}),
    "deepseek_v3": ("DeepseekV3", {**ROUTED, **LATENT, "num_key_value_heads": 4}),
}
FAST = ["llama", "glm4_moe"]
EVERY = [pytest.param(kind, marks=() if kind in FAST else pytest.mark.slow) for kind in KINDS]
BIAS = "e_score_correction_bias"


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    made = {}

    def make(kind):
        if kind not in made:
            family, changes = KINDS[kind]
            config = getattr(transformers, f"{family}Config")(**{**SIZES, **changes})
            torch.manual_seed(0)
            model = transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
            for name, tensor in [*model.named_buffers(), *model.named_parameters()]:
                if name.endswith(BIAS):  # values that bfloat16 cannot tell apart
                    tensor.data = 6.9 + 0.01 * torch.randn(tensor.shape)
            made[kind] = tmp_path_factory.mktemp(kind)
            model.save_pretrained(made[kind])
            tiny_tokenizer().save_pretrained(made[kind])
        return made[kind]

    return make


def theirs(folder, dtype=torch.bfloat16):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


def tensors(model):
    return {
        name: t
        for name, t in [*model.named_parameters(), *model.named_buffers()]
        if t.is_floating_point()
    }


def assert_same_tensors(mine, other):
    assert mine.keys() == other.keys()
    for name, tensor in mine.items():
        assert tensor.dtype == other[name].dtype, name
        assert torch.equal(tensor, other[name]), name


@torch.no_grad()
def logprobs(model, ids):
    row = torch.tensor([ids])
    return (
        model(input_ids=row)
        .logits[0, :-1]
        .float()
        .log_softmax(-1)
        .gather(1, row[0, 1:, None])[:, 0]
    )


def text(length, seed=0):
    return tuple(
        torch.randint(5, 200, (length,), generator=torch.Generator().manual_seed(seed)).tolist(),
    )


def off(a, b):
    """Mean distance in nats at the last tenth of the places, where a wrong frequency weighs
    most.
    """
    return float((a - b)[-len(a) // 10 :].abs().mean())


@pytest.mark.parametrize("kind", EVERY)
def test_tensors_are_those_of_the_library_to_the_bit(folder_of, kind):
    expected = tensors(theirs(folder_of(kind)))
    for how in ({}, {"cpu_kernels": False}, {"attention": "eager"}):
        loaded = open_model(ModelConfig(source=str(folder_of(kind)), dtype="bfloat16", **how))
        assert_same_tensors(tensors(loaded.model), expected)
    assert any(t.dtype == torch.float32 for t in expected.values()), (
        "nothing to keep in float32: the test proves nothing"
    )


@pytest.mark.parametrize("kind", EVERY)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_cast_gives_what_the_library_loads_in_that_type(folder_of, kind, dtype):
    start = load_model(ModelConfig(source=str(folder_of(kind)), dtype="bfloat16")).model
    assert_same_tensors(tensors(cast(start, dtype)), tensors(theirs(folder_of(kind), dtype)))


@pytest.mark.parametrize("kind", EVERY)
@torch.no_grad()
def test_late_tokens_are_computed_as_well_as_by_the_library(folder_of, kind):
    """Alone, beside others in a row, under an adapter that does nothing yet, and as a reward
    model's states.
    """
    ids = text(1500 if kind in FAST else 4000)
    exact, rounded = (
        logprobs(theirs(folder_of(kind), torch.float32), ids),
        logprobs(theirs(folder_of(kind)), ids),
    )
    noise = off(rounded, exact)
    loaded = open_model(ModelConfig(source=str(folder_of(kind)), dtype="bfloat16"))
    row, others = (
        Encoded(ids, (False, *(True,) * (len(ids) - 1))),
        [Encoded(text(50, s), (False, *(True,) * 49)) for s in (1, 2)],
    )
    alone = Role(loaded.model).logprobs(make_batch([row], 0))[0].float()
    batch = make_batch([others[0], row, others[1]], 0, capacity=len(ids) + 100)
    packed = Role(loaded.model).logprobs(batch)[0].float()[batch.sequence == 1]
    adapted = (
        new_role(loaded, "policy", LoraConfig(), seed=0).logprobs(make_batch([row], 0))[0].float()
    )
    for values in (alone, packed, adapted):
        assert off(values, exact) < 1.5 * noise + 1e-3


@pytest.mark.parametrize("kind", FAST)
@torch.no_grad()
def test_scores_and_samples_of_long_texts_are_the_librarys(folder_of, kind):
    loaded, ids = open_model(ModelConfig(source=str(folder_of(kind)), dtype="bfloat16")), text(1500)
    role = Role(loaded.model, head=ScalarHead(64, outputs=32))
    role.head.linear.weight.normal_(generator=torch.Generator().manual_seed(1))
    row = Encoded(ids, (False, *(True,) * (len(ids) - 1)))
    states = [
        theirs(folder_of(kind), dtype)
        .get_decoder()(torch.tensor([ids]))
        .last_hidden_state[0, -1]
        .float()
        for dtype in (torch.float32, torch.bfloat16)
    ]
    exact, rounded = (role.head(state) for state in states)
    gap, noise = (
        (scores - exact).abs().mean() for scores in (role.scores(make_batch([row], 0))[0], rounded)
    )
    assert gap < 1.5 * noise + 1e-3

    prompt = Prompt((user(loaded.tokenizer.decode(ids[:1200])),))
    sampling = Sampling(temperature=1.0, max_new_tokens=32)
    (group,) = local_engine(Role(loaded.model), loaded).generate([prompt], sampling, num_samples=4)
    gaps, noise = [], []
    for rollout in group.rollouts:
        whole, count = rollout.prompt_ids + rollout.response_ids, len(rollout.response_ids)
        exact, rounded = (
            logprobs(theirs(folder_of(kind), dtype), whole)[-count:]
            for dtype in (torch.float32, torch.bfloat16)
        )
        gaps.append((torch.tensor(rollout.logprobs) - exact).abs())
        noise.append((rounded - exact).abs())
    assert float(torch.cat(gaps).mean()) < 1.5 * float(torch.cat(noise).mean()) + 1e-3


@pytest.mark.parametrize("dtype", ["auto", "float32", "float16"])
def test_an_export_holds_the_routers_bias_to_the_bit(folder_of, tmp_path, monkeypatch, dtype):
    monkeypatch.setenv("TETHER_CPU_DTYPE", "bfloat16")
    measured = export_model(str(folder_of("glm4_moe")), tmp_path / "out", dtype=dtype)
    kept, written = (
        {
            name: tensor
            for name, tensor in load_file(folder / "model.safetensors").items()
            if name.endswith(BIAS)
        }
        for folder in (folder_of("glm4_moe"), tmp_path / "out")
    )
    assert kept and kept.keys() == written.keys()
    assert all(
        t.dtype == torch.float32 and torch.equal(t, kept[name]) for name, t in written.items()
    )
    if dtype == "float32":
        assert measured["difference"] < 1e-3


def test_an_attention_that_the_library_lacks_is_refused_and_never_the_default(folder_of):
    folder = str(folder_of("gemma2"))
    with pytest.raises(ModelError, match=r"Gemma2ForCausalLM. Take 'auto'"):
        load_model(ModelConfig(source=folder, attention="sdpa"))
    model = load_model(ModelConfig(source=folder)).model
    assert plain_attention("auto", torch.device("cuda"), model) == "eager"


def test_an_adapter_and_its_base_change_type_together(folder_of):
    loaded = load_model(ModelConfig(source=str(folder_of("llama")), dtype="bfloat16"))
    role = new_role(loaded, "policy", LoraConfig(targets="attention"), seed=0)
    cast(role.model, torch.float32)
    assert {t.dtype for t in tensors(role.model).values()} == {torch.float32}
    cast(role.model, torch.bfloat16)
    with_dtype_of_base(role.model, "policy")
    wide = {name for name, t in tensors(role.model).items() if t.dtype != torch.bfloat16}
    assert wide and all(name.endswith("inv_freq") for name in wide)
