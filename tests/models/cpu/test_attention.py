"""Grouped attention in tiles against softmax(QK)V in float64, and whole models against
transformers' eager attention.
"""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tether.data.batches import make_batch
from tether.data.chat import Encoded
from tether.models.cpu import kernels
from tether.models.cpu.attention import TILE, Tiles, grouped_attention
from tether.models.loading import add_adapter
from tether.models.trunk import GROUPED, Role, additive_mask
from tether.settings.model import LoraConfig


def plain(query, key, value, visible, scale):
    groups = query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(groups, 1) for tensor in (key, value))
    scores = (query @ key.transpose(-1, -2) * scale).masked_fill(~visible, -torch.inf)
    return (scores.softmax(-1) @ value).transpose(1, 2)


def tree(prompt: int, answers: tuple[int, ...]) -> torch.Tensor:
    """Which token of a prompt with several answers sees which, written token by token."""
    owner = [0] * prompt + [n for n, length in enumerate(answers, 1) for _ in range(length)]
    size = len(owner)
    return torch.tensor(
        [[k <= q and owner[k] in (0, owner[q]) for k in range(size)] for q in range(size)],
    )[None, None]


def causal(batch: int, time: int) -> torch.Tensor:
    return torch.ones(time, time, dtype=torch.bool).tril().expand(batch, 1, time, time)


MASKS = {
    "shorter than a tile": causal(2, 5),
    "one tile": causal(1, TILE),
    "causal": causal(2, 3 * TILE + 7),
    "tree": tree(11, (40, 3, 90)),
    "several answers a tile": tree(70, (9,) * 12),
}


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("with_tiles", [True, False])
@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 2), (3, 3), (4, 1)])
def test_values_and_gradients(name, with_tiles, heads, kv_heads):
    visible = MASKS[name]
    batch, _, time, _ = visible.shape
    generator = torch.Generator().manual_seed(1)
    tensors = [
        torch.randn(
            batch,
            h,
            time,
            16,
            generator=generator,
            dtype=torch.float64,
            requires_grad=True,
        )
        for h in (heads, kv_heads, kv_heads)
    ]
    upstream = torch.randn(batch, time, heads, 16, generator=generator, dtype=torch.float64)
    mask = additive_mask(visible, torch.float64)
    assert not hasattr(mask, "tiles")
    if with_tiles:  # those of a layer before
        grouped_attention(torch.nn.Identity(), *tensors, mask, scaling=0.1)
        assert hasattr(mask, "tiles")
    out, _ = grouped_attention(torch.nn.Identity(), *tensors, mask, scaling=0.3)
    expected = plain(*tensors, visible, 0.3)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    ours = torch.autograd.grad(out, tensors, upstream)
    for got, wanted in zip(ours, torch.autograd.grad(expected, tensors, upstream), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-11, atol=1e-11)


TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1.2e-2}


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(6, 2, 64), (3, 3, 16), (5, 1, 96)])
@pytest.mark.parametrize("how", ["kernel", "kernel in pieces", "torch"])
def test_kernel_and_torch_in_the_types_of_training(
    monkeypatch,
    name,
    dtype,
    heads,
    kv_heads,
    dim,
    how,
):
    if how == "torch":
        monkeypatch.setattr(kernels, "library", lambda: None)
    elif kernels.library() is None:
        pytest.skip("needs a C compiler")
    monkeypatch.setattr(kernels, "SHARES", 1 if "pieces" in how else 2**24)
    visible = MASKS[name]
    batch, _, time, _ = visible.shape
    generator = torch.Generator().manual_seed(1)
    shapes = [(batch, h, time, dim) for h in (heads, kv_heads, kv_heads)]
    tensors = [
        torch.randn(shape, generator=generator).to(dtype).requires_grad_(True) for shape in shapes
    ]
    upstream = torch.randn(batch, time, heads, dim, generator=generator).to(dtype)
    out, _ = grouped_attention(
        torch.nn.Identity(),
        *tensors,
        additive_mask(visible, dtype),
        scaling=0.12,
    )
    exact = [t.detach().double().requires_grad_(True) for t in tensors]
    expected = plain(*exact, visible, 0.12)
    found = out, *torch.autograd.grad(out, tensors, upstream, retain_graph=True)
    for ours, theirs in zip(
        found,
        (expected, *torch.autograd.grad(expected, exact, upstream.double())),
        strict=True,
    ):
        assert ours.dtype == dtype
        assert (ours.double() - theirs).norm() <= TOLERANCE[dtype] * theirs.norm()
    again = torch.autograd.grad(out, tensors, upstream)
    assert all(torch.equal(one, other) for one, other in zip(found[1:], again, strict=True))


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_gradients_of_unseen_tokens_are_exactly_zero(dtype):
    """The last token of an answer, seen by itself alone and not judged: 1e-41 instead of 0 would
    cost an Intel core a microcode assist in every product of the backward pass.
    """
    visible = MASKS["several answers a tile"]
    time = visible.shape[-1]
    last = [70 + 9 * n + 8 for n in range(12)]
    query, key, value = (
        torch.randn(1, h, time, 64, dtype=dtype, requires_grad=True) for h in (6, 2, 2)
    )
    upstream = torch.randn(1, time, 6, 64, dtype=dtype)
    upstream[:, last] = 0
    out, _ = grouped_attention(
        torch.nn.Identity(),
        query,
        key,
        value,
        additive_mask(visible, dtype),
        scaling=0.125,
    )
    for gradient in torch.autograd.grad(out, (query, key, value), upstream):
        assert torch.count_nonzero(gradient[:, :, last]) == 0
        assert not ((gradient != 0) & (gradient.abs() < torch.finfo(torch.float32).tiny)).any()


@pytest.mark.parametrize("place", ["query", "key", "value"])
def test_a_nan_spreads_within_its_head_alone(place):
    tensors = {name: torch.randn(1, 2, 40, 16) for name in ("query", "key", "value")}
    tensors[place][0, 1, 20, 3] = torch.nan
    out, _ = grouped_attention(
        torch.nn.Identity(),
        *tensors.values(),
        additive_mask(causal(1, 40), torch.float32),
    )
    broken = out.isnan().any(-1)[0, :, 1]  # of the second head, which holds it
    assert bool(broken[20]) and not bool(out[0, :, 0].isnan().any())
    if place != "query":
        assert bool(broken[20:].all())


def test_a_mask_for_all_rows_of_a_batch():
    tensors = [torch.randn(3, 2, 40, 16) for _ in range(3)]
    mask = additive_mask(causal(1, 40), torch.float32)
    out, _ = grouped_attention(torch.nn.Identity(), *tensors, mask, scaling=0.25)
    torch.testing.assert_close(out, plain(*tensors, causal(3, 40), 0.25), rtol=1e-4, atol=1e-5)


def test_no_mask_is_causal_and_keys_may_reach_further_back():
    query, key = torch.randn(1, 2, 3, 4), torch.randn(1, 2, 8, 4)
    out, _ = grouped_attention(torch.nn.Identity(), query, key, key)
    visible = torch.ones(3, 8, dtype=torch.bool).tril(5)
    torch.testing.assert_close(out, plain(query, key, key, visible, 0.5))


