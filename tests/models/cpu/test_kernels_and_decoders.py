"""The engine's rearranged weights and its kernels against plain arithmetic in double precision."""

import math
import subprocess
import sys

import pytest
import torch
import transformers
from scipy import stats
from torch.nn.functional import rms_norm, silu

from tether.core.errors import ModelError
from tether.core.types import Prompt, Sampling, user
from tether.data.chat import ChatEncoder
from tether.models.cpu import kernels
from tether.models.cpu.llama import LlamaDecoder
from tether.models.cpu.products import Panels, Product, dithered
from tether.models.loading import add_adapter
from tether.models.tiny import tiny_model, tiny_tokenizer
from tether.models.trunk import Role
from tether.rollout.cache import attend_to_slots
from tether.rollout.decoding import TreeDecoder, engine_decoder
from tether.rollout.local import LocalEngine
from tether.rollout.sampling import check_distributions, sample_tokens
from tether.settings.model import LoraConfig

needs_kernels = pytest.mark.skipif(kernels.library() is None, reason="needs a C compiler")
PROMPTS = [
    Prompt((user(text),), str(n))
    for n, text in enumerate(["a", "what is it?", "tell me a much longer story", "no"])
]


def attention_by_hand(query, keys, values, lengths, scale, window, softcap, sinks):
    """One row, one head, one place at a time, in double precision."""
    rows, heads, _, dim = query.shape
    group = heads // keys.shape[1]
    out = torch.zeros(rows, 1, heads, dim, dtype=torch.float64)
    for row in range(rows):
        for head in range(heads):
            end = int(lengths[row]) + 1
            places = range(max(0, end - window) if window else 0, end)
            scores = [
                float(query[row, head, 0].double() @ keys[row, head // group, t].double()) * scale
                for t in places
            ]
            scores = [softcap * math.tanh(s / softcap) for s in scores] if softcap else scores
            weights = [math.exp(s) for s in scores]
            total = sum(weights) + (math.exp(float(sinks[head])) if sinks is not None else 0.0)
            for t, weight in zip(places, weights, strict=True):
                out[row, 0, head] += weight / total * values[row, head // group, t].double()
    return out


CASES = [
    (torch.float32, 3, 2, 16, None, None),
    (torch.float32, 1, 4, 24, 5, None),
    (torch.bfloat16, 3, 3, 64, None, None),
    (torch.bfloat16, 2, 1, 96, 9, 2.0),
    (torch.bfloat16, 2, 2, 40, None, 5.0),
    (torch.float32, 2, 2, 128, None, None),
    (torch.bfloat16, 2, 7, 64, None, None),
    (torch.float32, 1, 9, 80, 4, None),
]


@pytest.mark.parametrize(("dtype", "kv_heads", "group", "dim", "window", "softcap"), CASES)
@pytest.mark.parametrize("how", ["kernel", "torch", "sinks"])
def test_decoding_attention(dtype, kv_heads, group, dim, window, softcap, how):
    generator = torch.Generator().manual_seed(1)
    slots, rows, capacity = 7, 5, 30
    keys, values = (
        torch.randn(slots, kv_heads, capacity, dim, generator=generator).to(dtype) for _ in range(2)
    )
    # As a model hands them over: transposed views of (rows, 1, heads, dim), and of one fused
    # projection.
    fused = (
        torch.randn(rows, 1, kv_heads * (group + 2), dim, generator=generator)
        .to(dtype)
        .transpose(1, 2)
    )
    query, new_keys, new_values = fused.split([kv_heads * group, kv_heads, kv_heads], 1)
    lengths = torch.tensor([0, 29, 3, 17, 8])
    sinks = torch.randn(kv_heads * group, generator=generator) if how == "sinks" else None
    expected_keys, expected_values = keys.clone(), values.clone()
    for row, length in enumerate(lengths):
        expected_keys[row, :, length], expected_values[row, :, length] = (
            new_keys[row, :, 0],
            new_values[row, :, 0],
        )
    expected = attention_by_hand(
        query,
        expected_keys,
        expected_values,
        lengths,
        0.2,
        window,
        softcap,
        sinks,
    )
    settings = {"scale": 0.2, "window": window, "softcap": softcap}
    if how == "kernel":
        if kernels.library() is None:
            pytest.skip("needs a C compiler")
        out = kernels.decode(query, new_keys, new_values, (keys, values), lengths, **settings)
    else:
        out = attend_to_slots(
            query,
            new_keys,
            new_values,
            (keys, values),
            lengths,
            30,
            sinks=sinks,
            **settings,
        )
    assert torch.equal(keys, expected_keys) and torch.equal(values, expected_values)
    torch.testing.assert_close(
        out.double(),
        expected,
        atol=2e-6 if dtype == torch.float32 else 2e-2,
        rtol=1e-2,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("outputs", "inputs"),
    [(7, 2), (48, 64), (100, 30), (960, 576), (6000, 8)],
)
@pytest.mark.parametrize("biased", [True, False])
def test_products_with_panels(dtype, outputs, inputs, biased):
    if not Panels.fit(torch.zeros(2, 2, dtype=dtype)):
        pytest.skip("needs AVX2; for bfloat16 a processor without a matrix unit")
    generator = torch.Generator().manual_seed(outputs)
    weight = torch.randn(outputs, inputs, generator=generator).to(dtype)
    bias = torch.randn(outputs, generator=generator).to(dtype) if biased else None
    panels = Panels(weight, bias)
    states = torch.randn(37, inputs, generator=generator).to(dtype)
    whole = panels(states)
    expected = states.double() @ weight.double().T + (0 if bias is None else bias.double())
    close = 1e-2 if dtype == torch.bfloat16 else 5e-5  # sums of 576 products, one after another
    torch.testing.assert_close(
        whole.double(),
        expected,
        atol=close * inputs**0.5 / 8,
        rtol=2**-8 if close > 1e-3 else 1e-6,
    )
    for rows in (*range(18), 24):  # to the bit, whatever stands beside a row
        assert torch.equal(panels(states[:rows]), whole[:rows])
    assert torch.equal(panels(states.T.contiguous().T.view(1, 37, inputs)), whole[None])


def drawn(*shape, dtype, seed=0):
    return (3 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))).to(dtype)


CLOSE = {torch.float32: 1e-6, torch.bfloat16: 1e-2}


@needs_kernels
@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("dim", [40, 300])
def test_norms_and_gates_of_the_decoder(dtype, dim):
    residual, delta, weight = (drawn(9, dim, dtype=dtype, seed=n) for n in range(3))
    weight, both = weight[0].contiguous(), drawn(9, 2 * dim, dtype=dtype, seed=3)
    total = residual + delta
    added = residual.clone()
    a, b = both.double().chunk(2, 1)
    for found, exact in (
        (
            kernels.add_norm(residual.clone(), None, weight, 1e-3),
            rms_norm(residual.double(), (dim,), weight.double(), 1e-3),
        ),
        (
            kernels.add_norm(added, delta, weight, 1e-3),
            rms_norm(total.double(), (dim,), weight.double(), 1e-3),
        ),
        (added, total.double()),
        (kernels.gate(both), silu(a) * b),
    ):
        assert found.dtype == dtype
        assert (found.double() - exact).norm() <= CLOSE[dtype] * exact.norm()


@needs_kernels
def test_extreme_gates_stay_finite():
    a = torch.tensor([-1e4, -90.0, -1.0, 0.0, 1.0, 90.0, 1e4]).repeat(2, 40)
    gated = kernels.gate(torch.cat([a, torch.ones_like(a)], 1))
    torch.testing.assert_close(gated.double(), silu(a.double()), rtol=1e-5, atol=1e-6)


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [5, 256, 1000])
def test_the_sampling_kernel_is_inverse_cdf(dtype, vocab):
    generator = torch.Generator().manual_seed(vocab)
    logits = (4 * torch.randn(64, vocab, generator=generator)).to(dtype)
    uniforms = torch.rand(64, generator=generator, dtype=torch.float64)
    tokens, logprobs = kernels.draw_tokens(logits, uniforms, 0.7)
    exact = (logits.double() / 0.7).log_softmax(-1)
    cumulative = exact.exp().cumsum(-1)
    upper = cumulative.gather(-1, tokens[:, None])[:, 0]
    lower = upper - exact.exp().gather(-1, tokens[:, None])[:, 0]
    assert bool(((lower - 1e-5 <= uniforms) & (uniforms <= upper + 1e-5)).all())
    torch.testing.assert_close(
        logprobs.double(),
        exact.gather(-1, tokens[:, None])[:, 0],
        atol=1e-5,
        rtol=1e-5,
    )


