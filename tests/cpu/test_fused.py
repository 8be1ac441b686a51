"""Fused norms and gated layers against the modules they replace, in float64."""

import copy

import pytest
import torch
from torch import nn
from transformers import SeedOssConfig
from transformers.models.bamba.modeling_bamba import BambaRMSNormGated
from transformers.models.cohere.modeling_cohere import CohereLayerNorm
from transformers.models.gemma.modeling_gemma import GemmaMLP, GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm
from transformers.models.seed_oss.modeling_seed_oss import SeedOssMLP

from tether.cpu import kernels
from tether.cpu.fused import fuse
from tether.models.config import LoraConfig
from tether.models.loading import add_adapter
from tether.models.tiny import tiny_model

pytestmark = pytest.mark.skipif(kernels.library() is None, reason="needs a C compiler")
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 1e-2}


def config(**changes):
    from transformers import LlamaConfig

    return LlamaConfig(**{"hidden_size": 40, "num_attention_heads": 4, "intermediate_size": 300, **changes})


def drawn(module, seed=0):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return module.requires_grad_(False)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("make", [lambda: LlamaRMSNorm(40, 1e-3), lambda: Qwen3RMSNorm(40, 1e-5), lambda: LlamaMLP(config())])
def test_values_and_gradients(make, dtype):
    exact, module = drawn(make()).double(), drawn(make()).to(dtype)
    exact.load_state_dict({name: value.double() for name, value in module.state_dict().items()})
    fused = fuse(copy.deepcopy(module))
    assert type(fused) is not type(module) and isinstance(fused, type(module))
    assert list(fused.state_dict()) == list(module.state_dict())
    generator = torch.Generator().manual_seed(1)
    x = (3 * torch.randn(2, 9, 40, generator=generator)).to(dtype).requires_grad_(True)
    upstream = torch.randn(2, 9, 40, generator=generator).to(dtype)
    wide = x.detach().double().requires_grad_(True)
    found, expected = fused(x), exact(wide)
    pairs = [
        (found, expected),
        (torch.autograd.grad(found, x, upstream)[0], torch.autograd.grad(expected, wide, upstream.double())[0]),
    ]
    for ours, theirs in pairs:
        assert ours.dtype == dtype
        assert (ours.double() - theirs).norm() <= TOLERANCE[dtype] * theirs.norm()


def test_extreme_gates_stay_finite():
    a = torch.tensor([-1e4, -90.0, -1.0, 0.0, 1.0, 90.0, 1e4]).repeat(1, 40)
    b, grad = torch.ones_like(a), torch.ones_like(a)
    wide = a.double().requires_grad_(True)
    torch.testing.assert_close(kernels.gate(a, b).double(), nn.functional.silu(wide), rtol=1e-5, atol=1e-6)
    expected = torch.autograd.grad(nn.functional.silu(wide).sum(), wide)[0]
    torch.testing.assert_close(kernels.gate_back(a, b, grad)[0].double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "module",
    [
        GemmaRMSNorm(40),  # 1 + weight
        CohereLayerNorm(40),  # takes the mean away
        BambaRMSNormGated(40, 40),  # has a second argument
        GemmaMLP(config(hidden_act="gelu_pytorch_tanh")),  # spelled alike, and another function
        SeedOssMLP(SeedOssConfig(hidden_size=40, intermediate_size=60, num_attention_heads=4, head_dim=10)),  # drops out
    ],
    ids=lambda m: type(m).__name__,
)
def test_a_module_that_computes_something_else_stays_what_it_is(module):
    own = type(module)
    assert type(fuse(module)) is own


def test_a_trained_weight_gets_its_gradient():
    norm = fuse(drawn(LlamaRMSNorm(40)))
    norm.weight.requires_grad_(True)
    x = torch.randn(5, 40)
    norm(x).sum().backward()
    torch.testing.assert_close(norm.weight.grad, (x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()).sum(0))


def test_adapters_inside_a_gated_layer_learn_the_same():
    ids, grads = torch.arange(24).view(2, 12), []
    for change in (nn.Module.double, nn.Module.float, fuse):
        base = change(tiny_model(0).requires_grad_(False).eval())
        model = add_adapter(base, "policy", LoraConfig(rank=4, targets="all-linear"), seed=1).to(base.dtype)
        parameters = [p for name, p in model.named_parameters() if "lora" in name]
        for parameter in drawn(nn.ParameterList(parameters), 2):
            parameter.requires_grad_(True)
        loss = model(input_ids=ids, use_cache=False).logits.square().mean()
        grads.append(torch.autograd.grad(loss, parameters))
    assert any(type(m).__mro__[1].__name__ == "_FusedGated" for m in model.modules())
    for exact, plain, ours in zip(*grads, strict=True):  # some gradients are ill-conditioned, for torch's own float32 as well
        assert (ours.double() - exact).norm() <= max(5e-5 * exact.norm(), (plain.double() - exact).norm())