def test_tiles_leave_out_what_nobody_sees(monkeypatch):
    """Eight answers of 48 to a prompt of 40: a tile sees the prompt, at most two other answers'
    parts and its own.
    """
    mask = additive_mask(tree(40, (48,) * 8), torch.float32)
    tiles = Tiles(mask).ragged
    if kernels.library() is not None:
        assert len(tiles.mask) < 0.25 * 424**2
    monkeypatch.setattr(kernels, "library", lambda: None)
    tiles = Tiles(mask)
    computed = sum(len(index) * keys.shape[1] * TILE for index, keys, _ in tiles.buckets)
    assert computed < 0.4 * 424**2
    assert sum(len(index) for index, _, _ in tiles.buckets) == -(-424 // TILE)


def test_refuses_what_it_does_not_compute():
    query = torch.randn(1, 1, 2, 4)
    with pytest.raises(NotImplementedError, match="soft cap"):
        grouped_attention(torch.nn.Identity(), query, query, query, softcap=30.0)
    for value in (torch.randn(1, 1, 2, 3), query.bfloat16()):
        with pytest.raises(NotImplementedError, match="one shape and type"):
            grouped_attention(torch.nn.Identity(), query, query, value)


def model_of(seed: int, attention: str, layers: int = 3):
    torch.manual_seed(seed)
    sizes = {
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": layers,
        "vocab_size": 60,
    }
    config = LlamaConfig(
        **sizes,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=512,
    )
    config._attn_implementation = attention
    model = LlamaForCausalLM(config).eval().requires_grad_(False)
    return add_adapter(model, "policy", LoraConfig(rank=4, alpha=8), seed=seed)


def encoded(prompt: int, length: int, seed: int) -> Encoded:
    generator = torch.Generator().manual_seed(seed)
    answer = torch.randint(5, 60, (length,), generator=generator).tolist()
    return Encoded((*range(prompt), *answer), (False,) * prompt + (True,) * length)


BATCHES = {
    "rows": {},
    "packed": {"capacity": 200},
    "documents": {"document_tokens": 300},
}


def gradients(model, batch):
    role = Role(model, "policy")
    parameters = role.parameters()
    generator = torch.Generator().manual_seed(9)
    for parameter in parameters:
        parameter.requires_grad_(True)
        # a fresh adapter's second matrix is zero, and the first would have no gradient
        with torch.no_grad():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    logprobs, _ = role.logprobs(batch)
    return logprobs.detach(), torch.autograd.grad(logprobs.square().mean(), parameters)


@pytest.mark.parametrize("name", BATCHES)
def test_a_model_learns_the_same_as_with_eager_attention(name):
    sequences = [encoded(20, length, length) for length in (30, 44, 7, 60)]
    batch = make_batch(sequences, 0, **BATCHES[name])
    expected, expected_gradients = gradients(model_of(3, "eager"), batch)
    logprobs, found = gradients(model_of(3, GROUPED), batch)
    torch.testing.assert_close(logprobs, expected, rtol=1e-5, atol=1e-5)
    for ours, theirs in zip(found, expected_gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("attention", ["eager", GROUPED])
def test_recomputing_keeps_less_and_learns_the_same(attention):
    batch = make_batch([encoded(20, length, length) for length in (30, 44, 7, 60)], 0)
    results, kept = [], []
    for recompute in (False, True):
        model = model_of(3, attention, layers=6)
        model.get_base_model().recompute = recompute
        size = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t, size=size: size.append(t.nbytes) or t,
            lambda t: t,
        ):
            Role(model, "policy").hidden(batch)
        kept.append(sum(size))
        results.append(gradients(model, batch))
    (expected, expected_gradients), (logprobs, found) = results
    assert torch.equal(logprobs, expected)
    for ours, theirs in zip(found, expected_gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)
    assert kept[1] < kept[0] / 2


def test_recomputing_runs_under_the_adapter_of_its_own_forward_pass():
    """Another role is routed through the same layers between the forward and the backward pass."""
    batch = make_batch([encoded(20, 30, 1)], 0)
    model = add_adapter(model_of(3, "eager"), "value", LoraConfig(rank=4, alpha=8), seed=4)
    model.get_base_model().recompute = True
    expected = gradients(model, batch)[1]
    policy, value = Role(model, "policy"), Role(model, "value")
    logprobs, _ = policy.logprobs(batch)
    value.hidden(batch)
    for ours, theirs in zip(
        torch.autograd.grad(logprobs.square().mean(), policy.parameters()),
        expected,
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)