@needs_kernels
def test_the_kernel_and_torch_draw_the_same_tokens(monkeypatch):
    logits, uniforms = torch.randn(300, 3000), torch.rand(300, dtype=torch.float64)
    tokens, logprobs = sample_tokens(logits, uniforms, Sampling())
    monkeypatch.setattr(kernels, "library", lambda: None)
    slow_tokens, slow_logprobs = sample_tokens(logits, uniforms, Sampling())
    assert torch.equal(tokens, slow_tokens)
    torch.testing.assert_close(logprobs, slow_logprobs, atol=1e-5, rtol=1e-5)


def adapted(dtype=torch.float32, size=0.02, seed=0):
    model = add_adapter(tiny_model(seed).to(dtype), "policy", LoraConfig(rank=4, alpha=8), seed=3)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(size * torch.randn(parameter.shape, generator=generator))
    return model


DECODERS = [TreeDecoder, pytest.param(LlamaDecoder, marks=needs_kernels)]


@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.parametrize("adapter", ["policy", None])
def test_merged_weights_compute_what_the_role_computes(adapter, decoder):
    role = Role(adapted(), adapter)
    weights = decoder(role)
    assert len(weights.products) > 4
    ids = torch.arange(24).view(2, 12)
    role.activate()
    with torch.no_grad():
        for product in weights.products:
            product.refresh()
        expected = role.decoder(input_ids=ids).last_hidden_state
        ours, _ = weights.prefill(ids, [])
        torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(
            role.logits(ours, weights.head),
            role.logits(expected),
            atol=1e-4,
            rtol=1e-4,
        )
    other = Role(role.model, None if adapter else "policy")
    other.activate()
    with torch.no_grad():  # the routing of the learner's adapters does not reach the engine
        assert torch.equal(ours, weights.prefill(ids, [])[0])


FAMILIES = {
    "llama": (
        transformers.LlamaConfig,
        transformers.LlamaForCausalLM,
        {"attention_bias": True, "rope_theta": 100.0},
    ),
    "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM, {"sliding_window": 7}),
    "qwen2": (
        transformers.Qwen2Config,
        transformers.Qwen2ForCausalLM,
        {"tie_word_embeddings": True},
    ),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM, {"head_dim": 24}),
    "gemma2": (
        transformers.Gemma2Config,
        transformers.Gemma2ForCausalLM,
        {"head_dim": 16, "attn_logit_softcapping": 3.0},
    ),
    "gpt2": (
        transformers.GPT2Config,
        transformers.GPT2LMHeadModel,
        {"n_embd": 64, "n_head": 4, "n_layer": 3, "n_positions": 99},
    ),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_decodes_what_transformers_does(family):
    config, model, options = FAMILIES[family]
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 99}
    sizes = {} if family == "gpt2" else {**sizes, **heads}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        built = model(
            config(
                vocab_size=261,
                initializer_range=0.2,
                pad_token_id=0,
                bos_token_id=1,
                **sizes,
                **options,
            ),
        ).eval()
        for name, parameter in built.named_parameters():
            if "norm" in name or "bias" in name:
                torch.nn.init.normal_(parameter, mean=1.0, std=0.3)
    plain = kernels.library() is not None and family in ("llama", "mistral", "qwen2", "qwen3")
    assert isinstance(engine_decoder(Role(built)), LlamaDecoder if plain else TreeDecoder)
    ours = LocalEngine(Role(built), ChatEncoder(tiny_tokenizer(), (1,)), max_rows=3)
    for group in ours.generate(PROMPTS, Sampling(max_new_tokens=24, temperature=0.0)):
        ids = torch.tensor([group.rollouts[0].prompt_ids])
        expected = built.generate(
            ids,
            max_new_tokens=24,
            do_sample=False,
            eos_token_id=1,
            pad_token_id=0,
            use_cache=False,
        )
        assert list(group.rollouts[0].response_ids) == expected[0, ids.shape[1] :].tolist()


@needs_kernels
def test_a_model_that_only_looks_plain_is_not_taken_for_it():
    """A layer that does more than its family's leaves the states different, and the engine walks
    its modules instead.
    """
    model = tiny_model(0)
    assert isinstance(engine_decoder(Role(model)), LlamaDecoder)
    model.model.layers[1].mlp.register_forward_hook(lambda module, args, output: 1.1 * output)
    assert isinstance(engine_decoder(Role(model)), TreeDecoder)


@pytest.mark.parametrize("full", [False, True])
def test_an_update_reaches_the_engine_at_the_next_call(full):
    role = Role(tiny_model(0)) if full else Role(adapted(), "policy")
    ours = LocalEngine(role, ChatEncoder(tiny_tokenizer(), (1,)))
    sampling = Sampling(max_new_tokens=16)
    before = ours.generate(PROMPTS, sampling, seed=3)
    assert before == ours.generate(PROMPTS, sampling, seed=3)
    with torch.no_grad():
        for parameter in role.parameters():
            parameter.mul_(1.3)
    after = ours.generate(PROMPTS, sampling, seed=3)
    fresh = LocalEngine(role, ours.encoder).generate(PROMPTS, sampling, seed=3)
    assert after == fresh and after != before


def test_an_adapter_far_below_the_last_place_of_bfloat16_still_reaches_the_engine():
    """Merged to nearest it would vanish: the slope of the engine's change against the adapter's own
    would be near 0.
    """
    torch.manual_seed(0)
    base = torch.nn.Linear(512, 256, bias=False).bfloat16()
    config = transformers.PretrainedConfig()
    holder = torch.nn.Module()
    holder.linear, holder.config = base, config
    from peft import LoraConfig as PeftLora
    from peft import inject_adapter_in_model

    inject_adapter_in_model(
        PeftLora(r=8, lora_alpha=8, target_modules=["linear"]),
        holder,
        "policy",
    )
    layer = holder.linear
    with torch.no_grad():
        layer.lora_B["policy"].weight.normal_(std=2e-4)
        base.weight.uniform_(2**-5, 2**-4).mul_(torch.randn_like(base.weight).sign())
    product = Product([layer], "policy")
    product.refresh()
    states = torch.randn(2000, 512).bfloat16()
    delta = (
        layer.lora_B["policy"].weight.double() @ layer.lora_A["policy"].weight.double()
    ).detach()
    assert float(delta.abs().max()) < 2**-13  # half a unit in the last place of every weight here
    exact = states.double() @ delta.T
    with torch.no_grad():
        change = product(states).double() - states.double() @ base.weight.double().T
        nearest = (
            states.double()
            @ ((base.weight.double() + delta).bfloat16().double() - base.weight.double()).T
        )
    slope = stats.linregress(exact.flatten().numpy(), change.flatten().numpy())
    assert slope.slope == pytest.approx(1.0, abs=0.15)
    assert float(nearest.abs().max()) == 0.0


def test_dither_keeps_the_mean_and_what_is_exact():
    exact = torch.randn(64, 64).bfloat16()
    assert torch.equal(dithered(exact.float(), torch.bfloat16), exact)
    third = torch.full((400, 400), 1.0 + 2**-7 / 3)
    rounded = dithered(third, torch.bfloat16).double()
    assert set(rounded.unique().tolist()) == {1.0, 1.0 + 2**-7}
    assert float(rounded.mean()) == pytest.approx(1.0 + 2**-7 / 3, abs=3e-5)
    assert torch.equal(dithered(third, torch.bfloat16), dithered(third, torch.bfloat16))


@pytest.mark.parametrize("how", ["kernels", "torch"])
def test_bfloat16_engine_samples_from_the_role(monkeypatch, how):
    """Reported log-probabilities against a pass of the whole sequence through the role, adapter
    applied and not merged.
    """
    if how == "torch":
        monkeypatch.setattr(kernels, "library", lambda: None)
    role = Role(adapted(torch.bfloat16, size=0.05), "policy")
    ours = LocalEngine(role, ChatEncoder(tiny_tokenizer(), (1,)))
    groups = ours.generate(PROMPTS * 4, Sampling(max_new_tokens=20), num_samples=2, seed=2)
    exact = Role(adapted(torch.float32, size=0.05), "policy")
    reference = Role(exact.model)
    errors, changes = [], []
    for rollout in (r for g in groups for r in g.rollouts):
        ids = torch.tensor([rollout.prompt_ids + rollout.response_ids])
        logprobs = []
        for one in (exact, reference):
            one.activate()
            with torch.no_grad():
                logits = (
                    one.causal_model(input_ids=ids)
                    .logits[0, len(rollout.prompt_ids) - 1 : -1]
                    .log_softmax(-1)
                )
            logprobs.append(logits.gather(-1, torch.tensor(rollout.response_ids)[:, None])[:, 0])
        errors += (torch.tensor(rollout.logprobs) - logprobs[0]).tolist()
        changes += (logprobs[1] - logprobs[0]).tolist()
    assert abs(sum(errors) / len(errors)) < 0.01
    assert torch.tensor(errors).abs().mean() < 0.2 * torch.tensor(changes).abs().mean()


def test_a_common_prefix_of_all_prompts_is_computed_once(monkeypatch):
    ours = LocalEngine(
        Role(tiny_model(0)),
        ChatEncoder(tiny_tokenizer(), (1,), system_prompt="be kind " * 8),
    )
    seen, prefill = [], ours.decoder.prefill

    def counted(ids, prefix, *lengths):
        seen.append(ids.numel())
        return prefill(ids, prefix, *lengths)

    monkeypatch.setattr(ours.decoder, "prefill", counted)
    groups = ours.generate(PROMPTS, Sampling(max_new_tokens=2))
    prompts = [g.rollouts[0].prompt_ids for g in groups]
    shared = next(i for i, tokens in enumerate(zip(*prompts, strict=False)) if len(set(tokens)) > 1)
    assert shared > 40 and seen[0] == shared
    assert seen[1] == len(prompts) * (max(map(len, prompts)) - shared)


@pytest.mark.audit
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_panels_refuse_what_a_linear_layer_refuses(dtype):
    """States of another type or width would be read from beyond the matrix."""
    other = torch.bfloat16 if dtype == torch.float32 else torch.float32
    weight = torch.randn(64, 64).to(dtype)
    if not Panels.fit(weight):
        pytest.skip("no kernel for this type here")
    panels = Panels(weight, None)
    for states in (
        torch.zeros(3, 64, dtype=other),
        torch.zeros(3, 32, dtype=dtype),
        torch.zeros(3, 128, dtype=dtype),
    ):
        with pytest.raises(RuntimeError):
            torch.nn.functional.linear(states, weight)
        with pytest.raises(RuntimeError, match="cannot be multiplied"):
            panels(states)
    assert panels(torch.zeros(3, 64, dtype=dtype)).abs().max() == 0


OUT_OF_MEMORY = """
import resource, sys, torch
from tether.models.cpu import kernels
kernels.library()
many = 8_000_000  # keys, all of them the same one
tiles = kernels.Ragged(torch.tensor([0, many]), torch.zeros(many, dtype=torch.long), torch.zeros(many))
query, key = torch.ones(1, 1, 1, 1, 1), torch.ones(1, 1, 1)
slots = torch.zeros(1, 1, many, 1), torch.zeros(1, 1, many, 1)
heads = torch.ones(1, 4, 1, 1)
calls = {
    "attend": lambda: kernels.attend(query, key, key, tiles, 1.0),
    "attend_back": lambda: kernels.attend_back(query, key, key, tiles, 1.0, query),
    "decode": lambda: kernels.decode(heads, heads[:, :1], heads[:, :1], slots, torch.tensor([many - 1]), scale=1.0),
}
in_use = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (in_use + {"decode": 40}.get(sys.argv[1], 180) * 2**20, resource.RLIM_INFINITY))
if sys.argv[1] == "attend":
    resource.setrlimit(resource.RLIMIT_AS, (in_use + 100 * 2**20, resource.RLIM_INFINITY))
try:
    calls[sys.argv[1]]()
except MemoryError as error:
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    print(error)
    calls[sys.argv[1]]()  # with memory it goes on
"""


@needs_kernels
@pytest.mark.audit
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc and limits the address space")
@pytest.mark.parametrize(
    "kernel",
    ["attend_back", *(pytest.param(name, marks=pytest.mark.slow) for name in ("attend", "decode"))],
)
def test_a_kernel_without_memory_is_an_error_and_no_crash(kernel):
    done = subprocess.run(
        [sys.executable, "-c", OUT_OF_MEMORY, kernel],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.startswith(f"attention ({kernel}) found no memory to work in")


BROKEN = {
    "one NaN": lambda row: row.index_fill(0, torch.tensor([300]), torch.nan),
    "a negative NaN": lambda row: row.index_fill(0, torch.tensor([1]), -torch.nan),
    "all NaN": lambda row: torch.full_like(row, torch.nan),
    "all minus infinity": lambda row: torch.full_like(row, -torch.inf),
    "one infinity": lambda row: row.index_fill(0, torch.tensor([511]), torch.inf),
}
WAYS = {
    "plain": Sampling(),
    "tempered": Sampling(temperature=0.3),
    "greedy": Sampling(temperature=0.0),
    "truncated": Sampling(top_p=0.9),
    "top-k": Sampling(top_k=5),
}


@pytest.mark.audit
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("broken", BROKEN)
def test_logits_that_are_no_distribution_are_an_error(broken, way, dtype):
    logits = torch.randn(5, 700, generator=torch.Generator().manual_seed(0)).to(dtype)
    uniforms = torch.linspace(0.05, 0.95, 5, dtype=torch.float64)
    logits[:, 7] = -torch.inf  # what a model forbids is no fault
    tokens, logprobs = sample_tokens(logits, uniforms, WAYS[way])
    assert logprobs.isfinite().all() and (tokens < 700).all()
    logits[3] = BROKEN[broken](logits[3])
    tokens, logprobs = sample_tokens(logits, uniforms, WAYS[way])
    assert (tokens < 700).all()
    with pytest.raises(
        ModelError,
        match=(
            r"NaN or infinite in 1 of 5 responses: .* Go back to an "
            r"earlier checkpoint"
        ),
    ):
        check_distributions(logprobs.tolist())
